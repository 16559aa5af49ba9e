"""The recorder that keeps the features themselves: nothing is lost in float32, and it asks for no network."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import krnet
from forge import rewrite_metadata
from krnet.cli import app as cli
from krnet.errors import InputError, NotARecordingError, RecordingError, SettingError, TensorShapeError
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


def test_every_byte_of_the_file_is_counted(raw):
    features, _, path = raw
    info = krnet.open(path).info()
    assert info["bytes"] == os.stat(path).st_size > features.numel() * 4
    assert info["feature_bytes"] == features.numel() * 4


def test_float16_is_refused_where_it_would_overflow(tmp_path):
    features = signed_maps(20)[0]
    features[3, 2, 1, 0] = -70000.0
    with pytest.raises(SettingError, match=r"float16, which ends at 65504; the values run from -70000 to .*float32"):
        krnet.record(features, recorder="raw", dtype="float16", out=tmp_path / "x.krn")
    assert list(tmp_path.iterdir()) == []


def test_features_that_take_several_readings_are_whole(monkeypatch):
    features = torch.randn(10, 3, 4)
    for size in (1, 3 * 48, 10 * 48):  # of a sample's 48 bytes
        monkeypatch.setattr("krnet.recorders.raw.CHUNK_BYTES", size)
        assert torch.equal(krnet.record(features, recorder="raw")[:], features)


# ------------------------------------------------------------------ what it says of itself


def test_labels_info_and_verify_work_as_for_any_recording(raw):
    features, labels, path = raw
    recording = krnet.open(path)
    assert torch.equal(recording.labels, labels)
    info = recording.info()
    assert (info["recorder"], info["num_samples"], info["num_classes"]) == ("raw", 30, 5)
    assert (info["mse"], info["r2"], info["settings"]) == (0.0, 1.0, {"dtype": "float32"})
    assert info["zero_ratio"] == pytest.approx((features == 0).double().mean().item())
    json.dumps(info, allow_nan=False)
    report = krnet.verify(path, features)
    assert report["ok"] and report["same_features"] and report["probe_error"] == 0 and report["r2"] == 1.0


def test_info_tells_of_no_fit_and_of_no_loss_in_fast_replay(raw):
    shown = run("info", raw[2]).stdout
    rows = {line[:12].strip(): line[12:].strip() for line in shown.splitlines()}
    assert rows["recorder"] == "raw: dtype float32"
    assert rows["fit"] == "none needed"
    assert rows["fast replay"] == "the same as exact"
    assert rows["R2"].startswith("1.00000 (MSE 0")
    assert "times larger" in rows["file"]
    recording = krnet.open(raw[2])
    recording.device = torch.device("cuda")  # where a network's would be measured now
    assert recording.info()["fast_extra_mse"] == 0


def test_a_damaged_file_is_noticed(raw):
    damaged = bytearray(raw[2].read_bytes())
    damaged[-500] ^= 1
    raw[2].write_bytes(damaged)
    with pytest.raises(RecordingError):
        krnet.verify(raw[2])


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


@pytest.mark.parametrize("dtype", ["float64", "half", 16, None, ["float32"]], ids=repr)
def test_a_type_it_cannot_keep_is_refused(dtype):
    with pytest.raises(SettingError, match=r"dtype is .*; expected one of float32, float16"):
        krnet.record(torch.rand(5, 3), recorder="raw", dtype=dtype)


def test_settings_of_a_network_are_refused_with_the_nearest_name():
    with pytest.raises(SettingError, match="unknown setting 'd0'"):
        krnet.record(torch.rand(5, 3), recorder="raw", d0=8)
    with pytest.raises(SettingError, match="did you mean 'dtype'"):
        krnet.record(torch.rand(5, 3), recorder="raw", dtyp="float16")
    with pytest.raises(SettingError, match="unknown setting 'dtype'"):
        krnet.record(torch.rand(5, 3), dtype="float16")


@pytest.mark.parametrize("recorder", ["raw", "quantized", "transform", "pca", "pq", "images"])
def test_settings_of_a_fit_are_refused_by_recorders_that_fit_no_network(recorder):
    for name, value in {"gamma": 0.1, "schedule": "paper", "iterations": 5, "time_budget": 1.0, "lr": 0.1}.items():
        with pytest.raises(SettingError, match=f"{name} is given, .* {recorder} fits none; .*autoencoder or krnet"):
            krnet.record(torch.rand(5, 3), recorder=recorder, **{name: value})
    if recorder != "images":
        assert krnet.record(torch.rand(5, 3), recorder=recorder, seed=3, device="cpu", target_r2=0.5).info()["r2"] > 0.5


def test_a_preset_a_head_or_a_recording_to_start_from_is_refused(raw, tmp_path):
    features, labels, path = raw
    cases = {"preset": "cifar100", "head": torch.nn.Identity(), "start": path}
    for name, value in cases.items():
        with pytest.raises(InputError, match=f"{name} is given, and recorder raw has no network"):
            krnet.record(features, labels, recorder="raw", out=tmp_path / "new.krn", **{name: value})
    assert not (tmp_path / "new.krn").exists()


def test_a_krnet_does_not_start_from_raw_features(raw):
    features, labels, path = raw
    with pytest.raises(InputError, match=r"by raw; .* by krnet to start from"):
        krnet.record(features, labels, start=path, iterations=1)


# ------------------------------------------------------------------ on the command line


def test_the_command_line_records_replays_and_verifies(tmp_path):
    features = signed_maps(25)[0].numpy()
    np.save(tmp_path / "f.npy", features)
    np.save(tmp_path / "l.npy", np.arange(25) // 9)
    out = tmp_path / "x.krn"
    made = run(
        "record", tmp_path / "f.npy", "--labels", tmp_path / "l.npy", "-o", out, "--recorder", "raw",
        "--set", "dtype=float16", "--json",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    info = json.loads(made.stdout)
    assert (info["recorder"], info["settings"]) == ("raw", {"dtype": "float16"})
    assert info == json.loads(run("info", out, "--json").stdout)
    replayed = run("replay", out, "--ids", "3,1", "-o", tmp_path / "r.npy", "--labels-out", tmp_path / "y.npy")
    assert replayed.exit_code == 0, replayed.output
    assert np.array_equal(np.load(tmp_path / "r.npy"), features[[3, 1]].astype(np.float16).astype(np.float32))
    verified = json.loads(run("verify", out, "--against", tmp_path / "f.npy", "--json").stdout)
    assert verified["ok"] and verified["same_features"] and math.isclose(verified["mse"], info["mse"])


def test_the_command_line_refuses_start_with_exit_1_and_writes_nothing(raw, tmp_path):
    np.save(tmp_path / "f.npy", raw[0].numpy())
    result = run("record", tmp_path / "f.npy", "-o", tmp_path / "x.krn", "--recorder", "raw", "--start", raw[2])
    assert result.exit_code == 1 and "error: start is given" in result.stderr
    assert not (tmp_path / "x.krn").exists()
