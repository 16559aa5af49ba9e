"""A good recording is verified; a damaged or forged one is refused by name, and no value comes out of it."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import krnet
from forge import read_header, rewrite_header, rewrite_metadata
from krnet import errors
from krnet.errors import RecordingError
from krnet.io import archive
from maps import relu_maps


@pytest.fixture
def path(recorded, tmp_path) -> Path:
    """A copy of the shared recording, to be damaged."""
    copy = tmp_path / "x.krn"
    copy.write_bytes(recorded.path.read_bytes())
    return copy


@contextmanager
def bounded_memory(size_bytes: int = 1 << 29) -> Iterator[None]:
    """An allocation of more than that fails here, and so fails the test."""
    if not Path("/proc/self/statm").exists():  # not Linux: what is refused is still tested
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def use(path: Path) -> None:
    """All that a user may ask of a file; the last line is reached with a good one only."""
    recording = krnet.open(path)
    recording.info()
    recording[:]
    krnet.verify(path)


def forge_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Put other tensors in, or take some out, checksums right; dots in names are written __."""
    kept = archive.open_archive(path)
    tensors = {name: kept.tensor(name) for name in kept.names}
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."))
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    archive.write(path, tensors, kept.metadata)


# ---------------------------------------------------------------- good ones


def test_a_good_recording_is_verified(recorded):
    report = krnet.verify(recorded.path)
    assert report["ok"] and report["bytes"] == recorded.path.stat().st_size
    assert report["probe_error"] < 1e-5 and report["mse"] is None


def test_against_its_features_it_has_the_error_that_info_says(recorded, tmp_path):
    info = krnet.open(recorded.path).info()
    np.save(tmp_path / "features.npy", recorded.features.numpy())
    for features in (recorded.features, tmp_path / "features.npy", list(recorded.features)):
        report = krnet.verify(recorded.path, features)
        assert report["mse"] == pytest.approx(info["mse"], rel=1e-3)
        assert report["r2"] == pytest.approx(info["r2"], rel=1e-3)
        assert report["same_features"] is True


def test_against_other_features_of_the_same_shape_it_says_so(recorded):
    report = krnet.verify(recorded.path, recorded.features.flip(0))
    assert report["same_features"] is False and report["r2"] < krnet.open(recorded.path).info()["r2"]


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x[:, :-1], lambda x: x.flatten(1)])
def test_features_of_another_shape_are_refused(recorded, change):
    with pytest.raises(errors.FeatureError, match=r"60 of \(6, 7, 5\)"):
        krnet.verify(recorded.path, change(recorded.features))


def test_a_rewritten_header_without_changes_is_still_good(path):
    rewrite_metadata(path, lambda metadata: None)
    use(path)


# ---------------------------------------------------------------- damage


def test_a_flipped_bit_anywhere_is_found_and_no_value_comes_out(path):
    whole = path.read_bytes()
    kept = archive.open_archive(path)
    header_bytes = len(whole) - len(read_header(path)[1])
    # Samples are decoded without the probe, which only verify reads.
    probe = [range(header_bytes + e.begin, header_bytes + e.begin + e.size_bytes) for e in probe_entries(kept)]
    random = np.random.default_rng(0)
    positions = [
        *range(0, 60, 7),
        *random.integers(0, header_bytes, 40),
        *random.integers(header_bytes, len(whole), 60),
    ]
    positions += [header_bytes, len(whole) - 1, *(part[0] for part in probe)]
    for at in map(int, positions):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(RecordingError):
            krnet.verify(path)
        if not any(at in part for part in probe):
            with pytest.raises(RecordingError):
                krnet.open(path)[:]


def probe_entries(kept: archive.Archive) -> list[Any]:
    return [kept._entries[name] for name in ("probe.ids", "probe.values")]


