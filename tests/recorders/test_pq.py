"""Recorder pq: k-means, codes and tables against slow, obvious versions; rate and error; files that are wrong."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import krnet
from forge import rewrite_metadata
from krnet.coding import kmeans as _kmeans
from krnet.coding import matrix as _numbers
from krnet.coding.entropy import Tables
from krnet.errors import NotARecordingError, OversizedRecordingError, RecordingError, SettingError, TensorShapeError
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import normalise, scan
from krnet.io import archive
from krnet.recorders import maps as _features
from krnet.recorders.base import Job, get_recorder
from krnet.recorders.pq import books as _pq_books
from krnet.recorders.pq import budget as _pq_budget
from krnet.recorders.pq import codes as _pq_codes
from krnet.recorders.pq import recorder as pq
from krnet.train.config import FitConfig
from maps import relu_maps

SHAPE = (6, 5, 4)
SETTINGS = {"parts": 3, "bits": 5, "rounds": 6}


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A file: copy before changing."""
    path = tmp_path_factory.mktemp("pq") / "x.krn"
    krnet.record(*maps(), recorder="pq", out=path, **SETTINGS)
    return path


@pytest.fixture
def own(kept, tmp_path) -> Path:
    path = tmp_path / "x.krn"
    path.write_bytes(kept.read_bytes())
    return path


def maps() -> tuple[torch.Tensor, torch.Tensor]:
    features, labels = relu_maps(150, SHAPE)
    return features, labels + 10


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def job_for(features: torch.Tensor, labels: torch.Tensor | None = None, **settings) -> Job:
    source = open_features(features)
    return Job(
        source=source, samples=Samples(len(source), source.shape, labels), stats=scan(source), fit=FitConfig(),
        device=torch.device("cpu"), settings=settings,
    )  # fmt: skip


