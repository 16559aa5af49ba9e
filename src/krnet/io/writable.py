"""Whether an output can be written, found out before the work whose result it is to hold.

path, planned bytes -> check_writable -> nothing, or the error that says what stands in the way
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from krnet.config import format_size
from krnet.errors import InputError
from krnet.io.atomic import AnyPath, make_temporary
from krnet.io.places import is_url, place

NAME_BYTES = 255  # of a file's name, where the system does not say


def check_name(path: AnyPath) -> Path:
    """Refuse a name that no file can have."""
    text = os.fspath(path)
    if not text:
        raise InputError("the name of the output is empty; expected the name of a file or folder to write")
    if "\0" in text:
        raise InputError(f"{text!r}: no file can have a name with a zero byte; choose another name for the output")
    if is_url(text):
        raise InputError(f"{place(text)}: is a URL; expected a place on this machine: write it here, and copy it")
    path = Path(text)
    _check_length(path, "")
    return path


def _check_length(path: Path, ending: str) -> None:
    try:
        limit = os.pathconf(path.parent, "PC_NAME_MAX")
    except (OSError, ValueError, AttributeError):
        limit = NAME_BYTES
    length = len(os.fsencode(path.name + ending))
    if length > limit:
        where = f" with the {ending} of the file beside it" if ending else ""
        raise InputError(f"{path}: its name takes {length} bytes{where}; {limit} are allowed. Choose a shorter name")


def check_writable(path: AnyPath, *, num_bytes: int = 0, longest_ending: str = "") -> None:
    """Refuse a file that could not be written, by trying to make one beside it.

    num_bytes       that the file will take, at least
    longest_ending  of the names of further files beside it, such as .ckpt
    """
    path = check_name(path)
    _check_length(path, longest_ending)
    try:
        temporary, descriptor = make_temporary(path)
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); choose another place for the output"
        ) from error
    check_room(path, num_bytes)


def check_room(path: AnyPath, num_bytes: int) -> None:
    """Refuse a file that the drive has no room for."""
    free = shutil.disk_usage(Path(path).parent).free
    if num_bytes > free:
        raise InputError(
            f"{path}: will take {format_size(num_bytes)}, and {format_size(free)} are free there; make room, or choose "
            f"another place for the output"
        )
