"""Finds the best start of a fit: the axes and codes with the least error in a budget, before any training.

    features -> for each size of blocks: axes, and codes of some samples -> Start
    Start, budget -> number of axes, and the finest step whose file fits -> Point, with its error
    Starts -> best_start: the one with the least error

It works on a sample of the features, and takes seconds. Small blocks have cheap axes, which suit few samples of large
maps; large blocks use more of what goes together. The search grows the block while that helps. Sizes are those of the
entropy coder's ideal: columns of similar spread share a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from krnet.coding.entropy import TABLE_SYMBOL_BYTES
from krnet.coding.matrix import evenly_spaced
from krnet.coding.search import bisect_log
from krnet.device import exact_math
from krnet.recorders.axes import FINEST, MAX_EXACT_SIZE, Axes, block_axes, principal_axes
from krnet.recorders.base import Job
from krnet.recorders.compact.axes_fit import axis_scale, axis_std_and_least_step, learn_axes
from krnet.recorders.compact.codes import fixed_bytes, laplace_bits
from krnet.recorders.compact.network import MAX_STEP, CompactConfig, zero_map
from krnet.recorders.compact.values_fit import MIN_STEP, values_minus_zero
from krnet.recorders.grids import Grid
from krnet.recorders.maps import coordinates, normalised_chunks, once_for_features, subset

SAMPLE_NUMBERS = 1 << 20  # numbers in the codes of the samples that sizes are estimated from,
SAMPLE_ROWS = 16, 1024  # and the least and the largest number of these samples
AXES_NUMBERS = 2048  # of each axis, from which the bytes and the error of rounded axes are estimated
# Each is tried: axes are kept whose codes have a standard deviation above so many steps.
WIDEST_AXES = (0.15, 0.3, 0.5, 0.8, 1.2, 1.8, 2.7)
SEAMS = 0.8  # share of the error of cut maps that is left when a network has mended the seams (notes/choices.md)
WORSE = 1.01  # larger blocks are no longer tried once the error has grown by this factor
DCT_POSITIONS = 4  # a DCT over blocks is tried for blocks of at most this many positions
MAX_BLOCK_VALUES = {"cpu": 2048, "cuda": 4096}  # of a block smaller than the map: axes of more take too long
FEW_SAMPLES = 2048  # up to here, axes of whole maps take seconds, however large the maps are
TOLERANCE = 0.01  # a step is found within 1 %
CENTROIDS = 8  # symbols beyond it share a centroid
MAX_CODE = 2**15 - 2  # symbols of an estimate beyond it count as it
SPREADS_PER_OCTAVE, LEAST_SPREAD = 4, 0.05  # columns of a table differ by less than 2 ** (1 / 4) in spread
FEW_NUMBERS = 8  # a table of fewer numbers a symbol is taken to cost what a Laplace variable of its size does
MANY_SAMPLES = 4  # times as many blocks as values of a block: their principal axes suit other samples as well


Looked = TypeVar("Looked")


class Point(NamedTuple):
    """One way to spend a budget."""

    step: float
    components: int
    error: float
    """Squared error of a sample; infinite if no step fits."""


@dataclass(frozen=True, eq=False)
class Start:
    """Codes of some samples along the axes of one grid; without axes, their values."""

    job: Job
    grid: Grid
    axes: Axes | None
    codes: Tensor  # (n, P, K) of n samples
    left_out: tuple[float, ...]  # for each number of axes 0 .. K: the variance of a sample along the others
    dead_zone: float = 0.5  # in steps: smaller numbers become 0; above 0.5, numbers are read back at centroids

    @cached_property
    def spread(self) -> Tensor:
        """(K,): standard deviation of the codes along each axis; with a DCT, of the widest frequency."""
        squares = self.codes.square().mean(0)  # (P, K)
        return (squares.amax(0) if self.grid.dct else squares.mean(0)).sqrt()

    @cached_property
    def column_spread(self) -> Tensor:
        """(P, K): standard deviation of the codes in each column; blocks without a DCT are alike."""
        squares = self.codes.square().mean(0)
        return (squares if self.grid.dct or self.grid.num_blocks == 1 else squares.mean(0).expand_as(squares)).sqrt()

    def num_axes(self, step: float, widest: float) -> int:
        """Axes up to the last one whose codes spread over more than `widest` steps."""
        if self.axes is None:
            return self.codes.shape[2]
        wide = (self.spread > widest * step).nonzero()
        return max(1, int(wide.max()) + 1 if len(wide) else 1)

    def config_of(self, config: CompactConfig, step: float, components: int) -> CompactConfig:
        block = None if self.grid.num_blocks == 1 else self.grid.block
        found = 0 if self.axes is None else components
        return replace(config, step=step, components=found, block=block, dct=self.grid.dct)

    def bytes_for(self, config: CompactConfig, step: float, components: int) -> float:
        """Estimated size of the file before training."""
        fixed = fixed_bytes(self.job, self.config_of(config, 1.0, components))
        return fixed + self.axes_bytes(step, components) + self.codes_bytes(step, components, config)

    def axes_bytes(self, step: float, components: int) -> float:
        """Of the rounded axes, as Laplace variables of the size that some of their numbers have."""
        if self.axes is None:
            return 0.0
        axes, scale = self._scaled_axes(step, components)
        bits = self.grid.block_values * float(laplace_bits((axes * scale).abs().mean(1)).sum())
        return bits / 8 + components

    def codes_bytes(self, step: float, components: int, config: CompactConfig) -> float:
        """Of the codes of all planned samples: the entropy of tables shared by columns of similar spread."""
        codes = self.codes[:, :, :components]
        spread = self.column_spread[:, :components]
        group = ((spread / step).clamp(min=LEAST_SPREAD).log2() * SPREADS_PER_OCTAVE).floor().long()
        group -= group.min()
        symbols = self._symbols(codes, step).clamp(-MAX_CODE, MAX_CODE).long()
        radius = int(symbols.abs().max())
        num_groups, width = int(group.max()) + 1, 2 * radius + 1
        counts = torch.bincount((symbols + (group * width + radius)).flatten(), minlength=num_groups * width)
        counts = counts.view(num_groups, width).double()
        total, found = counts.sum(1), (counts > 0).sum(1)  # (groups,)
        logs = torch.where(counts > 0, counts.clamp(min=1).log2(), 0.0)
        bits = total * total.clamp(min=1).log2() - (counts * logs).sum(1)
        bits += (found - 1).clamp(min=0) / (2 * math.log(2))  # Miller and Madow: a sample shows too little entropy
        sizes = torch.zeros_like(total).index_add_(
            0, group.flatten(), (codes.abs().double().sum(0) / step).flatten()
        ) / total.clamp(min=1)
        few = total < FEW_NUMBERS * found
        if few.any():
            bits = torch.where(few, total * _laplace_bits(sizes), bits)
        num_planned = self.job.num_planned
        tables = TABLE_SYMBOL_BYTES * float(found.sum()) + codes.shape[1] * components
        streams = float(bits.sum()) / 8 * num_planned / len(codes) + 3 * math.ceil(num_planned / config.block_size)
        return streams + tables

    def error(self, step: float, components: int) -> float:
        """Squared error of a sample: of quantised codes and axes, plus the variance along the axes left out."""
        codes = self.codes[:, :, :components]
        decoded = step * (self._symbols(codes, step) if self.dead_zone == 0.5 else self._centroids(codes, step))
        error = float((codes - decoded).double().square().sum((1, 2)).mean())
        if self.axes is not None:
            error += self._axes_error(step, components)
        return error + self.left_out[min(components, len(self.left_out) - 1)]

    def _axes_error(self, step: float, components: int) -> float:
        """Squared error of a sample that rounded axes make."""
        assert self.axes is not None, "no axes"
        axes, scale = self._scaled_axes(step, components)
        errors = ((axes * scale).round() / scale - axes).double().square().mean(1) * self.grid.block_values
        std = self.axes.std[:components].double()
        return self.grid.num_blocks * float((std.square() * errors).sum())

    def _scaled_axes(self, step: float, components: int) -> tuple[Tensor, Tensor]:
        """Some numbers of each axis (k, n), and what the axes are multiplied by before they are rounded (k, 1)."""
        assert self.axes is not None, "no axes"
        std, least_step = axis_std_and_least_step(self.axes, components)
        num_blocks = self.job.num_planned * self.grid.num_blocks
        scale = axis_scale(std, least_step, torch.tensor(step, device=std.device), num_blocks)
        some = evenly_spaced(self.grid.block_values, AXES_NUMBERS).to(std.device)
        return self.axes.axes[:components, some], scale[:, None]

    def _symbols(self, codes: Tensor, step: float) -> Tensor:
        if self.dead_zone == 0.5:
            return (codes / step).round()
        return codes.sign() * (codes.abs() / step + (1 - self.dead_zone)).floor()

    def _centroids(self, codes: Tensor, step: float) -> Tensor:
        """What symbols are read back as, in steps: the mean of all codes with this symbol."""
        scaled, symbols = codes / step, self._symbols(codes, step)
        index = (symbols.clamp(-CENTROIDS, CENTROIDS) + CENTROIDS).long().flatten()
        count = torch.bincount(index, minlength=2 * CENTROIDS + 1).clamp(min=1)
        offset = torch.bincount(index, (scaled - symbols).flatten().double(), 2 * CENTROIDS + 1) / count
        return symbols + offset.float()[index].view_as(symbols)

    def finest(
        self,
        budget: float,
        config: CompactConfig,
        components: int | None = None,
        widest_axes: Sequence[float] = WIDEST_AXES,
    ) -> Point:
        """The number of axes and the step with the least error whose file fits the budget.

        Axes are kept if their codes spread over this many steps: one of widest_axes.
        """
        largest = max(float(self.codes.abs().max()), MIN_STEP)
        finest, coarsest = max(largest / FINEST, MIN_STEP), min(4 * largest, MAX_STEP)
        best = Point(coarsest, components or 1, math.inf)
        for widest in widest_axes if components is None and self.axes is not None else (0.0,):

            def count(step: float, widest: float = widest) -> int:
                return components or self.num_axes(step, widest)

            def too_large(step: float, count: Any = count) -> bool:
                return self.bytes_for(config, step, count(step)) > budget

            if too_large(coarsest):
                continue
            step = bisect_log(too_large, finest, coarsest, TOLERANCE)[1] if too_large(finest) else finest
            step = float(f"{step:.5g}")
            error = self.error(step, count(step))
            if error < best.error:
                best = Point(step, count(step), error)
            elif error > 1.1 * best.error:
                break  # the error has one minimum over the number of axes
        return best


def _laplace_bits(mean_size: Tensor) -> Tensor:
    """About the entropy in bits of a Laplace variable of this mean size, rounded to whole numbers."""
    size = mean_size.clamp(min=1e-3)
    return ((1 + size).log2() + size * (1 + 1 / size).log2()).clamp(min=0) + (1 - (-1 / size).exp()).clamp(min=0)


def make_start(job: Job, grid: Grid) -> Start:
    """The start along the principal axes of a grid."""
    axes = learn_axes(job, grid)
    num_axes = min(len(axes.std), max(1, int((axes.std > 0).sum())), len(job.source) * grid.num_blocks)
    with exact_math(), torch.inference_mode():
        ids = sampled(job, grid.num_blocks * num_axes)
        codes = coordinates(job, axes.mean, axes.axes[:num_axes].T, grid, ids)
    left_out = variance_left_out(job, grid, axes)
    return Start(job, grid, axes, codes.view(len(ids), grid.num_blocks, num_axes), tuple(left_out))


def values_start(job: Job, dead_zone: float = 0.5) -> Start:
    """The start without axes."""
    zero = zero_map(job.source.shape, job.stats.low, job.stats.high).to(job.device)
    codes = values_minus_zero(job, zero, sampled(job, len(zero)))  # (n, values)
    grid = Grid.of(job.source.shape)
    return Start(job, grid, None, codes[:, None], (0.0,) * (len(zero) + 1), dead_zone)


def sampled(job: Job, num_numbers: int) -> Tensor:
    """IDs of some samples whose codes have this many numbers each."""
    least, most = SAMPLE_ROWS
    return evenly_spaced(len(job.source), min(most, max(least, SAMPLE_NUMBERS // num_numbers)))


def best_start(job: Job, budget: int, config: CompactConfig) -> tuple[Start, Point]:
    """The start with the least error in the budget; what job.settings names is taken as given."""
    given = {name for name in ("block", "components", "dct") if name in job.settings}
    components = job.settings.get("components")

    def look(grid: Grid) -> tuple[Start, Point, float]:
        start = make_start(job, grid)
        limited = None if components is None else min(components, start.codes.shape[2])
        point = start.finest(budget, config, limited)
        mended = SEAMS if config.c1 and grid.num_blocks > 1 else 1.0
        return start, point, mended * point.error

    if given:  # a setting says what maps are cut into: then it says all of it
        start, point, _ = look(config.grid(job.source.shape))
        return start, point
    tried = look_while_it_helps(job, look, error=lambda found: found[2])
    with_dct = [replace(start.grid, dct=True) for start, _, _ in tried if suits_dct(start.grid)]
    tried += [look(grid) for grid in with_dct]
    grids_tried(job)[budget] = [(start.grid, point) for start, point, _ in tried]
    start, point, _ = min(tried, key=lambda found: found[2])
    return start, point


def grids_tried(job: Job) -> dict[int, list[tuple[Grid, Point]]]:
    """What `best_start` has found, by budget. Kept as long as the features are, so it must not hold them."""
    learned: dict[Any, Any] = once_for_features(job, "compact", None, dict)
    tried: dict[int, list[tuple[Grid, Point]]] = learned.setdefault("tried", {})
    return tried


def suits_dct(grid: Grid) -> bool:
    """Whether a DCT over the blocks is worth a try: there are several, of few positions or tokens each."""
    positions = grid.block[0] if grid.is_sequence else math.prod(grid.block[1:])
    return grid.num_blocks > 1 and positions <= DCT_POSITIONS


def look_while_it_helps(job: Job, look: Callable[[Grid], Looked], error: Callable[[Looked], float]) -> list[Looked]:
    """What `look` finds for grids of growing blocks, until the error grows."""
    found: dict[Grid, Looked] = {}
    for grids in growing_grids(job):
        last = math.inf
        for grid in grids:
            if grid not in found:
                found[grid] = look(grid)
            if error(found[grid]) > WORSE * last:
                break
            last = min(last, error(found[grid]))
    return list(found.values())


def growing_grids(job: Job) -> Iterator[Iterator[Grid]]:
    """The grids that are tried: each iterator lets blocks grow, from one position, or one token, to the whole map.

    Samples of two axes may be (channels, positions) or (tokens, numbers of each): both are tried.
    """
    whole = Grid.of(job.source.shape)
    few_samples = len(job.source) <= FEW_SAMPLES
    last = [whole] if whole.num_values <= MAX_EXACT_SIZE or few_samples or job.device.type == "cuda" else []
    yield chain(_cut_grids(job, whole, in_tokens=False), last)
    if len(job.source.shape) == 2:
        yield chain(_cut_grids(job, whole, in_tokens=True), last)


def _cut_grids(job: Job, whole: Grid, in_tokens: bool) -> Iterator[Grid]:
    """Grids of maps cut along height and width, or along the axis of tokens, whose blocks grow."""
    limit = MAX_BLOCK_VALUES["cuda" if job.device.type == "cuda" else "cpu"]
    sizes, size = whole.shape[:1] if in_tokens else whole.shape[1:], 1
    while size < max(sizes):
        parts = tuple(largest_divisor(s, size) for s in sizes)
        block = (*parts, *whole.shape[1:]) if in_tokens else (whole.shape[0], *parts)
        grid = Grid.of(job.source.shape, block)
        if grid.num_blocks > 1 and grid.block_values <= limit:
            yield grid
        size = next_size(sizes, size)


def largest_divisor(number: int, limit: int) -> int:
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)


def next_size(sizes: tuple[int, ...], size: int) -> int:
    """The next block size, at least double, at which the largest divisors of the sizes change."""
    following = 2 * size
    while following < max(sizes) and all(largest_divisor(s, following) == largest_divisor(s, size) for s in sizes):
        following += 1
    return following


def unseen_share(job: Job) -> float:
    """The share of the planned samples that are to come, and that the fit cannot see."""
    return 1 - len(job.source) / job.num_planned


def variance_left_out(job: Job, grid: Grid, axes: Axes) -> list[float]:
    """For each number of axes k, 0 to all: the variance of a planned sample that k axes leave out.

    Axes learned from few samples leave out more of later samples than of these. The difference is estimated by learning
    axes from one half of the samples and measuring what they leave out of the other. It is small if blocks are many.
    """
    seen = (grid.num_blocks * axes.std.double().square()).flip(0).cumsum(0).flip(0).tolist()  # [k]: axes k, k + 1, ...
    seen.append(0.0)
    unseen, num_blocks = unseen_share(job), len(job.source) * grid.num_blocks
    if not unseen or len(job.source) < 4 or num_blocks >= MANY_SAMPLES * grid.block_values:
        return seen
    with exact_math(), torch.inference_mode():
        halves = [subset(job, torch.arange(first, len(job.source), 2)) for first in (0, 1)]
        whole = grid.num_blocks == 1
        learned = principal_axes(halves[0], job.settings.get("components")) if whole else block_axes(halves[0], grid)
        codes = coordinates(halves[1], learned.mean, learned.axes.T, replace(grid, dct=False))
        squares = codes.view(len(codes), grid.num_blocks, -1).double().square().sum(1).mean(0)  # (k,)
        total = sum(float((x.flatten(1) - learned.mean).double().square().sum()) for x in normalised_chunks(halves[1]))
    kept = [0.0, *squares.cumsum(0).tolist()]
    to_come = [max(0.0, total / len(halves[1].source) - kept[min(k, len(kept) - 1)]) for k in range(len(seen))]
    return [(1 - unseen) * s + unseen * t for s, t in zip(seen, to_come, strict=True)]
