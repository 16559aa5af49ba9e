"""No command overwrites what it reads, by whatever name; nor a file that is not its own."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import krnet
from krnet.cli.app import app
from krnet.errors import InputError
from krnet.io.archive import open_archive
from krnet.io.overlap import WRITES, files_of, refuse_overlap


@pytest.fixture
def features(tmp_path: Path) -> Path:
    np.save(tmp_path / "features.npy", np.random.default_rng(0).random((20, 3, 4, 4), np.float32))
    return tmp_path / "features.npy"


def run(*words: object) -> str:
    """The message of a command that is refused."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr


LINKS = {
    "itself": lambda path: path,
    "symbolic link": lambda path: _linked(path, os.symlink),
    "hard link": lambda path: _linked(path, os.link),
    "dots": lambda path: path.parent / "." / ".." / path.parent.name / path.name,
}


def _linked(path: Path, link) -> Path:
    name = path.with_name("link" + path.suffix)
    link(path, name)
    return name


@pytest.mark.parametrize("way", LINKS)
@pytest.mark.parametrize("command", WRITES)
def test_an_output_that_is_an_input_is_refused_by_whatever_name(tmp_path, command, way):
    path = tmp_path / "a.npy"
    path.write_text("precious")
    with pytest.raises(InputError, match="would be overwritten"):
        refuse_overlap(command, [LINKS[way](path)], [path])


@pytest.mark.parametrize(
    ("command", "given"),
    [("record", "x.krn.ckpt"), ("extract", "x.krn.partial"), ("extract", "x.krn.partial.json")],
)
def test_an_input_with_the_name_of_a_file_beside_the_output_is_refused(tmp_path, command, given):
    with pytest.raises(InputError, match=f"{given}: would be overwritten"):
        refuse_overlap(command, [tmp_path / "x.krn"], [tmp_path / given])


@pytest.mark.parametrize("name", ["settings.json", "base.krn", "kril/state.krn", "own/seed-0/kril/task-0-1.partial"])
def test_an_input_in_the_place_of_a_file_of_a_run_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="a file of this name is written"):
        refuse_overlap("learn", [tmp_path], [tmp_path / name])


def test_other_inputs_may_lie_in_the_folder_of_the_output(tmp_path):
    refuse_overlap("learn", [tmp_path], [tmp_path / "pictures", tmp_path / "shared" / "base-0a.krn"])
    refuse_overlap("bench rate", [tmp_path], [tmp_path / "features.npy"])
    refuse_overlap("record", [tmp_path / "a.krn"], [tmp_path / "a.npy"])


@pytest.mark.parametrize("way", ["itself", "symbolic link"])
def test_an_output_in_a_folder_that_is_read_is_refused(tmp_path, way):
    store = tmp_path / "features.zarr"
    (store / "c" / "0").mkdir(parents=True)
    given = LINKS[way](store)
    for out in (store / "x.krn", store / "c" / "0" / "1", given / "c" / "new"):
        with pytest.raises(InputError, match=r"lies in .*, which is read"):
            refuse_overlap("record", [out], [given])
    with pytest.raises(InputError, match="would be overwritten"):
        refuse_overlap("learn", [given], [store])


def test_one_output_twice_is_refused(tmp_path):
    with pytest.raises(InputError, match="by another output"):
        refuse_overlap("replay", [tmp_path / "a.npy", tmp_path / "a.npy"], [])


def test_the_file_behind_an_object_is_known(tmp_path, features):
    mapped = np.load(features, mmap_mode="r")
    for given in (mapped, mapped[3:], np.asarray(mapped), {"features": mapped}, str(features)):
        assert set(files_of(given)) == {features}, type(given)
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"] = np.zeros((3, 2))
        assert set(files_of(file["features"])) == set(files_of(file)) == {tmp_path / "a.h5"}
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(tmp_path / "a.zarr", shape=(3, 2), dtype="f4")
    assert set(files_of(array)) == {tmp_path / "a.zarr"}
    assert not list(files_of(torch.zeros(3))) and not list(files_of([1, 2])) and not list(files_of(None))


# ------------------------------------------------------------------ the commands


def test_record_never_writes_over_its_inputs(tmp_path, features):
    labels = tmp_path / "labels.npy"
    np.save(labels, np.arange(20))
    before = {path: path.read_bytes() for path in (features, labels)}
    for out in (features, labels):
        assert "would be overwritten" in run(
            "record", features, "--labels", labels, "-o", out, "--recorder", "raw", "-q"
        )
    shutil.copy(features, tmp_path / "x.npy")
    (tmp_path / "x.npy").rename(tmp_path / "x.krn.ckpt.npy")
    trunk = tmp_path / "trunk.pt2"
    trunk.write_bytes(b"a network")
    images = ["--recorder", "images", "--images", labels, "--trunk", trunk]
    assert "would be overwritten" in run("record", features, *images, "-o", trunk, "-q")
    assert trunk.read_bytes() == b"a network"
    with pytest.raises(InputError, match="would be overwritten"):
        krnet.record(np.load(features, mmap_mode="r"), out=features, recorder="raw")
    assert before == {path: path.read_bytes() for path in before}


