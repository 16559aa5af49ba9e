"""A file that is read by ranges, wherever it is.

open_ranged(path or URL) -> LocalFile or RemoteFile: size, read(position, size)
"""

from __future__ import annotations

import os
from pathlib import Path

from krnet.io.places import Place, Url
from krnet.io.remote import RemoteFile


class LocalFile:
    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def state(self) -> tuple[int, ...]:
        """Another one if the file has changed: device, inode, size, time of the last change."""
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def read(self, position: int, size: int) -> bytes:
        """The bytes from a position on; fewer where the file ends."""
        return os.pread(self.fd, size, position)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


RangedFile = LocalFile | RemoteFile


def open_ranged(where: Place, size: int | None = None) -> RangedFile:
    """size: of a file behind a URL, where it is known"""
    return RemoteFile(where, size) if isinstance(where, Url) else LocalFile(where)
