"""benchmarks/restart.py: kills of one of two processes end in a row that says whether the files were the same."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from krnet.io import ledger
from maps import relu_maps

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import restart


@pytest.mark.slow
def test_the_row_names_each_kill_and_whether_files_and_values_were_the_same(tmp_path, monkeypatch):
    maps = relu_maps(40_000, (16, 1, 1))[0]
    data = SimpleNamespace(train=SimpleNamespace(images=torch.zeros(1)))
    monkeypatch.setattr(restart.krnet.data, "load", lambda *_: data)
    monkeypatch.setattr(restart, "load_trunk", lambda device: None)
    monkeypatch.setattr(restart, "run_trunk", lambda *_, **__: maps)
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    monkeypatch.setattr(sys, "argv", ["restart.py", "--kills", "2", "--fit-samples", "500"])
    restart.main()
    (row,) = ledger.read()
    found = row["metrics"]
    assert (row["outcome"], found["equal"], found["num_kills"], found["num_parts"]) == ("ok", True, 2, 157)
    assert [kill["restarted_with"] for kill in found["kills"]] == [1, 3]
    assert all(kill["parts"] < 157 and not kill["manifest"] and kill["same_values"] for kill in found["kills"])
