"""Sizes are read as they are written, searches end where they should, and files keep to their budgets."""

from __future__ import annotations

import gc
import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import krnet
from krnet.cli import app as cli
from krnet.coding.search import find_least, smallest_file_reaching
from krnet.config import format_size, parse_size, parse_sizes
from krnet.errors import BudgetError, InputError, ResumeError, SettingError
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import scan
from krnet.io import archive
from krnet.recorders.base import Content, Job, Recorder, get_recorder
from krnet.recorders.maps import LEARNED_CACHE
from krnet.recorders.sizes import overhead_bytes
from krnet.recording_file import file_contents
from krnet.train.config import FitConfig
from maps import relu_maps, signed_maps

CODED = ("quantized", "transform", "pca")


@pytest.fixture(scope="module")
def maps() -> tuple[torch.Tensor, torch.Tensor]:
    return relu_maps(200, (6, 8, 7))


def job_for(features: torch.Tensor, labels: torch.Tensor | None = None, **settings) -> Job:
    source = open_features(features)
    samples = Samples(len(source), source.shape, labels)
    return Job(source, samples, scan(source), FitConfig(), torch.device("cpu"), settings=settings)


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12MB", 12_000_000), ("6.5 MB", 6_500_000), ("6.7MB", 6_700_000), ("800kB", 800_000), ("800KB", 800_000),
        ("3MiB", 3 * 2**20), ("1 gb", 10**9), ("0.5GiB", 2**29), ("123456", 123456), ("12_000_000", 12_000_000),
        ("100 B", 100), (".5MB", 500_000), (7, 7), (6.5e6, 6_500_000), ("1.9", 1), (" 2 kB ", 2000),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_are_read_as_a_person_writes_them(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "MB", "12XB", "-3MB", "0", "0.4", "1e6MB", "12 MB MB", "nan", math.nan, math.inf, True, None, [3], 0, -1,
     "9" * 30, "1,000"],
    ids=repr,
)  # fmt: skip
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(SettingError, match=r"budget is .*; expected bytes, such as 12MB"):
        parse_size(text)


def test_lists_of_sizes_are_sorted_and_each_is_there_once():
    assert parse_sizes("12MB,3MB,0.003GB, 800kB,") == [800_000, 3_000_000, 12_000_000]
    with pytest.raises(SettingError, match="budgets is ','"):
        parse_sizes(",")


@given(st.integers(1, 10**12))
def test_a_size_that_is_printed_is_read_back_to_four_digits(num_bytes):
    assert parse_size(format_size(num_bytes).replace(" bytes", "")) == pytest.approx(num_bytes, rel=5e-4)


# ------------------------------------------------------------------ searches


@given(
    slope=st.floats(0.2, 8), bend=st.floats(-0.3, 0.3), answer=st.floats(1.5, 9e5), start=st.floats(1, 1e6)
)  # fmt: skip
def test_a_search_ends_just_above_what_is_wanted_in_a_dozen_tries(slope, bend, answer, start):
    def measure(x: float) -> float:
        distance = math.log(x / answer)
        return slope * (distance + bend * math.tanh(distance))

    calls = []
    found = find_least(lambda x: calls.append(x) or measure(x), 0.0, start=start, low=1, high=1e6, slack=0.02)
    assert 0 <= measure(found) <= 0.3 and len(calls) <= 12
    assert all(1 - 1e-9 <= x <= 1e6 * (1 + 1e-9) for x in calls)


def test_a_search_takes_the_lower_end_where_that_is_enough_and_none_where_the_upper_is_not():
    assert find_least(lambda x: math.log(x), -5.0, start=50, low=2, high=100, slack=0.01) == pytest.approx(2)
    assert find_least(lambda x: math.log(x), 9.0, start=50, low=2, high=100, slack=0.01) is None


def test_a_search_crosses_steps_and_what_cannot_be_measured():
    stairs = find_least(lambda x: 2.0 * (x >= 37), 1.0, start=3, low=1, high=1000, slack=0.0, tries=30)
    assert stairs == pytest.approx(37, rel=1e-3)
    gap = find_least(
        lambda x: -math.inf if x < 37 else math.log(x), 0.0, start=500, low=1, high=1000, slack=0, tries=30
    )
    assert gap == pytest.approx(37, rel=1e-3)


