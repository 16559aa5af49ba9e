"""SIGTERM and SIGHUP stop a command as Ctrl-C does: after the current step, with what is done saved.

    with stopping_like_ctrl_c() as stop: ...  ->  KeyboardInterrupt; stop.exit_code tells which signal came

A second signal stops at once. A signal that the process ignored from its start, as under nohup, is ignored still.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

NAMES = ("SIGTERM", "SIGHUP")  # Windows has the first alone


@dataclass
class Stop:
    signum: int = signal.SIGINT

    @property
    def exit_code(self) -> int:
        """As shells report a process that a signal ended: 130, 143, 129."""
        return 128 + int(self.signum)


def is_of_a_stop(error: BaseException | None) -> bool:
    """Whether a stop led to this error: Python and other packages may wrap one, as where a class is being defined."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def stopping_like_ctrl_c() -> Iterator[Stop]:
    stop, owner = Stop(), os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker: it has nothing to save
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
            return
        stop.signum = signum
        # Not raise_signal(SIGINT): a shell may have set that to be ignored, as for a command in the background.
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for name in NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                previous[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
