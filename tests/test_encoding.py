"""Samples are coded by a model that is fitted already, into a folder that opens as one recording."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from test_project import KINDS
from torch import Tensor
from torch.utils.data import DataLoader

import krnet
from krnet.errors import (
    ChecksumError,
    FeatureError,
    InputError,
    KrnetError,
    KrnetWarning,
    LabelError,
    NotARecordingError,
    ResumeError,
    TruncatedRecordingError,
    UnknownSampleError,
)
from krnet.features.feature_source import FeatureSource
from krnet.parts import coding, reading
from krnet.parts.part import open_part
from krnet.recorders.base import get_recorder, recorder_names
from maps import relu_maps
from range_server import serving

FITTED, ALL, SHAPE = 300, 1100, (6, 6, 6)
STEP = 256  # samples in a part
pytestmark = pytest.mark.filterwarnings("ignore::krnet.errors.KrnetWarning")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def maps() -> tuple[Tensor, Tensor]:
    features, labels = relu_maps(ALL, SHAPE)
    return features, labels + 10


@pytest.fixture(scope="module")
def models(maps, tmp_path_factory) -> Callable[[str], krnet.Recording]:
    """A model of each kind, fitted to the first samples when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def make(kind: str) -> krnet.Recording:
        if kind not in made:
            made[kind] = krnet.record(maps[0][:FITTED], out=folder / f"{kind}.krn", **KINDS[kind])
        return made[kind]

    return make


@pytest.fixture(scope="module")
def coded(models, maps, tmp_path_factory) -> Path:
    """Four parts with labels. Do not change them: copy the folder."""
    out = tmp_path_factory.mktemp("coded") / "out"
    krnet.encode(models("pca"), *unseen(maps), out=out, part_samples=STEP)
    return out


