"""benchmarks/growing.py and appending.py: both end with a ledger row of the files that grew."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from krnet.io import ledger
from maps import relu_maps

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import appending
import growing

OPTIONS = {
    growing: ("growing", ["--first", "2", "--more", "1", "--budget", "20kB"], 3),
    appending: ("appending", ["--samples", "40", "--steps", "2", "--budget", "20kB"], 2),
}


@pytest.mark.parametrize("script", OPTIONS, ids=lambda script: script.__name__)
def test_a_row_has_the_settings_of_the_command_and_the_bytes_of_its_files(script, tmp_path, monkeypatch):
    features, labels = relu_maps(40, (3, 4, 4))
    for name, values in (("features", features), ("labels", labels)):
        np.save(tmp_path / f"{name}.npy", values.numpy())
    recipe, options, num_files = OPTIONS[script]
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    monkeypatch.setattr("sys.argv", [recipe, str(tmp_path), "--recorder", "quantized", *options])
    script.main()
    (row,) = ledger.read()
    assert (row["recipe"], row["class_order"], row["settings"]["budget"]) == (recipe, "lucir1993", 20_000)
    assert not row["settings"].keys() & {"base", "device"}
    assert len(row["bytes"]) == num_files and row["seconds"] > 0
