"""One part: the coded samples of an ID range, in a file that needs the model beside it.

    write_part(folder, first, samples, symbols, measured) -> part-FIRST-LAST.krn
    open_part(folder, name) -> Part: entry (what the manifest says of it), labels, and the tensors of its symbols

The file is an archive as a recording is (krnet.io.archive): it appears whole or not at all, and every read is checked.
Nothing in it depends on when or where it was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from torch import Tensor

from krnet.config import from_dict
from krnet.errors import InputError, NotARecordingError
from krnet.features.metrics import Moments
from krnet.features.samples import Samples
from krnet.io import archive
from krnet.io.header import NO_DIGEST
from krnet.io.places import Place
from krnet.io.stored_rows import BLOCK_BYTES, RESIDENT_BYTES
from krnet.parts.misfits import NUM_LISTED, Misfits

KIND = "part"
NAME = re.compile(r"part-(\d{12})-(\d{12})\.krn")
MAX_SAMPLES = 10**12  # what a name has digits for
REPAIR = "Restore it from a copy; or remove it and encode again with --resume, which makes what is missing"


def part_name(first: int, num_samples: int) -> str:
    """part-FIRST-LAST.krn, with the IDs of its first and last sample."""
    return f"part-{first:012d}-{first + num_samples - 1:012d}.krn"


@dataclass(frozen=True)
class Measured:
    """What was measured when samples were coded."""

    moments: Moments
    """Of the normalised features, and the error of their replays."""
    num_zeros: int
    misfits: Misfits

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.moments + other.moments, self.num_zeros + other.num_zeros, self.misfits + other.misfits)


@dataclass(frozen=True)
class Origin:
    """What the parts of a folder have in common."""

    model: str
    """Fingerprint of the model."""
    shape: tuple[int, ...]
    dtype: str
    """That of the features."""
    has_labels: bool


@dataclass(frozen=True)
class Entry:
    """What the manifest says of a part; all of it follows from the part's own header."""

    first: int
    """ID of its first sample."""
    num_samples: int
    size_bytes: int
    """Of its file."""
    digest: str
    """Checksum of its header, which holds the checksums of all its values."""
    features: str
    """Digest of the features that were coded."""
    measured: Measured

    @property
    def name(self) -> str:
        return part_name(self.first, self.num_samples)

    @property
    def stop(self) -> int:
        return self.first + self.num_samples

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class Part:
    """An opened part."""

    entry: Entry
    origin: Origin
    kept: archive.Archive
    labels: Tensor | None
    """(n,) int64"""


def write_part(
    folder: Place, origin: Origin, entry: Entry, labels: Tensor | None, tensors: Mapping[str, Tensor]
) -> Entry:
    """Write a part and return its entry; size and digest of the one that is given do not matter."""
    described, label_tensors = Samples(entry.num_samples, origin.shape, labels).describe()
    metadata = {
        "kind": KIND,
        "model": origin.model,
        "feature_dtype": origin.dtype,
        "first": entry.first,
        **described,
        "features": entry.features,
        "measured": asdict(entry.measured),
    }
    # As for rows that are made (io/stored_rows.py): large tensors are read, and checked, in blocks.
    blocks = {name: BLOCK_BYTES for name, tensor in tensors.items() if tensor.nbytes > RESIDENT_BYTES}
    archive.write(folder / entry.name, {**tensors, **label_tensors}, metadata, blocks=blocks)
    return open_part(folder, entry.name).entry


def open_part(folder: Place, name: str, max_bytes: int | None = None) -> Part:
    """Read and check the header of a part."""
    kept = archive.open_archive(folder / name, max_bytes)
    metadata = kept.metadata
    if metadata.get("kind") != KIND:
        raise NotARecordingError(f"{kept.path}: holds a {metadata.get('kind')!r:.40}; expected a part. {REPAIR}")
    samples = Samples.recall(metadata, kept.nbytes, kept.get, kept.path, kept.limit)
    match metadata:
        case {
            "model": str(model), "feature_dtype": str(dtype), "first": first, "features": str(features),
            "measured": measured,
        } if is_id(first):  # fmt: skip
            number = samples.num_samples
            entry = Entry(first, number, kept.nbytes, kept.checksum, features, parse_measured(kept.path, measured))
        case _:
            raise NotARecordingError(f"{kept.path}: lacks a field that every part has. {REPAIR}")
    if name != entry.name:
        raise NotARecordingError(f"{kept.path}: holds the samples that {entry.name} is to hold. {REPAIR}")
    return Part(entry, Origin(model, samples.shape, dtype, samples.labels is not None), kept, samples.labels)


# ------------------------------------------------------------------ checks of what a file says


def is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SAMPLES


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_digest(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) == len(NO_DIGEST)


def parse_entry(where: object, row: Any) -> Entry:
    """The entry of a part in a manifest."""
    match row:
        case {
            "name": str(name), "first": first, "num_samples": number, "size_bytes": size, "digest": digest,
            "features": features, "measured": measured,
        } if (
            len(row) == 7 and is_id(first) and is_id(number) and number > 0 and is_count(size) and is_digest(digest)
            and is_digest(features)
        ):  # fmt: skip
            entry = Entry(first, number, size, digest, features, parse_measured(where, measured))
            if name == entry.name:
                return entry
    raise NotARecordingError(f"{where}: an entry is that of no part: {row!r:.200}. {REPAIR}")


def parse_measured(where: object, value: Any) -> Measured:
    match value:
        case {
            "moments": dict(moments), "num_zeros": num_zeros,
            "misfits": {"num_samples": number, "first_ids": [*ids], "moments": dict(misfit)},
        } if is_count(num_zeros) and is_count(number) and len(ids) <= NUM_LISTED and all(map(is_id, ids)):  # fmt: skip
            misfits = Misfits(number, tuple(ids), _parse_moments(where, misfit))
            return Measured(_parse_moments(where, moments), num_zeros, misfits)
    raise NotARecordingError(f"{where}: measures are {value!r:.200}; expected those of coded samples. {REPAIR}")


def _parse_moments(where: object, value: dict[str, Any]) -> Moments:
    try:
        moments = from_dict(Moments, value)
    except InputError as error:
        raise NotARecordingError(f"{where}: moments {value!r:.200}: {error}. {REPAIR}") from error
    numbers = (moments.mean, moments.variance, moments.mse)
    finite = all(isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 2**63 for n in numbers)
    if not finite or not math.isfinite(sum(numbers)) or not is_count(moments.count) or min(numbers[1:]) < 0:
        raise NotARecordingError(f"{where}: moments {value!r:.200}; expected those of some values. {REPAIR}")
    return moments
