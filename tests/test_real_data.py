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
