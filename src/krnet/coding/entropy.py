"""Quantise numbers to symbols, and entropy-code the symbols.

    numbers --to_symbols--> symbols (rows, columns) --Tables.encode--> one byte stream per block of rows
                            symbols (rows, columns) <--Tables.decode-- one byte stream

A symbol is a small integer. A table holds the frequency of each symbol; columns with similar distributions share a
table (`group_columns`). Each block of rows is a separate stream, so that a row is read without decoding the others.

The coder is constriction's ANS coder (Bamler 2022), with static tables. The frequencies of a table are integers that
add up to 2^16. The coder receives them as floats with integer values, so that it never rounds: a file decodes to the
same symbols on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.coding.coder import ans
from krnet.coding.streams import check_used_up, coder_of, stream_of
from krnet.errors import NotARecordingError
from krnet.io.header import RESTORE

FREQUENCY_BITS = 16  # the frequencies of a table add up to 2^16
CODER_BITS = 24  # inside constriction's default coder, they add up to 2^24
MAX_TABLES = 256  # a column names its table in one byte
MAX_ALPHABET = 4096  # symbols per table: with more, too little of the 2^16 would be left for the frequent ones
MAX_SYMBOL = 2**15 - 1  # the lowest symbol of a table is stored as int16
TABLE_SYMBOL_BYTES = 3  # per symbol of a table: two for its frequency, one for its centroid

# Histograms of symbols: one bin per symbol while |symbol| < 16, then four bins per octave; 60 bins per sign, and zero.
NUM_SINGLE_BINS = 16
NUM_BINS = 121


def to_symbols(numbers: Tensor, step: float, dead_zone: float) -> Tensor:
    """Quantise: return the multiple of `step` that stands for each number, as int32.

    The bin of 0 is the dead zone, from -dead_zone to dead_zone steps; all other bins are one step wide. A dead zone of
    0.5 rounds to the nearest multiple.
    """
    return (numbers.sign() * (numbers.abs() / step + (1 - dead_zone)).floor()).to(torch.int32)


# ------------------------------------------------------------------ columns that share a table


def histograms(symbols: Tensor) -> Tensor:
    """symbols (n, columns) with |symbol| <= MAX_SYMBOL -> counts (columns, NUM_BINS), for `group_columns`."""
    magnitude = torch.arange(MAX_SYMBOL + 1, dtype=torch.float64)
    octave = (magnitude / NUM_SINGLE_BINS).clamp(min=1).log2()
    bins = torch.where(magnitude < NUM_SINGLE_BINS, magnitude, NUM_SINGLE_BINS + (4 * octave).floor())
    bins = bins.int().to(symbols.device)
    centre = NUM_BINS // 2
    assert int(bins[-1]) <= centre, f"{int(bins[-1])} bins on either side; there is room for {centre}"
    num_columns = symbols.shape[1]
    index = bins[symbols.abs()] * symbols.sign() + centre  # (n, columns)
    index += torch.arange(num_columns, device=symbols.device, dtype=torch.int32) * NUM_BINS
    return torch.bincount(index.flatten(), minlength=num_columns * NUM_BINS).view(num_columns, NUM_BINS)


def group_columns(counts: Tensor, share: float) -> np.ndarray:
    """Return the table of each column, (columns,) uint8, given `histograms` of a `share` of all rows.

    Lloyd's algorithm on code lengths: each column takes the table that codes it in the fewest bits; each table becomes
    the sum of its columns' counts. The number of tables is the one with the fewest bits in all, tables included.
    """
    counts = counts.float()
    num_columns = len(counts)
    best_cost, best_column = math.inf, torch.zeros(num_columns, dtype=torch.int64)
    # Columns of similar entropy start in the same table. (columns,), in bits for the whole column:
    entropy = (counts * (counts.sum(1, keepdim=True).clamp(min=1) / counts.clamp(min=1)).log2()).sum(1)
    order = entropy.argsort(stable=True)
    for num_tables in (1, 4, 16, 64, MAX_TABLES):
        if num_tables > num_columns:
            break
        column = torch.empty_like(order)
        column[order] = torch.arange(num_columns, device=order.device) * num_tables // num_columns
        for _ in range(12):
            before = column
            tables = counts.new_zeros(num_tables, NUM_BINS).index_add_(0, column, counts)
            # Symbols that a table lacks count as 0.01: expensive, but not impossible.
            probability = (tables + 0.01) / (tables + 0.01).sum(1, keepdim=True)
            bits, column = (counts @ -probability.log2().T).min(1)
            # Tables without columns go to the columns that lose the most bits to their entropy.
            unused = (torch.bincount(column, minlength=num_tables) == 0).nonzero()[:, 0]
            column[(bits - entropy).argsort(descending=True)[: len(unused)]] = unused
            if torch.equal(column, before):  # another round would change nothing
                break
        cost = bits.double().sum().item() / share + 8 * TABLE_SYMBOL_BYTES * int(tables.count_nonzero())
        if cost < best_cost:
            best_cost, best_column = cost, column.cpu()
    return best_column.unique(return_inverse=True)[1].numpy().astype(np.uint8)


# ------------------------------------------------------------------ tables


@dataclass(frozen=True, eq=False)
class Tables:
    """T frequency tables, and which of them each column uses."""

    column: np.ndarray
    """(columns,) uint8: the table of each column."""
    first: np.ndarray
    """(T,) int16: the lowest symbol of each table."""
    sizes: np.ndarray
    """(T,) uint16: the number of symbols of each table, which are consecutive. A table of one symbol codes nothing."""
    weights: np.ndarray
    """(sum of sizes,) uint16: frequency - 1 of each symbol, table after table. Every frequency is at least 1."""

    @classmethod
    def from_counts(cls, column: np.ndarray, counts: np.ndarray, lowest: int) -> Tables:
        """Make tables from counts (T, n) of the symbols lowest, lowest + 1, ...; each row has a count above 0."""
        first, sizes, weights = [], [], []
        for row in counts.astype(np.int64):
            begin, end = np.flatnonzero(row)[[0, -1]]
            row = row[begin : end + 1]
            assert len(row) <= MAX_ALPHABET, f"{len(row)} symbols in a table; expected at most {MAX_ALPHABET}"
            # Each symbol has 1 of the 2^16; the remainder is divided in proportion to the counts.
            remainder = 2**FREQUENCY_BITS - len(row)
            share = row * remainder // row.sum()
            share[row.argmax()] += remainder - share.sum()
            first.append(lowest + begin)
            sizes.append(len(row))
            weights.append(share)
        return cls(
            column.astype(np.uint8),
            np.array(first, np.int16),
            np.array(sizes, np.uint16),
            np.concatenate(weights).astype(np.uint16),
        )

    def check(self) -> None:
        """Refuse tables that `from_counts` cannot have made: the coder would decode nonsense or crash."""
        sizes, frequencies = self.sizes.astype(np.int64), self.weights.astype(np.int64) + 1
        found = None  # what is wrong, in words
        if len(sizes) != len(self.first) or not 0 < len(sizes) <= MAX_TABLES:
            found = f"{len(self.first)} and {len(sizes)} tables"
        elif sizes.min() < 1 or sizes.max() > MAX_ALPHABET or sizes.sum() != len(frequencies):
            found = f"tables of {sizes.min()} to {sizes.max()} symbols, and {len(frequencies)} frequencies"
        elif (np.add.reduceat(frequencies, self.starts) != 2**FREQUENCY_BITS).any():
            found = f"frequencies that do not add up to {2**FREQUENCY_BITS}"
        elif len(self.column) and self.column.max() >= len(sizes):
            found = f"a column of table {self.column.max()} among {len(sizes)}"
        if found:
            raise NotARecordingError(f"the tables of the coder are wrong: {found}. {RESTORE}")

    @cached_property
    def starts(self) -> np.ndarray:
        """(T,) int64: index of each table's first symbol in `weights`."""
        sizes = self.sizes.astype(np.int64)
        return np.cumsum(sizes) - sizes

    @property
    def radius(self) -> int:
        """The largest absolute value of a symbol."""
        first = self.first.astype(np.int64)
        return int(np.abs([first, first + self.sizes - 1]).max())

    def spread(self, values: np.ndarray, radius: int) -> np.ndarray:
        """One value per symbol, (sum of sizes,) -> (T, 2 * radius + 1): symbols -radius .. radius, 0 if absent."""
        result = np.zeros((len(self.sizes), 2 * radius + 1), values.dtype)
        for row, start, first, size in zip(result, self.starts, self.first.astype(np.int64), self.sizes.tolist()):
            row[first + radius : first + radius + size] = values[start : start + size]
        return result

    def model(self, table: int) -> Any | None:
        """Return the coder's model of a table; None if the table has one symbol, which needs no bits."""
        start, size = int(self.starts[table]), int(self.sizes[table])
        if size == 1:
            return None
        # constriction scales the weights to a sum of 2^24 - size, then adds 1 to each. These weights have that sum:
        # it multiplies by 1.0 and adds integers below 2^24, which floats do without rounding.
        scale = 2 ** (CODER_BITS - FREQUENCY_BITS)
        weights = (self.weights[start : start + size] + 1.0) * scale - 1.0
        return ans().model.Categorical(weights, perfect=False)

    @cached_property
    def _coding_order(self) -> tuple[np.ndarray, list[tuple[int, int, Any]]]:
        """`order`, the columns that need bits, sorted by table; and (begin, end, model) for each `order[begin:end]`."""
        order = np.argsort(self.column, kind="stable")
        order = order[self.sizes[self.column[order]] > 1]
        edges = np.searchsorted(self.column[order], np.arange(len(self.sizes) + 1)).tolist()
        ranges = enumerate(pairwise(edges))
        return order, [(begin, end, self.model(table)) for table, (begin, end) in ranges if begin < end]

    @property
    def index_dtype(self) -> type[np.integer]:
        """The smallest type for the index of a symbol in its table."""
        return np.uint8 if self.sizes.max() <= 256 else np.int16

    def bits(self, counts: np.ndarray, lowest: int) -> float:
        """Return the code length, in bits, of symbols with these counts (as for `from_counts`)."""
        total = 0.0
        for table in range(len(self.sizes)):
            begin = int(self.first[table]) - lowest
            table_counts = counts[table, begin : begin + int(self.sizes[table])]
            weights = self.weights[self.starts[table] :][: len(table_counts)]
            total += float((table_counts * (FREQUENCY_BITS - np.log2(weights + 1.0))).sum())
        return total

    def encode(self, symbols: np.ndarray, block_size: int) -> Iterator[bytes]:
        """symbols (n, columns) -> one stream per `block_size` rows."""
        index = symbols.astype(np.int32) - self.first[self.column].astype(np.int32)
        for begin in range(0, len(index), block_size):
            coder = ans().stack.AnsCoder()
            self.push(coder, index[begin : begin + block_size])
            yield stream_of(coder)

    def decode(self, stream: bytes, num_rows: int) -> np.ndarray:
        """One block's stream -> (rows, columns) of `index_dtype`: symbol - lowest symbol of the column's table."""
        coder = coder_of(stream)
        index = self.pop(coder, num_rows)
        check_used_up(coder, stream, num_rows)
        return index

    def push(self, coder: Any, index: np.ndarray) -> None:
        """Encode the rows of a block: index (rows, columns) int32 of each symbol in its table."""
        order, parts = self._coding_order
        block = np.ascontiguousarray(index.T[order])  # (columns that need bits, rows)
        for low, high, model in reversed(parts):  # ANS is a stack: decoding starts with what was encoded last
            coder.encode_reverse(block[low:high].reshape(-1), model)

    def pop(self, coder: Any, num_rows: int) -> np.ndarray:
        """Decode the rows that were pushed last: index (rows, columns) of `index_dtype`."""
        order, parts = self._coding_order
        index = np.zeros((num_rows, len(self.column)), self.index_dtype)
        for low, high, model in parts:
            index[:, order[low:high]] = coder.decode(model, (high - low) * num_rows).reshape(-1, num_rows).T
        return index


