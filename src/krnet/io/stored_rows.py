"""Tensors larger than memory, in a recording file: written and read a few rows at a time.

    MadeRows(shape, dtype, read)  --archive.write-->  a tensor in blocks, each with its checksum
    archive.rows(name) -> TensorRows if it is small, else StoredRows: read(start, stop), take(ids)

A block is checked when a row of it is first read, and again if the file has changed since.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from krnet import errors
from krnet.io.header import refuse
from krnet.io.ranged import LocalFile
from krnet.io.rows import RowReader, read_into

if TYPE_CHECKING:
    from krnet.io.archive import Archive

BLOCK_BYTES = 256 << 10  # has a checksum of its own; one sample reads, and checks, at least this much
MAX_BLOCKS = 1 << 19  # each takes 37 bytes of the header, which has at most 64 MB
RESIDENT_BYTES = 16 << 20  # smaller tensors are read whole, at once


class Rows(Protocol):
    """A tensor that is read in parts along dimension 0."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Rows start:stop."""

    def take(self, ids: Tensor) -> Tensor:
        """Rows `ids` (B,) in their order, with repeats."""


def block_rows(num_rows: int, row_bytes: int) -> int:
    """Number of rows in a block."""
    return max(1, BLOCK_BYTES // max(1, row_bytes), -(-num_rows // MAX_BLOCKS))


def block_header_bytes(num_rows: int, row_bytes: int) -> int:
    """Upper bound of the header's bytes for the checksums of the blocks."""
    return 64 + 37 * -(-num_rows // block_rows(num_rows, row_bytes))


def runs(ids: Tensor) -> Iterator[tuple[int, int, int]]:
    """(place, first, length) of each run of neighbours in ids (B,)."""
    values = ids.numpy()
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 2) != 1).tolist()
    for start, stop in zip(starts, [*starts[1:], len(values)]):
        yield start, int(values[start]), stop - start


@dataclass(frozen=True, eq=False)
class TensorRows:
    """A tensor in memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]

    def take(self, ids: Tensor) -> Tensor:
        return self.tensor[ids]


@dataclass(frozen=True, eq=False)
class MadeRows:
    """A tensor whose rows `read` makes when they are needed. Where a tensor is to be written, this may stand for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int | None:
        """Bytes of a block; None: small enough for a single one."""
        return None if self.nbytes <= RESIDENT_BYTES else block_rows(self.shape[0], self.row_bytes) * self.row_bytes

    def take(self, ids: Tensor) -> Tensor:
        found = torch.empty((len(ids), *self.shape[1:]), dtype=self.dtype)
        for place, first, length in runs(ids):
            found[place : place + length] = self.read(first, first + length)
        return found


@dataclass(eq=False)
class StoredRows:
    """A tensor in a file. Its bytes are not kept."""

    archive: Archive
    name: str
    _state: tuple[int, ...] = ()
    """Of the file when the blocks were checked: device, inode, size, time of the last change."""
    _checked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.dtype, self.shape = self.archive.spec(self.name)
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        found = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype, device="cpu")
        with self._open() as file:
            self._check(file, np.array([start * self._row_bytes]), np.array([stop * self._row_bytes]))
            target = found.reshape(-1).view(torch.uint8).numpy().data
            read_into(file.fd, target, self._begin + start * self._row_bytes, self._ended)
        return found

    def take(self, ids: Tensor) -> Tensor:
        found = torch.empty((len(ids), *self.shape[1:]), dtype=self.dtype, device="cpu")
        self.fill(found, ids)
        return found

    def fill(self, out: Tensor, ids: Tensor) -> None:
        """Write row ids[i] to out[i]; out (B, *row shape) is contiguous."""
        if not out.numel():
            return
        rows = ids.numpy()
        with self._open() as file:
            self._check(file, rows * self._row_bytes, (rows + 1) * self._row_bytes)
            reader = RowReader(file.fd, self._begin, self._row_bytes, self._ended)
            reader.fill(out.reshape(len(ids), -1).view(torch.uint8).numpy(), rows)

    @property
    def _begin(self) -> int:
        return self.archive.place(self.name)

    def _open(self) -> LocalFile:
        file = self.archive.open()
        assert isinstance(file, LocalFile), f"{self.archive.path}: RemoteRows reads what is behind a URL"
        return file

    def _check(self, file: LocalFile, begins: np.ndarray, ends: np.ndarray) -> None:
        """Check the blocks that hold the bytes begins[i]:ends[i] of the tensor, unless they have been checked."""
        if (state := file.state) != self._state:
            self._checked, self._state = set(), state
        step = self.archive.block_bytes(self.name)
        firsts, lasts = begins // step, np.maximum(ends - 1, begins) // step
        needed = set[int]()
        for first, last in zip(*np.unique(np.stack([firsts, lasts]), axis=1).tolist(), strict=True):
            needed.update(range(first, last + 1))
        for block in sorted(needed - self._checked):
            self.archive.check_block(file, self.name, block)
            self._checked.add(block)

    def _ended(self) -> errors.RecordingError:
        return refuse(
            errors.TruncatedRecordingError, self.archive.path, f"the file now ends inside tensor {self.name!r}",
            f"the {self.archive.nbytes} bytes that it had when it was opened",
        )  # fmt: skip
