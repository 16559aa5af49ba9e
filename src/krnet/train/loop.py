"""The training loop of every network: it steps, stops, saves and resumes.

    trainee.step(iteration, progress) -> loss, repeated until the iterations, the time or a target is reached
        every few iterations: the mean loss is checked; NaN or infinity stops the run
        every few seconds:    a checkpoint is written, whole or not at all
    a run of open length: goes on in rounds while another pays (open_end.py)

A killed run resumes from its last checkpoint and ends with the same tensors.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from krnet.errors import InputError, KrnetWarning, NonFiniteLossError, RecordingError, ResumeError
from krnet.io import archive
from krnet.progress import Progress, Watch
from krnet.team import team
from krnet.train.open_end import OpenEnd

KIND = "checkpoint"  # of a file, in its metadata
LOSSES = "loop.losses"  # tensor of a checkpoint: the losses since the last check
# Iterations between checks of the loss. Reading it waits for the device, so not at every step. Not in seconds: the
# iteration at which a run reaches its target must not depend on the speed of the machine.
LOSS_CHECK_ITERATIONS = 10


class Trainee(Protocol):
    """What the loop trains. `state` and `load_state` must contain everything that a step depends on."""

    def step(self, iteration: int, progress: float) -> Tensor: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    iterations: int
    seconds: float
    reason: str  # iterations, time_budget or target; with open_end no_gain or time_limit


@dataclass
class Checkpoint:
    """The file of an unfinished run, and the fingerprint that a run must match to resume from it."""

    path: Path
    fingerprint: dict[str, Any]
    every_s: float = 60.0
    check_inputs: Callable[[], None] | None = None
    """Raises an error if what the run learns from has changed; called before each save."""

    def check(self) -> None:
        """Refuse a file of this name that no fit has written: it is someone's, and would be overwritten."""
        refuse_foreign(self.path)

    def save(
        self,
        trainee: Trainee,
        iteration: int,
        seconds: float,
        losses: list[Tensor],
        open_end: OpenEnd | None = None,
    ) -> None:
        if not team().is_first:
            return
        self.check()
        if self.check_inputs is not None:
            self.check_inputs()
        metadata = {"kind": KIND, "fingerprint": self.fingerprint, "threads": torch.get_num_threads()}
        if open_end is not None:
            metadata["open_end"] = open_end.to_metadata()
        state = {**trainee.state(), LOSSES: torch.stack(losses) if losses else torch.zeros(0)}
        archive.write(self.path, state, {**metadata, "iteration": iteration, "seconds": seconds})

    def restore(self, trainee: Trainee, open_end: OpenEnd | None = None) -> tuple[int, float, list[Tensor]]:
        """Load the checkpoint, if there is one, and return its iteration, seconds spent, and unchecked losses."""
        if not self.path.exists():
            return 0, 0.0, []
        try:
            saved = archive.open_archive(self.path)
            state = saved.tensors()
        except RecordingError as error:
            raise ResumeError(f"{error}. To start afresh, remove {self.path}") from error
        found = saved.metadata.get("fingerprint", {})
        for name, expected in self.fingerprint.items():
            if found.get(name) != expected:
                raise ResumeError(
                    f"{self.path}: made with {name} {found.get(name)!r}; this run has {expected!r}. "
                    f"Give the same features and settings; those left out, such as a budget, have their defaults. Or "
                    f"remove the checkpoint to start afresh"
                )
        self._compare_threads(saved.metadata.get("threads"))
        if open_end is not None and "open_end" in saved.metadata:  # checkpoints of earlier versions lack it
            open_end.load_metadata(saved.metadata["open_end"])
        losses = list(state.pop(LOSSES))
        trainee.load_state(state)
        return int(saved.metadata["iteration"]), float(saved.metadata["seconds"]), losses

    def _compare_threads(self, before: Any) -> None:
        """Say so if another number of threads goes on: sums are then rounded otherwise."""
        now = torch.get_num_threads()
        if type(before) is int and before != now and not torch.cuda.is_initialized():
            warnings.warn(
                f"{self.path}: was saved with {before} threads, and this process has {now}. It goes on; the result "
                f"will differ in its last digits from that of a run without a stop. For the same bits set "
                f"OMP_NUM_THREADS={before}",
                KrnetWarning,
                stacklevel=2,
            )

    def remove(self) -> None:
        remove_checkpoint(self.path)


