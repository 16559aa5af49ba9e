"""A folder of parts, on disk or behind a URL: what is there, what may be read, and the manifest that is made of it.

    DIR/ -> read_manifest -> Manifest; parts are looked at, none is opened
    DIR/ -> list_parts -> names
    manifest -> write_manifest -> DIR/manifest.json

Files outside the folder are never read: names follow from IDs, and links that lead out are refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from krnet.errors import InputError, NotARecordingError, StoreError, TruncatedRecordingError
from krnet.features.shards.index import INDEX_NAME
from krnet.io.atomic import TEMPORARY_END, AnyPath
from krnet.io.folders import list_folder, sizes_of
from krnet.io.lock import LOCK_NAME
from krnet.io.output import output
from krnet.io.places import Place, Url, place
from krnet.io.ranged import open_ranged
from krnet.parts.manifest import MANIFEST, MAX_MANIFEST_BYTES, MODEL, REBUILD, Manifest, parse_manifest
from krnet.parts.part import NAME, REPAIR
from krnet.parts.sequences import NAME as SEQUENCES_NAME

OWN_NAMES = ("", MANIFEST, MODEL, LOCK_NAME)  # some stores list a folder itself, without a name
RECORDING_END = ".krn"


def is_folder_of_parts(given: AnyPath | Url) -> bool:
    """Whether a path or a URL is to be opened as a folder of parts."""
    where = place(given)
    try:
        if isinstance(where, Path):
            return where.is_dir()
        if where.suffix != RECORDING_END:
            return sizes_of(where, [MANIFEST])[0] is not None
    except (OSError, ValueError, StoreError):
        pass  # opening it as a file says what is wrong
    return False


def read_manifest(folder: Place) -> Manifest:
    """The manifest, once model and parts are found to be there in the sizes that it lists."""
    path = folder / MANIFEST
    if isinstance(path, Path):
        _refuse_missing(path)
    with open_ranged(path) as file:
        if file.size > MAX_MANIFEST_BYTES:
            raise NotARecordingError(f"{path}: has {file.size} bytes; expected at most {MAX_MANIFEST_BYTES}. {REBUILD}")
        manifest = parse_manifest(path, file.read(0, file.size))
    expected = {MODEL: manifest.model_bytes, **{part.name: part.size_bytes for part in manifest.parts}}
    if manifest.sequences is not None:
        expected[manifest.sequences.name] = manifest.sequences.size_bytes
    if isinstance(folder, Path):
        found = [_size_inside(folder / name) for name in expected]
    else:
        found = sizes_of(folder, list(expected))
    for (name, size), size_found in zip(expected.items(), found, strict=True):
        if size_found is None:
            raise NotARecordingError(f"{folder / name}: is missing; expected {size} bytes. {REPAIR}")
        if size_found != size:
            raise TruncatedRecordingError(
                f"{folder / name}: has {size_found} bytes; expected {size}, as {MANIFEST} says. {REPAIR}"
            )
    return manifest


def _refuse_missing(path: Path) -> None:
    """Refuse a folder without manifest, and a manifest that is no file of the folder."""
    if not os.path.lexists(path):
        if (path.parent / INDEX_NAME).is_file():
            raise NotARecordingError(
                f"{path.parent}: holds features in shards; expected a recording. Make one with `krnet record` or "
                f"`krnet encode`"
            )
        num_parts = len(list_parts(path.parent))
        advice = (
            f"it holds {num_parts} of the parts of a stopped `krnet encode`; give that command again with --resume"
            if num_parts
            else "expected a recording (.krn), or a folder that `krnet encode` wrote. Check the path"
        )
        raise NotARecordingError(f"{path.parent}: is a folder without {MANIFEST}; {advice}")
    _size_inside(path)
    if not os.access(path, os.R_OK):
        raise NotARecordingError(f"{path}: cannot be read. Check its permissions")


def _size_inside(path: Path) -> int | None:
    """Size of a file; None if it is missing. A link that leads out of the folder is refused."""
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            if path.resolve().parent != path.parent.resolve():
                raise NotARecordingError(
                    f"{path}: is a link to {path.resolve()}, outside the folder; expected a file. Copy it to its place"
                )
            found = os.stat(path)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise NotARecordingError(f"{path}: cannot be read ({error}); expected a file. {REPAIR}") from error
    if not stat.S_ISREG(found.st_mode):
        raise NotARecordingError(f"{path}: is a folder or a device; expected a file. {REPAIR}")
    return found.st_size


def list_parts(folder: Place) -> list[str]:
    """Names of the files that are called as parts are, in the order of their IDs."""
    return [name for name in list_folder(folder) if NAME.fullmatch(name)]


def check_output(folder: Place) -> None:
    """Refuse a folder that holds anything but a recording in parts: nothing of ours belongs there."""
    if isinstance(folder, Path) and os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"{folder}: is no folder; expected the name of a folder to write. Choose another name")
    for name in list_folder(folder):
        is_own = name in OWN_NAMES or NAME.fullmatch(name) or SEQUENCES_NAME.fullmatch(name)
        if not is_own and not name.endswith(TEMPORARY_END):
            raise InputError(
                f"{folder}: holds {name!r}, which is no part of a recording; expected a new or empty folder, or one "
                f"of krnet encode. Choose another folder"
            )


def write_manifest(folder: Place, manifest: Manifest) -> None:
    with output(folder / MANIFEST) as file:
        file.write(manifest.to_json().encode())
