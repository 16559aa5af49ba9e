"""Find the parts, bits and rate weight with which product quantisation makes the least error within a budget.

    budget -> candidates (parts, bits) -> a Trial of each on a few samples -> the best -> its rate weight on all samples

All samples are coded only two or three times: the trials predict how the size falls as the rate weight rises.
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
from krnet.recorders.pq.books import PQConfig, Trainer, cache_for, resolve_settings
from krnet.recorders.pq.codes import make_plan, overhead, whole_plan

# A trial has fewer training positions, k-means rounds and rotations than a fit, to be quick.
TRIAL_POSITIONS, TRIAL_POSITIONS_PER_ENTRY = 16384, 16
TRIAL_ROUNDS, TRIAL_ROTATIONS = 6, 2
TRIAL_BITS = (4, 6, 8, 10, 12)
FIT_TO_TRIAL_BYTES = 0.92  # at the same rate weight a fit, with all its k-means rounds, takes 8 % fewer bytes
NUM_FINALISTS = 3  # candidates that get a rate weight of their own before the best is chosen
MAX_TRIAL_ENTRIES = {"cpu": 1 << 13, "cuda": 1 << 16}  # entries of all parts together; more would take minutes to try
MIN_POSITIONS_PER_ENTRY = 100  # with fewer, the codebooks would be a large share of the file
MAX_SCALAR_BITS = 10  # for parts of one channel: entries are rounded to 1 / 2000, so of 2^11 some would coincide
MAX_ROTATION_SHARE = 0.02  # share of a budget that the rotation matrix may take
MAX_UNUSED_SHARE = 0.01  # share of a budget that may stay unused
SAFETY_SHARE = 0.003  # share of a budget left free: two fits on a GPU differ by a few bytes


def search_settings(job: Job, budget: int) -> dict[str, Any]:
    """The settings with the least error whose file has at most `budget` bytes.

    The rate weight at which one candidate meets the budget is about right for all of them. So the candidates are
    ranked by error + rate weight x bits at one weight; the best few get weights of their own, all from a few samples.
    The weight of the best one is then refined on all samples.
    """
    given = from_dict(PQConfig, job.settings)
    if "rate_weight" in job.settings:
        weight = given.rate_weight
        trials = [trial_for(job, config) for config in candidates(job, budget, given)]
        fitting = [t for t in trials if t.size_bytes(job, weight) <= budget]
        best = (
            min(fitting, key=lambda t: t.error(job, weight))
            if fitting
            else min(trials, key=lambda t: t.size_bytes(job, weight))
        )
        return {**job.settings, **searched_settings(best.fit_config, weight)}
    best, weight = best_trial(job, budget, given)
    config = resolve_settings(job, replace(given, **searched_settings(best.fit_config, weight)))

    @cache
    def full_bytes(weight: float) -> float:
        return whole_plan(job, replace(config, rate_weight=weight)).size_bytes

    weight = find_full_weight(
        lambda w: best.size_bytes(job, w),
        full_bytes,
        budget * (1 - SAFETY_SHARE),
        weight=weight,
        start=typical_weight(job, best),
    )
    return {**job.settings, **searched_settings(best.fit_config, weight)}


def searched_settings(config: PQConfig, weight: float) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("parts", "bits", "rotations")} | {"rate_weight": weight}


def best_trial(job: Job, budget: int, given: PQConfig) -> tuple[Trial, float]:
    """The candidate with the least error within the budget, and its rate weight, both from a few samples."""
    trials = [trial_for(job, config) for config in candidates(job, budget, given)]
    budget_bits = bits_per_position(job, budget)
    if len(trials) == 1 and trials[0].raw_bits < 0.5 * budget_bits:
        return trials[0], 0.0  # the largest codes there are, and they fit
    # The candidate nearest to 1.5 times the budget sets the common rate weight: entropy coding saves about a third.
    # Candidates of up to 8 bits come first, as they are quick to try.
    typical = min(trials, key=lambda t: (t.config.bits > 8, abs(math.log(t.raw_bits / (1.5 * budget_bits)))))
    start = typical_weight(job, typical)
    common_weight = find_weight(lambda w: typical.size_bytes(job, w), budget, start=start, slack=0.03)
    bits_per_byte = 8 / (job.num_planned * typical.per_sample)  # bits of one position for each byte of the file

    def total_cost(t: Trial) -> float:
        return t.error(job, common_weight) + common_weight * t.size_bytes(job, common_weight) * bits_per_byte

    trials.sort(key=total_cost)
    # (is too large, error or else size, tie-breaker, trial, rate weight)
    finalists: list[tuple[bool, float, int, Trial, float]] = []
    for t in trials[:NUM_FINALISTS]:
        weight = find_weight(partial(t.size_bytes, job), budget, start=max(common_weight, start / 8), slack=0.01)
        size = t.size_bytes(job, weight)
        finalists.append((size > budget, size if size > budget else t.error(job, weight), len(finalists), t, weight))
    return min(finalists)[3:]


def typical_weight(job: Job, trial: Trial) -> float:
    """A rate weight that changes the size noticeably: 3 * error / channels.

    With many bits, error ~ 2 ** (-2 * bits / channels), so a bit is worth 2 ln 2 * error / channels. This is about
    twice that.
    """
    return 3 * trial.error(job, 0.0) / trial.shape[0]


def bits_per_position(job: Job, budget: int) -> float:
    return 8 * budget / (job.num_planned * math.prod((job.source.shape or (1,))[1:]))


def candidates(job: Job, budget: int, given: PQConfig) -> list[PQConfig]:
    """Parts and bits whose codes, before entropy coding, take 0.6 to 3 times the budget."""
    shape, budget_bits = job.source.shape or (1,), bits_per_position(job, budget)
    num_channels, num_positions = shape[0], job.num_planned * math.prod(shape[1:])
    all_parts = [2**n for n in range(9) if 2**n < num_channels] + ([num_channels] if num_channels <= MAX_TABLES else [])

    def worth_trying(p: int, b: int) -> bool:
        """Parts of one channel serve large budgets: there more bits help until every number has its own entry."""
        if p == num_channels:
            return b <= MAX_SCALAR_BITS and 2**b < 4 * num_positions
        return MIN_POSITIONS_PER_ENTRY << b <= num_positions

    pairs = [
        (p, b)
        for p in ([given.parts] if given.parts else all_parts)
        for b in ([given.bits] if "bits" in job.settings else TRIAL_BITS)
        if "bits" in job.settings or b <= min(TRIAL_BITS) or worth_trying(p, b)
    ]
    near = [
        (p, b) for p, b in pairs if 0.6 * budget_bits <= p * b <= 3 * budget_bits and num_channels * 2**b < budget / 2
    ]

    def quick(p: int, b: int) -> bool:
        return p * 2**b <= MAX_TRIAL_ENTRIES[job.device.type] or b <= min(TRIAL_BITS) or p == num_channels

    near = [(p, b) for p, b in near if quick(p, b)]
    if not near:  # all are smaller, or all are larger: take the nearest
        near = [min(pairs, key=lambda pair: (not quick(*pair), abs(math.log(pair[0] * pair[1] / budget_bits)), pair))]
    rotations = given.rotations
    if rotations is None and 2 * num_channels**2 > MAX_ROTATION_SHARE * budget:  # float16: 2 bytes a number
        rotations = 0
    return [replace(given, parts=p, bits=b, rotations=rotations) for p, b in near]


def likely_bytes(job: Job, target_r2: float) -> tuple[float, float] | None:
    """The budget at which a few samples predict `target_r2`, and the bytes of it that every file takes.

    Tries codes of 8 bits in 1, 2, 4, ... parts and interpolates log(size) over log(error).
    """
    given, num_channels = from_dict(PQConfig, job.settings), (job.source.shape or (1,))[0]
    target_error = num_channels * job.stats.variance * (1 - target_r2)
    if given.parts or "bits" in job.settings or not 0 < target_error < math.inf:
        return None
    before: tuple[float, float] | None = None  # size and error with half as many parts
    for num_parts in (2**n for n in range(8)):
        if num_parts > num_channels:
            break
        trial = trial_for(job, replace(given, parts=num_parts, rotations=0))
        size, error = trial.size_bytes(job, given.rate_weight), trial.error(job, given.rate_weight)
        if error <= target_error:
            share = (
                0.0 if before is None else math.log(before[1] / target_error) / math.log(before[1] / max(error, 1e-12))
            )
            smaller = size if before is None else before[0]
            return smaller * (size / smaller) ** share, overhead(job, given, {})
        before = size, error
    return None


def trial_for(job: Job, config: PQConfig) -> Trial:
    """The trial of these settings; there is one for the same features, and it keeps its measurements."""
    trial = Trial(job, config)
    found: Trial = cache_for(job).trials.setdefault(trial.fit_config, trial)
    return found


class Trial:
    """One pair of parts and bits: its size and error at any rate weight, from a few samples.

    A trial outlives its job: other jobs of the same features use it, so each call is given the job.
    """

    def __init__(self, job: Job, config: PQConfig):
        config = resolve_settings(job, config)
        assert config.parts
        self.raw_bits = config.parts * config.bits  # of a position, before entropy coding
        num_positions = max(TRIAL_POSITIONS, TRIAL_POSITIONS_PER_ENTRY << config.bits)
        rounds = min(TRIAL_ROUNDS, config.rounds)
        self.fit_config = config  # settings of the fit; self.config has those of the trial
        rotations = min(TRIAL_ROTATIONS, config.rotations or 0)
        self.config = replace(config, train_positions=num_positions, rounds=rounds, rotations=rotations)
        self.shape = job.source.shape or (1,)
        self.per_sample = math.prod(self.shape[1:])
        self.ids = evenly_spaced(len(job.source), -(-num_positions // self.per_sample))
        self.trainer: Trainer | None = None
        self.measured: dict[float, tuple[float, float, float]] = {}

    def size_bytes(self, job: Job, rate_weight: float) -> float:
        sample_bytes, book_bytes, _ = self._measure(job, rate_weight)
        return sample_bytes * job.num_planned + book_bytes + overhead(job, self.config, {})

    def error(self, job: Job, rate_weight: float) -> float:
        """Squared error of a position: the mean over positions, summed over channels."""
        return self._measure(job, rate_weight)[2]

    def _measure(self, job: Job, rate_weight: float) -> tuple[float, float, float]:
        """Bytes of one sample's codes, bytes of the codebooks and tables, and squared error of a position."""
        if rate_weight not in self.measured:
            self.trainer = self.trainer or Trainer(job, self.config)
            plan = make_plan(job, replace(self.config, rate_weight=rate_weight), self.trainer, self.ids)
            # One table per part. Tables by position, fitted to so few samples, would predict too small a size.
            sample_bytes = sum(entropy_bytes(part) for part in plan.codes.values.swapaxes(0, 1)) / len(self.ids)
            book_bytes = sum(t.nbytes for t in plan.book_tensors.values())
            book_bytes += 2 * sum(map(len, plan.codes.books.entries))
            self.measured[rate_weight] = sample_bytes, book_bytes, plan.codes.squared_error * self.shape[0]
        return self.measured[rate_weight]


