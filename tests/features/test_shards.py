"""A folder of shards: read as one array would be, in bounded memory; nonsense in it is refused by name."""

import json
import os
import shutil
import struct
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

import krnet
from krnet.errors import FeatureError, InputError, ShardError
from krnet.features.labels import has_labels, stored_labels
from krnet.features.shards import source as shard_source
from krnet.features.shards.folder import check_folder, merge
from krnet.features.shards.index import INDEX_NAME
from krnet.features.shards.ranges import cut, missing, text
from krnet.features.shards.shard import shard_name, write_shard
from krnet.features.source import open_features

N, SHAPE = 23, (3, 2, 2)
LABELS = torch.arange(N) * 7 % 5
MADE_BY = {"trunk": "0" * 32}


def values(dtype=torch.float32, num_samples=N):
    return torch.randn(num_samples, *SHAPE, generator=torch.Generator().manual_seed(3)).to(dtype)


def make(folder, features=None, labels=LABELS, cuts=(0, 5, 6, 14, N), run=(0, N), made_by=MADE_BY):
    """A folder of shards that begin at these samples."""
    features = values() if features is None else features
    folder.mkdir(exist_ok=True)
    for start, stop in pairwise(cuts):
        part = None if labels is None else labels[start:stop]
        write_shard(folder, start, features[start:stop], part, run, made_by)
    merge(folder)
    return folder


# ------------------------------------------------------------------ ranges


def test_missing_and_done_samples_are_all_samples_once():
    for done in ([], [(0, 23)], [(5, 9), (2, 3)], [(0, 4), (2, 9), (20, 40)], [(30, 31)]):
        found = [i for start, stop in missing(0, N, done) for i in range(start, stop)]
        assert found == [i for i in range(N) if not any(a <= i < b for a, b in done)]
        pieces = list(cut(missing(0, N, done), 4))
        assert [i for start, stop in pieces for i in range(start, stop)] == found
        assert all(start // 4 == (stop - 1) // 4 for start, stop in pieces)
    assert text([(0, 2), (5, 9)]) == "0..1, 5..8" and text([(0, 2)] * 5).endswith("and 2 more")


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_any_samples_are_read_as_from_one_array(dtype, tmp_path):
    features = values(dtype)
    source = open_features(make(tmp_path / "shards", features))
    assert (len(source), source.shape, source.dtype) == (N, SHAPE, dtype)
    for ids in (range(N), [22, 0, 13, 13, 5, 4], torch.randperm(N).tolist(), [6], []):
        assert torch.equal(source.read(torch.tensor(list(ids)).long()), features[list(ids)])
    with pytest.raises(FeatureError, match="no sample ID 23"):
        source.read(torch.tensor([N]))


def test_a_shard_is_a_safetensors_file_that_others_read(tmp_path):
    folder = make(tmp_path / "shards")
    found = load_file(folder / shard_name(6, 8))
    assert torch.equal(found["features"], values()[6:14]) and torch.equal(found["labels"], LABELS[6:14])
    assert torch.equal(open_features(folder / shard_name(6, 8), key="features").read(torch.arange(8)), values()[6:14])


def test_labels_lie_in_the_shards_and_are_found_there(tmp_path):
    folder = make(tmp_path / "shards")
    assert has_labels(folder) and torch.equal(stored_labels(folder, None, N), LABELS)
    plain = make(tmp_path / "plain", labels=None)
    assert not has_labels(plain) and stored_labels(plain, None, N) is None
    with pytest.raises(FeatureError, match="'labels'; it holds 'features'"):
        open_features(plain, key="labels")


def test_headers_of_few_shards_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_source, "MAX_OPEN", 2)
    source = open_features(make(tmp_path / "shards"))
    assert torch.equal(source.read(torch.randperm(N).sort().values), values())
    assert len(source._shards._kept) == 2


