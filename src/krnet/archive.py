"""The recording file `.krn`: named tensors and settings, written all or not at all, checked on every read.

    write(path, tensors, metadata)  ->  [ 8 length bytes | JSON header | tensor bytes ]
    open_archive(path) -> Archive   ->  metadata, tensor(name), read(name, start, stop), verify()

The file is a valid safetensors file, so any safetensors reader opens it. It is written and read by
this module and not by the safetensors library, because that library gives no control over the bytes of
the header, does not fsync and has no checksums. docs/format.md describes every byte.

Opening reads the header only, and trusts none of it before its checksum and its sums agree. Tensors are
read fresh from the file each time, never mapped: a mapped file could change after it was checked.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch

from krnet.errors import (
    ChecksumError,
    HeaderTooLargeError,
    InputError,
    MissingTensorError,
    NewerVersionError,
    NotARecordingError,
    OversizedRecordingError,
    RecordingError,
    TensorShapeError,
    TruncatedRecordingError,
)

VERSION = 1
MAGIC = b'{"__metadata__":{"format":"krnet-recording"'
MAX_HEADER_BYTES = 64 * 2**20
RESERVED = ("format", "version", "checksum", "checksums")

LENGTH_BYTES = 8
ALIGN_BYTES = 8  # safetensors starts the data at a multiple of 8
DIGEST_BYTES = 16
NO_DIGEST = "0" * (2 * DIGEST_BYTES)
CHUNK_BYTES = 4 * 2**20
MAX_DIMS = 64  # torch's own limit in most operations

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

assert sys.byteorder == "little", "recordings are little endian and this machine is not; byte-swap in archive.py"

AnyPath = str | os.PathLike[str]


# ---------------------------------------------------------------- writing


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[BinaryIO]:
    """A file to write to that appears under `path` complete and on disk, or not at all."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; create it or choose another place")
    # Renaming over a device or a pipe would destroy it, so only a file may stand there.
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "not a regular file"
        raise InputError(f"{path}: is {what}; expected the name of a file to write")
    # The process ID keeps two writers apart; a leftover of a killed process is at worst overwritten.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # KeyboardInterrupt too
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself must survive a power cut
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write(
    path: AnyPath,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, object],
    *,
    blocks: Mapping[str, int] | None = None,
) -> int:
    """Write a recording and return its size in bytes.

    `metadata` values must be JSON; `blocks` gives a block size in bytes for tensors that are to be read
    and checked in parts.
    """
    blocks = blocks or {}
    _check_writable(path, tensors, metadata, blocks)
    # Wide types first: every tensor then starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    table: dict[str, object] = {}
    checksums: dict[str, object] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        dtype_name = DTYPE_NAMES[tensor.dtype]
        table[name] = {"dtype": dtype_name, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        checksums[name] = _checksum_entry([NO_DIGEST] * _num_blocks(end - begin, blocks.get(name)), blocks.get(name))

    # Digests have a fixed length, so the header's size is known before the data is hashed:
    # each tensor is copied to the CPU, hashed and written once, and the header goes in last.
    num_head = len(_encode_head(path, metadata, checksums, table))
    with atomic_write(path) as file:
        file.seek(num_head)
        for name in names:
            checksums[name] = _write_tensor(file, tensors[name], blocks.get(name))
        head = _encode_head(path, metadata, checksums, table)
        assert len(head) == num_head, f"the header grew from {num_head} to {len(head)} bytes"
        file.seek(0)
        file.write(head)
    return num_head + end


def _check_writable(
    path: AnyPath, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, object], blocks: Mapping[str, int]
) -> None:
    for key in metadata:
        if not isinstance(key, str) or key in RESERVED:
            raise InputError(f"{path}: metadata key {key!r}; expected a string other than {', '.join(RESERVED)}")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise InputError(f"{path}: a tensor cannot be named {name!r}; expected a string other than __metadata__")
        if tensor.dtype not in DTYPE_NAMES or tensor.dim() > MAX_DIMS:
            raise InputError(
                f"{path}: tensor {name!r} is {tensor.dtype} with {tensor.dim()} dimensions; "
                f"expected one of {', '.join(DTYPES)} and at most {MAX_DIMS}"
            )
    for name, block_bytes in blocks.items():
        if name not in tensors or not _is_count(block_bytes) or block_bytes == 0:
            raise InputError(
                f"{path}: blocks of {block_bytes!r} bytes for {name!r}; expected a positive integer "
                f"and one of the tensors {', '.join(sorted(tensors))}"
            )


