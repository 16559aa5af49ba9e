"""Searches for the setting that just meets a size or a quality, in as few measurements as possible.

    fits(n), true up to some n     -> largest_fitting        -> the largest n that fits
    fits(n), true from some n on   -> first_fitting          -> the first n that fits
    holds(x), true up to some x    -> bisect_log             -> where it ends
    measure(x), rising with x      -> find_least             -> the smallest x with measure(x) >= target
    make(budget) -> (bytes, R2, _) -> smallest_file_reaching -> the smallest file that reaches an R2

Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
START_RATIO = 1 / 32  # a search for an R2 starts at this share of the float32 size: one bit a value
R2_SLACK = 0.02  # a search for an R2 may end with an error this share below the target; less where R2 is low


def largest_fitting(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest n in low .. high for which `fits(n)`, by bisection; low where none fits.

    If n does not fit, no larger number may.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def first_fitting(fits: Callable[[int], bool], count: int) -> int:
    """The first of 0 .. count - 1 that fits, if all that follow fit, too; the last if none fits. 0 is tried first."""
    if count == 1 or fits(0):
        return 0
    low, high = 1, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def bisect_log(holds: Callable[[float], bool], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """Two numbers that differ by a factor of exp(tolerance) or less, `holds` true of the first and false of the second.

    `holds` is true of small numbers and false of large ones.
    """
    low, high = math.log(low), math.log(high)
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    return math.exp(low), math.exp(high)


def find_least(
    measure: Callable[[float], float],
    target: float,
    *,
    start: float,
    low: float,
    high: float,
    slack: float,
    min_width: float = 1e-4,
    tries: int = 12,
) -> float | None:
    """Return the smallest x in low .. high with measure(x) >= target; None where even `high` does not reach it.

    `measure` rises with x, and about linearly with log x: the search follows the secant and falls back on bisection.
    It ends when measure(x) is at most target + slack, when the bracket of log x is narrower than `min_width`, or after
    `tries` measurements, with the best x so far.
    """
    below: tuple[float, float] | None = None  # (log x, measure): the latest that misses the target
    above: tuple[float, float] | None = None  # (log x, measure): the latest that reaches it
    log_low, log_high = math.log(low), math.log(high)
    x, slope = min(max(math.log(start), log_low), log_high), 1.0
    previous: tuple[float, float, bool] | None = None  # (log x, measure, whether it reached the target)
    for attempt in range(tries):
        y = measure(math.exp(x))
        reached = y >= target
        # Between neighbours the slope would be that of the noise.
        if previous and abs(x - previous[0]) > min_width and 0 < (y - previous[1]) / (x - previous[0]) < math.inf:
            slope = (y - previous[1]) / (x - previous[0])
        above, below = ((x, y), below) if reached else (above, (x, y))
        if (reached and (y <= target + slack or x <= log_low)) or (not reached and x >= log_high):
            break
        if above and below:
            width, rise = above[0] - below[0], above[1] - below[1]
            if width < min_width:
                break
            # Two attempts on the same side of the target: the secant shrinks the bracket too slowly, so bisect.
            bisect = not math.isfinite(rise) or (previous is not None and reached == previous[2])
            share = 0.5 if bisect else (target + slack / 2 - below[1]) / rise
            step = below[0] + width * min(max(share, 0.05), 0.95) - x
        else:
            # No bracket yet: overshoot by a tenth to get one, by at most a factor of e^2.1 = 8.
            step = max(-2.1, min(2.1, 1.1 * (target + slack / 2 - y) / slope))
        previous = (x, y, reached)
        x = min(max(x + step, log_low), log_high)
        if attempt == tries - 2 and above is None:
            x = log_high
    return None if above is None else math.exp(above[0])


def smallest_file_reaching(
    target_r2: float,
    make: Callable[[int], tuple[int, float, T]],
    *,
    feature_bytes: int,
    guess: tuple[float, float] | None = None,
    noise: float = 0.0,
    tries: int = 10,
) -> T:
    """Return the smallest result of `make` that reaches an R2; where none does, the one with the highest R2.

    make           budget in bytes -> (bytes, R2, result); for a budget that is too small, its smallest file
    feature_bytes  bytes of the features as float32: hardly any file is larger
    guess          (budget to start with, bytes that every file has in common), where a recorder knows them
    noise          relative error difference between fits of nearly equal size, as networks have; finer is not searched

    It needs to know nothing else of a recorder: log(1 - R2) is nearly linear in log(bytes).
    """
    best: list[tuple[int, float, T]] = []  # at most one, since a result may be large
    largest_miss: list[tuple[int, float]] = []  # at most one: (bytes, R2) of the largest file that misses the target

    def quality(r2: float) -> float:
        return -math.log(max(1 - r2, 1e-12))

    target = quality(target_r2)
    start, fixed_bytes = guess or (max(2.0**14, feature_bytes * START_RATIO), 0.0)

    def is_better(one: tuple[int, float, T], other: tuple[int, float, T]) -> bool:
        reaches = one[1] >= target_r2, other[1] >= target_r2
        if reaches[0] != reaches[1]:
            return reaches[0] > reaches[1]
        return one[0] < other[0] if reaches[0] else one[1] > other[1]

    def within_noise() -> bool:
        """Is the best file, by a line from the largest miss, too large by at most three times the noise?"""
        if not largest_miss or best[0][1] < target_r2:
            return False
        excess, rise = quality(best[0][1]) - target, quality(best[0][1]) - quality(largest_miss[0][1])
        return excess * math.log(best[0][0] / largest_miss[0][0]) <= 3 * noise * rise

    def measure(variable_bytes: float) -> float:
        budget = math.floor(variable_bytes + fixed_bytes)
        made = make(budget)
        if not best or is_better(made, best[0]):
            best[:] = [made]
        if made[0] > budget and made[1] >= target_r2:
            return target  # no file is smaller than this one: end the search
        if made[1] < target_r2 and (not largest_miss or made[0] > largest_miss[0][0]):
            largest_miss[:] = [made[:2]]
        return target if noise and within_noise() else quality(made[1])

    max_bytes = 1.05 * feature_bytes + 2**20
    start_bytes = max(start - fixed_bytes, 1.0)
    slack, min_width = max(R2_SLACK * min(1, abs(target)), 3 * noise), max(1e-4, 2 * noise)
    find_least(
        measure, target, start=start_bytes, low=2.0**6, high=max_bytes, slack=slack, min_width=min_width, tries=tries
    )
    return best[0][2]
