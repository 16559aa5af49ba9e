"""The one step-and-resume loop that everything trains with.

    trainee.step(iteration, progress) -> loss, again and again, until iterations, time or a check say stop
        every few iterations: the loss is looked at; NaN or infinity stops the run
        every few seconds:    a checkpoint, written whole or not at all

A run that is killed goes on from its last checkpoint and ends in the same tensors.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from krnet.errors import NonFiniteLossError, RecordingError, ResumeError
from krnet.io import archive

LOSSES = "loop.losses"
# Reading the loss waits for the device. Counted in iterations, not seconds, so that where a run stops for its
# target does not depend on the machine's speed.
LOOK_EVERY = 10


class Trainee(Protocol):
    """What the loop drives. `state` and `load_state` must carry everything that a step depends on."""

    def step(self, iteration: int, progress: float) -> Tensor: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Status:
    """What a watcher is told; `progress` runs from 0 to 1."""

    iteration: int
    progress: float
    loss: float
    seconds: float
    label: str = "fit"
    """What is under way, in a few words."""

    @property
    def seconds_left(self) -> float:
        return self.seconds * (1 - self.progress) / self.progress if self.progress else math.inf


@dataclass(frozen=True)
class Outcome:
    iterations: int
    seconds: float
    reason: str  # iterations, time_budget or target


@dataclass
class Checkpoint:
    """Where an unfinished run is kept, and what it must match to be taken up again."""

    path: Path
    fingerprint: dict[str, Any]
    every_s: float = 60.0

    def save(self, trainee: Trainee, iteration: int, seconds: float, losses: list[Tensor]) -> None:
        metadata = {"kind": "checkpoint", "fingerprint": self.fingerprint}
        state = {**trainee.state(), LOSSES: torch.stack(losses) if losses else torch.zeros(0)}
        archive.write(self.path, state, {**metadata, "iteration": iteration, "seconds": seconds})

    def restore(self, trainee: Trainee) -> tuple[int, float, list[Tensor]]:
        """Load the checkpoint if there is one: its iteration, seconds spent, losses not yet looked at."""
        if not self.path.exists():
            return 0, 0.0, []
        try:
            kept = archive.open_archive(self.path)
            state = {name: kept.tensor(name) for name in kept.names}
        except RecordingError as error:
            raise ResumeError(f"{error}. To start afresh, remove {self.path}") from error
        found = kept.metadata.get("fingerprint", {})
        for name, expected in self.fingerprint.items():
            if found.get(name) != expected:
                raise ResumeError(
                    f"{self.path}: made with {name} {found.get(name)!r}; this run has {expected!r}. "
                    f"Give the same features and settings, or remove the checkpoint to start afresh"
                )
        losses = list(state.pop(LOSSES))
        trainee.load_state(state)
        return int(kept.metadata["iteration"]), float(kept.metadata["seconds"]), losses

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


@contextmanager
def finishing_the_step() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the loop to stop after the current step, so that what it saves is whole; twice: at once."""
    asked = False

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def train(
    trainee: Trainee,
    *,
    max_iterations: int | None,
    time_budget_s: float | None = None,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    reached: Callable[[int, float], bool] | None = None,
    watch: Callable[[Status], None] | None = None,
) -> Outcome:
    """Run to the end; `reached(iteration, loss)`, asked with the mean of the last losses, may end it early."""
    assert max_iterations is not None or time_budget_s is not None, "nothing would ever stop this run"
    iteration, before_s = 0, 0.0
    losses: list[Tensor] = []
    if checkpoint and resume:
        iteration, before_s, losses = checkpoint.restore(trainee)
    started = saved = time.perf_counter()
    reason = ""
    with finishing_the_step() as interrupted:
        while not reason:
            seconds = time.perf_counter() - started + before_s
            progress = max(
                iteration / max_iterations if max_iterations else 0.0,
                seconds / time_budget_s if time_budget_s else 0.0,
            )
            if progress >= 1:
                reason = "iterations" if iteration == max_iterations else "time_budget"
            if losses and (reason or iteration % LOOK_EVERY == 0):
                loss = torch.stack([loss.cpu() for loss in losses]).mean().item()
                losses = []
                if not math.isfinite(loss):
                    if checkpoint:
                        checkpoint.remove()  # going on from it would end here again
                    raise NonFiniteLossError(
                        f"the loss became {loss} by iteration {iteration}; nothing was written. Lower the learning "
                        f"rates (lr; for a recorder muon_lr, too): half is a good try. Or look for extreme values in "
                        f"the data"
                    )
                if watch:
                    watch(Status(iteration, min(progress, 1.0), loss, seconds))
                if reached and reached(iteration, loss):
                    reason = "target"
            if interrupted():  # even at the very end: the caller has more to do than this
                if checkpoint:
                    checkpoint.save(trainee, iteration, seconds, losses)
                raise KeyboardInterrupt
            if reason:
                break
            if checkpoint and time.perf_counter() - saved >= checkpoint.every_s:
                checkpoint.save(trainee, iteration, seconds, losses)
                saved = time.perf_counter()
            losses.append(trainee.step(iteration, progress))
            iteration += 1
    return Outcome(iteration, time.perf_counter() - started + before_s, reason)
