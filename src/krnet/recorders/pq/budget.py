"""Parts, bits and the price of a bit with which product quantisation makes the best of a budget.

budget -> choices of parts and bits -> each tried on a few samples -> the best -> its price of a bit, from all samples

All samples are coded two or three times only: a few tell how the size goes with the price.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from krnet.coding.entropy import MAX_TABLES
from krnet.coding.matrix import evenly_spaced
from krnet.coding.search import find_least
from krnet.config import from_dict
from krnet.recorders.base import Job
from krnet.recorders.pq.books import PQConfig, Trainer, kept_for, resolved
from krnet.recorders.pq.codes import make_plan, overhead, whole_plan

TRIED_POSITIONS, TRIED_PER_ENTRY, TRIED_ROUNDS = 16384, 16, 6  # when looking for the best parts and bits
TRIED_TURNS = 2
TRIED_BITS = (4, 6, 8, 10, 12)
MORE_ROUNDS = 0.92  # of the bytes at one price: what those of a fit leave of those of a try
FINALISTS = 3  # choices whose own price is looked for
MOST_ENTRIES = {"cpu": 1 << 13, "cuda": 1 << 16}  # of all parts, tried: what takes minutes
LEAST_POSITIONS = 100  # that an entry stands for: with fewer the codebooks are much of the file
MOST_NUMBER_BITS = 10  # of a part of one channel: its entries are rounded to a 2000th
MOST_ROTATION = 0.02  # share of a budget
NEAR = 0.01  # share of a budget that may stay unused
MARGIN = 0.003  # of a budget left free: a fit on a GPU is not the same twice to the last byte


def search_settings(job: Job, budget: int) -> dict[str, Any]:
    """The price of a bit at which one choice of parts and bits meets the budget is about that of all others: the best
    few are those of the least error and bytes at this price. Each then has its own; the best one's, from all samples.
    """
    given = from_dict(PQConfig, job.settings)
    if "rate_weight" in job.settings:
        weight = given.rate_weight
        tries = [try_for(job, config) for config in choices(job, budget, given)]
        fitting = [t for t in tries if t.size_bytes(job, weight) <= budget]
        best = (
            min(fitting, key=lambda t: t.error(job, weight))
            if fitting
            else min(tries, key=lambda t: t.size_bytes(job, weight))
        )
        return {**job.settings, **named(best.chosen, weight)}
    best, weight = best_try(job, budget, given)
    config = resolved(job, replace(given, **named(best.chosen, weight)))

    @cache
    def all_bytes(weight: float) -> float:
        return whole_plan(job, replace(config, rate_weight=weight)).size_bytes

    weight = find_whole_weight(
        lambda w: best.size_bytes(job, w),
        all_bytes,
        budget * (1 - MARGIN),
        weight=weight,
        start=price_that_matters(job, best),
    )
    return {**job.settings, **named(best.chosen, weight)}


def named(config: PQConfig, weight: float) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("parts", "bits", "rotations")} | {"rate_weight": weight}


def best_try(job: Job, budget: int, given: PQConfig) -> tuple[Try, float]:
    """The choice of the least error within a budget, and its price of a bit, from a few samples."""
    tries = [try_for(job, config) for config in choices(job, budget, given)]
    if len(tries) == 1 and tries[0].raw_bits < 0.5 * room(job, budget):
        return tries[0], 0.0  # the largest there is
    usual = min(tries, key=lambda t: (t.config.bits > 8, abs(math.log(t.raw_bits / (1.5 * room(job, budget))))))
    start = price_that_matters(job, usual)
    price = find_weight(lambda w: usual.size_bytes(job, w), budget, start=start, slack=0.03)
    bits = 8 / (job.num_planned * usual.per_sample)
    tries.sort(key=lambda t: t.error(job, price) + price * t.size_bytes(job, price) * bits)
    found: list[tuple[bool, float, int, Try, float]] = []
    for t in tries[:FINALISTS]:
        weight = find_weight(partial(t.size_bytes, job), budget, start=max(price, start / 8), slack=0.01)
        size = t.size_bytes(job, weight)
        found.append((size > budget, size if size > budget else t.error(job, weight), len(found), t, weight))
    return min(found)[3:]


def price_that_matters(job: Job, tried: Try) -> float:
    """Twice the slope of error over bits where bits are many."""
    return 3 * tried.error(job, 0.0) / tried.shape[0]


def room(job: Job, budget: int) -> float:
    """Bits a position."""
    return 8 * budget / (job.num_planned * math.prod((job.source.shape or (1,))[1:]))


def choices(job: Job, budget: int, given: PQConfig) -> list[PQConfig]:
    """Parts and bits whose codes take most of the budget, or up to three times as much before entropy coding."""
    shape, wanted = job.source.shape or (1,), room(job, budget)
    num_channels, num_positions = shape[0], job.num_planned * math.prod(shape[1:])
    every = [2**n for n in range(9) if 2**n < num_channels] + ([num_channels] if num_channels <= MAX_TABLES else [])

    def of_use(p: int, b: int) -> bool:
        """Parts of one channel are for large budgets: there bits are of use until every number has an entry."""
        if p == num_channels:
            return b <= MOST_NUMBER_BITS and 2**b < 4 * num_positions
        return LEAST_POSITIONS << b <= num_positions

    pairs = [
        (p, b)
        for p in ([given.parts] if given.parts else every)
        for b in ([given.bits] if "bits" in job.settings else TRIED_BITS)
        if "bits" in job.settings or b <= min(TRIED_BITS) or of_use(p, b)
    ]
    near = [(p, b) for p, b in pairs if 0.6 * wanted <= p * b <= 3 * wanted and num_channels * 2**b < budget / 2]

    def quick(p: int, b: int) -> bool:
        return p * 2**b <= MOST_ENTRIES[job.device.type] or b <= min(TRIED_BITS) or p == num_channels

    near = [(p, b) for p, b in near if quick(p, b)]
    if not near:  # all are smaller, or all are larger
        near = [min(pairs, key=lambda pair: (not quick(*pair), abs(math.log(pair[0] * pair[1] / wanted)), pair))]
    rotations = given.rotations
    if rotations is None and 2 * num_channels**2 > MOST_ROTATION * budget:
        rotations = 0
    return [replace(given, parts=p, bits=b, rotations=rotations) for p, b in near]


def likely_bytes(job: Job, target_r2: float) -> tuple[float, float] | None:
    """The budget of which a few samples say that it reaches an R2, and what every file takes: codes of 8 bits, in more
    and more parts."""
    given, num_channels = from_dict(PQConfig, job.settings), (job.source.shape or (1,))[0]
    wanted = num_channels * job.stats.variance * (1 - target_r2)
    if given.parts or "bits" in job.settings or not 0 < wanted < math.inf:
        return None
    before: tuple[float, float] | None = None
    for num_parts in (2**n for n in range(8)):
        if num_parts > num_channels:
            break
        tried = try_for(job, replace(given, parts=num_parts, rotations=0))
        size, error = tried.size_bytes(job, given.rate_weight), tried.error(job, given.rate_weight)
        if error <= wanted:
            share = 0.0 if before is None else math.log(before[1] / wanted) / math.log(before[1] / max(error, 1e-12))
            smaller = size if before is None else before[0]
            return smaller * (size / smaller) ** share, overhead(job, given, {})
        before = size, error
    return None


def try_for(job: Job, config: PQConfig) -> Try:
    """A try that is not made twice for the same features."""
    made = Try(job, config)
    found: Try = kept_for(job).tries.setdefault(made.chosen, made)
    return found


class Try:
    """One choice of parts and bits: its size and error at any price of a bit, from a few samples.

    It outlives a job, and is given one each time.
    """

    def __init__(self, job: Job, config: PQConfig):
        config = resolved(job, config)
        assert config.parts
        self.raw_bits = config.parts * config.bits
        num_tried = max(TRIED_POSITIONS, TRIED_PER_ENTRY << config.bits)
        rounds = min(TRIED_ROUNDS, config.rounds)
        self.chosen = config
        turns = min(TRIED_TURNS, config.rotations or 0)
        self.config = replace(config, train_positions=num_tried, rounds=rounds, rotations=turns)
        self.shape = job.source.shape or (1,)
        self.per_sample = math.prod(self.shape[1:])
        self.ids = evenly_spaced(len(job.source), -(-num_tried // self.per_sample))
        self.trainer: Trainer | None = None
        self.measured: dict[float, tuple[float, float, float]] = {}

    def size_bytes(self, job: Job, rate_weight: float) -> float:
        coded, own, _ = self._measure(job, rate_weight)
        return coded * job.num_planned + own + overhead(job, self.config, {})

    def error(self, job: Job, rate_weight: float) -> float:
        """Squared error of a position."""
        return self._measure(job, rate_weight)[2]

    def _measure(self, job: Job, rate_weight: float) -> tuple[float, float, float]:
        """Bytes of a sample's codes, bytes of the codebooks, and the error."""
        if rate_weight not in self.measured:
            self.trainer = self.trainer or Trainer(job, self.config)
            plan = make_plan(job, replace(self.config, rate_weight=rate_weight), self.trainer, self.ids)
            # Tables of as many codes as all have; those of a few codes would suit them too well.
            coded = sum(entropy_bytes(part) for part in plan.codes.values.swapaxes(0, 1)) / len(self.ids)
            own = sum(t.nbytes for t in plan.own.values()) + 2 * sum(map(len, plan.codes.books.entries))
            self.measured[rate_weight] = coded, own, plan.codes.squared_error * self.shape[0]
        return self.measured[rate_weight]


