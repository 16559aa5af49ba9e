"""k-means clustering, on a CPU or a GPU: place k entries so that every point is near one of them.

    points (n, d)          -> kmeans    -> entries (k, d)
    points, entries        -> constrain -> entries (k, d), costs (k,)
    points, entries, costs -> nearest   -> codes (n,): the index of each point's entry

`kmeans` is Lloyd's algorithm, started by k-means++ (Arthur and Vassilvitskii 2007); deviation: the start draws several
entries at once. `constrain` is entropy-constrained vector quantisation (Chou et al. 1989): an entry's cost is its code
length, so that points prefer frequent entries.

On a GPU, no function here waits for a result. Sums are in float64: rounded to float32, they do not depend on the order
in which a GPU adds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Distances computed at once: on a CPU as many as its cache holds, on a GPU enough to keep it busy.
MAX_DISTANCES = {"cpu": 1 << 19, "cuda": 1 << 26}
START_POINTS = 1 << 14  # k-means++ draws from about this many points, or from 32 per entry if that is more


def nearest(points: Tensor, entries: Tensor, costs: Tensor) -> Tensor:
    """Return codes (n,): for each of points (n, d), the entry of (k, d) with the least squared distance + cost (k,)."""
    if points.is_cpu and points.shape[1] == 1 and len(entries) > 8:
        return nearest_scalar(points[:, 0], entries[:, 0], costs)
    # |point - entry|^2 + cost, without |point|^2, is the product of (point, 1) and a column of this matrix.
    factors = torch.cat([-2 * entries, (entries.square().sum(1) + costs)[:, None]], dim=1).T  # (d + 1, k)
    points = torch.cat([points, points.new_ones(len(points), 1)], dim=1)  # (n, d + 1)
    codes = []
    for part in points.split(max(1, MAX_DISTANCES[points.device.type] // len(entries))):
        distances = part @ factors
        # On a CPU, argmin of numpy is five times as fast as that of torch.
        codes.append(torch.from_numpy(distances.numpy().argmin(1)) if distances.is_cpu else distances.argmin(1))
    return torch.cat(codes)


def nearest_scalar(points: Tensor, entries: Tensor, costs: Tensor) -> Tensor:
    """Do what `nearest` does for points (n,) and entries (k,): sort the entries and search the borders between them."""
    values, prices = entries.double().numpy(), costs.double().numpy()
    candidates = np.lexsort((prices, values))
    candidates = candidates[np.isfinite(prices[candidates])]
    candidates = candidates[np.r_[True, np.diff(values[candidates]) > 0]]  # the cheapest of equal entries
    while True:
        # A point on the border of entries a and b has (x - a)^2 + cost_a = (x - b)^2 + cost_b.
        heights = values[candidates] ** 2 + prices[candidates]
        borders = np.diff(heights) / (2 * np.diff(values[candidates]))
        # An entry whose interval is empty has no points: drop it, and compute the borders without it.
        has_points = np.r_[-np.inf, borders] < np.r_[borders, np.inf]
        if has_points.all():
            return torch.from_numpy(candidates[np.searchsorted(borders, points.numpy())])
        candidates = candidates[has_points]


def tally(points: Tensor, codes: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """Return the number (k,) and the sum (k, d) of the points of each code, in float64."""
    counts = torch.zeros(num_entries, dtype=torch.float64, device=points.device)
    sums = torch.zeros(num_entries, points.shape[1], dtype=torch.float64, device=points.device)
    counts.index_add_(0, codes, counts.new_ones(1).expand(len(codes)))
    return counts, sums.index_add_(0, codes, points.double())


def draw_start(points: Tensor, num_entries: int, generator: torch.Generator) -> Tensor:
    """Draw entries (k, d) to start from, as k-means++ does; but each draw enlarges their number by a fifth."""
    points = points[:: max(1, len(points) // max(START_POINTS, 32 * num_entries))]  # as good a start as all points
    entries = points.mean(0, keepdim=True)
    errors = (points - entries).square().sum(1)  # (n,): squared distance to the nearest entry so far
    while len(entries) < num_entries:
        added = points[draw_by_error(errors, min(-(-len(entries) // 5), num_entries - len(entries)), generator)]
        entries = torch.cat([entries, added])
        nearest_added = added[nearest(points, added, added.new_zeros(len(added)))]
        errors = errors.minimum((points - nearest_added).square().sum(1))
    return entries


def draw_by_error(errors: Tensor, num_drawn: int, generator: torch.Generator) -> Tensor:
    """Draw indices (num_drawn,) without replacement, with probabilities proportional to the errors."""
    return (errors / torch.empty_like(errors).exponential_(generator=generator)).topk(num_drawn).indices


def kmeans(
    points: Tensor, num_entries: int, rounds: int, generator: torch.Generator, start: Tensor | None = None
) -> Tensor:
    """Return entries (k, d) for points (n, d) after `rounds` of Lloyd's algorithm, begun at `start` if that is given.

    `generator` must be on the device of the points.
    """
    entries = draw_start(points, min(num_entries, len(points)), generator) if start is None else start
    no_costs = entries.new_zeros(len(entries))
    for _ in range(rounds):
        codes = nearest(points, entries, no_costs)
        counts, sums = tally(points, codes, len(entries))
        if points.is_cpu and counts.all():
            entries = (sums / counts[:, None]).float()
            continue
        # An entry without points moves to a point with a large error.
        replacements = points[draw_by_error((points - entries[codes]).square().sum(1), len(entries), generator)]
        entries = torch.where(counts[:, None] > 0, (sums / counts[:, None]).float(), replacements)
    return entries


def constrain(points: Tensor, entries: Tensor, rate_weight: float, rounds: int) -> tuple[Tensor, Tensor]:
    """Move entries (k, d) to minimise squared distance + rate_weight * code length; return them and their costs (k,).

    The cost of an entry is rate_weight * -log2(share of the points that have it).
    """
    costs = entries.new_zeros(len(entries))
    for _ in range(rounds if rate_weight else 0):
        counts, sums = tally(points, nearest(points, entries, costs), len(entries))
        entries = torch.where(counts[:, None] > 0, (sums / counts[:, None]).float(), entries)
        costs = (-rate_weight * (counts / len(points)).log2()).float()  # infinite for an entry without points
        if points.is_cpu:
            entries, costs = entries[counts > 0], costs[counts > 0]
    return entries, costs
