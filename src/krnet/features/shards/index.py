"""The index of a folder of shards: index.json.

    Index(origin, runs, shards) -> to_json -> text -> parse_index -> the same, or the error that says what is wrong

The index says nothing that the shards do not: it is merged from their headers (folder.py), and saves a reader from
opening all of them. Names of shards follow from their IDs, so no index can name another file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from krnet.errors import OversizedRecordingError, RecordingError, ShardError
from krnet.features.dtypes import DTYPES
from krnet.features.shards.ranges import Range, missing, text
from krnet.features.shards.shard import Entry, Origin, is_id, is_run
from krnet.io.header import MAX_DIMS, NO_DIGEST, parse_json
from krnet.io.memory import MemoryLimit

INDEX_NAME = "index.json"
FORMAT, VERSION = "krnet-shards", 1
MAX_INDEX_BYTES = 256 << 20
REBUILD = "Remove it: krnet extract with --resume makes it anew from the shards"


@dataclass(frozen=True)
class Index:
    origin: Origin
    runs: tuple[tuple[int, int | None], ...]
    """Of each call that made shards: ID of its first sample, number of samples; None while that is unknown."""
    shards: tuple[Entry, ...]
    """In the order of their IDs, without overlap."""

    @property
    def num_samples(self) -> int | None:
        """Samples that there are when all calls have finished."""
        ends = [None if number is None else first + number for first, number in self.runs]
        return None if None in ends else max(end for end in ends if end is not None)

    @property
    def missing(self) -> list[Range]:
        """Samples that no shard holds yet."""
        last = self.shards[-1].range[1]
        return missing(0, max(last, self.num_samples or 0), [shard.range for shard in self.shards])

    def check_complete(self, where: object) -> int:
        """The number of samples; refuse a folder that lacks some."""
        if self.num_samples is None or self.missing:
            found = "the end of its last run" if not self.missing else f"samples {text(self.missing)}"
            raise ShardError(
                f"{where}: {found} missing; expected shards of all samples. Wait for whoever writes them, or give the "
                f"call that was stopped again with --resume (in Python, resume=True)"
            )
        return self.num_samples

    def to_json(self) -> str:
        """A line for each shard."""
        head = {
            "format": FORMAT, "version": VERSION, "num_samples": self.num_samples, "shape": list(self.origin.shape),
            "dtype": self.origin.dtype, "labels": self.origin.has_labels, "made_by": dict(self.origin.made_by),
            "runs": [list(run) for run in self.runs],
        }  # fmt: skip
        lines = [
            json.dumps({"name": s.name, "first": s.first, "num_samples": s.num_samples, "bytes": s.size_bytes,
                        "checksum": s.checksum})
            for s in self.shards
        ]  # fmt: skip
        return json.dumps(head)[:-1] + ', "shards": [\n' + ",\n".join(lines) + "\n]}\n"


def make_index(where: object, origin: Origin, runs: Iterable[tuple[int, int | None]], shards: Iterable[Entry]) -> Index:
    """The index of these shards, sorted; refuse shards that share samples, and runs that contradict each other."""
    sizes: dict[int, int | None] = {}
    for first, number in runs:
        known = sizes.get(first)
        if known is not None and number is not None and known != number:
            raise ShardError(
                f"{where}: some shards say that the run from sample {first} on has {known} samples, others {number}. "
                f"Remove those of the one that should not be there"
            )
        sizes[first] = number if known is None else known
    found = sorted(shards, key=lambda shard: shard.range)
    for before, after in pairwise(found):
        if after.first < before.range[1]:
            raise ShardError(
                f"{where}: {before.name} and {after.name} share samples; expected each sample once. Remove one of them "
                f"and extract with --resume, which makes what is then missing"
            )
    return Index(origin, tuple(sorted(sizes.items())), tuple(found))


def parse_index(where: Any, content: bytes) -> Index:
    """The index in these bytes, checked; nothing is allocated on its word."""
    if len(content) > MAX_INDEX_BYTES:
        raise ShardError(f"{where}: has {len(content)} bytes; expected at most {MAX_INDEX_BYTES}. {REBUILD}")
    try:
        MemoryLimit(where, len(content)).check_header(content)
        table = parse_json(where, "the index", content)
    except OversizedRecordingError as error:
        raise ShardError(f"{where}: holds far more values than an index of its size has. {REBUILD}") from error
    except RecordingError as error:
        raise ShardError(f"{where}: no JSON with each key once. {REBUILD}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ShardError(f"{where}: is no index of shards of features; expected the format {FORMAT!r}. Check the path")
    version = table.get("version")
    if not is_id(version) or version > VERSION:
        raise ShardError(f"{where}: format version {version!r:.99}; expected at most {VERSION}. Upgrade krnet")
    match table:
        case {
            "shape": [*shape], "dtype": str(dtype), "labels": bool(has_labels), "made_by": dict(made_by),
            "runs": [_, *_] as runs, "shards": [_, *_] as rows, "num_samples": num_samples,
        } if (
            len(shape) < MAX_DIMS and all(is_id(size) and size for size in shape) and dtype in DTYPES
            and all(map(is_run, runs))
        ):  # fmt: skip
            origin = Origin(tuple(shape), dtype, has_labels, made_by)
        case _:
            raise _refuse(where, "a field is missing, or has a value that none has", {**table, "shards": "..."})
    row_bytes = prod(shape) * DTYPES[dtype].itemsize + 8 * has_labels
    shards = [_parse_entry(where, row, row_bytes) for row in rows]
    index = make_index(where, origin, [(first, number) for first, number in runs], shards)
    if index.shards != tuple(shards) or index.num_samples != num_samples:
        raise _refuse(where, "its shards are not in order, or not those of its runs", num_samples)
    return index


def _parse_entry(where: Any, row: Any, row_bytes: int) -> Entry:
    match row:
        case {"name": str(name), "first": first, "num_samples": number, "bytes": size, "checksum": str(checksum)} if (
            is_id(first) and is_id(number) and number > 0 and is_id(first + number) and isinstance(size, int)
            and not isinstance(size, bool) and number * row_bytes < size < 2**63 and len(checksum) == len(NO_DIGEST)
        ):  # fmt: skip
            entry = Entry(first, number, size, checksum)
            if name == entry.name:
                return entry
            raise _refuse(where, f"a shard is called {name!r:.99}; expected {entry.name}", row)
    raise _refuse(where, "an entry is no shard, or of fewer bytes than its samples take", row)


def _refuse(where: Any, found: str, value: Any) -> ShardError:
    return ShardError(f"{where}: {found}: {value!r:.300}. {REBUILD}")
