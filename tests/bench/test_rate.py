"""Points are scored from their files, made once, never mixed with others, and one that fails spoils no other."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import krnet
from krnet import api
from krnet import task_loop as learning
from krnet.bench import rate
from krnet.cli.app import app
from krnet.device import pick_device
from krnet.errors import FitError, InputError, LabelError, ResumeError, SettingError
from krnet.features.stats import normalise
from krnet.nn.loaded import read_head
from krnet.recorders import base
from krnet.recorders.raw import RawRecorder
from krnet.report.figures import draw_rate as draw
from krnet.report.figures import rate_figure, series_of, spaced
from learning_tools import settings_for, small_digits, small_tasks
from maps import relu_maps

CPU = pick_device("cpu")
FIELDS = {
    "recorder", "settings", "budget", "over_budget", "bytes", "bytes_per_sample", "bits_per_value", "mse", "r2",
    "replay_accuracy", "iterations", "fit_seconds", "replay_per_second", "device", "versions", "file",
}  # fmt: skip


PNG_START = b"\x89PNG\r\n\x1a\n"


class Means(nn.Module):
    """The class whose mean map is nearest."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor):
        super().__init__()
        means = torch.stack([features[labels == c].flatten(1).mean(0) for c in range(int(labels.max()) + 1)])
        self.register_buffer("means", means)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return x @ self.means.T - 0.5 * (self.means * self.means).sum(1)


@pytest.fixture(scope="module")
def maps() -> tuple[torch.Tensor, torch.Tensor]:
    return relu_maps(90, (4, 6, 5))


