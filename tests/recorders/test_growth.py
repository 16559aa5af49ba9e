"""Coded recordings that grow: old samples stay as they are, new ones are coded with what the recording has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import krnet
from forge import rewrite_metadata
from krnet import task_loop as learning
from krnet.coding.entropy import MAX_ALPHABET
from krnet.errors import BudgetError, InputError, NotARecordingError, SettingError
from krnet.io import archive
from learning_tools import settings_for, small_digits, small_tasks
from maps import relu_maps

SHAPE = (6, 8, 8)
RECORDERS = ("quantized", "transform", "pca", "pq")
SETTINGS = {
    "quantized": {"step": 0.1},
    "transform": {"step": 0.15},
    "pca": {"step": 0.15},
    "pq": {"parts": 2, "bits": 6, "rate_weight": 0.002},
}
FREE = {"quantized": "dead_zone", "transform": "dead_zone", "pca": "dead_zone", "pq": "rate_weight"}
every_recorder = pytest.mark.parametrize("recorder", RECORDERS)


def maps(num: int = 600) -> tuple[Tensor, Tensor]:
    features, labels = relu_maps(num, SHAPE)
    return features, labels + 3


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> dict[str, Path]:
    """A file of each recorder, of the first 250 samples: not a whole number of blocks."""
    features, labels = maps()
    folder = tmp_path_factory.mktemp("starts")
    for recorder in RECORDERS:
        out = folder / f"{recorder}.krn"
        krnet.record(features[:250], labels[:250], recorder=recorder, out=out, **SETTINGS[recorder])
    return {recorder: folder / f"{recorder}.krn" for recorder in RECORDERS}


def r2_of(replays: Tensor, features: Tensor) -> float:
    error = (replays - features).square().mean()
    return 1 - (error / features.var()).item()


# ------------------------------------------------------------------ what comes back


@every_recorder
def test_new_samples_are_nearly_as_good_as_if_all_were_recorded_at_once(starts, recorder):
    features, labels = maps()
    grown = krnet.record(features, labels, recorder=recorder, start=starts[recorder])
    assert grown.settings == krnet.open(starts[recorder]).settings
    once = krnet.record(features, labels, recorder=recorder, **SETTINGS[recorder])
    assert abs(r2_of(grown[250:], features[250:]) - r2_of(once[250:], features[250:])) < 0.05
    assert grown.nbytes < 1.1 * once.nbytes


@every_recorder
def test_the_basis_is_copied_and_the_frequencies_are_counted_anew(starts, recorder, tmp_path):
    features, labels = maps()
    krnet.record(features, labels, recorder=recorder, start=starts[recorder], out=tmp_path / "x.krn")
    old, new = archive.open_archive(starts[recorder]), archive.open_archive(tmp_path / "x.krn")
    assert set(new.names) == set(old.names)
    prefix = "codes." if recorder == "pq" else "coded."
    changed = {"labels", "probe.ids", "probe.values"} | {n for n in old.names if n.startswith(prefix)}
    for name in [*(set(old.names) - changed), prefix + "column"]:
        assert torch.equal(new.tensor(name), old.tensor(name)), name
    assert not torch.equal(new.tensor(prefix + "weights"), old.tensor(prefix + "weights"))


@every_recorder
def test_recordings_without_labels_grow_as_well(recorder):
    features, _ = maps(200)
    start = krnet.record(features[:100], recorder=recorder, **SETTINGS[recorder])
    grown = krnet.record(features, recorder=recorder, start=start)
    assert grown.labels is None and torch.equal(grown[:100], start[:])


@every_recorder
def test_new_samples_beyond_all_that_was_known_leave_the_old_ones_alone(starts, recorder):
    """Wider than the recording's range, and of symbols that its tables do not have."""
    features, labels = (given[:300] for given in maps())
    features[250:] = 5 * features[250:].flip(1)
    grown = krnet.record(features, labels, recorder=recorder, start=starts[recorder])
    assert torch.equal(grown[:250], krnet.open(starts[recorder])[:])
    assert grown[250:].amax() <= features[:250].amax() * 1.001


