"""CIFAR-100 through the benchmark scripts: skipped, with the reason, where the data are not."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import krnet

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def base(cifar100_dir, tmp_path_factory):
    """A ResNet-32 trained for one short epoch, and its real 64x8x8 maps."""
    out = tmp_path_factory.mktemp("base")
    arguments = ["--data-dir", cifar100_dir.parent, "--epochs", "1", "--limit", "400", "--out", out]
    run("cifar100_base.py", *arguments)
    return out


def run(script, *arguments):
    command = [sys.executable, BENCHMARKS / script, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_250_iterations_explain_real_maps_to_r2_of_at_least_0_4(base):
    features = np.load(base / "features.npy", mmap_mode="r")[:120]
    recording = krnet.record(features, np.load(base / "labels.npy")[:120], iterations=250)
    assert recording.shape == (64, 8, 8)
    assert recording.info()["r2"] >= 0.4
    assert recording.nbytes < features.nbytes / 2.5


@pytest.mark.slow
def test_the_recording_benchmark_measures_the_file_and_appends_its_row(base, tmp_path, monkeypatch):
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    printed = run("cifar100_record.py", base, "--limit", "200", "--iterations", "20", "--kr2", "--set", "gamma=1e-4")
    row = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert row["metrics"]["r2"] == printed["metrics"]["r2"]
    assert row["bytes"] == {"cifar100.krn": row["metrics"]["bytes"]}
    assert row["class_order"] == "lucir1993" and row["settings"]["kr2"] is True