def test_replay_never_writes_over_its_inputs(tmp_path, features):
    recording, ids, trunk = tmp_path / "x.krn", tmp_path / "ids.npy", tmp_path / "trunk.pt2"
    krnet.record(features, recorder="raw", out=recording)
    np.save(ids, np.arange(5))
    trunk.write_bytes(b"a network")
    before = {path: path.read_bytes() for path in (recording, ids, trunk)}
    for words in (
        ["--ids", f"@{ids}", "-o", ids],
        ["--trunk", trunk, "-o", trunk],
        ["-o", recording],
        ["-o", tmp_path / "y.npy", "--labels-out", recording],
        ["-o", tmp_path / "y.npy", "--labels-out", tmp_path / "y.npy"],
    ):
        assert "overwritten" in run("replay", recording, *words, "-q")
    assert before == {path: path.read_bytes() for path in before}


def test_append_never_writes_over_its_inputs(tmp_path, features):
    recording = krnet.record(features, recorder="pca", budget=9000, out=tmp_path / "x.krn")
    before = features.read_bytes()
    with pytest.raises(InputError, match="would be overwritten"):
        recording.append(features, out=features)
    assert features.read_bytes() == before
    grown = recording.append(features, out=LINKS["symbolic link"](tmp_path / "x.krn"))
    assert len(grown) == 40


def test_start_is_not_written_over(tmp_path, features):
    start = krnet.record(features, recorder="pca", budget=9000, out=tmp_path / "x.krn")
    with pytest.raises(InputError, match="would be overwritten"):
        krnet.record(features, recorder="pca", start=start, out=tmp_path / "x.krn")


def test_bench_and_learn_refuse_their_inputs_as_outputs(tmp_path, features):
    (tmp_path / "store" / "points").mkdir(parents=True)
    inside = tmp_path / "store" / "points" / "features.npy"
    shutil.copy(features, inside)
    assert "is read" in run("bench", "rate", inside, "-o", tmp_path / "store", "--recorders", "raw", "-q")
    pictures = tmp_path / "pictures"
    for part in ("train", "val"):
        (pictures / part / "cat").mkdir(parents=True)
    for out in (pictures, pictures / "runs"):
        message = run("learn", "finetune", "--data", pictures, "-o", out, "-q")
        assert "overwritten" in message or "lies in" in message
    assert sorted(path.name for path in pictures.iterdir()) == ["train", "val"]


# ------------------------------------------------------------------ files that are not ours


@pytest.mark.parametrize("content", [b"weights of weeks", b"", b"{}"], ids=repr)
def test_a_foreign_checkpoint_name_stops_a_fit_and_is_left_alone_by_others(tmp_path, features, content):
    foreign = tmp_path / "model.ckpt"
    foreign.write_bytes(content)
    assert "model.ckpt: is no checkpoint of krnet" in run("record", features, "-o", tmp_path / "model", "-q")
    assert not (tmp_path / "model").exists()
    krnet.record(features, out=tmp_path / "model", recorder="raw")
    assert foreign.read_bytes() == content


def test_a_recording_is_no_checkpoint(tmp_path, features):
    krnet.record(features, out=tmp_path / "model.ckpt", recorder="raw")
    before = (tmp_path / "model.ckpt").read_bytes()
    krnet.record(features, out=tmp_path / "model", recorder="raw")
    with pytest.raises(InputError, match="is no checkpoint"):
        krnet.record(features, out=tmp_path / "model", iterations=5)
    assert (tmp_path / "model.ckpt").read_bytes() == before


def test_a_checkpoint_of_ours_is_replaced_and_removed_even_a_damaged_one(tmp_path, features):
    checkpoint = tmp_path / "x.krn.ckpt"

    def stop(progress):
        if progress.unit == "iterations" and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        krnet.record(features, out=tmp_path / "x.krn", iterations=100, checkpoint_s=0, watch=stop)
    assert open_archive(checkpoint).metadata["kind"] == "checkpoint"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    krnet.record(features, out=tmp_path / "x.krn", iterations=5)
    assert not checkpoint.exists()


@pytest.mark.parametrize("name", ["a.safetensors.partial", "a.safetensors.partial.json"])
def test_a_foreign_file_with_the_name_of_unfinished_features_is_kept(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"{name}: is no file of krnet.extract"):
        krnet.extract(torch.nn.Flatten(), torch.zeros(4, 3, 8, 8), out=tmp_path / "a.safetensors")
    assert (tmp_path / name).read_text() == "mine"


def test_a_page_may_lie_in_the_folder_that_it_shows_but_replaces_no_ledger(tmp_path):
    refuse_overlap("report", [tmp_path / "report.html"], [tmp_path])
    ledger = tmp_path / "ledger.jsonl"
    ledger.touch()
    with pytest.raises(InputError, match="would be overwritten"):
        refuse_overlap("report", [ledger], [tmp_path, ledger])
