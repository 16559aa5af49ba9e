"""The contract of a work: the kind of measurement that a run of a recipe is, such as learning or recording.

settings of a run, seed -> Work.matches(row)  : does the ledger hold this run already?
                        -> Work.perform(place): do it, resume it, append its row
row     -> Work.value   : its number, to stand beside the paper's
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from krnet.config import unknown_setting
from krnet.progress import Watch


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run works and reads."""

    folder: Path
    """Of this run alone: an interrupted run goes on from what it left there."""
    shared: Path
    """Of all runs of one call: base tasks and features that several of them read."""
    data_dir: Path | None
    device: str | None
    watch: Watch | None


class Work(ABC):
    name: ClassVar[str]
    unit: ClassVar[str] = ""
    """Unit of `value` where the paper's number names no other."""

    @abstractmethod
    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that `perform` would refuse, before anything is run."""

    @abstractmethod
    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        """Whether a row of the ledger, of whatever recipe, is a finished run of these settings and this seed."""

    @abstractmethod
    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        """Run, or go on with what is in the folder, and append a row to the ledger. Returns the row."""

    def value(self, row: Mapping[str, Any], x: str = "", unit: str = "") -> float | None:
        """The number of a row that stands beside a number of the paper with this x and unit.

        Without x, the one number that sums up the run. None: the row has no such number.
        """
        return None


_REGISTRY: dict[str, Work] = {}


def register(cls: type[Work]) -> type[Work]:
    assert cls.name not in _REGISTRY, f"two works are called {cls.name}"
    _REGISTRY[cls.name] = cls()
    return cls


def get_work(name: str) -> Work:
    if name not in _REGISTRY:
        raise unknown_setting(name, _REGISTRY, "work")
    return _REGISTRY[name]
