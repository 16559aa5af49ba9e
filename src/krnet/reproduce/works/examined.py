"""What works `embed` and `invert` examine: the replays of a recording, or the real features.

flat settings of a run -> ExamineSettings: its own, and those of a recording; none: the real features
ExamineSettings.open   -> Examined: reads samples by ID; the recording's file, measurements and settings for a row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from krnet import api
from krnet.config import from_dict
from krnet.errors import SettingError
from krnet.reproduce.features import FeatureSet, origin_of
from krnet.reproduce.recordings import RecordingSettings
from krnet.reproduce.works.base import Place, Work
from krnet.reproduce.works.record import row_settings, same_recording

MEASURED = ("bytes", "mse", "r2", "replay_accuracy", "iterations")
"""Of a recording's measurements: those that a row repeats."""
S = TypeVar("S", bound="ExamineSettings")


@dataclass(frozen=True)
class Examined:
    """What is examined, and what a row says of it."""

    read: Callable[[Tensor], Tensor]
    """ids (B,) -> features (B, *shape)"""
    files: list[Path] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: {"recorder": None})


@dataclass(frozen=True, kw_only=True)
class ExamineSettings:
    purpose: ClassVar[str]
    """What is done to the real features where no recorder is given, as an error says it."""

    features: str
    """Feature set."""
    recording: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the recording, those of work `record`; none: the real features."""

    def __post_init__(self) -> None:
        origin_of(self.features)
        if self.recording:
            self.recorded  # noqa: B018  refuses settings that are none

    @classmethod
    def of(cls: type[S], settings: Mapping[str, Any]) -> S:
        """From the flat settings of a recipe: those that are not of this class are of the recording."""
        names = {f.name for f in fields(cls)} - {"recording"}
        own = {name: value for name, value in settings.items() if name in names}
        recording = {name: value for name, value in settings.items() if name not in names}
        if recording and "recorder" not in recording:
            raise SettingError(
                f"{', '.join(recording)}: given without a recorder, whose settings they are. Add a recorder, or leave "
                f"them out to {cls.purpose} the real features"
            )
        return from_dict(cls, {**own, "recording": recording})

    @property
    def recorded(self) -> RecordingSettings:
        return from_dict(RecordingSettings, {"features": self.features, **self.recording})

    @property
    def plain(self) -> dict[str, Any]:
        """The settings that are not of the recording."""
        return {name: value for name, value in asdict(self).items() if name != "recording"}

    @property
    def name_parts(self) -> list[str]:
        """What tells the recordings of a recipe apart, for the name of a file."""
        recorded = self.recorded
        size = (recorded.preset, recorded.budget, recorded.iterations)
        return [self.features, recorded.recorder, *(str(value) for value in size if value is not None)]

    def open(self, work: str, features: FeatureSet, seed: int, place: Place) -> Examined:
        """Make the recording, or find it among those of other runs; without one, the real features."""
        if not self.recording:
            source = features.source()
            return Examined(lambda ids: source.read(ids).float())
        recorded = self.recorded
        bench = recorded.bench(features, seed, place)
        point, path = recorded.measure(bench, place.watch)
        trunk = features.trunk if recorded.chosen_recorder.replay_inputs else None
        if trunk is not None and bench.image_inputs is not None:
            trunk = bench.image_inputs.trunk
        recording = api.open(path, bench.device, trunk=trunk)
        metrics = {name: point[name] for name in MEASURED}
        return Examined(recording.replay, [path], metrics, row_settings(work, recorded, point["settings"]))


class ExamineWork(Work):
    settings_class: ClassVar[type[ExamineSettings]]

    def check(self, settings: Mapping[str, Any]) -> None:
        self.settings_class.of(settings)

    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        saved = row["settings"]
        if saved.get("work") != self.name or row["outcome"] != "ok" or row["seed"] != seed:
            return False
        own = self.settings_class.of(settings)
        if any(saved.get(name) != value for name, value in own.plain.items()):
            return False
        return same_recording(saved, own.recorded) if own.recording else saved.get("recorder") is None
