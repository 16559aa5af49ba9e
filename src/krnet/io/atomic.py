"""Files that appear whole or not at all, and never in place of what is being read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from krnet.errors import InputError

AnyPath = str | os.PathLike[str]


def refuse_overwriting(outputs: Sequence[AnyPath], inputs: Sequence[AnyPath]) -> None:
    """Each output must be a file of its own, and none of them an input."""
    taken = {Path(path).resolve() for path in inputs}
    for path in outputs:
        if Path(path).resolve() in taken:
            raise InputError(f"{path}: would be overwritten while it is in use; choose another name for the output")
        taken.add(Path(path).resolve())


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[BinaryIO]:
    """A file to write to that appears under `path` complete and on disk, or not at all."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{path}: no folder {path.parent}; create it or choose another place")
    # Renaming over a device or a pipe would destroy it, so only a file may stand there.
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is a folder or a device; expected the name of a file to write")
    # The process ID keeps two writers apart; a leftover of a killed process is at worst overwritten.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # KeyboardInterrupt too
        temporary.unlink(missing_ok=True)
        # A full disk names no file, and the temporary one is not the user's.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself must survive a power cut
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: AnyPath, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def read_json(path: AnyPath) -> dict[str, Any]:
    """A ValueError where the file holds anything but one object."""
    found = json.loads(Path(path).read_text())
    if not isinstance(found, dict):
        raise ValueError(f"a JSON {type(found).__name__}; expected an object")
    return found


def make_folder(folder: AnyPath) -> list[Path]:
    """Make it and its parents where they are missing; those that were made, deepest first."""
    folder = Path(folder)
    line = (folder, *folder.parents)
    missing = [path for path in line if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        found = next(path for path in line if os.path.lexists(path))
        raise InputError(f"{found}: is not a folder, and one is to be written to; choose another place") from error
    return missing
