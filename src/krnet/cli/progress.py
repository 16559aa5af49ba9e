"""Show progress on stderr: a live bar on a terminal, elsewhere a line every few seconds, nothing when quiet.

with Display() as display:
    krnet.record(..., watch=display.fit)

task loop -> Watchers -> ProgressLine -> Display
                      -> TensorBoardLog -> DIR/tensorboard
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

if TYPE_CHECKING:  # these modules import torch, which takes seconds
    from krnet.task_loop import Watcher
    from krnet.train.loop import Status

LINE_EVERY_S = 5.0  # seconds between two lines where there is no terminal


class Display:
    """A progress bar on a terminal, lines elsewhere."""

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
            # rich would otherwise send stdout, which holds the results, through the console on stderr.
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
        """Show that a piece of work of unknown length begins."""
        self._show(name, None, "", now=True)

    def count(self, done: int, total: int, name: str) -> None:
        """Show `done` of `total`."""
        if done < total:
            self._show(name, done / total, f"{done:,} of {total:,}", now=False)

    def fit(self, status: Status, r2: float) -> None:
        """Show the state of a fit; `krnet.record` takes this method as its `watch`."""
        rate = status.iteration / status.seconds if status.seconds else 0.0
        text = (
            f"{100 * status.progress:3.0f} %  {status.iteration:,} it  {rate:.3g} it/s  R2 {r2:.4f}  "
            f"elapsed {clock(status.seconds)}  left {clock(status.seconds_left)}"
        )
        self._show(status.label, status.progress, text, now=False)

    def share(self, name: str, share: float, text: str) -> None:
        """Show that `share` (0 to 1) of a piece of work is done."""
        self._show(name, share, text, now=False)

    def _show(self, name: str, share: float | None, text: str, now: bool) -> None:
        if self._bar:
            # total=None makes the bar pulse; a number turns it back into a bar.
            self._bar.update(
                self._task, description=name, total=None if share is None else 1.0, completed=share or 0.0, text=text
            )
        elif not self._quiet and (now or time.monotonic() - self._last_line_s >= LINE_EVERY_S):
            self._last_line_s = -math.inf if now else time.monotonic()
            print(f"{name}  {text}".rstrip(), file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Format a duration as 1:02:03 or 2:03; infinity, an unknown duration, is -:--."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class ProgressLine:
    """Show method, task, piece of work, share done, loss, time left, and the accuracy after the last task."""

    def __init__(self, display: Display):
        self.display, self.name, self.last_accuracy = display, "", ""
        self.epochs: int | None = None

    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None:
        if task == 0:
            self.last_accuracy = ""  # it belongs to the previous method
        self.name, self.epochs = f"{method}  task {task} of {num_tasks - 1}  {name}", epochs
        self.display.phase(self.name)

    def status(self, status: Status) -> None:
        left = f"elapsed {clock(status.seconds)}  left {clock(status.seconds_left)}"
        done = f"{status.iteration:,} it" if self.epochs is None else f"epoch {status.progress * self.epochs:.1f}"
        text = f"{100 * status.progress:3.0f} %  {done}  loss {status.loss:.4g}  {left}{self.last_accuracy}"
        self.display.share(self.name, status.progress, text)

    def accuracy(self, method: str, task: int, rows: Mapping[str, float]) -> None:
        text = ", ".join(f"{row} {100 * value:.2f} %" for row, value in rows.items())
        self.last_accuracy = f"  accuracy {text}"
        self.display.phase(f"{method}  task {task} done: {text}")


class TensorBoardLog:
    """Log every loss and the accuracy after every task for TensorBoard; log nothing if it is not installed."""

    def __init__(self, folder: Path):
        self.folder, self.tag = folder, ""
        self.writer: Any = None

    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None:
        self.tag = f"{method}/task {task}/{name}"
        if self.writer is None:  # not in __init__: a run that is refused or already finished writes no logs
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self.writer = SummaryWriter(str(self.folder))  # type: ignore[no-untyped-call]

    def status(self, status: Status) -> None:
        if self.writer:
            self.writer.add_scalar(f"loss/{self.tag}", status.loss, status.iteration)

    def accuracy(self, method: str, task: int, rows: Mapping[str, float]) -> None:
        if self.writer:
            for row, value in rows.items():
                self.writer.add_scalar(f"accuracy/{method} {row}", value, task)
            self.writer.flush()


class Watchers:
    """Pass everything on to several watchers."""

    def __init__(self, watchers: Sequence[Watcher]):
        self.watchers = watchers

    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None:
        for watcher in self.watchers:
            watcher.work(method, task, num_tasks, name, epochs)

    def status(self, status: Status) -> None:
        for watcher in self.watchers:
            watcher.status(status)

    def accuracy(self, method: str, task: int, rows: Mapping[str, float]) -> None:
        for watcher in self.watchers:
            watcher.accuracy(method, task, rows)
