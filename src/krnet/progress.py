"""How long calls tell of their progress: each takes `watch`, a function that receives one Progress after another.

    krnet.record(..., watch=print)    krnet.learn(..., watch=print)    krnet.extract(..., watch=print)

`krnet.show_progress` is such a function; it draws a bar.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Progress:
    """What a long call is doing, how far it is, and how well it goes; its `watch` receives one every few steps.

    >>> import krnet, torch
    >>> seen = []
    >>> recording = krnet.record(torch.rand(40, 4, 3, 3), recorder="pca", watch=seen.append)
    >>> seen[0].name, seen[0].share, seen[0].done, seen[0].unit
    ('reading the features', 1.0, 40, 'samples')
    """

    name: str
    """What is being done, in a few words: "fit", "kril, task 2 of 10: training"."""
    share: float | None = None
    """The part of it that is done, 0 to 1; None if that is unknown."""
    done: int = 0
    """How many units are done."""
    unit: str = ""
    """What `done` counts: iterations, samples, tasks."""
    seconds: float = 0.0
    """Time since it began."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Figures of this moment by name: loss, R2, accuracy."""

    @property
    def seconds_left(self) -> float:
        """Estimated time until it is done; infinity if unknown."""
        return self.seconds * (1 - self.share) / self.share if self.share else math.inf


Watch = Callable[[Progress], None]


def announcing(watch: Watch | None) -> Callable[[str], None]:
    """Return say(name), which tells `watch` that work of unknown length begins."""
    return lambda name: None if watch is None else watch(Progress(name))


def counting(watch: Watch | None, name: str, total: int) -> Callable[[int], None]:
    """Return tell(done), which tells `watch` that `done` of `total` samples are done."""
    started = time.perf_counter()

    def tell(done: int) -> None:
        if watch:
            watch(Progress(name, done / max(1, total), done, "samples", time.perf_counter() - started))

    return tell


def closing_watch(call: Callable[P, R]) -> Callable[P, R]:
    """For public calls with a keyword `watch`: closes it, if it has a `close`, when the call ends, however it ends."""

    @wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        finally:
            close = getattr(kwargs.get("watch"), "close", None)
            if close is not None:
                close()

    return wrapper