def test_scalars_and_vectors_grow():
    generator = torch.Generator().manual_seed(0)
    for shape, recorders in (((), ("quantized", "pq")), ((7,), RECORDERS)):
        features = torch.rand(60, *shape, generator=generator)
        for recorder in recorders:
            start = krnet.record(features[:33], recorder=recorder)
            grown = krnet.record(features, recorder=recorder, start=start)
            assert torch.equal(grown[:33], start[:]) and grown[:].shape == features.shape


# ------------------------------------------------------------------ sizes


@every_recorder
def test_a_file_with_room_keeps_its_budget_when_it_has_grown(recorder):
    features, labels = maps(1200)
    budget, recording, sizes = 40_000, None, []
    for num in (600, 900, 1200):
        recording = krnet.record(
            features[:num], labels[:num], recorder=recorder, budget=budget, room=1200, start=recording
        )
        sizes.append(recording.nbytes)
    assert sizes[0] < sizes[1] < sizes[2] and sizes[0] < 0.8 * budget
    assert 0.9 * budget <= sizes[2] <= budget
    assert abs(r2_of(recording[900:], features[900:]) - r2_of(recording[:600], features[:600])) < 0.05


@every_recorder
def test_new_samples_are_coded_in_fewer_bytes_where_the_budget_wants_it(starts, recorder, tmp_path):
    features, labels = maps()
    free = krnet.record(features, labels, recorder=recorder, start=starts[recorder])
    first = krnet.open(starts[recorder])
    budget = first.nbytes + int(0.8 * (free.nbytes - first.nbytes))
    out = tmp_path / "x.krn"
    kept = krnet.record(features, labels, recorder=recorder, start=str(starts[recorder]), budget=budget, out=out)
    assert 0.9 * budget < out.stat().st_size == kept.nbytes <= budget < free.nbytes
    assert torch.equal(kept[:250], first[:]) and kept.settings == first.settings
    assert 0.5 < r2_of(kept[250:], features[250:]) < r2_of(free[250:], features[250:])


@every_recorder
def test_a_budget_that_old_samples_fill_is_refused(starts, recorder, tmp_path):
    budget = krnet.open(starts[recorder]).nbytes
    with pytest.raises(BudgetError, match=f"the budget is {budget}"):
        krnet.record(*maps(), recorder=recorder, start=starts[recorder], budget=budget, out=tmp_path / "x.krn")
    assert list(tmp_path.iterdir()) == []


@every_recorder
def test_a_budget_larger_than_needed_changes_nothing(starts, recorder):
    grown = [krnet.record(*maps(), recorder=recorder, start=starts[recorder], budget=b) for b in (None, "1MB")]
    assert torch.equal(grown[0][:], grown[1][:])


# ------------------------------------------------------------------ as many symbols as tables may have


def num_symbols(recording: krnet.Recording) -> int:
    """From the lowest to the highest of all tables."""
    kept = archive.open_archive(recording.path)
    first, sizes = (kept.tensor(f"coded.{name}").long() for name in ("first", "sizes"))
    return int((first + sizes).max() - first.min())


def narrow_then_wide() -> Tensor:
    """300 maps with one value each that is not 0, then 20 that are full: within the same range, and 19 times as far."""
    generator = torch.Generator().manual_seed(0)
    features = torch.zeros(320, 6 * 8 * 8)
    features[torch.arange(300), torch.randperm(384, generator=generator)[:300]] = torch.linspace(0.1, 1, 300)
    features[300:] = torch.rand(20, 1, generator=generator) * 0.2 + 0.8
    return features.view(-1, *SHAPE)


