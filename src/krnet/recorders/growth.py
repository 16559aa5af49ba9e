"""A recording that grows: the samples it held stay as they are, bit for bit, and those behind them are recorded.

    job (all features), start (the first of them) -> rest -> job (the others), in the range that start has for them
    settings of the job, and of start -> keep_settings -> refused where they differ

Recorded anew with every few samples, from its own replays, a recording would lose a little more each time.


More samples behind those of a coded recording, which stay as they are.

    start -> its basis, step, groups of columns, centroids, and symbols
    new features --in start's range--> start's basis --> symbols --> behind those of start, all coded anew

Only how frequent each symbol is is counted anew: what the old ones are read back as stays the same, bit for bit. One
setting may differ for new samples, since it matters to the encoder alone: a budget is kept with it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from krnet.coding.entropy import MAX_ALPHABET, MAX_SYMBOL, RESTORE, to_symbols
from krnet.coding.matrix import CODED_TENSORS, CodedConfig, Matrix, MatrixStats, encode, measure
from krnet.config import check_range, from_dict
from krnet.device import exact_math
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.features.stats import normalise
from krnet.recorders.base import Content, Earlier, Job, Recorder, planned_overhead
from krnet.recorders.basis import PREFIX, UNUSED, CodedReplayer, matrix_of, planned_bytes

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


class Growth(ABC):
    """A job that starts from a recording, on its way to the file of all samples."""

    prefix: ClassVar[str]
    """Of the tensors of the coded numbers."""
    free: ClassVar[str]
    """The setting that new samples may have to themselves."""
    limits: ClassVar[tuple[float, float]]
    """What it may be."""

    def __init__(self, job: Job, recorder: Recorder, config_class: type[Any]):
        assert job.start is not None, "nothing to grow from"
        self.job, self.start, self.new = job, job.start, rest(job, recorder.name)
        samples = Samples(len(job.start), job.start.shape, None)
        replayer = recorder.replay(samples, job.start.settings, job.start, job.device)
        assert isinstance(replayer, CodedReplayer), f"{recorder.name} reads with a {type(replayer).__name__}"
        self.basis, self.held = replayer.basis, replayer.reader.coded
        if not np.add.reduceat(self.held.counts, self.held.blocks.tables.starts).all():
            raise NotARecordingError(f"{job.start.path}: has a table that no column goes by. {RESTORE}")
        self.config = from_dict(config_class, job.start.settings)
        if self.free in job.settings:
            check_range(self.free, job.settings[self.free], *self.limits)
        from_dict(config_class, {n: v for n, v in job.settings.items() if n != self.free})  # refuses what none has
        keep_settings(job, self.config, (self.free,))

    @abstractmethod
    def coding(self, value: float) -> tuple[Matrix, CodedConfig]:
        """Numbers of the new samples, and how they are coded, where the free setting has this value."""

    @abstractmethod
    def own(self) -> dict[str, Tensor]:
        """The tensors of the basis."""

    @abstractmethod
    def values(self) -> Sequence[float]:
        """What the free setting may be: what it is in the recording, then what takes ever fewer bytes."""

    def fit(self, settings: Mapping[str, Any]) -> Content:
        started = time.perf_counter()
        with exact_math(), torch.inference_mode():
            numbers, config, found = self._surveyed(settings.get(self.free, self.values()[0]))
            coded = encode(numbers, config, found, self.held)
        tensors = {"low": self.new.stats.low, "high": self.new.stats.high, **self.own()}
        tensors |= {name: tensor for name, tensor in coded.tensors(self.prefix).items() if name in self.stored}
        return Content(tensors=tensors, settings=asdict(self.config), seconds=time.perf_counter() - started)

    @property
    def stored(self) -> set[str]:
        """Names of the tensors of coded numbers that the file has."""
        return {self.prefix + name for name in CODED_TENSORS}

    def for_budget(self, budget: int) -> dict[str, Any]:
        """The first of the values with which the file, grown to all planned samples, keeps the budget; or the last."""
        given = dict(self.job.settings)
        if self.free in given:
            return given
        values, aim = self.values(), float(budget)
        sizes: dict[int, float] = {}

        def size(index: int) -> float:
            if index not in sizes:
                sizes[index] = self._size_bytes(values[index])
            return sizes[index]

        for _ in range(4):
            first, last = 0, len(values) - 1
            while first < last:
                # What the recording has is the most likely, and is tried first.
                middle = 0 if not sizes else (first + last) // 2
                first, last = (first, middle) if size(middle) <= aim else (middle + 1, last)
            found = planned_bytes(self.job, self.fit({self.free: values[first]}), self.prefix, len(self.start))
            if found <= budget or first == len(values) - 1:
                break
            aim *= (1 - UNUSED / 4) * budget / found
        return {**given, self.free: values[first]}

    def _size_bytes(self, value: float) -> float:
        """About how large the file would be, grown to all planned samples, without coding it."""
        with exact_math(), torch.inference_mode():
            _, _, found = self._surveyed(value, self.job.num_planned)
        own = [self.new.stats.low, self.new.stats.high, *self.own().values()]
        overhead = planned_overhead(self.job, len(own) + len(self.stored), asdict(self.config))
        return found.size_bytes + sum(tensor.nbytes for tensor in own) + overhead

    def _surveyed(self, value: float, num_planned: int | None = None) -> tuple[Matrix, CodedConfig, MatrixStats]:
        numbers, config = self.coding(value)
        try:
            return numbers, config, measure(numbers, config, num_planned=num_planned, held=self.held)
        except SettingError as error:  # more symbols than a table may have
            raise SettingError(f"{self.start.path}: {error}; and record without start") from error


class CodedGrowth(Growth):
    """Numbers of new samples that are within the dead zone become 0; the others are rounded as those of start were.

    The zone may be wider than one step here, where rounding all numbers down by as much would miss their centroids.
    Numbers beyond all symbols that tables have space for become the last of them.
    """

    prefix, free, limits = PREFIX, "dead_zone", (0.5, float(MAX_SYMBOL))

    def coding(self, value: float) -> tuple[Matrix, CodedConfig]:
        config = replace(self.config, dead_zone=min(value, self.config.dead_zone))
        numbers, least = self._within(matrix_of(self.new, self.basis), config), value * config.step

        def read(rows: Tensor) -> Tensor:
            found = numbers.read(rows)
            return torch.where(found.abs() < least, 0.0, found)

        return replace(numbers, read=numbers.read if value <= config.dead_zone else read), config

    def _within(self, numbers: Matrix, config: CodedConfig) -> Matrix:
        """Cut to what tables have symbols for, those of the recording among them; as they are where all fit."""
        tables = self.held.blocks.tables
        first = tables.first.astype(np.int64)
        lowest, highest = int(first.min()), int((first + tables.sizes).max()) - 1
        new = to_symbols(self._range, config.step, config.dead_zone).tolist()
        below, above = max(0, lowest - new[0]), max(0, new[1] - highest)
        spare = max(0, MAX_ALPHABET - (highest - lowest + 1))
        if below + above <= spare:
            return numbers
        below = min(below, max(spare // 2, spare - above))
        ends = np.array([lowest - below, highest + spare - below])
        # To the middle of the last bins: no rounding takes it out of them.
        low, high = ((ends + np.sign(ends) * (config.dead_zone - 0.5)) * config.step).tolist()
        return replace(numbers, read=lambda rows: numbers.read(rows).clamp(low, high))

    @cached_property
    def _range(self) -> Tensor:
        """(2,) the least and the largest number of the new samples."""
        numbers = matrix_of(self.new, self.basis)
        chunks = numbers.chunks(torch.arange(numbers.num_rows), self.config.block_size)
        ends = torch.stack([torch.stack(chunk.aminmax()) for chunk in chunks])  # (chunks, 2)
        return torch.stack([ends[:, 0].min(), ends[:, 1].max()])

    def own(self) -> dict[str, Tensor]:
        return self.basis.tensors()

    def values(self) -> Sequence[float]:
        least, most = self.config.dead_zone, self.held.blocks.tables.radius + 1.0
        wider = [*np.arange(0.51, 1, 0.01), *np.geomspace(1, most, 1 + math.ceil(30 * math.log(most)))]
        return [least, *(float(f"{zone:.3g}") for zone in wider if zone > least)]
