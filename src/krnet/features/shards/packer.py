"""Cut rows that come in order into shards.

ranges of rows; add(first row, values, labels) ... -> write(first row, values, labels) for each range that is full
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from krnet.features.shards.ranges import Range

Write = Callable[[int, Tensor, Tensor | None], None]


class Packer:
    def __init__(self, ranges: Iterable[Range], write: Write):
        self._ranges, self._write = iter(ranges), write
        self._range = next(self._ranges, None)
        self._values: Tensor | None = None
        self._labels: Tensor | None = None
        self._count = 0

    def add(self, first: int, values: Tensor, labels: Tensor | None) -> None:
        """Take rows first .. first + B - 1; those of no range are left out."""
        stop = first + len(values)
        while self._range is not None and self._range[0] < stop:
            start, end = self._range
            low, high = max(first, start), min(stop, end)
            part = slice(low - first, high - first)
            assert low == start + self._count, f"row {low} after {self._count} rows from {start} on"
            self._keep(end - start, values[part], None if labels is None else labels[part])
            if high < end:
                return
            self.flush()

    def _keep(self, size: int, values: Tensor, labels: Tensor | None) -> None:
        if self._values is None:
            self._values = torch.empty((size, *values.shape[1:]), dtype=values.dtype)
            self._labels = None if labels is None else torch.empty(size, dtype=labels.dtype)
        where = slice(self._count, self._count + len(values))
        self._values[where] = values
        if self._labels is not None and labels is not None:
            self._labels[where] = labels
        self._count += len(values)

    def flush(self) -> None:
        """Write the rows of the range that have come, and go on to the next one."""
        if self._range is not None and self._values is not None:
            labels = None if self._labels is None else self._labels[: self._count]
            self._write(self._range[0], self._values[: self._count], labels)
        self._range, self._values, self._count = next(self._ranges, None), None, 0
