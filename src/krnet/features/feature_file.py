"""A file of features that is written batch by batch and appears when it is complete.

    append(rows, labels) ... finish() -> NAME.safetensors: `features` (N, *shape), `labels` (N,) int64 if there are any
    until then:  NAME.safetensors.partial        room for the header, then the rows
                 NAME.safetensors.partial.json   how many rows are on disk for certain, and which work they belong to

The number of samples may be unknown until the end: the room for the header is chosen first, and filled up with spaces.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from krnet.errors import BusyFolderError, InputError, ResumeError
from krnet.features.resumed import START_ANEW
from krnet.io.atomic import check_place, read_json, write_json
from krnet.io.lock import lock_file

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # names of safetensors
HEADER_STEP = 4096  # bytes; the room before the rows is a multiple of it
ENTRY_BYTES = 512  # at least what the header needs for two arrays, beside the work and the shape
SAVE_EVERY_S = 5.0  # a kill loses at most the rows of this time
VERSION = 1
START = b"krnet.extract: unfinished features\n"  # until the header takes this place
METADATA_KEY = "krnet.extract"  # under this name the finished file says which work made it


def check_destination(path: Path) -> None:
    """Refuse, before any work, a name that a file of features cannot have."""
    if path.suffix.lower() != ".safetensors":
        raise InputError(f"{path}: ends in {path.suffix!r}; expected the name of a file that ends in .safetensors")
    check_place(path)


def partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def refuse_foreign(path: Path) -> None:
    """Refuse a name beside which a file lies that no call of ours has written: it would be overwritten."""
    partial = partial_path(path)
    record = partial.with_name(f"{partial.name}.json")
    if _is_record(record) or (os.path.lexists(partial) and _starts_as_ours(partial)):
        return
    for found in (partial, record):
        if os.path.lexists(found):
            raise InputError(
                f"{found}: is no file of krnet.extract, which keeps what is unfinished under this name; rename that "
                f"file, or choose another name for the output"
            )


def _starts_as_ours(partial: Path) -> bool:
    """Whether a file is empty, or begins as unfinished files do."""
    if not partial.is_file():
        return False
    with partial.open("rb") as file:
        start = file.read(len(START))
    return start in (b"", START)


def _is_record(record: Path) -> bool:
    try:
        return {"version", "work", "rows"} <= read_json(record).keys()
    except (OSError, ValueError):
        return False


def read_work(path: Path) -> dict[str, Any]:
    """The work that made a finished file."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        work = json.loads(header["__metadata__"][METADATA_KEY])
    except (OSError, OverflowError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(
            f"{path}: exists and is no file of krnet.extract ({type(error).__name__}: {error}); choose another name, "
            f"or leave out --resume (in Python, resume=True) to replace it"
        ) from error
    assert isinstance(work, dict), f"{path}: the work is a {type(work).__name__}"
    return work


def rows_start(work: Mapping[str, Any]) -> int:
    """Bytes before the rows: the length of the header, and room for the header."""
    text = json.dumps(json.dumps(work))  # the header holds JSON inside JSON
    needed = 8 + len(text) + len(json.dumps(work["shape"])) + ENTRY_BYTES
    return math.ceil(needed / HEADER_STEP) * HEADER_STEP


class UnfinishedFile:
    """The rows so far. One thread at a time may use it."""

    def __init__(self, path: Path, work: Mapping[str, Any], started_s: float | None = None):
        """Open NAME.safetensors.partial, or make it. No other process may write to it meanwhile.

        started_s: when the call began, as time.perf_counter() says; by default now.
        """
        self.path, self.work = path, dict(work)
        self.rows_start = rows_start(self.work)
        self.started_s = time.perf_counter() if started_s is None else started_s
        self.earlier_s = 0.0
        """Time that earlier calls took."""
        self.partial = partial_path(path)
        self.record = self.partial.with_name(f"{self.partial.name}.json")
        self.fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
        except BaseException:
            os.close(self.fd)
            raise
        self.finished = self.failed = False
        self.num_rows = 0
        """Rows in the file."""
        self.num_saved = 0
        """Rows that are on disk for certain."""
        self.last_batch = 0
        """The first row of the last batch."""
        self.labels: list[Tensor] = []
        """Labels of the rows in this file, in parts; empty if there are none."""
        self.num_labels = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._saved_labels = ""
        self._saved_s = time.monotonic()

    def _lock(self) -> None:
        with suppress(OSError):  # a drive without locks
            try:
                lock_file(self.fd, wait=False)
            except BlockingIOError as error:
                raise self._busy() from error
        # A process that finished between our opening and our locking has renamed the file: it is not ours to change.
        if not self.partial.exists() or not os.path.samestat(os.fstat(self.fd), self.partial.stat()):
            raise self._busy()

    def _busy(self) -> BusyFolderError:
        return BusyFolderError(
            f"{self.path}: another process is writing it. Wait until it has ended, or choose another name"
        )

    @classmethod
    def create(cls, path: Path, work: Mapping[str, Any], started_s: float | None = None) -> UnfinishedFile:
        """An empty file; one of an earlier call is replaced."""
        refuse_foreign(path)
        file = cls(path, work, started_s)
        file.record.unlink(missing_ok=True)
        os.ftruncate(file.fd, 0)
        file._write(START, 0)
        return file

    @classmethod
    def reopen(cls, path: Path) -> UnfinishedFile | None:
        """The file of an earlier call, cut to the rows that are on disk for certain; None if there is none."""
        partial = partial_path(path)
        record = partial.with_name(f"{partial.name}.json")
        if not partial.exists() or not record.exists():
            return None
        try:
            found = read_json(record)
            work, num_rows, last_batch, labels = (found[name] for name in ("work", "rows", "last_batch", "labels"))
            if found["version"] != VERSION or not 0 <= last_batch < num_rows:
                raise ValueError(f"version {found['version']}, rows {num_rows}, last batch {last_batch}")
            earlier_s = float(found.get("seconds", 0.0))  # files of earlier versions lack it
            file = cls(path, work)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise ResumeError(f"{record}: cannot be read ({error}); {START_ANEW}, which replaces {partial}") from error
        file.num_rows = file.num_saved = num_rows
        file.last_batch, file._saved_labels, file.earlier_s = last_batch, labels, earlier_s
        end = file.rows_start + num_rows * file.row_bytes
        if (found_bytes := os.fstat(file.fd).st_size) < end:
            os.close(file.fd)
            raise ResumeError(
                f"{partial}: has {found_bytes} bytes; expected at least {end} for the {num_rows} samples that it "
                f"should hold: {START_ANEW}"
            )
        os.ftruncate(file.fd, end)
        return file

    @property
    def seconds(self) -> float:
        """Time that the file has taken so far, in this call and in earlier ones."""
        return self.earlier_s + time.perf_counter() - self.started_s

    @property
    def row_bytes(self) -> int:
        return math.prod(self.work["shape"]) * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.work["dtype"])
        assert isinstance(found, torch.dtype)
        return found

    def append(self, rows: Tensor, labels: Tensor | None) -> None:
        """Write rows (B, *shape) behind the others; every few seconds, make certain that they are on disk."""
        if self.failed:  # rows before these are missing: these would take their place
            return
        self.failed = True
        data = rows.reshape(-1).view(torch.uint8).numpy().data
        position = self.rows_start + self.num_rows * self.row_bytes
        self._write(data, position)
        self.last_batch = self.num_rows
        self.num_rows += len(rows)
        self._add_labels(labels)
        if time.monotonic() - self._saved_s >= SAVE_EVERY_S:
            self.save()
        self.failed = False

    def recall_labels(self, labels: Tensor | None) -> None:
        """Take the labels of rows that an earlier call wrote; they must be the same as then."""
        self._add_labels(labels)
        if self.num_labels == self.num_saved and self._hash.hexdigest() != self._saved_labels:
            raise ResumeError(
                f"{self.partial}: the labels of its {self.num_saved} samples were others. Give the labels and the "
                f"order of the first call, or {START_ANEW}"
            )

    def _add_labels(self, labels: Tensor | None) -> None:
        if labels is not None:
            self.labels.append(labels)
            self.num_labels += len(labels)
            self._hash.update(labels.contiguous().numpy().data)

    def _write(self, data: memoryview | bytes, position: int) -> None:
        view = memoryview(data)
        try:
            while len(view):
                written = os.pwrite(self.fd, view, position)
                view, position = view[written:], position + written
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}; what is written so far is kept beside it: make room, then give the same call with "
                f"resume",
                str(self.path),
            ) from error

    def read(self, first: int, stop: int) -> Tensor:
        """Rows first..stop-1, (stop - first, *shape)."""
        position = self.rows_start + first * self.row_bytes
        data = bytearray(os.pread(self.fd, (stop - first) * self.row_bytes, position))
        return torch.frombuffer(data, dtype=self.dtype).reshape(stop - first, *self.work["shape"])

    def save(self) -> None:
        """Put all rows on disk, then the record that counts them: a crash in between loses rows, and breaks nothing."""
        if self.num_rows > self.num_saved:
            os.fsync(self.fd)
            record = {
                "version": VERSION,
                "work": self.work,
                "rows": self.num_rows,
                "last_batch": self.last_batch,
                "labels": self._hash.hexdigest(),
                "seconds": round(self.seconds, 3),
            }
            write_json(self.record, record)
            self.num_saved = self.num_rows
        self._saved_s = time.monotonic()

    def finish(self) -> None:
        """Add labels and header, and give the file its name."""
        self.save()
        rows_end = self.num_rows * self.row_bytes
        shape = [self.num_rows, *self.work["shape"]]
        header: dict[str, Any] = {
            "__metadata__": {METADATA_KEY: json.dumps(self.work)},
            "features": {"dtype": DTYPES[self.work["dtype"]], "shape": shape, "data_offsets": [0, rows_end]},
        }
        if self.labels:
            assert self.num_labels == self.num_rows, f"{self.num_labels} labels of {self.num_rows} rows"
            labels = torch.cat(self.labels)
            offsets = [rows_end, rows_end + 8 * len(labels)]
            header["labels"] = {"dtype": "I64", "shape": [len(labels)], "data_offsets": offsets}
            self._write(labels.numpy().data.cast("B"), self.rows_start + rows_end)
        text = json.dumps(header).encode()
        room = self.rows_start - 8
        assert len(text) <= room, f"a header of {len(text)} bytes in a room of {room}"
        self._write(room.to_bytes(8, "little") + text.ljust(room), 0)
        os.fsync(self.fd)
        os.replace(self.partial, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, must survive a power cut
        finally:
            os.close(folder)
        self.record.unlink(missing_ok=True)
        self.finished = True

    def close(self) -> None:
        """Keep what can be resumed: the rows so far are saved. A file without rows is removed."""
        if not self.finished:
            with suppress(OSError):  # a full disk: rows that were saved before are kept
                self.save()
            if not self.num_saved:
                self.partial.unlink(missing_ok=True)
        os.close(self.fd)