@pytest.mark.parametrize("recorder", ["transform", "pca"])
def test_a_recording_that_fills_its_tables_takes_wider_samples_at_their_ends(recorder, tmp_path):
    features, out = narrow_then_wide(), tmp_path / "x.krn"
    start = krnet.record(features[:300], recorder=recorder, budget="20MB")
    assert num_symbols(start) > 0.98 * MAX_ALPHABET
    for wanted in ({}, {"budget": "20MB"}):
        grown = krnet.record(features, recorder=recorder, start=start, out=out, **wanted)
        assert num_symbols(grown) <= MAX_ALPHABET and torch.equal(grown[:300], start[:])
        # They come back as far as the symbols go, and the file says how bad that is.
        error = (grown[:] - features).square()
        assert error[300:].mean() > 0.01 and grown[300:].mean() > start[:].mean()
        assert grown.info()["mse"] == pytest.approx(error.mean().item(), rel=0.01)
        assert krnet.verify(out, features)["same_features"]


@pytest.mark.parametrize("recorder", ["transform", "pca"])
def test_a_file_with_room_leaves_symbols_for_wider_samples(recorder):
    features, labels = maps()
    wider = features.clone()
    wider[250:] = (1.5 * wider[250:]).minimum(features[:250].amax((0, 2, 3))[:, None, None])
    start = krnet.record(wider[:250], labels[:250], recorder=recorder, budget="20MB", room=600)
    assert 0.98 * MAX_ALPHABET / 2 < num_symbols(start) <= MAX_ALPHABET / 2
    grown = krnet.record(wider, labels, recorder=recorder, budget="20MB", room=600, start=start)
    assert num_symbols(start) < num_symbols(grown) < MAX_ALPHABET  # with some to spare: nothing was cut
    assert torch.equal(grown[:250], start[:])


def test_kril_with_more_bytes_than_it_can_use_ends_all_its_tasks(tmp_path):
    settings = {**settings_for("kril"), "base_epochs": 2, "epochs": 2, "recorder": "transform", "budget": 20_000_000}
    run = learning.learn("kril", small_digits(), small_tasks(), out=tmp_path / "run", settings=settings, device="cpu")
    assert len(run["accuracy_matrix"]) == 3


# ------------------------------------------------------------------ what is refused


@every_recorder
def test_settings_may_repeat_those_of_the_recording_and_not_change_them(starts, recorder):
    features, labels = (given[:300] for given in maps())
    given = {"features": features, "labels": labels, "recorder": recorder, "start": starts[recorder]}
    settings = krnet.open(starts[recorder]).settings
    grown = krnet.record(**given, **settings)
    assert torch.equal(grown[:], krnet.record(**given)[:])
    with pytest.raises(InputError, match="has block_size 16, not 8; a recording that grows keeps its settings"):
        krnet.record(**given, block_size=8)
    with pytest.raises(SettingError, match="block_size is 0"):
        krnet.record(**given, block_size=0)
    free = krnet.record(**given, **{FREE[recorder]: 0.9})  # of new samples alone
    assert free.settings == settings and free.nbytes < grown.nbytes
    assert torch.equal(free[:250], grown[:250]) and not torch.equal(free[250:], grown[250:])


@every_recorder
def test_a_damaged_recording_is_not_grown_from(starts, recorder, tmp_path):
    path = tmp_path / "start.krn"
    path.write_bytes(starts[recorder].read_bytes())
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(block_size=15))
    with pytest.raises(krnet.errors.RecordingError):
        krnet.record(*maps(), recorder=recorder, start=path, out=tmp_path / "x.krn")
    kept = archive.open_archive(starts[recorder])
    tensors = {name: kept.tensor(name) for name in kept.names}
    prefix = "codes." if recorder == "pq" else "coded."
    for name, more in {"first": [0], "sizes": [1], "weights": [2**16 - 1], "centroids": [0]}.items():
        if prefix + name in tensors:
            old = tensors[prefix + name]
            tensors[prefix + name] = torch.cat([old, torch.tensor(more, dtype=torch.int32).to(old.dtype)])
    archive.write(path, tensors, kept.metadata)
    with pytest.raises(NotARecordingError, match="a table that no column goes by"):
        krnet.record(*maps(), recorder=recorder, start=path, out=tmp_path / "x.krn")
