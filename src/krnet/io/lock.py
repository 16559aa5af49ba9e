"""Locks of the kernel, which end with their process: a file's, and a folder for one process at a time."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from krnet.errors import BusyFolderError
from krnet.io.atomic import AnyPath, make_folder

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


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


def lock_file(fd: int, *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file until it is closed; without locks on this system nothing happens."""
    if fcntl is not None:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


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
            lock_file(lock, wait=False)
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
