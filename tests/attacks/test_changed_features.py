"""Features that change while they are recorded: refused by name, with nothing written and no signal."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import forked
import krnet
from krnet.errors import ChangedFeaturesError
from krnet.features.source import open_features
from krnet.features.stats import check_unchanged, scan

SHAPE = (400, 8, 4, 4)


def maps() -> np.ndarray:
    return np.random.default_rng(0).random(SHAPE, np.float32)


def write_npy(folder: Path) -> Path:
    np.save(folder / "f.npy", maps())
    return folder / "f.npy"


def write_safetensors(folder: Path) -> Path:
    from safetensors.numpy import save_file

    save_file({"features": maps()}, folder / "f.safetensors")
    return folder / "f.safetensors"


def write_h5(folder: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "f.h5", "w") as file:
        file["features"] = maps()
    return folder / "f.h5"


def write_zarr(folder: Path) -> Path:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(folder / "f.zarr", shape=SHAPE, chunks=(50, 8, 4, 4), dtype="f4")
    array[:] = maps()
    return folder / "f.zarr"


KINDS = {"npy": write_npy, "safetensors": write_safetensors, "h5": write_h5, "zarr": write_zarr}


def change_content(path: Path) -> None:
    """Other values of the same size, in the middle of the file or of a chunk."""
    file = path if path.is_file() else max(path.rglob("*"), key=lambda found: found.stat().st_size)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(np.linspace(0.1, 0.9, 64, dtype=np.float32).tobytes())


def when(unit: str, act):
    """A watcher that acts once, as soon as work of this unit has begun."""
    done: list[bool] = []

    def watch(progress):
        if progress.unit == unit and progress.done and not done:
            done.append(True)
            act()

    return watch


@pytest.mark.parametrize("recorder", ["krnet", "pca", "raw"])
@pytest.mark.parametrize("kind", KINDS)
def test_features_that_change_while_they_are_recorded_are_refused_and_nothing_is_written(tmp_path, kind, recorder):
    path = KINDS[kind](tmp_path)
    before = set(tmp_path.iterdir())
    options = {"iterations": 60, "budget": 12_000} if recorder == "krnet" else {}
    watch = when("iterations" if recorder == "krnet" else "samples", lambda: change_content(path))
    with pytest.raises(ChangedFeaturesError, match=f"{path.name}: was changed while it was in use"):
        krnet.record(path, recorder=recorder, out=tmp_path / "x.krn", watch=watch, **options)
    assert set(tmp_path.iterdir()) == before


def test_they_are_refused_at_the_next_checkpoint_and_not_after_the_fit(tmp_path):
    path, steps = write_npy(tmp_path), []
    act = when("iterations", lambda: change_content(path))

    def watch(progress):
        act(progress)
        if progress.unit == "iterations":
            steps.append(progress.done)

    with pytest.raises(ChangedFeaturesError):
        krnet.record(path, out=tmp_path / "x.krn", iterations=1000, checkpoint_s=0, watch=watch)
    assert steps[-1] < 100
    assert not (tmp_path / "x.krn").exists()


def test_a_change_that_no_sampled_block_shows_is_found_after_the_fit(tmp_path, monkeypatch):
    """The pass that measures R2 hashes what it reads."""
    path = write_npy(tmp_path)
    monkeypatch.setattr("krnet.recording_file.check_unchanged", lambda source, digest: None)
    with pytest.raises(ChangedFeaturesError, match="other values were read after the fit"):
        krnet.record(
            path, out=tmp_path / "x.krn", iterations=20, watch=when("iterations", lambda: change_content(path))
        )


def test_features_in_memory_that_change_are_refused(tmp_path):
    values = torch.from_numpy(maps())
    with pytest.raises(ChangedFeaturesError, match="Tensor: was changed"):
        krnet.record(values, iterations=20, watch=when("iterations", lambda: values[3].mul_(2)))


def test_appended_features_that_change_are_refused(tmp_path):
    recording = krnet.record(maps(), recorder="pca", budget=30_000, out=tmp_path / "x.krn")
    path, before = write_npy(tmp_path), (tmp_path / "x.krn").read_bytes()
    with pytest.raises(ChangedFeaturesError):
        recording.append(path, out=tmp_path / "x.krn", watch=when("samples", lambda: change_content(path)))
    assert (tmp_path / "x.krn").read_bytes() == before


def test_a_file_that_is_only_touched_is_recorded(tmp_path):
    path = write_npy(tmp_path)
    touched = krnet.record(path, iterations=20, checkpoint_s=0, watch=when("iterations", lambda: os.utime(path)),
                           out=tmp_path / "x.krn")  # fmt: skip
    assert krnet.verify(touched.path, path)["same_features"]


def test_a_file_that_is_replaced_by_another_leaves_the_opened_one_as_it_was(tmp_path):
    path = write_npy(tmp_path)
    source = open_features(path)
    digest = scan(source).digest
    np.save(tmp_path / "other.npy", np.zeros(SHAPE, np.float32))
    os.replace(tmp_path / "other.npy", path)
    check_unchanged(source, digest)
    assert np.array_equal(source.read(torch.arange(5)).numpy(), maps()[:5])


TRUNCATE = """
import os, sys
import numpy as np
import krnet
path, way = sys.argv[1:]

def watch(progress):
    if progress.unit == "iterations" and progress.done:
        os.truncate(path, 5000)

given = path if way == "path" else np.load(path, mmap_mode="r")
if way == "reversed map":
    given = given[::-1]
from krnet.features import feed
feed.free_bytes = lambda device: 0  # read from the file, as if it were larger than the memory
try:
    krnet.record(given, out=path + ".krn", iterations=200, watch=watch, checkpoint_s=1000)
except krnet.errors.ChangedFeaturesError as error:
    print(error)
"""


@pytest.mark.parametrize("way", ["path", "map", "reversed map"])
def test_a_file_that_is_shortened_during_a_fit_ends_in_an_error_and_not_in_a_signal(tmp_path, way):
    path = write_npy(tmp_path)
    done = forked.run(forked.script(TRUNCATE, path, way))
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    assert "it was shortened while it was read" in done.stdout
    assert not Path(f"{path}.krn").exists()
