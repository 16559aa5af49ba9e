"""Entropy-code symbols by the tables of other rows: tables that are fixed, and an escape for symbols that they lack.

    tables of a recording -> OpenTables.of
    symbols (n, columns) --encode--> one stream per block of rows --decode--> symbols

Each table gets one more symbol, the escape. A symbol that its table lacks is coded as the escape, and follows at the
end of its block as a number of 16 bits. So any symbol can be coded, and a block needs nothing beside the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.coding.coder import ans
from krnet.coding.entropy import FREQUENCY_BITS, MAX_SYMBOL, Tables
from krnet.coding.streams import check_used_up, coder_of, stream_of

ESCAPE_FREQUENCY = 16  # of the 2^16 of a table: an escape takes 12 bits, and 16 more for its symbol
NUM_ESCAPED = 2 * (MAX_SYMBOL + 1)  # different symbols that may follow


@dataclass(frozen=True, eq=False)
class OpenTables:
    tables: Tables
    """With the escape as the last symbol of each."""

    @classmethod
    def of(cls, tables: Tables) -> OpenTables:
        """The escape takes its share from the most frequent symbol of each table."""
        weights = []
        for part in np.split(tables.weights, tables.starts[1:]):
            most = part.argmax()
            share = min(ESCAPE_FREQUENCY, (int(part[most]) + 1) // 2)
            part = np.append(part, np.uint16(share - 1))
            part[most] -= share
            weights.append(part)
        return cls(Tables(tables.column, tables.first, tables.sizes + np.uint16(1), np.concatenate(weights)))

    def encode(self, symbols: np.ndarray, block_size: int) -> Iterator[bytes]:
        """symbols (n, columns) -> one stream per `block_size` rows."""
        first, escape = self._spans
        index = symbols.astype(np.int32) - first
        is_escaped = (index < 0) | (index >= escape)
        index = np.where(is_escaped, escape, index)
        for begin in range(0, len(index), block_size):
            rows, coder = slice(begin, begin + block_size), ans().stack.AnsCoder()
            escaped = symbols[rows][is_escaped[rows]].astype(np.int32)  # row after row
            if len(escaped):
                coder.encode_reverse(escaped + (MAX_SYMBOL + 1), self._uniform)
            self.tables.push(coder, index[rows])
            yield stream_of(coder)

    def decode(self, stream: bytes, num_rows: int) -> np.ndarray:
        """One block's stream -> symbols (rows, columns) int32."""
        first, escape = self._spans
        coder = coder_of(stream)
        index = self.tables.pop(coder, num_rows)
        is_escaped = index == escape
        symbols = index + first
        if num_escaped := int(np.count_nonzero(is_escaped)):
            symbols[is_escaped] = coder.decode(self._uniform, num_escaped) - (MAX_SYMBOL + 1)
        check_used_up(coder, stream, num_rows)
        return symbols

    @cached_property
    def mean_bits(self) -> float:
        """Bits of a row whose symbols are as frequent as the tables say."""
        tables = self.tables
        frequencies = tables.weights + 1.0
        entropies = np.add.reduceat(frequencies / 2**FREQUENCY_BITS * self._bits, tables.starts)  # (T,)
        return float(entropies[tables.column].sum())

    def bits(self, symbols: Tensor) -> Tensor:
        """(n,): how many bits each row of symbols (n, columns) takes, computed where they are."""
        first, escape, starts, bits = self._on(symbols.device)
        index = symbols - first
        is_escaped = (index < 0) | (index >= escape)
        index = torch.where(is_escaped, escape, index) + starts
        return bits.take(index).sum(1) + FREQUENCY_BITS * is_escaped.sum(1)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `bits` needs, on a device: `_spans`, where the table of each column begins in `_bits`, and `_bits`."""
        if device not in self._devices:
            arrays = (*self._spans, self.tables.starts[self.tables.column], self._bits)
            first, escape, starts, bits = (torch.from_numpy(array).to(device) for array in arrays)
            self._devices[device] = first, escape, starts, bits
        return self._devices[device]

    @cached_property
    def _devices(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor]]:
        return {}

    @cached_property
    def _bits(self) -> np.ndarray:
        """(sum of sizes,): bits of each symbol; of an escape without the symbol that follows."""
        return (FREQUENCY_BITS - np.log2(self.tables.weights + 1.0)).astype(np.float32)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """(columns,) int32: the lowest symbol of each column's table, and the index of its escape."""
        tables = self.tables
        first, sizes = (array[tables.column].astype(np.int32) for array in (tables.first, tables.sizes))
        return first, sizes - 1

    @cached_property
    def _uniform(self) -> Any:
        return ans().model.Uniform(NUM_ESCAPED)
