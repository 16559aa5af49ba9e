"""Predict the R2 and the time of each recorder from a sample of the features: `krnet plan FEATURES`.

    features -> a sample: half of it seen, half unseen
    recorder, size -> record(seen half) -> a file -> R2 of the seen half, R2 of the unseen half -> R2 of all features

A recorder that learns from n of N samples does better on these n than on others. Were n large, both R2 would meet near
their mean m. The n samples are part of the N, and so a recording of all N has about

    R2 = m + (r_seen - m) n / N

The files are real ones, with room for N samples: what is stored once, such as axes, takes its share of the size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from krnet import api
from krnet.bench.rate import Series, default_series, left_out
from krnet.coding.matrix import evenly_spaced
from krnet.config import check_range, parse_size
from krnet.device import dtype_name, pick_device
from krnet.errors import BudgetError, KrnetError, SettingError
from krnet.features.feature_source import FeatureSource
from krnet.features.metrics import fidelity
from krnet.features.source import open_features
from krnet.features.stats import scan
from krnet.progress import Watch, announcing
from krnet.recorders.base import FLOAT_BYTES, Recorder, get_recorder

BITS = (0.25, 1.0, 4.0)  # per value: the sizes that are predicted if the caller names none
FIXED_BYTES = 6_000  # beside them: header and tables of a small file
SAMPLE_VALUES = 1 << 22, 1 << 24  # of the sample: the least, and the most
SAMPLE_ROWS = 64, 8192  # the least and the largest number of its samples
TIME_BUDGET_S = 5.0  # of a fit to the sample
SAME_R2 = 0.001  # recorders whose R2 differ by no more are equally good; then the quicker one is named


@dataclass(frozen=True, eq=False)
class Sample:
    """Two halves of a sample; without `unseen`, `seen` is all there is."""

    seen: FeatureSource
    unseen: FeatureSource | None
    num_samples: int
    """Of all features."""

    @property
    def share(self) -> float:
        return len(self.seen) / self.num_samples


def predict(
    features: Any,
    *,
    budgets: Sequence[int | str] | None = None,
    recorders: Sequence[str] | None = None,
    time_budget: float = TIME_BUDGET_S,
    seed: int = 0,
    device: str | None = None,
    key: str | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Predict, from a sample, the R2 that each recorder would reach in files of several sizes, and its time.

    features     as for `krnet.record`
    budgets      sizes of the files; by default those of 1/4, 1 and 4 bits a value, and 6 kB
    recorders    names, or name:setting=value; by default all that need only features and learn from a sample
    time_budget  seconds of each fit to the sample, for recorders that train a network; a longer fit is better

    In the result, `points` has for each recorder and size the expected `r2` and `seconds`, or the reason why there is
    none. `take` names the recorder with the highest R2 at the middle size; of equal ones (within 0.001) the quickest.

    >>> found = krnet.predict(torch.rand(200, 8, 4, 4), recorders=["pca", "quantized"])
    >>> found["take"]
    'quantized'
    """
    check_range("time_budget", time_budget, 0, math.inf)
    source = open_features(features, key=key)
    num_values = len(source) * math.prod(source.shape)
    named = None if recorders is None else [Series.parse(text) for text in recorders]
    all_series, skipped = (predictable(num_values), left_out(num_values)) if named is None else (named, {})
    sizes = [parse_size(size) for size in budgets] if budgets is not None else default_sizes(num_values)
    if not sizes or not all_series:
        raise SettingError("no size or no recorder; expected at least one of each")
    sizes = sorted(set(sizes))
    say = announcing(watch)
    say("reading a sample of the features")
    sample = take_sample(source)
    options = {"seed": seed, "device": device}
    points = []
    for series in all_series:
        for size in sizes:
            say(f"recording the sample: {series.name}, {8 * size / num_values:.2g} bits a value")
            trains = get_recorder(series.recorder).trains
            fit = {**options, "time_budget": time_budget} if trains else options
            point = {"recorder": series.name, "budget": size, "trains": trains}
            points.append({**point, **expected(sample, series, size, fit)})
    return {
        "num_samples": len(source),
        "shape": list(source.shape),
        "dtype": dtype_name(source.dtype),
        "feature_bytes": FLOAT_BYTES * num_values,
        "sample": len(sample.seen) + (0 if sample.unseen is None else len(sample.unseen)),
        "budgets": sizes,
        "bits_per_value": [8 * size / num_values for size in sizes],
        "device": str(pick_device(device)),
        "points": points,
        "left_out": skipped,
        "take": best(points, sizes[len(sizes) // 2]),
    }


def default_sizes(num_values: int) -> list[int]:
    return [math.ceil(num_values * bits / 8) + FIXED_BYTES for bits in BITS]


def predictable(num_values: int) -> list[Series]:
    """The recorders that `bench rate` measures by itself, if they show unseen features as they would record them."""
    plain = (series for series in default_series((), num_values) if not series.settings)
    return [series for series in plain if get_recorder(series.recorder).projects]


def take_sample(source: FeatureSource) -> Sample:
    """Evenly spaced samples, every other one unseen; few features are taken whole.

    Half of them are as many as a sample has values, where that is not too much: axes of fewer fit too well.
    """
    num_values = math.prod(source.shape)
    least, most = (values // num_values for values in SAMPLE_VALUES)
    num_rows = min(max(least, min(most, 2 * num_values), SAMPLE_ROWS[0]), SAMPLE_ROWS[1])
    if len(source) <= num_rows:
        return Sample(source, None, len(source))
    ids = evenly_spaced(len(source), num_rows)
    return Sample(rows_of(source, ids[0::2]), rows_of(source, ids[1::2]), len(source))


def rows_of(source: FeatureSource, ids: Tensor) -> FeatureSource:
    """These samples, read into memory: all recorders read them many times."""
    rows = source.read(ids)

    def fill(out: Tensor, chosen: Tensor) -> None:
        out.copy_(rows[chosen])

    return FeatureSource(source.name, (len(ids), *source.shape), dtype_name(source.dtype), fill)


def expected(sample: Sample, series: Series, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Expected R2 and seconds of one recorder at one size; or `error`, the reason why there is none.

    A search for the settings takes as long for many samples as for few; recording with them takes longer.
    """
    recorder = get_recorder(series.recorder)
    options = {"recorder": series.recorder, **options, **series.settings, **size_for(recorder, sample, size)}
    started = time.perf_counter()
    try:
        recording = api.record(sample.seen, **options)
    except BudgetError:
        return {"r2": None, "seconds": None, "error": f"recorder {series.recorder} makes no file as small as this"}
    except KrnetError as error:
        return {"r2": None, "seconds": None, "error": str(error)}
    seconds, r_seen = time.perf_counter() - started, recording.info()["r2"]
    if not recorder.trains:  # a network is trained for a time, not for a number of samples
        seconds += recording.info()["fit_seconds"] * (1 / sample.share - 1)
    if sample.unseen is None:
        r2 = r_seen
    else:
        middle = (r_seen + unseen_r2(recording, sample.unseen)) / 2
        r2 = middle + (r_seen - middle) * sample.share
    return {"r2": r2, "seconds": seconds, "error": None}


def size_for(recorder: Recorder, sample: Sample, size: int) -> dict[str, Any]:
    """The budget of a recording of the seen samples that stands for one of all samples in `size` bytes."""
    if recorder.grows:
        return {"budget": size, "room": sample.num_samples}
    return {"budget": math.ceil(size * sample.share) + fixed_bytes(recorder, sample)}


def fixed_bytes(recorder: Recorder, sample: Sample) -> int:
    """Header and probe: they do not grow with the samples."""
    return round(recorder.floor_bytes(0, sample.seen.shape, {}) * (1 - sample.share))


def unseen_r2(recording: Any, unseen: FeatureSource) -> float:
    """R2 of features that the recorder has not seen, coded as new samples would be."""
    stats = scan(unseen)

    def show(ids: Tensor) -> Tensor:
        shown: Tensor = recording.project(unseen.read(ids).float())
        return shown

    return fidelity(show, unseen, stats).r2


def best(points: Sequence[dict[str, Any]], size: int) -> str | None:
    found = [point for point in points if point["budget"] == size and point["r2"] is not None]
    if not found:
        return None
    highest = max(point["r2"] for point in found)
    name: str = min((p for p in found if p["r2"] >= highest - SAME_R2), key=lambda p: p["seconds"])["recorder"]
    return name
