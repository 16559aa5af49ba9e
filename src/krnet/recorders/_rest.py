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
from krnet.recorders.base import Earlier, Job
from krnet.samples import Samples
from krnet.scan import normalise

CHECKED = 64  # samples held that show whether these features are those that were recorded
COUNTED = 0.95  # share of them: the error of a few may be that of hundreds
SLACK = 1.5  # times the error that the recording had; of samples in another order it is (1 + R2) / (1 - R2) times that
ROUNDED = 0.01  # of the variance: features that were made in 16 bits, or anew, are those that were recorded


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
    check_values(job, start)
    others = source.behind(held)
    low, high = (start.tensor(n, shape=job.stats.low.shape, dtype=torch.float32) for n in ("low", "high"))
    return replace(
        job,
        source=others,
        samples=Samples(len(others), source.shape, None if labels is None else labels[held:]),
        stats=replace(job.stats, low=low, high=high, count=len(others) * math.prod(source.shape)),
    )


def check_values(job: Job, start: Earlier) -> None:
    """Refuse features the first of which lie much farther from the replays than the recording says.

    They are what it was recorded from, or its replays: either lies as near as the recording says, or nearer.
    """
    ids = torch.linspace(0, len(start) - 1, min(CHECKED, len(start)), dtype=torch.float64).round().long()
    given = (start.replay(ids).cpu(), job.source.read(ids))
    replays, real = (normalise(x, job.stats.low, job.stats.high, clamp=False).reshape(len(ids), -1) for x in given)
    errors = (replays - real).square().mean(1).sort().values
    error, variance = errors[: math.ceil(COUNTED * len(ids))].mean().item(), real.var(correction=0).item()
    expected = start.info()["r2"]
    if not error <= (SLACK * (1 - expected) + ROUNDED) * variance + 1e-12:
        raise InputError(
            f"{start.path}: holds other features than the first {len(start)} of {job.source.name}: its replays have R2 "
            f"{1 - error / max(variance, 1e-12):.3g} against these, and had {expected:.3g} when recorded. Give the "
            f"features of all samples, those that start holds first and in the same order, or record without start"
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
