"""What each command reads and writes; a command whose output is one of its inputs is refused before it begins.

    command, outputs, inputs -> refuse_overlap -> nothing, or the error that names both

Two names mean one file if they lead to it, through symbolic or hard links. An output must not lie in a folder that is
read, such as a zarr store. Beside its output a command writes further files, such as OUT.krn.ckpt: they count, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from krnet.errors import InputError
from krnet.io.places import is_url
from krnet.io.writable import check_name


@dataclass(frozen=True)
class Writes:
    """What a command writes, beside the files that it is told to."""

    beside: tuple[str, ...] = ()
    """Endings of further files: OUT + ending."""
    inside: tuple[str, ...] = ()
    """Its output is a folder, where it writes files of these names, at any depth."""
    may_lie_in_inputs: bool = False
    """Its output may lie in a folder that is read, as the page of a run does."""


CHECKPOINT_ENDING, PARTIAL_ENDING, PARTIAL_RECORD_ENDING = ".ckpt", ".partial", ".partial.json"
RUN_FILES = (
    "settings.json", "run.json", "state.krn", "base.krn", "later-*.krn", "recording-*.krn", "*.krn.ckpt",
    "task-*.partial", "task-*.done",
)  # fmt: skip
WRITES: Mapping[str, Writes] = {
    "record": Writes(beside=(CHECKPOINT_ENDING,)),
    "append": Writes(),
    "save": Writes(),
    "replay": Writes(),
    "verify": Writes(),
    "extract": Writes(beside=(PARTIAL_ENDING, PARTIAL_RECORD_ENDING)),
    "encode": Writes(inside=("model.krn", "sequences*.krn", "part-*.krn", "manifest.json", ".lock")),
    "extract shards": Writes(inside=("index.json", "shard-*.safetensors")),
    "learn": Writes(inside=(*RUN_FILES, ".lock", "events.out.tfevents.*")),
    "bench rate": Writes(inside=("rate.json", "rate.png", "features.json", "points", "*.krn", "*.krn.ckpt")),
    "report": Writes(may_lie_in_inputs=True),
}


def refuse_overlap(command: str, outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Refuse outputs that are inputs, or lie in a folder that is an input, or name the same file twice.

    inputs  values as the caller gives them: paths, memory maps, HDF5 and zarr arrays, recordings; what has no file is
            left out
    """
    writes = WRITES[command]
    sources = [path for given in inputs for path in files_of(given)]
    targets: list[Path] = []
    for given in outputs:
        if given is None:
            continue
        out = check_name(given)
        for path in (out, *(out.with_name(out.name + ending) for ending in writes.beside if out.name)):
            if any(same(path, other) for other in targets):
                raise InputError(f"{path}: would be overwritten by another output; choose another name for one of them")
            for source in sources:
                _refuse(path, source, writes)
            targets.append(path)


def _refuse(path: Path, source: Path, writes: Writes) -> None:
    if same(path, source):
        name = "" if str(path) == str(source) else f", which is {source},"
        raise InputError(f"{path}{name}: would be overwritten while it is in use; choose another name for the output")
    if source.is_dir() and not writes.may_lie_in_inputs and lies_in(path, source):
        raise InputError(f"{path}: lies in {source}, which is read; choose another place for the output")
    if writes.inside and lies_in(source, path):
        parts = Path(os.path.relpath(source.resolve(), path.resolve())).parts
        if any(fnmatch(part, pattern) for part in parts for pattern in writes.inside):
            raise InputError(
                f"{source}: is read, and lies in the folder {path}, where a file of this name is written; choose "
                f"another folder for the output"
            )


def same(path: Path, other: Path) -> bool:
    """Whether two names lead to one file or folder, which may not exist yet."""
    try:
        if os.path.samestat(os.stat(path), os.stat(other)):
            return True
    except (OSError, ValueError):
        pass
    return _resolved(path) == _resolved(other)


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path, which may not exist yet, lies below a folder."""
    return any(same(parent, folder) for place in {path.absolute(), _resolved(path)} for parent in place.parents)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, a loop of links
        return path.absolute()


def files_of(value: Any) -> Iterator[Path]:
    """The files behind a value that a caller gives: a path, or an object that knows its own."""
    if is_url(value):
        return
    if isinstance(value, str | os.PathLike):
        yield Path(value)
        return
    if isinstance(value, dict):
        for item in value.values():
            yield from files_of(item)
        return
    candidates = [
        getattr(value, "filename", None),  # numpy.memmap, h5py.File
        getattr(getattr(value, "file", None), "filename", None),  # h5py.Dataset
        getattr(value, "path", None) if hasattr(value, "replay") else None,  # Recording
        getattr(getattr(value, "store", None), "root", None),  # zarr.Array
        getattr(value, "files", None),  # FeatureSource
    ]
    base = getattr(value, "base", None)  # of an array: a view of a memory map may have lost its name
    if base is not None and base is not value and hasattr(value, "dtype"):
        yield from files_of(base)
    for candidate in candidates:
        for path in candidate if isinstance(candidate, list | tuple) else [candidate]:
            if isinstance(path, str | os.PathLike) and str(path) and not is_url(path):
                yield Path(path)
