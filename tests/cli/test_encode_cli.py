"""`krnet encode` on the command line, and the commands that read its folder."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from test_signals import end, start
from typer.testing import CliRunner

import krnet
from krnet.cli.app import app
from maps import relu_maps


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A model, features that it was not fitted to, and their labels."""
    folder = tmp_path_factory.mktemp("files")
    features, labels = relu_maps(900, (4, 6, 6))
    krnet.record(features[:300], recorder="pca", step=0.1, out=folder / "model.krn")
    np.save(folder / "features.npy", features[300:].numpy())
    np.save(folder / "labels.npy", labels[300:].numpy())
    return folder


def run(*words: object, code: int = 0) -> tuple[str, str]:
    """What a command prints on stdout and on stderr."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def encode(files: Path, out: Path, *more: object, code: int = 0) -> tuple[str, str]:
    words = ("encode", "--model", files / "model.krn", files / "features.npy", "-o", out, "--part-samples", 256)
    return run(*words, *more, code=code)


def test_the_folder_is_described_checked_and_replayed(files, tmp_path):
    out, features = tmp_path / "out", np.load(files / "features.npy")
    printed, _ = encode(files, out, "--labels", files / "labels.npy")
    assert "600 of 4×6×6, 5 classes" in printed and "3; the worst is part-" in printed
    info = json.loads(run("info", out, "--json")[0])
    assert info["num_parts"] == 3 and info["path"] == str(out) and abs(info["r2"] - info["model_r2"]) < 0.05
    report = json.loads(run("verify", out, "--against", files / "features.npy", "--json")[0])
    assert report["ok"] and report["same_features"] and abs(report["r2"] - info["r2"]) < 1e-6
    assert "coded with" in run("verify", out)[0]
    run("replay", out, "--ids", "590:", "-o", tmp_path / "x.npy", "--labels-out", tmp_path / "y.npy", "-q")
    assert np.array_equal(np.load(tmp_path / "x.npy"), krnet.open(out)[590:].numpy())
    assert np.array_equal(np.load(tmp_path / "y.npy"), np.load(files / "labels.npy")[590:])
    assert np.square(np.load(tmp_path / "x.npy") - features[590:]).mean() < 0.1 * features.var()


def test_several_files_follow_each_other(files, tmp_path):
    once, twice = (
        json.loads(encode(files, tmp_path / "a", "--json")[0]),
        encode(files, tmp_path / "b", files / "features.npy", "--json"),
    )
    assert json.loads(twice[0])["num_samples"] == 2 * once["num_samples"]


def test_samples_that_do_not_fit_are_named_on_stderr(files, tmp_path):
    features = np.load(files / "features.npy")
    features[[5, 9]] = np.random.default_rng(0).random((2, *features.shape[1:])) * features.max()
    np.save(tmp_path / "odd.npy", features)
    _, messages = run("encode", "--model", files / "model.krn", tmp_path / "odd.npy", "-o", tmp_path / "out", "-q")
    assert "warning: " in messages and "does not fit 2 of 600 samples (IDs 5, 9)" in messages
    assert "2 samples, R2" in run("info", tmp_path / "out")[0]


def test_a_folder_that_is_there_is_left_alone_without_resume(files, tmp_path):
    encode(files, tmp_path / "out", "-q")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.krn")}
    _, message = encode(files, tmp_path / "out", "-q", code=1)
    assert "error: " in message and "--resume" in message
    encode(files, tmp_path / "out", "-q", "--resume")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_model_and_the_features_are_not_overwritten(files, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.krn").write_bytes((files / "model.krn").read_bytes())
    words = ("encode", "--model", tmp_path / "out" / "model.krn", files / "features.npy", "-o", tmp_path / "out")
    assert "is read, and lies in the folder" in run(*words, code=1)[1]


def test_a_stopped_encode_keeps_its_parts_and_goes_on_to_the_same_folder(tmp_path):
    features = torch.rand(25_000, 16, generator=torch.Generator().manual_seed(0)).cumsum(1)
    krnet.record(features[:500], recorder="pca", step=0.1, out=tmp_path / "model.krn")
    np.save(tmp_path / "f.npy", features.numpy())
    words = ("encode", "--model", tmp_path / "model.krn", tmp_path / "f.npy", "--part-samples", 256, "-q", "-o")
    process = start(*words, tmp_path / "a")
    process.until(lambda: list((tmp_path / "a").glob("part-*.krn")))
    message = end(process, signal.SIGTERM)
    assert "parts are kept in" in message and "--resume" in message and "Traceback" not in message
    assert not (tmp_path / "a" / "manifest.json").exists()
    run(*words, tmp_path / "a", "--resume")
    run(*words, tmp_path / "b")
    assert [path.read_bytes() for path in sorted((tmp_path / "a").iterdir())] == [
        path.read_bytes() for path in sorted((tmp_path / "b").iterdir())
    ]
