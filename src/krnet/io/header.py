"""The header of a recording file: metadata, and type, shape, place and checksums of each tensor.

    metadata, entries --encode_head--> head: [ 8 length bytes | JSON ]
    file --read_head--> head --check_head, parse_table--> entries, or the error that says what is wrong

Equal content gives equal bytes. docs/format.md describes every byte. No memory is allocated for a size that the header
claims before that size has been checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from krnet import errors
from krnet.io.places import Place
from krnet.io.ranged import RangedFile

VERSION = 1
MAGIC = b'{"__metadata__":{"format":"krnet-recording"'
MAX_HEADER_BYTES = 64 * 2**20
RESERVED = ("format", "version", "checksum", "checksums")  # metadata keys that the file format uses itself

LENGTH_BYTES = 8
ALIGN_BYTES = 8  # safetensors starts the data at a multiple of 8
DIGEST_BYTES = 16
NO_DIGEST = "0" * (2 * DIGEST_BYTES)  # stands in the header until the digest is known
MAX_DIMS = 64  # torch's own limit in most operations

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

RESTORE = "Restore the file from a copy, or record again"


@dataclass(frozen=True)
class Entry:
    """The header's entry of one tensor: type, shape, place and digests."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # within the data section
    size_bytes: int
    block_bytes: int | None  # None: one block
    digests: tuple[str, ...]

    def block(self, index: int) -> tuple[int, int]:
        """Return (begin, end) of a block, in bytes from the start of the tensor."""
        step = self.block_bytes or self.size_bytes
        return index * step, min((index + 1) * step, self.size_bytes)