def made_of(curve):
    """A `make` of files whose R2 is a function of their bytes, and the budgets it was asked for."""
    asked = []

    def make(budget: int) -> tuple[int, float, int]:
        asked.append(budget)
        return (budget, curve(budget), budget)

    return make, asked


@pytest.mark.parametrize("target", [0.3, 0.8, 0.95, 0.999])
def test_the_smallest_that_reaches_a_target_is_found_in_few_fits(target):
    curve = lambda num_bytes: 1 - math.exp(-((num_bytes / 2e6) ** 0.7))  # noqa: E731
    make, asked = made_of(curve)
    found = smallest_file_reaching(target, make, feature_bytes=400_000_000)
    least = 2e6 * (-math.log(1 - target)) ** (1 / 0.7)
    assert target <= curve(found) and found < 1.04 * least
    assert len(asked) <= 8


@pytest.mark.parametrize("slope", [0.8, 1.3, 5.0])
def test_noise_of_fits_does_not_keep_a_search_from_ending(slope):
    num_fits = []
    for seed in range(40):
        draw = np.random.default_rng(seed)
        least = 1e6 * math.exp(draw.normal(0, 0.12))  # and a guess of 1 MB

        def error(num_bytes, draw=draw, least=least):
            return 0.05 * ((num_bytes - 8e3) / (least - 8e3)) ** -slope * math.exp(draw.normal(0, 0.007))

        make, asked = made_of(lambda num_bytes, error=error: 1 - error(num_bytes))
        found = smallest_file_reaching(0.95, make, feature_bytes=10**8, guess=(1e6, 8e3), noise=0.01)
        assert found < 1.07 * least
        num_fits.append(len(asked))
    assert max(num_fits) <= 6 and sum(num_fits) / len(num_fits) < 3.3


def test_a_target_out_of_reach_gives_the_best_there_is():
    make, asked = made_of(lambda num_bytes: min(0.9, num_bytes / 1e6))
    assert smallest_file_reaching(0.95, make, feature_bytes=10**7) >= 0.9e6
    assert max(asked) >= 10**7


def test_sizes_that_a_recorder_does_not_have_are_passed_over():
    """Two files only: a small one however low the budget is, and a large one."""

    def make(budget: int) -> tuple[int, float, str]:
        return (8000, 1.0, "large") if budget >= 8000 else (4000, 0.999, "small")

    assert smallest_file_reaching(0.99, make, feature_bytes=8000) == "small"
    assert smallest_file_reaching(1.0, make, feature_bytes=8000) == "large"


# ------------------------------------------------------------------ budgets of recorders


@pytest.mark.parametrize("recorder", CODED)
@pytest.mark.parametrize("budget", ["15kB", 35_000, "60kB"])
def test_a_file_keeps_to_its_budget_and_uses_it(maps, recorder, budget, tmp_path):
    path = tmp_path / "x.krn"
    info = krnet.record(*maps, recorder=recorder, budget=budget, out=path).info()
    limit = parse_size(budget)
    assert 0.98 * limit - 1000 <= os.stat(path).st_size <= limit
    assert info["fit"]["budget"] == limit
    finer = krnet.record(*maps, recorder=recorder, step=0.8 * info["settings"]["step"]).info()
    assert finer["bytes"] > limit and finer["r2"] > info["r2"]


@pytest.mark.parametrize("recorder", ("raw", *CODED))
@pytest.mark.parametrize("shape", [(), (7,), (4, 9), (2, 3, 4, 5)], ids=str)
def test_features_of_any_shape_keep_to_a_budget(recorder, shape):
    features = torch.randn(300, *shape).relu()
    smallest = krnet.record(features, recorder=recorder, budget=1, over_budget=True).nbytes
    for budget in (9000, 30_000):
        made = krnet.record(features, recorder=recorder, budget=budget, over_budget=True)
        assert made.nbytes <= max(budget, smallest + 8)  # the header has the budget, with more digits than 1 has


@pytest.mark.parametrize("recorder", CODED)
def test_constant_features_keep_to_a_budget(recorder):
    constant = torch.full((40, 3, 5), 2.5)
    assert torch.equal(krnet.record(constant, recorder=recorder, budget=12_000)[:], constant)


