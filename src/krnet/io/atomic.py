"""Write files that appear complete or not at all; and read and write JSON, make folders.

with atomic_write(path) as file: ...  ->  a temporary file --fsync, rename--> path
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from krnet.errors import InputError
from krnet.io.flock import HAS_LOCKS, lock_file

AnyPath = str | os.PathLike[str]
TEMPORARY_END = ".tmp"
TEMPORARY_OWNER = re.compile(r".*-\d+-[0-9a-f]{16}")  # host, process, random digits
TEMPORARY_NAME_BYTES = 128  # of the name of the output; with owner and end it stays below the 255 of most drives
MKDIR_ATTEMPTS = 100  # others come and go; where a folder can never be made (/proc), it ends


def check_place(path: Path) -> None:
    """Refuse a place where no file can be written. Renaming over a device or a pipe would destroy it."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: no folder {path.parent}; create it or choose another place")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is a folder or a device; expected the name of a file to write")


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears under `path` when it is complete and on disk, or never."""
    path = Path(path)
    check_place(path)
    remove_leftovers(path)
    temporary, descriptor = make_temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)  # while it is locked: no other process takes it for a leftover
    except BaseException as error:  # KeyboardInterrupt too
        temporary.unlink(missing_ok=True)
        # The error of a full disk names no file, others name the temporary one: name the user's file instead.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk: a new name, too, must survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------ temporary names


def make_temporary(path: Path) -> tuple[Path, int]:
    """Make an empty file of a new, random name in the folder of `path`, locked until its descriptor is closed.

    The name carries host and process for whoever finds it; the lock alone tells whether its writer lives, since
    containers number their processes alike.
    """
    while True:
        owner = f"{platform.node()[:32].replace('/', '_')}-{os.getpid()}-{secrets.token_hex(8)}"
        temporary = path.with_name(f"{_temporary_start(path.name)}{owner}{TEMPORARY_END}")
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        try:
            lock_file(descriptor, wait=False)
            if os.path.samestat(os.fstat(descriptor), os.stat(temporary)):
                return temporary, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # between making and locking, another process took it for a leftover
        except OSError:
            return temporary, descriptor  # a drive without locks
        os.close(descriptor)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of writers of `path` that were killed; those of living ones stay."""
    start = _temporary_start(path.name)
    with suppress(OSError):  # a folder that cannot be listed: what was to be written may still be
        for name in os.listdir(path.parent):
            owner = name[len(start) : -len(TEMPORARY_END)]
            if name.startswith(start) and name.endswith(TEMPORARY_END) and TEMPORARY_OWNER.fullmatch(owner):
                _remove_if_dead(path.parent / name)


def _remove_if_dead(temporary: Path) -> None:
    if not HAS_LOCKS:
        return
    with suppress(OSError):  # its writer lives, or has just finished; or the drive has no locks
        descriptor = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock_file(descriptor, wait=False)
            if os.path.samestat(os.fstat(descriptor), os.stat(temporary)):
                temporary.unlink()
        finally:
            os.close(descriptor)


def _temporary_start(name: str) -> str:
    """What temporary names of a file begin with; a digest stands for a long name."""
    encoded = os.fsencode(name)
    if len(encoded) > TEMPORARY_NAME_BYTES:
        name = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    return f".{name}."


# ------------------------------------------------------------------ JSON, folders


def write_json(path: AnyPath, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def read_json(path: AnyPath) -> dict[str, Any]:
    """Read a JSON object; a ValueError says that the file holds something else."""
    try:
        found = json.loads(Path(path).read_text())
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
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
