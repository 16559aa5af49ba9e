"""Name the runs that a figure compares, where no recipe names them: by method, and by the settings that differ.

rows -> entries: "kril, budget 6.1 MB", "dsal, reads layers"; of equal settings and seed only the newest row

Runs with one name differ in nothing but the seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from krnet.config import format_size
from krnet.report.figure import Entry

TELLING = (
    "preset", "variant", "budget", "recorder", "reads", "given", "order", "steps", "head", "plastic", "recorded",
    "new_features", "single", "aux", "kr2", "fixed_layers", "iterations", "time_budget", "schedule", "num_samples",
)  # fmt: skip
"""Settings that a name prefers, the first first, where several tell the runs apart equally well."""
GIVEN_OF_RATE = {"recorder", "budget", "num_samples"}
SETTINGS_OF_RATE = ("recorder", "given", "budget", "num_samples", "iterations", "time_budget", "codec")
"""Of a row of `rate`, what was asked for."""
ALWAYS_SKIPPED = ("tasks", "data", "recorder_settings", "method")
ABSENT = "–"


def method_of(row: Mapping[str, Any]) -> str:
    """What the row's work is done by: a learner, a recorder, a preset."""
    metrics, settings = row.get("metrics"), row.get("settings")
    for found, key in ((metrics, "method"), (settings, "method"), (settings, "recorder"), (settings, "preset")):
        if isinstance(found, dict) and isinstance(found.get(key), str):
            return found[key]
    recipe = row.get("recipe")
    return recipe if isinstance(recipe, str) and recipe else "unnamed"


def identity(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Two rows with the same are the same run, done twice: method, settings, seed."""
    return method_of(row), json.dumps(_settings(row, skip=()), sort_keys=True), json.dumps(row.get("seed"))


def make_entries(rows: Iterable[Mapping[str, Any]], *, skip: Sequence[str] = ()) -> list[Entry]:
    """Entries of the newest row of each method, settings and seed. skip: settings that are no part of a name."""
    newest: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: str(row.get("date", ""))):
        newest[identity(row)] = row
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for row in newest.values():
        by_method.setdefault(method_of(row), []).append(row)
    entries = []
    for method, own in by_method.items():
        names = _distinguish([_settings(row, skip) for row in own])
        entries += [Entry(series=", ".join([method, *name]), row=row) for name, row in zip(names, own)]
    return entries


def _settings(row: Mapping[str, Any], skip: Sequence[str]) -> dict[str, str]:
    """The settings that may tell two runs apart, as text; a base task's file without the seed in its name."""
    settings = row.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    if settings.keys() >= GIVEN_OF_RATE:  # the others were found for the features: they are results
        settings = {key: settings.get(key) for key in SETTINGS_OF_RATE}
    found = {}
    for key, value in settings.items():
        if key in ALWAYS_SKIPPED or key in skip:
            continue
        if key == "base" and isinstance(value, str):
            value = re.sub(r"-\d+\.krn$", "", value.rsplit("/", 1)[-1])
        found[key] = _text(key, value)
    metrics = row.get("metrics")
    order = metrics.get("order_hash") if isinstance(metrics, dict) else None
    return found | ({"order": str(metrics.get("order"))} if order and isinstance(metrics, dict) else {})


def _text(key: str, value: Any) -> str:
    if key == "given":
        pairs = value.items() if isinstance(value, dict) else ()
        return ":".join(f"{name}={own}" for name, own in pairs) or "nothing"
    if key == "budget" and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return format_size(value)
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _distinguish(settings: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """For each run the fewest settings that tell it from the others: greedily, the one that splits the most first."""
    keys = sorted({key for own in settings for key in own}, key=lambda key: (_rank(key), key))
    groups = [list(range(len(settings)))]
    names: list[list[str]] = [[] for _ in settings]
    while keys:
        gains = {key: sum(len({settings[i].get(key, ABSENT) for i in group}) - 1 for group in groups) for key in keys}
        chosen = max(keys, key=lambda key: gains[key])
        if not gains[chosen]:
            break
        split: list[list[int]] = []
        for group in groups:
            parts: dict[str, list[int]] = {}
            for i in group:
                parts.setdefault(settings[i].get(chosen, ABSENT), []).append(i)
            if len(parts) > 1:
                for value, members in parts.items():
                    for i in members:
                        names[i].append(f"{chosen} {value}")
            split += parts.values()
        groups = split
        keys.remove(chosen)
    return names


def _rank(key: str) -> int:
    return TELLING.index(key) if key in TELLING else len(TELLING)
