"""A job's features as recorders see them: each channel scaled to [0, 1], read a few samples at a time.

    job, ids -> normalised        -> (n, channels, ...) on the job's device
    job      -> mean_map          -> (channels, ...)
    job, mean, axes -> coordinates -> (N, k), or (N, P k) along a grid of P blocks
    job, ids -> subset             -> the job of some samples

Results that take long to compute from the features (such as principal axes) are cached by `once_for_features`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from krnet.coding.matrix import CHUNK_BYTES
from krnet.device import dtype_name
from krnet.features.feature_source import FeatureSource
from krnet.features.samples import Samples
from krnet.features.stats import normalise
from krnet.recorders.base import Job
from krnet.recorders.grids import Grid

T = TypeVar("T")
READ_SAMPLES, READ_BYTES = 4096, 64 << 20  # samples that `coordinates` reads at a time, and their bytes
# Features -> (key, result) of the latest `once_for_features`; the entry is dropped together with the features.
LEARNED_CACHE = weakref.WeakKeyDictionary[FeatureSource, tuple[object, Any]]()


def normalised(job: Job, ids: Tensor) -> Tensor:
    """Features (n, channels, ...) in [0, 1], on the job's device."""
    values = job.source.read(ids).to(job.device)
    return normalise(values.reshape(len(ids), *(job.source.shape or (1,))), job.stats.low, job.stats.high)


def normalised_chunks(job: Job, ids: Tensor | None = None) -> Iterator[Tensor]:
    """Normalised features of all samples, or of those with these IDs, in chunks of CHUNK_BYTES."""
    ids = torch.arange(len(job.source)) if ids is None else ids
    for chunk_ids in ids.split(max(1, CHUNK_BYTES // (4 * math.prod(job.source.shape)))):
        yield normalised(job, chunk_ids)


def mean_map(job: Job) -> Tensor:
    """Mean of the normalised features of all samples: (channels, ...) float32."""
    total = torch.zeros(job.source.shape or (1,), dtype=torch.float64, device=job.device)
    for x in normalised_chunks(job):
        total += x.sum(0, dtype=torch.float64)
    return (total / len(job.source)).float()


def coordinates(job: Job, mean: Tensor, axes: Tensor, grid: Grid | None = None, ids: Tensor | None = None) -> Tensor:
    """Codes of all samples, or of those with these IDs: (n, P k) on the job's device.

    mean (values,); axes (values of a block, k). Without grid, maps are not cut: (x - mean) @ axes.
    """
    grid = Grid.of(job.source.shape) if grid is None else grid
    ids = torch.arange(len(job.source)) if ids is None else ids
    found = torch.empty(len(ids), grid.num_blocks * axes.shape[1], device=job.device)
    at_once = max(1, min(READ_SAMPLES, READ_BYTES // (4 * grid.num_values)))
    for rows in torch.arange(len(ids)).split(at_once):
        x = normalised(job, ids[rows]).flatten(1) - mean
        found[rows.to(job.device)] = grid.to_codes(grid.cut(x) @ axes)
    return found


def subset(job: Job, ids: Tensor) -> Job:
    """The job of some samples, in the same range."""

    def fill(out: Tensor, rows: Tensor) -> None:
        out.copy_(job.source.read(ids[rows]))

    source = FeatureSource(job.source.name, (len(ids), *job.source.shape), dtype_name(job.source.dtype), fill)
    return replace(job, source=source, samples=Samples(len(ids), job.source.shape, None))


def once_for_features(job: Job, recorder: str, settings: Hashable, learn: Callable[[], T]) -> T:
    """The result of `learn()`, computed once for the same features: a search for settings fits them many times.

    settings  what the result depends on
    """
    key = (recorder, str(job.device), job.fit.seed, settings)
    if LEARNED_CACHE.get(job.source, (None, None))[0] != key:
        LEARNED_CACHE[job.source] = key, learn()
    learned: T = LEARNED_CACHE[job.source][1]
    return learned
