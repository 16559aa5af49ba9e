"""Rows of equal size in a file behind a URL: whole blocks are fetched, and checked each time where they have checksums.

    RemoteTable(file, place, ...): fill(rows, ids)
    RemoteRows(archive, name): read(start, stop), take(ids)

Blocks that lie beside each other come in one request, and requests go out side by side: over a network, a request takes
as long as a megabyte. Nothing is kept: what is used often should be copied to a disk first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from krnet.io.header import digest
from krnet.io.remote import RemoteFile

if TYPE_CHECKING:
    from krnet.io.archive import Archive

REQUEST_BYTES = 8 << 20  # at most, unless a single block is larger
FETCH_BYTES = 64 << 20  # of all requests that go out at a time


@dataclass(frozen=True)
class Span:
    """Neighbouring blocks, and which of the rows they hold."""

    first_block: int
    last_block: int
    start: int
    """Of the rows in rising order: start .. stop - 1."""
    stop: int


@dataclass(frozen=True, eq=False)
class RemoteTable:
    """Rows of equal size behind a URL."""

    file: RemoteFile
    place: int
    """Where row 0 begins."""
    row_bytes: int
    num_rows: int
    block_bytes: int
    """What is fetched at least."""
    check: Callable[[int, memoryview], None] | None = None
    """check(number, bytes) refuses a block of wrong bytes."""

    def fill(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Write row ids[i] to rows[i]; rows (B, row_bytes) uint8."""
        if not rows.size:
            return
        order = np.argsort(ids, kind="stable")
        rising = ids[order]
        for spans in self._batches(self._spans(rising)):
            for span, content in zip(spans, self._fetch(spans), strict=True):
                chosen = slice(span.start, span.stop)
                self._copy(rows, order[chosen], rising[chosen], content, span.first_block * self.block_bytes)

    def _spans(self, rising: np.ndarray) -> Iterator[Span]:
        """The blocks that hold these rows, cut where a block between is not needed, or a request grows too large."""
        firsts = rising * self.row_bytes // self.block_bytes
        lasts = ((rising + 1) * self.row_bytes - 1) // self.block_bytes
        most = max(1, REQUEST_BYTES // self.block_bytes)
        start = 0
        for index in range(1, len(rising) + 1):
            if index < len(rising) and firsts[index] <= lasts[index - 1] + 1 and lasts[index] - firsts[start] < most:
                continue
            yield Span(int(firsts[start]), int(lasts[index - 1]), start, index)
            start = index

    def _batches(self, spans: Iterator[Span]) -> Iterator[list[Span]]:
        batch, size = list[Span](), 0
        for span in spans:
            own = (span.last_block - span.first_block + 1) * self.block_bytes
            if batch and size + own > FETCH_BYTES:
                yield batch
                batch, size = [], 0
            batch, size = [*batch, span], size + own
        yield batch

    def _fetch(self, spans: list[Span]) -> list[bytes]:
        """The bytes of the blocks of each span, checked."""
        step, end = self.block_bytes, self.row_bytes * self.num_rows
        edges = [(s.first_block * step, min((s.last_block + 1) * step, end)) for s in spans]
        contents = self.file.read_many([(self.place + low, self.place + high) for low, high in edges])
        for span, content in zip(spans, contents, strict=True) if self.check is not None else []:
            for block in range(span.first_block, span.last_block + 1):
                begin = (block - span.first_block) * step
                assert self.check is not None
                self.check(block, memoryview(content)[begin : begin + step])
        return contents

    def _copy(self, rows: np.ndarray, places: np.ndarray, ids: np.ndarray, content: bytes, begin: int) -> None:
        """rows[places[i]] = row ids[i]; content are the bytes of the table from `begin` on"""
        size, values = self.row_bytes, np.frombuffer(content, np.uint8)
        if begin % size == 0:
            whole = values[: len(values) // size * size].reshape(-1, size)
            rows[places] = whole[ids - begin // size]
            return
        for row, offset in zip(places.tolist(), (ids * size - begin).tolist(), strict=True):
            rows[row] = values[offset : offset + size]


class RemoteRows:
    """A tensor of an archive behind a URL. Its bytes are not kept."""

    def __init__(self, archive: Archive, name: str):
        self.dtype, self.shape = archive.spec(name)
        file = archive.open()
        assert isinstance(file, RemoteFile), f"{archive.path}: StoredRows reads files"

        def check(block: int, content: memoryview) -> None:
            archive.check_digest(name, block, digest(content))

        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        place, block_bytes = archive.place(name), archive.block_bytes(name)
        self._table = RemoteTable(file, place, row_bytes, self.shape[0], block_bytes, check)

    def read(self, start: int, stop: int) -> Tensor:
        return self.take(torch.arange(start, stop))

    def take(self, ids: Tensor) -> Tensor:
        found = torch.empty((len(ids), *self.shape[1:]), dtype=self.dtype, device="cpu")
        self.fill(found, ids)
        return found

    def fill(self, out: Tensor, ids: Tensor) -> None:
        """Write row ids[i] to out[i]; out (B, *row shape) is contiguous."""
        if out.numel():
            self._table.fill(out.reshape(len(ids), -1).view(torch.uint8).numpy(), ids.numpy())
