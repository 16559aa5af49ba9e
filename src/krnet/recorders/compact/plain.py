"""The file of an untrained start (starts.py): codes of all samples, in the finest step whose file fits the budget.

    start, point -> plain_file -> PlainFile -> fill -> Content

Along axes, and at the middles of bins, this is recorder pca for whole maps, transform for positions with a DCT; without
axes it is recorder quantized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from krnet.coding.matrix import Matrix, TooFineError, encode, evenly_spaced, measure
from krnet.coding.search import find_least
from krnet.device import exact_math
from krnet.recorders.axes import AXES, FINEST, Axes, least_squares
from krnet.recorders.base import Content, Job
from krnet.recorders.basis import planned_bytes
from krnet.recorders.compact.axes_fit import axis_scale, axis_std_and_least_step, learn_axes
from krnet.recorders.compact.codes import (
    MEASURED_COLUMNS,
    content_with_codes,
    estimated_bytes,
    fixed_bytes,
    measured_columns,
)
from krnet.recorders.compact.network import AXES_CODING, CODES, MAX_STEP, START_ZONE, CompactConfig, zero_map
from krnet.recorders.compact.starts import MANY_SAMPLES, Point, Start
from krnet.recorders.compact.values_fit import DEAD_ZONE, MIN_STEP
from krnet.recorders.maps import coordinates, normalised
from krnet.train.loop import Outcome

WHOLE_ZONE = 0.5  # dead zone of codes of whole maps, as in pca.py; of others START_ZONE
FILLED = 0.995  # share of the budget that is filled at least, if TRIES at the step are enough
TRIES = 3


@dataclass(frozen=True, eq=False)
class PlainFile:
    """What the file of a start holds, whatever its step."""

    job: Job
    config: CompactConfig
    numbers: Matrix
    """The codes of all samples, before the dead zone."""
    columns: Tensor | None
    """Columns of them on which sizes are estimated; None: all."""
    least_step: float
    """A finer step would need more symbols than the coder's tables have."""
    axes: Axes | None

    @torch.no_grad()
    def fill(self) -> Content:
        """The file with the finest step that fits the budget."""
        config, budget = self.config, self.config.most_bytes
        assert budget is not None, "no budget"
        best, best_bytes, aim = None, 0, float(budget)
        for _ in range(TRIES):
            config = replace(config, step=self._finest_step(config, aim))
            content = self._content(replace(config, most_bytes=None))
            content = replace(content, settings=config.to_settings())
            num_bytes = planned_bytes(self.job, content, CODES)
            if best_bytes < num_bytes <= budget:
                best, best_bytes = content, num_bytes
            if FILLED * budget <= num_bytes <= budget:
                break
            aim *= 0.999 * budget / num_bytes  # the estimate was off
        return self._content(config) if best is None else best

    def _finest_step(self, config: CompactConfig, aim: float) -> float:
        """The finest step whose file is estimated to have at most `aim` bytes."""

        def smallness(step: float) -> float:
            at = replace(config, step=step)
            try:
                num_bytes = estimated_bytes(self._codes(at), at.coding, self.columns, self.job.num_planned)
                num_bytes += 0.0 if self.axes is None else measure(self._axes(at), AXES_CODING).size_bytes
            except TooFineError:
                return -math.inf
            return -math.log(num_bytes + fixed_bytes(self.job, at))

        slack = (1 - FILLED) / 2
        found = find_least(
            smallness, -math.log(aim), start=config.step, low=self.least_step, high=MAX_STEP, slack=slack, tries=8
        )
        return float(f"{found or MAX_STEP:.5g}")

    def _content(self, config: CompactConfig) -> Content:
        """The file of this step; where it takes more than config.most_bytes, with a wider dead zone."""
        tensors = {"unit": torch.ones(()), "low": self.job.stats.low, "high": self.job.stats.high}
        if self.axes is not None:
            matrix = self._axes(config)
            tensors |= encode(matrix, AXES_CODING, measure(matrix, AXES_CODING)).tensors(AXES)
            tensors |= {"mean": self.axes.mean.half(), "scale": self._scale(config)[:, 0].half()}
        tensors = {name: tensor.clone().cpu() for name, tensor in tensors.items()}
        numbers = self._refitted(config)
        growth, outcome = self.job.num_planned / len(self.job.source), Outcome(0, 0.0, "done")
        return content_with_codes(
            self.job, tensors, config, outcome, lambda c: (self._codes(c, numbers), c.coding), growth=growth
        )

    def _refitted(self, config: CompactConfig) -> Matrix:
        """The codes for axes as they are stored: few samples have coarse ones, which are not orthonormal."""
        grid = config.grid(self.job.source.shape)
        if self.axes is None or len(self.job.source) * grid.num_blocks >= MANY_SAMPLES * grid.block_values:
            return self.numbers
        with exact_math():
            scale = self._scale(config)
            axes = least_squares((self.axes.axes * scale).round() / scale)
            return Matrix.of(coordinates(self.job, self.axes.mean.half().float(), axes.T, grid))

    def _codes(self, config: CompactConfig, numbers: Matrix | None = None) -> Matrix:
        numbers = numbers or self.numbers
        return Matrix(lambda rows: config.apply_dead_zone(numbers.read(rows)), numbers.num_rows, numbers.num_columns)

    def _axes(self, config: CompactConfig) -> Matrix:
        assert self.axes is not None, "no axes"
        return Matrix.of((self.axes.axes * self._scale(config)).T)

    def _scale(self, config: CompactConfig) -> Tensor:
        assert self.axes is not None, "no axes"
        step = torch.tensor(config.step, device=self.job.device)
        num_blocks = self.job.num_planned * config.grid(self.job.source.shape).num_blocks
        return axis_scale(*axis_std_and_least_step(self.axes, config.components), step, num_blocks)[:, None]


@torch.no_grad()
def plain_file(job: Job, start: Start, point: Point, config: CompactConfig) -> PlainFile:
    """The file of a start, with the number of axes that was found best; config is that of one without any."""
    config = replace(config, step=point.step)
    if start.axes is None:
        zero = zero_map(job.source.shape, job.stats.low, job.stats.high).to(job.device)
        read = lambda rows: normalised(job, rows).flatten(1) - zero  # noqa: E731
        columns = evenly_spaced(len(zero), MEASURED_COLUMNS).to(job.device) if len(zero) > MEASURED_COLUMNS else None
        config = replace(config, dead_zone=DEAD_ZONE)
        least_step = max(1.0, MIN_STEP * FINEST) / FINEST  # values are at most 1 away from zero
        return PlainFile(job, config, Matrix(read, len(job.source), len(zero)), columns, least_step, None)
    axes, k = learn_axes(job, start.grid), point.components
    kept = Axes(axes.mean, axes.axes[:k], axes.std[:k])
    with exact_math():
        codes = coordinates(job, kept.mean, kept.axes.T, start.grid)  # (N, P k)
    zone = WHOLE_ZONE if start.grid.num_blocks == 1 else START_ZONE
    config = start.config_of(replace(config, dead_zone=zone), point.step, k)
    least_step = max(float(codes.abs().max()), MIN_STEP * FINEST) / FINEST
    return PlainFile(job, config, Matrix.of(codes), measured_columns(codes, k, start.grid), least_step, kept)