@pytest.fixture(scope="module")
def head_path(maps, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("head") / "head.pt"
    torch.jit.script(Means(*maps)).save(str(path))
    return path


@pytest.fixture(scope="module")
def done(maps, head_path, tmp_path_factory) -> tuple[Path, dict]:
    """A folder that holds a finished bench, and what it returned: not to be changed."""
    folder = tmp_path_factory.mktemp("rate") / "made"
    found = rate.bench(
        *maps, out=folder, head=head_path, budgets=["9kB", 20_000], recorders=["raw", "pca", "quantized"], device="cpu"
    )
    return folder, found


@pytest.fixture
def no_fits(monkeypatch) -> None:
    def refuse(*given, **more):
        raise AssertionError("a fit, where nothing was to be fitted")

    monkeypatch.setattr(api, "record", refuse)


def again(done, maps, head_path, **changes) -> dict:
    options = {"budgets": ["9kB", 20_000], "recorders": ["raw", "pca", "quantized"], "head": head_path, "device": "cpu"}
    return rate.bench(*maps, out=done[0], **{**options, **changes})


# ------------------------------------------------------------------ what a point says


def test_every_recorder_has_a_point_at_every_budget_with_all_fields(done):
    folder, found = done
    assert [(p["recorder"], p["budget"]) for p in found["points"]] == [
        (recorder, budget) for recorder in ("raw", "pca", "quantized") for budget in (9000, 20_000)
    ]
    assert all(set(point) >= FIELDS for point in found["points"])
    assert found["errors"] == [] and json.loads((folder / "rate.json").read_text()) == found
    json.dumps(found, allow_nan=False)


def test_figures_are_those_of_the_file_opened_again(done, maps):
    features, labels = maps
    low, high = features.amin((0, 2, 3)), features.amax((0, 2, 3))
    head = Means(features, labels)
    variance = normalise(features, low, high).double().var(correction=0)
    for point in done[1]["points"]:
        path = done[0] / point["file"]
        replayed = krnet.open(path)[:]
        error = (normalise(replayed, low, high, clamp=False) - normalise(features, low, high)).double()
        assert point["bytes"] == os.stat(path).st_size
        assert point["mse"] == pytest.approx(error.square().mean().item(), rel=1e-4, abs=1e-12)
        assert point["r2"] == pytest.approx(1 - point["mse"] / variance.item(), abs=1e-6)
        assert point["replay_accuracy"] == (head(replayed).argmax(1) == labels).double().mean().item()
        assert point["bytes_per_sample"] == point["bytes"] / 90
        assert point["bits_per_value"] == pytest.approx(8 * point["bytes"] / features.numel())
        assert point["settings"] == krnet.open(path).settings and point["replay_per_second"] > 0
    assert done[1]["real_accuracy"] == (head(features).argmax(1) == labels).double().mean().item() > 0.9


def test_a_budget_out_of_reach_gives_the_smallest_file_marked_as_over(done):
    raw = [point for point in done[1]["points"] if point["recorder"] == "raw"]
    assert all(point["over_budget"] and point["settings"] == {"dtype": "float16"} for point in raw)
    assert len({point["file"] for point in raw}) == 1  # not the same file twice
    others = [point for point in done[1]["points"] if point["recorder"] != "raw"]
    assert all(not point["over_budget"] and point["bytes"] <= point["budget"] for point in others)


def test_everything_is_written_under_the_folder_and_no_machine_path_is_in_it(done):
    folder = done[0]
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files = {f"points/{name}" for r in ("pca", "quantized") for b in (9000, 20_000) for name in (f"{r}-{b}",)}
    files = {f"{name}.{kind}" for name in {*files, "points/raw-20000"} for kind in ("krn", "json")}
    assert written == {"rate.json", "features.json", *files}
    assert str(folder.parent) not in (folder / "rate.json").read_text()


def test_without_a_head_there_is_no_accuracy_and_the_picture_is_drawn(maps, tmp_path):
    found = rate.bench(maps[0], out=tmp_path / "r", budgets=["20kB"], recorders=["quantized"], device="cpu")
    assert found["real_accuracy"] is None and found["points"][0]["replay_accuracy"] is None
    draw(tmp_path / "rate.png", found)
    assert (tmp_path / "rate.png").read_bytes()[:8] == PNG_START


@pytest.mark.parametrize("shares", [[], [0.2], [-3.0, 1.0]], ids=["no point", "one", "the least and the most"])
def test_a_picture_of_few_points_holds_them_and_the_real_features(shares, tmp_path, recwarn):
    points = [{"recorder": "pca", "given": {}, "bytes": 19_000, "r2": x, "replay_accuracy": abs(x) / 3} for x in shares]
    result = {"points": points, "head": "head.pt", "real_accuracy": 0.9983, "num_samples": 10, "shape": [3]}
    draw(tmp_path / "a.png", result)
    assert not recwarn.list and (tmp_path / "a.png").stat().st_size


def test_a_recorder_with_its_best_settings_is_one_line_with_one_label_in_each_panel():
    def point(recorder, r2, accuracy, budget=9000, **given):
        found = {"recorder": recorder, "given": given, "budget": budget, "bytes": budget - 1}
        return found | {"r2": r2, "replay_accuracy": accuracy}

    points = [point("pca", 0.5, 0.9), point("pca", 0.0, 0.99, centroid=-0.5), point("pca", 0.9, 0.9, budget=20_000)]
    points += [point("pq", 0.5, 0.9)]
    result = {"points": points, "head": "head.pt", "real_accuracy": 0.9983, "num_samples": 10, "shape": [3]}
    for axes, first in zip(rate_figure(result, best_settings=True).axes, (0.5, 0.99), strict=True):
        assert sorted({text.get_text() for text in axes.texts} - {"real features"}) == ["pca", "pq"]
        assert len([line for line in axes.lines if line.get_marker() == "o"]) == 2
        assert axes.lines[0].get_ydata() == pytest.approx([-math.log10(1 - share) for share in (first, 0.9)])
    labels = [text.get_text() for text in rate_figure(result).axes[0].texts]
    assert sorted(labels) == ["pca", "pca:centroid=-0.5", "pq"]  # settings that were asked for are lines of their own


def test_names_beside_lines_are_a_gap_apart_and_none_is_below_the_bottom():
    for values in ([5.0, 5.0, 5.0], [9.9, 9.9, 0.0], [0.1, 0.0, 0.0, 0.0], []):
        places = spaced(values, 0.4, 0.0)
        assert all(a - b >= 0.4 - 1e-9 for a, b in pairwise(places)) and all(0 <= place <= 10 for place in places)


def test_all_recorders_that_need_features_alone_are_tried_unasked(monkeypatch):
    names = [series.name for series in rate.default_series()]
    assert {"krnet", "paper", "raw", "quantized", "transform", "pca"} <= set(names)
    assert "quantized:centroid=0.5" in names  # its best for a classifier, beside its best R2
    assert [rate.Series.parse(name) for name in names] == rate.default_series()
    monkeypatch.setattr(RawRecorder, "required", frozenset({"images"}))
    assert "raw" not in [series.name for series in rate.default_series()]


def test_a_recorder_keeps_settings_that_are_given_with_its_name(maps, tmp_path):
    names = ["pca:components=3:dead_zone=0.6", "pca"]
    found = rate.bench(*maps, out=tmp_path / "r", budgets=["20kB"], recorders=names, device="cpu")
    own, free = (point["settings"] for point in found["points"])
    assert (own["components"], own["dead_zone"]) == (3, 0.6) and free["components"] > 3
    assert list(series_of(found)) == names


# ------------------------------------------------------------------ once, and never mixed


def test_a_second_run_fits_nothing_and_says_the_same(done, maps, head_path, no_fits):
    assert again(done, maps, head_path) == done[1]


def test_only_what_is_missing_is_made(done, maps, head_path, monkeypatch, tmp_path):
    calls = []
    record = api.record
    monkeypatch.setattr(api, "record", lambda *g, **m: calls.append((m["recorder"], m["budget"])) or record(*g, **m))
    folder = tmp_path / "copy"
    shutil.copytree(done[0], folder)
    (folder / "points" / "pca-9000.krn").unlink()
    (folder / "points" / "quantized-20000.json").unlink()
    found = again((folder,), maps, head_path, budgets=["9kB", "20kB", "30kB"], recorders=["pca", "quantized"])
    assert calls == [("pca", 30_000), ("pca", 9000), ("quantized", 30_000), ("quantized", 20_000)]
    assert len(found["points"]) == 6
    # A file that was put in the place of another is not taken for it, and neither is half a JSON.
    points = folder / "points"
    os.replace(points / "pca-30000.krn", points / "pca-9000.krn")
    (points / "quantized-9000.json").write_text('{"fitted_with": {')
    calls.clear()
    again((folder,), maps, head_path, budgets=["9kB"], recorders=["pca", "quantized"])
    assert calls == [("pca", 9000), ("quantized", 9000)]


def test_a_damaged_file_is_made_again(maps, tmp_path):
    found = rate.bench(*maps, out=tmp_path, recorders=["quantized"], budgets=[9_000])
    path = tmp_path / found["points"][0]["file"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    made = []
    rate.bench(*maps, out=tmp_path, recorders=["quantized"], budgets=[9_000], made=made.append)
    assert len(made) == 1 and krnet.verify(path, device="cpu")


def test_a_network_that_missed_a_larger_budget_is_fitted_to_a_smaller_one(maps, tmp_path, monkeypatch):
    tried = []

    def point(self, series, budget, watch):
        tried.append((series.name, budget))
        return {"recorder": series.name, "budget": budget, "bytes": 10**6, "over_budget": True, "file": "x"}, False

    monkeypatch.setattr(rate.Bench, "point", point)
    rate.bench(*maps, out=tmp_path, recorders=["krnet", "pca"], budgets=[1000, 2000])
    assert tried == [("krnet", 2000), ("krnet", 1000), ("pca", 2000)]


def test_other_features_or_labels_are_refused(done, maps, head_path, no_fits):
    features, labels = maps
    with pytest.raises(ResumeError, match="holds points of other features"):
        again(done, (features + 1, labels), head_path)
    with pytest.raises(ResumeError, match="holds points of other labels"):
        again(done, (features, labels.flip(0)), head_path)
    with pytest.raises(ResumeError, match="holds points of other labels"):
        again(done, (features, None), head_path, head=None)


def test_other_settings_of_the_fit_are_fitted_anew(maps, tmp_path, monkeypatch):
    calls = []
    record = api.record
    monkeypatch.setattr(api, "record", lambda *g, **m: calls.append(m["seed"]) or record(*g, **m))
    options = {"out": tmp_path / "r", "budgets": ["20kB"], "recorders": ["quantized"], "device": "cpu"}
    for seed in (5, 5, 6, 6):
        rate.bench(*maps, seed=seed, **options)
    assert calls == [5, 6]


def test_another_head_reads_the_same_files(done, maps, no_fits, tmp_path):
    features, labels = maps
    other = tmp_path / "other.pt"
    torch.jit.script(Means(features, 4 - labels)).save(str(other))  # wrong on purpose
    folder = tmp_path / "copy"
    shutil.copytree(done[0], folder)
    found = again((folder,), maps, other)
    assert found["real_accuracy"] < 0.5
    pairs = list(zip(found["points"], done[1]["points"]))
    assert all(new["r2"] == old["r2"] and new["bytes"] == old["bytes"] for new, old in pairs)
    assert all(new["replay_accuracy"] < 0.5 < old["replay_accuracy"] for new, old in pairs)


def test_a_run_that_was_killed_goes_on(maps, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    options = {"out": tmp_path / "r", "budgets": ["20kB"], "recorders": ["quantized", "pca"], "device": "cpu"}
    score = rate.Bench.score

    def kill(self, series, *given):
        if series.recorder == "pca":
            raise Killed
        return score(self, series, *given)

    monkeypatch.setattr(rate.Bench, "score", kill)
    with pytest.raises(Killed):
        rate.bench(*maps, **options)
    assert len(json.loads((tmp_path / "r" / "rate.json").read_text())["points"]) == 1
    monkeypatch.setattr(rate.Bench, "score", score)
    found = rate.bench(*maps, **options)
    assert [point["recorder"] for point in found["points"]] == ["quantized", "pca"]


# ------------------------------------------------------------------ what fails


class Broken(RawRecorder):
    name = "broken"

    def fit(self, job):
        raise FitError("out of luck; try again")


def test_a_recorder_that_fails_leaves_its_error_and_the_others_go_on(maps, tmp_path, monkeypatch):
    monkeypatch.setitem(base._REGISTRY, "broken", Broken())
    np.save(tmp_path / "f.npy", maps[0].numpy())
    arguments = ["bench", "rate", str(tmp_path / "f.npy"), "-o", str(tmp_path / "r"), "--budgets", "20kB", "-q"]
    ran = CliRunner().invoke(app, [*arguments, "--recorders", "broken,quantized", "--json", "--device", "cpu"])
    assert ran.exit_code == 1 and "error: broken at 20000 bytes: FitError: out of luck" in ran.stderr
    found = json.loads(ran.stdout)
    assert found["errors"] == [{"recorder": "broken", "budget": 20_000, "error": "FitError: out of luck; try again"}]
    assert [point["recorder"] for point in found["points"]] == ["quantized"]
    assert json.loads((tmp_path / "r" / "rate.json").read_text()) == found
    assert (tmp_path / "r" / "rate.png").read_bytes()[:8] == PNG_START
    arguments = ["bench", "rate", str(tmp_path / "f.npy"), "-o", str(tmp_path / "s"), "--budgets", "20kB"]
    ran = CliRunner().invoke(app, [*arguments, "--recorders", "broken", "--device", "cpu"])
    assert ran.exit_code == 1 and f"written to {tmp_path / 's' / 'rate.json'}\n" in ran.stderr
    assert not (tmp_path / "s" / "rate.png").exists(), "no point to draw"


def test_what_makes_no_sense_is_refused_before_anything_is_written(maps, head_path, tmp_path):
    features, labels = maps
    out = tmp_path / "r"
    for error, why, options in (
        (SettingError, "unknown recorder 'zip'", {"recorders": ["zip"]}),
        (SettingError, "did you mean 'components'", {"recorders": ["pca:component=3"]}),
        (SettingError, "not a setting", {"recorders": ["pca:3"]}),
        (SettingError, "budget is 'x'", {"budgets": ["x"]}),
        (InputError, "a head is given and no labels", {"head": head_path, "labels": None}),
        (InputError, "no such file", {"head": tmp_path / "none.pt"}),
        (LabelError, "labels run from 0 to 8; .* tells 0 to 4 apart", {"head": head_path, "labels": labels + labels}),
        (InputError, r"refuses feature maps of shape \(6, 5\)", {"head": head_path, "features": features[:, 0]}),
    ):
        given = {"features": features, "labels": labels, **options}
        with pytest.raises(error, match=why):
            rate.bench(out=out, device="cpu", **given)
    assert not out.exists()


# ------------------------------------------------------------------ heads


def test_exported_and_scripted_heads_give_the_same_logits(maps, head_path, tmp_path):
    features, labels = maps
    module = Means(features, labels)
    expected = module(features)
    free, fixed, renamed = tmp_path / "free.pt2", tmp_path / "fixed.pt2", tmp_path / "named.pt"
    batch = {0: torch.export.Dim.DYNAMIC}
    torch.export.save(torch.export.export(module, (features[:4],), dynamic_shapes=(batch,)), free)
    torch.export.save(torch.export.export(module, (features[:7],)), fixed)
    renamed.write_bytes(fixed.read_bytes())
    digests = set()
    for path in (head_path, free, fixed, renamed):
        head = read_head(path, CPU)
        for part in (features, features[:1], features[:8]):
            assert torch.allclose(head.logits(part), expected[: len(part)], atol=1e-3)
        digests.add(head.digest)
    assert len(digests) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(read_head(free, CPU).trainable)  # as a fit makes one; torch warns of its own classes
    assert torch.allclose(copied(features), expected, atol=1e-3)


def test_files_that_hold_no_head_are_refused_by_name(maps, tmp_path):
    weights, text, broken = tmp_path / "w.pt", tmp_path / "t.pt", tmp_path / "b.pt"
    own, plain = tmp_path / "own.pt", tmp_path / "plain.pt"
    torch.save(Means(*maps).state_dict(), weights)
    torch.save(Means(*maps), own)  # of a class of the user's
    torch.save(nn.Sequential(nn.Linear(3, 2)), plain)
    text.write_text("no head")
    torch.jit.script(Means(*maps)).save(str(broken))
    broken.write_bytes(broken.read_bytes()[:-300])
    whole = "a whole module that torch.save has pickled"
    cases = ((weights, "a file of weights alone"), (own, whole), (plain, whole), (text, "not an archive"), (broken, ""))
    for path, why in cases:
        with pytest.raises(InputError, match=rf"{path.name}: {why}.*expected TorchScript or a torch.export program"):
            read_head(path, CPU)
    torch.jit.script(nn.Flatten(0)).save(str(text))
    with pytest.raises(InputError, match="expected logits of each class"):
        read_head(text, CPU).logits(maps[0])


def test_the_head_of_a_kril_run_is_what_reads_its_feature_maps(tmp_path, monkeypatch):
    """F2 of the run on F1's features is the whole network on the images."""
    data, kept = small_digits(6, 3), {}
    kril = learning.base.get_learner("kril")
    finish = kril.finish
    monkeypatch.setattr(kril, "finish", lambda self: kept.update(learner=self) or finish(self))
    own = {**settings_for("kril"), "base_epochs": 1, "epochs": 1, "recorder": "raw"}
    learning.learn("kril", data, small_tasks(1), out=tmp_path / "run", settings=own, device="cpu")
    learner = kept["learner"]
    images = learner.context.test.take(torch.arange(5))
    with torch.no_grad():
        expected = learner.model.eval()(images)
        features = learner.trunk(images)
    head = read_head(tmp_path / "run", CPU)
    assert torch.allclose(head.logits(features), expected, atol=1e-4) and expected.shape == (5, 8)
    (tmp_path / "run" / "state.krn").unlink()
    with pytest.raises(InputError, match=r"run: holds no state\.krn"):
        read_head(tmp_path / "run", CPU)
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    del settings["settings"]["fixed_layers"]  # which only a network that is cut has
    (tmp_path / "run" / "settings.json").write_text(json.dumps({**settings, "method": "icarl"}))
    with pytest.raises(InputError, match="a run of icarl, whose classifier reads images"):
        read_head(tmp_path / "run", CPU)
    with pytest.raises(InputError, match="not the folder of a `krnet learn` run"):
        read_head(tmp_path, CPU)


# ------------------------------------------------------------------ on the command line


def test_the_command_line_writes_a_table_and_a_picture_and_goes_on_where_it_was(maps, head_path, tmp_path):
    np.save(tmp_path / "f.npy", maps[0].numpy())
    np.save(tmp_path / "l.npy", maps[1].numpy())
    arguments = [
        "bench", "rate", str(tmp_path / "f.npy"), "--labels", str(tmp_path / "l.npy"), "--head", str(head_path),
        "--budgets", "9kB,20kB", "--recorders", "quantized,raw", "--device", "cpu", "-o", str(tmp_path / "r"),
    ]  # fmt: skip
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    rows = [line.split() for line in first.stdout.splitlines() if line.startswith(("quantized", "raw"))]
    assert [row[:2] for row in rows] == [["quantized", "9"], ["quantized", "20"], ["raw", "9"], ["raw", "20"]]
    assert all("over" in row for row in rows[2:]) and "[1/4] quantized at 20 kB" in first.stderr
    picture = tmp_path / "r" / "rate.png"
    assert picture.read_bytes()[:8] == PNG_START and f"and {picture}" in first.stderr.replace("\n", "")
    second = CliRunner().invoke(app, arguments)
    assert second.stdout == first.stdout
    assert math.isclose(json.loads((tmp_path / "r" / "rate.json").read_text())["real_accuracy"], 1.0, abs_tol=0.1)


def test_the_default_budgets_are_those_of_the_help():
    shown = CliRunner().invoke(app, ["bench", "rate", "--help"]).stdout
    assert "3MB,6.5MB,12MB,24MB" in shown and rate.BUDGETS == (3_000_000, 6_500_000, 12_000_000, 24_000_000)


def test_networks_are_fitted_with_the_head_in_view_and_others_are_not(maps, head_path, tmp_path, monkeypatch):
    seen, right = {}, api.record

    def note(*args, recorder, head, **options):
        seen[recorder] = head, options.get("gamma")
        return right(*args, recorder=recorder, head=head, **options)

    monkeypatch.setattr(api, "record", note)
    series = ["krnet:gamma=0.01", "pca"]
    options = {"budgets": [9_000], "recorders": series, "iterations": 3, "device": "cpu"}
    rate.bench(*maps, out=tmp_path / "a", head=head_path, **options)
    assert seen["pca"] == (None, None)
    head, gamma = seen["krnet"]
    assert gamma == 0.01 and torch.allclose(head(maps[0]), Means(*maps)(maps[0]), rtol=1e-4)
    other = tmp_path / "other.pt"
    torch.jit.script(Means(maps[0] + 1, maps[1])).save(str(other))
    seen.clear()
    rate.bench(*maps, out=tmp_path / "a", head=other, **options)
    assert list(seen) == ["krnet"]  # fitted anew; what pca made is only scored anew
