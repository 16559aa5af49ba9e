"""Work `speed`: the time of a training step and of replay, beside what the device could do (`krnet bench speed`).

    settings -> random maps, or a feature set -> krnet.bench.speed -> a row

Speed is of the device: a row names it, and only numbers of one row are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from krnet.bench import speed
from krnet.config import check_choice, check_int, check_range, from_dict
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.nn.paper_config import PRESETS
from krnet.reproduce.effort import counting
from krnet.reproduce.features import open_set, origin_of
from krnet.reproduce.works.base import Place, Work, register

RANDOM = "random"
FUSED_STEPS = {name for name in speed.TIMED_STEPS if not name.endswith("plain")}  # on every device
OLD_NAMES = {"base task": "cifar100-base"}
"""What rows of an earlier tool called their features."""


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """Which network is timed, and on which maps."""

    preset: str | None = None
    """Network of the paper; none: the sizes that fit the maps."""
    features: str = RANDOM
    """random, maps of the preset's usual shape; or a feature set."""
    num_samples: int | None = None
    """Number of random maps; by default 5000 on a GPU and 600 on a CPU."""
    batch_size: int | None = None
    """Samples per update; by default 1000."""
    targets: tuple[float, ...] = ()
    """R2 to which a whole fit is timed; needs a feature set."""
    step_time_s: float = speed.STEP_TIME_S
    """Seconds over which each step is timed."""

    def __post_init__(self) -> None:
        if self.preset is not None:
            check_choice("preset", self.preset, PRESETS)
        if self.features != RANDOM:
            origin_of(self.features)
        for name in ("num_samples", "batch_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        object.__setattr__(self, "targets", tuple(self.targets))
        check_range("step_time_s", self.step_time_s, 0.001)
        for target in self.targets:
            check_range("targets", target, 0, 1)
        if self.targets and self.features == RANDOM:
            raise SettingError("targets are given, and features are random, which no network fits. Name a feature set")
        if self.num_samples is not None and self.features != RANDOM:
            raise SettingError(f"num_samples is given, and {self.features} has its own number; leave it out")


@register
class Speed(Work):
    name = "speed"

    def check(self, settings: Mapping[str, Any]) -> None:
        from_dict(SpeedSettings, settings)

    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        own = from_dict(SpeedSettings, settings)
        saved = row["settings"]
        if row["outcome"] != "ok" or row["seed"] != seed or (saved.get("work") or row["recipe"]) != self.name:
            return False
        if not row["metrics"]["steps"].keys() >= FUSED_STEPS:  # a row of an earlier version, which timed fewer
            return False
        plain = asdict(own) | {"targets": list(own.targets)}
        known = {"step_time_s": speed.STEP_TIME_S, **saved}  # earlier versions had no such setting
        found = {**known, "features": OLD_NAMES.get(saved["features"], saved["features"])}
        return all(found.get(f.name) == plain[f.name] for f in fields(own))

    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        own = from_dict(SpeedSettings, settings)
        fit = {} if own.batch_size is None else {"batch_size": own.batch_size}
        with counting(place.folder) as effort:
            maps, labels, order = None, None, None
            if own.features != RANDOM:
                features = open_set(own.features, place)
                maps, labels, order = features.source(), features.labels, features.class_order
            metrics = speed.bench(
                maps, labels, preset=own.preset, num_samples=own.num_samples, device=place.device, targets=own.targets,
                step_time_s=own.step_time_s, seed=seed, watch=place.watch, **fit,
            )  # fmt: skip
        return ledger.append(
            recipe,
            settings={**asdict(own), "work": self.name},
            metrics={**metrics, "commits": effort.commits},
            seconds=effort.seconds,
            seed=seed,
            class_order=order,
        )
