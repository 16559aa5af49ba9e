"""Progress on stderr: a live bar on a terminal, elsewhere a plain line every few seconds, nothing when quiet.

with Display() as display:
    krnet.record(..., watch=display.fit)
"""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

if TYPE_CHECKING:
    from krnet.training import Status

LINE_EVERY_S = 5.0


class Display:
    def __init__(self, quiet: bool = False):
        console = Console(stderr=True)
        self._quiet = quiet
        self._last_line_s = -math.inf
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(20),
                TextColumn("{task.fields[text]}"),
            )
            # stdout is for data and stays as it is, whatever happens on stderr.
            self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._task = self._bar.add_task("", total=None, text="")

    def __enter__(self) -> Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def phase(self, name: str) -> None:
        """Something begins whose end cannot be foreseen."""
        self._show(name, None, "", now=True)

    def count(self, done: int, total: int, name: str) -> None:
        if done < total:
            self._show(name, done / total, f"{done:,} of {total:,}", now=False)

    def fit(self, status: Status, r2: float) -> None:
        """A fit is under way: what `krnet.record` tells its watcher."""
        rate = status.iteration / status.seconds if status.seconds else 0.0
        text = (
            f"{100 * status.progress:3.0f} %  {status.iteration:,} it  {rate:.3g} it/s  R2 {r2:.4f}  "
            f"elapsed {clock(status.seconds)}  left {clock(status.seconds_left)}"
        )
        self._show(status.label, status.progress, text, now=False)

    def share(self, name: str, share: float, text: str) -> None:
        """So much of something is done."""
        self._show(name, share, text, now=False)

    def _show(self, name: str, share: float | None, text: str, now: bool) -> None:
        if self._bar:
            # A bar without an end pulses; resetting the total turns one into the other.
            self._bar.update(
                self._task, description=name, total=None if share is None else 1.0, completed=share or 0.0, text=text
            )
        elif not self._quiet and (now or time.monotonic() - self._last_line_s >= LINE_EVERY_S):
            self._last_line_s = -math.inf if now else time.monotonic()
            print(f"{name}  {text}".rstrip(), file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """1:02:03, or 2:03; nothing is known of infinity."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
