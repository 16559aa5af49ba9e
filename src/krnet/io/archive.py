"""The recording file `.krn`: named tensors and settings, written completely or not at all, checked on every read.

    write(path, tensors, metadata)  ->  [ 8 length bytes | JSON header | tensor bytes ]
    open_archive(path) -> Archive   ->  metadata, tensor(name), read(name, start, stop), verify()

The file is a valid safetensors file, so any safetensors reader opens it. This module does not use the safetensors
library, because that library gives no control over the bytes of the header, does not fsync and has no checksums.
docs/format.md describes every byte.

Opening reads the header only, and uses it only after its checksum matches and its lengths add up. Each call reads a
tensor from the file again instead of mapping it: a mapped file could change after it was checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch

from krnet import errors
from krnet.io.atomic import AnyPath
from krnet.io.header import (
    DIGEST_BYTES,
    DTYPE_NAMES,
    DTYPES,
    LENGTH_BYTES,
    MAGIC,
    MAX_DIMS,
    NO_DIGEST,
    RESERVED,
    RESTORE,
    Entry,
    check_head,
    digest,
    encode_head,
    is_count,
    num_blocks,
    parse_json,
    parse_table,
    read_head,
    refuse,
)
from krnet.io.memory import MemoryLimit
from krnet.io.output import output
from krnet.io.places import Place, Url, place
from krnet.io.ranged import RangedFile, open_ranged
from krnet.io.remote_rows import RemoteRows
from krnet.io.stored_rows import RESIDENT_BYTES, MadeRows, Rows, StoredRows, TensorRows

CHUNK_BYTES = 4 * 2**20  # read and hashed at once


assert sys.byteorder == "little", "recordings are little endian and this machine is not: swap bytes here"


class TensorStore(Protocol):
    """Tensors by name: an Archive, or the Content of a recorder, which is not written yet."""

    def tensor(
        self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...


class RowStore(TensorStore, Protocol):
    """A store whose tensors may be larger than the memory."""

    def rows(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Rows: ...


def write(
    path: AnyPath | Url,
    tensors: Mapping[str, torch.Tensor | MadeRows],
    metadata: Mapping[str, object],
    *,
    blocks: Mapping[str, int] | None = None,
) -> int:
    """Write a recording and return its size in bytes.

    `metadata` values must be JSON. `blocks` gives a block size in bytes to tensors that will be read, and checked, in
    parts. Large tensors may be given as MadeRows: they are then written in blocks, and never whole in memory.
    """
    made_blocks = {name: rows.block_bytes for name, rows in tensors.items() if isinstance(rows, MadeRows)}
    blocks = {**{name: size for name, size in made_blocks.items() if size is not None}, **(blocks or {})}
    where = place(path)
    entries = _lay_out(where, tensors, blocks)
    # Digests have a fixed length, so the header's size is known before they are computed. Each tensor is then copied
    # to the CPU, hashed and written once, and the header is written last.
    head_bytes = len(encode_head(where, metadata, entries))
    with output(where) as file:
        file.seek(head_bytes)
        for name, entry in entries.items():
            digests = []
            for block in _blocks(tensors[name], entry):
                file.write(block)
                digests.append(digest(block))
            entries[name] = replace(entry, digests=tuple(digests))
        head = encode_head(where, metadata, entries)
        assert len(head) == head_bytes, f"the header grew from {head_bytes} to {len(head)} bytes"
        file.seek(0)
        file.write(head)
    return head_bytes + sum(entry.size_bytes for entry in entries.values())


def _blocks(tensor: torch.Tensor | MadeRows, entry: Entry) -> Iterator[memoryview]:
    """The bytes of a tensor, block by block."""
    if isinstance(tensor, MadeRows):
        row_bytes = max(1, tensor.row_bytes)
        for index in range(len(entry.digests)):
            begin, end = entry.block(index)
            made = tensor.read(begin // row_bytes, end // row_bytes)
            assert made.dtype == entry.dtype, f"rows of {made.dtype} in a tensor of {entry.dtype}"
            yield _bytes_of(made)
        return
    data = _bytes_of(tensor)
    for index in range(len(entry.digests)):
        begin, end = entry.block(index)
        yield data[begin:end]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    tensor = tensor.detach().cpu().resolve_neg().contiguous()
    # Not reshape(-1): a tensor of one element is contiguous whatever its stride, but view() refuses it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def file_bytes(tensors: Mapping[str, torch.Tensor | MadeRows], metadata: Mapping[str, Any]) -> int:
    """Return the size of the file that `write` would write."""
    blocks = {name: rows.block_bytes for name, rows in tensors.items() if isinstance(rows, MadeRows)}
    entries = _lay_out("", tensors, {name: size for name, size in blocks.items() if size is not None})
    return len(encode_head("", metadata, entries)) + sum(entry.size_bytes for entry in entries.values())


def _lay_out(
    path: Place | str, tensors: Mapping[str, torch.Tensor | MadeRows], blocks: Mapping[str, int]
) -> dict[str, Entry]:
    """Return the entry of each tensor, with its place in the file and empty digests."""
    for name, step in blocks.items():
        if name not in tensors or not is_count(step) or step == 0:
            raise errors.InputError(
                f"{path}: blocks of {step!r} bytes for tensor {name!r}; expected a positive integer "
                f"and one of {', '.join(tensors)}"
            )
    entries: dict[str, Entry] = {}
    begin = 0
    # Wide types first: every tensor then starts at a multiple of its item size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if name == "__metadata__" or tensor.dtype not in DTYPE_NAMES or tensor.dim() > MAX_DIMS:
            raise errors.InputError(
                f"{path}: tensor {name!r} is {tensor.dtype} with {tensor.dim()} dimensions; expected one of "
                f"{', '.join(DTYPES)}, at most {MAX_DIMS} dimensions and a name other than '__metadata__'"
            )
        size_bytes, block_bytes = tensor.numel() * tensor.dtype.itemsize, blocks.get(name)
        digests = (NO_DIGEST,) * num_blocks(size_bytes, block_bytes)
        entries[name] = Entry(tensor.dtype, tuple(tensor.shape), begin, size_bytes, block_bytes, digests)
        begin += size_bytes
    return entries


@dataclass(frozen=True)
class Archive:
    """An opened recording. It keeps no file open, so that it can be pickled and sent to workers."""

    path: Place
    nbytes: int
    """Size of the whole file."""
    version: int
    checksum: str
    """Checksum of the header. The header holds the checksums of all tensors, so only equal files have an equal one."""
    metadata: dict[str, Any]
    """The keys and values that were given to `write`."""
    limit: MemoryLimit
    """How much memory the file may ask for."""
    _entries: dict[str, Entry]
    _data_begin: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order of the file."""
        return tuple(self._entries)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return type and shape of a tensor, without reading it."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def tensor(
        self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read and check a whole tensor. Give `shape` and `dtype` to refuse any other."""
        entry = self._expect(name, shape, dtype)
        return self._load(name, 0, entry.size_bytes).view(entry.dtype).reshape(entry.shape)

    def get(self, name: str) -> torch.Tensor | None:
        """Read and check a whole tensor; None if the file has none of this name."""
        return self.tensor(name) if name in self._entries else None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read and check all tensors."""
        return {name: self.tensor(name) for name in self._entries}

    def rows(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Rows:
        """Return a reader of rows; a large tensor is not read whole. Give `shape` and `dtype` to refuse any other."""
        entry = self._expect(name, shape, dtype)
        small = entry.size_bytes <= RESIDENT_BYTES or not entry.shape
        return TensorRows(self.tensor(name)) if small else self.stored_rows(name)

    def stored_rows(self, name: str) -> StoredRows | RemoteRows:
        """Return a reader of rows that keeps none of them."""
        return RemoteRows(self, name) if isinstance(self.path, Url) else StoredRows(self, name)

    def _expect(self, name: str, shape: Sequence[int] | None, dtype: torch.dtype | None) -> Entry:
        entry = self._entry(name)
        expected = (entry.dtype if dtype is None else dtype, entry.shape if shape is None else tuple(shape))
        if expected != (entry.dtype, entry.shape):
            found = f"tensor {name!r} is {entry.dtype} {list(entry.shape)}"
            required = f"{expected[0]} {list(expected[1])} by the settings"
            raise refuse(errors.TensorShapeError, self.path, found, required)
        return entry

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows start:stop of dimension 0; only the blocks that hold them are read and checked."""
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
        with self.open() as file:
            for name, entry in self._entries.items():
                for index in range(len(entry.digests)):
                    self._read_block(file, name, index)

    def open(self) -> RangedFile:
        return _open(self.path, self.nbytes)

    def place(self, name: str) -> int:
        """Where the bytes of a tensor begin in the file."""
        return self._data_begin + self._entry(name).begin

    def block_bytes(self, name: str) -> int:
        entry = self._entry(name)
        return entry.block_bytes or max(1, entry.size_bytes)

    def check_block(self, file: RangedFile, name: str, index: int) -> None:
        """Check a block of a tensor, a few megabytes at a time."""
        self._read_block(file, name, index)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            found, expected = f"no tensor {name!r}", f"one of {', '.join(self.names) or '(it holds none)'}"
            advice = "Was it written by another recorder, or with other settings?"
            raise refuse(errors.MissingTensorError, self.path, found, expected, advice)
        return self._entries[name]

    def _load(self, name: str, low: int, high: int) -> torch.Tensor:
        """Return bytes low:high of a tensor, after checking every block that they touch."""
        entry = self._entry(name)
        step = entry.block_bytes or max(entry.size_bytes, 1)
        first = min(low // step, len(entry.digests) - 1)
        last = max(first, -(-high // step) - 1)
        begin, end = entry.block(first)[0], entry.block(last)[1]
        loaded = torch.empty(end - begin, dtype=torch.uint8, device="cpu")  # (size_bytes,)
        with self.open() as file:
            for index in range(first, last + 1):
                self._read_block(file, name, index, loaded.numpy().data[index * step - begin :])
        part = loaded[low - begin : high - begin]
        # A copy starts at an aligned address, and lets the memory of the whole blocks go.
        return part if len(part) == len(loaded) else part.clone()

    def _read_block(self, file: RangedFile, name: str, index: int, target: memoryview | None = None) -> None:
        """Read and check a block, chunk by chunk; copy its bytes to the start of `target`, if given."""
        entry = self._entries[name]
        begin, end = entry.block(index)
        place = self._data_begin + entry.begin + begin
        hasher = blake2b(digest_size=DIGEST_BYTES)
        for low in range(0, end - begin, CHUNK_BYTES):
            high = min(low + CHUNK_BYTES, end - begin)
            chunk = file.read(place + low, high - low)
            if len(chunk) != high - low:
                found = f"the file now ends inside tensor {name!r}"
                expected = f"the {self.nbytes} bytes that it had when it was opened"
                raise refuse(errors.TruncatedRecordingError, self.path, found, expected)
            hasher.update(chunk)
            if target is not None:
                target[low:high] = chunk
        self.check_digest(name, index, hasher.hexdigest())

    def check_digest(self, name: str, index: int, found: str) -> None:
        """Refuse a block whose bytes have another digest than the header says."""
        entry = self._entries[name]
        if found != entry.digests[index]:
            begin, end = entry.block(index)
            text = f"bytes {begin}..{end} of tensor {name!r} have checksum {found}"
            advice = f"Damaged, or replaced after it was opened: open it again. {RESTORE}"
            raise refuse(errors.ChecksumError, self.path, text, entry.digests[index], advice)


def open_archive(path: AnyPath | Url, max_bytes: int | None = None) -> Archive:
    """Open a recording: read its header, and refuse the file unless checksum and lengths agree.

    path       or a URL: what is needed of the file is then read by ranges
    max_bytes  memory that the file may ask for; by default the rule of memory.py
    """
    where = place(path)
    with _open(where) as file:
        nbytes = file.size
        head = read_head(where, file, nbytes)
    limit = MemoryLimit(where, nbytes, max_bytes)
    limit.check_header(head)
    table = parse_json(where, "the header", head[LENGTH_BYTES:])
    fields = table.pop("__metadata__")  # an object: `read_head` has checked the magic, which opens it
    version = check_head(where, head, fields.get("version"))
    values = {key: parse_json(where, f"metadata {key!r}", fields[key]) for key in sorted(fields.keys() - RESERVED)}
    checksums = parse_json(where, "metadata 'checksums'", fields.get("checksums"))
    entries = parse_table(where, table, checksums, data_bytes=nbytes - len(head))
    return Archive(where, nbytes, version, fields["checksum"], values, limit, entries, len(head))


def has_magic(path: Path) -> bool:
    """Whether a file begins as all of ours do, whatever comes then."""
    try:
        with _open(path) as file:
            return file.read(0, LENGTH_BYTES + len(MAGIC))[LENGTH_BYTES:] == MAGIC
    except errors.NotARecordingError:
        return False


def _open(path: Place, nbytes: int | None = None) -> RangedFile:
    """nbytes: of a file behind a URL, where that is known"""
    expected = "a recording (.krn)", "Check the path"
    if isinstance(path, Url):
        return open_ranged(path, nbytes)
    try:
        # Checked before opening: to open a named pipe would wait for ever.
        if path.exists() and not path.is_file():
            raise refuse(errors.NotARecordingError, path, "is a folder or a device", *expected)
        return open_ranged(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        found = f"cannot be read ({getattr(error, 'strerror', error)})"
        raise refuse(errors.NotARecordingError, path, found, *expected) from error
