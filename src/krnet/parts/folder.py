"""A folder of parts on disk: what is there, what may be read, and the manifest that is made of it.

    DIR/ -> read_manifest -> Manifest; parts are looked at, none is opened
    DIR/ -> list_parts -> names
    model, parts that are there -> write_manifest -> DIR/manifest.json

Files outside the folder are never read: names follow from IDs, and links that lead out are refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from krnet.errors import InputError, NotARecordingError, TruncatedRecordingError
from krnet.io.atomic import TEMPORARY_END, atomic_write
from krnet.io.lock import LOCK_NAME
from krnet.parts.manifest import MANIFEST, MAX_MANIFEST_BYTES, MODEL, REBUILD, Manifest, parse_manifest
from krnet.parts.part import NAME, REPAIR, Entry, Origin
from krnet.parts.sequences import SEQUENCES, Listed

OWN_NAMES = (MANIFEST, MODEL, SEQUENCES, LOCK_NAME)


def is_folder_of_parts(path: Path) -> bool:
    """Whether a path is to be opened as a folder of parts."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read_manifest(folder: Path) -> Manifest:
    """The manifest, once model and parts are found to be there in the sizes that it lists."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        parts = list_parts(folder)
        advice = (
            f"it holds {len(parts)} of the parts of a stopped `krnet encode`; give that command again with --resume"
            if parts
            else "expected a recording (.krn), or a folder that `krnet encode` wrote. Check the path"
        )
        raise NotARecordingError(f"{folder}: is a folder without {MANIFEST}; {advice}")
    size = _size_inside(folder, MANIFEST)
    if size > MAX_MANIFEST_BYTES:
        raise NotARecordingError(f"{path}: has {size} bytes; expected at most {MAX_MANIFEST_BYTES}. {REBUILD}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotARecordingError(f"{path}: cannot be read ({error.strerror}). Check its permissions") from error
    manifest = parse_manifest(path, content)
    expected_sizes = [(MODEL, manifest.model_bytes), *((part.name, part.size_bytes) for part in manifest.parts)]
    if manifest.sequences is not None:
        expected_sizes.append((SEQUENCES, manifest.sequences.size_bytes))
    for name, expected in expected_sizes:
        found = _size_inside(folder, name)
        if found != expected:
            raise TruncatedRecordingError(
                f"{folder / name}: has {found} bytes; expected {expected}, as {MANIFEST} says. {REPAIR}"
            )
    return manifest


def _size_inside(folder: Path, name: str) -> int:
    """Size of a file that lies in the folder; a link that leads out of it is refused."""
    path = folder / name
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            if path.resolve().parent != folder.resolve():
                raise NotARecordingError(
                    f"{path}: is a link to {path.resolve()}, outside the folder; expected a file. Copy it to its place"
                )
            found = os.stat(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise NotARecordingError(f"{path}: cannot be read ({error}); expected a file. {REPAIR}") from error
    if not stat.S_ISREG(found.st_mode):
        raise NotARecordingError(f"{path}: is a folder or a device; expected a file. {REPAIR}")
    return found.st_size


def list_parts(folder: Path) -> list[str]:
    """Names of the files that are called as parts are, in the order of their IDs."""
    return sorted(name for name in os.listdir(folder) if NAME.fullmatch(name))


def check_output(folder: Path) -> None:
    """Refuse a folder that holds anything but a recording in parts: nothing of ours belongs there."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"{folder}: is no folder; expected the name of a folder to write. Choose another name")
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if name not in OWN_NAMES and not NAME.fullmatch(name) and not name.endswith(TEMPORARY_END):
            raise InputError(
                f"{folder}: holds {name!r}, which is no part of a recording; expected a new or empty folder, or one "
                f"of krnet encode. Choose another folder"
            )


def write_manifest(
    folder: Path,
    origin: Origin,
    model_bytes: int,
    num_classes: int | None,
    parts: Sequence[Entry],
    sequences: Listed | None = None,
) -> Manifest:
    manifest = Manifest(origin, model_bytes, num_classes, tuple(parts), sequences)
    with atomic_write(folder / MANIFEST) as file:
        file.write(manifest.to_json().encode())
    return manifest
