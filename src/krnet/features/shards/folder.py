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
from krnet.features.shards.index import INDEX_NAME, MAX_INDEX_BYTES, Index, make_index, parse_index
from krnet.features.shards.shard import REPAIR, Entry, Origin, open_shard, range_of
from krnet.io.atomic import TEMPORARY_END
from krnet.io.folders import list_folder
from krnet.io.output import output
from krnet.io.places import Place
from krnet.io.ranged import open_ranged
from krnet.io.writable import check_writable


@dataclass(frozen=True)
class Finished:
    """The shards of a folder."""

    origin: Origin | None
    """None if there are no shards yet."""
    runs: frozenset[tuple[int, int | None]]
    shards: tuple[Entry, ...]


def check_folder(folder: Place) -> None:
    """Refuse a folder that cannot be written to, or that holds anything but shards: nothing of ours belongs there."""
    if isinstance(folder, Path):
        nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
        if not nearest.is_dir():
            raise InputError(
                f"{nearest}: is no folder; expected a folder for shards, or one to make it in. Choose another"
            )
        check_writable(nearest / INDEX_NAME)
    for name in list_folder(folder):
        if name not in ("", INDEX_NAME) and range_of(name) is None and not name.endswith(TEMPORARY_END):
            raise InputError(
                f"{folder}: holds {name!r}, which is no shard of features; expected a new or empty folder, or one of "
                f"krnet.extract. Choose another folder"
            )


def finished(folder: Place) -> Finished:
    """What the shards in a folder say. Those that the index lists, and that are older than it, are not opened again."""
    there = list_folder(folder)
    index = _known(folder) if INDEX_NAME in there else None
    listed = {} if index is None else {entry.name: entry for entry in index.shards}
    origin, runs = (None, set()) if index is None else (index.origin, set(index.runs))
    entries = []
    for name, found in there.items():
        if range_of(name) is None:
            continue
        entry = listed.get(name)
        if entry is None or found.size != entry.size_bytes or found.written_ns > there[INDEX_NAME].written_ns:
            shard = open_shard(folder / name)
            entry = shard.entry
            origin = shard.origin if origin is None else origin
            runs.add(shard.run)
            if shard.origin != origin:
                raise ShardError(f"{folder / name}: {difference(origin, shard.origin)} {REPAIR}")
        entries.append(entry)
    return Finished(origin, frozenset(runs), tuple(entries))


def difference(before: Origin, now: Origin) -> str:
    """In what two origins differ."""
    fields = [
        {"shape": list(o.shape), "dtype": o.dtype, "labels": o.has_labels, **o.made_by} for o in (before, now)
    ]  # fmt: skip
    for name in sorted({*fields[0], *fields[1]}):
        if fields[0].get(name) != fields[1].get(name):
            return f"has {name} {fields[1].get(name)}; the other shards have {name} {fields[0].get(name)}."
    return ""


def merge(folder: Place) -> Index | None:
    """Write the index of all shards that are there; None if there are none.

    Another writer may finish a shard, and write an index of its own, meanwhile. So the folder is looked at again
    afterwards: whoever writes last writes what is there.
    """
    while (found := finished(folder)).origin is not None and found.shards:
        index = make_index(folder, found.origin, found.runs, found.shards)
        with output(folder / INDEX_NAME) as file:
            file.write(index.to_json().encode())
        if [name for name in list_folder(folder) if range_of(name)] == [entry.name for entry in index.shards]:
            return index
    return None


def _known(folder: Place) -> Index:
    """The index that is there."""
    path = folder / INDEX_NAME
    with open_ranged(path) as file:
        return parse_index(path, file.read(0, min(file.size, MAX_INDEX_BYTES + 1)))
