"""The streams of the ANS coder as bytes.

what was pushed on a coder -> stream_of -> bytes -> coder_of -> a coder that gives it back -> check_used_up
"""

from __future__ import annotations

from typing import Any

import numpy as np

from krnet.coding.coder import ans
from krnet.errors import NotARecordingError
from krnet.io.header import RESTORE


def stream_of(coder: Any) -> bytes:
    """What was pushed on a coder, as bytes."""
    # Zero bytes at the end are dropped: the last word is never zero, so `coder_of` can restore them.
    stream: bytes = coder.get_compressed().astype("<u4").tobytes().rstrip(b"\0")
    return stream


def coder_of(stream: bytes) -> Any:
    """The coder that `stream_of` was given."""
    if stream.endswith(b"\0"):
        raise NotARecordingError(f"a block of the coder ends in a zero byte, as none does. {RESTORE}")
    words = np.frombuffer(stream + bytes(-len(stream) % 4), "<u4").astype(np.uint32)
    return ans().stack.AnsCoder(words)


def check_used_up(coder: Any, stream: bytes, num_rows: int) -> None:
    if not coder.is_empty():  # an undamaged stream is used up exactly; most damage shows here
        raise NotARecordingError(
            f"a block of {len(stream)} bytes goes on after its {num_rows} rows: not what was encoded. {RESTORE}"
        )
