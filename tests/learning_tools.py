"""A small data set, its tasks, and settings under which every learner runs in a second or two on a CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from krnet import data, protocol
from krnet.cli import progress as watching
from krnet.data import digits
from krnet.progress import Progress

_whole_digits = digits.load_digits  # a test may put fewer in its place

SMALL = {
    "base": "paper",
    "backbone": "resnet8",
    "base_epochs": 5,
    "epochs": 8,
    "batch_size": 32,
    "base_lr": 0.05,
    "lr": 0.05,
}
# What a method needs beside that to be quick: settings of its own.
OWN: dict[str, dict[str, object]] = {
    "gfr": {"gan_epochs": 2, "hidden": 32, "latent": 8},
    "pass": {"base_lr": 5e-3, "lr": 2e-3},
    "kril": {"head": "trained", "recorder_iterations": 25, "fixed_layers": 3},
    "acil": {"random_features": 64, "fixed_layers": 3},
    "dsal": {"random_features": 64, "fixed_layers": 3},
    "icarl": {"exemplars_per_class": 4},
    "lucir": {"exemplars_per_class": 4},
}


def settings_for(method: str) -> dict[str, object]:
    return {**SMALL, **OWN.get(method, {})}


def small_digits(per_class: int = 24, test_per_class: int = 8, num_classes: int = 8) -> data.DataSet:
    """The first digits, few images of each."""
    whole = _whole_digits()
    parts = []
    for split, number in ((whole.train, per_class), (whole.test, test_per_class)):
        ids = torch.cat([(split.labels == label).nonzero()[:number, 0] for label in range(num_classes)]).sort().values
        parts += [split.images[ids], split.labels[ids]]
    return data.from_arrays(*parts, name=f"digits{num_classes}", mean=whole.mean, std=whole.std, pad=1, layout="NCHW")


@contextmanager
def ctrl_c_at(number: int) -> Iterator[None]:
    """Ctrl-C at the n-th look at a loss that a progress line is told of."""
    seen = []

    def show(self: watching.Display, progress: Progress) -> None:
        if progress.unit == "iterations":
            seen.append(progress)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching.Display, "__call__", show)
        yield


def assert_same_run(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Two runs of the same thing: they differ in times alone."""
    one, other = ({key: value for key, value in run.items() if "seconds" not in key} for run in (found, expected))
    assert one == other


def small_tasks(num_tasks: int = 2) -> protocol.TaskSplit:
    """A base task of four classes and `num_tasks` of two each, in an order that is not the natural one."""
    return protocol.split([3, 1, 0, 2, 7, 5, 6, 4], num_classes=8, base_classes=4, tasks=num_tasks)
