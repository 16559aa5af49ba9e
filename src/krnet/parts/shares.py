"""A folder of parts that several processes write: which parts are missing, and the entries of all once they are there.

    processes with share k of n -> each n-th part -> missing_parts -> collect -> the manifest

Processes do not talk to each other. Each looks at the folder when its parts are written; since parts appear whole, the
last one to do so finds all of them. The manifest follows from them alone, so two that write it write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from krnet.errors import ResumeError
from krnet.io.folders import list_folder
from krnet.io.places import Place
from krnet.parts.part import Entry, Origin, open_part, part_name

NUM_NAMED = 3  # parts in a message
Range = tuple[int, int]
"""(first, stop): the IDs of a part."""


def name_of(part: Range) -> str:
    first, stop = part
    return part_name(first, stop - first)


def missing_parts(folder: Place, plan: Sequence[Range]) -> tuple[str, int]:
    """Which parts are missing, in words, "" if none is; and how many."""
    there = list_folder(folder)
    missing = [name for name in map(name_of, plan) if name not in there]
    more = f" and {len(missing) - NUM_NAMED} more" if len(missing) > NUM_NAMED else ""
    return ", ".join(missing[:NUM_NAMED]) + more, len(missing)


def collect(folder: Place, plan: Sequence[Range], origin: Origin) -> tuple[list[Entry], set[int]]:
    """What the parts say of themselves, and the classes of their samples."""
    entries, class_names = list[Entry](), set[int]()
    for name in map(name_of, plan):
        part = open_part(folder, name)
        if part.origin != origin:
            raise ResumeError(
                f"{folder / name}: is a part of {part.origin}; expected one of {origin}. Do all processes get the same "
                f"model and features? Remove it, and encode again with --resume, which makes what is missing"
            )
        entries.append(part.entry)
        class_names.update([] if part.labels is None else part.labels.unique().tolist())
    return entries, class_names
