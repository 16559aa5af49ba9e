"""Recorder images in KRIL and on the command line: every old image, compressed, through F1 or a trunk from a file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_images import MEAN, STD, features_of, make_images, make_trunk
from test_kril import make, run_task
from torch import nn
from typer.testing import CliRunner

import krnet
from krnet import api
from krnet import task_loop as learning
from krnet.bench import rate
from krnet.cli.app import app
from krnet.coding import image_codec as _encoded
from krnet.errors import InputError, SettingError
from krnet.learners.kril import learner as kril
from krnet.nn.fingerprint import fingerprint
from krnet.nn.loaded import read_trunk
from krnet.recorders.images import budget as search
from learning_tools import assert_same_run, settings_for, small_tasks

CPU = torch.device("cpu")
QUICK = {"base_epochs": 1, "epochs": 1}
SET = ["--set", "mean=" + ",".join(map(str, MEAN)), "--set", "std=" + ",".join(map(str, STD))]


def learn(digits, out: Path, **options) -> dict[str, Any]:
    own = {**settings_for("kril"), "recorder": "images", **options.pop("settings", {})}
    return learning.learn("kril", digits, small_tasks(), out=out, settings=own, device="cpu", seed=1, **options)


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A finished run, its folder and result."""
    folder = tmp_path_factory.mktemp("images") / "run"
    return folder, learn(digits, folder)


# ------------------------------------------------------------------ KRIL


@pytest.mark.parametrize(
    ("single", "crop", "codec"),
    [(False, None, "png"), (True, None, "png"), (False, 6, "png"), (True, None, "webp-lossless")],
)
def test_lossless_images_are_replayed_as_the_real_features_in_their_order(digits, tmp_path, single, crop, codec):
    data = digits if crop is None else replace(digits, pad=0, crop=crop)
    learner = make(data, tmp_path, recorder="images", recorder_settings=f"codec={codec}", single=single, **QUICK)
    for task in range(3):
        run_task(learner, task, tmp_path)
        learner.model.eval()
        features, labels = learner.recordings.replay(task)
        ids = torch.cat([learner.context.task_ids(t) for t in range(task + 1)])
        ids = ids[learner.context.train_labels[ids].argsort(stable=True)]
        assert labels.tolist() == learner.context.train_labels[ids].tolist()
        expected = learner.apply(learner.trunk, learner.context.train, ids)
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
        assert sum(learner.storage_bytes().values()) == sum(
            path.stat().st_size for path in learner.recordings.files(task)
        )


def test_without_a_budget_an_image_is_encoded_once(digits, tmp_path, monkeypatch):
    learner = make(digits, tmp_path, recorder="images", **QUICK)
    encoded, right = [], _encoded.encode_image
    monkeypatch.setattr(_encoded, "encode_image", lambda image, config: encoded.append(1) or right(image, config))
    for task in range(3):
        run_task(learner, task, tmp_path)
    assert len(encoded) == len(digits.train.labels)


@pytest.mark.parametrize(("budget", "single"), [(17_000, False), (17_000, True), (60_000, False)])
def test_all_recordings_together_keep_the_budget(digits, tmp_path, monkeypatch, budget, single):
    monkeypatch.setattr(search, "SEARCH_SAMPLES", 24)
    learner = make(digits, tmp_path, recorder="images", budget=budget, single=single, **QUICK)
    for task in range(3):
        run_task(learner, task, tmp_path)
        assert sum(learner.storage_bytes().values()) <= budget
    last = api.open(learner.recordings.files(2)[-1]).settings
    assert (last["codec"] in _encoded.LOSSLESS) == (budget == 60_000)


def test_images_are_as_good_to_learn_from_as_real_features_and_take_less(digits, whole, tmp_path):
    real = learn(digits, tmp_path / "raw", settings={"recorder": "raw"})
    assert abs(real["last"] - whole[1]["last"]) < 0.1
    assert whole[1]["storage_bytes"]["total"] < real["storage_bytes"]["total"] / 5
    assert {"base recording", "later recording"} < whole[1]["storage_bytes"].keys()


def test_interrupted_with_a_recording_just_written_a_run_ends_as_if_nothing_had_happened(
    digits, whole, tmp_path, monkeypatch
):
    right, calls = kril.RecorderFit.result, []

    def stop(*given):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right(*given)

    with monkeypatch.context() as patch:
        patch.setattr(kril.RecorderFit, "result", stop)
        with pytest.raises(KeyboardInterrupt):
            learn(digits, tmp_path / "run")
    resumed = learn(digits, tmp_path / "run", resume=True)
    assert_same_run(resumed, whole[1])