def test_a_recording_cut_or_grown_by_any_amount_is_refused(path):
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordingError):
            krnet.open(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(errors.TruncatedRecordingError):
        krnet.open(path)


def test_a_file_damaged_after_opening_gives_no_values(path):
    recording = krnet.open(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(RecordingError):
        recording[0]


def test_a_checkpoint_is_no_recording(path):
    rewrite_metadata(path, lambda metadata: metadata.update(kind="checkpoint"))
    with pytest.raises(errors.NotARecordingError, match=r"holds a 'checkpoint'.*resume"):
        krnet.open(path)


# ---------------------------------------------------------------- forged headers


def setting(**values: Any) -> Callable[[dict], object]:
    return lambda metadata: metadata["settings"].update(values)


FORGERIES: dict[str, tuple[Callable[[dict], object], type[RecordingError]]] = {
    "another recorder": (lambda m: m.update(recorder="jpeg"), errors.UnknownRecorderError),
    "a recorder that is no name": (lambda m: m.update(recorder=["krnet"]), errors.UnknownRecorderError),
    "more samples than bytes": (lambda m: m.update(num_samples=2**40), errors.OversizedRecordingError),
    "more samples than fitted": (lambda m: m.update(num_samples=10**6, classes=None), RecordingError),
    "one sample more": (lambda m: m.update(num_samples=61), errors.NotARecordingError),
    "a huge shape": (lambda m: m.update(shape=[2**40]), errors.OversizedRecordingError),
    "a huge map": (lambda m: m.update(shape=[6, 2**24, 2**24]), errors.OversizedRecordingError),
    "a shape with the axes swapped": (lambda m: m.update(shape=[6, 5, 7]), errors.NotARecordingError),
    "a shape of too many axes": (lambda m: m.update(shape=[6, 7, *[1] * 100, 5]), errors.NotARecordingError),
    "no shape": (lambda m: m.pop("shape"), errors.NotARecordingError),
    "no labels": (lambda m: m.update(classes=None), errors.NotARecordingError),
    "no class table": (lambda m: m.pop("classes"), errors.NotARecordingError),
    "other class counts": (lambda m: m["classes"][0].__setitem__(1, 14), errors.NotARecordingError),
    "a class less": (lambda m: m["classes"].pop(), errors.NotARecordingError),
    "a class table of text": (lambda m: m.update(classes="abc"), errors.NotARecordingError),
    "huge c0": (setting(c0=2**24), errors.OversizedRecordingError),
    "huge d0": (setting(d0=2**24), errors.OversizedRecordingError),
    "huge c1": (setting(c1=2**24), errors.OversizedRecordingError),
    "huge c0, c1 and d0": (setting(c0=2**24, c1=2**24, d0=2**24), RecordingError),
    "c0 beyond all sizes": (setting(c0=2**60), errors.NotARecordingError),
    "another group size": (setting(group_size=64), errors.TensorShapeError),
    "another stride": (setting(stride=2), RecordingError),
    "other convolutions": (setting(conv_before="full"), errors.TensorShapeError),
    "a vector": (setting(vector=True), errors.NotARecordingError),
    "other channels": (setting(channels=7), errors.NotARecordingError),
    "a setting of another type": (setting(d0="32"), errors.NotARecordingError),
    "a setting more": (setting(magic=1), errors.NotARecordingError),
    "a setting less": (lambda m: m["settings"].pop("c0"), errors.NotARecordingError),
    "no groups": (lambda m: m["settings"].pop("groups"), errors.NotARecordingError),
    "other groups": (setting(groups=[30, 30]), errors.NotARecordingError),
    "groups that are no list": (setting(groups={"0": 60}), errors.NotARecordingError),
    "no features": (lambda m: m.pop("features"), errors.NotARecordingError),
    "no metrics": (lambda m: m.pop("metrics"), errors.NotARecordingError),
    "an mse of text": (lambda m: m["metrics"].update(mse="0"), errors.NotARecordingError),
    "an infinite mse": (lambda m: m["metrics"].update(mse=10**400), errors.NotARecordingError),
    "no r2": (lambda m: m["metrics"].pop("r2"), errors.NotARecordingError),
    "no zero ratio": (lambda m: m["metrics"].pop("zero_ratio"), errors.NotARecordingError),
    "no times": (lambda m: m.pop("times"), errors.NotARecordingError),
    "no fit seconds": (lambda m: m["times"].clear(), errors.NotARecordingError),
    "no feature bytes": (lambda m: m.pop("feature_bytes"), errors.NotARecordingError),
    "feature bytes of text": (lambda m: m.update(feature_bytes="9"), errors.NotARecordingError),
    "no fit": (lambda m: m.pop("fit"), errors.NotARecordingError),
    "no iterations": (lambda m: m.pop("iterations"), errors.NotARecordingError),
    "no reason": (lambda m: m.pop("stopped_by"), errors.NotARecordingError),
    "no versions": (lambda m: m.pop("versions"), errors.NotARecordingError),
    "nothing": (lambda m: m.clear(), errors.NotARecordingError),
} | {
    f"{name} {value!r}": (lambda m, name=name, value=value: m.update({name: value}), RecordingError)
    for name in ("kind", "recorder", "num_samples", "shape", "classes", "settings", "metrics", "times")
    for value in (3, -1, 0.5, "x", True, [], [[]], {})
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_header_is_refused_by_name_without_a_large_allocation(path, name):
    edit, kind = FORGERIES[name]
    rewrite_metadata(path, edit)
    with bounded_memory(), pytest.raises(kind):
        use(path)
    with bounded_memory(), pytest.raises(kind):
        krnet.open(path)[0]


def test_sizes_that_agree_with_each_other_and_overflow_are_refused(path):
    def edit(metadata: dict) -> None:
        side = 2**24
        metadata["shape"] = [side, side, side]
        metadata["settings"].update(channels=side, height=side, width=side, c0=side, c1=side, d0=side)

    rewrite_metadata(path, edit)
    with bounded_memory(), pytest.raises(RecordingError):
        krnet.open(path)[0]


@pytest.mark.parametrize("name", ["net.embed.static", "net.decoder.fc1.0.weight", "low", "high"])
def test_a_missing_tensor_is_refused(path, name):
    forge_tensors(path, **{name.replace(".", "__"): None})
    with pytest.raises(errors.MissingTensorError, match=name):
        krnet.open(path)[0]
    with pytest.raises(errors.MissingTensorError, match=name):
        krnet.verify(path)


def test_labels_taken_out_with_all_checksums_right_fail_the_probe(path):
    # A file without labels is one of samples that come class by class, so only the values can tell.
    forge_tensors(path, labels=None)
    with pytest.raises(errors.ProbeError):
        krnet.verify(path)


@pytest.mark.parametrize("name", ["net.embed.static", "net.decoder.fc1.0.weight", "low", "high", "labels"])
@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t[None], lambda t: t.double()])
def test_a_tensor_of_another_shape_or_type_is_refused(path, name, change):
    tensor = archive.open_archive(path).tensor(name)
    forge_tensors(path, **{name.replace(".", "__"): change(tensor)})
    with pytest.raises(errors.NotARecordingError if name == "labels" else errors.TensorShapeError):
        krnet.open(path)[0]


def test_tensors_under_each_others_names_are_refused(path):
    def swap(header: dict) -> None:
        a, b = "net.embed.static_fc.0.weight", "net.embed.static"
        header[a], header[b] = header[b], header[a]

    rewrite_header(path, swap)
    with pytest.raises(RecordingError):
        krnet.open(path)[0]


# ---------------------------------------------------------------- the probe


def test_weights_that_decode_to_other_values_fail_the_probe(path):
    weight = archive.open_archive(path).tensor("net.decoder.output.layer.weight")
    forge_tensors(path, net__decoder__output__layer__weight=weight * 1.01)
    with pytest.raises(errors.ProbeError, match="differ by"):
        krnet.verify(path)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_fail_the_probe(path, bad):
    low = archive.open_archive(path).tensor("low")
    forge_tensors(path, low=low.fill_(bad))
    with pytest.raises(errors.ProbeError):
        krnet.verify(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"probe__ids": None},
        {"probe__values": None},
        {"probe__ids": torch.zeros(8)},
        {"probe__ids": torch.full((8,), 60)},
        {"probe__ids": torch.zeros(0, dtype=torch.int64)},
        {"probe__ids": torch.zeros(0, dtype=torch.int64), "probe__values": torch.zeros(0, 64)},
        {"probe__ids": torch.zeros(3, dtype=torch.int64)},
        {"probe__ids": torch.tensor(3)},
        {"probe__values": torch.zeros(8, 63)},
        {"probe__values": torch.zeros(64)},
        {"probe__values": torch.zeros(0)},
        {"probe__values": torch.zeros(8, 64, dtype=torch.int32)},
        {"probe__values": torch.zeros(8, 64)},
    ],
    ids=lambda changes: str({name: t if t is None else (t.dtype, tuple(t.shape)) for name, t in changes.items()}),
)
def test_a_forged_probe_is_refused(path, changes):
    forge_tensors(path, **changes)
    with bounded_memory(), pytest.raises(RecordingError):
        krnet.verify(path)


def test_an_error_other_than_the_one_recorded_is_refused(path, recorded):
    rewrite_metadata(path, lambda metadata: metadata["metrics"].update(mse=metadata["metrics"]["mse"] / 2))
    krnet.verify(path)
    with pytest.raises(errors.FidelityError, match="on the features it was recorded from"):
        krnet.verify(path, recorded.features)


def test_recordings_of_constant_and_of_single_samples_are_verified(tmp_path):
    for features in (torch.full((5, 2, 3), 0.3), relu_maps(1, (3, 4, 5))[0], torch.tensor([2.5])):
        recording = krnet.record(features, out=tmp_path / "x.krn", iterations=2, recorder="paper", d0=16, c0=8)
        assert krnet.verify(tmp_path / "x.krn", features)["r2"] == pytest.approx(recording.info()["r2"], abs=1e-3)
