"""The ANS coder and its streams. Its package is loaded when it is first needed.

    ans() -> constriction.stream: a coder, and models of the frequencies of symbols
    what was pushed on a coder -> stream_of -> bytes -> coder_of -> a coder that gives it back

The package's first call looks for numpy. An exception meanwhile makes it panic, and Ctrl-C raises one wherever the main
thread is: so a thread of its own makes the first call.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from krnet.errors import NotARecordingError
from krnet.io.header import RESTORE


@cache
def ans() -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_load).result()


def _load() -> Any:
    import constriction

    constriction.stream.stack.AnsCoder(np.zeros(0, np.uint32)).get_compressed()
    return constriction.stream


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
