"""Work `record`: one recorder on one feature set, measured as `krnet bench rate` does.

    settings -> a recording -> bytes by stat, R2, MSE, replay accuracy, accuracy on the real maps, seconds -> a row

A row has the form of those of recipe `rate`, so that figures read both, and a run that has a row of `rate` is not
repeated: see `matches`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from krnet.bench.rate import Bench
from krnet.config import from_dict
from krnet.io import ledger
from krnet.reproduce.effort import counting
from krnet.reproduce.features import open_any
from krnet.reproduce.recordings import RecordingSettings
from krnet.reproduce.works.base import Place, Work, register

RATE_RECIPE = "rate"  # of rows that an earlier tool appended, too
RATE_FEATURES, RATE_SHAPE, RATE_SAMPLES = "cifar100-base", (64, 8, 8), 25_000
NOT_METRICS = ("recorder", "settings", "budget", "given", "versions", "file", "seconds")
"""Of a point of the bench: a row has them elsewhere."""

VALUES = {"": ("r2", 1), "R2": ("r2", 1), "MSE": ("mse", 1), "%": ("replay_accuracy", 100)}
"""Unit -> metric, and what it is multiplied by."""


@dataclass(frozen=True)
class Measured:
    """A recording and what was measured on it."""

    bench: Bench
    point: Mapping[str, Any]
    """Of the bench."""
    path: Path
    metrics: dict[str, Any]
    """Of the row."""
    class_order: str | None


@register
class Record(Work):
    name = "record"
    unit = "R2"

    def read(self, settings: Mapping[str, Any]) -> RecordingSettings:
        return from_dict(RecordingSettings, settings)

    def check(self, settings: Mapping[str, Any]) -> None:
        self.read(settings)

    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        # The cheapest checks first: a recipe asks this of every row of the ledger, for each of its runs.
        if row["outcome"] != "ok" or row["seed"] != seed or row["settings"].get("recorder") != settings.get("recorder"):
            return False
        if row["settings"].get("work") == self.name:
            same_features = row["settings"].get("features") == settings.get("features")
            return same_features and same_recording(row["settings"], self.read(settings))
        return row["recipe"] == RATE_RECIPE and is_rate_row(row, self.read(settings))

    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        own = self.read(settings)
        with counting(place.folder) as effort:
            found = self.measure(own, seed, place)
        source, digest = found.bench.source, found.bench.stats.digest
        return ledger.append(
            recipe,
            settings=row_settings(self.name, own, found.point["settings"])
            | {"num_samples": len(source), "shape": source.shape, "features_digest": digest},
            metrics=found.metrics | {"commits": effort.commits},
            seconds=effort.seconds,
            seed=seed,
            class_order=found.class_order,
            files=[found.path],
        )

    def measure(self, own: RecordingSettings, seed: int, place: Place) -> Measured:
        features = open_any(own.features, place)
        bench = own.bench(features, seed, place)
        point, path = own.measure(bench, place.watch)
        metrics = {name: value for name, value in point.items() if name not in NOT_METRICS}
        metrics |= {"real_accuracy": bench.real_accuracy(), "zero_ratio": bench.stats.zero_ratio}
        return Measured(bench, point, path, metrics, features.class_order)

    def value(self, row: Mapping[str, Any], x: str = "", unit: str = "") -> float | None:
        """R2, or the MSE, or the replay accuracy in percent."""
        name, scale = VALUES.get(unit, (None, 1))
        found = row["metrics"].get(name)
        return None if found is None else scale * found


def row_settings(work: str, own: RecordingSettings, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a row: those that the recording resolved to, and those that the run was given."""
    return {**resolved, **asdict(own), "work": work}


def same_recording(saved: Mapping[str, Any], own: RecordingSettings) -> bool:
    """Whether the settings of a row name the recording that `own` does."""
    return all(saved.get(f.name) == getattr(own, f.name) for f in fields(RecordingSettings))


def is_rate_row(row: Mapping[str, Any], own: RecordingSettings) -> bool:
    """Whether a row of recipe `rate` is a recording of these settings.

    Its rows do not name their features: those of 25,000 maps of 64x8x8 are of cifar100-base. What a run gives must be
    what the row's recording has, given or chosen for the budget; what the row was given, the run must give, too.
    """
    saved, metrics = row["settings"], row["metrics"]
    if own.features != RATE_FEATURES or saved.get("num_samples") != RATE_SAMPLES or "given" not in saved:
        return False
    num_values = RATE_SAMPLES * RATE_SHAPE[0] * RATE_SHAPE[1] * RATE_SHAPE[2]
    if round(8 * metrics["bytes"] / metrics["bits_per_value"]) != num_values:
        return False
    if own.schedule not in (None, "fast") or any(
        found is not None for found in (own.bits_per_value, own.preset, own.stop_at_r2)
    ):
        return False
    given = saved["given"]
    return (
        all(saved.get(name) == getattr(own, name) for name in ("recorder", "budget", "iterations", "time_budget"))
        and given.keys() <= own.given.keys()
        and all(given.get(name, saved.get(name)) == value for name, value in own.given.items())
    )