@pytest.mark.parametrize("recorder", CODED)
def test_more_than_a_recorder_can_use_gives_its_finest_step(maps, recorder):
    info = krnet.record(*maps, recorder=recorder, budget="1GB").info()
    assert info["r2"] > 0.9999 and info["bytes"] < 400_000


def test_raw_takes_float32_where_it_fits_and_float16_else(maps):
    features = maps[0]
    whole = krnet.record(features, recorder="raw").nbytes
    dtype = lambda **more: krnet.record(features, recorder="raw", **more).settings["dtype"]  # noqa: E731
    assert dtype(budget=whole + 1000) == "float32" and dtype(budget=whole - 1) == "float16"
    assert dtype(budget="1GB", dtype="float16") == "float16"
    wide = features * 1e6
    with pytest.raises(BudgetError, match="dtype float32"):
        krnet.record(wide, recorder="raw", budget=whole - 1)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("recorder", ("raw", *CODED))
def test_the_overhead_of_a_file_is_bounded_from_just_above(recorder, labelled, tmp_path):
    for shape, num_classes in (((6, 8, 7), 5), ((5,), 90), ((), 3)):
        features = torch.rand(180, *shape)
        labels = torch.arange(180) % num_classes if labelled else None
        krnet.record(features, labels, recorder=recorder, out=tmp_path / "x.krn")
        kept = archive.open_archive(tmp_path / "x.krn")
        own = [name for name in kept.names if name != "labels" and not name.startswith("probe")]
        rest = kept.nbytes - sum(kept.tensor(name).nbytes for name in own)
        told = overhead_bytes(job_for(features, labels), len(own), kept.metadata["settings"])
        assert rest <= told <= rest + 1400


def test_the_size_of_a_file_is_known_before_it_is_written(maps, tmp_path):
    job = job_for(*maps, step=0.1)
    recorder = get_recorder("quantized")
    tensors, metadata = file_contents(job, recorder, recorder.fit(job))
    archive.write(tmp_path / "x.krn", tensors, metadata)
    assert archive.file_bytes(tensors, metadata) == os.stat(tmp_path / "x.krn").st_size


def test_settings_of_the_caller_stay_as_they_are(maps):
    info = krnet.record(*maps, recorder="pca", budget="40kB", components=12, dead_zone=0.6).info()
    assert (info["settings"]["components"], info["settings"]["dead_zone"]) == (12, 0.6)
    assert info["bytes"] <= 40_000
    with pytest.raises(BudgetError, match=r"step 0\.01"):
        krnet.record(*maps, recorder="pca", budget="40kB", step=0.01)


def test_a_budget_out_of_reach_is_refused_with_the_smallest_size_and_nothing_is_written(maps, tmp_path):
    smallest = krnet.record(*maps, recorder="quantized", budget=1, over_budget=True).nbytes
    with pytest.raises(BudgetError, match=r"x\.krn: takes \d+ bytes with recorder quantized .*budget is 2000"):
        krnet.record(*maps, recorder="quantized", budget="2kB", out=tmp_path / "x.krn")
    assert list(tmp_path.iterdir()) == []
    assert krnet.record(*maps, recorder="quantized", budget=smallest + 1500).nbytes <= smallest + 1500


def test_a_finished_file_of_another_budget_is_not_taken_for_this_one(maps, tmp_path):
    path = tmp_path / "x.krn"
    krnet.record(*maps, recorder="quantized", budget="40kB", out=path)
    assert krnet.record(*maps, recorder="quantized", budget="40kB", out=path, resume=True).nbytes <= 40_000
    for budget in (20_000, 50_000):
        with pytest.raises(ResumeError, match=f"budget 40000; this one is to have budget {budget}"):
            krnet.record(*maps, recorder="quantized", budget=budget, out=path, resume=True)


def test_features_are_learned_once_in_a_search(maps, monkeypatch):
    calls = []
    recorder = get_recorder("pca")
    learn = type(recorder).learn
    monkeypatch.setattr(type(recorder), "learn", lambda *given: calls.append(1) or learn(*given))
    krnet.record(*maps, recorder="pca", budget="30kB")
    assert len(calls) == 1
    gc.collect()
    assert not LEARNED_CACHE  # and forgotten with the features


