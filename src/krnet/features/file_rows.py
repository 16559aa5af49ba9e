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
from krnet.io.rows import RowReader

NUM_SAMPLED, SAMPLED_BYTES = 64, 16 << 10  # blocks of a file by which its content is known again

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

    def ended(self) -> ChangedFeaturesError:
        return self._shortened(os.fstat(self.fd).st_size)


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
        self.file, self.dtype = file, dtype
        self.reader = RowReader(file.fd, offset, math.prod(full_shape[1:]) * dtype.itemsize, file.ended)
        self.end = offset + full_shape[0] * self.reader.row_bytes

    def fill(self, target: np.ndarray, ids: np.ndarray) -> None:
        """Write row ids[i] to target[i]; target (B, *shape) is contiguous and of the stored dtype, in native order."""
        if not len(ids):
            return
        self.reader.fill(target.reshape(len(ids), -1).view(np.uint8), ids)
        if not self.dtype.isnative:
            target.byteswap(inplace=True)
