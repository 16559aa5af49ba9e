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
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch

from krnet import errors

VERSION = 1
MAGIC = b'{"__metadata__":{"format":"krnet-recording"'
MAX_HEADER_BYTES = 64 * 2**20
RESERVED = ("format", "version", "checksum", "checksums")  # metadata keys of the container itself

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

RESTORE = "Restore the file from a copy, or record again"
AnyPath = str | os.PathLike[str]

assert sys.byteorder == "little", "recordings are little endian and this machine is not: swap bytes here"


def refuse_overwriting(outputs: Sequence[AnyPath], inputs: Sequence[AnyPath]) -> None:
    """Each output must be a file of its own, and none of them an input."""
    taken = {Path(path).resolve() for path in inputs}
    for path in outputs:
        if Path(path).resolve() in taken:
            raise errors.InputError(
                f"{path}: would be overwritten while it is in use; choose another name for the output"
            )
        taken.add(Path(path).resolve())


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[BinaryIO]:
    """A file to write to that appears under `path` complete and on disk, or not at all."""
    path = Path(path)
    if not path.parent.is_dir():
        raise errors.InputError(f"{path}: no folder {path.parent}; create it or choose another place")
    # Renaming over a device or a pipe would destroy it, so only a file may stand there.
    if path.exists() and not path.is_file():
        raise errors.InputError(f"{path}: is a folder or a device; expected the name of a file to write")
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


@dataclass(frozen=True)
class _Entry:
    """A tensor's line in the header: what it is, where it is, and its digests."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # within the data section
    size_bytes: int
    block_bytes: int | None  # None: one block
    digests: tuple[str, ...]

    def block(self, index: int) -> tuple[int, int]:
        """First and last + 1 byte of a block, counted from the tensor's first."""
        step = self.block_bytes or self.size_bytes
        return index * step, min((index + 1) * step, self.size_bytes)


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
    entries = _plan(path, tensors, blocks or {})
    # Digests have a fixed length, so the header's size is known before there are any: each tensor
    # is brought to the CPU, hashed and written once, and the header goes in last.
    head_bytes = len(_encode_head(path, metadata, entries))
    with atomic_write(path) as file:
        file.seek(head_bytes)
        for name, entry in entries.items():
            tensor = tensors[name].detach().cpu().resolve_neg().contiguous()
            # Not reshape(-1): one element counts as contiguous whatever its stride, but not to view().
            data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
            digests = []
            for index in range(len(entry.digests)):
                begin, end = entry.block(index)
                file.write(data[begin:end])
                digests.append(_digest(data[begin:end]))
            entries[name] = replace(entry, digests=tuple(digests))
        head = _encode_head(path, metadata, entries)
        assert len(head) == head_bytes, f"the header grew from {head_bytes} to {len(head)} bytes"
        file.seek(0)
        file.write(head)
    return head_bytes + sum(entry.size_bytes for entry in entries.values())


def _plan(path: AnyPath, tensors: Mapping[str, torch.Tensor], blocks: Mapping[str, int]) -> dict[str, _Entry]:
    """Where each tensor goes; the digests are still to come."""
    for name, step in blocks.items():
        if name not in tensors or not _is_count(step) or step == 0:
            raise errors.InputError(
                f"{path}: blocks of {step!r} bytes for tensor {name!r}; expected a positive integer "
                f"and one of {', '.join(tensors)}"
            )
    entries: dict[str, _Entry] = {}
    begin = 0
    # Wide types first: every tensor then starts at a multiple of its item size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if name == "__metadata__" or tensor.dtype not in DTYPE_NAMES or tensor.dim() > MAX_DIMS:
            raise errors.InputError(
                f"{path}: tensor {name!r} is {tensor.dtype} with {tensor.dim()} dimensions; expected one of "
                f"{', '.join(DTYPES)}, at most {MAX_DIMS} dimensions and a name other than '__metadata__'"
            )
        size_bytes, block_bytes = tensor.numel() * tensor.dtype.itemsize, blocks.get(name)
        digests = (NO_DIGEST,) * _num_blocks(size_bytes, block_bytes)
        entries[name] = _Entry(tensor.dtype, tuple(tensor.shape), begin, size_bytes, block_bytes, digests)
        begin += size_bytes
    return entries


