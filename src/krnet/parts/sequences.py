"""Lengths of the sequences of a folder, in a file of their own, since a sequence may lie in several parts.

    place_lengths(folder, lengths) -> DIR/sequences.krn -> Listed, what the manifest says of it
    read_lengths(folder, Listed)   -> lengths (S,)

Nothing in the file depends on when or where it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
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
KIND = "sequences"


@dataclass(frozen=True)
class Listed:
    """The manifest's entry of the file."""

    num_sequences: int
    size_bytes: int
    digest: str
    """Checksum of its header, which holds the checksum of the lengths."""

    def to_json(self) -> dict[str, Any]:
        return {"name": SEQUENCES, "number": self.num_sequences, "size_bytes": self.size_bytes, "digest": self.digest}


def parse_listed(where: object, value: Any) -> Listed:
    match value:
        case {"name": str(name), "number": number, "size_bytes": size, "digest": digest} if (
            len(value) == 4 and name == SEQUENCES and is_count(number) and number > 0 and is_count(size)
            and is_digest(digest)
        ):  # fmt: skip
            return Listed(number, size, digest)
    raise NotARecordingError(f"{where}: the entry of {SEQUENCES} is {value!r:.200}; expected that of a file. {REPAIR}")


def place_lengths(folder: Place, lengths: Tensor | None) -> Listed | None:
    """Write the lengths, or find them there; refuse a folder of other sequences."""
    path = folder / SEQUENCES
    if SEQUENCES not in list_folder(folder):
        if lengths is None:
            return None
        archive.write(path, pack_lengths(lengths), {"kind": KIND})
    kept = archive.open_archive(path)
    if lengths is None or not torch.equal(_stored(kept).long(), lengths):
        raise ResumeError(
            f"{path}: holds the lengths of other sequences than these. Give the same lengths as before, or choose "
            f"another folder"
        )
    return Listed(len(lengths), kept.nbytes, kept.checksum)


def read_lengths(folder: Place, listed: Listed, num_samples: int, max_bytes: int | None = None) -> Tensor:
    """The lengths (S,) int64, once they are found to be those that the manifest lists."""
    kept = archive.open_archive(folder / SEQUENCES, max_bytes)
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
