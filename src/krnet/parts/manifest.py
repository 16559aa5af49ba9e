"""The manifest of a folder of parts: manifest.json.

    Manifest(origin, model, parts) -> to_json -> text -> parse_manifest -> the same, or what is wrong with it

It says nothing that model and parts do not: it saves a reader from opening all of them, and tells that all are there.
Names of parts follow from their IDs, so no manifest can name another file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

from krnet.errors import NewerVersionError, NotARecordingError
from krnet.features.dtypes import DTYPES
from krnet.io.header import MAX_DIMS, digest, parse_json
from krnet.io.memory import MemoryLimit
from krnet.io.places import Place
from krnet.parts.part import Entry, Measured, Origin, is_count, is_digest, parse_entry
from krnet.parts.sequences import Listed, parse_listed

MANIFEST, MODEL = "manifest.json", "model.krn"
FORMAT, VERSION = "krnet-parts", 1
MAX_MANIFEST_BYTES = 256 << 20
REBUILD = "Remove it: krnet encode with --resume makes it anew from the parts"


@dataclass(frozen=True)
class Manifest:
    origin: Origin
    model_bytes: int
    num_classes: int | None
    """None: there are no labels."""
    parts: tuple[Entry, ...]
    """In the order of their IDs, without hole or overlap."""
    sequences: Listed | None = None
    """The file with the lengths of sequences; None: there are none."""

    @property
    def num_samples(self) -> int:
        return self.parts[-1].stop

    @property
    def size_bytes(self) -> int:
        """Of model, parts and lengths."""
        lengths_bytes = 0 if self.sequences is None else self.sequences.size_bytes
        return self.model_bytes + lengths_bytes + sum(part.size_bytes for part in self.parts)

    @cached_property
    def measured(self) -> Measured:
        """Of all samples."""
        return reduce(add, (part.measured for part in self.parts))

    @property
    def worst(self) -> Entry:
        """The part with the lowest R2."""
        return min(self.parts, key=lambda part: part.measured.moments.r2)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all that it says, and by the digests in it of all bytes of the folder."""
        return digest(json.dumps(self._table, sort_keys=True).encode())

    @property
    def _table(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_samples": self.num_samples,
            "shape": list(self.origin.shape),
            "feature_dtype": self.origin.dtype,
            "num_classes": self.num_classes,
            "model": {"name": MODEL, "size_bytes": self.model_bytes, "digest": self.origin.model},
            **({} if self.sequences is None else {"sequences": self.sequences.to_json()}),
            "parts": [part.to_json() for part in self.parts],
        }

    def to_json(self) -> str:
        """A line for each part."""
        head = {"digest": self.fingerprint, **{name: v for name, v in self._table.items() if name != "parts"}}
        lines = ",\n".join(json.dumps(part.to_json()) for part in self.parts)
        return json.dumps(head)[:-1] + f', "parts": [\n{lines}\n]}}\n'


def parse_manifest(where: Place, content: bytes) -> Manifest:
    """The manifest in these bytes, checked; nothing is allocated on its word."""
    if len(content) > MAX_MANIFEST_BYTES:
        raise _refuse(where, f"it has {len(content)} bytes, above {MAX_MANIFEST_BYTES}", None)
    MemoryLimit(where, len(content)).check_header(content)
    table = parse_json(where, "the manifest", content)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise NotARecordingError(f"{where}: is no manifest of parts; expected the format {FORMAT!r}. Check the path")
    version = table.get("version")
    if not is_count(version) or version > VERSION:
        raise NewerVersionError(f"{where}: format version {version!r:.99}; expected at most {VERSION}. Upgrade krnet")
    match table:
        case {
            "shape": [*shape], "feature_dtype": str(dtype), "num_classes": num_classes, "digest": stated,
            "num_samples": num_samples,
            "model": {"name": str(name), "size_bytes": model_bytes, "digest": model},
            "parts": [_, *_] as rows,
        } if (
            len(shape) < MAX_DIMS and all(is_count(size) and size for size in shape) and dtype in DTYPES
            and (num_classes is None or (is_count(num_classes) and num_classes)) and name == MODEL
            and is_count(model_bytes) and is_digest(model)
        ):  # fmt: skip
            origin = Origin(model, tuple(shape), dtype, num_classes is not None)
        case _:
            raise _refuse(where, "a field is missing, or has a value that none has", {**table, "parts": "..."})
    parts = tuple(parse_entry(where, row) for row in rows)
    check_order(where, parts)
    sequences = parse_listed(where, table["sequences"]) if "sequences" in table else None
    manifest = Manifest(origin, model_bytes, num_classes, parts, sequences)
    if (manifest.num_samples, manifest.fingerprint) != (num_samples, stated):
        raise _refuse(where, "it has been changed: its digest is not that of what it says", stated)
    return manifest


def check_order(where: object, parts: Sequence[Entry]) -> None:
    """Refuse parts that leave samples out, or have some twice."""
    stop = 0
    for part in parts:
        if part.first != stop:
            raise NotARecordingError(
                f"{where}: {part.name} follows sample {stop - 1}; expected a part that begins with sample {stop}. "
                f"{REBUILD}"
            )
        stop = part.stop


def _refuse(where: object, found: str, value: Any) -> NotARecordingError:
    return NotARecordingError(f"{where}: {found}: {value!r:.300}. {REBUILD}")
