"""Rows of equal size in a file, read by position into memory of the caller.

    descriptor, place of the rows -> RowReader.fill(rows (B, row_bytes) uint8, ids (B,))

Neighbours are read at once, straight to their place; small rows that lie close together with those between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

GAP_BYTES = 4 << 10  # rows this far apart are read at once: a call takes as long as to copy a few kilobytes
SPAN_BYTES = 1 << 20  # at most this much at once, where rows between are read in vain
MAX_READ_BYTES = 1 << 30  # the kernel reads no more than 2 GiB in a call


def read_into(fd: int, target: memoryview, position: int, ended: Callable[[], Exception]) -> None:
    """Fill the target with the bytes from a position on; `ended` makes the error for a file that ends before."""
    while len(target):
        count = os.preadv(fd, [target[:MAX_READ_BYTES]], position)
        if not count:
            raise ended()
        target, position = target[count:], position + count


@dataclass(frozen=True)
class RowReader:
    fd: int
    offset: int
    """Where row 0 begins."""
    row_bytes: int
    ended: Callable[[], Exception]
    """Makes the error for a file that ends before its last row."""

    def fill(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Write row ids[i] to rows[i]; rows (B, row_bytes) uint8, contiguous."""
        if not self.row_bytes or not len(ids):
            return
        steps = np.diff(ids)
        if (steps == 1).all():
            self._read(rows.reshape(-1).data, int(ids[0]))
        elif self.row_bytes < GAP_BYTES and np.abs(steps).mean() * self.row_bytes < GAP_BYTES:
            self._fill_near(rows, ids)
        else:
            self._fill_runs(rows.reshape(-1).data, ids)

    def _read(self, target: memoryview, first: int) -> None:
        read_into(self.fd, target, self.offset + first * self.row_bytes, self.ended)

    def _fill_runs(self, target: memoryview, ids: np.ndarray) -> None:
        size, offset, fd, preadv = self.row_bytes, self.offset, self.fd, os.preadv
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
        stops = np.append(starts[1:], len(ids))
        for start, stop, first in zip(starts.tolist(), stops.tolist(), ids[starts].tolist(), strict=True):
            part = target[start * size : stop * size]
            if len(part) > MAX_READ_BYTES or preadv(fd, (part,), offset + first * size) != len(part):
                self._read(part, first)

    def _fill_near(self, rows: np.ndarray, ids: np.ndarray) -> None:
        order = np.argsort(ids, kind="stable")
        rising = ids[order]
        most = max(1, SPAN_BYTES // self.row_bytes)  # rows that are read at once
        start = 0
        while start < len(ids):
            first = int(rising[start])
            stop = int(np.searchsorted(rising, first + most, side="left"))
            span = np.empty((int(rising[stop - 1]) - first + 1, self.row_bytes), np.uint8)
            self._read(span.reshape(-1).data, first)
            rows[order[start:stop]] = span[rising[start:stop] - first]
            start = stop