def is_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint, even a damaged one; False for another file, or none."""
    try:
        return bool(archive.open_archive(path).metadata.get("kind") == KIND)
    except RecordingError:
        return archive.has_magic(path)


def refuse_foreign(path: Path) -> None:
    if os.path.lexists(path) and not is_checkpoint(path):
        raise InputError(
            f"{path}: is no checkpoint of krnet, and a fit keeps its checkpoint under this name; rename that file, or "
            f"choose another output"
        )


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; another file of that name stays."""
    if is_checkpoint(path):
        path.unlink(missing_ok=True)


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C take effect after the current step, so that the saved state is consistent; a second one acts at once.

    Yields a function that returns whether Ctrl-C was pressed.
    """
    pressed = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def train(
    trainee: Trainee,
    *,
    max_iterations: int | None,
    time_budget_s: float | None = None,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    open_end: OpenEnd | None = None,
    reached: Callable[[int, float], bool] | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Train until max_iterations or time_budget_s, or until `reached(iteration, mean of the last losses)` is true.

    With open_end, and neither of the two, it runs in rounds until another does not pay.
    """
    assert max_iterations or time_budget_s or open_end, "nothing would ever stop this run"
    iteration, earlier_s = 0, 0.0
    losses: list[Tensor] = []
    if checkpoint and not resume:
        checkpoint.check()
    if checkpoint and resume:
        iteration, earlier_s, losses = checkpoint.restore(trainee, open_end)
    start_time = save_time = time.perf_counter()
    reason = open_end.reason if open_end else ""
    with defer_interrupt() as interrupted:
        while not reason:
            (seconds,) = team().largest(time.perf_counter() - start_time + earlier_s)
            if open_end:
                progress = open_end.progress(iteration, seconds)  # of the round
            else:
                progress = max(
                    iteration / max_iterations if max_iterations else 0.0,
                    seconds / time_budget_s if time_budget_s else 0.0,
                )
            if progress >= 1 and not open_end:
                reason = "iterations" if iteration == max_iterations else "time_budget"
            if losses and (progress >= 1 or iteration % LOSS_CHECK_ITERATIONS == 0):
                loss = torch.stack([loss.cpu() for loss in losses]).mean().item()
                losses = []
                if not math.isfinite(loss):
                    if checkpoint:
                        checkpoint.remove()  # resuming from it would fail again
                    raise NonFiniteLossError(
                        f"the loss became {loss} by iteration {iteration}; nothing was written. Lower the learning "
                        f"rates (lr; for a recorder muon_lr, too): half is a good try. Or look for extreme values in "
                        f"the data"
                    )
                if open_end:
                    open_end.look(iteration, seconds, *team().largest(loss))  # all end at the same iteration
                    reason, progress = open_end.reason, open_end.progress(iteration, seconds)
                if watch:
                    share = min(seconds / open_end.limit_s if open_end else progress, 1.0)
                    watch(Progress("fit", share, iteration, "iterations", seconds, {"loss": loss}))
                if reached and reached(iteration, loss):
                    reason = "target"
            if team().largest(interrupted())[0]:  # also after the last step, since the caller still has work to do
                if checkpoint:
                    checkpoint.save(trainee, iteration, seconds, losses, open_end)
                raise KeyboardInterrupt
            if reason:
                break
            if checkpoint and time.perf_counter() - save_time >= checkpoint.every_s:
                checkpoint.save(trainee, iteration, seconds, losses, open_end)
                save_time = time.perf_counter()
            losses.append(trainee.step(iteration, progress))
            iteration += 1
    return Outcome(iteration, time.perf_counter() - start_time + earlier_s, reason)
