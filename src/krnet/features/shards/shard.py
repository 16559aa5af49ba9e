"""One shard: the features and labels of a range of samples, in a safetensors file with checksums.

    write_shard(folder, first, features (n, *shape), labels (n,) or None, run, made_by) -> its file
    open_shard(path) -> Shard: what its header says, rows(ids), labels()

The file is an archive as a recording is (krnet.io.archive): it appears whole or not at all, its header is checked
before it is believed, and a block of rows is checked when it is first read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from krnet.device import dtype_name
from krnet.errors import RecordingError, ShardError
from krnet.features.shards.ranges import Range
from krnet.io import archive
from krnet.io.header import RESTORE
from krnet.io.places import Place
from krnet.io.remote_rows import RemoteRows
from krnet.io.stored_rows import StoredRows, block_rows

KIND = "features"
REPAIR = "Restore it from a copy; or remove it and extract with --resume, which makes what is missing"
NAME = re.compile(r"shard-(\d{12})-(\d{12})\.safetensors")
MAX_SAMPLES = 10**12  # what a name has digits for


def shard_name(first: int, num_samples: int) -> str:
    """shard-FIRST-LAST.safetensors, with the IDs of its first and last sample."""
    return f"shard-{first:012d}-{first + num_samples - 1:012d}.safetensors"


def range_of(name: str) -> Range | None:
    """The samples of a shard, by its name; None if it is no name of a shard."""
    found = NAME.fullmatch(name)
    start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
    return (start, stop) if start < stop else None


@dataclass(frozen=True)
class Entry:
    """What an index says of a shard."""

    first: int
    """ID of its first sample."""
    num_samples: int
    size_bytes: int
    """Size of its file."""
    checksum: str
    """Checksum of its header, which holds the checksums of all its values."""

    @property
    def range(self) -> Range:
        return self.first, self.first + self.num_samples

    @property
    def name(self) -> str:
        return shard_name(self.first, self.num_samples)


@dataclass(frozen=True)
class Origin:
    """What the shards of a folder have in common."""

    shape: tuple[int, ...]
    """Shape of one sample."""
    dtype: str
    has_labels: bool
    made_by: Mapping[str, Any]
    """What made them: the trunk, and how the images were scaled."""


@dataclass(frozen=True)
class Shard:
    entry: Entry
    origin: Origin
    run: tuple[int, int | None]
    """The call that made it: ID of its first sample, and number of samples; None where that was not known yet."""
    path: Place
    features: StoredRows | RemoteRows
    kept: archive.Archive

    def rows(self, ids: Tensor) -> Tensor:
        """Features (B, *shape) of samples `ids` (B,)."""
        with named_errors():
            return self.features.take(ids - self.entry.first)

    def fill(self, out: Tensor, ids: Tensor) -> None:
        """The same, straight to out (B, *shape), which is contiguous."""
        with named_errors():
            self.features.fill(out, ids - self.entry.first)

    def labels(self) -> Tensor:
        """(n,) int64"""
        with named_errors():
            return self.kept.tensor("labels")


@contextmanager
def named_errors() -> Iterator[None]:
    """Defects of a shard are named as such, with what can be done about them."""
    try:
        yield
    except RecordingError as error:
        found = str(error).replace(RESTORE, REPAIR)
        raise ShardError(found if REPAIR in found else f"{found}. {REPAIR}") from error


def write_shard(
    folder: Place,
    first: int,
    features: Tensor,
    labels: Tensor | None,
    run: tuple[int, int | None],
    made_by: Mapping[str, Any],
) -> Entry:
    """Write a shard whose first sample has the ID `first`."""
    num_samples, row_bytes = len(features), features[0].numel() * features.element_size()
    path = folder / shard_name(first, num_samples)
    metadata = {"kind": KIND, "first": first, "run": list(run), "made_by": dict(made_by)}
    tensors = {"features": features} if labels is None else {"features": features, "labels": labels}
    block = {"features": block_rows(num_samples, row_bytes) * row_bytes}
    size_bytes = archive.write(path, tensors, metadata, blocks=block)
    return Entry(first, num_samples, size_bytes, archive.open_archive(path).checksum)


def open_shard(path: Place) -> Shard:
    """Read the header of a shard; refuse a file that is none."""
    with named_errors():
        kept = archive.open_archive(path)
        kind, first, run, made_by = (kept.metadata.get(name) for name in ("kind", "first", "run", "made_by"))
        if kind != KIND or "features" not in kept.names:
            raise ShardError(f"{path}: holds a {kind!r:.40}; expected a shard of features. {REPAIR}")
        dtype, full_shape = kept.spec("features")
        if not full_shape or 0 in full_shape or not is_run(run) or not isinstance(made_by, dict):
            raise ShardError(
                f"{path}: features {list(full_shape)!r:.99}, run {run!r:.99}, made by {type(made_by).__name__}; "
                f"expected at least one sample, [first, number] and an object. {REPAIR}"
            )
        num_samples, has_labels = full_shape[0], "labels" in kept.names
        if not is_id(first) or range_of(path.name) != (first, first + num_samples):
            raise ShardError(
                f"{path}: holds {num_samples} samples from {first!r:.99} on, other than its name says. {REPAIR}"
            )
        if has_labels and kept.spec("labels") != (torch.int64, (num_samples,)):
            raise ShardError(f"{path}: labels {kept.spec('labels')}; expected {num_samples} of int64. {REPAIR}")
        entry = Entry(first, num_samples, kept.nbytes, kept.checksum)
        origin = Origin(full_shape[1:], dtype_name(dtype), has_labels, made_by)
        return Shard(entry, origin, (run[0], run[1]), path, kept.stored_rows("features"), kept)


def is_run(value: Any) -> TypeGuard[list[Any]]:
    """Whether a value is [ID of the first sample, number of samples or None]."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    first, number = value
    return is_id(first) and (number is None or (is_id(number) and number > 0))


def is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SAMPLES