def test_another_quality_is_a_setting_and_an_unknown_one_is_refused(digits, tmp_path):
    learner = make(digits, tmp_path, recorder="images", recorder_settings="codec=webp,quality=30", **QUICK)
    run_task(learner, 0, tmp_path)
    settings = api.open(tmp_path / "base.krn").settings
    assert (settings["codec"], settings["quality"]) == ("webp", 30)
    assert settings["mean"] == list(digits.mean) and settings["std"] == list(digits.std)
    with pytest.raises(SettingError, match="did you mean 'quality'"):
        make(digits, tmp_path, recorder="images", recorder_settings="qualty=30")


# ------------------------------------------------------------------ trunks from files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Features, images, and their trunk in every form that is read."""
    folder = tmp_path_factory.mktemp("files")
    images, trunk = make_images(), make_trunk()
    np.save(folder / "images.npy", images.numpy())
    np.save(folder / "features.npy", features_of(images, trunk).numpy())
    example, batch = (torch.zeros(7, 3, 16, 16),), {0: torch.export.Dim.DYNAMIC}
    torch.export.save(torch.export.export(trunk, example, dynamic_shapes=(batch,)), folder / "free.pt2")
    torch.export.save(torch.export.export(trunk, example), folder / "fixed.pt2")
    torch.jit.script(trunk).save(str(folder / "script.pt"))
    torch.jit.script(make_trunk(seed=1)).save(str(folder / "other.pt"))
    return folder


