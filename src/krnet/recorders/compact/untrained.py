"""Keeps the file with the least error: that of the trained network, or that of an untrained start (starts.py).

    job, trained content -> better_of -> the content with the smallest error

Training nearly always wins. It loses where a fit has time for few iterations only, or where the features have little
that a network or moved codes could use. Starts include what recorders pca, transform and quantized do, so a file is not
worse than the best of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from krnet.coding.matrix import evenly_spaced
from krnet.features.stats import normalise
from krnet.recorders.axes import WORTH
from krnet.recorders.base import Content, Job, Recorder
from krnet.recorders.compact.network import CompactConfig
from krnet.recorders.compact.plain import plain_file
from krnet.recorders.compact.starts import Point, Start, grids_tried, make_start, values_start
from krnet.recorders.compact.values_fit import DEAD_ZONE
from krnet.recorders.maps import normalised

# Only where the budget chooses these, and not the caller, may training be left out.
CHOICES = frozenset({"step", "components", "c1", "block", "dct", "dead_zone"})
CLEARLY = 0.8  # an error below this share of the starts' estimated ones is the smaller one, without measuring
NEARLY = 1.15  # times the least estimated error: starts of a larger one are not coded
CENTROIDS = (1.0, 0.25)  # tried: the least error, and what clamped replays after a ReLU like better (transform.py)
NUM_COMPARED, COMPARED_AT_ONCE = 512, 128  # samples on which errors are compared


def may_replace(job: Job) -> bool:
    given = job.settings.keys() - job.chosen
    return "most_bytes" in job.chosen and not given & CHOICES


def better_of(recorder: Recorder, job: Job, trained: Content, config: CompactConfig) -> Content:
    """The trained content, or the untrained one where its error is smaller."""
    assert config.most_bytes is not None, "no budget"
    best, best_error = trained, mean_error(recorder, job, trained)
    plain = replace(config, components=0, c1=0, block=None, dct=False)
    for start, point in likely_starts(job, plain):
        if best_error < CLEARLY * point.error:
            break
        for rival in rivals(job, start, point, plain):
            error = mean_error(recorder, job, rival)
            if error < best_error:
                best, best_error = replace(rival, seconds=trained.seconds), error
    return best


def rivals(job: Job, start: Start, point: Point, plain: CompactConfig) -> Iterator[Content]:
    """The file of a start, once for each way to read its codes back."""
    content = plain_file(job, start, point, plain).fill()
    if start.axes is None:
        yield content
    else:
        for centroid in CENTROIDS:
            yield replace(content, settings={**content.settings, "centroid": centroid})


def likely_starts(job: Job, plain: CompactConfig) -> list[tuple[Start, Point]]:
    """The starts that may leave the least error, with their estimates, the best first."""
    budget, values = plain.most_bytes, values_start(job, DEAD_ZONE)
    assert budget is not None, "no budget"
    found: list[tuple[Start, Point]] = [(values, values.finest(budget, plain))]
    tried = grids_tried(job).get(budget, [])
    least = min(point.error for point in [found[0][1], *(point for _, point in tried)])
    for start in [make_start(job, grid) for grid, point in tried if point.error <= NEARLY * least]:
        # The point was found beside a network: without it there are more bytes.
        found.append((start, start.finest(budget, plain)))
        if start.grid.num_blocks == 1:  # also with as many axes as recorder pca takes
            more = start.finest(budget, plain, widest_axes=[WORTH])
            found += [(start, more)] if more != found[-1][1] else []
    found.sort(key=lambda pair: pair[1].error)
    return [pair for pair in found if pair[1].error <= NEARLY * found[0][1].error]


@torch.no_grad()
def mean_error(recorder: Recorder, job: Job, content: Content) -> float:
    """Squared error of a sample, measured on some."""
    replayer = recorder.replay(job.samples, content.settings, content, job.device)
    total, ids = 0.0, evenly_spaced(len(job.source), NUM_COMPARED)
    for part in ids.split(COMPARED_AT_ONCE):
        found = replayer.decode(part).to(job.device)
        total += float((normalised(job, part) - _scaled(job, found)).double().square().sum())
    return total / len(ids)


def _scaled(job: Job, features: Tensor) -> Tensor:
    """Features (n, *shape) in the range [0, 1]."""
    return normalise(features.reshape(len(features), *(job.source.shape or (1,))), job.stats.low, job.stats.high)
