"""A temporary folder that lives as long as the object that needs it."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path


class TemporaryFolder:
    """A new folder, removed when this object is garbage-collected or Python ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="krnet-"))
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the same objects, but not the right to remove their files
        shutil.rmtree(folder, ignore_errors=True)
