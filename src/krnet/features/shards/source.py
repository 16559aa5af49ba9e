"""A folder of shards as features that are read by sample ID.

    DIR/ or URL -> open_shards -> ShardSource: read(ids (B,)) -> (B, *shape), or labels (B,)

Nothing but the index is kept in memory, and a few headers: shards are opened when a sample of theirs is read. The
values are checked when they are first read, and again if the file has changed since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from krnet.errors import FeatureError, ShardError
from krnet.features.feature_source import FeatureSource
from krnet.features.shards.index import INDEX_NAME, MAX_INDEX_BYTES, Index, parse_index
from krnet.features.shards.shard import REPAIR, Entry, Shard, open_shard
from krnet.io.folders import sizes_of
from krnet.io.places import Place, Url
from krnet.io.ranged import open_ranged

MAX_OPEN = 512  # headers kept in memory: about 100 kB each with the default size of a shard
KEYS = ("features", "labels")


class ShardSource(FeatureSource):
    """The features, or the labels, of a folder of shards."""

    def __init__(self, folder: Place, index: Index, key: str):
        num_samples = index.check_complete(folder)
        self.index, self.folder, self.key = index, folder, key
        self._firsts = np.array([entry.first for entry in index.shards])
        self._shards = OpenShards(folder, index)
        self._shards[0]  # its header is that of a real file: no shape is believed on the word of the index
        of_labels = key == "labels"
        shape, dtype = ((), "int64") if of_labels else (index.origin.shape, index.origin.dtype)
        super().__init__(str(folder), (num_samples, *shape), dtype, self._labels if of_labels else self._features)

    @property
    def files(self) -> list[Path]:
        return [] if isinstance(self.folder, Url) else [self.folder]

    def _features(self, out: torch.Tensor, ids: torch.Tensor) -> None:
        for shard, rows in self._parts(ids):
            if isinstance(rows, slice):
                shard.fill(out[rows], ids[rows])
            else:
                out[rows] = shard.rows(ids[rows])

    def _labels(self, out: torch.Tensor, ids: torch.Tensor) -> None:
        for shard, rows in self._parts(ids):
            out[rows] = shard.labels()[ids[rows] - shard.entry.first]

    def _parts(self, ids: torch.Tensor) -> Iterator[tuple[Shard, slice | torch.Tensor]]:
        """Each shard that holds some of the samples, and where these are in `ids`."""
        numbers = np.searchsorted(self._firsts, ids.numpy(), side="right") - 1
        if (numbers == numbers[0]).all():
            yield self._shards[int(numbers[0])], slice(None)
            return
        order = np.argsort(numbers, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            is_run = rows[-1] - rows[0] + 1 == len(rows)  # sorted: a slice copies straight to its place
            where = slice(int(rows[0]), int(rows[-1]) + 1) if is_run else torch.from_numpy(rows)
            yield self._shards[int(numbers[rows[0]])], where


class OpenShards:
    """The shards of an index by their number; the headers of those that were used last are kept."""

    def __init__(self, folder: Place, index: Index):
        self.folder, self.index = folder, index
        self._kept: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()  # fits read in several threads

    def __getitem__(self, number: int) -> Shard:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        shard = self._open(self.index.shards[number])
        with self._lock:
            self._kept[number] = shard
            while len(self._kept) > MAX_OPEN:
                self._kept.popitem(last=False)
        return shard

    def _open(self, entry: Entry) -> Shard:
        path = self.folder / entry.name
        check_inside(path)
        shard = open_shard(path)
        if shard.entry != entry or shard.origin != self.index.origin:
            raise ShardError(
                f"{path}: is another file than {INDEX_NAME} lists: {shard.entry.size_bytes} bytes, checksum "
                f"{shard.entry.checksum}, {shard.origin.dtype} {shard.origin.shape}. {REPAIR}"
            )
        return shard


def check_inside(path: Place) -> None:
    """Refuse a link that leads out of its folder."""
    if isinstance(path, Path) and path.is_symlink() and path.resolve().parent != path.parent.resolve():
        raise ShardError(f"{path}: is a link to {path.resolve()}; expected a file. Copy it here, or open that folder")


def read_index(folder: Place) -> Index:
    """The index of a folder; all of its shards are there, in the sizes that it says."""
    path = folder / INDEX_NAME
    check_inside(path)
    index = parse_index(path, _read(path))
    found = sizes_of(folder, [entry.name for entry in index.shards])
    for entry, size in zip(index.shards, found, strict=True):
        if size != entry.size_bytes:
            what = "is missing" if size is None else f"has {size} bytes"
            raise ShardError(
                f"{folder / entry.name}: {what}; expected {entry.size_bytes} bytes, as {path} says. {REPAIR}"
            )
    return index


def _read(path: Place) -> bytes:
    """The bytes of an index."""
    expected = "expected the index of shards that krnet.extract writes. Check the path"
    if isinstance(path, Path) and not path.is_file():
        raise FeatureError(f"{path.parent}: is a folder without {path.name}; {expected}")
    with open_ranged(path) as file:
        if file.size > MAX_INDEX_BYTES:
            raise ShardError(f"{path}: has {file.size} bytes; expected at most {MAX_INDEX_BYTES}. Check the path")
        return file.read(0, file.size)


def shard_names(folder: Place) -> list[str]:
    """The arrays in a folder of shards."""
    return list(KEYS if read_index(folder).origin.has_labels else KEYS[:1])


def open_shards(folder: Place, key: str | None) -> FeatureSource:
    """Open a folder of shards; `key` is features, by default, or labels."""
    index = read_index(folder)
    names = KEYS if index.origin.has_labels else KEYS[:1]
    if key is not None and key not in names:
        raise FeatureError(
            f"{folder}: no array called {key!r}; it holds {', '.join(map(repr, names))}. Name one of them with --key "
            f"(in Python, key=)."
        )
    return ShardSource(folder, index, key or KEYS[0])