def test_a_recording_of_shards_is_that_of_one_array(tmp_path):
    folder = make(tmp_path / "shards", values(torch.bfloat16))
    recording = krnet.record(folder, recorder="raw", out=tmp_path / "a.krn")
    assert torch.equal(recording[:], values(torch.bfloat16).float()) and torch.equal(recording.labels, LABELS)
    assert krnet.verify(tmp_path / "a.krn", values(torch.bfloat16))["same_features"]
    with pytest.raises(InputError, match="lies in"):
        krnet.record(folder, recorder="raw", out=folder / "a.krn")


# ------------------------------------------------------------------ what is refused


def test_missing_samples_are_named(tmp_path):
    folder = make(tmp_path / "shards", cuts=(0, 5, 6))
    with pytest.raises(ShardError, match=r"samples 6\.\.22 missing.*--resume"):
        open_features(folder)
    merge(make(tmp_path / "shards", cuts=(14, N)))
    with pytest.raises(ShardError, match=r"samples 6\.\.13 missing"):
        open_features(folder)
    unknown = make(tmp_path / "unknown", run=(0, None))
    with pytest.raises(ShardError, match="the end of its last run missing"):
        open_features(unknown)


def test_shards_that_share_samples_or_come_from_elsewhere_are_refused_when_they_are_merged(tmp_path):
    make(tmp_path / "shared")
    with pytest.raises(ShardError, match="share samples"):
        make(tmp_path / "shared", cuts=(3, 7))
    make(tmp_path / "trunks", cuts=(0, 5))
    with pytest.raises(ShardError, match="has trunk 1; the other shards have trunk 0000"):
        make(tmp_path / "trunks", cuts=(5, 9), made_by={"trunk": "1"})
    make(tmp_path / "runs", cuts=(0, 5))
    with pytest.raises(ShardError, match=r"has 2[34] samples, others 2[34]"):
        make(tmp_path / "runs", cuts=(5, 9), run=(0, N + 1))


def test_a_folder_of_other_things_is_not_written_to(tmp_path):
    check_folder(tmp_path / "new")
    check_folder(make(tmp_path / "shards"))
    (tmp_path / "shards" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'notes\.txt'"):
        check_folder(tmp_path / "shards")
    with pytest.raises(InputError, match="is no folder"):
        check_folder(tmp_path / "shards" / "notes.txt")
    with pytest.raises(FeatureError, match=r"without index\.json"):
        open_features(tmp_path)


def _edit(**changes):
    def change(folder):
        path = folder / INDEX_NAME
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _edit_shard(number, **changes):
    def change(folder):
        path = folder / INDEX_NAME
        table = json.loads(path.read_text())
        table["shards"][number].update(changes)
        path.write_text(json.dumps(table))

    return change


def _write(content):
    return lambda folder: (folder / INDEX_NAME).write_bytes(content)


def _outside(folder):
    path = folder / shard_name(0, 5)
    shutil.move(path, folder.parent / "elsewhere.safetensors")
    path.symlink_to(folder.parent / "elsewhere.safetensors")


def _linked_index(folder):
    shutil.move(folder / INDEX_NAME, folder.parent / "elsewhere.json")
    (folder / INDEX_NAME).symlink_to(folder.parent / "elsewhere.json")


def _pipe(folder):
    (folder / shard_name(0, 5)).unlink()
    os.mkfifo(folder / shard_name(0, 5))


def _flip(folder):
    path = folder / shard_name(0, 5)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _other_shard(folder):
    write_shard(folder, 0, values()[:5] + 1, LABELS[:5], (0, N), MADE_BY)


def _foreign_shard(folder):
    save_file({"features": values()[:5], "labels": LABELS[:5]}, folder / shard_name(0, 5))
    size = (folder / shard_name(0, 5)).stat().st_size
    _edit_shard(0, bytes=size)(folder)


def _long_header(folder):
    path = folder / shard_name(0, 5)
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 2**50) + content[8:])


