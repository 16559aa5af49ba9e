"""Work `plan`: what a recording will take, computed from the sizes of its network, without any features.

    shape, samples by number of classes -> krnet.bench.plan -> one quantity of its storage table for each number

Settings: shape; samples, a table such as { 50 = 64817 }; quantity, a key of the table that `krnet plan` prints, such as
feature_bytes; and preset, recorder, budget or settings of the recorder, as for `krnet plan`.

The paper prints the sums of samples, not the samples of each class. They are shared out evenly: each class then has
1,276 to 1,297 samples, which are three groups of 512, as the printed sizes of the codes require. The paper's MB and GB
are 2^20 and 2^30 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from krnet.bench.plan import plan
from krnet.config import check_int, unknown_setting
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.reproduce.works.base import Place, Work, register

OWN = ("shape", "samples", "quantity")
PAPER_UNITS = {"": 1, "x": 1, "MB": 2**20, "GB": 2**30}


@register
class Plan(Work):
    name = "plan"

    def check(self, settings: Mapping[str, Any]) -> None:
        _check(settings)
        number, num_samples = next(iter(settings["samples"].items()))
        _compute({**settings, "samples": {number: num_samples}})  # one shows all that can be wrong with the others

    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        return row.get("outcome") == "ok" and row.get("settings") == {"work": self.name, **settings}

    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        started = time.perf_counter()
        metrics = {"quantity": settings["quantity"], "values": _compute(settings)}
        seconds = time.perf_counter() - started
        return ledger.append(recipe, settings={"work": self.name, **settings}, metrics=metrics, seconds=seconds)

    def value(self, row: Mapping[str, Any], x: str = "", unit: str = "") -> float | None:
        """The quantity at x classes, in the paper's unit; without x that of the largest number of classes."""
        values = row["metrics"].get("values") or {}
        number = values.get(x) if x else next(reversed(values.values()), None)
        return None if number is None or unit not in PAPER_UNITS else number / PAPER_UNITS[unit]


def _check(settings: Mapping[str, Any]) -> None:
    for name in OWN:
        if name not in settings:
            raise SettingError(f"{name} is missing; expected {', '.join(OWN)}")
    samples = settings["samples"]
    if not isinstance(samples, Mapping) or not samples:
        raise SettingError(f"samples is {samples!r}; expected samples by number of classes, such as {{ 50 = 64817 }}")
    for text, num_samples in samples.items():
        if not text.isdecimal() or not int(text):
            raise SettingError(f"samples holds {text!r}; expected a number of classes")
        check_int("samples", num_samples, int(text))


def _compute(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Number of classes -> the quantity."""
    quantity = settings["quantity"]
    others = {name: value for name, value in settings.items() if name not in OWN}
    values = {}
    for text, num_samples in settings["samples"].items():
        found = plan(settings["shape"], class_counts=even_counts(num_samples, int(text)), **others)
        if not isinstance(found.get(quantity), (int, float)):
            raise unknown_setting(
                str(quantity), [name for name in found if isinstance(found[name], (int, float))], "quantity"
            )
        values[text] = found[quantity]
    return values


def even_counts(num_samples: int, num_classes: int) -> list[int]:
    """Samples of each class, as even as they can be."""
    return [num_samples // num_classes + (i < num_samples % num_classes) for i in range(num_classes)]
