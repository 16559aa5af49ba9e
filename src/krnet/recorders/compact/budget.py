"""Chooses step, number of axes and width of a compact KRNet for a budget, without training.

    budget    -> plan_with_axes:    the number of axes with the least error, each with the finest step that fits
              -> plan_without_axes: the finest step that fits, tried for small data sets only
              -> the plan with the smaller expected error -> settings
              -> smallest_bytes: what a file takes at least, however coarse its step
    target R2 -> step and number of axes whose error allows it -> estimated bytes

Errors are predicted from principal components: `likely_error` says how much of their error training leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from krnet.coding.weights import coded_bits
from krnet.config import from_dict
from krnet.device import dtype_name, exact_math
from krnet.features.samples import Samples
from krnet.features.source import FeatureSource
from krnet.nn.sizing import map_shape
from krnet.recorders.axes import MAX_EXACT_SIZE, Axes, principal_axes
from krnet.recorders.base import Job
from krnet.recorders.coded import SEARCH_ROWS
from krnet.recorders.compact.axes_fit import axis_scale, axis_std_and_least_step, learn_axes
from krnet.recorders.compact.codes import fixed_bytes, network_bytes
from krnet.recorders.compact.network import AXES_CODING, CompactConfig, zero_map
from krnet.recorders.compact.values_fit import DEAD_ZONE, values_minus_zero
from krnet.recorders.maps import coordinates, normalised_chunks
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
# trained_error = factor * pca_error ** (1 + power) at equal bytes, errors as shares of the variance. (factor, power) of
# short fits is from a few trials, that of long fits from krnet in docs/results.md. likely_error uses the short one,
# because REPAIRED_SHARE, with which it is compared, is from short fits as well.
GAIN, LONG_GAIN = (1.2, 0.4), (0.85, 0.44)
MAX_VALUES_WITHOUT_AXES = 1 << 24  # samples * values up to which a file without axes may be better (notes/choices.md)
MIN_REPAIR_ERROR = 0.01  # share of the variance: below this quantisation error a network without axes does not pay
MANY_SAMPLES = 4  # times as many samples as values: their principal axes suit other samples as well
REPAIRED_SHARE = 0.45  # share of the quantisation error that such a network leaves
STEP_AND_BUDGET_DIGITS = 40  # more characters, at most, than "1.0" and "1" take in the header
# Error of samples that come later, as a share of the error in a file without a network. They are decoded without the
# network, but with a step and centroids fitted to it. Measured on 500 CIFAR-100 maps: 1.2 after 60 iterations, 2 after
# 1,500.
UNSEEN_SHARE = 1.5


def estimate_bytes(job: Job, config: CompactConfig, axes: Axes) -> int:
    """Estimated size of the file before training; an upper bound if coordinates are normally distributed."""
    num_samples, num_values = job.num_planned, math.prod(job.source.shape)
    step = torch.tensor(config.step, device=axes.std.device)
    axis_scales = axis_scale(*axis_std_and_least_step(axes, config.components), step, num_samples)  # (k,)
    axis_rms = axis_scales.double() / math.sqrt(num_values)  # root mean square of a scaled axis, in its steps
    code_std = axes.std[: config.components].double() / config.step  # in steps
    bits = num_values * sum(coded_bits(1 / max(s, 1e-3)) for s in axis_rms.tolist())
    bits += num_samples * sum(coded_bits(1 / max(s, 1e-3)) for s in code_std.tolist())
    return math.ceil(bits / 8) + fixed_bytes(job, config)


def for_budget(job: Job, budget: int) -> dict[str, Any]:
    """The settings, with axes or without, that are expected to leave the smaller error."""
    if job.settings.get("components") == 0:
        return plan_without_axes(job, budget)[0].to_settings()
    config, pca_error = plan_with_axes(job, budget)
    num_values = math.prod(job.source.shape)
    # More than MAX_EXACT_SIZE values a sample are not tried: grouping that many columns into tables takes too long.
    few_values = num_values <= MAX_EXACT_SIZE and len(job.source) * num_values <= MAX_VALUES_WITHOUT_AXES
    if "components" not in job.settings and few_values:
        config_without_axes, error_without_axes = plan_without_axes(job, budget)
        if error_without_axes < likely_error(pca_error):
            return config_without_axes.to_settings()
    return config.to_settings()


def smallest_bytes(job: Job) -> tuple[int, int]:
    """Size of a file whose codes and axes are all 0: without the network, and with it, rounded up.

    The network's size is an upper bound. A file may be smaller than that, so the first number leaves it out.
    """
    # The header holds step and most_bytes: with the fewest digits, the result does not depend on the budget.
    config = replace(from_dict(CompactConfig, job.settings), step=1.0, most_bytes=1)

    def bytes_of_zeros(num_rows: int, num_columns: int, coding: CodedConfig) -> float:
        zeros = Matrix(lambda rows: torch.zeros(len(rows), num_columns), num_rows, num_columns)
        return measure(zeros, coding, max_rows=1, num_planned=num_rows).size_bytes  # all rows are alike

    num_values, num_axes = math.prod(job.source.shape), config.components
    zero_bytes = bytes_of_zeros(job.num_planned, num_axes or num_values, config.coding)
    if num_axes:
        zero_bytes += bytes_of_zeros(num_values, num_axes, AXES_CODING)
    least, enough = (fixed_bytes(job, c) + math.ceil(zero_bytes) for c in (replace(config, c1=0), config))
    return least, 100 * math.ceil((enough + STEP_AND_BUDGET_DIGITS) / 100)


def likely_error(pca_error: float) -> float:
    """Expected error after training, from that of principal components in as many bytes; shares of the variance."""
    return pca_error * min(1.0, GAIN[0] * pca_error ** GAIN[1])


def affordable_widths(
    shape: tuple[int, ...], budget: int, limits: NetworkLimits, make_config: Callable[[int], CompactConfig]
) -> list[int]:
    """The NETWORK_WIDTHS within the limits, the widest first; the last is 0, no network. make_config: c1 -> config."""
    widths = [c1 for c1 in NETWORK_WIDTHS if c1 <= max(limits.channel_ratio * map_shape(shape)[0], 8)]
    return [c1 for c1 in widths if c1 == 0 or network_bytes(shape, make_config(c1)) <= limits.budget_share * budget]


def is_long(fit: FitConfig) -> bool:
    """Whether the fit is long enough for a wide network. One with a time budget is not: it may have few iterations."""
    return fit.time_budget is None and (fit.iterations is None or fit.iterations >= LONG_FIT_ITERATIONS)


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
    """The step and number of axes with the least error whose file fits the budget, and the widest network in limits.

    Returns the config, and the error before training as a share of the variance.
    """
    axes = learn_axes(job)
    num_values = math.prod(job.source.shape)
    given = {"most_bytes": budget, **job.settings}

    def make_config(step: float, components: int, c1: int) -> CompactConfig:
        return from_dict(CompactConfig, {"step": step, "components": components, "c1": c1, **given})

    def finest_step(components: int) -> float:
        """The smallest step that fits the budget; the largest step of all if none fits."""
        return bisect_step(
            lambda step: estimate_bytes(job, make_config(step, components, c1), axes) > budget, num_values
        )[1]

    def error(components: int) -> float:
        """Squared error of a sample: of quantised codes and axes, plus the variance along the axes left out."""
        quantisation = components * finest_step(components) ** 2 / 12 * (1 + num_values / job.num_planned)
        return quantisation + left_out[min(components, len(left_out) - 1)]  # a fit refuses more axes than there are

    left_out = variance_left_out(job, axes)
    limits = LONG_FIT_LIMITS if is_long(job.fit) else SHORT_FIT_LIMITS
    c1 = affordable_widths(job.source.shape, budget, limits, lambda c1: make_config(1.0, 1, c1))[0]
    # At most as many axes as samples: a variance above 0 along further axes is a float error.
    max_axes = min(len(axes.std), len(job.source), int((axes.std > 0).sum()) or 1)
    num_tries = math.ceil(math.log(max_axes) / -math.log(0.85)) + 1
    candidates = sorted({max(1, round(max_axes * 0.85**n)) for n in range(num_tries)})
    best = int(given["components"]) if "components" in given else min(candidates, key=error)
    config = make_config(float(f"{finest_step(best):.5g}"), best, c1)
    return config, error(best) / max(num_values * job.stats.variance, 1e-12)


def unseen_share(job: Job) -> float:
    """The share of the planned samples that are to come, and that the fit cannot see."""
    return 1 - len(job.source) / job.num_planned


def variance_left_out(job: Job, axes: Axes) -> list[float]:
    """For each number of axes k, 0 to all: the variance of a planned sample that k axes leave out.

    Axes learned from few samples leave out more of later samples than of these. The difference is estimated by learning
    axes from one half of the samples and measuring what they leave out of the other. It is small if samples are many.
    """
    seen = axes.std.double().square().flip(0).cumsum(0).flip(0).tolist()  # [k]: along axes k, k + 1, ...
    seen.append(0.0)
    unseen, num_values = unseen_share(job), math.prod(job.source.shape)
    if not unseen or len(job.source) < 4 or len(job.source) >= MANY_SAMPLES * num_values:
        return seen
    with exact_math(), torch.inference_mode():
        halves = [subset(job, torch.arange(first, len(job.source), 2)) for first in (0, 1)]
        learned = principal_axes(halves[0], job.settings.get("components"))
        squares = coordinates(halves[1], learned.mean, learned.axes.T).double().square().mean(0)  # (k,)
        total = sum(float((x.flatten(1) - learned.mean).double().square().sum()) for x in normalised_chunks(halves[1]))
    kept = [0.0, *squares.cumsum(0).tolist()]
    to_come = [max(0.0, total / len(halves[1].source) - kept[min(k, len(kept) - 1)]) for k in range(len(seen))]
    return [(1 - unseen) * s + unseen * t for s, t in zip(seen, to_come, strict=True)]


def subset(job: Job, ids: Tensor) -> Job:
    """The job of some samples, in the same range."""

    def fill(out: Tensor, rows: Tensor) -> None:
        out.copy_(job.source.read(ids[rows]))

    source = FeatureSource(job.source.name, (len(ids), *job.source.shape), dtype_name(job.source.dtype), fill)
    return replace(job, source=source, samples=Samples(len(ids), job.source.shape, None))


def likely_bytes(job: Job, target_r2: float) -> tuple[float, float]:
    """Estimated bytes of a file that reaches target_r2, and those of them that do not depend on R2.

    Inverts the measured gain of training: principal components may leave a larger error than the target allows.
    """
    axes, num_values = learn_axes(job), math.prod(job.source.shape)
    std, error = axes.std.double(), max(1 - target_r2, 1e-6)
    (factor, power), limits = (LONG_GAIN, LONG_FIT_LIMITS) if is_long(job.fit) else (GAIN, SHORT_FIT_LIMITS)
    max_pca_error = error / min(1.0, factor * error**power) * job.stats.variance * num_values

    def num_axes(step: float) -> int:
        return max(1, int((std > MIN_AXIS_STD_STEPS * step).sum()))

    def reaches_target(step: float) -> bool:
        quantisation = num_axes(step) * step**2 / 12 * (1 + num_values / job.num_planned)
        return quantisation + float(std[num_axes(step) :].square().sum()) <= max_pca_error

    step, _ = bisect_step(reaches_target, num_values)
    config = CompactConfig(step=step, components=num_axes(step), c1=0)
    return estimate_bytes(job, config, axes) / (1 - limits.budget_share), fixed_bytes(job, config)


def bisect_step(holds: Callable[[float], bool], num_values: int, tolerance: float = 1e-3) -> tuple[float, float]:
    """The coarsest step for which `holds` is true and the finest for which it is not, among all that a map can need."""
    return bisect_log(holds, 1e-5, 2 * math.sqrt(num_values) + 1, tolerance)
