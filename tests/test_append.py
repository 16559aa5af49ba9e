"""Samples are appended to a recording: old ones stay to the bit, and the file says how good all of them are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import krnet
from forge import rewrite_metadata
from krnet.errors import BudgetError, FeatureError, InputError, LabelError, NotARecordingError, SettingError
from krnet.features.metrics import Moments
from krnet.io import archive
from krnet.recorders.base import get_recorder, recorder_names
from krnet.recorders.compact import growth
from maps import relu_maps

SHAPE = (6, 6, 6)
FIRST, SECOND, ALL = 100, 130, 180
SETTINGS = {
    "quantized": {"step": 0.1},
    "transform": {"step": 0.15},
    "pca": {"step": 0.15},
    "pq": {"parts": 2, "bits": 4, "rate_weight": 0.002},
    "krnet": {"budget": 12_000, "iterations": 10, "components": 20},
}
every_recorder = pytest.mark.parametrize("recorder", SETTINGS)


@pytest.fixture(scope="module")
def features() -> Tensor:
    return relu_maps(ALL, SHAPE)[0]


@pytest.fixture(scope="module")
def labels() -> Tensor:
    return relu_maps(ALL, SHAPE)[1] + 3


@pytest.fixture(scope="module")
def firsts(features, labels, tmp_path_factory) -> dict[str, krnet.Recording]:
    """A recording by each recorder that grows, of the first samples."""
    folder = tmp_path_factory.mktemp("firsts")
    return {
        recorder: krnet.record(
            features[:FIRST],
            labels[:FIRST],
            recorder=recorder,
            out=folder / f"{recorder}.krn",
            device="cpu",
            **settings,
        )
        for recorder, settings in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def plain(features) -> krnet.Recording:
    """Without labels, by recorder quantized."""
    return krnet.record(features[:FIRST], recorder="quantized", step=0.1)


# ------------------------------------------------------------------ what comes back


def test_every_recorder_that_grows_is_tested_here():
    assert set(SETTINGS) == {name for name in recorder_names() if get_recorder(name).grows}


@every_recorder
def test_old_samples_stay_to_the_bit_and_new_ones_follow_at_no_more_bytes_a_sample(firsts, features, labels, recorder):
    first = firsts[recorder]
    second = first.append(features[FIRST:SECOND], labels[FIRST:SECOND])
    last = second.append(features[SECOND:], labels[SECOND:])
    assert torch.equal(second[:FIRST], first[:]) and torch.equal(last[:SECOND], second[:])
    assert len(last) == ALL and torch.equal(last.labels, labels)
    assert first.nbytes / FIRST > second.nbytes / SECOND > last.nbytes / ALL
    error = (last[:] - features).square().mean((1, 2, 3))
    assert error[FIRST:].mean() < 3 * error[:FIRST].mean()
    assert last.settings.keys() == first.settings.keys() and last.recorder == recorder


@every_recorder
def test_it_does_what_record_does_with_all_features_at_hand(firsts, features, labels, recorder):
    options = {"iterations": 10} if recorder == "krnet" else {}
    expected = krnet.record(features, labels, start=firsts[recorder], device="cpu", **options)
    assert torch.equal(firsts[recorder].append(features[FIRST:], labels[FIRST:], **options)[:], expected[:])


def test_nothing_is_trained_unless_a_length_is_given(features, monkeypatch):
    """New codes are moved as those of unseen features are, which is as good as a short fit."""
    plain = krnet.record(features[:FIRST], step=0.3, components=20, c1=8, iterations=40, device="cpu")
    unseen = features[FIRST:]
    fitted = plain.append(unseen, iterations=40, budget="1MB")
    monkeypatch.setattr(growth, "run_fit", None)
    moved = plain.append(unseen, budget="1MB")
    assert (moved.info()["iterations"], fitted.info()["iterations"]) == (0, 40)
    errors = [(recording[FIRST:] - unseen).square().mean() for recording in (moved, fitted)]
    assert errors[0] < 1.05 * errors[1] and torch.equal(moved[:FIRST], plain[:])


@every_recorder
def test_the_stated_error_is_that_of_all_samples(firsts, features, labels, recorder, tmp_path):
    path = tmp_path / "x.krn"
    second = firsts[recorder].append(features[FIRST:SECOND], labels[FIRST:SECOND])
    found = second.append(features[SECOND:], labels[SECOND:], out=path).info()
    report = krnet.verify(path, features)
    assert report["same_features"] and report["mse"] == pytest.approx(found["mse"], rel=1e-6)
    assert report["r2"] == pytest.approx(found["r2"], abs=1e-4)
    assert found["zero_ratio"] == pytest.approx((features == 0).double().mean().item())
    assert found["feature_bytes"] == features.nbytes


def test_moments_add_up_to_those_of_all_values():
    x, y = (torch.randn(n, generator=torch.Generator().manual_seed(n)).double() + n / 100 for n in (70, 50))
    parts = [Moments(len(v), v.mean().item(), v.var(correction=0).item(), v.square().mean().item()) for v in (x, y)]
    both, expected = parts[0] + parts[1], torch.cat([x, y])
    assert both.count == 120 and both.mean == pytest.approx(expected.mean().item())
    assert both.variance == pytest.approx(expected.var(correction=0).item())
    assert both.r2 == pytest.approx(1 - both.mse / both.variance) and both.mse == pytest.approx(
        expected.square().mean().item()
    )


def test_other_features_than_those_appended_are_noticed(plain, features, tmp_path):
    path = tmp_path / "x.krn"
    plain.append(features[FIRST:], out=path)
    swapped = torch.cat([features[:FIRST], features[FIRST:].flip(0)])
    assert krnet.verify(path, swapped)["same_features"] is False
    rewrite_metadata(path, lambda metadata: metadata["metrics"].update(mse=1.1 * metadata["metrics"]["mse"]))
    with pytest.raises(krnet.errors.FidelityError):
        krnet.verify(path, features)
    rewrite_metadata(path, lambda metadata: metadata.update(parts=[FIRST, 7]))
    with pytest.raises(NotARecordingError, match="parts"):
        krnet.verify(path, features)


def test_comparing_a_grown_file_with_the_first_features_alone_is_answered_with_what_to_give(plain, features, tmp_path):
    path = (
        plain.append(features[FIRST:SECOND], out=tmp_path / "a.krn")
        .append(features[SECOND:], out=tmp_path / "b.krn")
        .path
    )
    message = "holds 180 .*: it began with 100, and 30 and 50 were appended. Give the features of all of them"
    with pytest.raises(FeatureError, match=message):
        krnet.verify(path, features[:FIRST])
    assert krnet.verify(path, features)["same_features"]


def test_values_beyond_the_known_range_and_in_constant_channels_count_as_errors(tmp_path):
    features = relu_maps(80, SHAPE)[0]
    features[:, 2] = 1.5  # constant
    more = 3 * features[:20]
    more[:, 2] = torch.linspace(0, 3, 20)[:, None, None]
    first = krnet.record(features, recorder="quantized", step=0.02)
    grown = first.append(more, out=tmp_path / "x.krn")
    assert torch.equal(grown[:80], first[:]) and (grown[80:][:, 2] == 1.5).all()
    assert grown.r2 < 0.9 < first.r2
    report = krnet.verify(tmp_path / "x.krn", torch.cat([features, more]))
    assert report["same_features"] and report["mse"] == pytest.approx(grown.info()["mse"], rel=1e-6)


def test_a_recording_that_grew_with_all_features_at_hand_takes_more(plain, features, tmp_path):
    second = krnet.record(features[:SECOND], start=plain)
    last = second.append(features[SECOND:], out=tmp_path / "x.krn")
    assert torch.equal(last[:SECOND], second[:])
    report = krnet.verify(tmp_path / "x.krn", features)  # its error was stated in a range that it does not hold
    assert report["same_features"] and report["r2"] == pytest.approx(last.r2, abs=0.005)


def test_lossless_and_constant_features_keep_their_r2():
    features = torch.zeros(30, 2, 3)
    grown = krnet.record(features[:20], recorder="quantized").append(features[20:])
    assert grown.r2 == 1 and torch.equal(grown[:], features)


# ------------------------------------------------------------------ files


def test_the_file_itself_may_be_replaced_and_the_old_object_still_replays(features, labels, tmp_path):
    path = tmp_path / "x.krn"
    first = krnet.record(features[:FIRST], labels[:FIRST], recorder="quantized", out=path)
    old = first[:]
    grown = krnet.open(path).append(features[FIRST:], labels[FIRST:], out=path)
    assert grown.path == path and len(krnet.open(path)) == ALL and torch.equal(grown[:FIRST], old)
    assert torch.equal(first[:], old) and list(tmp_path.iterdir()) == [path]
    temporary = krnet.record(features[:FIRST], recorder="quantized")
    grown = temporary.append(features[FIRST:], out=temporary.path)
    del temporary
    assert grown[:].shape == features.shape


def test_features_and_labels_may_be_files(firsts, features, labels, tmp_path):
    np.save(tmp_path / "f.npy", features[FIRST:].numpy())
    np.save(tmp_path / "l.npy", labels[FIRST:].numpy())
    grown = firsts["quantized"].append(tmp_path / "f.npy", tmp_path / "l.npy")
    assert torch.equal(grown[:], firsts["quantized"].append(features[FIRST:], labels[FIRST:])[:])
    with pytest.raises(InputError, match="would be overwritten"):
        firsts["quantized"].append(tmp_path / "f.npy", tmp_path / "l.npy", out=tmp_path / "f.npy")


def test_new_classes_may_come_and_few_samples_at_a_time(firsts, features):
    recording = firsts["quantized"]
    for index in range(3):
        recording = recording.append(features[FIRST + index][None], [50 + index])
    assert recording.labels[-4:].tolist() == [firsts["quantized"].labels[-1].item(), 50, 51, 52]
    error = (recording[FIRST:] - features[FIRST : FIRST + 3]).square().mean()
    assert error < 2 * (recording[:FIRST] - features[:FIRST]).square().mean()


def test_labels_that_are_no_longer_sorted_take_bytes_of_their_own(features, labels):
    order = labels[:FIRST].argsort(stable=True)
    first = krnet.record(features[order], labels[order], recorder="quantized", step=0.1)
    with_labels = first.append(features[FIRST:], labels[FIRST:])
    without = krnet.record(features[order], recorder="quantized", step=0.1).append(features[FIRST:])
    assert "labels" in archive.open_archive(with_labels.path).names
    assert torch.equal(with_labels[:], without[:]) and torch.equal(with_labels.labels[FIRST:], labels[FIRST:])


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("recorder", ["pca", "pq"])
def test_with_room_the_file_ends_at_the_budget_it_was_planned_for(features, labels, recorder):
    settings = {"parts": 2, "bits": 4} if recorder == "pq" else {}
    recording = krnet.record(features[:FIRST], labels[:FIRST], recorder=recorder, budget=12_000, room=ALL, **settings)
    for part in (slice(FIRST, SECOND), slice(SECOND, ALL)):
        recording = recording.append(features[part], labels[part])
    assert 0.8 * 12_000 < recording.nbytes <= 12_000
    assert recording.append(features[:20], labels[:20]).nbytes <= 12_000 * (ALL + 20) / ALL


def test_samples_that_need_more_bytes_get_coarser_codes(features):
    first = krnet.record(features, recorder="quantized", step=0.1)
    noise = torch.rand(400, *SHAPE, generator=torch.Generator().manual_seed(0)) * features.amax()
    free = krnet.record(torch.cat([features, noise]), start=first)
    grown = first.append(noise)
    rates = [recording.nbytes / len(recording) for recording in (first, grown, free)]
    assert 0.95 * rates[0] < rates[1] <= rates[0] < rates[2]
    assert torch.equal(grown[:ALL], first[:])


def test_a_budget_is_kept_or_refused(plain, features, tmp_path):
    free = plain.append(features[FIRST:])
    budget = plain.nbytes + (free.nbytes - plain.nbytes) * 3 // 4
    assert 0.9 * budget < plain.append(features[FIRST:], budget=budget).nbytes <= budget
    with pytest.raises(BudgetError, match=f"the budget is {plain.nbytes}"):
        plain.append(features[FIRST:], budget=plain.nbytes, out=tmp_path / "x.krn")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("recorder", ["paper", "autoencoder", "raw"])
def test_a_recorder_that_cannot_grow_refuses_by_name(features, recorder, tmp_path):
    options = {} if recorder == "raw" else {"iterations": 2, "device": "cpu"}
    first = krnet.record(features[:40], recorder=recorder, **options)
    with pytest.raises(InputError, match=f"written by recorder {recorder}, which cannot .*krnet, .*Record all samples"):
        first.append(features[40:50], out=tmp_path / "x.krn")
    assert list(tmp_path.iterdir()) == []


def test_features_unlike_the_recorded_ones_are_refused(plain, features, tmp_path):
    bad = features[:3].clone()
    bad[1, 2, 3, 4] = torch.nan
    wrong = {
        r"samples of \(5, 6, 6\); .* holds samples of \(6, 6, 6\)": features[:3, :5],
        "values of type float64; .* recorded from float32. Convert": features[:3].double(),
        "sample 1 holds nan": bad,
        "holds no samples": features[:0],
    }
    for message, given in wrong.items():
        with pytest.raises(FeatureError, match=message):
            plain.append(given, out=tmp_path / "x.krn")
    assert list(tmp_path.iterdir()) == []


def test_labels_are_given_if_the_recording_has_labels_and_only_then(plain, firsts, features):
    with pytest.raises(LabelError, match="has no labels, and labels are given"):
        plain.append(features[:3], [1, 2, 3])
    with pytest.raises(LabelError, match="has labels, and none are given"):
        firsts["pca"].append(features[:3])
    with pytest.raises(LabelError, match="expected 3 integers"):
        firsts["pca"].append(features[:3], [1, 2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 5}, "iterations is given, a setting of a network's fit"),
        ({"step": 0.2}, "has step 0.1, not 0.2"),
        ({"device": "cpu"}, "device is given, which append does not take"),
        ({"target_r2": 0.9}, "target_r2 is given, which append does not take"),
        ({"stepp": 0.2}, "stepp"),
        ({"head": torch.nn.Identity()}, "head is given, and recorder quantized has no use for it"),
    ],
)
def test_settings_that_do_not_apply_are_refused(plain, features, settings, message):
    with pytest.raises((InputError, SettingError), match=message):
        plain.append(features[:3], **settings)


# ------------------------------------------------------------------ r2 and arrays


def test_r2_is_that_of_info(plain):
    assert plain.r2 == plain.info()["r2"] == archive.open_archive(plain.path).metadata["metrics"]["r2"]


def test_an_array_of_a_recording_is_its_replays(plain, monkeypatch):
    assert np.array_equal(np.asarray(plain), plain[:].numpy()) and np.asarray(plain).dtype == np.float32
    monkeypatch.setattr("krnet.recording.CHUNK_BYTES", 7 * 4 * 216)
    assert np.array_equal(np.array(plain), plain[:].numpy())
    assert plain.__array__(np.float64).dtype == np.asarray(plain, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        plain.__array__(copy=False)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match="copy"):
            np.array(plain, copy=False)


def test_an_outlier_that_no_file_can_state_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "a.krn"
    features = 1e-5 * torch.rand(40, 4, 3, 3)
    recording = krnet.record(features, recorder="quantized", budget="20kB", out=path)
    before, new = path.read_bytes(), features[:5].clone()
    new[0, 0, 0, 0] = 1e8
    with pytest.raises(FeatureError, match="far outside the range"):
        recording.append(new, out=path)
    assert path.read_bytes() == before


def test_a_recording_that_was_grown_in_place_is_not_grown_again(tmp_path):
    recording = krnet.record(torch.rand(40, 4, 3, 3), recorder="quantized", out=tmp_path / "a.krn")
    recording.append(torch.rand(5, 4, 3, 3), out=tmp_path / "a.krn")
    with pytest.raises(InputError, match="has changed since this Recording was opened"):
        recording.append(torch.rand(5, 4, 3, 3), out=tmp_path / "a.krn")
    assert len(krnet.open(tmp_path / "a.krn")) == 45


def test_labels_come_from_the_file_that_extract_wrote(tmp_path):
    images, labels = torch.rand(20, 3, 4, 4), torch.arange(20) % 3
    for name, part in (("one", slice(0, 12)), ("two", slice(12, 20))):
        krnet.extract(torch.nn.Identity(), images[part], labels[part], out=tmp_path / f"{name}.safetensors")
    recording = krnet.record(tmp_path / "one.safetensors", recorder="quantized")
    assert torch.equal(recording.append(tmp_path / "two.safetensors").labels, labels)


def test_a_fit_of_append_has_no_r2_to_stop_at():
    recording = krnet.record(torch.rand(40, 4, 3, 3), recorder="krnet", iterations=1)
    with pytest.raises(SettingError, match="stop_at_r2 is given, which append does not take"):
        recording.append(torch.rand(5, 4, 3, 3), stop_at_r2=0.5)
