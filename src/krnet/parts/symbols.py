"""The symbols of the samples of a part, as tensors of its file and back.

    model's replayer -> Coder
    symbols (n, ...) --Packer.add--> ... --tensors--> a part's file --SymbolReader.read(rows)--> symbols (B, ...)

With tables, rows are entropy-coded in blocks; each block is decoded on its own. Without, they are stored as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from krnet.coding.open_tables import OpenTables
from krnet.errors import NotARecordingError
from krnet.io.archive import RowStore
from krnet.io.cache import ByteCache
from krnet.io.header import RESTORE
from krnet.io.stored_rows import RESIDENT_BYTES, Rows
from krnet.recording import Recording

STREAM, LENGTHS, SYMBOLS = "stream", "lengths", "symbols"
BLOCK_ROWS = 16  # samples in a block, where the model's settings name no size
LENGTH_TYPES = (torch.uint16, torch.uint32)


class Coder:
    """A model's replayer, and how the symbols that it gives are stored."""

    def __init__(self, recording: Recording):
        self.replayer, self.shape, self.device = recording.load(), recording.shape, recording.device
        tables = self.replayer.tables
        self.tables = None if tables is None else OpenTables.of(tables)
        self.block_size: int = recording.settings.get("block_size", BLOCK_ROWS)

    @cached_property
    def _example(self) -> Tensor:
        """Symbols of one sample: those of all others have their type and shape."""
        if self.tables is not None:
            return torch.empty(1, len(self.tables.tables.column), dtype=torch.int32)
        return self.replayer.code(torch.zeros(1, *self.shape, device=self.device)).symbols

    @property
    def symbol_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self._example.shape[1:])

    @property
    def symbol_dtype(self) -> torch.dtype:
        return self._example.dtype


class Packer:
    """Collects the symbols of one part."""

    def __init__(self, coder: Coder):
        self.tables, self.block_size = coder.tables, coder.block_size
        self._stream, self._lengths = bytearray(), list[int]()
        self._rows = list[Tensor]()

    def add(self, symbols: Tensor) -> None:
        """Take up more rows, on the CPU. Of all calls, only the last may end within a block."""
        if self.tables is None:
            self._rows.append(symbols)
            return
        for block in self.tables.encode(symbols.numpy(), self.block_size):
            self._lengths.append(len(block))
            self._stream.extend(block)

    def tensors(self) -> dict[str, Tensor]:
        if self.tables is None:
            return {SYMBOLS: torch.cat(self._rows)}
        dtype = np.uint16 if max(self._lengths) < 2**16 else np.uint32
        stream = np.frombuffer(self._stream, np.uint8)  # of a bytearray: torch can share it
        return {STREAM: torch.from_numpy(stream), LENGTHS: torch.from_numpy(np.array(self._lengths, dtype))}


class SymbolReader:
    """Reads symbols by their place in a part."""

    def __init__(self, store: RowStore, num_rows: int, coder: Coder):
        self.tables, self.num_rows, self.block_size = coder.tables, num_rows, coder.block_size
        self.row_shape = coder.symbol_shape
        self._rows: Rows
        if coder.tables is None:
            self._rows = store.rows(SYMBOLS, shape=(num_rows, *self.row_shape), dtype=coder.symbol_dtype)
            return
        self._rows = store.rows(STREAM, dtype=torch.uint8)
        lengths = store.tensor(LENGTHS, shape=(-(-num_rows // self.block_size),))
        if len(self._rows.shape) != 1 or lengths.dtype not in LENGTH_TYPES:
            raise NotARecordingError(f"a stream of shape {self._rows.shape}, lengths of {lengths.dtype}. {RESTORE}")
        self._ends = np.cumsum(lengths.numpy().astype(np.int64))  # (blocks,)
        if self._ends[-1] != self._rows.shape[0]:
            raise NotARecordingError(
                f"blocks of {self._ends[-1]} bytes in all; expected {self._rows.shape[0]}, as the stream has. {RESTORE}"
            )

    @property
    def nbytes(self) -> int:
        """Memory that this takes while it is open."""
        stored = int(np.prod(self._rows.shape)) * self._rows.dtype.itemsize
        return (stored if stored <= RESIDENT_BYTES else 0) + (0 if self.tables is None else self._ends.nbytes)

    def read(self, rows: np.ndarray, cache: ByteCache, key: object) -> Tensor:
        """rows (B,) -> symbols (B, ...). Decoded blocks are kept in the cache under (key, block)."""
        if self.tables is None:
            return self._rows.take(torch.from_numpy(rows))
        found = np.empty((len(rows), *self.row_shape), np.int32)
        for block, places in _by_block(rows // self.block_size):
            decoded = cache.get((key, block), lambda block=block: self._decode(block))  # type: ignore[misc]
            found[places] = decoded[rows[places] % self.block_size]
        return torch.from_numpy(found)

    def _decode(self, block: int) -> np.ndarray:
        """Symbols of one block, in the smallest type that holds them all."""
        assert self.tables is not None, "no blocks without tables"
        begin, end = (int(self._ends[block - 1]) if block else 0), int(self._ends[block])
        num_rows = min(self.block_size, self.num_rows - block * self.block_size)
        symbols = self.tables.decode(self._rows.read(begin, end).numpy().tobytes(), num_rows)
        return symbols.astype(np.int16)  # no symbol is beyond MAX_SYMBOL


def _by_block(blocks: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(block, places of it) for each block in blocks (B,)."""
    order = np.argsort(blocks, kind="stable")
    starts = np.flatnonzero(np.diff(blocks[order], prepend=-1))
    for places in np.split(order, starts[1:]):
        yield int(blocks[places[0]]), places
