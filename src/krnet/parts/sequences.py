"""Lengths of the sequences of a folder, in a file of their own, since a sequence may lie in several parts.

    place_lengths(folder, lengths) -> DIR/sequences.krn -> Listed, what the manifest says of it
    read_lengths(folder, Listed)   -> lengths (S,)

When sequences are appended, the lengths of all get a file beside the old one, until the manifest lists the new one.
Nothing in a file depends on when or where it was written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from krnet.errors import ChecksumError, NotARecordingError, ResumeError
from krnet.features.sequences import LENGTHS, pack_lengths, unpack_lengths
from krnet.io import archive
from krnet.io.folders import list_folder
from krnet.io.places import Place
from krnet.parts.part import REPAIR, is_count, is_digest

SEQUENCES = "sequences.krn"
NAME = re.compile(r"sequences(-\d{12})?\.krn")
KIND = "sequences"


def sequences_name(num_samples: int) -> str:
    """The file with the lengths of the sequences of a folder that has grown to so many samples."""
    return f"sequences-{num_samples:012d}.krn"


@dataclass(frozen=True)
class Listed:
    """The manifest's entry of the file."""

    num_sequences: int
    size_bytes: int
    digest: str
    """Checksum of its header, which holds the checksum of the lengths."""
    name: str = SEQUENCES

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "number": self.num_sequences, "size_bytes": self.size_bytes, "digest": self.digest}


def parse_listed(where: object, value: Any) -> Listed:
    match value:
        case {"name": str(name), "number": number, "size_bytes": size, "digest": digest} if (
            len(value) == 4 and NAME.fullmatch(name) and is_count(number) and number > 0 and is_count(size)
            and is_digest(digest)
        ):  # fmt: skip
            return Listed(number, size, digest, name)
    raise NotARecordingError(f"{where}: the entry of {SEQUENCES} is {value!r:.200}; expected that of a file. {REPAIR}")


def place_lengths(folder: Place, lengths: Tensor | None, name: str = SEQUENCES) -> Listed | None:
    """Write the lengths, or find them there; refuse a folder of other sequences."""
    path = folder / name
    if name not in list_folder(folder):
        if lengths is None:
            return None
        archive.write(path, pack_lengths(lengths), {"kind": KIND})
    kept = archive.open_archive(path)
    if lengths is None or not torch.equal(_stored(kept).long(), lengths):
        raise ResumeError(
            f"{path}: holds the lengths of other sequences than these. Give the same lengths as before, or choose "
            f"another folder"
        )
    return Listed(len(lengths), kept.nbytes, kept.checksum, name)


def forget_lengths(folder: Place, listed: Listed | None) -> None:
    """Remove files of lengths that the manifest does not list any more. In a store they stay: they are small."""
    if isinstance(folder, Path) and listed is not None:
        for name in list_folder(folder):
            if NAME.fullmatch(name) and name != listed.name:
                (folder / name).unlink(missing_ok=True)


def read_lengths(folder: Place, listed: Listed, num_samples: int, max_bytes: int | None = None) -> Tensor:
    """The lengths (S,) int64, once they are found to be those that the manifest lists."""
    kept = archive.open_archive(folder / listed.name, max_bytes)
    if kept.checksum != listed.digest:
        raise ChecksumError(f"{kept.path}: is not the file that the manifest lists. {REPAIR}")
    lengths = unpack_lengths(_stored(kept), num_samples, kept.path)
    if lengths is None or len(lengths) != listed.num_sequences:
        raise NotARecordingError(f"{kept.path}: holds another number of sequences than the manifest lists. {REPAIR}")
    return lengths


def _stored(kept: archive.Archive) -> Tensor:
    if kept.metadata.get("kind") != KIND or kept.names != (LENGTHS,):
        raise NotARecordingError(f"{kept.path}: is no file of sequences; expected their lengths alone. {REPAIR}")
    return kept.tensor(LENGTHS)
