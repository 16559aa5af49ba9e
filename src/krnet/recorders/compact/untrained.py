"""Codes a start as it is, without training, and keeps whichever leaves less error: this or what training made.

    job, trained content -> better_of -> the content with the smaller error
    start, budget -> untrained -> axes, and codes at the centroids of their bins -> Content

Training nearly always wins. It loses where a fit has time for few iterations only, or where the features have little
that a network or moved codes could use.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from krnet.coding.matrix import CodedConfig, Matrix, encode, evenly_spaced, measure
from krnet.coding.search import bisect_log
from krnet.device import exact_math
from krnet.features.stats import normalise
from krnet.recorders.axes import AXES, FINEST, Axes
from krnet.recorders.base import Content, Job, Recorder
from krnet.recorders.compact.axes_fit import axis_scale, axis_std_and_least_step, learn_axes
from krnet.recorders.compact.codes import content_with_codes, fixed_bytes
from krnet.recorders.compact.network import AXES_CODING, START_ZONE, CompactConfig
from krnet.recorders.compact.starts import Point, Start, make_start, values_start
from krnet.recorders.compact.values_fit import DEAD_ZONE, ValuesFit
from krnet.recorders.maps import coordinates, normalised
from krnet.train.loop import Outcome

CHOICES = frozenset({"step", "components", "c1"})  # only where the budget chose them may training be left out
CLEARLY = 0.9  # an error below this share of the start's estimated one is the smaller one, without measuring

CENTROIDS = (1.0, 0.25)  # tried: the least error, and what clamped replays after a ReLU like better (transform.py)
NUM_COMPARED, COMPARED_AT_ONCE = 512, 128  # samples on which errors are compared
STEP_RANGE = 0.6, 4.0  # the step is looked for within these multiples of the estimated one
MEASURE_ROWS = 1024  # samples from which the search for it measures sizes


def may_replace(job: Job) -> bool:
    return job.chosen >= CHOICES


def better_of(recorder: Recorder, job: Job, trained: Content, config: CompactConfig) -> Content:
    """The trained content, or the untrained one where its error is smaller."""
    assert config.most_bytes is not None, "no budget"
    start = make_start(job, config.grid(job.source.shape)) if config.components else values_start(job)
    point = start.finest(config.most_bytes, replace(config, c1=0))
    error = mean_error(recorder, job, trained)
    if error < CLEARLY * point.error:
        return trained
    plain = start.config_of(replace(config, c1=0), point.step, point.components)
    if start.axes is None:
        rival = ValuesFit(job, replace(plain, dead_zone=DEAD_ZONE)).content(Outcome(0, 0.0, "done"))
        rivals = [rival]
    else:
        rivals = [untrained(job, start, point, replace(plain, centroid=c, dead_zone=START_ZONE)) for c in CENTROIDS]
    best, best_error = trained, error
    for rival in rivals:
        rival_error = mean_error(recorder, job, rival)
        if rival_error < best_error:
            best, best_error = replace(rival, seconds=trained.seconds), rival_error
    return best


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


@torch.no_grad()
def untrained(job: Job, start: Start, point: Point, config: CompactConfig) -> Content:
    """The file of a start: its axes, and the codes of all samples, with the finest step that fits the budget."""
    started, budget = time.perf_counter(), config.most_bytes
    assert budget is not None and start.axes is not None, "no budget, or no axes"
    axes = learn_axes(job, start.grid)
    kept = Axes(axes.mean, axes.axes[: point.components], axes.std[: point.components])
    with exact_math():
        codes = coordinates(job, kept.mean, kept.axes.T, start.grid)  # (N, P k)
    num_blocks = job.num_planned * start.grid.num_blocks

    def scale(step: float) -> Tensor:
        at = torch.tensor(step, device=job.device)
        return axis_scale(*axis_std_and_least_step(kept, point.components), at, num_blocks)[:, None]

    def axes_matrix(step: float) -> Matrix:
        return Matrix.of((kept.axes * scale(step)).T)

    def code_matrix(config: CompactConfig) -> tuple[Matrix, CodedConfig]:
        matrix = Matrix(lambda rows: config.apply_dead_zone(codes[rows.to(job.device)]), *codes.shape)
        return matrix, config.coding

    def too_large(step: float) -> bool:
        at = replace(config, step=step)
        size_bytes = fixed_bytes(job, at) + measure(axes_matrix(step), AXES_CODING).size_bytes
        size_bytes += measure(*code_matrix(at), max_rows=MEASURE_ROWS, num_planned=job.num_planned).size_bytes
        return size_bytes > budget

    low, high = (share * point.step for share in STEP_RANGE)
    least = float(codes.abs().max()) / FINEST
    step = bisect_log(too_large, max(low, least), max(high, 1.01 * least), 0.01)[1]
    config = replace(config, step=float(f"{step:.5g}"))
    matrix = axes_matrix(config.step)
    tensors = encode(matrix, AXES_CODING, measure(matrix, AXES_CODING)).tensors(AXES)
    tensors |= {"mean": kept.mean.half(), "scale": scale(config.step)[:, 0].half()}
    tensors |= {"unit": torch.ones(()), "low": job.stats.low, "high": job.stats.high}
    tensors = {name: tensor.clone().cpu() for name, tensor in tensors.items()}
    outcome = Outcome(0, time.perf_counter() - started, "done")
    return content_with_codes(job, tensors, config, outcome, code_matrix, growth=job.num_planned / len(codes))