@dataclass(frozen=True, eq=False)
class Blocks:
    """All rows, encoded: the streams of the blocks, concatenated."""

    tables: Tables
    stream: np.ndarray
    """(bytes,) uint8"""
    lengths: np.ndarray
    """(blocks,) uint16 or uint32: bytes of each block's stream."""
    num_rows: int
    block_size: int

    def check(self) -> None:
        self.tables.check()
        num_blocks = -(-self.num_rows // self.block_size)
        if len(self.lengths) != num_blocks or int(self.lengths.astype(np.int64).sum()) != len(self.stream):
            raise NotARecordingError(
                f"{len(self.lengths)} blocks of {int(self.lengths.astype(np.int64).sum())} bytes in all; expected "
                f"{num_blocks} of {len(self.stream)}. {RESTORE}"
            )

    @cached_property
    def ends(self) -> np.ndarray:
        """(blocks,) int64: where each block ends in `stream`."""
        return np.cumsum(self.lengths.astype(np.int64))

    def read(self, block: int) -> np.ndarray:
        """Decode one block to (rows, columns), as `Tables.decode` returns them."""
        end, length = int(self.ends[block]), int(self.lengths[block])
        num_rows = min(self.block_size, self.num_rows - block * self.block_size)
        return self.tables.decode(self.stream[end - length : end].tobytes(), num_rows)