NONSENSE = {
    "no JSON": (_write(b"{"), "no JSON"),
    "a key twice": (_write(b'{"format":"krnet-shards","format":"krnet-shards"}'), "each key once"),
    "a list": (_write(b"[]"), "is no index of shards"),
    "deep": (_write(b"[" * 100_000), "no JSON"),
    "another format": (_edit(format="zarr"), "is no index of shards"),
    "a later version": (_edit(version=2), "Upgrade krnet"),
    "no version": (_edit(version=None), "Upgrade krnet"),
    "dtype": (_edit(dtype="object"), "a field is missing"),
    "shape of text": (_edit(shape=["3"]), "a field is missing"),
    "huge shape": (_edit(shape=[10**11, 10**11]), "fewer bytes than its samples take"),
    "another shape": (_edit(shape=[3, 2, 1]), "is another file than index.json lists"),
    "no labels": (_edit(labels=False), "is another file than index.json lists"),
    "no shards": (_edit(shards=[]), "a field is missing"),
    "runs": (_edit(runs=[[0, -5]]), "a field is missing"),
    "no runs": (_edit(runs=[]), "a field is missing"),
    "number of samples": (_edit(num_samples=10**9), "not those of its runs"),
    "a million samples": (_edit(num_samples=10**6, runs=[[0, 10**6]]), "samples 23..999999 missing"),
    "parent": (_edit_shard(0, name="../x.safetensors"), "is called '../x.safetensors'"),
    "absolute": (_edit_shard(0, name="/etc/passwd"), "is called '/etc/passwd'"),
    "negative": (_edit_shard(0, first=-1), "is no shard"),
    "true": (_edit_shard(0, num_samples=True), "is no shard"),
    "bytes": (_edit_shard(0, bytes=10**15), "expected 1000000000000000 bytes"),
    "few bytes": (_edit_shard(0, bytes=10), "fewer bytes than its samples take"),
    "checksum": (_edit_shard(0, checksum="0" * 32), "is another file than index.json lists"),
    "a link out": (_outside, "is a link to"),
    "a linked index": (_linked_index, "is a link to"),
    "a pipe": (_pipe, "is missing"),
    "a missing shard": (lambda folder: (folder / shard_name(5, 1)).unlink(), "is missing; expected"),
    "a short shard": (lambda folder: os.truncate(folder / shard_name(5, 1), 100), "has 100 bytes; expected"),
    "a flipped bit": (_flip, "have checksum"),
    "another shard": (_other_shard, "is another file than index.json lists"),
    "a foreign shard": (_foreign_shard, "another kind of file"),
    "a long header": (_long_header, "claims a header of"),
}  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_in_the_index_or_in_a_shard_is_refused_by_name(case, tmp_path):
    damage, message = NONSENSE[case]
    folder = make(tmp_path / "shards")
    damage(folder)
    with pytest.raises(ShardError, match=f"(?s){message}"):
        source = open_features(folder)
        source.read(torch.arange(N))
        open_features(folder, key="labels").read(torch.arange(N))


def test_an_index_of_millions_of_values_is_refused_before_it_is_parsed(tmp_path):
    folder = make(tmp_path / "shards")
    _write(b'{"format":"krnet-shards","x":[' + b"{}," * 4_000_000 + b"0]}")(folder)
    with pytest.raises(ShardError, match="far more values"):
        open_features(folder)


def test_a_shard_that_is_replaced_while_it_is_read_is_noticed(tmp_path):
    folder = make(tmp_path / "shards")
    source = open_features(folder)
    source.read(torch.arange(N))
    _flip(folder)
    with pytest.raises(ShardError, match="have checksum"):
        source.read(torch.arange(N))
        open_features(folder, key="labels").read(torch.arange(N))


def test_a_removed_or_replaced_shard_is_mended_by_merging_again(tmp_path):
    folder = make(tmp_path / "shards")
    (folder / shard_name(5, 1)).unlink()
    merge(folder)
    with pytest.raises(ShardError, match=r"samples 5\.\.5 missing"):
        open_features(folder)
    make(folder, cuts=(5, 6))
    _other_shard(folder)
    merge(folder)
    assert torch.equal(open_features(folder).read(torch.arange(5)), values()[:5] + 1)