def unseen(maps: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    features, labels = maps
    return features[FITTED:], labels[FITTED:]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class StopAfter:
    """A watcher that presses Ctrl-C once so many samples are done."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples

    def __call__(self, progress: krnet.Progress) -> None:
        if progress.name == "encoding" and progress.done >= self.num_samples:
            raise KeyboardInterrupt


# ------------------------------------------------------------------ what comes back


@every_kind
def test_samples_come_back_as_the_model_shows_their_symbols_whatever_the_recorder(models, maps, kind, tmp_path):
    model, (features, _) = models(kind), unseen(maps)
    features = features[:270] if kind.startswith("krnet") else features
    encoded = krnet.encode(model, features, out=tmp_path / "out", part_samples=STEP)
    assert encoded.info()["num_parts"] == -(-len(features) // STEP) and len(encoded) == len(features)
    expected = model.load().code(features, stored=True).shown
    different = ((encoded[:] - expected).abs() > 1e-4).float().mean()  # chunks of other sizes round differently
    assert different < 1e-3
    measured = krnet.verify(tmp_path / "out", features)
    assert measured["same_features"] and measured["probe_error"] < 1e-4
    assert abs(measured["r2"] - encoded.r2) < 1e-6


def test_every_recorder_that_projects_can_encode():
    able = {name for name in recorder_names() if get_recorder(name).projects}
    assert {settings["recorder"] for settings in KINDS.values()} == able


def test_a_folder_is_used_as_a_single_recording_is(coded, maps):
    features, labels = unseen(maps)
    opened = krnet.open(coded)
    assert isinstance(opened, krnet.Recording) and opened.recorder == "pca" and opened.shape == SHAPE
    whole = opened[:]
    assert whole.shape == features.shape and torch.equal(opened.labels, labels)
    for which in (5, -1, slice(250, 520, 3), [700, 3, 300, 3], labels == 11, torch.arange(10).view(2, 5)):
        torch.testing.assert_close(opened[which], whole[which])
    with pytest.raises(UnknownSampleError, match=r"no sample ID 800; this file holds 0\.\.799"):
        opened[800]
    assert np.asarray(opened).shape == features.shape and next(iter(opened)).shape == SHAPE
    value, label = opened.dataset()[300]
    assert torch.equal(value, opened[300]) and label == labels[300]
    seen = torch.cat([batch for _, batch in opened.loader(64, shuffle=True)])
    assert torch.equal(seen.sort().values, labels.sort().values)


def test_workers_open_the_folder_for_themselves(coded):
    opened = krnet.open(coded)
    opened[0]
    assert torch.equal(pickle.loads(pickle.dumps(opened))[400:410], opened[400:410])
    batches = list(DataLoader(opened.dataset(), batch_size=400, num_workers=1))
    torch.testing.assert_close(torch.cat([features for features, _ in batches]), opened[:])


def test_info_counts_all_files_and_names_the_worst_part(coded, models, maps):
    info = krnet.open(coded).info()
    assert info["bytes"] == sum(path.stat().st_size for path in coded.glob("*.krn"))
    assert (info["num_samples"], info["num_parts"], info["num_classes"]) == (800, 4, 5)
    assert info["feature_bytes"] == unseen(maps)[0].nbytes and info["model_r2"] == models("pca").r2
    opened, features = krnet.open(coded), unseen(maps)[0]
    errors = (opened[:] - features).square().flatten(1).mean(1)
    worst = max(range(4), key=lambda part: errors[part * STEP : (part + 1) * STEP].mean())
    assert info["worst_part"]["name"].startswith(f"part-{worst * STEP:012d}") and info["worst_part"]["r2"] < info["r2"]


def test_parts_hold_nothing_of_the_model(coded, models):
    """A sample takes the bytes of its symbols: about as many as a fitted one."""
    own_bytes = models("pca").tensor("coded.stream").nbytes / FITTED
    part_bytes = sum(open_part(coded, path.name).kept.tensor("stream").nbytes for path in coded.glob("part-*")) / 800
    assert part_bytes < 1.1 * own_bytes
    assert sum(path.stat().st_size for path in coded.glob("part-*")) < 800 * part_bytes + 4 * 5000


def test_encoding_again_gives_the_same_bytes(coded, models, maps, tmp_path):
    krnet.encode(models("pca"), *unseen(maps), out=tmp_path / "again", part_samples=STEP)
    assert contents(tmp_path / "again") == contents(coded)


def test_a_folder_is_a_model_too(coded, maps, tmp_path):
    features = unseen(maps)[0][:50]
    first = krnet.encode(coded, features, out=tmp_path / "first")
    second = krnet.encode(krnet.open(coded), features, out=tmp_path / "second")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    assert torch.equal(first[:], second[:]) and first.labels is None


# ------------------------------------------------------------------ what is given


def test_files_follow_each_other_with_the_labels_beside_them(coded, models, maps, tmp_path):
    features, labels = (values.numpy() for values in unseen(maps))
    for name, rows in (("a", slice(0, 300)), ("b", slice(300, 310)), ("c", slice(310, None))):
        np.savez(tmp_path / f"{name}.npz", features=features[rows], labels=labels[rows])
    files = [tmp_path / f"{name}.npz" for name in "abc"]
    krnet.encode(models("pca"), files, out=tmp_path / "out", part_samples=STEP)
    assert contents(tmp_path / "out") == contents(coded)
    np.savez(tmp_path / "c.npz", features=features[310:])
    with pytest.raises(LabelError, match="some of these files hold labels"):
        krnet.encode(models("pca"), files, out=tmp_path / "other")
    assert krnet.encode(models("pca"), files, out=tmp_path / "other", key="features").labels is None


def test_labels_of_a_file_are_read_part_by_part(coded, models, maps, tmp_path, monkeypatch):
    features, labels = unseen(maps)
    np.save(tmp_path / "labels.npy", labels.numpy())
    reads = []
    read = FeatureSource.read
    monkeypatch.setattr(
        FeatureSource, "read", lambda self, ids, **m: (reads.append((self.shape, len(ids))), read(self, ids, **m))[1]
    )
    krnet.encode(models("pca"), features, tmp_path / "labels.npy", out=tmp_path / "out", part_samples=STEP)
    assert max(number for shape, number in reads if shape == ()) == STEP
    assert contents(tmp_path / "out") == contents(coded)
    with pytest.raises(LabelError, match="expected 799 integers"):
        krnet.encode(models("pca"), features[1:], tmp_path / "labels.npy", out=tmp_path / "other")


@pytest.mark.parametrize("shape", [(), (7,), (9, 4)])
@pytest.mark.parametrize("kind", ["raw", "quantized", "transform", "pca", "pq", "krnet", "krnet values"])
def test_vectors_and_numbers_are_encoded_too(tmp_path, shape, kind):
    features = torch.rand(80, *shape, generator=torch.Generator().manual_seed(0)).cumsum(0) / 40
    settings = {name: value for name, value in KINDS[kind].items() if name not in ("step", "parts")}
    settings |= {"krnet": {"step": 0.05, "components": 1, "iterations": 3}, "krnet values": {"step": 0.05}}.get(
        kind, {}
    )
    model = krnet.record(features, **settings)
    encoded = krnet.encode(model, features, out=tmp_path / "out")
    assert encoded[:].shape == features.shape and krnet.verify(tmp_path / "out", features)["same_features"]
    assert encoded.r2 > model.r2 - 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_features_of_other_types_are_coded_in_float32(models, maps, tmp_path, dtype):
    features = unseen(maps)[0].to(dtype)
    encoded = krnet.encode(models("transform"), features, out=tmp_path / "out")
    torch.testing.assert_close(encoded[:], models("transform").project(features.float()), atol=1e-4, rtol=1e-4)
    assert encoded.metadata["feature_dtype"] == str(dtype).removeprefix("torch.")
    assert encoded.info()["feature_bytes"] == features.nbytes


def test_features_and_the_coded_samples_of_one_part_are_all_that_is_in_memory(models, maps, tmp_path, monkeypatch):
    largest = []
    read = FeatureSource.read
    monkeypatch.setattr(
        FeatureSource, "read", lambda self, ids, **m: (largest.append(len(ids)), read(self, ids, **m))[1]
    )
    monkeypatch.setattr(coding, "CHUNK_BYTES", 20 * 4 * 216)
    krnet.encode(models("pca"), unseen(maps)[0], out=tmp_path / "out", part_samples=STEP)
    assert max(largest) == 16  # whole blocks of 16


def test_other_shapes_recorders_and_values_are_refused(models, maps, tmp_path):
    features = unseen(maps)[0].clone()
    out = tmp_path / "out"
    with pytest.raises(FeatureError, match=r"samples of \(6, 6\)"):
        krnet.encode(models("pca"), features[0], out=out)
    paper = krnet.record(features[:40], recorder="paper", iterations=1, d0=8, c0=8, c1=8, device="cpu")
    with pytest.raises(InputError, match=r"recorder paper, which cannot code samples .* those that can are krnet, pca"):
        krnet.encode(paper, features, out=out)
    assert not out.exists()
    features[300, 0, 0, 0] = torch.nan
    with pytest.raises(FeatureError, match="sample 300 holds nan"):
        krnet.encode(models("pca"), features, out=out, part_samples=STEP)
    features[300] = 1e30
    with pytest.raises(FeatureError, match="sample 300 lies far outside the range"):
        krnet.encode(models("pca"), features, out=out, part_samples=STEP, resume=True)


def test_a_folder_of_something_else_is_refused(models, maps, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'notes\.txt', which is no part of a recording"):
        krnet.encode(models("pca"), unseen(maps)[0], out=tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        krnet.encode(models("pca"), unseen(maps)[0], out=tmp_path / "notes.txt")
    with pytest.raises(NotARecordingError, match=r"is a folder without manifest\.json; expected a recording"):
        krnet.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "index.json").touch()
    with pytest.raises(NotARecordingError, match="holds features in shards; expected a recording"):
        krnet.open(tmp_path)


# ------------------------------------------------------------------ a call that was stopped


def stopped(model: krnet.Recording, maps: tuple[Tensor, Tensor], out: Path, after: int = 600) -> None:
    with pytest.raises(KeyboardInterrupt):
        krnet.encode(model, *unseen(maps), out=out, part_samples=STEP, watch=StopAfter(after))


def test_a_call_that_is_stopped_goes_on_behind_its_last_part(coded, models, maps, tmp_path):
    out = tmp_path / "out"
    stopped(models("pca"), maps, out)
    assert len(list(out.glob("part-*"))) == 2 and not (out / "manifest.json").exists()
    with pytest.raises(NotARecordingError, match=r"holds 2 of the parts of a stopped `krnet encode`.*--resume"):
        krnet.open(out)
    with pytest.raises(ResumeError, match=r"holds part-.* already.*--resume"):
        krnet.encode(models("pca"), *unseen(maps), out=out, part_samples=STEP)
    written = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / ".part-000000000512-000000000767.krn.host-1-0123456789abcdef.tmp").write_bytes(b"left behind")
    krnet.encode(models("pca"), *unseen(maps), out=out, part_samples=STEP, resume=True)
    assert contents(out) == contents(coded)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    before = contents(out)
    again = krnet.encode(models("pca"), *unseen(maps), out=out, part_samples=STEP, resume=True)
    assert contents(out) == before and len(again) == 800


def test_parts_of_other_models_features_labels_or_sizes_are_not_mixed(models, maps, tmp_path):
    out, (features, labels) = tmp_path / "out", unseen(maps)
    stopped(models("pca"), maps, out)
    with pytest.raises(ResumeError, match=r"model\.krn: is another model"):
        krnet.encode(models("transform"), features, labels, out=out, part_samples=STEP, resume=True)
    others = {
        "holds other samples": (features.flip(0), labels, STEP),
        "holds other samples than": (features, labels + 1, STEP),
        "holds other samples than these": (features, None, STEP),
        "is not among the parts": (features, labels, 2 * STEP),
    }
    for message, (given, given_labels, part_samples) in others.items():
        with pytest.raises(ResumeError, match=message):
            krnet.encode(models("pca"), given, given_labels, out=out, part_samples=part_samples, resume=True)
    assert len(list(out.glob("part-*"))) == 2


def test_a_finished_part_that_is_damaged_is_not_kept(models, maps, tmp_path):
    out = tmp_path / "out"
    stopped(models("pca"), maps, out)
    damage(min(out.glob("part-*")))
    with pytest.raises(ChecksumError, match="part-000000000000"):
        krnet.encode(models("pca"), *unseen(maps), out=out, part_samples=STEP, resume=True)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(bytes(content))


# ------------------------------------------------------------------ samples of another domain


@pytest.mark.parametrize("kind", ["pca", "krnet"])
def test_samples_that_the_model_does_not_fit_are_named(models, maps, tmp_path, kind):
    features = unseen(maps)[0][:260].clone()
    features[[7, 200, 257]] = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0)) * features.max()
    with pytest.warns(KrnetWarning, match=r"does not fit 3 of 260 samples \(IDs 7, 200, 257\): their R2 is"):
        krnet.encode(models(kind), features, out=tmp_path / "out", part_samples=STEP)
    found = krnet.open(tmp_path / "out").info()["misfits"]
    assert (found["num_samples"], found["first_ids"]) == (3, [7, 200, 257]) and found["r2"] < 0.5
    assert krnet.verify(tmp_path / "out")["misfits"] == found


@pytest.mark.parametrize("kind", ["transform", "quantized"])
def test_samples_that_take_far_more_bytes_than_the_model_s_own_are_named(models, maps, tmp_path, kind):
    features = unseen(maps)[0][:100].clone()
    features[3] = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 2 * features.max()
    with pytest.warns(KrnetWarning, match=r"1 of 100 samples \(IDs 3\)"):
        krnet.encode(models(kind), features, out=tmp_path / "out")


@every_kind
def test_samples_of_the_same_kind_raise_no_warning(models, maps, tmp_path, kind, recwarn):
    features = unseen(maps)[0][:200]
    krnet.encode(models(kind), features, out=tmp_path / "out")
    assert not [warning for warning in recwarn if issubclass(warning.category, KrnetWarning)]


# ------------------------------------------------------------------ reading


def test_parts_are_opened_when_they_are_needed_and_kept_within_bounds(coded, monkeypatch):
    opened, open_part = [], reading.open_part
    monkeypatch.setattr(reading, "open_part", lambda *given: (opened.append(given[1]), open_part(*given))[1])
    recording = krnet.open(coded)
    assert recording.info()["num_samples"] == 800 and not opened
    whole = recording[:]
    assert len(opened) == 4
    recording[:]
    assert len(opened) == 4, "they are kept"
    monkeypatch.setattr(reading, "CACHE_BYTES", 9_000)
    small = krnet.open(coded)
    for ids in torch.randperm(800, generator=torch.Generator().manual_seed(0)).split(40):
        torch.testing.assert_close(small[ids], whole[ids])
        assert 0 < small.load().cache.nbytes <= 9_000
    assert len(opened) > 8


def test_streams_beyond_16_megabytes_are_read_in_blocks(coded, models, maps, tmp_path, monkeypatch):
    for module in ("krnet.parts.part", "krnet.io.archive", "krnet.parts.symbols"):
        monkeypatch.setattr(f"{module}.RESIDENT_BYTES", 1000)
    monkeypatch.setattr("krnet.parts.part.BLOCK_BYTES", 700)
    large = krnet.encode(models("pca"), *unseen(maps), out=tmp_path / "out", part_samples=STEP)
    assert torch.equal(large[:], krnet.open(coded)[:]) and torch.equal(large.labels, unseen(maps)[1])
    krnet.verify(tmp_path / "out")
    damage_stream(tmp_path / "out" / "part-000000000000-000000000255.krn")
    assert len(krnet.open(tmp_path / "out")[300:310]) == 10
    with pytest.raises(ChecksumError):
        krnet.open(tmp_path / "out")[:256]


def damage_stream(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(bytes(content))


def test_verify_finds_any_damage_and_names_the_file(coded, tmp_path):
    for path in sorted(coded.iterdir()):
        own = tmp_path / path.name
        shutil.copytree(coded, own)
        damage(own / path.name)
        with pytest.raises((ChecksumError, NotARecordingError), match=path.name):
            krnet.verify(own)


def test_parts_that_are_missing_shorter_or_others_are_refused(coded, models, maps, tmp_path):
    own = shutil.copytree(coded, tmp_path / "own")
    part = own / "part-000000000256-000000000511.krn"
    content = part.read_bytes()
    part.unlink()
    with pytest.raises(NotARecordingError, match=f"{part.name}: is missing; .*--resume"):
        krnet.open(own)
    part.write_bytes(content[:-1])
    with pytest.raises(TruncatedRecordingError, match=f"{part.name}: has .* as manifest.json says"):
        krnet.open(own)
    other = krnet.encode(models("pca"), unseen(maps)[0].flip(0), unseen(maps)[1], out=tmp_path / "b", part_samples=STEP)
    shutil.copy(other.path / part.name, part)
    size = part.stat().st_size
    part.write_bytes(part.read_bytes()[: len(content)] + bytes(max(0, len(content) - size)))
    with pytest.raises((ChecksumError, TruncatedRecordingError), match=part.name):
        krnet.open(own)[300]
    part.write_bytes(content)
    shutil.copy(models("transform").path, own / "model.krn")
    with pytest.raises((ChecksumError, TruncatedRecordingError), match=r"model\.krn"):
        krnet.open(own)


def test_a_copy_is_the_same_recording(coded, tmp_path):
    opened = krnet.open(coded)
    assert contents(opened.save(tmp_path / "copy")) == contents(coded)
    assert krnet.open(tmp_path / "copy").fingerprint == opened.fingerprint
    with pytest.raises(InputError, match="is not empty"):
        opened.save(tmp_path / "copy")


def test_what_only_a_single_file_can_is_refused_with_what_to_do(coded, maps):
    with pytest.raises(InputError, match=r"folder of parts; expected a single recording to start from"):
        krnet.record(maps[0], start=coded)


# ------------------------------------------------------------------ behind a URL


def test_a_folder_is_written_to_a_store_and_read_from_it(coded, models, maps):
    store, url = fsspec.filesystem("memory"), "memory://encoded/maps"
    with pytest.raises(KeyboardInterrupt):
        krnet.encode(models("pca"), *unseen(maps), out=url, part_samples=STEP, watch=StopAfter(600))
    assert len(store.ls("/encoded/maps")) == 3
    krnet.encode(models("pca"), *unseen(maps), out=url, part_samples=STEP, resume=True)
    assert {Path(name).name: store.cat(name) for name in store.find("/encoded/maps")} == contents(coded)
    opened = krnet.open(url)
    assert torch.equal(opened[:], krnet.open(coded)[:]) and str(opened.path) == url
    assert krnet.verify(url, unseen(maps)[0])["same_features"]
    with pytest.raises(ResumeError, match="already"):
        krnet.encode(url, unseen(maps)[0], out=url)


def test_a_folder_on_a_web_server_is_read(coded):
    with serving(coded.parent) as server:
        opened = krnet.open(server.url("out"))
        assert torch.equal(opened[300:310], krnet.open(coded)[300:310])
        server.folder = coded
        with pytest.raises(KrnetError, match=r"out"):
            krnet.open(server.url("out"))
