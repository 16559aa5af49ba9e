"""Rows of a tensor in a file behind a URL: whole blocks are fetched, and checked each time.

    RemoteRows(archive, name): read(start, stop), take(ids)

Blocks that lie beside each other come in one request, and requests go out side by side: over a network, a request takes
as long as a megabyte. Nothing is kept: what is used often should be copied to a disk first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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


@dataclass(eq=False)
class RemoteRows:
    """A tensor behind a URL. Its bytes are not kept."""

    archive: Archive
    name: str

    def __post_init__(self) -> None:
        self.dtype, self.shape = self.archive.spec(self.name)
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self._block_bytes = self.archive.block_bytes(self.name)
        self._end = self._row_bytes * self.shape[0]

    def read(self, start: int, stop: int) -> Tensor:
        return self.take(torch.arange(start, stop))

    def take(self, ids: Tensor) -> Tensor:
        found = torch.empty((len(ids), *self.shape[1:]), dtype=self.dtype, device="cpu")
        if not found.numel():
            return found
        rows = found.reshape(len(ids), -1).view(torch.uint8).numpy()  # (B, row_bytes)
        order = np.argsort(ids.numpy(), kind="stable")
        rising = ids.numpy()[order]
        for spans in self._batches(self._spans(rising)):
            for span, content in zip(spans, self._fetch(spans), strict=True):
                chosen = slice(span.start, span.stop)
                self._copy(rows, order[chosen], rising[chosen], content, span.first_block * self._block_bytes)
        return found

    def _spans(self, rising: np.ndarray) -> Iterator[Span]:
        """The blocks that hold these rows, cut where a block between is not needed, or a request grows too large."""
        firsts = rising * self._row_bytes // self._block_bytes
        lasts = ((rising + 1) * self._row_bytes - 1) // self._block_bytes
        most = max(1, REQUEST_BYTES // self._block_bytes)
        start = 0
        for index in range(1, len(rising) + 1):
            if index < len(rising) and firsts[index] <= lasts[index - 1] + 1 and lasts[index] - firsts[start] < most:
                continue
            yield Span(int(firsts[start]), int(lasts[index - 1]), start, index)
            start = index

    def _batches(self, spans: Iterator[Span]) -> Iterator[list[Span]]:
        batch, size = list[Span](), 0
        for span in spans:
            own = (span.last_block - span.first_block + 1) * self._block_bytes
            if batch and size + own > FETCH_BYTES:
                yield batch
                batch, size = [], 0
            batch, size = [*batch, span], size + own
        yield batch

    def _fetch(self, spans: list[Span]) -> list[bytes]:
        """The bytes of the blocks of each span, checked."""
        place, step = self.archive.place(self.name), self._block_bytes
        edges = [(s.first_block * step, min((s.last_block + 1) * step, self._end)) for s in spans]
        with self.archive.open() as file:
            assert isinstance(file, RemoteFile), f"{self.archive.path}: StoredRows reads files"
            contents = file.read_many([(place + begin, place + end) for begin, end in edges])
        for span, content in zip(spans, contents, strict=True):
            for block in range(span.first_block, span.last_block + 1):
                begin = (block - span.first_block) * step
                self.archive.check_digest(self.name, block, digest(memoryview(content)[begin : begin + step]))
        return contents

    def _copy(self, rows: np.ndarray, places: np.ndarray, ids: np.ndarray, content: bytes, begin: int) -> None:
        """rows[places[i]] = row ids[i]; content are the bytes of the tensor from `begin` on"""
        size, values = self._row_bytes, np.frombuffer(content, np.uint8)
        if begin % size == 0:
            whole = values[: len(values) // size * size].reshape(-1, size)
            rows[places] = whole[ids - begin // size]
            return
        for row, offset in zip(places.tolist(), (ids * size - begin).tolist(), strict=True):
            rows[row] = values[offset : offset + size]
