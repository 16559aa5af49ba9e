"""Quantise and entropy-code a matrix, so that any row can be read back without decoding all of them.

    Matrix --measure--> MatrixStats (tables, centroids, size) --encode--> CodedMatrix <-> tensors of a file
    rows (n,) --MatrixReader.read--> numbers (n, columns), decoded from the blocks that hold these rows

A number is read back at the centroid of its bin (the mean of the numbers in it), at the middle of the bin, or between
the two: `CodedConfig.centroid` says where. A row may be anything: a sample's coefficients, or an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from krnet.coding.entropy import (
    MAX_ALPHABET,
    MAX_SYMBOL,
    TABLE_SYMBOL_BYTES,
    Blocks,
    Tables,
    group_columns,
    histograms,
    to_symbols,
)
from krnet.config import check_int, check_range
from krnet.errors import SettingError, TensorShapeError
from krnet.io.archive import TensorStore

CHUNK_BYTES = 16 << 20  # numbers read at once while fitting
READ_BYTES = 4 << 20  # numbers decoded at once while a whole matrix is read
CACHE_BYTES = 2 << 30  # the largest matrix of decoded symbols that a reader keeps in memory
FREE_CACHE_BYTES, CACHE_FACTOR = 256 << 20, 512  # and how much larger it may be than its stream
MAX_BLOCK = 256  # rows per block: bounds the cost of reading one row
GROUPING_ROWS = 4096  # rows whose histograms decide which columns share a table
LENGTH_TYPES = (torch.uint16, torch.uint32)  # of the bytes of a block
CENTROID = 127  # centroids are stored as int8, in units of step / 127
CODED_TENSORS = ("stream", "lengths", "column", "first", "sizes", "weights", "centroids")


class TooFineError(SettingError):
    """The step is so fine that there are more symbols than a table may have."""

    def __init__(self, message: str, coarser: float = 0.0):
        super().__init__(message)
        self.coarser = coarser
        """A lower bound of the usable steps: every step below it has too many symbols, too."""


@dataclass(frozen=True, kw_only=True)
class CodedConfig:
    step: float = 1 / 15
    """Quantisation step: the width of a bin, where the range of each channel is 1."""
    dead_zone: float = 0.5
    """Half the width of the bin of zero, in steps: 0.5 rounds to the nearest; a larger value sends more numbers to
    zero. Samples that are added to a recording may have a wider dead zone, also above 1."""
    centroid: float = 1.0
    """Where in its bin a number is read back: 1 is the centroid, with the least error; 0 is the middle, which keeps
    more of the amplitude and more of what a classifier reads; negative values lie beyond the middle."""
    block_size: int = 16
    """Samples per block. Reading one sample decodes its whole block; each block costs 3 bytes beside its symbols."""

    def __post_init__(self) -> None:
        check_range("step", self.step, 1e-6, 1e3)
        check_range("dead_zone", self.dead_zone, 0.5, 1)
        check_range("centroid", self.centroid, -1, 1)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)


@dataclass(frozen=True)
class Matrix:
    """A matrix to be coded, read a few rows at a time."""

    read: Callable[[Tensor], Tensor]
    """rows (n,) int64 -> numbers (n, num_columns), on the device"""
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, matrix: Tensor) -> Matrix:
        return cls(lambda rows: matrix[rows.to(matrix.device)], *matrix.shape)

    def chunks(self, rows: Tensor, block_size: int) -> Iterator[Tensor]:
        """Read these rows in chunks of whole blocks, about CHUNK_BYTES each."""
        num_blocks = max(1, CHUNK_BYTES // (4 * self.num_columns * block_size))
        yield from map(self.read, rows.split(num_blocks * block_size))


def evenly_spaced(num_items: int, max_items: int) -> Tensor:
    """Return all of 0 .. num_items - 1, or `max_items` of them, evenly spaced."""
    return torch.linspace(0, num_items - 1, min(num_items, max_items), dtype=torch.float64).round().long()


@dataclass(frozen=True, eq=False)
class MatrixStats:
    """Everything that coding a matrix needs to know about it, and the size of the result."""

    tables: Tables
    centroids: np.ndarray
    """(symbols of all tables,) int8: mean(number / step - symbol) over the numbers of a symbol, times CENTROID."""
    size_bytes: float
    """Estimated size of tables and streams with all planned rows; off by about 1 %."""


def measure(
    numbers: Matrix,
    config: CodedConfig,
    *,
    max_rows: int | None = None,
    num_planned: int | None = None,
    held: CodedMatrix | None = None,
) -> MatrixStats:
    """Group the columns and count the symbols, over all rows or over at most `max_rows` evenly spaced ones.

    num_planned  rows that the file will have in the end; by default the held rows and these
    held         rows that come first and must decode to the same numbers as before: their groups and centroids stay
    """
    num_held = held.blocks.num_rows if held else 0
    num_planned = num_planned or num_held + numbers.num_rows
    if held is None:
        grouping_rows = evenly_spaced(numbers.num_rows, min(GROUPING_ROWS, max_rows or GROUPING_ROWS))
        chunks = numbers.chunks(grouping_rows, config.block_size)
        counted = [histograms(_quantize(chunk, config)) for chunk in chunks]
        column, radius = group_columns(torch.stack(counted).sum(0), len(grouping_rows) / num_planned), 1
    else:
        column, radius = held.blocks.tables.column, held.blocks.tables.radius
    num_tables = int(column.max()) + 1

    rows = evenly_spaced(numbers.num_rows, max_rows or numbers.num_rows)
    # For each table and symbol: how many numbers have it, and the sum of their offsets number / step - symbol.
    tallies = torch.zeros(2, num_tables, 2 * radius + 1, dtype=torch.float64)
    for chunk in numbers.chunks(rows, config.block_size):
        symbols = _quantize(chunk, config)
        padding = max(0, int(symbols.abs().max()) - radius)
        radius += padding
        tallies = torch.nn.functional.pad(tallies, (padding, padding))
        width = 2 * radius + 1
        index = symbols + (torch.from_numpy(column).to(symbols.device).int() * width + radius)
        offsets = (chunk / config.step - symbols).double()
        sums = [torch.bincount(index.flatten(), w, num_tables * width) for w in (None, offsets.flatten())]
        tallies += torch.stack([s.double().view(num_tables, width).cpu() for s in sums])

    counts, offset_sums = tallies.numpy()
    centroids = np.rint((offset_sums / np.maximum(counts, 1)).clip(-1, 1) * CENTROID)
    held_counts = np.zeros_like(counts)
    if held is not None:
        held_tables = held.blocks.tables
        held_counts, held_centroids = (held_tables.spread(values, radius) for values in (held.counts, held.centroids))
        centroids = np.where(held_counts > 0, held_centroids, centroids)
    used = (held_counts + counts).any(0).nonzero()[0]
    if (num_symbols := int(used[-1] - used[0]) + 1) > MAX_ALPHABET:
        raise too_fine(config.step, num_symbols)
    tables = Tables.from_counts(column, held_counts + counts, -radius)
    spans = [slice(first + radius, first + radius + size) for first, size in _pairs(tables.first, tables.sizes)]
    centroids = np.concatenate([centroids[t, span] for t, span in enumerate(spans)])
    bits = tables.bits(held_counts, -radius) + tables.bits(counts, -radius) * (num_planned - num_held) / len(rows)
    num_blocks = -(-num_planned // config.block_size)
    size_bytes = bits / 8 + 3 * num_blocks + TABLE_SYMBOL_BYTES * len(tables.weights) + 4 * num_tables + len(column)
    return MatrixStats(tables, centroids.astype(np.int8), size_bytes)


def _pairs(*arrays: np.ndarray) -> Iterator[tuple[int, ...]]:
    return zip(*(array.tolist() for array in arrays))


def _quantize(numbers: Tensor, config: CodedConfig) -> Tensor:
    """Return the symbols of the numbers; refuse a step for which they would overflow."""
    largest = numbers.abs().max().item() / config.step + 1
    if largest > MAX_SYMBOL:
        raise too_fine(config.step, 2 * largest, min_symbols=largest)
    return to_symbols(numbers, config.step, config.dead_zone)


def too_fine(
    step: float, num_symbols: float, max_symbols: int = MAX_ALPHABET, *, min_symbols: float | None = None
) -> TooFineError:
    """Return the error for a step with `num_symbols`, or with an estimate of them and a known minimum."""
    return TooFineError(
        f"step is {step:g}, which gives {num_symbols:.0f} different values; expected at most {max_symbols}. "
        f"Take a step of {step * num_symbols / max_symbols:.2g} or more, or recorder raw",
        step * (min_symbols or num_symbols) / max_symbols,
    )


def encode(numbers: Matrix, config: CodedConfig, stats: MatrixStats, held: CodedMatrix | None = None) -> CodedMatrix:
    """Code all rows: first those of `held`, if there are any, then these."""
    tables = stats.tables
    lowest = tables.first.astype(np.int32)
    bounds = [bound[tables.column] for bound in (lowest, lowest + tables.sizes.astype(np.int32) - 1)]
    chunks = numbers.chunks(torch.arange(numbers.num_rows), config.block_size)
    # Reading a number again may round it differently than in `measure`, and so just beyond its table's last bin.
    symbols = (np.clip(_quantize(chunk, config).cpu().numpy(), *bounds) for chunk in chunks)
    parts = chain(held.symbols() if held else (), symbols)
    return CodedMatrix(pack(tables, parts, config.block_size), stats.centroids)


def pack(tables: Tables, parts: Iterable[np.ndarray], block_size: int) -> Blocks:
    """Encode symbols (n, columns), given a few rows at a time, into the blocks of a file."""
    stream, sizes, num_rows = bytearray(), list[int](), 0  # one buffer: the stream may be most of the memory taken

    def append(rows: np.ndarray) -> None:
        for block in tables.encode(rows, block_size):
            sizes.append(len(block))
            stream.extend(block)

    pending = np.empty((0, len(tables.column)), np.int32)  # rows of a block that is not full yet
    for part in parts:
        part = np.concatenate([pending, part]) if len(pending) else part
        num_whole = len(part) - len(part) % block_size
        append(part[:num_whole])
        pending, num_rows = part[num_whole:].copy(), num_rows + num_whole
    append(pending)
    lengths = np.array(sizes, np.uint16 if max(sizes) < 2**16 else np.uint32)
    return Blocks(tables, np.frombuffer(stream, np.uint8), lengths, num_rows + len(pending), block_size)


@dataclass(frozen=True, eq=False)
class CodedMatrix:
    """A coded matrix, as a file holds it."""

    blocks: Blocks
    centroids: np.ndarray
    """As in MatrixStats."""

    def symbols(self) -> Iterator[np.ndarray]:
        """Decode all rows, block by block: symbols (n, columns) int32."""
        tables = self.blocks.tables
        lowest = tables.first[tables.column].astype(np.int32)
        yield from (self.blocks.read(block) + lowest for block in range(len(self.blocks.lengths)))

    @cached_property
    def counts(self) -> np.ndarray:
        """(symbols of all tables,) int64: how often each symbol occurs."""
        tables, counts = self.blocks.tables, np.zeros(len(self.centroids), np.int64)
        for block in range(len(self.blocks.lengths)):
            index = self.blocks.read(block) + tables.starts[tables.column]
            counts += np.bincount(index.reshape(-1), minlength=len(counts))
        return counts

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        tables = self.blocks.tables
        arrays = (
            self.blocks.stream, self.blocks.lengths, tables.column, tables.first, tables.sizes, tables.weights,
            self.centroids,
        )  # fmt: skip
        owned = (array if array.flags.writeable else array.copy() for array in arrays)  # torch needs a writeable one
        return {prefix + name: torch.from_numpy(array) for name, array in zip(CODED_TENSORS, owned)}

    @classmethod
    def load(cls, store: TensorStore, prefix: str, num_rows: int, num_columns: int, block_size: int) -> CodedMatrix:
        """Load from a file, and refuse sizes that disagree: no file may allocate more memory than its bytes justify."""

        def get(name: str, dtype: torch.dtype | None, *shape: int) -> np.ndarray:
            found = store.tensor(prefix + name, shape=shape or None, dtype=dtype)
            if dtype is None and found.dtype not in LENGTH_TYPES:
                raise TensorShapeError(f"tensor {prefix + name!r} is {found.dtype}; expected uint16 or uint32")
            if found.dim() != 1:
                raise TensorShapeError(
                    f"tensor {prefix + name!r} has shape {list(found.shape)}; expected one dimension"
                )
            return found.numpy()

        column = get("column", torch.uint8, num_columns)
        first, sizes = get("first", torch.int16), get("sizes", torch.uint16)
        tables = Tables(column, first, sizes, get("weights", torch.uint16))
        lengths = get("lengths", None, -(-num_rows // block_size))
        blocks = Blocks(tables, get("stream", torch.uint8), lengths, num_rows, block_size)
        blocks.check()
        return cls(blocks, get("centroids", torch.int8, len(tables.weights)))


class MatrixReader:
    """Reads rows of a coded matrix.

    If the whole matrix of decoded symbols is small enough, those of a block are kept when it is read again. A stream of
    few bytes that claims to hold a large matrix gets no cache: each read decodes its blocks again.
    """

    def __init__(self, coded: CodedMatrix, config: CodedConfig, device: torch.device):
        self.coded, self.blocks, self.config, self.device = coded, coded.blocks, config, device
        tables = coded.blocks.tables
        symbols = np.concatenate([np.arange(low, low + size) for low, size in _pairs(tables.first, tables.sizes)])
        middles = symbols + np.sign(symbols) * (config.dead_zone - 0.5)
        positions = middles + config.centroid * (symbols + coded.centroids / CENTROID - middles)
        self.values = torch.from_numpy(positions * config.step).float().to(device)  # (symbols of all tables,)
        self.starts = torch.from_numpy(tables.starts[tables.column]).int().to(device)  # (columns,)
        shape = coded.blocks.num_rows, len(tables.column)
        cache_bytes = min(CACHE_BYTES, max(FREE_CACHE_BYTES, CACHE_FACTOR * len(self.blocks.stream)))
        fits = math.prod(shape) * np.dtype(tables.index_dtype).itemsize <= cache_bytes
        self.was_read = np.zeros(len(coded.blocks.lengths), bool)  # (blocks,)
        self.is_cached = np.zeros_like(self.was_read)
        # The system gives memory to a page of it when that is first written.
        self.cache = np.empty(shape, tables.index_dtype) if fits else None

    def read(self, rows: Tensor) -> Tensor:
        """rows (n,) int64 -> numbers (n, columns) on the device."""
        index = torch.from_numpy(self._index(rows.numpy())).to(self.device)
        return self.values[index.int() + self.starts]

    def read_all(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows, some blocks at a time: where they are, and their numbers (n, columns). Nothing is cached."""
        size, num_blocks = self.blocks.block_size, len(self.blocks.lengths)
        step = max(1, READ_BYTES // (4 * size * max(1, len(self.starts))))
        for first in range(0, num_blocks, step):
            parts = [self.blocks.read(block) for block in range(first, min(first + step, num_blocks))]
            index = torch.from_numpy(np.concatenate(parts)).to(self.device)
            yield slice(first * size, first * size + len(index)), self.values[index.int() + self.starts]

    def quantize(self, numbers: Tensor) -> Tensor:
        """The symbols (n, columns) int32 of any numbers (n, columns) on the device."""
        return to_symbols(numbers, self.config.step, self.config.dead_zone).clamp_(-MAX_SYMBOL, MAX_SYMBOL)

    def numbers_of(self, symbols: Tensor) -> Tensor:
        """The numbers that stand for symbols (n, columns), as those of the matrix are decoded.

        A symbol that a column's table lacks is decoded to the middle of its bin.
        """
        first, last = self._spans
        index = symbols - first
        known = index.clamp(min=0).minimum(last)
        numbers = self.values.take((known + self.starts).long())
        lacking = known != index
        if not lacking.any():
            return numbers
        middles = (symbols + symbols.sign() * (self.config.dead_zone - 0.5)) * self.config.step
        return torch.where(lacking, middles, numbers)

    @cached_property
    def _spans(self) -> tuple[Tensor, Tensor]:
        """(columns,) int32: the lowest symbol of each column's table, and the index of its highest."""
        tables = self.blocks.tables
        first, sizes = (
            torch.from_numpy(array[tables.column].astype(np.int32)).to(self.device)
            for array in (tables.first, tables.sizes)
        )
        return first, sizes - 1

    def _index(self, rows: np.ndarray) -> np.ndarray:
        """rows (n,) -> (n, columns): the index of each symbol in its table."""
        size = self.blocks.block_size
        if not len(rows):
            return np.empty((0, len(self.starts)), self.blocks.tables.index_dtype)
        blocks, place = np.unique(rows // size, return_inverse=True)
        if self.cache is not None:
            # A pass over all rows, as it measures the error, reads each block once: that alone fills no memory.
            for block in blocks[self.was_read[blocks] & ~self.is_cached[blocks]]:
                self.cache[block * size : (block + 1) * size] = self.blocks.read(block)
                self.is_cached[block] = True
            self.was_read[blocks] = True
            if self.is_cached[blocks].all():
                return self.cache[rows]
        found = np.empty((len(rows), len(self.starts)), self.blocks.tables.index_dtype)
        for number, block in enumerate(blocks):  # one at a time: a block may be larger than all rows together
            found[place == number] = self._block(block)[rows[place == number] % size]
        return found

    def _block(self, block: int) -> np.ndarray:
        size = self.blocks.block_size
        if self.cache is None or not self.is_cached[block]:
            return self.blocks.read(block)
        return self.cache[block * size : (block + 1) * size]
