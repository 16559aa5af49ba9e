"""Features behind URLs are those of the same files on this machine; nonsense in them is refused by name."""

import io
import json
import struct
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

import krnet
from krnet.errors import FeatureError, InputError, ShardError, StoreError
from krnet.features.labels import has_labels, stored_labels
from krnet.features.shards.index import INDEX_NAME
from krnet.features.shards.shard import shard_name
from krnet.features.source import open_features
from krnet.io import remote
from range_server import serving

pytest.importorskip("aiohttp", reason="pip install 'krnet[urls]'")
fsspec = pytest.importorskip("fsspec")

N, SHAPE = 300, (4, 5, 6)
VALUES = torch.randn(N, *SHAPE, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) * 7 % 5


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "a.npy").write_bytes(npy(VALUES.numpy()))
    (folder / "swapped.npy").write_bytes(npy(VALUES.numpy().astype(">f4")))
    (folder / "half.npy").write_bytes(npy(VALUES.half().numpy()))
    (folder / "fortran.npy").write_bytes(npy(np.asfortranarray(VALUES.numpy())))
    save_file({"features": VALUES.bfloat16(), "labels": LABELS}, folder / "a.safetensors")
    krnet.extract(torch.nn.Identity(), VALUES, LABELS, out=folder / "shards", batch_size=20, shard_size=40 * 488)
    return folder


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def store(monkeypatch):
    monkeypatch.setattr(remote, "DELAYS_S", (0.0, 0.0))
    store = fsspec.filesystem("memory")
    store.store.clear()
    return store


@pytest.fixture(params=["http", "memory"])
def url(request, folder, server, store):
    if request.param == "http":
        return server.url
    for path in folder.rglob("*.*"):
        store.pipe_file(f"/served/{path.relative_to(folder)}", path.read_bytes())
    return lambda name: f"memory://served/{name}"


KINDS = {
    "a.npy": VALUES, "swapped.npy": VALUES, "half.npy": VALUES.half(), "a.safetensors": VALUES.bfloat16(),
    "shards/": VALUES,
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_any_samples_are_those_of_the_file(name, url):
    source = open_features(url(name))
    assert (len(source), source.shape, source.dtype) == (N, SHAPE, KINDS[name].dtype)
    for ids in (range(N), [299, 0, 13, 13, 5], torch.randperm(N).tolist(), [6], []):
        assert torch.equal(source.read(torch.tensor(list(ids)).long()), KINDS[name][list(ids)])


def test_labels_are_found_and_a_recording_is_that_of_the_files(url, folder, tmp_path):
    for name in ("a.safetensors", "shards"):
        assert has_labels(url(name)) and torch.equal(stored_labels(url(name), None, N), LABELS)
    assert not has_labels(url("a.npy"))
    krnet.record(url("shards"), recorder="pca", components=4, out=tmp_path / "a.krn")
    krnet.record(folder / "shards", recorder="pca", components=4, out=tmp_path / "b.krn")
    assert torch.equal(krnet.open(tmp_path / "a.krn")[:], krnet.open(tmp_path / "b.krn")[:])
    assert krnet.verify(tmp_path / "a.krn", url("a.npy"))["same_features"]


def test_few_samples_fetch_few_bytes(server, folder):
    source = open_features(server.url("a.npy"))
    before = server.sent
    source.read(torch.tensor([250]))
    assert server.sent - before <= 64 << 10 < (folder / "a.npy").stat().st_size / 2


# ------------------------------------------------------------------ written to a store


def extract(out, **options):
    trunk = torch.nn.Identity()
    return krnet.extract(trunk, VALUES, LABELS, out=out, batch_size=20, shard_size=40 * 488, device="cpu", **options)


def content(store):
    return {name: bytes(store.cat_file(name)) for name in store.find("/out")}


def test_shards_are_written_to_a_store_in_shares_resumed_and_added_to(store, folder):
    where = extract("memory://out/shards/")
    assert str(where) == "memory://out/shards/"
    assert torch.equal(open_features(where).read(torch.arange(N)), VALUES)
    whole = content(store)
    assert {name.rpartition("/")[2]: data for name, data in whole.items()} == {
        path.name: path.read_bytes() for path in (folder / "shards").iterdir()
    }
    store.rm(f"/out/shards/{shard_name(40, 40)}")
    with pytest.raises(ShardError, match="is missing"):
        open_features("memory://out/shards")
    with pytest.raises(InputError, match="--first-id end"):
        extract("memory://out/shards")
    extract("memory://out/shards", resume=True)
    assert content(store) == whole
    store.rm("/out", recursive=True)
    threads = [
        threading.Thread(target=extract, args=("memory://out/shards",), kwargs={"share": (k, 3)}) for k in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(store) == whole
    extract("memory://out/shards", first_id="end")
    assert torch.equal(stored_labels("memory://out/shards", None, 2 * N), LABELS.repeat(2))


def test_other_things_in_a_store_and_stores_that_take_nothing_are_refused(store, server):
    store.pipe_file("/out/notes.txt", b"mine")
    with pytest.raises(InputError, match=r"holds 'notes\.txt'"):
        extract("memory://out")
    with pytest.raises(InputError, match="URL of a file"):
        extract("memory://out/a.safetensors")
    with pytest.raises(StoreError):
        extract(server.url("new/"))


# ------------------------------------------------------------------ nonsense


def _header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def _tensor(**changes: object) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}
    return _header(json.dumps({"x": entry}).encode(), bytes(24))


def _npy(dtype: str, length: int, data: bytes = b"") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({length},)}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.encode() + data


