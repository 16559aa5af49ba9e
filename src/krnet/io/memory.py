"""How much memory and work a file may ask for: rules in terms of its size, checked before anything is allocated.

    opening a recording, or replaying a sample of it    at most max(512 MB, 512 times the file)
    replaying a few samples by a network                at most 128 multiplications for each of these bytes
    its header, as Python's objects                     at most 256 MB + 4 times the file

A forged file of a few kilobytes can name any sizes. Real files stay well below, those of a low rate and large axes too
(tests/attacks/test_memory.py). Whoever trusts a file that needs more gives `max_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from krnet.config import check_int, format_size
from krnet.errors import OversizedRecordingError
from krnet.io.atomic import AnyPath
from krnet.io.places import Place

FREE_BYTES, FILE_FACTOR = 512 << 20, 512
MULTIPLICATIONS_PER_BYTE = 128  # 69 thousand million for a small file: a second or two of one core
FREE_HEADER_BYTES, HEADER_FACTOR = 256 << 20, 4
VALUE_BYTES = 80  # of a number, a text or a list in a parsed header, about
VALUE_MARKS = (b",", b":", b"[", b"{")  # each value of a JSON text follows one of these


@dataclass(frozen=True)
class MemoryLimit:
    """What one file may ask for."""

    path: Place | AnyPath
    file_bytes: int
    max_bytes: int | None = None
    """The caller's limit in place of the rule."""

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            check_int("max_bytes", self.max_bytes, 1)

    def check(self, num_bytes: int, what: str) -> None:
        """Refuse `num_bytes`, an upper bound of the memory that `what` takes, where that is too much for the file."""
        self._compare(num_bytes, what, self._allowed)

    @property
    def _allowed(self) -> int:
        return max(FREE_BYTES, FILE_FACTOR * self.file_bytes)

    def check_work(self, num_multiplications: int, what: str) -> None:
        """Refuse what takes far longer than a file of this size speaks for."""
        allowed = MULTIPLICATIONS_PER_BYTE * (self.max_bytes or self._allowed)
        if num_multiplications > allowed:
            needed = -(-num_multiplications // MULTIPLICATIONS_PER_BYTE)
            raise OversizedRecordingError(
                f"{self.path}: {what} would take up to {num_multiplications:.3g} multiplications; expected at most "
                f"{allowed:.3g} for a file of {self.file_bytes} bytes. If you trust the file, allow it: --max-bytes "
                f"{needed} (in Python, krnet.open(path, max_bytes={needed}))"
            )

    def check_header(self, text: bytes) -> None:
        """Refuse a header of so many values that they would take much memory."""
        num_values = sum(text.count(mark) for mark in VALUE_MARKS)
        allowed = FREE_HEADER_BYTES + HEADER_FACTOR * self.file_bytes
        self._compare(VALUE_BYTES * num_values, f"its header, of {len(text)} bytes,", allowed)

    def _compare(self, num_bytes: int, what: str, allowed: int) -> None:
        if num_bytes > (self.max_bytes or allowed):
            raise OversizedRecordingError(
                f"{self.path}: {what} would take up to {format_size(num_bytes)} of memory; expected at most "
                f"{format_size(self.max_bytes or allowed)} for a file of {self.file_bytes} bytes. If you trust the "
                f"file, allow it: --max-bytes {num_bytes} (in Python, krnet.open(path, max_bytes={num_bytes}))"
            )