def entropy_bytes(codes: np.ndarray) -> float:
    counts = np.bincount(codes.reshape(-1))
    counts = counts[counts > 0]
    return float((counts * np.log2(codes.size / counts)).sum() / 8)


def find_weight(size: Callable[[float], float], budget: float, *, start: float, slack: float) -> float:
    """The lowest price of a bit at which `size` is within the budget; the highest where it never is."""
    if size(0.0) <= budget:
        return 0.0

    def smallness(weight: float) -> float:
        return -math.log(size(weight))

    found = find_least(smallness, -math.log(budget), start=max(start, 1e-5), low=1e-8, high=10.0, slack=slack, tries=9)
    return 10.0 if found is None else found


def find_whole_weight(
    some: Callable[[float], float], whole: Callable[[float], float], budget: float, *, weight: float, start: float
) -> float:
    """`find_weight` of the size of all samples, which takes long, led by that of a few.

    weight  at which a few samples keep the budget
    start   a price that matters: with one near 0 the size hardly changes
    """
    if weight:  # all rounds leave less than a few do
        weight = find_weight(some, budget / MORE_ROUNDS, start=weight, slack=0.01)
    if not weight:
        size = whole(0.0)
        if size <= budget:
            return 0.0
        weight = find_weight(some, some(0.0) * budget / size * (1 - MARGIN), start=start, slack=0.01) or start / 8
    tried: list[tuple[float, float]] = []  # logarithms of price and size, the nearest first
    for _ in range(4):
        size = whole(weight)
        if budget * (1 - NEAR) <= size <= budget:
            return weight
        tried.append((math.log(weight), math.log(size)))
        tried.sort(key=lambda point: abs(point[1] - math.log(budget)))
        one, other = (tried * 2)[:2]
        if len(tried) < 2 or one[0] == other[0]:
            slope = math.log(some(weight) / some(weight * 0.9)) / -math.log(0.9)
        else:
            slope = (one[1] - other[1]) / (one[0] - other[0])
        step = (math.log(budget * (1 - MARGIN)) - one[1]) / min(slope, -0.1)
        weight = math.exp(one[0] + min(max(step, -1.0), 1.0))
    return find_weight(whole, budget, start=weight, slack=NEAR)