def _encode_head(path: AnyPath, metadata: Mapping[str, object], entries: Mapping[str, _Entry]) -> bytes:
    """The length bytes and the header: one content, one spelling."""
    table: dict[str, object] = {}
    checksums: dict[str, object] = {}
    for name, entry in entries.items():
        offsets = [entry.begin, entry.begin + entry.size_bytes]
        table[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
        blocked = {"block": entry.block_bytes, "digests": entry.digests}
        checksums[name] = blocked if entry.block_bytes else entry.digests[0]
    # Version and checksum come first, at offsets that do not depend on the content.
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
    at = LENGTH_BYTES + len(_prefix(VERSION))
    return head[:at] + _digest(head).encode() + head[at + len(NO_DIGEST) :]


def _to_json(value: object, *, sort_keys: bool = False) -> str:
    # ensure_ascii=False so that a lone surrogate, which other readers refuse, fails at encode().
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def _prefix(version: int) -> bytes:
    """What a header begins with, up to the digits of its own checksum."""
    return MAGIC + f',"version":"{version}","checksum":"'.encode()


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _num_blocks(size_bytes: int, block_bytes: int | None) -> int:
    """At least one: an empty tensor is one empty block, so that no tensor goes without a digest."""
    return max(1, -(-size_bytes // block_bytes)) if block_bytes else 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class Archive:
    """An opened recording. It holds no open file: it pickles, and workers may share it."""

    path: Path
    nbytes: int
    """Size of the whole file."""
    version: int
    metadata: dict[str, Any]
    """The writer's own keys, decoded."""
    _entries: dict[str, _Entry]
    _data_begin: int

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
            found = f"tensor {name!r} is {entry.dtype} {list(entry.shape)}"
            wanted = f"{expected[0]} {list(expected[1])} by the settings"
            raise _refuse(errors.TensorShapeError, self.path, found, wanted)
        return self._load(name, 0, entry.size_bytes).view(entry.dtype).reshape(entry.shape)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start:stop along dimension 0, reading and checking only the blocks that hold them."""
        entry = self._entry(name)
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise errors.InputError(
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
                    self._read_block(file, name, index)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            found, wanted = f"no tensor {name!r}", f"one of {', '.join(self.names) or '(it holds none)'}"
            advice = "Was it written by another recorder, or with other settings?"
            raise _refuse(errors.MissingTensorError, self.path, found, wanted, advice)
        return self._entries[name]

    def _load(self, name: str, low: int, high: int) -> torch.Tensor:
        """Bytes low:high of a tensor, once every block that they touch has been checked."""
        entry = self._entry(name)
        step = entry.block_bytes or max(entry.size_bytes, 1)
        first = min(low // step, len(entry.digests) - 1)
        last = max(first, -(-high // step) - 1)
        begin, end = entry.block(first)[0], entry.block(last)[1]
        loaded = torch.empty(end - begin, dtype=torch.uint8, device="cpu")  # (size_bytes,)
        with _open(self.path) as file:
            for index in range(first, last + 1):
                self._read_block(file, name, index, loaded.numpy().data[index * step - begin :])
        part = loaded[low - begin : high - begin]
        # A copy starts at an aligned address, and does not keep the rest of the blocks in memory.
        return part if len(part) == len(loaded) else part.clone()

    def _read_block(self, file: BufferedReader, name: str, index: int, target: memoryview | None = None) -> None:
        """Check a block, piece by piece, and leave its bytes at the start of `target`."""
        entry = self._entries[name]
        begin, end = entry.block(index)
        file.seek(self._data_begin + entry.begin + begin)
        hasher = blake2b(digest_size=DIGEST_BYTES)
        for low in range(0, end - begin, CHUNK_BYTES):
            high = min(low + CHUNK_BYTES, end - begin)
            chunk = file.read(high - low)
            if len(chunk) != high - low:
                found = f"the file now ends inside tensor {name!r}"
                wanted = f"the {self.nbytes} bytes that it had when it was opened"
                raise _refuse(errors.TruncatedRecordingError, self.path, found, wanted)
            hasher.update(chunk)
            if target is not None:
                target[low:high] = chunk
        if hasher.hexdigest() != entry.digests[index]:
            found = f"bytes {begin}..{end} of tensor {name!r} have checksum {hasher.hexdigest()}"
            advice = f"Damaged, or replaced after it was opened: open it again. {RESTORE}"
            raise _refuse(errors.ChecksumError, self.path, found, entry.digests[index], advice)


def open_archive(path: AnyPath) -> Archive:
    """Open a recording: read its header, and refuse it unless everything in it adds up."""
    path = Path(path)
    with _open(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        head = _read_head(path, file, nbytes)
    table = _parse_json(path, "the header", head[LENGTH_BYTES:])
    fields = table.pop("__metadata__")  # the magic says that it is there, and an object
    version = _check_head(path, head, fields.get("version"))
    values = {key: _parse_json(path, f"metadata {key!r}", fields[key]) for key in sorted(fields.keys() - RESERVED)}
    checksums = _parse_json(path, "metadata 'checksums'", fields.get("checksums"))
    entries = _parse_table(path, table, checksums, data_bytes=nbytes - len(head))
    return Archive(path, nbytes, version, values, entries, len(head))


def _refuse(
    kind: type[errors.RecordingError], path: Path, found: str, expected: str, advice: str = RESTORE
) -> errors.RecordingError:
    return kind(f"{path}: {found}; expected {expected}. {advice}")


def _open(path: Path) -> BufferedReader:
    expected = "a recording (.krn)", "Check the path"
    try:
        # Asked before opening, which would wait for ever on a named pipe.
        if path.exists() and not path.is_file():
            raise _refuse(errors.NotARecordingError, path, "is a folder or a device", *expected)
        return open(path, "rb")
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
        raise _refuse(errors.NotARecordingError, path, found, *expected) from error


def _read_head(path: Path, file: BufferedReader, nbytes: int) -> bytes:
    """The length bytes and the header; nothing is allocated on the word of an unchecked length."""
    start = file.read(LENGTH_BYTES + len(MAGIC))
    length, magic = int.from_bytes(start[:LENGTH_BYTES], "little"), start[LENGTH_BYTES:]
    if len(start) >= LENGTH_BYTES and length > MAX_HEADER_BYTES:
        found, advice = f"claims a header of {length} bytes", f"Damaged, or not a recording (.krn). {RESTORE}"
        raise _refuse(errors.HeaderTooLargeError, path, found, f"at most {MAX_HEADER_BYTES}", advice)
    if not MAGIC.startswith(magic):
        found, advice = f"{magic!r} at byte {LENGTH_BYTES}", "This is no recording: check the path"
        raise _refuse(errors.NotARecordingError, path, found, f"{MAGIC!r}", advice)
    end = LENGTH_BYTES + max(length, len(MAGIC))
    head = start + file.read(end - len(start))
    if len(head) < end:
        found = f"the file has {nbytes} bytes"
        raise _refuse(errors.TruncatedRecordingError, path, found, f"a header up to byte {end}")
    return head[: LENGTH_BYTES + length]


def _parse_json(path: Path, what: str, text: Any) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Readers differ in which of two equal keys they keep, so the file would mean two things.
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, TypeError, RecursionError) as error:
        found = f"{what} cannot be parsed ({error})"
        raise _refuse(errors.NotARecordingError, path, found, "JSON with each key once") from error


def _check_head(path: Path, head: bytes, version: Any) -> int:
    # int() alone would also take spaces, signs and the digits of other scripts.
    if not (isinstance(version, str) and version.isascii() and version.isdigit() and len(version) < 10):
        raise _refuse(errors.NotARecordingError, path, f"version {version!r:.99}", "a number")
    if int(version) > VERSION:
        found, advice = f"format version {version}", "A later krnet wrote it: upgrade krnet"
        raise _refuse(errors.NewerVersionError, path, found, f"at most {VERSION}", advice)
    prefix = _prefix(int(version))
    at = LENGTH_BYTES + len(prefix)
    if int(version) < 1 or head[LENGTH_BYTES:at] != prefix:
        raise _refuse(errors.NotARecordingError, path, f"{head[LENGTH_BYTES:at]!r}", f"{_prefix(VERSION)!r}")
    stored, rest = head[at : at + len(NO_DIGEST)], head[at + len(NO_DIGEST) :]
    digest = _digest(head[:at] + NO_DIGEST.encode() + rest)
    if stored != digest.encode():
        raise _refuse(errors.ChecksumError, path, f"the header has checksum {digest}", f"{stored!r}")
    return int(version)


def _parse_table(path: Path, table: dict[str, Any], checksums: Any, *, data_bytes: int) -> dict[str, _Entry]:
    """Tensors in the order of their bytes, which must fill the data section without hole or overlap."""
    if not isinstance(checksums, dict) or checksums.keys() != table.keys():
        raise _refuse(errors.ChecksumError, path, "other checksums", f"one for each of {', '.join(table)}")
    entries = [(name, _parse_entry(path, name, row, checksums[name])) for name, row in table.items()]
    entries.sort(key=lambda item: (item[1].begin, item[1].size_bytes))
    end = 0
    for name, entry in entries:
        if entry.begin != end:
            found = f"tensor {name!r} begins at data byte {entry.begin}"
            raise _refuse(errors.NotARecordingError, path, found, f"{end}, without hole or overlap")
        end += entry.size_bytes
    if end != data_bytes:
        found = f"{data_bytes} bytes follow the header"
        raise _refuse(errors.TruncatedRecordingError, path, found, f"{end} by its table")
    return dict(entries)


def _parse_entry(path: Path, name: str, row: Any, checksum: Any) -> _Entry:
    found = f"tensor {name!r} is {row!r:.200}"
    match row:
        case {"dtype": str(type_name), "shape": [*shape], "data_offsets": [begin, end]} if (
            len(row) == 3 and type_name in DTYPES and len(shape) <= MAX_DIMS
            and all(map(_is_count, [*shape, begin, end])) and begin <= end
        ):  # fmt: skip
            dtype = DTYPES[type_name]
        case _:
            expected = f"a known dtype, a shape of at most {MAX_DIMS} counts and data_offsets"
            raise _refuse(errors.NotARecordingError, path, found, expected)
    span, size_bytes = end - begin, math.prod(shape) * dtype.itemsize  # Python's integers do not overflow
    # The strides of torch do, even those of an empty tensor.
    if size_bytes > span or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise _refuse(errors.OversizedRecordingError, path, found, f"a shape that fits in {span} bytes")
    if size_bytes < span:
        raise _refuse(errors.TensorShapeError, path, found, f"a shape that fills {span} bytes")
    match checksum:
        case str():
            block_bytes, digests = None, [checksum]
        case {"block": block_bytes, "digests": [*digests]} if (
            len(checksum) == 2 and _is_count(block_bytes) and block_bytes > 0
            and len(digests) == _num_blocks(span, block_bytes)
        ):  # fmt: skip
            pass
        case _:
            found = f"tensor {name!r} has checksums {checksum!r:.200}"
            raise _refuse(errors.ChecksumError, path, found, "one digest, or one for each block")
    return _Entry(dtype, tuple(shape), begin, span, block_bytes, tuple(digests))
