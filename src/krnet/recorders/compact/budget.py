"""Chooses blocks, step, number of axes and width of a compact KRNet for a budget, without training.

    budget    -> plan_with_axes:    the start with the least error (starts.py), and the widest network that it affords
              -> plan_without_axes: the finest step that fits, tried for small data sets only
              -> the plan with the smaller expected error -> settings
              -> smallest_bytes: what a file takes at least, however coarse its step
    target R2 -> the start whose error allows it in the fewest bytes -> estimated bytes

Errors are those of quantised codes: `likely_error` says how much of them training leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from krnet.coding.matrix import (
    CodedConfig,
    Matrix,
    MatrixReader,
    MatrixStats,
    TooFineError,
    encode,
    evenly_spaced,
    measure,
)
from krnet.coding.search import bisect_log
from krnet.config import from_dict
from krnet.recorders.axes import MAX_EXACT_SIZE
from krnet.recorders.base import Job
from krnet.recorders.coded import SEARCH_ROWS
from krnet.recorders.compact.codes import fixed_bytes, network_bytes
from krnet.recorders.compact.network import AXES_CODING, CompactConfig, check_grid, zero_map
from krnet.recorders.compact.starts import (
    Start,
    best_start,
    look_while_it_helps,
    make_start,
    unseen_share,
    values_start,
)
from krnet.recorders.compact.values_fit import DEAD_ZONE, values_minus_zero
from krnet.recorders.fit import is_open
from krnet.recorders.grids import Grid
from krnet.train.config import FitConfig


class NetworkLimits(NamedTuple):
    """How wide the network that refines maps may be."""

    budget_share: float
    """Largest share of the budget that its bytes may take."""
    channel_ratio: int
    """Its channels are at most this many times those of a map."""


NETWORK_WIDTHS = (128, 96, 64, 48, 32, 16, 8, 0)  # values of c1 that are tried
# Measured: notes/choices.md, "How wide the network is".
LONG_FIT_LIMITS, SHORT_FIT_LIMITS = NetworkLimits(0.11, 2), NetworkLimits(0.05, 1)
NO_AXES_LIMITS = NetworkLimits(0.22, 1)  # without axes there are more bytes for the network
LONG_FIT_ITERATIONS = 2000  # from here on a wide network pays; after 200 iterations a narrow one has the higher R2
MIN_AXIS_STD_STEPS = 0.8  # axes with a standard deviation below 0.8 steps are dropped: best trade of error against size
LOOK_SHARE = 1.5  # files without axes are planned if their codes leave at most 1.5 times the error
# trained_error = factor * pca_error ** (1 + power) at equal bytes, errors as shares of the variance. (factor, power) of
# short fits is from a few trials, that of long fits from krnet in docs/results.md. likely_error uses the short one,
# because REPAIRED_SHARE, with which it is compared, is from short fits as well.
GAIN, LONG_GAIN = (1.2, 0.4), (0.85, 0.44)
MAX_VALUES_WITHOUT_AXES = 1 << 24  # samples * values up to which a file without axes may be better (notes/choices.md)
MIN_REPAIR_ERROR = 0.01  # share of the variance: below this quantisation error a network without axes does not pay
REPAIRED_SHARE = 0.45  # share of the quantisation error that such a network leaves
STEP_AND_BUDGET_DIGITS = 40  # more characters, at most, than "1.0" and "1" take in the header
# Error of samples that come later, as a share of the error in a file without a network. They are decoded without the
# network, but with a step and centroids fitted to it. Measured on 500 CIFAR-100 maps: 1.2 after 60 iterations, 2 after
# 1,500.
UNSEEN_SHARE = 1.5


def for_budget(job: Job, budget: int) -> dict[str, Any]:
    """The settings, with axes or without, that are expected to leave the smaller error."""
    if job.settings.get("components") == 0:
        return plan_without_axes(job, budget)[0].to_settings()
    config, error = plan_with_axes(job, budget)
    if "components" not in job.settings and "block" not in job.settings and values_may_pay(job, budget, error):
        config_without_axes, error_without_axes = plan_without_axes(job, budget)
        if error_without_axes < likely_error(error):
            return config_without_axes.to_settings()
    return config.to_settings()


def values_may_pay(job: Job, budget: int, error: float) -> bool:
    """Whether a file without axes may be better than one whose error before training is `error`."""
    num_values = math.prod(job.source.shape)
    # More than MAX_EXACT_SIZE values a sample are not tried: grouping that many columns into tables takes too long.
    if num_values > MAX_EXACT_SIZE or len(job.source) * num_values > MAX_VALUES_WITHOUT_AXES:
        return False
    config = CompactConfig(step=1.0, components=0, c1=0, most_bytes=budget)
    plain = values_start(job).finest(budget, config)
    return plain.error < LOOK_SHARE * error * max(num_values * job.stats.variance, 1e-12)


def smallest_bytes(job: Job) -> tuple[int, int]:
    """Size of a file whose codes and axes are all 0: without the network, and with it, rounded up.

    The network's size is an upper bound. A file may be smaller than that, so the first number leaves it out.
    """
    # The header holds step and most_bytes: with the fewest digits, the result does not depend on the budget.
    config = replace(from_dict(CompactConfig, job.settings), step=1.0, most_bytes=1)

    def bytes_of_zeros(num_rows: int, num_columns: int, coding: CodedConfig) -> float:
        zeros = Matrix(lambda rows: torch.zeros(len(rows), num_columns), num_rows, num_columns)
        return measure(zeros, coding, max_rows=1, num_planned=num_rows).size_bytes  # all rows are alike

    shape, num_axes = job.source.shape, config.components
    check_grid(config, shape)
    zero_bytes = bytes_of_zeros(job.num_planned, config.num_columns(shape), config.coding)
    if num_axes:
        zero_bytes += bytes_of_zeros(config.grid(shape).block_values, num_axes, AXES_CODING)
    least, enough = (fixed_bytes(job, c) + math.ceil(zero_bytes) for c in (replace(config, c1=0), config))
    return least, 100 * math.ceil((enough + STEP_AND_BUDGET_DIGITS) / 100)


def likely_error(pca_error: float) -> float:
    """Expected error after training, from that of the start in as many bytes; shares of the variance."""
    return pca_error * min(1.0, GAIN[0] * pca_error ** GAIN[1])


def affordable_widths(
    shape: tuple[int, ...], budget: int, limits: NetworkLimits, make_config: Callable[[int], CompactConfig]
) -> list[int]:
    """The NETWORK_WIDTHS within the limits, the widest first; the last is 0, no network. make_config: c1 -> config."""
    grid = make_config(0).grid(shape)
    channels = grid.shape[2] if grid.is_sequence else grid.shape[0]
    widths = [c1 for c1 in NETWORK_WIDTHS if c1 <= max(limits.channel_ratio * channels, 8)]
    return [c1 for c1 in widths if c1 == 0 or network_bytes(shape, make_config(c1)) <= limits.budget_share * budget]


def is_long(fit: FitConfig, device: torch.device) -> bool:
    """Whether the fit is long enough for a wide network. One by the clock is not: it may have few iterations."""
    by_clock = fit.time_budget is not None or is_open(fit, device)
    return not by_clock and (fit.iterations is None or fit.iterations >= LONG_FIT_ITERATIONS)


def plan_without_axes(job: Job, budget: int) -> tuple[CompactConfig, float]:
    """The finest step, and a width, whose file without axes fits the budget.

    Returns the config, and the expected error as a share of the variance.
    """

    def make_config(c1: int, step: float = 1.0) -> CompactConfig:
        given = {"step": step, "c1": c1, "dead_zone": DEAD_ZONE, "most_bytes": budget, **job.settings}
        return from_dict(CompactConfig, {**given, "components": 0})

    zero = zero_map(job.source.shape, job.stats.low, job.stats.high).to(job.device)
    codes = values_minus_zero(job, zero, evenly_spaced(len(job.source), SEARCH_ROWS))  # (n, values)

    def finest_config(c1: int) -> tuple[CompactConfig, float]:
        """The config of this width with the finest step that fits, and its quantisation error before training."""
        fixed = fixed_bytes(job, make_config(c1))

        def stats(step: float) -> MatrixStats:
            return measure(Matrix.of(codes), make_config(c1, step).coding, num_planned=job.num_planned)

        def too_large(step: float) -> bool:
            try:
                return stats(step).size_bytes + fixed > budget
            except TooFineError:
                return True

        config = make_config(c1, float(f"{bisect_step(too_large, 1, 0.03)[1]:.5g}"))
        coded = encode(Matrix.of(codes), config.coding, stats(config.step))
        decoded = MatrixReader(coded, config.coding, job.device).read(torch.arange(len(codes)))
        return config, float((decoded - codes).double().square().mean()) / max(job.stats.variance, 1e-12)

    unseen = unseen_share(job)
    repaired_share = (1 - unseen) * REPAIRED_SHARE + unseen * UNSEEN_SHARE
    plain = finest_config(0)
    coarse = plain[1] >= MIN_REPAIR_ERROR
    widths = affordable_widths(job.source.shape, budget, NO_AXES_LIMITS, make_config) if coarse else [0]
    for c1 in widths[:-1]:  # the widest network that gains more than a coarser step loses
        config, error = finest_config(c1)
        if repaired_share * error < plain[1]:
            return config, repaired_share * error
    return plain


def plan_with_axes(job: Job, budget: int) -> tuple[CompactConfig, float]:
    """The start with the least error whose file fits the budget, with the widest network in limits.

    Returns the config, and the error before training as a share of the variance.
    """
    shape, limits = job.source.shape, LONG_FIT_LIMITS if is_long(job.fit, job.device) else SHORT_FIT_LIMITS
    config = from_dict(CompactConfig, {"step": 1.0, "components": 1, "most_bytes": budget, **job.settings})
    check_grid(config, shape)

    def with_width(config: CompactConfig) -> CompactConfig:
        given = {"c1": job.settings["c1"]} if "c1" in job.settings else {}
        make = lambda c1: replace(config, **{"c1": c1, **given})  # noqa: E731
        return make(affordable_widths(shape, budget, limits, make)[0])

    sequence = len(shape) == 2 and "block" not in job.settings  # its network differs from that of maps
    config = with_width(replace(config, block=(1, 1, shape[-1])) if sequence and shape[0] > 1 else config)
    start, point = best_start(job, budget, config)
    chosen = with_width(start.config_of(config, point.step, point.components))
    if chosen.c1 != config.c1:
        point = start.finest(budget, chosen, job.settings.get("components"))
    step = job.settings.get("step", point.step)
    error = point.error / max(math.prod(shape) * job.stats.variance, 1e-12)
    return replace(chosen, step=step, components=job.settings.get("components", point.components)), error


def likely_bytes(job: Job, target_r2: float) -> tuple[float, float]:
    """Estimated bytes of a file that reaches target_r2, and those of them that do not depend on R2.

    Inverts the measured gain of training: the start may leave a larger error than the target allows.
    """
    num_values, error = math.prod(job.source.shape), max(1 - target_r2, 1e-6)
    (factor, power), limits = (LONG_GAIN, LONG_FIT_LIMITS) if is_long(job.fit, job.device) else (GAIN, SHORT_FIT_LIMITS)
    max_error = error / min(1.0, factor * error**power) * job.stats.variance * num_values
    config = from_dict(CompactConfig, {"step": 1.0, "components": 1, **job.settings, "c1": 0})
    given = {"block", "components"} & set(job.settings)

    def look(grid: Grid) -> tuple[float, float]:
        start = make_start(job, grid)

        def count(step: float, start: Start = start) -> int:
            return start.num_axes(step, MIN_AXIS_STD_STEPS)

        def reaches_target(step: float, start: Start = start, count: Any = count) -> bool:
            return start.error(step, count(step)) <= max_error

        step = bisect_step(reaches_target, num_values, 0.01)[0]
        chosen = start.config_of(config, step, count(step))
        return start.bytes_for(config, step, count(step)), fixed_bytes(job, chosen)

    if given:
        best = look(config.grid(job.source.shape))
    else:
        best = min(look_while_it_helps(job, look, error=lambda found: found[0]))
    return best[0] / (1 - limits.budget_share), best[1]


def bisect_step(holds: Callable[[float], bool], num_values: int, tolerance: float = 1e-3) -> tuple[float, float]:
    """The coarsest step for which `holds` is true and the finest for which it is not, among all that a map can need."""
    return bisect_log(holds, 1e-5, 2 * math.sqrt(num_values) + 1, tolerance)
