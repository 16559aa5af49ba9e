"""Write files that appear complete or not at all; and read and write JSON, make folders.

with atomic_write(path) as file: ...  ->  a temporary file --fsync, rename--> path
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from krnet.errors import InputError

AnyPath = str | os.PathLike[str]
MKDIR_ATTEMPTS = 100  # others come and go; where a folder can never be made (/proc), it ends


def refuse_overwriting(outputs: Sequence[AnyPath], inputs: Sequence[AnyPath]) -> None:
    """Refuse outputs that are an input, or that name the same file twice."""
    used = {Path(path).resolve() for path in inputs}
    for path in outputs:
        if Path(path).resolve() in used:
            raise InputError(f"{path}: would be overwritten while it is in use; choose another name for the output")
        used.add(Path(path).resolve())


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears under `path` when it is complete and on disk, or never."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{path}: no folder {path.parent}; create it or choose another place")
    # Renaming over a device or a pipe would destroy it.
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is a folder or a device; expected the name of a file to write")
    # The process ID separates two writers. A killed process leaves its file behind; it may be overwritten.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # KeyboardInterrupt too
        temporary.unlink(missing_ok=True)
        # The error of a full disk names no file, others name the temporary one: name the user's file instead.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # fsync of the folder: the new name, too, must survive a power cut
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: AnyPath, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def read_json(path: AnyPath) -> dict[str, Any]:
    """Read a JSON object; a ValueError says that the file holds something else."""
    found = json.loads(Path(path).read_text())
    if not isinstance(found, dict):
        raise ValueError(f"a JSON {type(found).__name__}; expected an object")
    return found


def make_folder(folder: AnyPath) -> list[Path]:
    """Make it and its parents where they are missing; those that were made, deepest first."""
    folder = Path(folder)
    line = (folder, *folder.parents)
    missing = set[Path]()
    for attempts_left in reversed(range(MKDIR_ATTEMPTS)):
        missing |= {path for path in line if not path.exists()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            break
        except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
            for path in line:
                if _is_something_else(path):
                    raise InputError(
                        f"{path}: is not a folder, and one is to be written to; choose another place"
                    ) from error
            # Else someone removed the folder, or a parent of it, while it was being made.
            if not attempts_left:
                raise
    return [path for path in line if path in missing]


def _is_something_else(path: Path) -> bool:
    """Something other than a folder stands there. One look: between two, a folder may be removed or made."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False  # nothing there, or something else further up
    return not stat.S_ISDIR(mode) and not path.is_dir()  # a link to a folder is as good as a folder