def encode_head(path: Place | str, metadata: Mapping[str, object], entries: Mapping[str, Entry]) -> bytes:
    """Return the length bytes and the header; equal content gives equal bytes."""
    table: dict[str, object] = {}
    checksums: dict[str, object] = {}
    for name, entry in entries.items():
        offsets = [entry.begin, entry.begin + entry.size_bytes]
        table[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
        blocked = {"block": entry.block_bytes, "digests": entry.digests}
        checksums[name] = blocked if entry.block_bytes else entry.digests[0]
    # Version and checksum come first, so that their offsets do not depend on the content.
    fields = {"format": "krnet-recording", "version": str(VERSION), "checksum": NO_DIGEST}
    try:
        for key, value in [("checksums", checksums), *sorted(metadata.items())]:
            if not isinstance(key, str) or key in fields:
                raise ValueError(f"key {key!r} is not a string, or taken")
            fields[key] = _to_json(value, sort_keys=True)
        header = _to_json({"__metadata__": fields, **table}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InputError(
            f"{path}: metadata refused: {error}; expected JSON values, Unicode names and keys other than "
            f"{', '.join(RESERVED)}"
        ) from error
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGN_BYTES)
    if len(header) > MAX_HEADER_BYTES:
        raise errors.InputError(
            f"{path}: the header takes {len(header)} bytes; expected at most {MAX_HEADER_BYTES}. "
            f"Use larger blocks, or move large metadata into a tensor"
        )
    head = len(header).to_bytes(LENGTH_BYTES, "little") + header
    checksum_begin = LENGTH_BYTES + len(_prefix(VERSION))
    return head[:checksum_begin] + digest(head).encode() + head[checksum_begin + len(NO_DIGEST) :]


def _to_json(value: object, *, sort_keys: bool = False) -> str:
    # ensure_ascii=False: a lone surrogate, which other readers refuse, then fails at encode().
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def _prefix(version: int) -> bytes:
    """Return the first bytes of a header, up to the digits of its checksum."""
    return MAGIC + f',"version":"{version}","checksum":"'.encode()


def digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def num_blocks(size_bytes: int, block_bytes: int | None) -> int:
    """Return the number of blocks of a tensor. An empty tensor has one empty block, so that it has a digest, too."""
    return max(1, -(-size_bytes // block_bytes)) if block_bytes else 1


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def refuse(
    kind: type[errors.RecordingError], path: Place, found: str, expected: str, advice: str = RESTORE
) -> errors.RecordingError:
    """Return the error to raise for a file that differs from what is expected."""
    return kind(f"{path}: {found}; expected {expected}. {advice}")


def read_head(path: Place, file: RangedFile, nbytes: int) -> bytes:
    """Read the length bytes and the header; the length is checked before that many bytes are allocated."""
    start = file.read(0, LENGTH_BYTES + len(MAGIC))
    # Of a file that ends within the length bytes, the length is unknown.
    length = int.from_bytes(start[:LENGTH_BYTES], "little") if len(start) >= LENGTH_BYTES else 0
    magic = start[LENGTH_BYTES:]
    if not MAGIC.startswith(magic):
        found, advice = f"another kind of file, with {magic[:24]!r} at byte {LENGTH_BYTES}", "Check the path"
        raise refuse(errors.NotARecordingError, path, found, f"one that krnet wrote, with {MAGIC!r}", advice)
    if length > MAX_HEADER_BYTES:
        found, advice = f"claims a header of {length} bytes", f"Damaged. {RESTORE}"
        raise refuse(errors.HeaderTooLargeError, path, found, f"at most {MAX_HEADER_BYTES}", advice)
    end = LENGTH_BYTES + max(length, len(MAGIC))
    head = start + file.read(len(start), end - len(start))
    if len(head) < end:
        found = f"the file has {nbytes} bytes"
        raise refuse(errors.TruncatedRecordingError, path, found, f"a header up to byte {end}")
    return head[: LENGTH_BYTES + length]


def parse_json(path: Place, what: str, text: Any) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # JSON readers differ in which of two equal keys they keep: the same file would mean different things to them.
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    def no_constant(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def finite(digits: str) -> float:
        if math.isinf(number := float(digits)):
            raise ValueError(f"{digits:.20} is beyond all numbers")
        return number

    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite)
    except (ValueError, TypeError, RecursionError) as error:
        found = f"{what} cannot be parsed ({error})"
        raise refuse(errors.NotARecordingError, path, found, "JSON with each key once") from error


def check_head(path: Place, head: bytes, version: Any) -> int:
    """Check the version, the prefix and the checksum of a header; return the version as a number."""
    # int() alone would also accept spaces, signs and the digits of other scripts.
    if not (isinstance(version, str) and version.isascii() and version.isdigit() and len(version) < 10):
        raise refuse(errors.NotARecordingError, path, f"version {version!r:.99}", "a number")
    if int(version) > VERSION:
        found, advice = f"format version {version}", "A later krnet wrote it: upgrade krnet"
        raise refuse(errors.NewerVersionError, path, found, f"at most {VERSION}", advice)
    prefix = _prefix(int(version))
    begin = LENGTH_BYTES + len(prefix)  # of the checksum
    if int(version) < 1 or head[LENGTH_BYTES:begin] != prefix:
        raise refuse(errors.NotARecordingError, path, f"{head[LENGTH_BYTES:begin]!r}", f"{_prefix(VERSION)!r}")
    end = begin + len(NO_DIGEST)
    stored = head[begin:end]
    found = digest(head[:begin] + NO_DIGEST.encode() + head[end:])
    if stored != found.encode():
        raise refuse(errors.ChecksumError, path, f"the header has checksum {found}", f"{stored!r}")
    return int(version)


def parse_table(path: Place, table: dict[str, Any], checksums: Any, *, data_bytes: int) -> dict[str, Entry]:
    """Return the entries in the order of their bytes, which must fill the data section without hole or overlap."""
    if not isinstance(checksums, dict) or checksums.keys() != table.keys():
        raise refuse(errors.ChecksumError, path, "other checksums", f"one for each of {', '.join(table)}")
    entries = [(name, _parse_entry(path, name, row, checksums[name])) for name, row in table.items()]
    entries.sort(key=lambda item: (item[1].begin, item[1].size_bytes))
    end = 0
    for name, entry in entries:
        if entry.begin != end:
            found = f"tensor {name!r} begins at data byte {entry.begin}"
            raise refuse(errors.NotARecordingError, path, found, f"{end}, without hole or overlap")
        end += entry.size_bytes
    if end != data_bytes:
        found = f"{data_bytes} bytes follow the header"
        raise refuse(errors.TruncatedRecordingError, path, found, f"{end} by its table")
    return dict(entries)


def _parse_entry(path: Place, name: str, row: Any, checksum: Any) -> Entry:
    found = f"tensor {name!r} is {row!r:.200}"
    match row:
        case {"dtype": str(type_name), "shape": [*shape], "data_offsets": [begin, end]} if (
            len(row) == 3 and type_name in DTYPES and len(shape) <= MAX_DIMS
            and all(map(is_count, [*shape, begin, end])) and begin <= end
        ):  # fmt: skip
            dtype = DTYPES[type_name]
        case _:
            expected = f"a known dtype, a shape of at most {MAX_DIMS} counts and data_offsets"
            raise refuse(errors.NotARecordingError, path, found, expected)
    span, size_bytes = end - begin, math.prod(shape) * dtype.itemsize  # integers of Python do not overflow
    # Strides in torch overflow at 2^63, even those of an empty tensor.
    if size_bytes > span or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise refuse(errors.OversizedRecordingError, path, found, f"a shape that fits in {span} bytes")
    if size_bytes < span:
        raise refuse(errors.TensorShapeError, path, found, f"a shape that fills {span} bytes")
    match checksum:
        case str():
            block_bytes, digests = None, [checksum]
        case {"block": block_bytes, "digests": [*digests]} if (
            len(checksum) == 2 and is_count(block_bytes) and block_bytes > 0
            and len(digests) == num_blocks(span, block_bytes)
        ):  # fmt: skip
            pass
        case _:
            found = f"tensor {name!r} has checksums {checksum!r:.200}"
            raise refuse(errors.ChecksumError, path, found, "one digest, or one for each block")
    return Entry(dtype, tuple(shape), begin, span, block_bytes, tuple(digests))