NONSENSE = {
    "empty.npy": (b"", "cannot be read as .npy"),
    "short.npy": (npy(VALUES.numpy())[:-1], "expected at least"),
    "text.npy": (b"hello" * 99, "cannot be read as .npy"),
    "object.npy": (_npy("|O", 1, bytes(8)), "type object"),
    "huge.npy": (_npy("<f4", 10**16), "expected at least"),
    "long.safetensors": (struct.pack("<Q", 2**60) + b"{}", "a header of 1152921504606846976 bytes"),
    "empty.safetensors": (b"", "a header of 0 bytes"),
    "list.safetensors": (_header(b"[]"), "is a list"),
    "json.safetensors": (_header(b"{"), "no JSON"),
    "twice.safetensors": (_header(b'{"x":1,"x":2}'), "each key once"),
    "none.safetensors": (_header(b"{}"), "none at all"),
    "entry.safetensors": (_header(b'{"x":5}'), "expected a type, shape and place"),
    "negative.safetensors": (_tensor(shape=[-2, 3]), "expected a type, shape and place"),
    "outside.safetensors": (_tensor(data_offsets=[0, 2**40], shape=[2**38]), "expected a type, shape and place"),
    "sizes.safetensors": (_tensor(shape=[3, 3]), "has 24 bytes"),
    "dtype.safetensors": (_tensor(dtype="C64"), "type C64"),
    "a.h5": (b"x", "is not read by URL"),
    "folder/x.txt": (b"x", "no such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_by_name(name, store):
    content, message = NONSENSE[name]
    store.pipe_file(f"/bad/{name}", content)
    with pytest.raises(InputError, match=message):
        open_features(f"memory://bad/{name.removesuffix('/x.txt')}")


def test_an_order_of_fortran_and_a_key_of_a_single_array_are_refused(url):
    with pytest.raises(FeatureError, match="Fortran"):
        open_features(url("fortran.npy"))
    with pytest.raises(FeatureError, match="a single array"):
        open_features(url("a.npy"), key="x")
    with pytest.raises(FeatureError, match="it holds 'features', 'labels'"):
        open_features(url("a.safetensors"), key="x")


def test_missing_and_damaged_shards_are_named(folder, tmp_path):
    served = tmp_path / "served"
    served.mkdir()
    for path in (folder / "shards").iterdir():
        (served / path.name).write_bytes(path.read_bytes())
    with serving(tmp_path) as server:
        source = open_features(server.url("served"))
        damaged = served / shard_name(40, 40)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        with pytest.raises(ShardError, match="have checksum"):
            source.read(torch.tensor([79]))
        damaged.unlink()
        with pytest.raises(ShardError, match=f"{shard_name(40, 40)}: is missing"):
            open_features(server.url("served"))
        (served / INDEX_NAME).write_text("{}")
        with pytest.raises(ShardError, match="no index of shards"):
            open_features(server.url("served"))


def test_an_index_of_any_size_is_not_read_on_its_word(store):
    store.pipe_file(f"/bad/shards/{INDEX_NAME}", bytes(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("krnet.features.shards.source.MAX_INDEX_BYTES", 5)
        with pytest.raises(ShardError, match="has 10 bytes; expected at most 5"):
            open_features("memory://bad/shards")


def test_bytes_of_safetensors_are_those_of_the_package(store):
    store.pipe_file("/x.safetensors", save({"a": VALUES.half(), "b": LABELS}))
    assert torch.equal(open_features("memory://x.safetensors", key="a").read(torch.arange(N)), VALUES.half())
