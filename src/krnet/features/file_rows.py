"""Rows of an array in a file, read by position instead of through a memory map.

    path                           -> OpenFile, or OpenFolder of a zarr store: its state when it was opened, and now
    OpenFile, offset, shape, dtype -> FileRows.fill(out (B, *shape), ids (B,))

A file that another process shortens would end a process that reads it through a map (SIGBUS); here it ends in an
error. What was read does not count as memory of ours either.
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from krnet.errors import ChangedFeaturesError

NUM_SAMPLED, SAMPLED_BYTES = 64, 16 << 10  # blocks of a file by which its content is known again
GAP_BYTES = 4 << 10  # rows this far apart are read at once: a call takes as long as to copy a few kilobytes
SPAN_BYTES = 1 << 20  # at most this much at once, where rows between are read in vain
MAX_READ_BYTES = 1 << 30  # the kernel reads no more than 2 GiB in a call

CHANGED = "Make sure that nothing writes to it meanwhile, and give the same call again"


@dataclass(frozen=True)
class State:
    """What can be told of stored features without reading all of them."""

    size: int
    time_ns: int
    """When they were last written."""
    content: str
    """A digest of blocks all over them."""

    def difference(self, now: State) -> str | None:
        if now.size != self.size:
            return f"it had {self.size} bytes and has {now.size}"
        if now.content != self.content:
            return "its content is another"
        return None


class OpenFile:
    """A file that is read, and what it was like when it was opened."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        self.before = self.state()

    def state(self) -> State:
        found = os.fstat(self.fd)
        digest = hashlib.blake2b(digest_size=16)
        last = max(0, found.st_size - SAMPLED_BYTES)
        for position in sorted({last * number // (NUM_SAMPLED - 1) for number in range(NUM_SAMPLED)}):
            digest.update(os.pread(self.fd, SAMPLED_BYTES, position))
        return State(found.st_size, found.st_mtime_ns, digest.hexdigest())

    def check_size(self) -> None:
        """Refuse a file that has become shorter."""
        if (size := os.fstat(self.fd).st_size) < self.before.size:
            raise self._shortened(size)

    def _shortened(self, size: int) -> ChangedFeaturesError:
        return ChangedFeaturesError(
            f"{self.path}: has {size} bytes, {self.before.size} when it was opened: it was shortened while it was "
            f"read. {CHANGED}"
        )

    def read_into(self, target: memoryview, position: int) -> None:
        """Fill the target with the bytes from a position on; a file that ends before is refused."""
        while len(target):
            count = os.preadv(self.fd, [target[:MAX_READ_BYTES]], position)
            if not count:
                raise self._shortened(os.fstat(self.fd).st_size)
            target, position = target[count:], position + count


class OpenFolder:
    """A folder that is read, such as a zarr store, and what it was like when it was opened."""

    def __init__(self, path: Path):
        self.path = path
        self.before = self.state()

    def state(self) -> State:
        digest, size, time_ns = hashlib.blake2b(digest_size=16), 0, 0
        paths = sorted(path for path in self.path.rglob("*") if path.is_file())
        sampled = set(paths[:: max(1, len(paths) // NUM_SAMPLED)])
        for path in paths:
            with suppress(OSError):  # removed meanwhile: its name is missing from the digest
                found = path.stat()
                size, time_ns = size + found.st_size, max(time_ns, found.st_mtime_ns)
                digest.update(f"{path.relative_to(self.path)} {found.st_size}".encode())
                if path in sampled:
                    with path.open("rb") as file:
                        digest.update(file.read(SAMPLED_BYTES))
        return State(size, time_ns, digest.hexdigest())


class FileRows:
    """An array in a file: rows of equal size, one behind the other."""

    def __init__(self, file: OpenFile, offset: int, full_shape: Sequence[int], dtype: np.dtype):
        self.file, self.offset, self.dtype = file, offset, dtype
        self.num_rows = full_shape[0]
        self.row_bytes = math.prod(full_shape[1:]) * dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.num_rows * self.row_bytes

    def fill(self, target: np.ndarray, ids: np.ndarray) -> None:
        """Write row ids[i] to target[i]; target (B, *shape) is contiguous and of the stored dtype, in native order."""
        if not self.row_bytes or not len(ids):
            return
        rows = target.reshape(len(ids), -1).view(np.uint8)  # (B, row_bytes)
        steps = np.diff(ids)
        if (steps == 1).all():
            self._read(rows.reshape(-1).data, int(ids[0]))
        elif self.row_bytes < GAP_BYTES and np.abs(steps).mean() * self.row_bytes < GAP_BYTES:
            self._fill_near(rows, ids)
        else:
            self._fill_runs(rows.reshape(-1).data, ids)
        if not self.dtype.isnative:
            target.byteswap(inplace=True)

    def _read(self, target: memoryview, first: int) -> None:
        self.file.read_into(target, self.offset + first * self.row_bytes)

    def _fill_runs(self, target: memoryview, ids: np.ndarray) -> None:
        """Runs of neighbours are read at once, straight to their place."""
        size, offset, fd, preadv = self.row_bytes, self.offset, self.file.fd, os.preadv
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
        stops = np.append(starts[1:], len(ids))
        for start, stop, first in zip(starts.tolist(), stops.tolist(), ids[starts].tolist(), strict=True):
            part = target[start * size : stop * size]
            if len(part) > MAX_READ_BYTES or preadv(fd, (part,), offset + first * size) != len(part):
                self._read(part, first)

    def _fill_near(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Small rows that lie close together: those between are read, too, and left out."""
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
