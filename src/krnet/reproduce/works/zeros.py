"""Work `zeros`: how sparse the maps of a feature set are, which eases recording them.

settings: features -> share of values that are exactly zero -> a row. Nothing is drawn at random: the row has no seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from krnet.config import from_dict
from krnet.features.stats import scan
from krnet.io import ledger
from krnet.reproduce.effort import counting
from krnet.reproduce.features import open_set, origin_of
from krnet.reproduce.works.base import Place, Work, register


@dataclass(frozen=True, kw_only=True)
class ZerosSettings:
    features: str
    """Feature set."""

    def __post_init__(self) -> None:
        origin_of(self.features)


@register
class Zeros(Work):
    name = "zeros"
    unit = "%"

    def check(self, settings: Mapping[str, Any]) -> None:
        from_dict(ZerosSettings, settings)

    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        return row["outcome"] == "ok" and row["settings"] == {
            **asdict(from_dict(ZerosSettings, settings)),
            "work": self.name,
        }

    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        own = from_dict(ZerosSettings, settings)
        with counting(place.folder) as effort:
            features = open_set(own.features, place)
            source = features.source()
            stats = scan(source, watch=place.watch)
        metrics = {"zero_ratio": stats.zero_ratio, "num_samples": len(source), "shape": source.shape}
        return ledger.append(
            recipe,
            settings={**asdict(own), "work": self.name},
            metrics={**metrics, "commits": effort.commits},
            seconds=effort.seconds,
            class_order=features.class_order,
        )

    def value(self, row: Mapping[str, Any], x: str = "", unit: str = "") -> float | None:
        """Percent of zeros."""
        found = row["metrics"].get("zero_ratio")
        return None if found is None or unit not in ("", self.unit) else 100 * found
