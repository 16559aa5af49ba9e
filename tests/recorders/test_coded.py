"""Recorders that quantise and entropy-code: what quantized, transform and pca share, then what is their own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import krnet
from forge import rewrite_metadata
from krnet.coding import matrix as _numbers
from krnet.coding.entropy import MAX_ALPHABET, Tables
from krnet.errors import InputError, NotARecordingError, OversizedRecordingError, SettingError, TensorShapeError
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import normalise, scan
from krnet.io import archive
from krnet.recorders import axes, transform
from krnet.recorders import maps as _features
from krnet.recorders.axes import principal_axes
from krnet.recorders.base import Job, get_recorder
from krnet.recorders.coded import SEARCH_ROWS
from krnet.train.config import FitConfig
from maps import relu_maps

RECORDERS = ("quantized", "transform", "pca")
every_recorder = pytest.mark.parametrize("recorder", RECORDERS)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """One file of each recorder, all of the same features: copy before changing."""
    features, labels = maps()
    folder = tmp_path_factory.mktemp("coded")
    for recorder in RECORDERS:
        krnet.record(features, labels, recorder=recorder, out=folder / f"{recorder}.krn", step=0.1)
    return {recorder: folder / f"{recorder}.krn" for recorder in RECORDERS}


@pytest.fixture
def own(files, tmp_path) -> Callable[[str], Path]:
    """A copy of a recorder's file."""

    def copied(recorder: str) -> Path:
        path = tmp_path / files[recorder].name
        path.write_bytes(files[recorder].read_bytes())
        return path

    return copied


def maps() -> tuple[torch.Tensor, torch.Tensor]:
    features, labels = relu_maps(150, (6, 8, 7))
    return features, labels + 10


