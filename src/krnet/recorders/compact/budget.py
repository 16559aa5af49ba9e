"""Step, axes and network with which a compact KRNet makes the best of a budget, from its principal components.

budget -> the finest step for each number of axes -> the number of the least error -> settings
       -> the finest step without axes, of few samples -> settings, where the error is likely to be less
target R2 -> step and number of axes that leave the error it allows -> about the bytes they take
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from krnet.coding.matrix import Matrix, MatrixReader, MatrixStats, TooFineError, encode, evenly_spaced, measure
from krnet.coding.weights import coded_bits
from krnet.config import from_dict
from krnet.nn.sizing import map_shape
from krnet.recorders.axes import EXACT, Axes
from krnet.recorders.base import Job
from krnet.recorders.coded import SEARCH_ROWS
from krnet.recorders.compact.axes_fit import axis_scale, axis_spread, learned
from krnet.recorders.compact.codes import fixed_bytes, network_bytes
from krnet.recorders.compact.network import CompactConfig, zero_map
from krnet.recorders.compact.values_fit import DEAD_ZONE, values
from krnet.train.config import FitConfig


class Limits(NamedTuple):
    """Of the network."""

    share: float
    """Of a budget, that it may take."""
    times: int
    """As many channels as a map has, at most."""


WIDTHS = (128, 96, 64, 48, 32, 16, 8, 0)
WIDE, NARROW = Limits(0.11, 2), Limits(0.05, 1)  # of long and of short fits (docs/choices.md)
REPAIR = Limits(0.22, 1)  # where there are no axes to pay for
LONG = 2000  # iterations from which a wide network is taken: after 200 it is behind, and a step takes longer
KEPT_AXIS = 0.8  # steps of standard deviation from which an axis is kept, where error and size are best together
# e**0.4 times 1.2 of the error of principal components of the same bytes is left, where it is e; less by long fits.
# Axes and values (REPAIRED) are weighed by the first: both were found in short ones.
GAIN, LONG_GAIN = (1.2, 0.4), (0.85, 0.44)
MOST_VALUES = 1 << 24  # of all samples, up to which axes were found to be too dear; long fits of more were not tried
COARSE, REPAIRED = 0.01, 0.45  # of rounded values such an error is worth repairing, and so much of it is left


def size_bytes(job: Job, config: CompactConfig, axes: Axes) -> int:
    """About how large a file is at first; an upper bound where numbers are normal, which they are not quite."""
    num_samples, num_values = job.num_planned, math.prod(job.source.shape)
    step = torch.tensor(config.step, device=axes.std.device)
    of_axes = axis_scale(*axis_spread(axes, config.components), step, num_samples).double() / math.sqrt(num_values)
    of_codes = axes.std[: config.components].double() / config.step
    bits = num_values * sum(coded_bits(1 / max(s, 1e-3)) for s in of_axes.tolist())
    bits += num_samples * sum(coded_bits(1 / max(s, 1e-3)) for s in of_codes.tolist())
    return math.ceil(bits / 8) + fixed_bytes(job, config)


def for_budget(job: Job, budget: int) -> dict[str, Any]:
    """With axes or without, whichever is likely to leave less error."""
    if job.settings.get("components") == 0:
        return asdict(without_axes(job, budget)[0])
    config, error = with_axes(job, budget)
    num_values = math.prod(job.source.shape)
    # Tables for the values of larger samples take long to find.
    if "components" not in job.settings and num_values <= EXACT and job.num_planned * num_values <= MOST_VALUES:
        plain, rounding = without_axes(job, budget)
        if rounding < likely_error(error):
            return asdict(plain)
    return asdict(config)


def likely_error(error: float) -> float:
    """Left by a network, of that of principal components of the same bytes; both as shares of the variance."""
    return error * min(1.0, GAIN[0] * error ** GAIN[1])


def affordable(
    shape: tuple[int, ...], budget: int, limits: Limits, network: Callable[[int], CompactConfig]
) -> list[int]:
    """Channels of networks that take no more, the widest first; the last is none."""
    widths = [c1 for c1 in WIDTHS if c1 <= max(limits.times * map_shape(shape)[0], 8)]
    return [c1 for c1 in widths if c1 == 0 or network_bytes(shape, network(c1)) <= limits.share * budget]


def is_long(fit: FitConfig) -> bool:
    """What is stopped by a clock may be stopped early."""
    return fit.time_budget is None and (fit.iterations is None or fit.iterations >= LONG)


def without_axes(job: Job, budget: int) -> tuple[CompactConfig, float]:
    """The finest step with which values keep a budget; and about the error that is left, as a share of the variance."""

    def network(c1: int, step: float = 1.0) -> CompactConfig:
        given = {"step": step, "c1": c1, "dead_zone": DEAD_ZONE, "most_bytes": budget, **job.settings}
        return from_dict(CompactConfig, {**given, "components": 0})

    zero = zero_map(job.source.shape, job.stats.low, job.stats.high).to(job.device)
    codes = values(job, zero, evenly_spaced(len(job.source), SEARCH_ROWS))

    def rounding(c1: int) -> tuple[CompactConfig, float]:
        fixed = fixed_bytes(job, network(c1))

        def found(step: float) -> MatrixStats:
            return measure(Matrix.of(codes), network(c1, step).coding, num_planned=job.num_planned)

        def too_large(step: float) -> bool:
            try:
                return found(step).size_bytes + fixed > budget
            except TooFineError:
                return True

        config = network(c1, float(f"{where_it_ends(too_large, 1, 0.03)[1]:.5g}"))
        coded = encode(Matrix.of(codes), config.coding, found(config.step))
        restored = MatrixReader(coded, config.coding, job.device).read(torch.arange(len(codes)))
        return config, float((restored - codes).double().square().mean()) / max(job.stats.variance, 1e-12)

    plain = rounding(0)
    widths = affordable(job.source.shape, budget, REPAIR, network) if plain[1] >= COARSE else [0]
    for c1 in widths[:-1]:  # the widest that is worth what it takes from the values
        config, error = rounding(c1)
        if REPAIRED * error < plain[1]:
            return config, REPAIRED * error
    return plain


def with_axes(job: Job, budget: int) -> tuple[CompactConfig, float]:
    """Step and number of axes with the least error that the budget pays for, beside a network of a ninth of it at most.

    And that error, as a share of the variance.
    """
    axes = learned(job)
    num_values = math.prod(job.source.shape)
    given = {"most_bytes": budget, **job.settings}

    def network(step: float, components: int, c1: int) -> CompactConfig:
        return from_dict(CompactConfig, {"step": step, "components": components, "c1": c1, **given})

    def finest(components: int) -> float:
        """The smallest step that keeps the budget, or the largest there is."""
        return where_it_ends(lambda s: size_bytes(job, network(s, components, c1), axes) > budget, num_values)[1]

    def error(components: int) -> float:
        """Of rounding codes and axes, and of what the axes left out hold."""
        rounding = components * finest(components) ** 2 / 12 * (1 + num_values / job.num_planned)
        return rounding + float(axes.std[components:].double().square().sum())

    c1 = affordable(job.source.shape, budget, WIDE if is_long(job.fit) else NARROW, lambda c1: network(1.0, 1, c1))[0]
    # No more than there are samples: what is above 0 beyond is rounding.
    most = min(len(axes.std), len(job.source), int((axes.std > 0).sum()) or 1)
    tried = sorted({max(1, round(most * 0.85**n)) for n in range(math.ceil(math.log(most) / -math.log(0.85)) + 1)})
    best = int(given["components"]) if "components" in given else min(tried, key=error)
    return network(float(f"{finest(best):.5g}"), best, c1), error(best) / max(num_values * job.stats.variance, 1e-12)


def likely_bytes(job: Job, target_r2: float) -> tuple[float, float]:
    """About the bytes that reach an R2: those of principal components with a larger error. And how many are fixed."""
    axes, num_values = learned(job), math.prod(job.source.shape)
    std, error = axes.std.double(), max(1 - target_r2, 1e-6)
    (factor, power), limits = (LONG_GAIN, WIDE) if is_long(job.fit) else (GAIN, NARROW)
    allowed = error / min(1.0, factor * error**power) * job.stats.variance * num_values

    def kept(step: float) -> int:
        return max(1, int((std > KEPT_AXIS * step).sum()))

    def enough(step: float) -> bool:
        rounding = kept(step) * step**2 / 12 * (1 + num_values / len(job.source))
        return rounding + float(std[kept(step) :].square().sum()) <= allowed

    step, _ = where_it_ends(enough, num_values)
    config = CompactConfig(step=step, components=kept(step), c1=0)
    return size_bytes(job, config, axes) / (1 - limits.share), fixed_bytes(job, config)


def where_it_ends(holds: Callable[[float], bool], num_values: int, apart: float = 1e-3) -> tuple[float, float]:
    """The last step with which `holds`, which is true of fine ones, and the first without; by default a thousandth."""
    low, high = math.log(1e-5), math.log(2 * math.sqrt(num_values) + 1)
    while high - low > apart:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    return math.exp(low), math.exp(high)
