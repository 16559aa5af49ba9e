"""A matrix of numbers, rounded to multiples of a step and entropy-coded, of which any row can be read.

    Numbers -> survey: tables, centroids, size -> encode -> CodedNumbers <-> the tensors of a file
    rows -> Reader: the blocks that hold them -> numbers

Numbers are read back between the middle of their bin and the centroid of what fell into it. What they are of, a sample
or an axis in a row, is the caller's.
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
    TABLE_BYTES,
    Blocks,
    Tables,
    group_columns,
    histograms,
    to_symbols,
)
from krnet.config import check_int, check_range
from krnet.errors import SettingError, TensorShapeError
from krnet.io.archive import TensorStore

CHUNK_BYTES = 16 << 20  # of numbers in hand while fitting
CACHE_BYTES = 2 << 30  # of symbols that a reader keeps once it has decoded them
MAX_BLOCK = 256  # rows; bounds what reading one row may take
GROUPING_ROWS = 4096  # rows from which columns are grouped
CENTROID = 127  # parts of a step in which a centroid is kept
CODED_TENSORS = ("stream", "lengths", "column", "first", "sizes", "weights", "centroids")


class TooFineError(SettingError):
    """A step with which there are more symbols than a table may have."""

    def __init__(self, message: str, coarser: float = 0.0):
        super().__init__(message)
        self.coarser = coarser
        """A step below which there are too many, too."""


@dataclass(frozen=True, kw_only=True)
class CodedConfig:
    step: float = 1 / 15
    """Width of a quantisation bin; the range of each channel is 1."""
    dead_zone: float = 0.5
    """Where the bin of zero ends, in steps: 0.5 rounds to the nearest, more sends more numbers to zero.
    Samples that a recording grows by may have another, also beyond 1."""
    centroid: float = 1.0
    """Where a number is read back: 1 at the centroid of its bin, the least error; 0 at the middle, which keeps more
    of the amplitude, and more of what a classifier reads; below 0 beyond it."""
    block_size: int = 16
    """Samples coded together: to read one is to read them all; a block costs 3 bytes beside its symbols."""

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
        """Numbers of these rows, whole blocks of about CHUNK_BYTES at once."""
        num_blocks = max(1, CHUNK_BYTES // (4 * self.num_columns * block_size))
        yield from map(self.read, rows.split(num_blocks * block_size))


def evenly_spaced(num: int, most: int) -> Tensor:
    """All of 0 .. num - 1, or `most` of them, evenly spaced."""
    return torch.linspace(0, num - 1, min(num, most), dtype=torch.float64).round().long()


@dataclass(frozen=True, eq=False)
class MatrixStats:
    """What is known of numbers before they are coded."""

    tables: Tables
    centroids: np.ndarray
    """(symbols of all tables,) int8: mean of the numbers of a symbol, less the symbol, in steps / CENTROID."""
    size_bytes: float
    """Of tables and streams, when all planned rows are there, to a percent or so."""


def measure(
    numbers: Matrix,
    config: CodedConfig,
    *,
    max_rows: int | None = None,
    num_planned: int | None = None,
    held: CodedMatrix | None = None,
) -> MatrixStats:
    """Group the columns, count the symbols; of all rows, or of at most `max_rows` evenly spaced ones.

    num_planned  rows that there are to be in the end, by default those that there are
    held         rows that come before these and must be read back as they were: their groups and centroids stay
    """
    num_held = held.blocks.num_rows if held else 0
    num_planned = num_planned or num_held + numbers.num_rows
    if held is None:
        few = evenly_spaced(numbers.num_rows, min(GROUPING_ROWS, max_rows or GROUPING_ROWS))
        met = [histograms(_symbols(chunk, config)) for chunk in numbers.chunks(few, config.block_size)]
        column, radius = group_columns(torch.stack(met).sum(0), len(few) / num_planned), 1
    else:
        column, radius = held.blocks.tables.column, held.blocks.tables.radius
    num_tables = int(column.max()) + 1

    rows = evenly_spaced(numbers.num_rows, max_rows or numbers.num_rows)
    tallies = torch.zeros(2, num_tables, 2 * radius + 1, dtype=torch.float64)  # of symbols, and of their rests
    for chunk in numbers.chunks(rows, config.block_size):
        symbols = _symbols(chunk, config)
        wider = max(0, int(symbols.abs().max()) - radius)
        radius += wider
        tallies = torch.nn.functional.pad(tallies, (wider, wider))
        width = 2 * radius + 1
        index = symbols + (torch.from_numpy(column).to(symbols.device).int() * width + radius)
        rest = (chunk / config.step - symbols).double()
        met = [torch.bincount(index.flatten(), w, num_tables * width) for w in (None, rest.flatten())]
        tallies += torch.stack([m.double().view(num_tables, width).cpu() for m in met])

    counts, rests = tallies.numpy()
    centroids = np.rint((rests / np.maximum(counts, 1)).clip(-1, 1) * CENTROID)
    ahead = np.zeros_like(counts)  # of the rows that are held
    if held is not None:
        ahead, kept = (held.blocks.tables.spread(values, radius) for values in (held.counts, held.centroids))
        centroids = np.where(ahead > 0, kept, centroids)
    used = (ahead + counts).any(0).nonzero()[0]
    if (most := int(used[-1] - used[0]) + 1) > MAX_ALPHABET:
        raise too_fine(config.step, most)
    tables = Tables.from_counts(column, ahead + counts, -radius)
    spans = [slice(first + radius, first + radius + size) for first, size in _pairs(tables.first, tables.sizes)]
    centroids = np.concatenate([centroids[t, span] for t, span in enumerate(spans)])
    bits = tables.bits(ahead, -radius) + tables.bits(counts, -radius) * (num_planned - num_held) / len(rows)
    num_blocks = -(-num_planned // config.block_size)
    size = bits / 8 + 3 * num_blocks + TABLE_BYTES * len(tables.weights) + 4 * num_tables + len(column)
    return MatrixStats(tables, centroids.astype(np.int8), size)


def _pairs(*arrays: np.ndarray) -> Iterator[tuple[int, ...]]:
    return zip(*(array.tolist() for array in arrays))


def _symbols(numbers: Tensor, config: CodedConfig) -> Tensor:
    largest = numbers.abs().max().item() / config.step + 1
    if largest > MAX_SYMBOL:  # before they overflow
        raise too_fine(config.step, 2 * largest, least=largest)
    return to_symbols(numbers, config.step, config.dead_zone)


def too_fine(step: float, found: float, most: int = MAX_ALPHABET, *, least: float | None = None) -> TooFineError:
    """found: symbols that there are, about, where only the `least` number of them is known."""
    return TooFineError(
        f"step is {step:g}, which gives {found:.0f} different values; expected at most {most}. "
        f"Take a step of {step * found / most:.2g} or more, or recorder raw",
        step * (least or found) / most,
    )


def encode(numbers: Matrix, config: CodedConfig, found: MatrixStats, held: CodedMatrix | None = None) -> CodedMatrix:
    """All rows: those that are held already, if any, then these."""
    tables = found.tables
    lowest = tables.first.astype(np.int32)
    edges = [edge[tables.column] for edge in (lowest, lowest + tables.sizes.astype(np.int32) - 1)]
    chunks = numbers.chunks(torch.arange(numbers.num_rows), config.block_size)
    # A product that rounds otherwise than when it was counted may just miss the last bin of its table.
    symbols = (np.clip(_symbols(chunk, config).cpu().numpy(), *edges) for chunk in chunks)
    parts = chain(held.symbols() if held else (), symbols)
    return CodedMatrix(pack(tables, parts, config.block_size), found.centroids)


def pack(tables: Tables, parts: Iterable[np.ndarray], block_size: int) -> Blocks:
    """Symbols (n, columns), a few rows at a time -> the blocks that a file holds."""
    streams, num_rows = list[bytes](), 0
    left = np.empty((0, len(tables.column)), np.int32)  # rows of a block that is not full yet
    for part in parts:
        part = np.concatenate([left, part]) if len(left) else part
        whole = len(part) - len(part) % block_size
        streams += tables.encode(part[:whole], block_size)
        left, num_rows = part[whole:], num_rows + whole
    streams += tables.encode(left, block_size)
    lengths = np.array([len(stream) for stream in streams])
    lengths = lengths.astype(np.uint16 if lengths.max() < 2**16 else np.uint32)
    return Blocks(tables, np.frombuffer(b"".join(streams), np.uint8), lengths, num_rows + len(left), block_size)


@dataclass(frozen=True, eq=False)
class CodedMatrix:
    """A matrix of numbers as a file holds it."""

    blocks: Blocks
    centroids: np.ndarray

    def symbols(self) -> Iterator[np.ndarray]:
        """All rows (n, columns) int32, block by block."""
        tables = self.blocks.tables
        lowest = tables.first[tables.column].astype(np.int32)
        yield from (self.blocks.read(block) + lowest for block in range(len(self.blocks.lengths)))

    @cached_property
    def counts(self) -> np.ndarray:
        """(symbols of all tables,) int64: how often each is there."""
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
        return {prefix + name: torch.from_numpy(array.copy()) for name, array in zip(CODED_TENSORS, arrays)}

    @classmethod
    def load(cls, store: TensorStore, prefix: str, num_rows: int, num_columns: int, block_size: int) -> CodedMatrix:
        """Refused unless every size follows from the tensors: a file cannot ask for more than it pays for."""

        def get(name: str, dtype: torch.dtype | None, *shape: int) -> np.ndarray:
            found = store.tensor(prefix + name, shape=shape or None, dtype=dtype)
            if found.dim() != 1:
                raise TensorShapeError(
                    f"tensor {prefix + name!r} has shape {list(found.shape)}; expected one dimension"
                )
            return found.numpy()

        column = get("column", torch.uint8, num_columns)
        first, sizes = get("first", torch.int16), get("sizes", torch.uint16)
        tables = Tables(column, first, sizes, get("weights", torch.uint16))
        lengths = get("lengths", None, -(-num_rows // block_size))
        if lengths.dtype not in (np.uint16, np.uint32):
            raise TensorShapeError(f"tensor '{prefix}lengths' is {lengths.dtype}; expected uint16 or uint32")
        blocks = Blocks(tables, get("stream", torch.uint8), lengths, num_rows, block_size)
        blocks.check()
        return cls(blocks, get("centroids", torch.int8, len(tables.weights)))


class MatrixReader:
    """Coded numbers by row. What has been decoded is kept, as symbols, where all of them fit in CACHE_BYTES."""

    def __init__(self, coded: CodedMatrix, config: CodedConfig, device: torch.device):
        self.coded, self.blocks, self.device = coded, coded.blocks, device
        tables = coded.blocks.tables
        symbols = np.concatenate([np.arange(low, low + size) for low, size in _pairs(tables.first, tables.sizes)])
        middles = symbols + np.sign(symbols) * (config.dead_zone - 0.5)
        places = middles + config.centroid * (symbols + coded.centroids / CENTROID - middles)
        self.values = torch.from_numpy(places * config.step).float().to(device)
        self.starts = torch.from_numpy(tables.starts[tables.column]).int().to(device)  # (columns,)
        shape = coded.blocks.num_rows, len(tables.column)
        small = math.prod(shape) * np.dtype(tables.index_dtype).itemsize <= CACHE_BYTES
        self.known = np.zeros(len(coded.blocks.lengths), bool)
        # Not touched, and so not in memory, before it is filled.
        self.cache = np.empty(shape, tables.index_dtype) if small else None

    def read(self, rows: Tensor) -> Tensor:
        """rows (n,) int64 -> numbers (n, columns) on the device."""
        index = torch.from_numpy(self._index(rows.numpy())).to(self.device)
        return self.values[index.int() + self.starts]

    def _index(self, rows: np.ndarray) -> np.ndarray:
        size = self.blocks.block_size
        blocks, place = np.unique(rows // size, return_inverse=True)
        if self.cache is None:
            if not len(rows):
                return np.empty((0, len(self.starts)), self.blocks.tables.index_dtype)
            # Only the last block is shorter, and it comes last.
            return np.concatenate([self.blocks.read(block) for block in blocks])[place * size + rows % size]
        for block in blocks[~self.known[blocks]]:
            self.cache[block * size : (block + 1) * size] = self.blocks.read(block)
            self.known[block] = True
        return self.cache[rows]
