"""A row of work `record` holds what its recording is, no fit is lost or done twice, and old rows of `rate` count."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import krnet
from krnet import api
from krnet.errors import InputError, SettingError
from krnet.io import ledger
from krnet.reproduce.recipe import read_recipe
from krnet.reproduce.works.base import get_work

if sys.version_info >= (3, 11):
    pass
else:
    pass

ROOT = Path(__file__).parents[2]
RECORD = get_work("record")
PCA = {"features": "digits", "recorder": "pca", "budget": "20kB"}
TRAINED = {"features": "digits", "recorder": "krnet", "budget": "15kB", "iterations": 60}


def recording_of(row, shared):
    """The file whose size the row holds."""
    (name,) = row["bytes"]
    (path,) = (path for path in shared.glob(f"recordings/*/points/{name}") if path.stat().st_size == row["bytes"][name])
    return path


def test_the_numbers_of_a_row_are_those_of_the_definitions(place, digits):
    row = RECORD.perform("test", PCA, 0, place)
    path = recording_of(row, place.shared)
    real = digits.source().read(torch.arange(200)).double()
    replayed = krnet.open(path).replay(torch.arange(200)).double()
    low = real.amin((0, 2, 3))[:, None, None]
    span = real.amax((0, 2, 3))[:, None, None] - low
    span[span == 0] = 1
    wrong, value = (replayed - real) / span, (real - low) / span
    metrics = row["metrics"]
    assert metrics["bytes"] == path.stat().st_size <= 20_000
    assert metrics["mse"] == pytest.approx(wrong.square().mean().item(), rel=1e-4)
    r2 = 1 - wrong.square().sum() / (value - value.mean()).square().sum()
    assert metrics["r2"] == pytest.approx(r2.item(), abs=1e-4)
    right = (digits.head(replayed.float()).argmax(1) == digits.labels).double().mean()
    assert metrics["replay_accuracy"] == pytest.approx(right.item(), abs=1e-9)
    right = (digits.head(real.float()).argmax(1) == digits.labels).double().mean()
    assert metrics["real_accuracy"] == pytest.approx(right.item(), abs=1e-9)
    assert RECORD.value(row) == metrics["r2"] and RECORD.value(row, unit="MSE") == metrics["mse"]
    assert row["settings"]["components"] > 0  # what the budget chose
    assert ledger.read()[-1]["metrics"] == metrics


def test_a_row_matches_its_own_settings_and_no_others(place):
    row = RECORD.perform("test", PCA, 0, place)
    assert RECORD.matches(row, PCA, 0) and RECORD.matches(row, PCA | {"budget": 20_000}, 0)
    assert not RECORD.matches(row, PCA, 1)
    assert not RECORD.matches(row | {"outcome": "FitError"}, PCA, 0)
    others = {"budget": "21kB", "recorder": "transform", "given": {"centroid": -0.5}, "features": "cifar100-base"}
    for name, value in others.items():
        assert not RECORD.matches(row, PCA | {name: value}, 0), name
    embedding = row | {"settings": row["settings"] | {"work": "embed"}}  # it holds the same settings, and other numbers
    assert not RECORD.matches(embedding, PCA, 0)


def test_a_recording_that_is_there_is_not_fitted_again(place, monkeypatch):
    first = RECORD.perform("test", PCA, 0, place)
    monkeypatch.setattr(api, "record", None)
    second = RECORD.perform("test", PCA, 0, replace(place, folder=place.folder.with_name("other")))
    same = ("bytes", "r2", "mse", "replay_accuracy")
    assert [first["metrics"][name] for name in same] == [second["metrics"][name] for name in same]


def test_an_interrupted_fit_goes_on_and_ends_in_the_same_recording(place, tmp_path):
    def stop(progress):
        if progress.unit == "iterations" and progress.done == 30:
            os.kill(os.getpid(), signal.SIGINT)

    whole = RECORD.perform("test", TRAINED, 0, replace(place, shared=tmp_path / "whole"))
    cut = replace(place, shared=tmp_path / "cut", folder=tmp_path / "cut-run")
    with pytest.raises(KeyboardInterrupt):
        RECORD.perform("test", TRAINED, 0, replace(cut, watch=stop))
    spent = json.loads((cut.folder / "effort.json").read_text())
    assert spent["seconds"] > 0
    (cut.folder / "effort.json").write_text(json.dumps({**spent, "commits": ["abc1234"]}))  # an older code began it
    seen = []
    row = RECORD.perform("test", TRAINED, 0, replace(cut, watch=seen.append))
    done = [progress.done for progress in seen if progress.unit == "iterations"]
    assert min(done) > 30 and max(done) == 60
    assert row["metrics"]["r2"] == whole["metrics"]["r2"]
    found, expected = (
        krnet.open(recording_of(r, r_in)) for r, r_in in ((row, cut.shared), (whole, tmp_path / "whole"))
    )
    assert torch.equal(found[:], expected[:])
    curve = row["metrics"]["curve"]  # of both calls
    assert [done for done, _, _ in curve] == sorted({done for done, _, _ in curve}) and curve[0][0] <= 20
    assert curve[-1][0] == 60 and curve[-1][2] > curve[0][2]
    assert row["seconds"] > spent["seconds"]
    assert row["metrics"]["commits"] == ["abc1234", ledger.commit()]


def test_without_a_budget_the_settings_decide_the_size(place):
    sizes = {"group_size": 16, "d0": 16, "c0": 4, "c1": 4, "gamma": 0}
    settings = {"features": "digits", "recorder": "paper", "iterations": 4, "schedule": "paper", "given": sizes}
    row = RECORD.perform("test", settings, 0, place)
    assert row["settings"]["budget"] is None and row["settings"]["d0"] == 16 and not row["metrics"]["over_budget"]
    assert row["metrics"]["iterations"] == 4
    assert RECORD.matches(row, settings, 0)
    assert not RECORD.matches(row, settings | {"schedule": "fast"}, 0)


def test_images_are_recorded_as_a_rival_of_their_maps(place):
    pytest.importorskip("PIL")
    row = RECORD.perform("test", {"features": "digits", "recorder": "images", "given": {"codec": "png"}}, 0, place)
    assert row["metrics"]["r2"] == pytest.approx(1, abs=1e-6)
    assert row["metrics"]["replay_accuracy"] == row["metrics"]["real_accuracy"]


# ------------------------------------------------------------------ rows of an earlier tool


@pytest.fixture(scope="module")
def old_rows():
    return [row for row in ledger.read(ROOT / "results" / "ledger.jsonl") if row["recipe"] == "rate"]


@pytest.fixture(scope="module")
def rate_runs():
    return {run.name: dict(run.settings) for run in read_recipe("rate").runs}


def test_every_cell_of_the_rate_table_has_its_row_already(old_rows, rate_runs):
    assert len(rate_runs) == 60
    for name, settings in rate_runs.items():
        found = [row for row in old_rows if RECORD.matches(row, settings, 0)]
        assert any(row["commit"] == "529b10d" for row in found), name
        assert all(abs(row["metrics"]["bytes"] / row["settings"]["budget"] - 1) < 0.1 for row in found), name


def test_old_rows_of_other_settings_do_not_count(old_rows, rate_runs):
    settings = rate_runs["krnet, 6.5 MB"]  # 128 channels
    (row,) = (r for r in old_rows if RECORD.matches(r, settings, 0) and r["commit"] == "529b10d")
    narrower = rate_runs["krnet, narrower, 6.5 MB"]
    assert not RECORD.matches(row, narrower, 0)
    assert not RECORD.matches(row, {k: v for k, v in settings.items() if k != "given"}, 0)
    for other in (
        {"iterations": 300},
        {"schedule": "paper"},
        {"features": "digits"},
        {"features": "cifar100-strong-0"},
    ):
        assert not RECORD.matches(row, settings | other, 0), other
    assert not RECORD.matches(row | {"outcome": "RuntimeError"}, settings, 0)
    fewer = row | {"settings": row["settings"] | {"num_samples": 5000}}
    assert not RECORD.matches(fewer, settings, 0)
    larger_maps = row | {"metrics": row["metrics"] | {"bits_per_value": row["metrics"]["bits_per_value"] / 4}}
    assert not RECORD.matches(larger_maps, settings, 0)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"recoder": "pca"}, SettingError, "did you mean 'recorder'"),
        ({"features": "digit"}, SettingError, "did you mean 'digits'"),
        ({"recorder": "pcaa"}, InputError, "pcaa"),
        ({"budget": "much"}, ValueError, "much"),
        ({"iterations": 5}, SettingError, "iterations is given, a setting of a network's fit"),
        ({"preset": "cifar100"}, InputError, "preset is given, and recorder pca has no use for it"),
        ({"given": {"c1": 4}}, SettingError, "c1 is given, a setting of recorder"),
        ({"given": {"components": -2}}, SettingError, "components is -2"),
        ({"given": {"seed": 3}}, SettingError, "given has seed"),
    ],
)
def test_wrong_settings_are_refused_by_name_before_anything_runs(settings, error, message):
    with pytest.raises(error, match=message):
        RECORD.check(PCA | settings)
