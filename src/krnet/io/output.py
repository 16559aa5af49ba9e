"""Write a file whole or not at all, to a path on this machine or to a URL.

with output(path or URL) as file: ...   ->  a temporary file on this machine  --rename, or upload-->  the place
copy(path or URL, path or URL)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from krnet.io.atomic import atomic_write
from krnet.io.places import Place, Url
from krnet.io.ranged import open_ranged
from krnet.io.remote import put

COPY_BYTES = 16 << 20  # held in memory


def copy(source: Place, target: Place) -> None:
    with open_ranged(source) as file, output(target) as copied:
        for begin in range(0, file.size, COPY_BYTES):
            copied.write(file.read(begin, COPY_BYTES))


@contextmanager
def output(where: Place) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears in its place when it is complete, or never."""
    if not isinstance(where, Url):
        with atomic_write(where) as file:
            yield file
        return
    with tempfile.NamedTemporaryFile(prefix="krnet-") as upload:
        yield cast(BinaryIO, upload.file)
        upload.file.flush()
        put(where, upload.name)