def _write_tensor(file: BinaryIO, tensor: torch.Tensor, block_bytes: int | None) -> object:
    flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    data = memoryview(flat.view(torch.uint8).numpy())
    digests = []
    for index in range(_num_blocks(len(data), block_bytes)):
        part = data[index * block_bytes : (index + 1) * block_bytes] if block_bytes else data
        file.write(part)
        digests.append(_digest(part))
    return _checksum_entry(digests, block_bytes)


def _checksum_entry(digests: list[str], block_bytes: int | None) -> object:
    return digests[0] if block_bytes is None else {"block": block_bytes, "digests": digests}


def _encode_head(
    path: AnyPath, metadata: Mapping[str, object], checksums: Mapping[str, object], table: Mapping[str, object]
) -> bytes:
    """The length bytes and the header: one content, one spelling."""
    try:
        # The version and the checksum come first, at offsets that do not depend on the content.
        fields = {"format": "krnet-recording", "version": str(VERSION), "checksum": NO_DIGEST}
        fields["checksums"] = _to_json(checksums, sort_keys=True)
        for key in sorted(metadata):
            fields[key] = _to_json(metadata[key], sort_keys=True)
        header = _to_json({"__metadata__": fields, **table}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: the metadata cannot be written as JSON ({error}); store plain values") from error
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGN_BYTES)
    if len(header) > MAX_HEADER_BYTES:
        raise InputError(
            f"{path}: the header would take {len(header)} bytes and may take {MAX_HEADER_BYTES}; "
            f"use larger blocks, or move large metadata into a tensor"
        )
    head = len(header).to_bytes(LENGTH_BYTES, "little") + header
    at = LENGTH_BYTES + len(_header_prefix(VERSION))
    return head[:at] + _digest(head).encode() + head[at + len(NO_DIGEST) :]


def _to_json(value: object, *, sort_keys: bool = False) -> str:
    # ensure_ascii=False so that a lone surrogate, which other readers refuse, fails at encode().
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


# ---------------------------------------------------------------- what both sides share


