"""A folder of shards that is being written: what is finished, and the index that is made of it.

    DIR/ -> finished -> entries of the shards that are there
    DIR/ -> merge -> DIR/index.json

Writers do not talk to each other. Each merges the index when it has written its shards: since shards appear whole, the
last one to do so finds all of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from krnet.errors import InputError, ShardError
from krnet.features.shards.index import INDEX_NAME, Index, make_index, parse_index
from krnet.features.shards.shard import REPAIR, Entry, Origin, open_shard, range_of
from krnet.io.atomic import TEMPORARY_END, atomic_write
from krnet.io.writable import check_writable


@dataclass(frozen=True)
class Finished:
    """The shards of a folder."""

    origin: Origin | None
    """None if there are no shards yet."""
    runs: frozenset[tuple[int, int | None]]
    shards: tuple[Entry, ...]


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, or that holds anything but shards: nothing of ours belongs there."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise InputError(f"{nearest}: is no folder; expected a folder for shards, or one to make it in. Choose another")
    check_writable(nearest / INDEX_NAME)
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if name != INDEX_NAME and range_of(name) is None and not name.endswith(TEMPORARY_END):
            raise InputError(
                f"{folder}: holds {name!r}, which is no shard of features; expected a new or empty folder, or one of "
                f"krnet.extract. Choose another folder"
            )


def finished(folder: Path) -> Finished:
    """What the shards in a folder say. Those that the index lists, and that are older than it, are not opened again."""
    index, written_ns = _known(folder)
    listed = {} if index is None else {entry.name: entry for entry in index.shards}
    origin, runs = (None, set()) if index is None else (index.origin, set(index.runs))
    found = []
    for name in names(folder):
        path, entry = folder / name, listed.get(name)
        state = path.stat()
        if entry is None or (state.st_size, state.st_mtime_ns > written_ns) != (entry.size_bytes, False):
            shard = open_shard(path)
            entry = shard.entry
            origin = shard.origin if origin is None else origin
            runs.add(shard.run)
            if shard.origin != origin:
                raise ShardError(f"{path}: {difference(origin, shard.origin)} {REPAIR}")
        found.append(entry)
    return Finished(origin, frozenset(runs), tuple(found))


def difference(before: Origin, now: Origin) -> str:
    """In what two origins differ."""
    fields = [
        {"shape": list(o.shape), "dtype": o.dtype, "labels": o.has_labels, **o.made_by} for o in (before, now)
    ]  # fmt: skip
    for name in sorted({*fields[0], *fields[1]}):
        if fields[0].get(name) != fields[1].get(name):
            return f"{name} is {fields[1].get(name)}; the others have {fields[0].get(name)}."
    return ""


def merge(folder: Path) -> Index | None:
    """Write the index of all shards that are there; None if there are none.

    Another writer may finish a shard, and write an index of its own, meanwhile. So the folder is looked at again
    afterwards: whoever writes last writes what is there.
    """
    while (found := finished(folder)).origin is not None and found.shards:
        index = make_index(folder, found.origin, found.runs, found.shards)
        with atomic_write(folder / INDEX_NAME) as file:
            file.write(index.to_json().encode())
        if names(folder) == [entry.name for entry in index.shards]:
            return index
    return None


def names(folder: Path) -> list[str]:
    """The files that are called as shards are."""
    return sorted(name for name in os.listdir(folder) if range_of(name) is not None) if folder.is_dir() else []


def _known(folder: Path) -> tuple[Index | None, int]:
    """The index that is there, and when it was written."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None, 0
    return parse_index(path, path.read_bytes()), path.stat().st_mtime_ns
