"""The recorder that keeps the features themselves: nothing is lost in float32, and it asks for no network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import krnet
from forge import rewrite_metadata
from krnet.cli import app as cli
from krnet.errors import (
    ChecksumError,
    InputError,
    NotARecordingError,
    SettingError,
    TensorShapeError,
    TruncatedRecordingError,
)
from maps import relu_maps, signed_maps


def run(*arguments: object):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def raw(tmp_path):
    """features, labels and the file recorded from them."""
    features, labels = relu_maps(30, (4, 5, 3))
    path = tmp_path / "raw.krn"
    krnet.record(features, labels + 10, recorder="raw", out=path)
    return features, labels + 10, path


# ------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("shape", [(4, 5, 3), (7,), (), (2, 3, 4, 5)], ids=str)
def test_float32_replays_are_the_features_exactly(tmp_path, shape):
    features = torch.randn(20, *shape) * 1e3
    krnet.record(features, recorder="raw", out=tmp_path / "x.krn")
    recording = krnet.open(tmp_path / "x.krn")
    assert recording.shape == shape
    assert torch.equal(recording[:], features)
    assert torch.equal(recording[[7, 3, -1]], features[[7, 3, -1]])
    assert torch.equal(recording.replay(torch.tensor([5]), "fast"), features[5:6])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "uint8"])
def test_features_of_other_types_come_back_as_float32_of_the_same_value(tmp_path, dtype):
    features = (torch.rand(9, 3, 2) * 100).to(getattr(torch, dtype))
    recording = krnet.record(features, recorder="raw", out=tmp_path / "x.krn")
    assert recording[:].dtype == torch.float32
    assert torch.equal(recording[:], features.float())


def test_float16_rounds_to_the_nearest_and_takes_half_the_bytes(raw, tmp_path):
    features, labels, path = raw
    half = krnet.record(features, labels, recorder="raw", dtype="float16", out=tmp_path / "half.krn")
    assert torch.equal(half[:], features.half().float()) and not torch.equal(half[:], features)
    values = features.numel()
    assert path.stat().st_size - half.nbytes == pytest.approx(2 * values, abs=200)
    assert 0 < half.info()["mse"] < 1e-6 and 0.99999 < half.info()["r2"] < 1


def test_features_of_float16_stay_so_unless_asked_otherwise():
    features = torch.rand(20, 3, 4).half()
    for budget in (None, "1MB"):
        kept = krnet.record(features, recorder="raw", budget=budget)
        assert kept.settings == {"dtype": "float16"} and torch.equal(kept[:], features.float())
    assert krnet.record(features, recorder="raw", dtype="float32").settings == {"dtype": "float32"}
    assert krnet.record(features.bfloat16(), recorder="raw").settings == {"dtype": "float32"}


def test_float16_is_refused_where_it_would_overflow(tmp_path):
    features = signed_maps(20)[0]
    features[3, 2, 1, 0] = -70000.0
    with pytest.raises(SettingError, match=r"float16, which ends at 65504; the values run from -70000 to .*float32"):
        krnet.record(features, recorder="raw", dtype="float16", out=tmp_path / "x.krn")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block_bytes", [1, 100, 3 * 48, 10 * 48])  # of samples of 48 bytes
def test_features_that_are_stored_in_blocks_are_whole(monkeypatch, tmp_path, block_bytes):
    features, ids = torch.randn(10, 3, 4), torch.tensor([7, 1, 2, 3, 3, 0, 9])
    whole = krnet.record(features, recorder="raw")
    for name in ("krnet.io.stored_rows", "krnet.io.archive"):
        monkeypatch.setattr(f"{name}.RESIDENT_BYTES", 0)
    monkeypatch.setattr("krnet.io.stored_rows.BLOCK_BYTES", block_bytes)
    recording = krnet.record(features, recorder="raw", out=tmp_path / "x.krn")
    assert torch.equal(recording[:], features) and torch.equal(recording[ids], features[ids])
    assert torch.equal(krnet.open(whole.path)[ids], features[ids])  # of one block, as older files are
    assert krnet.verify(recording.path, features)["same_features"]


def test_one_sample_reads_and_checks_its_own_block_alone(monkeypatch, tmp_path):
    features = torch.randn(10, 3, 4)
    for name in ("krnet.io.stored_rows", "krnet.io.archive"):
        monkeypatch.setattr(f"{name}.RESIDENT_BYTES", 0)
    monkeypatch.setattr("krnet.io.stored_rows.BLOCK_BYTES", 2 * 48)
    path = krnet.record(features, recorder="raw", out=tmp_path / "x.krn").path
    content = bytearray(path.read_bytes())
    content[content.rindex(features[6].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    recording = krnet.open(path)
    assert torch.equal(recording[4], features[4])
    for index in (6, 7):
        with pytest.raises(ChecksumError):
            recording[index]
    content[content.rindex(features[4].numpy().tobytes()[4:]) + 4] ^= 1  # changed after its block was checked
    path.write_bytes(content)
    with pytest.raises(ChecksumError):
        recording[4]
    path.write_bytes(content[:-300])
    with pytest.raises((TruncatedRecordingError, ChecksumError)):
        recording[9]


def test_a_budget_counts_the_checksums_of_the_blocks(monkeypatch, tmp_path):
    for name in ("krnet.io.stored_rows", "krnet.io.archive"):
        monkeypatch.setattr(f"{name}.RESIDENT_BYTES", 0)
    monkeypatch.setattr("krnet.io.stored_rows.BLOCK_BYTES", 48)
    features = torch.randn(200, 3, 4)
    size = krnet.record(features, recorder="raw", dtype="float32").nbytes
    for budget in (size - 1, size, size + 500, size + 3000):
        made = krnet.record(features, recorder="raw", budget=budget)
        assert made.nbytes <= budget


# ------------------------------------------------------------------ what it says of itself


def test_nothing_is_lost_and_the_file_says_so(raw):
    features, _, path = raw
    info = krnet.open(path).info()
    assert (info["mse"], info["r2"], info["settings"]) == (0.0, 1.0, {"dtype": "float32"})
    assert info["bytes"] > info["feature_bytes"] == features.numel() * 4
    assert info["zero_ratio"] == pytest.approx((features == 0).double().mean().item())
    report = krnet.verify(path, features)
    assert report["probe_error"] == 0 and report["r2"] == 1.0


def test_info_tells_of_no_fit_and_of_no_loss(raw):
    shown = run("info", raw[2]).stdout
    rows = {line[:12].strip(): line[12:].strip() for line in shown.splitlines()}
    assert rows["recorder"] == "raw: dtype float32"
    assert rows["fit"] == "none needed"
    assert rows["R2"] == "1.0000"
    assert "times larger" in rows["file"]
    recording = krnet.open(raw[2])
    recording.device = torch.device("cuda")  # where a network's would be measured now
    assert recording.info()["fast_extra_mse"] == 0


@pytest.mark.parametrize("dtype", ["float8", "bfloat16", "", None, 16, ["float32"], {}], ids=repr)
def test_an_unknown_type_in_the_file_is_refused_by_name(raw, dtype):
    rewrite_metadata(raw[2], lambda own: own["settings"].update(dtype=dtype))
    recording = krnet.open(raw[2])
    with pytest.raises(NotARecordingError, match=r"raw\.krn: values of type .*; expected one of float32, float16"):
        recording[0]


def test_a_type_that_is_not_that_of_the_values_is_refused(raw):
    rewrite_metadata(raw[2], lambda own: own["settings"].update(dtype="float16"))
    with pytest.raises(TensorShapeError, match="values"):
        krnet.open(raw[2])[0]


def test_a_shape_that_is_not_that_of_the_values_is_refused(raw):
    rewrite_metadata(raw[2], lambda own: own.update(shape=[4, 3, 5]))
    with pytest.raises(TensorShapeError, match="values"):
        krnet.open(raw[2])[0]


# ------------------------------------------------------------------ what makes no sense


@pytest.mark.parametrize("dtype", ["float64", "half", 16, ["float32"]], ids=repr)
def test_a_type_it_cannot_keep_is_refused(dtype):
    with pytest.raises(SettingError, match=r"dtype is .*; expected one of float32, float16"):
        krnet.record(torch.rand(5, 3), recorder="raw", dtype=dtype)


def test_settings_of_another_recorder_are_refused():
    with pytest.raises(SettingError, match=r"d0 is given, a setting of recorder .*paper.* and not of raw"):
        krnet.record(torch.rand(5, 3), recorder="raw", d0=8)
    with pytest.raises(SettingError, match="dtype is given, a setting of recorder raw or zstd and not of krnet"):
        krnet.record(torch.rand(5, 3), dtype="float16")


def test_a_recording_to_start_from_is_refused(raw, tmp_path):
    features, labels, path = raw
    with pytest.raises(InputError, match="start is given, and recorder raw has no use for it"):
        krnet.record(features, labels, recorder="raw", out=tmp_path / "new.krn", start=path)
    assert not (tmp_path / "new.krn").exists()


def test_a_krnet_does_not_start_from_raw_features(raw):
    features, labels, path = raw
    for recorder in ("krnet", "paper"):
        with pytest.raises(InputError, match=rf"by raw; .* by {recorder} to start from"):
            krnet.record(features, labels, recorder=recorder, start=path, iterations=1)


# ------------------------------------------------------------------ on the command line


def test_the_command_line_refuses_start_with_exit_1_and_writes_nothing(raw, tmp_path):
    np.save(tmp_path / "f.npy", raw[0].numpy())
    result = run("record", tmp_path / "f.npy", "-o", tmp_path / "x.krn", "--recorder", "raw", "--start", raw[2])
    assert result.exit_code == 1 and "error: --start is given" in result.stderr
    assert not (tmp_path / "x.krn").exists()
