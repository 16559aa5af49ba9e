"""What `krnet plan FEATURES` says of a recording before it is made, against recordings that are made."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import krnet
from krnet.bench import predict as module
from krnet.bench.predict import best, predict, take_sample
from krnet.cli import app as cli
from krnet.errors import SettingError
from krnet.features.source import open_features
from maps import relu_maps

SHAPE = (4, 6, 6)
NAMES = ["pca", "transform", "quantized"]


def run(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture(scope="module")
def maps():
    return relu_maps(1200, SHAPE)[0]


@pytest.fixture
def small_sample(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_VALUES", (1, 300 * 4 * 6 * 6))


def test_a_prediction_from_a_quarter_of_the_samples_is_close_to_the_recording_of_all(maps, small_sample):
    found = predict(maps, recorders=NAMES)
    assert (found["sample"], found["num_samples"], len(found["points"])) == (288, 1200, 9)
    for point in found["points"]:
        true = krnet.record(maps, recorder=point["recorder"], budget=point["budget"]).info()["r2"]
        assert point["r2"] == pytest.approx(true, abs=0.02), point


def test_few_features_are_recorded_whole_and_the_prediction_is_exact(maps):
    few = maps[:50]
    for point in predict(few, recorders=NAMES)["points"]:
        made = krnet.record(few, recorder=point["recorder"], budget=point["budget"])
        assert point["r2"] == made.info()["r2"]


def test_what_the_sample_shows_of_unseen_samples_counts(maps, small_sample, monkeypatch):
    sizes = {"recorders": ["pca"], "budgets": [maps.numel() // 2]}
    honest = predict(maps, **sizes)["points"][0]["r2"]
    monkeypatch.setattr(module, "unseen_r2", lambda recording, unseen: 0.0)
    assert predict(maps, **sizes)["points"][0]["r2"] < honest - 0.3


def test_the_halves_of_a_sample_share_no_sample_and_are_spread_over_all(maps, small_sample):
    rows = torch.arange(1200.0).view(-1, 1, 1, 1).expand(1200, *SHAPE)
    sample = take_sample(open_features(rows.contiguous()))
    seen, unseen = (
        set(half.read(torch.arange(len(half)))[:, 0, 0, 0].int().tolist()) for half in (sample.seen, sample.unseen)
    )
    assert not seen & unseen and len(seen) == len(unseen) == 144
    assert max(seen | unseen) - min(seen | unseen) > 1190


def test_a_size_that_a_recorder_cannot_make_says_so_and_the_others_are_predicted(maps):
    found = predict(maps[:50], recorders=["fp8", "quantized"], budgets=[6000])
    fp8, quantized = found["points"]
    assert fp8["r2"] is None and "no file as small" in fp8["error"] and quantized["r2"] > 0
    assert found["take"] == "quantized"


def test_of_equal_recorders_the_quicker_is_taken():
    points = [
        {"recorder": name, "budget": 1, "r2": r2, "seconds": s}
        for name, r2, s in [("slow", 0.9, 9.0), ("quick", 0.8995, 1.0), ("worse", 0.89, 0.1)]
    ]
    assert best(points, 1) == "quick"
    assert best([{"recorder": "a", "budget": 1, "r2": None, "seconds": None}], 1) is None


def test_krnet_is_predicted_from_a_fit_of_the_given_time(maps):
    found = predict(maps[:60], recorders=["krnet"], budgets=["8kB"], time_budget=0.2)
    assert found["points"][0]["trains"] and found["points"][0]["r2"] > 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"recorders": ["nope"]}, SettingError),
        ({"recorders": []}, SettingError),
        ({"budgets": []}, SettingError),
        ({"time_budget": -1}, SettingError),
    ],
)
def test_nonsense_is_refused(maps, options, error):
    with pytest.raises(error):
        predict(maps[:50], **options)


def test_the_command_prints_a_line_per_recorder_and_what_to_take(maps, tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, maps[:50].numpy())
    shown = run("plan", path, "--recorders", "pca,quantized,fp8").stdout
    assert "R2 in" in shown and "take " in shown and all(name in shown for name in ("pca", "quantized"))
    assert "\n-: no file of this recorder is so small" in shown  # fp8 in fewer than 8 bits a value
    result = json.loads(run("plan", path, "--recorders", "pca", "--budgets", "9kB,20kB", "--json").stdout)
    assert result["budgets"] == [9000, 20000] and len(result["points"]) == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give either FEATURES or --shape"),
        (["x.npy", "--shape", "4,4,4"], "give either FEATURES or --shape"),
        (["x.npy", "--preset", "cifar100"], "--preset applies only to --shape"),
        (["--shape", "4,4,4", "--num-samples", "5", "--budgets", "1MB"], "--budgets applies only to FEATURES"),
    ],
)
def test_options_of_the_other_kind_of_plan_are_refused(words, text):
    ended = run("plan", *words)
    assert ended.exit_code == 2 and text in " ".join(ended.output.replace("│", " ").split())
