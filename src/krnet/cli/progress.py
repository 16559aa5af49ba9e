"""Show progress on stderr: a live bar on a terminal or in a notebook, elsewhere a line every few seconds.

krnet.record(..., watch=krnet.show_progress)

with Display(quiet) as display:
    krnet.learn(..., watch=several(display, TensorBoardLog(DIR / "tensorboard")))
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress

from krnet.config import plain_text
from krnet.progress import Progress, Watch

LINE_EVERY_S = 5.0  # seconds between two lines where there is no bar
UPDATE_EVERY_S = 0.1  # seconds between two updates in a notebook; more would only load the browser
ACCURACY = "accuracy"  # values whose name begins so are shown in percent


class Display:
    """A watcher that draws a bar on a terminal or in a notebook, and prints lines elsewhere.

    The bar appears with the first Progress and goes with `close`, which every call with `watch` calls at its end.

    >>> import krnet, torch
    >>> recording = krnet.record(torch.rand(40, 4, 3, 3), recorder="pca", watch=krnet.show_progress)
    """

    def __init__(self, quiet: bool = False):
        self._quiet = quiet
        self._bar: TerminalBar | NotebookBar | None = None
        self._last_line_s: float | None = None  # None: nothing has been shown yet
        self._last_accuracy = ("", "")  # of the latest task: method, text
        self._unfinished = ""  # the work that was shown last, and not at its end

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, progress: Progress) -> None:
        """Show the state of a long call; every call with `watch` takes a Display."""
        if progress.unit == "tasks":
            text = _values_text(progress)
            self._last_accuracy = (_method(progress), text)
            self._show(progress.name, None, text, now=True)
        elif progress.share is None:
            self._show(progress.name, None, _values_text(progress), now=True)
        elif progress.share < 1 or progress.unit == "iterations" or self._unfinished == progress.name:
            # The end of work that was shown before is shown at once: the last line then says 100 %.
            at_end = progress.share >= 1 and self._unfinished == progress.name
            self._show(progress.name, progress.share, self._text(progress), now=at_end)

    def phase(self, name: str) -> None:
        """Show that a piece of work of unknown length begins."""
        self(Progress(name))

    def close(self) -> None:
        """Remove the bar; in a notebook its last state stays."""
        if self._bar:
            self._bar.stop()
        self._bar, self._last_line_s, self._last_accuracy, self._unfinished = None, None, ("", ""), ""

    def _text(self, progress: Progress) -> str:
        share, seconds = progress.share or 0.0, progress.seconds
        rate = f"{rate_text(progress.done / seconds)}/s" if seconds else ""
        left = f"elapsed {clock(seconds)}  left {clock(progress.seconds_left)}"
        method, accuracy = self._last_accuracy
        last = f"last task: {accuracy}" if accuracy and method == _method(progress) else ""
        done = f"{progress.done:,} {progress.unit}"
        parts = (f"{100 * share:3.0f} %", done, rate, _values_text(progress), left, last)
        return "  ".join(part for part in parts if part)

    def _show(self, name: str, share: float | None, text: str, now: bool) -> None:
        name, text = plain_text(name), plain_text(text)
        if self._quiet:
            return
        if self._last_line_s is None:
            self._last_line_s = -math.inf
            self._bar = _make_bar()
        if not (self._bar or now or time.monotonic() - self._last_line_s >= LINE_EVERY_S):
            return
        self._unfinished = name if share is not None and share < 1 else ""
        if self._bar:
            self._bar.show(name, share, text)
        else:
            self._last_line_s = -math.inf if now else time.monotonic()
            print(f"{name}  {text}".rstrip(), file=sys.stderr, flush=True)


show_progress = Display()


class TerminalBar:
    """A bar of rich, which goes when it is stopped."""

    def __init__(self, console: Console):
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[text]}"))
        # rich would otherwise send stdout, which holds the results, through the console on stderr.
        self._progress = RichProgress(*columns, console=console, transient=True, redirect_stdout=False)
        self._task = self._progress.add_task("", total=None, text="")
        self._progress.start()

    def show(self, name: str, share: float | None, text: str) -> None:
        # total=None makes the bar pulse; a number turns it back into a bar.
        total = None if share is None else 1.0
        self._progress.update(self._task, description=name, total=total, completed=share or 0.0, text=text)

    def stop(self) -> None:
        self._progress.stop()


class NotebookBar:
    """A line of text below the cell, updated in place; the last one stays.

    rich's own bar needs ipywidgets, and leaves the text "Output()" where a stored notebook is shown without a kernel.
    """

    def __init__(self) -> None:
        self._output: Any = None  # the handle that IPython updates it by
        self._last_s = -math.inf
        self._line = self._shown = ""

    def show(self, name: str, share: float | None, text: str) -> None:
        filled = round(20 * (share or 0.0))
        bar = "" if share is None else "━" * filled + "─" * (20 - filled)
        self._line = "  ".join(part for part in (name, bar, text) if part)
        if time.monotonic() - self._last_s >= UPDATE_EVERY_S:
            self._draw()

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._line == self._shown:
            return
        self._last_s, self._shown = time.monotonic(), self._line
        content = {"text/plain": self._line}
        if self._output is None:
            from IPython.display import display

            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)


def _make_bar() -> TerminalBar | NotebookBar | None:
    """A bar on a terminal or in a notebook; None elsewhere."""
    console = Console(stderr=True)
    if console.is_jupyter:
        return NotebookBar()
    return TerminalBar(console) if console.is_terminal else None


def _method(progress: Progress) -> str:
    """The method, of the progress of a run: "kril, task 2 of 10: F2" -> "kril"."""
    return progress.name.split(",")[0]


def _values_text(progress: Progress) -> str:
    return "  ".join(_value_text(name, value) for name, value in progress.values.items())


def _value_text(name: str, value: float) -> str:
    if name.startswith(ACCURACY):
        return f"{name} {100 * value:.2f} %"
    return f"{name} {value:.4f}" if name == "R2" else f"{name} {value:.4g}"


def rate_text(rate: float) -> str:
    """Write a rate to three digits, without an exponent: 0.5, 16.7, 28,100."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else f"{rate:.3g}"


def clock(seconds: float) -> str:
    """Format a duration as 1:02:03 or 2:03; infinity, an unknown duration, is -:--."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class TensorBoardLog:
    """A watcher that logs the values of a run for TensorBoard; it logs nothing if TensorBoard is not installed.

    Losses of a piece of work are logged by iteration, accuracies by task.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.writer: Any = None

    def __call__(self, progress: Progress) -> None:
        if self.writer is None:  # not in __init__: a run that is refused or already finished writes no logs
            try:
                str(self.folder).encode()
                from torch.utils.tensorboard import SummaryWriter
            except (ImportError, UnicodeEncodeError):  # it writes to no folder whose name is not UTF-8
                return
            self.writer = SummaryWriter(str(self.folder))  # type: ignore[no-untyped-call]
        after_task = progress.unit == "tasks"
        title = _method(progress) if after_task else progress.name
        for name, value in progress.values.items():
            if name == "epoch":
                continue  # another measure of the iteration
            self.writer.add_scalar(f"{name}/{title}", value, progress.done)
        if after_task:
            self.writer.flush()


def several(*watches: Watch) -> Watch:
    """A watcher that tells several others."""

    def tell(progress: Progress) -> None:
        for watch in watches:
            watch(progress)

    return tell