def _header_prefix(version: int) -> bytes:
    return MAGIC + f',"version":"{version}","checksum":"'.encode()


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _num_blocks(size_bytes: int, block_bytes: int | None) -> int:
    """At least one: an empty tensor is one empty block, so that no tensor goes without a digest."""
    return max(1, -(-size_bytes // block_bytes)) if block_bytes else 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # in the file, not in the data section
    size_bytes: int
    block_bytes: int
    digests: tuple[str, ...]

    def block(self, index: int) -> tuple[int, int]:
        """First and last + 1 byte of a block, counted from the tensor's first."""
        return index * self.block_bytes, min((index + 1) * self.block_bytes, self.size_bytes)


@dataclass(frozen=True)
class Archive:
    """An opened recording. It holds no open file: it pickles, and forked workers may share it."""

    path: Path
    nbytes: int
    """Size of the whole file."""
    version: int
    metadata: dict[str, Any]
    """The writer's own keys, decoded."""
    _entries: dict[str, _Entry]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order of the file."""
        return tuple(self._entries)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor, from the header alone."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def tensor(
        self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A whole tensor, read and checked now. Give `shape` and `dtype` to refuse any other."""
        entry = self._entry(name)
        expected = (entry.dtype if dtype is None else dtype, entry.shape if shape is None else tuple(shape))
        if expected != (entry.dtype, entry.shape):
            raise TensorShapeError(
                f"{self.path}: tensor {name!r} is {entry.dtype} {list(entry.shape)}; the settings call for "
                f"{expected[0]} {list(expected[1])}. Tensors and settings are not from the same run: record again"
            )
        return self._load(name, 0, entry.size_bytes).view(entry.dtype).reshape(entry.shape)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start:stop along dimension 0, reading and checking only the blocks that hold them."""
        entry = self._entry(name)
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise InputError(
                f"{self.path}: rows {start}:{stop} of tensor {name!r} of shape {list(entry.shape)}; "
                f"expected 0 <= start <= stop <= its first dimension"
            )
        row_bytes = entry.size_bytes // max(entry.shape[0], 1)
        rows = self._load(name, start * row_bytes, stop * row_bytes)
        return rows.view(entry.dtype).reshape(stop - start, *entry.shape[1:])

    def verify(self) -> None:
        """Check every tensor's bytes, a few megabytes at a time."""
        with _open(self.path) as file:
            for name, entry in self._entries.items():
                for index in range(len(entry.digests)):
                    position, end = entry.block(index)
                    file.seek(entry.begin + position)
                    digest = blake2b(digest_size=DIGEST_BYTES)
                    while position < end:
                        chunk = file.read(min(CHUNK_BYTES, end - position))
                        if not chunk:
                            raise self._shrunk(name)
                        digest.update(chunk)
                        position += len(chunk)
                    self._check_digest(name, index, digest.hexdigest())

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise MissingTensorError(
                f"{self.path}: no tensor {name!r}; this file holds {', '.join(self.names) or 'none'}. "
                f"Was it written by another recorder or with other settings?"
            )
        return self._entries[name]

    def _load(self, name: str, low: int, high: int) -> torch.Tensor:
        """Bytes low:high of a tensor, once every block that they touch has been checked."""
        entry = self._entry(name)
        first = min(low // entry.block_bytes, len(entry.digests) - 1)
        last = max(first + 1, -(-high // entry.block_bytes))
        begin, end = entry.block(first)[0], entry.block(last - 1)[1]
        loaded = torch.empty(end - begin, dtype=torch.uint8, device="cpu")  # (size_bytes,)
        data = memoryview(loaded.numpy())
        with _open(self.path) as file:
            file.seek(entry.begin + begin)
            if file.readinto(data) != len(data):
                raise self._shrunk(name)
        for index in range(first, last):
            block_begin, block_end = entry.block(index)
            self._check_digest(name, index, _digest(data[block_begin - begin : block_end - begin]))
        part = loaded[low - begin : high - begin]
        # A copy starts at an aligned address, and does not keep the rest of the blocks in memory.
        return part if len(part) == len(loaded) else part.clone()

    def _check_digest(self, name: str, index: int, digest: str) -> None:
        entry = self._entries[name]
        if digest != entry.digests[index]:
            begin, end = entry.block(index)
            raise ChecksumError(
                f"{self.path}: tensor {name!r}, bytes {begin}..{end}: checksum {digest}, expected "
                f"{entry.digests[index]}. The file is damaged, or was replaced after it was opened: "
                f"open it again, else restore it from a copy or record again"
            )

    def _shrunk(self, name: str) -> TruncatedRecordingError:
        return TruncatedRecordingError(
            f"{self.path}: ends inside tensor {name!r}; it had {self.nbytes} bytes when it was opened "
            f"and has been cut since. Restore it from a copy or record again"
        )


def open_archive(path: AnyPath) -> Archive:
    """Open a recording: read its header, and refuse it unless everything in it adds up."""
    path = Path(path)
    with _open(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        head = _read_head(path, file, nbytes)
    header = _parse_json(path, "its header", head[LENGTH_BYTES:])
    fields = header.pop("__metadata__")
    version = _check_version(path, fields)
    _check_head_digest(path, head, version)
    values = {key: _parse_json(path, f"metadata {key!r}", value) for key, value in fields.items() if key not in RESERVED}
    checksums = _parse_json(path, "metadata 'checksums'", fields.get("checksums", "{}"))
    entries = _check_table(path, header, checksums, data_begin=len(head), nbytes=nbytes)
    return Archive(path, nbytes, version, values, entries)


def _open(path: Path) -> BufferedReader:
    try:
        # Asked before opening, which would wait for ever on a named pipe.
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file"
            raise NotARecordingError(f"{path}: is {what}; expected a recording (.krn)")
        return open(path, "rb")
    except OSError as error:
        raise NotARecordingError(f"{path}: cannot be read ({error.strerror}); check the path") from error


def _read_head(path: Path, file: BufferedReader, nbytes: int) -> bytes:
    """The length bytes and the header; nothing is allocated on the word of an unchecked length."""
    head = file.read(LENGTH_BYTES + len(MAGIC))
    length, magic = int.from_bytes(head[:LENGTH_BYTES], "little"), head[LENGTH_BYTES:]
    if len(head) < LENGTH_BYTES:
        raise _truncated(path, nbytes, f"at least {LENGTH_BYTES}")
    if length > MAX_HEADER_BYTES:
        raise HeaderTooLargeError(
            f"{path}: claims a header of {length} bytes; a recording's has at most {MAX_HEADER_BYTES}. "
            f"The file is damaged or is not a recording (.krn)"
        )
    if not MAGIC.startswith(magic):
        raise NotARecordingError(
            f"{path}: is not a recording (.krn): found {magic!r} at byte {LENGTH_BYTES}, expected {MAGIC!r}"
        )
    if LENGTH_BYTES + max(length, len(MAGIC)) > nbytes:
        raise _truncated(path, nbytes, f"a header up to byte {LENGTH_BYTES + max(length, len(MAGIC))}")
    file.seek(0)
    head = file.read(LENGTH_BYTES + length)
    if len(head) != LENGTH_BYTES + length:
        raise _truncated(path, len(head), f"a header up to byte {LENGTH_BYTES + length}")
    return head


def _truncated(path: Path, found_bytes: int, expected: str) -> TruncatedRecordingError:
    return TruncatedRecordingError(
        f"{path}: has {found_bytes} bytes, expected {expected}; it was cut, or something was appended. "
        f"Restore it from a copy or record again"
    )


def _parse_json(path: Path, what: str, text: str | bytes) -> Any:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Readers differ in which of two equal keys they keep, so the file would mean two things.
        if len(dict(pairs)) != len(pairs):
            raise ValueError(f"a key occurs twice among {[key for key, _ in pairs][:20]}")
        return dict(pairs)

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotARecordingError(
            f"{path}: {what} is not readable JSON ({error}); the file is damaged or foreign"
        ) from error


def _check_version(path: Path, fields: dict[str, Any]) -> int:
    version = fields.get("version")
    # ASCII first: isdigit() and int() also take digits of other scripts.
    if not (isinstance(version, str) and version.isascii() and version.isdigit() and 0 < len(version) < 10):
        raise _malformed(path, f"version {version!r}", "a number")
    if int(version) > VERSION:
        raise NewerVersionError(
            f"{path}: has format version {version}; this krnet reads up to {VERSION}. Upgrade krnet to read it"
        )
    if version != str(VERSION):
        raise _malformed(path, f"version {version!r}", f"{VERSION}")
    return int(version)


def _malformed(path: Path, found: str, expected: str) -> RecordingError:
    return NotARecordingError(f"{path}: found {found}, expected {expected}; the file is damaged or foreign")


def _check_head_digest(path: Path, head: bytes, version: int) -> None:
    at = LENGTH_BYTES + len(_header_prefix(version))
    if head[LENGTH_BYTES:at] != _header_prefix(version):
        raise _malformed(path, f"header {head[LENGTH_BYTES:at]!r}", f"{_header_prefix(version)!r}")
    found, after = head[at : at + len(NO_DIGEST)], head[at + len(NO_DIGEST) :]
    expected = _digest(head[:at] + NO_DIGEST.encode() + after)
    if found != expected.encode():
        raise ChecksumError(
            f"{path}: the header says its checksum is {found!r}, its bytes give {expected}. The file is damaged: "
            f"restore it from a copy or record again"
        )


def _check_table(
    path: Path, table: dict[str, Any], checksums: Any, *, data_begin: int, nbytes: int
) -> dict[str, _Entry]:
    """Tensor entries in the order of their bytes, which must fill the data section without hole or overlap."""
    for name, row in table.items():
        _check_row(path, name, row)
    if not isinstance(checksums, dict) or checksums.keys() != table.keys():
        raise ChecksumError(f"{path}: checksums are not for exactly the tensors {', '.join(table)}; record again")
    entries = {}
    end = 0
    for name, row in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, size_bytes = row["data_offsets"][0], row["data_offsets"][1] - row["data_offsets"][0]
        if begin != end:
            raise _malformed(path, f"tensor {name!r} at data byte {begin}", f"{end}, where the one before it ends")
        end = begin + size_bytes
        block_bytes, digests = _parse_checksum(path, name, checksums[name], size_bytes)
        dtype, shape = DTYPES[row["dtype"]], tuple(row["shape"])
        entries[name] = _Entry(dtype, shape, data_begin + begin, size_bytes, block_bytes, digests)
    if data_begin + end != nbytes:
        raise _truncated(path, nbytes, f"{data_begin + end} by its header")
    return entries


def _check_row(path: Path, name: str, row: Any) -> None:
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise _malformed(path, f"tensor {name!r} described by {row!r:.200}", "dtype, shape and data_offsets")
    shape, offsets = row["shape"], row["data_offsets"]
    if not isinstance(row["dtype"], str) or row["dtype"] not in DTYPES:
        raise _malformed(path, f"tensor {name!r} of type {row['dtype']!r:.200}", f"one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)) or len(shape) > MAX_DIMS:
        raise _malformed(path, f"tensor {name!r} of shape {shape!r:.200}", f"at most {MAX_DIMS} non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)) or offsets[0] > offsets[1]:
        raise _malformed(path, f"tensor {name!r} at data_offsets {offsets!r:.200}", "[begin, end]")
    span, itemsize = offsets[1] - offsets[0], DTYPES[row["dtype"]].itemsize
    size_bytes = math.prod(shape) * itemsize
    message = (
        f"{path}: tensor {name!r} of {row['dtype']} {shape!r:.200} takes {size_bytes:.4g} bytes, and the file "
        f"has {span} for it; expected equal sizes. The file is damaged or forged: record again"
    )
    # An empty tensor may still have dimensions whose strides overflow.
    if size_bytes > span or math.prod(max(size, 1) for size in shape) * itemsize >= 2**63:
        raise OversizedRecordingError(message)
    if size_bytes < span:
        raise TensorShapeError(message)


def _parse_checksum(path: Path, name: str, entry: Any, size_bytes: int) -> tuple[int, tuple[str, ...]]:
    """Block size and digests; a tensor without blocks is one block."""
    if isinstance(entry, str):
        return max(size_bytes, 1), (entry,)
    if isinstance(entry, dict) and entry.keys() == {"block", "digests"}:
        block_bytes, digests = entry["block"], entry["digests"]
        if _is_count(block_bytes) and block_bytes > 0 and isinstance(digests, list):
            if len(digests) == _num_blocks(size_bytes, block_bytes) and all(isinstance(d, str) for d in digests):
                return block_bytes, tuple(digests)
    raise ChecksumError(
        f"{path}: tensor {name!r} of {size_bytes} bytes has checksums {entry!r:.200}; expected one digest, "
        f"or a block size and a digest for each block. Record again"
    )