def krnet_says(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def recorded(files: Path, out: Path, *more: object, trunk: str = "free.pt2") -> Path:
    result = krnet_says(
        "record", files / "features.npy", "-o", out, "--recorder", "images", "--images", files / "images.npy",
        "--trunk", files / trunk, *SET, "--device", "cpu", "--quiet", *more,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize("name", ["free.pt2", "fixed.pt2", "script.pt"])
def test_a_trunk_is_the_same_in_every_form(files, name):
    trunk, images = read_trunk(files / name, CPU), torch.rand(17, 3, 16, 16)
    assert fingerprint(trunk) == fingerprint(make_trunk())
    with torch.no_grad():
        for part in (images, images[:1]):
            torch.testing.assert_close(trunk(part), make_trunk()(part), atol=1e-5, rtol=1e-5)
        with pytest.raises(InputError, match=r"refuses images of shape \(5, 16, 16\).*Give the trunk that made"):
            trunk(torch.rand(7, 5, 16, 16))


def test_the_trunk_of_a_kril_run_makes_the_features_that_its_recordings_hold(digits, whole):
    folder, _ = whole
    trunk = read_trunk(folder, CPU)
    recording = krnet.open(folder / "base.krn", trunk=trunk)
    assert recording[:].shape == (96, *recording.shape)
    assert krnet.verify(folder / "later-2.krn", trunk=trunk)["ok"]
    result = krnet_says("verify", folder / "base.krn", "--trunk", folder, "--device", "cpu")
    assert result.exit_code == 0, result.output


# ------------------------------------------------------------------ on the command line


@pytest.mark.parametrize("name", ["fixed.pt2", "script.pt"])
def test_images_are_recorded_verified_and_replayed_with_a_trunk_from_a_file(files, tmp_path, name):
    path = recorded(files, tmp_path / "x.krn", trunk=name)
    end = ("--trunk", files / "script.pt", "--device", "cpu", "--json")
    report = json.loads(krnet_says("verify", path, "--against", files / "features.npy", *end).stdout)
    assert report["ok"] and report["same_features"] and report["r2"] > 0.9
    assert krnet_says("replay", path, "-o", tmp_path / "r.npy", "--ids", "3:9", "-q", *end).exit_code == 0
    expected = krnet.open(path, trunk=make_trunk())[3:9]
    assert np.allclose(np.load(tmp_path / "r.npy"), expected, atol=1e-5)
    assert krnet_says("info", path).exit_code == 0  # which needs no trunk


def test_a_budget_is_kept_on_the_command_line(files, tmp_path):
    assert recorded(files, tmp_path / "x.krn", "--budget", "14kB").stat().st_size <= 14_000


def test_colours_and_lossless_webp_are_asked_for_on_the_command_line_and_in_bench_rate(files, tmp_path):
    fine = recorded(files, tmp_path / "fine.krn", "--set", "subsampling=444")
    lossless = recorded(files, tmp_path / "lossless.krn", "--set", "codec=webp-lossless")
    assert krnet.open(fine).settings["subsampling"] == 444
    assert krnet.open(lossless).settings["codec"] == "webp-lossless" and krnet.open(lossless).info()["r2"] > 0.99999
    found = json.loads(krnet_says(
        "bench", "rate", files / "features.npy", "-o", tmp_path / "rate", "--budgets", "20kB", "--recorders",
        "images:codec=jpeg:subsampling=444", "--images", files / "images.npy", "--trunk", files / "script.pt", *SET,
        "--device", "cpu", "--json", "-q",
    ).stdout)  # fmt: skip
    assert krnet.open(tmp_path / "rate" / found["points"][0]["file"]).settings["subsampling"] == 444


def test_what_is_missing_or_wrong_is_named(files, tmp_path):
    path = recorded(files, tmp_path / "x.krn")
    features, images, trunk = files / "features.npy", files / "images.npy", files / "script.pt"
    record = ("record", features, "-o", tmp_path / "y.krn", "--device", "cpu", "-q", "--recorder")
    bench = ("bench", "rate", features, "-o", tmp_path / "rate", "--device", "cpu", "-q", "--recorders")
    for arguments, why in (
        (
            ("verify", path, "--against", features),
            "no trunk to make features of them. Open it with .* or --trunk on the command line",
        ),
        (("replay", path, "-o", tmp_path / "r.npy", "-q"), "no trunk .* --trunk on the command line"),
        (("replay", path, "-o", tmp_path / "r.npy", "-q", "--trunk", files / "other.pt"), "features of another trunk"),
        (("replay", path, "-o", tmp_path / "r.npy", "-q", "--trunk", images), "not an archive; expected TorchScript"),
        (("verify", path, "--trunk", tmp_path / "no.pt"), "no such file; expected a trunk"),
        ((*record, "images", "--trunk", trunk, *SET), "images is missing. Give images= .*--images"),
        ((*record, "images", "--images", images, *SET), "trunk is missing. Give .*--trunk"),
        ((*record, "images", "--images", images, "--trunk", trunk), "makes other features.*mean and std"),
        ((*record, "pca", "--images", images), "images is given, and recorder pca has no use for it"),
        ((*bench, "images", "--images", images), "trunk is missing. Give .*--trunk"),
        ((*bench, "pca", "--trunk", trunk), "trunk is given, and none of pca needs it"),
        ((*bench, "pca", "--set", "mean=3"), "unknown setting 'mean'"),
    ):
        result = krnet_says(*arguments)
        assert result.exit_code == 1 and not result.stdout, result.output
        assert re.search(why, result.stderr), result.stderr
    assert not (tmp_path / "y.krn").exists() and not (tmp_path / "r.npy").exists() and not (tmp_path / "rate").exists()


def test_the_images_are_not_overwritten_by_the_recording(files, tmp_path):
    own = tmp_path / "images.npy"
    own.write_bytes((files / "images.npy").read_bytes())
    result = krnet_says(
        "record", files / "features.npy", "-o", own, "--recorder", "images", "--images", own, "--trunk",
        files / "script.pt", "--device", "cpu", "-q",
    )  # fmt: skip
    assert result.exit_code == 1 and own.read_bytes() == (files / "images.npy").read_bytes()


def test_bench_rate_has_images_as_one_more_series_and_makes_its_points_once(files, tmp_path, monkeypatch):
    arguments = (
        "bench", "rate", files / "features.npy", "-o", tmp_path, "--budgets", "14kB,20kB", "--recorders", "images,pca",
        "--images", files / "images.npy", *SET, "--device", "cpu", "--json", "-q", "--trunk",
    )  # fmt: skip
    found = json.loads(krnet_says(*arguments, files / "free.pt2").stdout)
    assert [point["recorder"] for point in found["points"]] == ["images"] * 2 + ["pca"] * 2 and not found["errors"]
    for point in found["points"][:2]:
        assert point["bytes"] <= point["budget"] and not point["over_budget"]
        assert point["r2"] == pytest.approx(krnet.open(tmp_path / point["file"]).info()["r2"], abs=1e-6)
    monkeypatch.setattr(api, "record", lambda *given, **more: pytest.fail("a point was made again"))
    # The same trunk in another form is the same trunk.
    assert json.loads(krnet_says(*arguments, files / "script.pt").stdout)["points"] == found["points"]


def test_images_are_tried_unasked_where_they_are_given():
    assert "images" not in [series.name for series in rate.default_series()]
    assert [series.name for series in rate.default_series({"images", "trunk"})].count("images") == 1


def test_a_module_that_gives_no_maps_is_refused(tmp_path):
    torch.jit.script(nn.Flatten(0)).save(str(tmp_path / "flat.pt"))
    with pytest.raises(InputError, match="expected a feature map of each"):
        read_trunk(tmp_path / "flat.pt", CPU)(torch.rand(4, 3, 2, 2))