def entropy_bytes(codes: np.ndarray) -> float:
    """Bytes of an ideal entropy coder with one table for all codes."""
    counts = np.bincount(codes.reshape(-1))
    counts = counts[counts > 0]
    return float((counts * np.log2(codes.size / counts)).sum() / 8)


def find_weight(size: Callable[[float], float], budget: float, *, start: float, slack: float) -> float:
    """The lowest rate weight at which `size` is within the budget; 10, the highest, if there is none."""
    if size(0.0) <= budget:
        return 0.0

    def smallness(weight: float) -> float:
        return -math.log(size(weight))

    found = find_least(smallness, -math.log(budget), start=max(start, 1e-5), low=1e-8, high=10.0, slack=slack, tries=9)
    return 10.0 if found is None else found


def find_full_weight(
    trial_bytes: Callable[[float], float],
    full_bytes: Callable[[float], float],
    budget: float,
    *,
    weight: float,
    start: float,
) -> float:
    """`find_weight` for the size of all samples, which takes long to measure; the trial's size guides the search.

    weight  rate weight at which the trial meets the budget
    start   a typical rate weight: near 0 the size hardly changes with it
    """
    if weight:
        weight = find_weight(trial_bytes, budget / FIT_TO_TRIAL_BYTES, start=weight, slack=0.01)
    if not weight:
        size = full_bytes(0.0)
        if size <= budget:
            return 0.0
        target_bytes = trial_bytes(0.0) * budget / size * (1 - SAFETY_SHARE)
        weight = find_weight(trial_bytes, target_bytes, start=start, slack=0.01) or start / 8
    # Secant method on log(size) over log(weight).
    points: list[tuple[float, float]] = []  # (log weight, log size), the nearest to the budget first
    for _ in range(4):
        size = full_bytes(weight)
        if budget * (1 - MAX_UNUSED_SHARE) <= size <= budget:
            return weight
        points.append((math.log(weight), math.log(size)))
        points.sort(key=lambda point: abs(point[1] - math.log(budget)))
        one, other = (points * 2)[:2]
        if len(points) < 2 or one[0] == other[0]:
            slope = math.log(trial_bytes(weight) / trial_bytes(weight * 0.9)) / -math.log(0.9)
        else:
            slope = (one[1] - other[1]) / (one[0] - other[0])
        step = (math.log(budget * (1 - SAFETY_SHARE)) - one[1]) / min(slope, -0.1)
        weight = math.exp(one[0] + min(max(step, -1.0), 1.0))
    return find_weight(full_bytes, budget, start=weight, slack=MAX_UNUSED_SHARE)
