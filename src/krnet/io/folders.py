"""What is in a folder, on this machine or behind a URL.

list_folder(folder) -> {name: Found}
sizes_of(folder, names) -> their sizes, None for one that is missing
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from krnet.io.places import Place, Url
from krnet.io.remote import list_names, sizes


@dataclass(frozen=True)
class Found:
    size: int | None
    """None where the store does not say it."""
    written_ns: int
    """When it was last written; 0 where the store does not say it."""


def list_folder(folder: Place) -> dict[str, Found]:
    """What is in a folder, in the order of the names; nothing if there is no such folder."""
    if isinstance(folder, Url):
        return {name: Found(size, 0) for name, size in sorted(list_names(folder).items())}
    found = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        with suppress(FileNotFoundError):  # removed meanwhile: a temporary file that has got its name
            state = os.lstat(folder / name)
            found[name] = Found(state.st_size, state.st_mtime_ns)
    return found


def sizes_of(folder: Place, names: Sequence[str]) -> list[int | None]:
    """The sizes of files of a folder; None for one that is missing, or no file."""
    if isinstance(folder, Url):
        return sizes(folder, names)
    return [_size(folder / name) for name in names]


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
