"""Sizes as a person writes them, and the few fits that find the size that is wanted.

    "6.5 MB" -> parse_size -> 6_500_000
    sizes that fit or do not -> largest -> the last that does
    size or quality as a function of one knob -> search -> the knob, where it is just enough
    record at a budget -> (bytes, R2) -> smallest_reaching -> the smallest recording that reaches an R2

MB are 10^6 bytes, MiB 2^20. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
START_SHARE = 1 / 32  # of the bytes of float32 features: where the search for a quality begins
SLACK = 0.02  # share of the error by which a search may end below what was asked for; less where R2 is low


def largest_fitting(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest of low .. high that fits, where none after one that does not fit does; low where none fits."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def find_least(
    measure: Callable[[float], float],
    wanted: float,
    *,
    start: float,
    low: float,
    high: float,
    slack: float,
    narrow: float = 1e-4,
    tries: int = 12,
) -> float | None:
    """The smallest x from low to high with measure(x) >= wanted, in few measurements; None where high has less.

    `measure` rises with x, and about linearly with log x. Ends at the first x that is at most `slack` above wanted, or
    less than `narrow` (of its logarithm) above one that is too small, or at the best found after so many tries.
    """
    below: tuple[float, float] | None = None  # log x and its measure, too little
    above: tuple[float, float] | None = None  # enough
    first, last = math.log(low), math.log(high)
    x, slope = min(max(math.log(start), first), last), 1.0
    before: tuple[float, float, bool] | None = None
    for attempt in range(tries):
        y = measure(math.exp(x))
        enough = y >= wanted
        # From neighbours it would be the slope of their noise.
        if before and abs(x - before[0]) > narrow and 0 < (y - before[1]) / (x - before[0]) < math.inf:
            slope = (y - before[1]) / (x - before[0])
        above, below = ((x, y), below) if enough else (above, (x, y))
        if (enough and (y <= wanted + slack or x <= first)) or (not enough and x >= last):
            break
        if above and below:
            width, rise = above[0] - below[0], above[1] - below[1]
            if width < narrow:
                break
            # Twice on the same side: the bracket shrinks too slowly, and is halved.
            halve = not math.isfinite(rise) or (before is not None and enough == before[2])
            share = 0.5 if halve else (wanted + slack / 2 - below[1]) / rise
            step = below[0] + width * min(max(share, 0.05), 0.95) - x
        else:
            # As far as the slope says and a little further, at most eightfold.
            step = max(-2.1, min(2.1, 1.1 * (wanted + slack / 2 - y) / slope))
        before = (x, y, enough)
        x = min(max(x + step, first), last)
        if attempt == tries - 2 and above is None:
            x = last
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
    """The smallest of what `make` makes that reaches an R2; where nothing does, the best.

    make           budget -> bytes, R2, and what was made; given too small a budget, it makes the smallest it can
    feature_bytes  of the features as float32: nothing needs much more
    guess          the budget to begin with, and how much of it every file takes: known of some recorders
    noise          share by which errors of nearly equal budgets differ, as those of networks do: none is looked into

    For any recorder: R2 is all that need be known of it. log(1 - R2) is nearly a line over log bytes.
    """
    best: list[tuple[int, float, T]] = []  # one at most: what is made may be large
    short: list[tuple[int, float]] = []  # the largest that was not enough

    def nats(r2: float) -> float:
        return -math.log(max(1 - r2, 1e-12))

    wanted = nats(target_r2)
    start, fixed = guess or (max(2.0**14, feature_bytes * START_SHARE), 0.0)

    def better(one: tuple[int, float, T], other: tuple[int, float, T]) -> bool:
        good = one[1] >= target_r2, other[1] >= target_r2
        return good[0] > good[1] if good[0] != good[1] else one[0] < other[0] if good[0] else one[1] > other[1]

    def near_enough() -> bool:
        """A line from the largest that is not enough says that the best is too large by a few times the noise."""
        if not short or best[0][1] < target_r2:
            return False
        beyond, rise = nats(best[0][1]) - wanted, nats(best[0][1]) - nats(short[0][1])
        return beyond * math.log(best[0][0] / short[0][0]) <= 3 * noise * rise

    def reached(size: float) -> float:
        budget = math.floor(size + fixed)
        made = make(budget)
        if not best or better(made, best[0]):
            best[:] = [made]
        if made[0] > budget and made[1] >= target_r2:
            return wanted  # the smallest there is: just enough
        if made[1] < target_r2 and (not short or made[0] > short[0][0]):
            short[:] = [made[:2]]
        return wanted if noise and near_enough() else nats(made[1])

    most = 1.05 * feature_bytes + 2**20
    begin = max(start - fixed, 1.0)
    slack, narrow = max(SLACK * min(1, abs(wanted)), 3 * noise), max(1e-4, 2 * noise)
    find_least(reached, wanted, start=begin, low=2.0**6, high=most, slack=slack, narrow=narrow, tries=tries)
    return best[0][2]
