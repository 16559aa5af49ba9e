"""Folders of parts that are not what `krnet encode` wrote: any nonsense ends in a named error, and takes no memory."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_run_folders import JSON

import krnet
from forge import rewrite_header, rewrite_manifest, rewrite_metadata
from krnet.errors import KrnetError, OversizedRecordingError, RecordingError
from krnet.io import archive
from maps import relu_maps

PART = "part-000000000000-000000000255.krn"
FIXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    features, labels = relu_maps(500, (4, 5, 5))
    model = krnet.record(features[:150], recorder="pca", step=0.1, out=folder / "model.krn")
    krnet.encode(model, features[150:], labels[150:].flip(0), out=folder / "maps", part_samples=256)
    return folder / "maps"


@pytest.fixture
def own(good, tmp_path) -> Path:
    return shutil.copytree(good, tmp_path / "own")


def use(folder: Path) -> None:
    """All that a reader may do with a folder."""
    recording = krnet.open(folder)
    repr(recording), recording.info(), recording.labels, recording[[0, -1]]
    krnet.verify(folder)


def adopt_part(folder: Path, name: str = PART) -> None:
    """Let the manifest list a forged part: its size, its checksum, and what it says of itself."""
    kept = archive.open_archive(folder / name)

    def edit(table: dict[str, Any]) -> None:
        row = next(row for row in table["parts"] if row["name"] == name)
        said = {key: kept.metadata[key] for key in ("first", "num_samples", "features", "measured")}
        row.update(**said, size_bytes=kept.nbytes, digest=kept.checksum)
        table["num_samples"] = sum(part["num_samples"] for part in table["parts"])

    rewrite_manifest(folder, edit)


def test_a_manifest_that_is_written_again_by_the_format_page_is_read(own):
    rewrite_manifest(own, lambda table: None)
    adopt_part(own)
    use(own)


FIELDS = ("format", "version", "num_samples", "shape", "feature_dtype", "num_classes", "model", "parts", "digest")


@FIXED
@given(value=JSON, field=st.none() | st.sampled_from(FIELDS))
def test_any_json_in_the_manifest_is_read_or_refused_by_name(good, tmp_path, value, field):
    own = tmp_path / "own"
    if not own.exists():
        shutil.copytree(good, own)
    path, table = own / "manifest.json", json.loads((good / "manifest.json").read_text())
    path.write_text(json.dumps(value if field is None else table | {field: value}))
    with suppress(RecordingError):
        use(own)
    if field not in (None, "digest"):
        path.write_text(json.dumps(table))
        rewrite_manifest(own, lambda table: table.update({field: value}))
        with suppress(RecordingError):
            use(own)


ROW_FIELDS = ("name", "first", "num_samples", "size_bytes", "digest", "features", "measured")


@FIXED
@given(value=JSON | st.integers(0, 2**70), field=st.sampled_from(ROW_FIELDS), deep=st.booleans())
def test_any_json_in_the_entry_of_a_part_is_refused_by_name(good, tmp_path, value, field, deep):
    own = tmp_path / "own"
    if not own.exists():
        shutil.copytree(good, own)
    shutil.copy(good / "manifest.json", own / "manifest.json")

    def edit(table: dict[str, Any]) -> None:
        row = table["parts"][0]
        row["measured"]["moments" if deep else "misfits"] = value
        if field != "measured":
            row[field] = value

    rewrite_manifest(own, edit)
    with pytest.raises(RecordingError, match=r"manifest\.json|part-"):
        use(own)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"a": 1, "a": 2}', "\ud800"], ids=ascii)
def test_a_manifest_that_is_no_object_is_refused(own, text):
    (own / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RecordingError, match=r"manifest\.json"):
        krnet.open(own)


NAMES = ("../secret.krn", "/etc/passwd", "part-000000000000-000000000255.krn/../x", "", ".", "part-0-255.krn", "a\0b")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("of_model", [False, True], ids=["part", "model"])
def test_a_name_of_another_file_is_refused(own, tmp_path, name, of_model):
    shutil.copy(own / PART, tmp_path / "secret.krn")

    def edit(table: dict[str, Any]) -> None:
        (table["model"] if of_model else table["parts"][0])["name"] = name

    rewrite_manifest(own, edit)
    with pytest.raises(RecordingError, match=r"manifest\.json"):
        krnet.open(own)


@pytest.mark.parametrize("name", ["manifest.json", "model.krn", PART])
def test_a_link_out_of_the_folder_is_refused(own, tmp_path, name):
    shutil.move(own / name, tmp_path / "outside")
    (own / name).symlink_to(tmp_path / "outside")
    with pytest.raises(RecordingError, match=r"is a link to .*outside the folder"):
        krnet.open(own)
    (own / name).unlink()
    (own / name).symlink_to(own / name)
    with pytest.raises(RecordingError, match=name):
        krnet.open(own)


def test_a_link_within_the_folder_and_one_to_it_are_followed(own, tmp_path):
    shutil.move(own / PART, own / "kept")
    (own / PART).symlink_to("kept")
    (tmp_path / "link").symlink_to(own)
    use(tmp_path / "link")


@pytest.mark.parametrize("name", ["manifest.json", "model.krn", PART])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_refused_at_once(own, name):
    (own / name).unlink()
    (own / name).mkdir()
    with pytest.raises(RecordingError, match="is a folder or a device"):
        krnet.open(own)
    (own / name).rmdir()
    os.mkfifo(own / name)
    with pytest.raises(RecordingError, match="is a folder or a device"):
        krnet.open(own)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.update(num_samples=2**40),
        lambda m: m.update(num_samples=2**40, classes=None),
        lambda m: m.update(num_samples=10),
        lambda m: m.update(first=3),
        lambda m: m.update(first=-1),
        lambda m: m.update(first=True),
        lambda m: m.update(shape=[4, 5, 6]),
        lambda m: m.update(shape=[2**40, 2**40]),
        lambda m: m.update(model="0" * 32),
        lambda m: m.update(feature_dtype="float16"),
        lambda m: m.update(classes=None),
        lambda m: m.update(kind="recording"),
        lambda m: m.update(measured=None),
        lambda m: m["measured"]["moments"].update(mse=-1.0),
        lambda m: m["measured"]["moments"].update(variance="x"),
        lambda m: m["measured"]["moments"].update(count=2**70),
        lambda m: m["measured"]["misfits"].update(first_ids=list(range(1000))),
        lambda m: m.pop("features"),
    ],
)
def test_a_part_that_says_something_else_of_itself_is_refused(own, edit):
    rewrite_metadata(own / PART, edit)
    with suppress(KeyError, RecordingError):
        adopt_part(own)  # the size stays: else opening would refuse the folder for that
    with pytest.raises(RecordingError):
        use(own)


def test_forged_lengths_and_streams_are_refused(own):
    kept = archive.open_archive(own / PART)
    tensors = {name: kept.tensor(name) for name in kept.names}
    forged = [
        {"lengths": torch.full_like(tensors["lengths"].int(), 0).to(torch.uint16)},
        {"lengths": torch.full((16,), 2**31, dtype=torch.uint32)},
        {"lengths": tensors["lengths"].float()},
        {"lengths": tensors["lengths"][:3]},
        {"stream": tensors["stream"][:-1]},
        {"stream": torch.randint(0, 255, tensors["stream"].shape, dtype=torch.uint8)},
        {"stream": tensors["stream"][None]},
        {"probe.ids": torch.tensor([2**40])},
        {"probe.ids": torch.tensor([0.5])},
    ]
    for change in forged:
        archive.write(own / PART, {**tensors, **change}, kept.metadata)
        adopt_part(own)
        with pytest.raises(RecordingError):
            use(own)


def test_forged_sizes_take_no_memory(own):
    """A part of a few kilobytes that claims far more samples, and a model that claims far larger maps."""
    rewrite_metadata(own / PART, lambda m: m.update(num_samples=2**20, classes=[[0, 2**20]]))
    shutil.move(own / PART, own / "part-000000000000-000001048575.krn")
    (own / "part-000000000256-000000000349.krn").unlink()

    def edit(table: dict[str, Any]) -> None:
        kept = archive.open_archive(own / "part-000000000000-000001048575.krn")
        row = {**table["parts"][0], "name": kept.path.name, "num_samples": 2**20, "size_bytes": kept.nbytes}
        table.update(parts=[{**row, "digest": kept.checksum}], num_samples=2**20)

    rewrite_manifest(own, edit)
    tracemalloc.start()
    recording = krnet.open(own)
    assert len(recording) == 2**20
    with pytest.raises(OversizedRecordingError, match="claims 1048576 samples"):
        recording[0]
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_a_model_that_asks_for_memory_is_refused(own):
    def edit_header(header: dict[str, Any]) -> None:
        header["__metadata__"]["shape"] = "[4096,512,512]"

    rewrite_header(own / "model.krn", edit_header)
    model = archive.open_archive(own / "model.krn")

    def edit(table: dict[str, Any]) -> None:
        table.update(shape=[4096, 512, 512])
        table["model"].update(digest=model.checksum, size_bytes=model.nbytes)

    rewrite_manifest(own, edit)
    with pytest.raises(OversizedRecordingError):
        krnet.open(own)[0]


def test_a_part_that_is_exchanged_after_opening_is_noticed(own, tmp_path):
    recording = krnet.open(own)
    rewrite_metadata(own / PART, lambda m: m.update(features=m["features"][::-1]))
    with pytest.raises(RecordingError, match=r"is not the part that manifest\.json lists"):
        recording[5]


@FIXED
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), name=st.sampled_from(["model.krn", PART]))
def test_any_flipped_byte_is_found_by_verify(good, tmp_path, place, flip, name):
    own = tmp_path / "own"
    if not own.exists():
        shutil.copytree(good, own)
    content = bytearray((good / name).read_bytes())
    content[int(place * len(content))] ^= flip
    (own / name).write_bytes(bytes(content))
    with pytest.raises(KrnetError):
        krnet.verify(own)
    shutil.copy(good / name, own / name)
