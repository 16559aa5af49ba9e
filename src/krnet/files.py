"""Files that appear whole or not at all, and never in place of what is being read; folders for one process at a time.

with atomic_write(path) as file: ...
with working_in(folder): ...
"""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from krnet.errors import BusyFolderError, InputError

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

AnyPath = str | os.PathLike[str]
LOCK = ".lock"


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


@contextmanager
def working_in(folder: AnyPath) -> Iterator[None]:
    """A folder, made if missing, for this process alone: another gets a BusyFolderError until this one is done.

    The lock is the kernel's, so it ends with the process, in whatever way that ends. Where the system or the drive has
    no locks there is none. A folder that was made, and nothing written to it, is removed again.
    """
    folder = Path(folder)
    made = make_folder(folder)
    try:
        lock = _lock(folder)
        try:
            yield
        finally:
            if lock is not None:
                (folder / LOCK).unlink(missing_ok=True)  # still locked: nobody else's
                os.close(lock)
    finally:
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def _lock(folder: Path) -> int | None:
    """An open file that is locked until it is closed."""
    path = folder / LOCK
    while fcntl is not None:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process had made the folder, wrote nothing and removed it
            make_folder(folder)
            continue
        except OSError:
            if os.access(folder, os.W_OK):
                raise
            return None  # a finished run, to be read: nothing can be written here
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(lock, 200).decode(errors="replace").strip()
            os.close(lock)
            raise BusyFolderError(
                f"{folder}: another process{f' (PID {owner})' if owner else ''} is at work here. Wait until it has "
                f"ended, or choose another folder"
            ) from error
        except OSError:
            pass  # a drive without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                with suppress(OSError):  # a full disk: then nobody is told the PID
                    os.truncate(lock, 0)
                    os.write(lock, f"{os.getpid()} on {platform.node()}\n".encode())
                return lock
        os.close(lock)  # its owner ended, and removed it, between the two steps
    return None
