"""Lock a file, or a folder for one process at a time.

    with working_in(folder): ...     ->  another process that tries the same gets a BusyFolderError
                                         (together=True: only one that does not try it so)
    with making(path): ...           ->  another process that tries the same waits

The locks are the kernel's (flock): they end with their process, even if it is killed. Where the system or the drive
has no locks, nothing is locked.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from krnet.errors import BusyFolderError, InputError
from krnet.io.atomic import AnyPath, make_folder
from krnet.io.flock import HAS_LOCKS
from krnet.io.flock import lock_file as lock_file

LOCK_NAME = ".lock"
LOCK_CONTENT = re.compile(r"(\d+ on .*\n)?")
LEAVING_S = 1.0  # more than the last of several processes needs to remove the lock


@contextmanager
def working_in(folder: AnyPath, *, together: bool = False) -> Iterator[None]:
    """Reserve a folder for this process: another gets a BusyFolderError until this one leaves the `with` block.

    A missing folder is made. If it is still empty at the end, it is removed again. Processes that share their work
    enter it `together`, and keep others out.
    """
    folder = Path(folder)
    made = make_folder(folder)
    try:
        lock_fd = _lock_folder(folder, together)
        try:
            yield
        finally:
            if lock_fd is not None:
                if not together or _is_alone(lock_fd):
                    (folder / LOCK_NAME).unlink(missing_ok=True)  # while it is locked: no other process owns it
                os.close(lock_fd)
    finally:
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


@contextmanager
def making(path: Path) -> Iterator[None]:
    """Be the only process that makes a file; others wait, and should look whether it is there when they go on."""
    make_folder(path.parent)
    lock = path.with_name(f"{path.name}{LOCK_NAME}")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):  # a drive without locks
            lock_file(fd)
        yield
        if path.exists():
            lock.unlink(missing_ok=True)  # nobody needs it any more: who waits finds the file
    finally:
        os.close(fd)


def _is_alone(lock_fd: int) -> bool:
    """Whether no other process has a lock that several may have."""
    try:
        lock_file(lock_fd, wait=False)
    except BlockingIOError:
        return False
    except OSError:  # a drive without locks
        pass
    return True


def _lock_folder(folder: Path, together: bool) -> int | None:
    """Return the descriptor of the folder's lock file, locked until it is closed; None if there can be no lock."""
    path, started_s = folder / LOCK_NAME, time.monotonic()
    while HAS_LOCKS:
        try:
            lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process made the folder, wrote nothing, and removed it meanwhile
            make_folder(folder)
            continue
        except OSError:
            if os.access(folder, os.W_OK):
                raise
            return None  # a read-only folder, as of a finished run: no process can write here
        try:
            lock_file(lock_fd, shared=together, wait=False)
        except BlockingIOError as error:
            if together and time.monotonic() - started_s < LEAVING_S:
                os.close(lock_fd)
                time.sleep(0.02)
                continue
            owner = os.read(lock_fd, 200).decode(errors="replace").strip()
            os.close(lock_fd)
            raise BusyFolderError(
                f"{folder}: another process{f' (PID {owner})' if owner else ''} is at work here. Wait until it has "
                f"ended, or choose another folder"
            ) from error
        except OSError:
            pass  # a drive without locks
        content = os.pread(lock_fd, 1000, 0).decode(errors="replace")
        if not LOCK_CONTENT.fullmatch(content):
            os.close(lock_fd)
            raise InputError(
                f"{path}: holds {content!r:.60}, and this name is that of the lock of the folder; choose another "
                f"folder, or rename the file"
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock_fd), os.stat(path)):
                with suppress(OSError):  # a full disk: then BusyFolderError names no PID
                    os.truncate(lock_fd, 0)
                    if not together:
                        os.write(lock_fd, f"{os.getpid()} on {platform.node()}\n".encode())
                return lock_fd
        os.close(lock_fd)  # its owner removed it after it was opened here: the lock is void, try again
    return None
