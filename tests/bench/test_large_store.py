"""benchmarks/large_store.py and what it measures with: commands in processes of their own (benchmarks/jobs.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import krnet
from krnet.io import ledger

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import jobs
import large_store

TAKE_50_MB = "b = bytes(50 << 20); b = bytearray(b); import time; time.sleep(0.4); print('done')"


def test_the_memory_of_a_command_and_of_what_it_starts_is_seen():
    alone = [sys.executable, "-S", "-c", TAKE_50_MB]
    found = jobs.run(alone)
    assert found.printed == "done\n" and found.seconds > 0.4
    assert 0 < found.cpu_seconds < found.seconds
    assert 50e6 < found.peak_bytes["largest"] == found.peak_bytes["together"] < 200e6
    both = f"import subprocess, sys; subprocess.run({alone}); " + TAKE_50_MB
    found = jobs.run([sys.executable, "-S", "-c", both])
    assert found.peak_bytes["largest"] < 200e6 and found.peak_bytes["together"] > 100e6


def test_a_command_that_fails_ends_the_benchmark():
    with pytest.raises(SystemExit, match="ended with 3"):
        jobs.run([sys.executable, "-S", "-c", "raise SystemExit(3)"])


def test_digests_tell_files_apart(tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    before = jobs.digests(tmp_path)
    (tmp_path / "a").write_bytes(b"two")
    assert before.keys() == jobs.digests(tmp_path).keys() == {"a"} and before != jobs.digests(tmp_path)
    assert jobs.size_bytes(tmp_path) == 3


@pytest.mark.slow
def test_one_process_and_two_make_the_same_store_and_the_row_says_what_each_stage_took(tmp_path, monkeypatch):
    def random_images(self, count):
        images = torch.randint(
            0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        return images, torch.zeros(count).long()

    monkeypatch.setattr(large_store.zoo.Zoo, "tiny_images", random_images)
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    options = ["--samples", "600", "--fit-samples", "40", "--room", "600", "--part-samples", "256", "--scale", "tiny"]
    options += ["--model", "pca"]
    words = ["large_store.py", *options, "--shard-size", "2MB", "--keep", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", words)
    large_store.main()
    (row,) = ledger.read()
    metrics = row["metrics"]
    assert metrics["equal"] == {"shards": True, "coded": True} and metrics["num_files"]["coded"] == 3 + 2
    stages = {"extract some", "fit", "verify", "loader"}
    assert metrics["stages"].keys() == stages | {
        f"{verb}, {n} processes" for verb in ("extract", "encode") for n in (1, 2)
    }
    assert metrics["bytes"]["shards"] > 600 * 4096 * 4 and 0 < metrics["r2"]["all"] < metrics["r2"]["model"] < 1
    assert 0 < metrics["peak_bytes"] < 4e9

    def refuse(command: list[str], threads: int) -> None:
        raise AssertionError(f"{command} is run again")

    monkeypatch.setattr(jobs, "run", refuse)  # what is done is kept
    large_store.main()
    again = ledger.read()[1]["metrics"]
    assert json.dumps(again["stages"]) == json.dumps(metrics["stages"])
    monkeypatch.setattr(sys, "argv", [*words, "--dtype", "float16"])
    with pytest.raises(SystemExit, match="begun with other settings"):
        large_store.main()


def test_the_loader_passes_over_all_samples(tmp_path):
    krnet.record(torch.rand(70, 4, 3, 3), recorder="raw", out=tmp_path / "a.krn")
    large_store.pass_over(tmp_path / "a.krn")
