"""What a run of tasks tells while it goes: a line on stderr, and TensorBoard logs beside its results.

task loop -> Watchers -> Progress line (krnet.progress), Board (DIR/tensorboard)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from krnet.learning import Watcher
from krnet.progress import Display, clock
from krnet.training import Status


class Line:
    """Method, task, piece of work, share done, loss, accuracy so far, time left."""

    def __init__(self, display: Display):
        self.display, self.name, self.seen = display, "", ""
        self.epochs: int | None = None

    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None:
        if task == 0:
            self.seen = ""  # that of the method before
        self.name, self.epochs = f"{method}  task {task} of {num_tasks - 1}  {name}", epochs
        self.display.phase(self.name)

    def status(self, status: Status) -> None:
        left = f"elapsed {clock(status.seconds)}  left {clock(status.seconds_left)}"
        done = f"{status.iteration:,} it" if self.epochs is None else f"epoch {status.progress * self.epochs:.1f}"
        text = f"{100 * status.progress:3.0f} %  {done}  loss {status.loss:.4g}  {left}{self.seen}"
        self.display.share(self.name, status.progress, text)

    def accuracy(self, method: str, task: int, rows: Mapping[str, float]) -> None:
        found = ", ".join(f"{row} {100 * value:.2f} %" for row, value in rows.items())
        self.seen = f"  accuracy {found}"
        self.display.phase(f"{method}  task {task} done: {found}")


class Board:
    """Loss of every piece of work and accuracy after every task, for TensorBoard; none where that is not installed."""

    def __init__(self, folder: Path):
        self.folder, self.tag = folder, ""
        self.writer: Any = None

    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None:
        self.tag = f"{method}/task {task}/{name}"
        if self.writer is None:  # only now: a run that is refused, or finished already, writes nothing
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


class Several:
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
