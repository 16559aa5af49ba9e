"""A recording that grows: the samples it held stay as they are, bit for bit, and those behind them are recorded.

    job (all features), start (the first of them) -> rest -> job (the others), in the range that start has for them
    settings of the job, and of start -> keep_settings -> refused where they differ

Recorded anew with every few samples, from its own replays, a recording would lose a little more each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from krnet.errors import InputError
from krnet.recorders.base import Job
from krnet.samples import Samples


def rest(job: Job, recorder: str) -> Job:
    """The samples behind those that `job.start` holds."""
    start, source, samples = job.start, job.source, job.samples
    assert start is not None, "nothing to grow from"
    if start.recorder != recorder or start.shape != source.shape:
        raise InputError(
            f"{start.path}: a recording of {start.shape} by {start.recorder}; these features are {source.shape} and "
            f"need one of the same shape by {recorder} to start from"
        )
    held = len(start)
    if held >= len(source):
        raise InputError(
            f"{start.path}: holds {held} samples, and there are {len(source)} features; expected more. Give the "
            f"features of all samples, those that start holds first"
        )
    labels = samples.labels
    same = start.labels is None if labels is None else start.labels is not None and labels[:held].equal(start.labels)
    if not same:
        raise InputError(
            f"{start.path}: its labels are not those of the first {held} samples. Give the features and labels of all "
            f"samples, those that start holds first"
        )
    others = source.behind(held)
    low, high = (start.tensor(n, shape=job.stats.low.shape, dtype=torch.float32) for n in ("low", "high"))
    return replace(
        job,
        source=others,
        samples=Samples(len(others), source.shape, None if labels is None else labels[held:]),
        stats=replace(job.stats, low=low, high=high, count=len(others) * math.prod(source.shape)),
    )


def keep_settings(job: Job, config: object, free: Sequence[str]) -> None:
    """config: that of `job.start`; free: the settings that new samples may have to themselves."""
    assert job.start is not None, "nothing to grow from"
    for name, value in job.settings.items():
        found = getattr(config, name, None)
        if name not in free and found != value:
            raise InputError(
                f"{job.start.path}: has {name} {found!r}, not {value!r}; a recording that grows keeps its settings "
                f"({' and '.join(free)} may differ for new samples). Leave {name} out, or record without start"
            )