def test_a_recorder_of_one_size_takes_what_it_is_given():
    class OneSize(Recorder):
        name = "one-size"

        def fit(self, job: Job) -> Content:
            raise NotImplementedError

        replay = stored = fit

    assert OneSize().for_budget(job_for(torch.rand(5, 2), size=3), 10) == {"size": 3}


# ------------------------------------------------------------------ targets


@pytest.mark.parametrize("recorder", CODED)
def test_a_target_gives_the_smallest_file_that_reaches_it(recorder):
    features = signed_maps(120)[0]
    found = krnet.record(features, recorder=recorder, target_r2=0.9).info()
    assert 0.9 <= found["r2"] < 0.906 and found["fit"]["target_r2"] == 0.9
    coarser = krnet.record(features, recorder=recorder, step=1.1 * found["settings"]["step"]).info()
    assert coarser["r2"] < 0.9


def test_a_target_of_raw_is_reached_by_float16_or_float32(maps):
    assert krnet.record(maps[0], recorder="raw", target_r2=0.99).settings == {"dtype": "float16"}
    assert krnet.record(maps[0], recorder="raw", target_r2=1.0).settings == {"dtype": "float32"}


def test_a_budget_and_a_target_at_once_and_a_senseless_target_are_refused(maps):
    with pytest.raises(InputError, match="budget and target_r2\\) are both given; record takes one"):
        krnet.record(*maps, recorder="pca", budget="1MB", target_r2=0.5)
    with pytest.raises(InputError, match="budget and target_r2\\) are both given; record takes one"):
        krnet.record(*maps, budget="1MB", target_r2=0.5)
    for recorder in ("pca", "krnet"):
        with pytest.raises(SettingError, match=r"target_r2 is 1\.5"):
            krnet.record(*maps, recorder=recorder, target_r2=1.5)
    with pytest.raises(SettingError, match="budget is 'much'"):
        krnet.record(*maps, recorder="pca", budget="much")


def test_the_command_line_takes_a_budget_or_a_target(maps, tmp_path):
    np.save(tmp_path / "f.npy", maps[0].numpy())
    out = tmp_path / "x.krn"

    def run(*more: str):
        return CliRunner().invoke(cli.app, ["record", str(tmp_path / "f.npy"), "-o", str(out), "-q", *more])

    made = run("--recorder", "pca", "--budget", "30kB", "--json")
    assert made.exit_code == 0 and json.loads(made.stdout)["bytes"] <= 30_000, made.output
    made = run("--recorder", "transform", "--target-r2", "0.8", "--json")
    assert 0.8 <= json.loads(made.stdout)["r2"] < 0.81, made.output
    made = run("--recorder", "pca", "--set", "components=2", "--target-r2", "0.99")
    assert made.exit_code == 0 and "below the target of 0.99. No larger file was better" in made.stderr
    made = run("--target-r2", "0.7", "--iterations", "10", "--device", "cpu", "--json")
    found = json.loads(made.stdout)
    assert found["r2"] >= 0.7 and (found["settings"]["network"], found["fit"]["target_r2"]) == ("compact", 0.7)
    out.unlink()
    refused = run("--recorder", "raw", "--budget", "30kB")
    assert refused.exit_code == 1 and "error:" in refused.stderr and "budget is 30000" in refused.stderr
    assert not out.exists()
    assert run("--budget", "30XB").exit_code == 2


def test_a_finished_file_of_another_target_is_not_returned(maps, tmp_path):
    path = tmp_path / "a.krn"
    made = krnet.record(*maps, recorder="quantized", target_r2=0.5, out=path)
    again = {"recorder": "quantized", "out": path, "resume": True}
    assert krnet.record(*maps, target_r2=0.5, **again).r2 == made.r2
    for other in ({"target_r2": 0.99}, {"budget": "1MB"}):
        with pytest.raises(ResumeError, match="target_r2"):
            krnet.record(*maps, **other, **again)


def test_a_stop_below_the_target_is_refused(maps):
    with pytest.raises(InputError, match="every fit would end below the target"):
        krnet.record(*maps, target_r2=0.9, stop_at_r2=0.5, iterations=1)
