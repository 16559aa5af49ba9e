"""Growing a recording: samples that it holds keep their replays bit for bit, and new samples are added after them.

Shared by all recorders that grow:

    job (features of all samples), job.start -> new_samples_job      -> job of the new samples, in start's range
    job.settings, settings of start          -> check_kept_settings  -> refuses those that differ

For recorders that quantise and entropy-code (Growth, and CodedGrowth for those of coded.py):

    start        -> its basis, quantisation step, column groups, centroids and old symbols
    new features -> start's basis -> new symbols -> appended to the old ones -> all symbols are encoded again

Symbol frequencies are counted again; basis, step and centroids are kept, so old symbols are decoded to the same
numbers. One setting, `free`, may differ for new samples, because only the encoder uses it; a budget is met by it.
Recording everything again from replays instead would add an error with each growth.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from krnet.coding.entropy import MAX_ALPHABET, MAX_SYMBOL, to_symbols
from krnet.coding.matrix import CODED_TENSORS, CodedConfig, Matrix, MatrixStats, encode, measure
from krnet.coding.search import first_fitting
from krnet.config import check_range, from_dict
from krnet.device import exact_math
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.features.stats import normalise
from krnet.io.header import RESTORE
from krnet.recorders.base import Content, Earlier, Job, Recorder
from krnet.recorders.basis import MAX_UNUSED_SHARE, PREFIX, CodedReplayer, matrix_of, planned_bytes
from krnet.recorders.ranges import read_range
from krnet.recorders.sizes import planned_overhead

# Features are refused if their error against start's replays > (ERROR_SLACK * (1 - R2) + ROUNDING_ERROR) * variance.
CHECK_SAMPLES = 64  # samples that are compared
CHECK_SHARE = 0.95  # only this share of them counts, the best: single samples may have hundreds of times the mean error
ERROR_SLACK = 1.5  # samples in another order have (1 + R2) / (1 - R2) times the recording's error, which is far more
ROUNDING_ERROR = 0.01  # share of the variance: the same features computed again, or in 16 bits, must pass


def new_samples_job(job: Job, recorder: str) -> Job:
    """A job of the samples after those that `job.start` holds, with start's range for each channel.

    Refuses features whose first samples are not those of `job.start`.
    """
    start, source, samples = job.start, job.source, job.samples
    assert start is not None, "nothing to grow from"
    if start.recorder != recorder or start.shape != source.shape:
        raise InputError(
            f"{start.path}: a recording of {start.shape} by {start.recorder}; these features are {source.shape} and "
            f"need one of the same shape by {recorder} to start from"
        )
    num_held = len(start)
    if num_held >= len(source):
        raise InputError(
            f"{start.path}: holds {num_held} samples, and there are {len(source)} features; expected more. Give the "
            f"features of all samples, those that start holds first"
        )
    labels = samples.labels
    same_labels = (
        start.labels is None if labels is None else start.labels is not None and labels[:num_held].equal(start.labels)
    )
    if not same_labels:
        raise InputError(
            f"{start.path}: its labels are not those of the first {num_held} samples. Give the features and labels of "
            f"all samples, those that start holds first"
        )
    check_held_features(job, start)
    new_source = source.part(num_held)
    low, high = read_range(start, job.stats.low.shape)
    return replace(
        job,
        source=new_source,
        samples=Samples(len(new_source), source.shape, None if labels is None else labels[num_held:]),
        stats=replace(job.stats, low=low, high=high, count=len(new_source) * math.prod(source.shape)),
    )


def check_held_features(job: Job, start: Earlier) -> None:
    """Refuse features whose first samples differ from start's replays by much more than start's own R2 says.

    Callers give either the features that `start` was recorded from, or its replays; both pass.
    """
    ids = torch.linspace(0, len(start) - 1, min(CHECK_SAMPLES, len(start)), dtype=torch.float64).round().long()
    given = (start.replay(ids).cpu(), job.source.read(ids))
    replays, real = (normalise(x, job.stats.low, job.stats.high, clamp=False).reshape(len(ids), -1) for x in given)
    errors = (replays - real).square().mean(1).sort().values  # (samples,)
    error, variance = errors[: math.ceil(CHECK_SHARE * len(ids))].mean().item(), real.var(correction=0).item()
    expected_r2 = start.info()["r2"]
    if not error <= (ERROR_SLACK * (1 - expected_r2) + ROUNDING_ERROR) * variance + 1e-12:
        raise InputError(
            f"{start.path}: holds other features than the first {len(start)} of {job.source.name}: its replays have R2 "
            f"{1 - error / max(variance, 1e-12):.3g} against these, and had {expected_r2:.3g} when recorded. Give the "
            f"features of all samples, those that start holds first and in the same order, or record without start"
        )


def check_kept_settings(job: Job, config: object, free: Sequence[str]) -> None:
    """Refuse settings of the job that differ from `config`, that of `job.start`, except those named in `free`."""
    assert job.start is not None, "nothing to grow from"
    for name, value in job.settings.items():
        kept = getattr(config, name, None)
        if name not in free and kept != value:
            raise InputError(
                f"{job.start.path}: has {name} {kept!r}, not {value!r}; a recording that grows keeps its settings "
                f"({' and '.join(free)} may differ for new samples). Leave {name} out, or record without start"
            )


class Growth(ABC):
    """Adds the new samples of a job to an entropy-coded recording, `job.start`."""

    prefix: ClassVar[str]
    """Prefix of the tensors that hold the coded matrix."""
    free: ClassVar[str]
    """Name of the one setting that may differ for new samples."""
    limits: ClassVar[tuple[float, float]]
    """The lowest and the highest value that `free` may have."""

    def __init__(self, job: Job, recorder: Recorder, config_class: type[Any]):
        assert job.start is not None, "nothing to grow from"
        self.job, self.start, self.new = job, job.start, new_samples_job(job, recorder.name)
        samples = Samples(len(job.start), job.start.shape, None)
        replayer = recorder.replay(samples, job.start.settings, job.start, job.device)
        assert isinstance(replayer, CodedReplayer), f"{recorder.name} reads with a {type(replayer).__name__}"
        self.basis, self.held = replayer.basis, replayer.reader.coded
        if not np.add.reduceat(self.held.counts, self.held.blocks.tables.starts).all():
            raise NotARecordingError(f"{job.start.path}: has a table that no column goes by. {RESTORE}")
        self.config = from_dict(config_class, job.start.settings)
        if self.free in job.settings:
            check_range(self.free, job.settings[self.free], *self.limits)
        # Checks names and values of the settings; `free` is left out, as its limits are wider for new samples.
        from_dict(config_class, {n: v for n, v in job.settings.items() if n != self.free})
        check_kept_settings(job, self.config, (self.free,))

    @abstractmethod
    def coding(self, value: float) -> tuple[Matrix, CodedConfig]:
        """The new samples' matrix, and how it is coded, if `free` has this value."""

    @abstractmethod
    def own(self) -> dict[str, Tensor]:
        """The tensors of the basis."""

    @abstractmethod
    def values(self) -> Sequence[float]:
        """Candidates for `free`: first the recording's own value, then values that need fewer and fewer bytes."""

    def fit(self, settings: Mapping[str, Any]) -> Content:
        """The file of all samples, old and new."""
        started = time.perf_counter()
        with exact_math(), torch.inference_mode():
            matrix, config, stats = self._measure(settings.get(self.free, self.values()[0]))
            coded = encode(matrix, config, stats, self.held)
        tensors = {"low": self.new.stats.low, "high": self.new.stats.high, **self.own()}
        tensors |= {name: tensor for name, tensor in coded.tensors(self.prefix).items() if name in self.stored}
        return Content(tensors=tensors, settings=asdict(self.config), seconds=time.perf_counter() - started)

    @property
    def stored(self) -> set[str]:
        """Names of the coded matrix's tensors that the file holds."""
        return {self.prefix + name for name in CODED_TENSORS}

    def for_budget(self, budget: int) -> dict[str, Any]:
        """The first of `values` whose file, grown to all planned samples, fits the budget; the last if none does.

        Bisection over estimated sizes, then one real encoding; if that is too large, again with a lower aim.
        """
        given = dict(self.job.settings)
        if self.free in given:
            return given
        values, aim_bytes = self.values(), float(budget)
        sizes: dict[int, float] = {}  # index of a value -> estimated bytes

        def size(index: int) -> float:
            if index not in sizes:
                sizes[index] = self._estimate_bytes(values[index])
            return sizes[index]

        def fits(aim_bytes: float, index: int) -> bool:
            return size(index) <= aim_bytes

        for _ in range(4):
            first = first_fitting(partial(fits, aim_bytes), len(values))
            size_bytes = planned_bytes(self.job, self.fit({self.free: values[first]}), self.prefix, len(self.start))
            if size_bytes <= budget or first == len(values) - 1:
                break
            aim_bytes *= (1 - MAX_UNUSED_SHARE / 4) * budget / size_bytes
        return {**given, self.free: values[first]}

    def _estimate_bytes(self, value: float) -> float:
        """Estimated size of the file, grown to all planned samples, without encoding it."""
        with exact_math(), torch.inference_mode():
            _, _, stats = self._measure(value, self.job.num_planned)
        own = [self.new.stats.low, self.new.stats.high, *self.own().values()]
        overhead = planned_overhead(self.job, len(own) + len(self.stored), asdict(self.config))
        return stats.size_bytes + sum(tensor.nbytes for tensor in own) + overhead

    def _measure(self, value: float, num_planned: int | None = None) -> tuple[Matrix, CodedConfig, MatrixStats]:
        """The new samples' matrix, how it is coded, and its statistics together with the old samples."""
        matrix, config = self.coding(value)
        try:
            return matrix, config, measure(matrix, config, num_planned=num_planned, held=self.held)
        except SettingError as error:  # more symbols than a table may have
            raise SettingError(f"{self.start.path}: {error}; and record without start") from error