def rewrite(path: Path, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write the file anew, checksums and all, with some of its tensors changed: `__` in a name stands for a dot."""
    found = archive.open_archive(path)
    tensors = {name: found.tensor(name) for name in found.names}
    for name, change in changes.items():
        name = name.replace("__", ".")
        tensors[name] = change(tensors[name].clone())
    archive.write(path, tensors, found.metadata)


def clusters(num: int = 600, dim: int = 3, centres: int = 8) -> torch.Tensor:
    """Points around well separated centres."""
    middles = torch.randn(centres, dim, generator=generator(1)) * 10
    return middles[torch.arange(num) % centres] + torch.randn(num, dim, generator=generator(2)) * 0.1


# ------------------------------------------------------------------ k-means


def test_nearest_is_the_entry_of_least_distance_and_cost(monkeypatch):
    points, entries = torch.rand(50, 3, generator=generator()), torch.rand(7, 3, generator=generator(1))
    costs = torch.tensor([0.0, 0.1, math.inf, 0, 0.3, 0, 0])
    expected = [min(range(7), key=lambda k: float((point - entries[k]).square().sum() + costs[k])) for point in points]
    assert _kmeans.nearest(points, entries, costs).tolist() == expected
    monkeypatch.setitem(_kmeans.MAX_DISTANCES, "cpu", 30)
    assert _kmeans.nearest(points, entries, costs).tolist() == expected


def test_kmeans_finds_clusters_that_are_there():
    """Entries drawn at random would leave some of the eight clusters without one, for good."""
    points = clusters()
    for seed in range(5):
        entries = _kmeans.kmeans(points, 16, 20, generator(seed))
        error = (points - entries[_kmeans.nearest(points, entries, torch.zeros(16))]).square().mean().item()
        assert error < 0.01


def test_one_entry_is_the_mean_and_two_are_the_means_of_their_points():
    points = torch.rand(200, 2, generator=generator())
    assert torch.allclose(_kmeans.kmeans(points, 1, 1, generator(3))[0], points.mean(0))
    entries = _kmeans.kmeans(points, 2, 100, generator(3))
    closest = torch.cdist(points, entries).argmin(1)
    assert torch.allclose(entries, torch.stack([points[closest == k].mean(0) for k in range(2)]), atol=1e-5)


def test_the_error_is_that_of_faiss():
    faiss = pytest.importorskip("faiss")
    points = relu_maps(400, (8, 5, 5))[0].movedim(1, -1).reshape(-1, 8).contiguous()
    theirs = faiss.Kmeans(8, 32, niter=20, seed=1, max_points_per_centroid=10**6)
    theirs.train(points.numpy())
    entries = _kmeans.kmeans(points, 32, 20, generator())
    ours = (points - entries[_kmeans.nearest(points, entries, torch.zeros(32))]).square().sum().item()
    assert ours < 1.03 * float(theirs.obj[-1])


def test_the_error_is_that_of_the_kmeans_of_scikit_learn():
    cluster = pytest.importorskip("sklearn.cluster")
    points = relu_maps(150, (8, 5, 5))[0].movedim(1, -1).reshape(-1, 8).contiguous()
    theirs = cluster.KMeans(32, n_init=1, max_iter=20, random_state=0).fit(points.numpy())
    entries = _kmeans.kmeans(points, 32, 20, generator())
    ours = (points - entries[_kmeans.nearest(points, entries, torch.zeros(32))]).square().sum().item()
    assert ours < 1.05 * theirs.inertia_


def test_a_price_on_bits_lowers_error_and_price_together():
    points = relu_maps(300, (4, 5, 5))[0].movedim(1, -1).reshape(-1, 4).contiguous()
    start = _kmeans.kmeans(points, 64, 15, generator())

    def measured(entries: torch.Tensor, costs: torch.Tensor) -> tuple[float, float]:
        codes = _kmeans.nearest(points, entries, costs)
        error = (points - entries[codes]).square().sum(1).mean().item()
        return error, 8 * _pq_budget.entropy_bytes(codes.numpy()) / len(points)

    before = measured(*_kmeans.constrain(points, start, 0.0, 10))
    for weight in (0.2, 2.0):
        after = measured(*_kmeans.constrain(points, start, weight, 10))
        assert after[1] < before[1] and after[0] + weight * after[1] < before[0] + weight * before[1]
        before = after


def test_channels_that_are_alike_come_into_one_part():
    base = torch.randn(500, 3, generator=generator())
    points = torch.stack([base[:, k % 3] * (1 + k) for k in range(6)], 1)
    points += 0.01 * torch.randn(points.shape, generator=generator(1))
    order = _pq_books.order_by_correlation(points, [2, 2, 2]).tolist()
    assert sorted(map(sorted, (order[:2], order[2:4], order[4:]))) == [[0, 3], [1, 4], [2, 5]]
    points[:, 2] = 0.5  # a channel that does not vary is like none
    assert sorted(_pq_books.order_by_correlation(points, [4, 2]).tolist()) == list(range(6))


# ------------------------------------------------------------------ codes and tables


def test_codes_and_entries_are_those_of_a_slow_version():
    features = relu_maps(20, SHAPE)[0]
    job = job_for(features)
    config = _pq_books.resolve_settings(job, _pq_books.PQConfig(parts=2, bits=3, rounds=3, rotations=0))
    books = _pq_books.Trainer(job, config).books(0.0)
    found = _pq_codes.encode_samples(job, books, torch.arange(20))
    x = normalise(features, job.stats.low, job.stats.high)
    error, expected = 0.0, torch.empty_like(x)
    for part, entries in enumerate(books.entries):
        channels = books.order[3 * part : 3 * part + 3]
        points = x[:, channels].movedim(1, -1).reshape(-1, 3)
        chosen = torch.cdist(points, entries).argmin(1)
        used, counts = chosen.unique(return_counts=True)
        assert sorted(np.bincount(found.values[:, part].ravel()).tolist()) == sorted(counts.tolist())
        means = torch.stack([points[chosen == k].mean(0) for k in range(len(entries)) if (chosen == k).any()])
        place = {int(k): means[i] for i, k in enumerate(used)}
        rebuilt = torch.stack([place[int(k)] for k in chosen])
        error += (points - rebuilt).square().sum().item()
        expected[:, channels] = rebuilt.view(20, 5, 4, 3).movedim(-1, 1)
    assert found.squared_error == pytest.approx(error / x.numel(), rel=1e-4)
    codes = torch.from_numpy(found.values.reshape(20, -1).astype(np.float32))
    assert torch.allclose(found.books.inverse(codes).view_as(x), expected, atol=1e-5)


def test_positions_that_are_alike_share_a_table():
    counts = torch.tensor([[90, 5, 5], [5, 90, 5]]).repeat(8, 1) * 100
    table = _pq_codes.group_positions(counts, 16)
    assert table.tolist() == [table[0], table[1]] * 8 and table[0] != table[1]
    assert _pq_codes.group_positions(counts, 1).tolist() == [0] * 16
    assert _pq_codes.group_positions(counts // 5000, 16).tolist() == [0] * 16  # too few codes to pay for a second


def test_a_rotation_keeps_lengths_and_brings_parts_nearer_to_their_entries():
    """Four channels mixed from two, in parts that share them. How much is gained depends on the start."""
    base = torch.rand(3000, 2, generator=generator())
    points = torch.stack([base[:, 0], base[:, 1], base[:, 0] + 0.1 * base[:, 1], base[:, 1] - base[:, 0]], 1)
    turn = _pq_books.best_rotation(points, [2, 2], 16, 8, generator()).float()
    assert torch.allclose(turn @ turn.T, torch.eye(4), atol=2e-3)

    def error(x: torch.Tensor) -> float:
        total = 0.0
        for part in x.split(2, dim=1):
            entries = _kmeans.kmeans(part, 16, 15, generator())
            total += (part - entries[_kmeans.nearest(part, entries, torch.zeros(16))]).square().sum().item()
        return total

    assert error(points @ turn) < 0.95 * error(points)


def test_what_is_replayed_is_what_the_codes_say(kept):
    """Through the file: the only difference is the rounding of the entries, each up to a step in a width of two."""
    features = maps()[0]
    job = job_for(features)
    config = _pq_books.resolve_settings(job, _pq_books.PQConfig(**SETTINGS))
    found = _pq_codes.encode_samples(job, _pq_books.Trainer(job, config).books(0.0), torch.arange(150))
    codes = torch.from_numpy(found.values.reshape(150, -1).astype(np.float32))
    expected = found.books.inverse(codes).view(150, *SHAPE).clamp(0, 1)
    recording = krnet.open(kept)
    step = recording.info()["settings"]["entry_step"]
    replayed = normalise(recording[:], job.stats.low, job.stats.high)
    assert (replayed - expected).abs().max() <= 6**0.5 * step  # a rotation of six channels
    assert recording.info()["mse"] == pytest.approx(found.squared_error, rel=0.02)


# ------------------------------------------------------------------ what comes back


def test_replays_are_near_the_features_and_the_file_is_far_smaller(tmp_path):
    features, labels = relu_maps(600, (16, 8, 8))
    path = tmp_path / "x.krn"
    info = krnet.record(features, labels, recorder="pq", out=path, parts=4, rounds=5, rotations=1).info()
    assert info["bytes"] == os.stat(path).st_size < features.nbytes / 15
    assert info["r2"] > 0.9 and info["fast_extra_mse"] == 0
    report = krnet.verify(path, features)
    assert report["same_features"] and report["mse"] == pytest.approx(info["mse"], rel=1e-5)
    assert torch.equal(krnet.open(path).labels, labels)


def test_what_is_too_large_to_keep_is_decoded_each_time_and_the_same(kept, monkeypatch):
    everything = krnet.open(kept)[:]
    monkeypatch.setattr(_numbers, "CACHE_BYTES", 0)
    assert torch.equal(krnet.open(kept)[[149, 2, 70, 2]], everything[[149, 2, 70, 2]])


def test_one_sample_is_read_from_its_own_block(kept, monkeypatch):
    expected = krnet.open(kept)[:]
    recording = krnet.open(kept)
    recording[0]  # with it the codebooks are read
    calls = []
    decode = Tables.decode
    monkeypatch.setattr(Tables, "decode", lambda self, *given: calls.append(1) or decode(self, *given))
    assert torch.equal(recording[100], expected[100])
    assert len(calls) == 1


def test_parts_of_unequal_width_and_codes_of_12_bits_are_recorded():
    features = relu_maps(300, (7, 4, 4))[0]
    info = krnet.record(features, recorder="pq", parts=3, bits=12, rounds=2).info()
    assert info["r2"] > 0.99 and info["settings"]["parts"] == 3


# ------------------------------------------------------------------ rate and error


def test_more_parts_more_bits_and_a_lower_price_give_a_better_replay():
    features = relu_maps(400, (8, 6, 6))[0]
    for settings in (
        [{"parts": 2}, {"parts": 4}, {"parts": 8}],
        [{"bits": 2}, {"bits": 4}, {"bits": 6}],
        [{"rate_weight": 0.02}, {"rate_weight": 0.004}, {"rate_weight": 0.0}],
    ):
        common = {"parts": 4, "bits": 6, "rounds": 6, "rotations": 1}
        points = [krnet.record(features, recorder="pq", **common | given).info() for given in settings]
        for worse, better in pairwise(points):
            assert worse["bytes"] < better["bytes"] and worse["r2"] < better["r2"]


def test_the_codes_take_their_entropy_and_no_more(kept):
    """Of each part and position group; ANS adds up to four bytes a block."""
    found = archive.open_archive(kept)
    features = maps()[0]
    job = job_for(features)
    plan = _pq_codes.make_plan(
        job,
        config := _pq_books.resolve_settings(job, _pq_books.PQConfig(**SETTINGS)),
        _pq_books.Trainer(job, config),
        torch.arange(150),
    )
    column = plan.tables.column.reshape(3, -1)
    ideal = sum(
        _pq_budget.entropy_bytes(plan.codes.values[:, part][:, column[part] == table])
        for part in range(3)
        for table in np.unique(column[part])
    )
    stream = found.spec("codes.stream")[1][0]
    assert ideal < stream < 1.01 * ideal + 4 * 10


def test_the_size_is_told_before_anything_is_coded(kept):
    job = job_for(*maps())
    config = _pq_books.resolve_settings(job, _pq_books.PQConfig(**SETTINGS))
    plan = _pq_codes.make_plan(job, config, _pq_books.Trainer(job, config), torch.arange(150))
    size = kept.stat().st_size
    assert size <= plan.size_bytes <= size + 2500


def test_features_that_take_several_readings_are_recorded_the_same(kept, monkeypatch, tmp_path):
    for module in (_features, _pq_codes, pq):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 120 * 16)
    krnet.record(*maps(), recorder="pq", out=tmp_path / "x.krn", **SETTINGS)
    parts, whole = krnet.open(tmp_path / "x.krn").info(), krnet.open(kept).info()
    assert parts["r2"] == pytest.approx(whole["r2"], abs=0.02)  # other positions to train on
    assert parts["bytes"] == pytest.approx(whole["bytes"], rel=0.05)


@pytest.mark.parametrize("budget", [12_000, 20_000, 60_000])
def test_a_budget_is_met_and_used(budget, tmp_path, monkeypatch):
    monkeypatch.setattr(_pq_budget, "TRIAL_BITS", (4, 6))
    features, labels = relu_maps(500, (8, 6, 6))
    settings = get_recorder("pq").for_budget(job_for(features, labels, rounds=5, rotations=1), budget)
    assert settings["rounds"] == 5
    path = tmp_path / "x.krn"
    info = krnet.record(features, labels, recorder="pq", out=path, **settings).info()
    assert path.stat().st_size <= budget
    for other in ({"parts": 1, "bits": 6}, {"parts": 4, "bits": 4}):
        plain = krnet.record(features, labels, recorder="pq", rounds=5, rotations=1, **other).info()
        assert plain["bytes"] > budget - 1500 or plain["r2"] < info["r2"] + 0.002
    if budget < 60_000:  # where the largest choice is not yet too small
        assert path.stat().st_size > 0.99 * budget - 1500


def test_a_search_codes_all_samples_a_few_times_and_the_fit_after_it_none(monkeypatch):
    features, calls = relu_maps(300, (8, 6, 6))[0], []
    code = _pq_codes.encode_samples
    monkeypatch.setattr(_pq_budget, "TRIAL_POSITIONS", 2048)
    monkeypatch.setattr(
        _pq_codes, "encode_samples", lambda job, books, ids: calls.append(len(ids)) or code(job, books, ids)
    )
    job = job_for(features, rounds=3, rotations=0)
    settings = get_recorder("pq").for_budget(job, 12_000)
    assert 1 <= calls.count(300) <= 5
    calls.clear()
    get_recorder("pq").fit(replace(job, settings=settings))
    assert calls == []
    for module in (_pq_budget, _pq_codes):
        monkeypatch.setattr(module, "Trainer", None)  # no codebooks are begun anew
    get_recorder("pq").for_budget(job, 12_050)


def test_a_budget_beyond_all_use_takes_what_is_of_use():
    features = relu_maps(60, SHAPE)[0]
    job = job_for(features)
    settings = get_recorder("pq").for_budget(job, 10**9)
    assert (settings["parts"], settings["bits"]) == (6, 10)
    recording = krnet.record(features, recorder="pq", **settings)
    assert recording.info()["r2"] > 0.9999


def test_single_numbers_find_the_entry_that_all_distances_say():
    points, entries = torch.randn(500, 1, generator=generator()), torch.randn(40, 1, generator=generator(1))
    entries[7] = entries[8]
    costs = torch.rand(40, generator=generator(2)) * 0.3
    costs[3] = math.inf
    for cost in (costs, torch.zeros(40)):
        found = (points - entries.T).square() + cost
        chosen = found.gather(1, _kmeans.nearest(points, entries, cost)[:, None])[:, 0]
        assert torch.allclose(chosen, found.min(1).values, atol=1e-6)


def test_the_guess_of_the_bytes_that_an_r2_takes_is_a_good_one():
    job = job_for(relu_maps(300, (8, 6, 6))[0], rounds=3, rotations=0)
    guess, fixed = get_recorder("pq").likely_bytes(job, 0.9)
    config = _pq_books.PQConfig(**get_recorder("pq").for_budget(job, int(guess)))
    found = _pq_codes.whole_plan(job, _pq_books.resolve_settings(job, config))
    assert fixed < guess and 0.05 < found.codes.squared_error / job.stats.variance < 0.2


def test_a_budget_too_small_for_any_setting_gives_a_small_one():
    features = relu_maps(100, SHAPE)[0]
    job = job_for(features, rounds=3)
    settings = get_recorder("pq").for_budget(job, 100)
    assert krnet.record(features, recorder="pq", **settings).nbytes < 8000


def test_settings_that_are_given_stay_under_a_budget(monkeypatch):
    monkeypatch.setattr(_pq_budget, "TRIAL_BITS", (4, 6))
    features = relu_maps(200, SHAPE)[0]
    settings = get_recorder("pq").for_budget(job_for(features, parts=3, bits=5, rounds=3), 9000)
    assert (settings["parts"], settings["bits"]) == (3, 5)
    settings = get_recorder("pq").for_budget(job_for(features, rate_weight=0.01, rounds=3), 9000)
    assert settings["rate_weight"] == 0.01


# ------------------------------------------------------------------ what makes no sense


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"parts": 0}, "parts is 0"), ({"parts": 7}, "parts is 7; these features have 6 channels"),
        ({"parts": 2.0}, "parts is 2.0"), ({"parts": 257}, "parts is 257; expected 1 to 256"),
        ({"bits": 0}, "bits is 0"), ({"bits": 13}, "bits is 13; expected 1 to 12"), ({"bits": "8"}, "bits is '8'"),
        ({"rate_weight": -1}, "rate_weight is -1"), ({"rate_weight": float("nan")}, "rate_weight is nan"),
        ({"rotations": -1}, "rotations is -1"), ({"rounds": 0}, "rounds is 0"),
        ({"train_positions": 0}, "train_positions is 0"),
        ({"entry_step": 0}, "entry_step is 0"), ({"block_size": 0}, "block_size is 0"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings, why):
    with pytest.raises(SettingError, match=why):
        krnet.record(maps()[0][:40], recorder="pq", **settings)


# ------------------------------------------------------------------ files that are damaged or forged


def beyond(first: torch.Tensor) -> torch.Tensor:
    return first + 30


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("order", lambda t: t * 0, NotARecordingError),
        ("order", lambda t: t + 1, NotARecordingError),
        ("order", lambda t: t[1:].clone(), TensorShapeError),
        ("turn", lambda t: t[1:].clone(), TensorShapeError),
        ("turn", lambda t: t.float(), TensorShapeError),
        ("sizes", lambda t: t * 0, NotARecordingError),
        ("sizes", lambda t: t - 1, RecordingError),
        ("sizes", lambda t: t + 8000, NotARecordingError),
        ("sizes", lambda t: t.long(), TensorShapeError),
        ("codes__first", beyond, NotARecordingError),
        ("codes__first", lambda t: t - 1, NotARecordingError),
        ("codes__column", lambda t: t + 200, NotARecordingError),
        ("codes__weights", lambda t: t[:-1].clone(), NotARecordingError),
        ("codes__stream", lambda t: t[1:].clone(), NotARecordingError),
        ("entries__centroids", lambda t: t[1:].clone(), TensorShapeError),
        ("entries__column", lambda t: t[1:].clone(), TensorShapeError),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_together_are_refused(own, name, change, error):
    rewrite(own, **{name: change})
    with pytest.raises(error):
        krnet.open(own)[:]


@pytest.mark.parametrize(
    "changes",
    [{"parts": None}, {"parts": 0}, {"parts": 99}, {"entry_step": None}, {"rotations": None}, {"bits": "x"},
     {"block_size": 10**9}, {"more": 1}],
    ids=str,
)  # fmt: skip
def test_settings_that_no_recorder_writes_are_refused(own, changes):
    rewrite_metadata(own, lambda metadata: metadata["settings"].update(changes))
    with pytest.raises(NotARecordingError, match=r"x\.krn: settings of recorder pq refused"):
        krnet.open(own)[0]


def test_blocks_and_parts_of_another_size_are_refused_before_anything_is_made_of_them(own):
    original = own.read_bytes()
    for edit in (
        lambda metadata: metadata["settings"].update(block_size=20),
        lambda metadata: metadata["settings"].update(parts=2),
    ):
        own.write_bytes(original)
        rewrite_metadata(own, edit)
        with pytest.raises((TensorShapeError, OversizedRecordingError)):
            krnet.open(own)[0]
