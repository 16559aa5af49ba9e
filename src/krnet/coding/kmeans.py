"""k-means, on a CPU or a GPU: where to put a few entries so that every point is near one.

    points (n, d) -> kmeans -> entries (k, d)         Lloyd's algorithm, begun as k-means++ does (Arthur et al. 2007)
    points, entries -> constrain -> entries, costs    the same, and likely entries are cheaper (Chou et al. 1989)
    points, entries, costs -> nearest -> codes (n,)

Nothing here waits for a GPU. Sums are in float64, and so the same in whatever order a GPU adds them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DISTANCES = {"cpu": 1 << 19, "cuda": 1 << 26}  # in hand at once: what a cache holds, or keeps a GPU busy
STARTED = 1 << 14  # points from which the first entries are drawn, or 32 an entry


def nearest(points: Tensor, entries: Tensor, costs: Tensor) -> Tensor:
    """points (n, d), entries (k, d), the cost of each (k,) -> the entry (n,) of least squared distance and cost."""
    if points.is_cpu and points.shape[1] == 1 and len(entries) > 8:
        return nearest_number(points[:, 0], entries[:, 0], costs)
    lines = torch.cat([-2 * entries, (entries.square().sum(1) + costs)[:, None]], dim=1).T  # (d + 1, k)
    points = torch.cat([points, points.new_ones(len(points), 1)], dim=1)
    found = []
    for part in points.split(max(1, DISTANCES[points.device.type] // len(entries))):
        distances = part @ lines
        # On a CPU numpy's is five times as fast as torch's.
        found.append(torch.from_numpy(distances.numpy().argmin(1)) if distances.is_cpu else distances.argmin(1))
    return torch.cat(found)


def nearest_number(points: Tensor, entries: Tensor, costs: Tensor) -> Tensor:
    """`nearest` where points and entries are single numbers: entries in their order, and the borders between them."""
    values, prices = entries.double().numpy(), costs.double().numpy()
    kept = np.lexsort((prices, values))
    kept = kept[np.isfinite(prices[kept])]
    kept = kept[np.r_[True, np.diff(values[kept]) > 0]]  # of equal ones the cheapest
    while True:
        heights = values[kept] ** 2 + prices[kept]
        borders = np.diff(heights) / (2 * np.diff(values[kept]))
        # One that ends before it begins is nobody's.
        owns = np.r_[-np.inf, borders] < np.r_[borders, np.inf]
        if owns.all():
            return torch.from_numpy(kept[np.searchsorted(borders, points.numpy())])
        kept = kept[owns]


def tally(points: Tensor, codes: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """Count (k,) and sum (k, d) of the points of each code, in float64: the same in whatever order they are added."""
    counts = torch.zeros(num_entries, dtype=torch.float64, device=points.device)
    sums = torch.zeros(num_entries, points.shape[1], dtype=torch.float64, device=points.device)
    counts.index_add_(0, codes, counts.new_ones(1).expand(len(codes)))
    return counts, sums.index_add_(0, codes, points.double())


def spread(points: Tensor, num_entries: int, generator: torch.Generator) -> Tensor:
    """Points (k, d) to start from, drawn as k-means++ draws them, but a fifth of those there are at once."""
    points = points[:: max(1, len(points) // max(STARTED, 32 * num_entries))]  # as good a start
    entries = points.mean(0, keepdim=True)
    errors = (points - entries).square().sum(1)
    while len(entries) < num_entries:
        fresh = points[draw(errors, min(-(-len(entries) // 5), num_entries - len(entries)), generator)]
        entries = torch.cat([entries, fresh])
        chosen = fresh[nearest(points, fresh, fresh.new_zeros(len(fresh)))]
        errors = errors.minimum((points - chosen).square().sum(1))
    return entries


def draw(errors: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Indices (num,) drawn by error, each once."""
    return (errors / torch.empty_like(errors).exponential_(generator=generator)).topk(num).indices


def kmeans(
    points: Tensor, num_entries: int, rounds: int, generator: torch.Generator, start: Tensor | None = None
) -> Tensor:
    """Entries (k, d) near the points (n, d), from those to start with. `generator` is of the points' device."""
    entries = spread(points, min(num_entries, len(points)), generator) if start is None else start
    free = entries.new_zeros(len(entries))
    for _ in range(rounds):
        codes = nearest(points, entries, free)
        counts, sums = tally(points, codes, len(entries))
        if points.is_cpu and counts.all():
            entries = (sums / counts[:, None]).float()
            continue
        # Entries that nobody chose begin anew where the error is.
        moved = points[draw((points - entries[codes]).square().sum(1), len(entries), generator)]
        entries = torch.where(counts[:, None] > 0, (sums / counts[:, None]).float(), moved)
    return entries


def constrain(points: Tensor, entries: Tensor, rate_weight: float, rounds: int) -> tuple[Tensor, Tensor]:
    """Entries moved, and the cost of each (k,), so that distance and code length together are least."""
    costs = entries.new_zeros(len(entries))
    for _ in range(rounds if rate_weight else 0):
        counts, sums = tally(points, nearest(points, entries, costs), len(entries))
        entries = torch.where(counts[:, None] > 0, (sums / counts[:, None]).float(), entries)
        costs = (-rate_weight * (counts / len(points)).log2()).float()  # infinite once nobody chose it
        if points.is_cpu:
            entries, costs = entries[counts > 0], costs[counts > 0]
    return entries, costs
