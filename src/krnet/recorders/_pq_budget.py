"""Parts, bits and the price of a bit with which product quantisation makes the best of a budget.

budget -> choices of parts and bits -> each tried on a few samples -> the best -> its price of a bit, from all samples
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from krnet.budget import search
from krnet.config import from_dict
from krnet.quantize import MAX_TABLES
from krnet.recorders._numbers import evenly
from krnet.recorders._pq_books import PQConfig, Trainer, resolved
from krnet.recorders._pq_codes import NUM_TENSORS, make_plan
from krnet.recorders.base import Job, planned_overhead

TRIED_POSITIONS, TRIED_PER_ENTRY, TRIED_ROUNDS = 32768, 32, 8  # when looking for the best parts and bits
TRIED_BITS = (4, 6, 8, 10, 12)
MOST_ENTRIES = {"cpu": 1 << 13, "cuda": 1 << 16}  # of all parts, tried: what takes minutes
MOST_ROTATION = 0.02  # share of a budget
MARGIN = 0.003  # of a budget left free: a fit on a GPU is not the same twice to the last byte


def search_settings(job: Job, budget: int) -> dict[str, Any]:
    """The price of a bit at which one choice of parts and bits meets the budget is about that of all others: the best
    choice is that of the least error and bytes at this price. Then its own price, from all samples."""
    given = from_dict(PQConfig, job.settings)
    tries = [Try(job, config) for config in choices(job, budget, given)]
    if "rate_weight" in job.settings:
        weight = given.rate_weight
        fitting = [t for t in tries if t.size_bytes(weight) <= budget]
        best = (
            min(fitting, key=lambda t: t.error(weight)) if fitting else min(tries, key=lambda t: t.size_bytes(weight))
        )
    else:
        usual = min(tries, key=lambda t: (t.config.bits > 8, abs(math.log(t.raw_bits / (1.5 * room(job, budget))))))
        start = 3 * usual.error(0.0) / usual.shape[0]  # twice the slope of error over bits where bits are many
        weight = find_weight(usual.size_bytes, budget, start=start, slack=0.03)
        best = min(tries, key=lambda t: t.error(weight) + weight * t.size_bytes(weight) / t.bytes_per_bit)
    chosen: dict[str, Any] = {name: getattr(best.config, name) for name in ("parts", "bits", "rotations")} | {
        "rate_weight": weight
    }
    if "rate_weight" not in job.settings:
        config = resolved(job, replace(given, **chosen))
        trainer = Trainer(job, config)

        def size_bytes(weight: float) -> float:
            return make_plan(
                job, replace(config, rate_weight=weight), trainer, torch.arange(len(job.source))
            ).size_bytes

        chosen["rate_weight"] = find_weight(size_bytes, budget * (1 - MARGIN), start=weight, slack=MARGIN)
    return {**job.settings, **chosen}


def room(job: Job, budget: int) -> float:
    """Bits a position."""
    return 8 * budget / (job.num_planned * math.prod((job.source.shape or (1,))[1:]))


def choices(job: Job, budget: int, given: PQConfig) -> list[PQConfig]:
    """Parts and bits whose codes take about the budget, or up to three times as much before entropy coding."""
    num_channels, wanted = (job.source.shape or (1,))[0], room(job, budget)
    every = [2**n for n in range(9) if 2**n < num_channels] + ([num_channels] if num_channels <= MAX_TABLES else [])
    pairs = [
        (p, b)
        for p in ([given.parts] if given.parts else every)
        for b in ([given.bits] if "bits" in job.settings else TRIED_BITS)
    ]
    near = [(p, b) for p, b in pairs if 0.9 * wanted <= p * b <= 3 * wanted and num_channels * 2**b < 2 * budget]
    near = [(p, b) for p, b in near if p * 2**b <= MOST_ENTRIES[job.device.type] or b <= min(TRIED_BITS)]
    if not near:  # all are smaller, or all are larger
        near = [min(pairs, key=lambda pair: (abs(math.log(pair[0] * pair[1] / wanted)), pair))]
    rotations = given.rotations
    if rotations is None and 2 * num_channels**2 > MOST_ROTATION * budget:
        rotations = 0
    return [replace(given, parts=p, bits=b, rotations=rotations) for p, b in near]


class Try:
    """One choice of parts and bits: its size and error at any price of a bit, from a few samples."""

    def __init__(self, job: Job, config: PQConfig):
        self.job, config = job, resolved(job, config)
        assert config.parts
        self.raw_bits = config.parts * config.bits
        num_tried = max(TRIED_POSITIONS, TRIED_PER_ENTRY << config.bits)
        rounds = min(TRIED_ROUNDS, config.rounds)
        self.config = replace(config, train_positions=num_tried, rounds=rounds)
        self.shape = job.source.shape or (1,)
        per_sample = math.prod(self.shape[1:])
        self.bytes_per_bit = job.num_planned * per_sample / 8
        self.ids = evenly(len(job.source), -(-num_tried // per_sample))
        self.measured = cache(self._measure)

    @cached_property
    def trainer(self) -> Trainer:
        return Trainer(self.job, self.config)

    def size_bytes(self, rate_weight: float) -> float:
        return self.measured(rate_weight)[0]

    def error(self, rate_weight: float) -> float:
        """Squared error of a position."""
        return self.measured(rate_weight)[1]

    def _measure(self, rate_weight: float) -> tuple[float, float]:
        plan = make_plan(self.job, replace(self.config, rate_weight=rate_weight), self.trainer, self.ids)
        # Tables of as many codes as all have; those of a few codes would suit them too well.
        coded = sum(entropy_bytes(part) for part in plan.codes.values.swapaxes(0, 1))
        own = sum(t.nbytes for t in plan.own.values()) + 2 * sum(map(len, plan.codes.books.entries))
        size = coded * self.job.num_planned / len(self.ids) + own + planned_overhead(self.job, NUM_TENSORS, {})
        return size, plan.codes.squared_error * self.shape[0]


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

    found = search(smallness, -math.log(budget), start=max(start, 1e-5), low=1e-8, high=10.0, slack=slack, tries=9)
    return 10.0 if found is None else found