class CodedGrowth(Growth):
    """Growth of a CodedRecorder; the free setting is the dead zone.

    Coefficients of new samples inside the dead zone become 0; the others are quantised as start's were. A zone wider
    than start's is applied before quantisation: as the quantiser's own dead zone it would move the edges of all bins,
    and the numbers in them would miss their centroids. Coefficients beyond the largest alphabet are clamped to it.
    """

    prefix, free, limits = PREFIX, "dead_zone", (0.5, float(MAX_SYMBOL))

    def coding(self, value: float) -> tuple[Matrix, CodedConfig]:
        config = replace(self.config, dead_zone=min(value, self.config.dead_zone))
        matrix, zone_width = self._clamp_to_alphabet(matrix_of(self.new, self.basis), config), value * config.step

        def read(rows: Tensor) -> Tensor:
            coefficients = matrix.read(rows)  # (n, columns)
            return torch.where(coefficients.abs() < zone_width, 0.0, coefficients)

        return replace(matrix, read=matrix.read if value <= config.dead_zone else read), config

    def _clamp_to_alphabet(self, matrix: Matrix, config: CodedConfig) -> Matrix:
        """Clamp the matrix so that old and new symbols together span at most MAX_ALPHABET symbols."""
        tables = self.held.blocks.tables
        first = tables.first.astype(np.int64)
        lowest, highest = int(first.min()), int((first + tables.sizes).max()) - 1  # old symbols
        new = to_symbols(self._extremes, config.step, config.dead_zone).tolist()
        num_below, num_above = max(0, lowest - new[0]), max(0, new[1] - highest)
        num_spare = max(0, MAX_ALPHABET - (highest - lowest + 1))
        if num_below + num_above <= num_spare:
            return matrix
        num_below = min(num_below, max(num_spare // 2, num_spare - num_above))
        ends = np.array([lowest - num_below, highest + num_spare - num_below])
        # Clamp to the middle of the outermost bins: a float error does not move it to another bin.
        low, high = ((ends + np.sign(ends) * (config.dead_zone - 0.5)) * config.step).tolist()
        return replace(matrix, read=lambda rows: matrix.read(rows).clamp(low, high))

    @cached_property
    def _extremes(self) -> Tensor:
        """(2,) the smallest and the largest coefficient of the new samples."""
        matrix = matrix_of(self.new, self.basis)
        chunks = matrix.chunks(torch.arange(matrix.num_rows), self.config.block_size)
        ends = torch.stack([torch.stack(chunk.aminmax()) for chunk in chunks])  # (chunks, 2)
        return torch.stack([ends[:, 0].min(), ends[:, 1].max()])

    def own(self) -> dict[str, Tensor]:
        return self.basis.tensors()

    def values(self) -> Sequence[float]:
        old_zone, max_zone = self.config.dead_zone, self.held.blocks.tables.radius + 1.0  # wider than all old symbols
        zones = [*np.arange(0.51, 1, 0.01), *np.geomspace(1, max_zone, 1 + math.ceil(30 * math.log(max_zone)))]
        return [old_zone, *(float(f"{zone:.3g}") for zone in zones if zone > old_zone)]