def job_for(features: torch.Tensor, **settings) -> Job:
    source = open_features(features)
    samples = Samples(len(source), source.shape, None)
    return Job(
        source=source, samples=samples, stats=scan(source), fit=FitConfig(), device=torch.device("cpu"),
        settings=settings,
    )  # fmt: skip


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def rewrite(path: Path, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write the file anew, checksums and all, with some of its tensors changed: `__` in a name stands for a dot."""
    kept = archive.open_archive(path)
    tensors = {name: kept.tensor(name) for name in kept.names}
    for name, change in changes.items():
        name = name.replace("__", ".")
        tensors[name] = change(tensors[name].clone())
    archive.write(path, tensors, kept.metadata)


def damage(stream: torch.Tensor) -> torch.Tensor:
    stream[::3] = stream[::3] ^ 85
    return stream


# ------------------------------------------------------------------ what comes back


@every_recorder
def test_the_file_is_far_smaller_than_the_features_and_fast_replays_lose_nothing(files, recorder):
    info = krnet.open(files[recorder]).info()
    assert info["bytes"] < maps()[0].nbytes / 8 and info["fast_extra_mse"] == 0


@every_recorder
def test_one_sample_is_read_from_its_own_block(files, recorder, monkeypatch):
    expected = krnet.open(files[recorder])[:]
    recording = krnet.open(files[recorder])
    recording[0]  # with it the basis is read
    calls = []
    decode = Tables.decode
    monkeypatch.setattr(Tables, "decode", lambda self, *given: calls.append(1) or decode(self, *given))
    assert_near(recording[100][None], expected[100:101])
    assert len(calls) == 1
    num_blocks = -(-150 // 16)
    recording[:], recording[:]
    assert len(calls) == 2 * num_blocks - 1  # each block twice, with sample 0 before: the second time it is kept
    recording[:]
    assert len(calls) == 2 * num_blocks - 1


@every_recorder
def test_what_is_too_large_to_keep_is_decoded_each_time_and_the_same(files, recorder, monkeypatch):
    expected = krnet.open(files[recorder])[:]
    monkeypatch.setattr(_numbers, "CACHE_BYTES", 0)
    recording = krnet.open(files[recorder])
    assert_near(recording[[149, 2, 70, 2]], expected[[149, 2, 70, 2]])
    assert_near(recording[:], expected)
    assert recording[[]].shape == (0, 6, 8, 7)


# ------------------------------------------------------------------ rate and error


@every_recorder
def test_more_bytes_give_a_better_replay(recorder):
    features, labels = maps()
    points = [krnet.record(features, labels, recorder=recorder, step=step).info() for step in (0.4, 0.2, 0.1, 0.03)]
    for worse, better in pairwise(points):
        assert worse["bytes"] < better["bytes"] and worse["r2"] < better["r2"]


@pytest.mark.parametrize(("recorder", "share"), [("quantized", 1), ("transform", 1), ("pca", 6 / 16)])
def test_the_error_of_rounding_is_that_of_uniform_noise(recorder, share):
    """step^2 / 12 for each number that is coded, as orthonormal transforms keep it; here pca codes 6 of 16."""
    mixing = torch.randn(6, 16)
    features = (torch.randn(3000, 6) @ mixing).view(3000, 4, 2, 2)
    more = {"components": 6} if recorder == "pca" else {}
    info = krnet.record(features, recorder=recorder, step=0.02, dead_zone=0.5, **more).info()
    assert info["mse"] == pytest.approx(0.02**2 / 12 * share, rel=0.06)


def test_replays_are_at_the_centroids_of_their_bins():
    """Values that thin out: the middle of a bin lies above what is in it."""
    features = torch.distributions.Exponential(1.0).sample((2000, 3))
    recording = krnet.record(features, recorder="quantized", step=0.1, dead_zone=0.5)
    x = normalise(features, features.amin(0), features.amax(0))
    found = normalise(recording[:], features.amin(0), features.amax(0))
    middles = (x / 0.1).round() * 0.1
    assert (found - x).square().mean() < 0.9 * (middles - x).square().mean()
    for value in found[:, 0].unique()[:4]:
        assert x[found[:, 0] == value, 0].mean() == pytest.approx(float(value), abs=0.02)


def test_the_zero_of_signed_features_is_the_middle_of_a_bin():
    features = torch.randn(500, 4)
    features[::2] = 0
    found = krnet.record(features, recorder="quantized", step=0.2, dead_zone=0.75)[:]
    assert (found[::2].abs() < 0.1 * features.std()).all()


def test_a_dead_zone_takes_fewer_bytes_at_the_same_error():
    """Half of the values are zero, as after a ReLU."""
    features = torch.randn(2000, 4, 3, 3).relu()
    plain = krnet.record(features, recorder="quantized", step=0.1, dead_zone=0.5).info()
    dead = krnet.record(features, recorder="quantized", step=0.09, dead_zone=0.75).info()
    assert dead["bytes"] < 0.99 * plain["bytes"] and dead["mse"] < plain["mse"]


@every_recorder
def test_the_size_is_told_before_anything_is_coded(recorder, tmp_path):
    features = relu_maps(1500, (6, 8, 7))[0]
    for settings in ({"step": 0.05}, {"step": 0.2, "block_size": 3}):
        path = tmp_path / "x.krn"
        krnet.record(features, recorder=recorder, out=path, **settings)
        chosen = get_recorder(recorder)
        job = job_for(features)
        told = chosen.size_bytes(job, settings)
        assert told == pytest.approx(path.stat().st_size, rel=0.01, abs=1200)
        assert chosen.size_bytes(job, settings, max_rows=300) == pytest.approx(told, rel=0.05)


@every_recorder
def test_features_that_take_several_readings_are_recorded_as_well(files, recorder, monkeypatch, tmp_path):
    for module in (_features, _numbers):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 336 * 16)  # one block of 16 samples
    krnet.record(*maps(), recorder=recorder, out=tmp_path / "x.krn", step=0.1)
    # The axes of a covariance that was added up otherwise may be turned a little.
    parts, whole = krnet.open(tmp_path / "x.krn").info(), krnet.open(files[recorder]).info()
    assert parts["r2"] == pytest.approx(whole["r2"], abs=1e-4)
    assert parts["bytes"] == pytest.approx(whole["bytes"], rel=1e-3)


def test_blocks_beyond_64_kilobytes_are_recorded(tmp_path):
    features = torch.rand(20, 4, 64, 64)
    krnet.record(features, recorder="quantized", step=1 / 255, out=tmp_path / "x.krn")
    assert archive.open_archive(tmp_path / "x.krn").spec("coded.lengths")[0] == torch.uint32
    assert (krnet.open(tmp_path / "x.krn")[:] - features).abs().max() < 1 / 255


def test_large_samples_have_their_axes_from_a_sketch_that_is_as_good(monkeypatch):
    features = relu_maps(200, (6, 8, 7))[0]
    exact = krnet.record(features, recorder="pca", step=0.1, components=20).info()
    monkeypatch.setattr(axes, "MAX_EXACT_SIZE", 100)
    sketched = krnet.record(features, recorder="pca", step=0.1, components=20).info()
    assert sketched["r2"] == pytest.approx(exact["r2"], abs=2e-3)
    assert krnet.record(features, recorder="pca", step=0.1).info()["settings"]["components"] > 20
    assert krnet.record(features[:15], recorder="pca", step=0.1).info()["r2"] > 0.9  # fewer samples than axes


def test_the_axes_of_pca_are_those_of_an_svd():
    features = relu_maps(200, (6, 8, 7))[0]
    x = normalise(features, features.amin((0, 2, 3)), features.amax((0, 2, 3))).flatten(1)
    _, s, v = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    found = principal_axes(job_for(features), None)
    assert torch.allclose(found.std[:10], s[:10] / 200**0.5, rtol=1e-3)
    assert torch.allclose((found.axes[:10] * v[:10]).sum(1).abs(), torch.ones(10), atol=1e-2)


def test_fewer_samples_than_values_have_the_same_axes_from_a_smaller_matrix():
    few, many = relu_maps(60, (6, 8, 7))[0], relu_maps(400, (6, 8, 7))[0]
    for features, num_axes in ((few, 60), (many, 336)):
        found = principal_axes(job_for(features), None)
        x = normalise(features, features.amin((0, 2, 3)), features.amax((0, 2, 3))).flatten(1).double()
        _, s, v = torch.linalg.svd(x - x.mean(0), full_matrices=False)
        assert found.axes.shape == (num_axes, 336)
        assert torch.allclose(found.axes @ found.axes.T, torch.eye(num_axes), atol=1e-5)
        assert torch.allclose(found.std[:50].double(), s[:50] / len(x) ** 0.5, rtol=1e-4)
        assert torch.allclose((found.axes[:10] * v[:10]).sum(1).abs(), torch.ones(10).double(), atol=1e-3)
    constant = principal_axes(job_for(torch.full((9, 3, 5), 2.5)), None)
    assert constant.axes.isfinite().all() and not constant.std.any()


def test_the_cosine_transform_is_orthonormal_and_begins_with_the_mean():
    for size in (1, 2, 7, 8):
        matrix = transform.dct(size)
        assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-6)
        assert torch.allclose(matrix[0], torch.full((size,), size**-0.5))


# ------------------------------------------------------------------ budgets beyond what any step can use


def num_symbols(recording: krnet.Recording) -> int:
    """From the lowest to the highest of all tables."""
    kept = archive.open_archive(recording.path)
    first, sizes = (kept.tensor(f"coded.{name}").long() for name in ("first", "sizes"))
    return int((first + sizes).max() - first.min())


def with_an_unseen_outlier() -> torch.Tensor:
    """A sample whose numbers are the widest by far, and which is not among those that a search looks at."""
    features = torch.rand(1500, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    assert 2 not in _numbers.evenly_spaced(1500, SEARCH_ROWS)
    features[2] = 1
    return features


@every_recorder
@pytest.mark.parametrize("wanted", [{"budget": "1MB"}, {"target_r2": 0.99999999}], ids=str)
def test_more_than_any_step_can_use_gives_the_finest_step_for_all_samples(recorder, wanted):
    recording = krnet.record(with_an_unseen_outlier(), recorder=recorder, **wanted)
    assert 0.98 * MAX_ALPHABET < num_symbols(recording) <= MAX_ALPHABET
    assert recording.nbytes <= 1_000_000 and recording.info()["r2"] > 0.99999


def test_a_step_that_is_too_fine_once_it_is_rounded_is_made_coarser():
    features = relu_maps(60, (4, 4, 4), seed=1)[0].half()  # 4,097 symbols with the step that a search ends at
    recording = krnet.record(features, recorder="pca", budget="300kB")
    assert 0.98 * MAX_ALPHABET < num_symbols(recording) <= MAX_ALPHABET


def test_samples_so_wide_that_symbols_would_overflow_lead_to_a_coarser_step(monkeypatch):
    monkeypatch.setattr(_numbers, "MAX_SYMBOL", 2200)  # as if the outlier were far wider
    recording = krnet.record(with_an_unseen_outlier(), recorder="transform", budget="1MB")
    assert 2000 < num_symbols(recording) <= MAX_ALPHABET


@every_recorder
def test_a_given_step_that_is_too_fine_is_refused_whatever_the_budget(recorder):
    with pytest.raises(SettingError, match=r"step is 1e-05, which gives \d+ different values; expected at most 4096"):
        krnet.record(with_an_unseen_outlier(), recorder=recorder, step=1e-5, budget="1MB")


# ------------------------------------------------------------------ what makes no sense


@every_recorder
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"step": 0}, "step is 0"), ({"step": "a"}, "step is 'a'"), ({"step": True}, "step is True"),
        ({"step": float("nan")}, "step is nan"), ({"dead_zone": 0.4}, "dead_zone is 0.4; expected 0.5 to 1"),
        ({"block_size": 0}, "block_size is 0"), ({"block_size": 257}, "block_size is 257; expected 1 to 256"),
        ({"block_size": 2.5}, "block_size is 2.5"), ({"step": -1}, "step is -1"),
        ({"d0": 8}, "d0 is given, a setting of recorder autoencoder or paper and not of"),
        ({"step": 1e-5}, r"step is 1e-05, which gives \d+ different values; expected at most 4096. Take a step of"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(recorder, settings, why):
    with pytest.raises(SettingError, match=why):
        krnet.record(maps()[0][:40], recorder=recorder, **settings)


@pytest.mark.parametrize("components", [0, -1, 1.5, True, 41, "all"], ids=repr)
def test_components_that_the_features_cannot_have_are_refused(components):
    with pytest.raises(SettingError, match="components is"):
        krnet.record(maps()[0][:40], recorder="pca", components=components)


def test_transform_refuses_axes_too_long_for_a_matrix():
    with pytest.raises(InputError, match=r"shape \(5000,\).*at most 4096.*pca or quantized"):
        krnet.record(torch.rand(3, 5000), recorder="transform")


# ------------------------------------------------------------------ files that are damaged or forged


@every_recorder
def test_streams_that_do_not_decode_are_refused_by_name(own, recorder):
    path = own(recorder)
    rewrite(path, coded__stream=damage)
    with pytest.raises(NotARecordingError, match="a block of"):
        krnet.open(path)[:]


@every_recorder
@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("weights", lambda t: t.int().add(1).to(torch.uint16), NotARecordingError),
        ("weights", lambda t: t[:-1], NotARecordingError),
        ("weights", lambda t: t.int(), TensorShapeError),
        ("sizes", lambda t: (t.int() * 0).to(torch.uint16), NotARecordingError),
        ("first", lambda t: t[None], TensorShapeError),
        ("first", lambda t: t[:0], NotARecordingError),
        ("column", lambda t: t + 200, NotARecordingError),
        ("column", lambda t: t[1:], TensorShapeError),
        ("lengths", lambda t: t.long(), TensorShapeError),
        ("lengths", lambda t: t[1:].clone(), TensorShapeError),
        ("lengths", lambda t: t.int().add(1).to(torch.uint16), NotARecordingError),
        ("stream", lambda t: t[1:].clone(), NotARecordingError),
        ("centroids", lambda t: t[1:].clone(), TensorShapeError),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_together_are_refused(own, recorder, name, change, error):
    path = own(recorder)
    rewrite(path, **{f"coded__{name}": change})
    with pytest.raises(error):
        krnet.open(path)[0]


@every_recorder
@pytest.mark.parametrize("changes", [{"step": 0}, {"block_size": 0}, {"block_size": 10**9}, {"more": 1}], ids=str)
def test_settings_that_no_recorder_writes_are_refused(own, recorder, changes):
    path = own(recorder)
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(changes))
    with pytest.raises(NotARecordingError, match=rf"{recorder}\.krn: settings of recorder {recorder} refused"):
        krnet.open(path)[0]


@every_recorder
def test_blocks_of_another_size_are_refused_before_anything_is_made_of_them(own, recorder):
    path = own(recorder)
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(block_size=20))
    with pytest.raises((TensorShapeError, OversizedRecordingError)):
        krnet.open(path)[0]


def test_components_beyond_what_the_file_pays_for_are_refused(own):
    path = own("pca")
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(components=10**6))
    with pytest.raises(
        OversizedRecordingError, match=r"pca\.krn: to open it .* up to [\d.]+ GB of memory; expected at most"
    ):
        krnet.open(path)[0]
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(components=None))
    with pytest.raises(NotARecordingError, match="number of components"):
        krnet.open(path)[0]


# ------------------------------------------------------------------ on the command line


@pytest.mark.parametrize("recorder", ["quantized", "transform", "pca", "krnet", "pq", "raw"])
@pytest.mark.parametrize("shape", [(3,), (8, 4, 4), (40, 1, 1)])
def test_no_file_is_smaller_than_the_floor_that_is_known_before_a_fit(recorder, shape):
    features = torch.zeros(30, *shape)
    features[0] = 1  # hardly anything to store
    options = {"iterations": 1} if recorder == "krnet" else {}
    made = krnet.record(features, recorder=recorder, budget=1, over_budget=True, **options)
    assert get_recorder(recorder).floor_bytes(30, shape, {}) <= made.nbytes
