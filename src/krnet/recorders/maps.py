"""A job's features as recorders see them: in [0, 1], the range of each channel, a few samples at a time.

    job, ids -> normalised -> (n, channels, ...) on the job's device
    job -> mean_map, coordinates -> what is made of all of them

What a recorder learns of features, and takes long to find, is kept here while they are there.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from krnet.coding.matrix import CHUNK_BYTES
from krnet.features.source import FeatureSource
from krnet.features.stats import normalise
from krnet.recorders.base import Job

T = TypeVar("T")
READ_SAMPLES = 4096  # at a time, where few numbers are made of each
LEARNED = weakref.WeakKeyDictionary[FeatureSource, tuple[object, Any]]()  # the latest, gone with the features


def normalised(job: Job, ids: Tensor) -> Tensor:
    """Features (n, channels, ...) in [0, 1], on the job's device."""
    values = job.source.read(ids).to(job.device)
    return normalise(values.reshape(len(ids), *(job.source.shape or (1,))), job.stats.low, job.stats.high)


def normalised_chunks(job: Job, ids: Tensor | None = None) -> Iterator[Tensor]:
    """Those of all samples, or of these, CHUNK_BYTES at once."""
    ids = torch.arange(len(job.source)) if ids is None else ids
    for some in ids.split(max(1, CHUNK_BYTES // (4 * math.prod(job.source.shape)))):
        yield normalised(job, some)


def mean_map(job: Job) -> Tensor:
    """Mean of all samples, normalised: (channels, ...) float32."""
    total = torch.zeros(job.source.shape or (1,), dtype=torch.float64, device=job.device)
    for x in normalised_chunks(job):
        total += x.sum(0, dtype=torch.float64)
    return (total / len(job.source)).float()


def coordinates(job: Job, mean: Tensor, axes: Tensor) -> Tensor:
    """All samples, less the mean (values,), along axes (values, k): (N, k), on the job's device."""
    found = torch.empty(len(job.source), axes.shape[1], device=job.device)
    for ids in torch.arange(len(job.source)).split(READ_SAMPLES):
        found[ids.to(job.device)] = (normalised(job, ids).flatten(1) - mean) @ axes
    return found


def once_for_features(job: Job, recorder: str, components: int | None, learn: Callable[[], T]) -> T:
    """`learn()`, once for the same features: a search among settings fits them many times."""
    key = (recorder, str(job.device), job.fit.seed, components)
    if LEARNED.get(job.source, (None, None))[0] != key:
        LEARNED[job.source] = key, learn()
    found: T = LEARNED[job.source][1]
    return found
