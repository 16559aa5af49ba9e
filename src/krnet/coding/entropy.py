"""Numbers to few bits, entropy-coded, and back.

    numbers --to_symbols--> symbols (rows, columns) --Tables.encode--> one stream per block of rows
                                                    <--Tables.decode--

A symbol is a small whole number. A table says how frequent each symbol is; columns that are alike share one
(`group_columns`). A block of rows is a stream of its own, so that one row is read without the rest.

The coder is constriction's ANS (Bamler 2022), with static tables. Frequencies are kept as whole numbers that add up to
2^16, and reach the coder as floats that are whole numbers, too: it then adds and never rounds, so that a file decodes
the same on every machine.
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

from krnet.errors import NotARecordingError

TOTAL_BITS = 16  # the frequencies of a table add up to 2^16
CODER_BITS = 24  # precision of constriction's default coder
MAX_TABLES = 256  # a column names its table in one byte
MAX_ALPHABET = 4096  # more would leave some too few of the 2^16
MAX_SYMBOL = 2**15 - 1
TABLE_BYTES = 3  # of a symbol in a table: two of its frequency, one of what a recorder knows of it
RESTORE = "Restore the file from a copy, or record again"

NUM_EXACT = 16  # symbols up to here have a bin of their own in a histogram; then four bins an octave
NUM_BINS = 121


def to_symbols(numbers: Tensor, step: float, dead_zone: float) -> Tensor:
    """The multiple of `step` that stands for each number, as int32.

    The bin of 0 ends at `dead_zone` steps on either side, all others are one step wide: 0.5 rounds to the nearest.
    """
    return (numbers.sign() * (numbers.abs() / step + (1 - dead_zone)).floor()).to(torch.int32)


# ------------------------------------------------------------------ columns that are alike


def histograms(symbols: Tensor) -> Tensor:
    """symbols (n, columns), at most MAX_SYMBOL in size -> counts (columns, NUM_BINS): what `group_columns` goes by."""
    size = torch.arange(MAX_SYMBOL + 1, dtype=torch.float64)
    octave = (size / NUM_EXACT).clamp(min=1).log2()
    bins = torch.where(size < NUM_EXACT, size, NUM_EXACT + (4 * octave).floor()).int().to(symbols.device)
    centre = NUM_BINS // 2
    assert int(bins[-1]) <= centre, f"{int(bins[-1])} bins on either side; there is room for {centre}"
    num_columns = symbols.shape[1]
    index = bins[symbols.abs()] * symbols.sign() + centre
    index += torch.arange(num_columns, device=symbols.device, dtype=torch.int32) * NUM_BINS
    return torch.bincount(index.flatten(), minlength=num_columns * NUM_BINS).view(num_columns, NUM_BINS)


def group_columns(counts: Tensor, share: float) -> np.ndarray:
    """The table of each column (columns,) uint8, from `histograms` of a `share` of the rows.

    As many tables as pay for themselves. Lloyd's algorithm on code lengths: each column takes the table that codes it
    in the fewest bits, each table the counts of its columns.
    """
    counts = counts.float()
    num_columns = len(counts)
    best_cost, best = math.inf, torch.zeros(num_columns, dtype=torch.int64)
    # Columns of like entropy start in the same table.
    entropy = (counts * (counts.sum(1, keepdim=True).clamp(min=1) / counts.clamp(min=1)).log2()).sum(1)
    order = entropy.argsort(stable=True)
    for num_tables in (1, 4, 16, 64, MAX_TABLES):
        if num_tables > num_columns:
            break
        column = torch.empty_like(order)
        column[order] = torch.arange(num_columns, device=order.device) * num_tables // num_columns
        for _ in range(12):
            tables = counts.new_zeros(num_tables, NUM_BINS).index_add_(0, column, counts)
            # A hundredth of a count for what a table has not met: dear, and not impossible.
            likely = (tables + 0.01) / (tables + 0.01).sum(1, keepdim=True)
            bits, column = (counts @ -likely.log2().T).min(1)
            # Tables that nobody chose go to the columns that suit theirs the least.
            unused = (torch.bincount(column, minlength=num_tables) == 0).nonzero()[:, 0]
            column[(bits - entropy).argsort(descending=True)[: len(unused)]] = unused
        cost = bits.double().sum().item() / share + 8 * TABLE_BYTES * int(tables.count_nonzero())
        if cost < best_cost:
            best_cost, best = cost, column.cpu()
    return best.unique(return_inverse=True)[1].numpy().astype(np.uint8)


# ------------------------------------------------------------------ tables


@dataclass(frozen=True, eq=False)
class Tables:
    """How frequent each symbol is, table by table, and which table each column has."""

    column: np.ndarray
    """(columns,) uint8: the table of each column."""
    first: np.ndarray
    """(T,) int16: the lowest symbol of each table."""
    sizes: np.ndarray
    """(T,) uint16: its symbols, each one more than the last. Of one symbol alone nothing is coded."""
    weights: np.ndarray
    """(sum of sizes,) uint16: the frequency of each symbol in 2^16, less one: none is impossible."""

    @classmethod
    def from_counts(cls, column: np.ndarray, counts: np.ndarray, lowest: int) -> Tables:
        """counts (T, n) of the symbols lowest, lowest + 1, ... in each table; every table has some."""
        first, sizes, weights = [], [], []
        for row in counts.astype(np.int64):
            begin, end = np.flatnonzero(row)[[0, -1]]
            row = row[begin : end + 1]
            assert len(row) <= MAX_ALPHABET, f"{len(row)} symbols in a table; expected at most {MAX_ALPHABET}"
            free = 2**TOTAL_BITS - len(row)
            share = row * free // row.sum()
            share[row.argmax()] += free - share.sum()
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
        """Refuse what no `from_counts` makes: a coder given it would decode nonsense, or die."""
        sizes, frequencies = self.sizes.astype(np.int64), self.weights.astype(np.int64) + 1
        found = None
        if len(sizes) != len(self.first) or not 0 < len(sizes) <= MAX_TABLES:
            found = f"{len(self.first)} and {len(sizes)} tables"
        elif sizes.min() < 1 or sizes.max() > MAX_ALPHABET or sizes.sum() != len(frequencies):
            found = f"tables of {sizes.min()} to {sizes.max()} symbols, and {len(frequencies)} frequencies"
        elif (np.add.reduceat(frequencies, self.starts) != 2**TOTAL_BITS).any():
            found = f"frequencies that do not add up to {2**TOTAL_BITS}"
        elif len(self.column) and self.column.max() >= len(sizes):
            found = f"a column of table {self.column.max()} among {len(sizes)}"
        if found:
            raise NotARecordingError(f"the tables of the coder are wrong: {found}. {RESTORE}")

    @cached_property
    def starts(self) -> np.ndarray:
        """(T,): where each table begins among the weights."""
        sizes = self.sizes.astype(np.int64)
        return np.cumsum(sizes) - sizes

    @property
    def radius(self) -> int:
        """Of the symbol furthest from 0."""
        first = self.first.astype(np.int64)
        return int(np.abs([first, first + self.sizes - 1]).max())

    def spread(self, values: np.ndarray, radius: int) -> np.ndarray:
        """values (sum of sizes,), one a symbol -> (T, 2 radius + 1): of -radius .. radius, 0 where a table ends."""
        found = np.zeros((len(self.sizes), 2 * radius + 1), values.dtype)
        for row, start, first, size in zip(found, self.starts, self.first.astype(np.int64), self.sizes.tolist()):
            row[first + radius : first + radius + size] = values[start : start + size]
        return found

    def model(self, table: int) -> Any | None:
        """The coder's model of a table; None where there is nothing to code."""
        import constriction

        start, size = int(self.starts[table]), int(self.sizes[table])
        if size == 1:
            return None
        # constriction scales what it is given to 2^24 less one a symbol, and adds that one to each. These add up
        # to just that: it multiplies by 1.0, sums whole numbers below 2^24, and cannot round.
        scale = 2 ** (CODER_BITS - TOTAL_BITS)
        weights = (self.weights[start : start + size] + 1.0) * scale - 1.0
        return constriction.stream.model.Categorical(weights, perfect=False)

    @cached_property
    def _plan(self) -> tuple[np.ndarray, list[tuple[int, int, Any]]]:
        """Coded columns, sorted by table; and of each table its first and last + 1 among them, and its model."""
        order = np.argsort(self.column, kind="stable")
        order = order[self.sizes[self.column[order]] > 1]
        edges = np.searchsorted(self.column[order], np.arange(len(self.sizes) + 1)).tolist()
        ranges = enumerate(pairwise(edges))
        return order, [(begin, end, self.model(table)) for table, (begin, end) in ranges if begin < end]

    @property
    def index_dtype(self) -> type[np.integer]:
        return np.uint8 if self.sizes.max() <= 256 else np.int16

    def bits(self, counts: np.ndarray, lowest: int) -> float:
        """Length of the code of so many symbols, counted as for `from_counts`."""
        total = 0.0
        for table in range(len(self.sizes)):
            begin = int(self.first[table]) - lowest
            met = counts[table, begin : begin + int(self.sizes[table])]
            weights = self.weights[self.starts[table] :][: len(met)]
            total += float((met * (TOTAL_BITS - np.log2(weights + 1.0))).sum())
        return total

    def encode(self, symbols: np.ndarray, block_size: int) -> Iterator[bytes]:
        """symbols (n, columns) -> a stream for each `block_size` rows."""
        import constriction

        order, parts = self._plan
        index = symbols[:, order].astype(np.int32) - self.first[self.column[order]].astype(np.int32)
        for begin in range(0, len(index), block_size):
            block = np.ascontiguousarray(index[begin : begin + block_size].T)  # (columns, rows)
            coder = constriction.stream.stack.AnsCoder()
            for low, high, model in reversed(parts):  # what goes in last comes out first
                coder.encode_reverse(block[low:high].reshape(-1), model)
            # The last word is never zero, but its last bytes may be.
            yield coder.get_compressed().astype("<u4").tobytes().rstrip(b"\0")

    def decode(self, stream: bytes, num_rows: int) -> np.ndarray:
        """A block's (rows, columns) of `index_dtype`: 0 is the lowest symbol of the column's table."""
        import constriction

        if stream.endswith(b"\0"):
            raise NotARecordingError(f"a block of the coder ends in a zero byte, as none does. {RESTORE}")
        order, parts = self._plan
        words = np.frombuffer(stream + bytes(-len(stream) % 4), "<u4").astype(np.uint32)
        coder = constriction.stream.stack.AnsCoder(words)
        index = np.zeros((num_rows, len(self.column)), self.index_dtype)
        found = [coder.decode(model, (high - low) * num_rows) for low, high, model in parts]
        if not coder.is_empty():  # as it is after what was encoded; most damage shows here
            raise NotARecordingError(
                f"a block of {len(stream)} bytes goes on after its {num_rows} rows: not what was encoded. {RESTORE}"
            )
        if found:
            index[:, order] = np.concatenate(found).reshape(len(order), num_rows).T
        return index


@dataclass(frozen=True, eq=False)
class Blocks:
    """All rows, encoded: the streams of their blocks one after the other."""

    tables: Tables
    stream: np.ndarray
    """(bytes,) uint8"""
    lengths: np.ndarray
    """Bytes of each block's stream."""
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
        return np.cumsum(self.lengths.astype(np.int64))

    def read(self, block: int) -> np.ndarray:
        """(rows, columns) of one block, as `Tables.decode` gives them."""
        end, length = int(self.ends[block]), int(self.lengths[block])
        num_rows = min(self.block_size, self.num_rows - block * self.block_size)
        return self.tables.decode(self.stream[end - length : end].tobytes(), num_rows)
