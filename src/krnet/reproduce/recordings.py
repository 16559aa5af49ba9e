"""The settings of a recording that works measure, and the recording itself.

    settings of a run -> RecordingSettings -> Bench -> a recording and its measurements (krnet.bench.rate)

Runs with the same settings share one recording, in the shared folder: t-SNE looks at the recording that was measured
before. A fit that was interrupted goes on from the checkpoint there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from krnet.bench.plan import check_settings
from krnet.bench.rate import POINTS_FOLDER, Bench, ImageInputs, Series
from krnet.config import check_choice, check_range, parse_size
from krnet.device import pick_device
from krnet.errors import SettingError
from krnet.features.feature_source import FeatureSource
from krnet.features.source import open_features
from krnet.features.stats import FeatureStats, scan
from krnet.io.header import digest
from krnet.io.lock import making
from krnet.nn.fingerprint import fingerprint
from krnet.nn.loaded import LoadedHead, LoadedTrunk
from krnet.nn.paper_config import PRESETS
from krnet.progress import Watch
from krnet.recorders.base import Recorder, get_recorder
from krnet.recorders.checks import check_inputs, check_names
from krnet.reproduce.curve import following, read_curve
from krnet.reproduce.features import FeatureSet, shape_of
from krnet.reproduce.zoo import ZooSet
from krnet.train.config import SCHEDULES

if TYPE_CHECKING:  # works import this module
    from krnet.reproduce.works.base import Place

LEAST_SAMPLES = 1000  # of a set: settings are checked before the set is made
OF_TRAINING = ("schedule", "iterations", "time_budget", "stop_at_r2")


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """What is recorded, by which recorder, and within which budget or of which size."""

    features: str
    """Feature set: cifar100-base, cifar100-strong-SEED, tiny-imagenet, digits or zoo-SCALE-NAME."""
    recorder: str
    """Way to store them: krnet, paper, autoencoder, pca, ..."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the recorder and of its fit, such as c1 or gamma."""
    budget: int | str | None = None
    """Size of the file, at most, in bytes or as 6.5MB; without one, the recorder's own size or that of the preset."""
    bits_per_value: float | None = None
    """Instead of a budget: size of the file, at most, in bits for each value of the features."""
    preset: str | None = None
    """Network of the paper: cifar100, imagenet."""
    schedule: str | None = None
    """Schedule of the fit: fast, the default, or paper."""
    iterations: int | None = None
    """Updates of the fit; by default those of the schedule."""
    time_budget: float | None = None
    """Seconds after which the fit stops."""
    stop_at_r2: float | None = None
    """R2 at which the fit stops."""

    def __post_init__(self) -> None:
        shape = shape_of(self.features)
        if self.bits_per_value is not None:
            check_range("bits_per_value", self.bits_per_value, 1e-3, 64)
            if self.budget is not None:
                raise SettingError(
                    f"bits_per_value is {self.bits_per_value} and budget {self.budget}; give one of them"
                )
        if self.budget is not None:
            object.__setattr__(self, "budget", parse_size(self.budget))
        object.__setattr__(self, "given", json.loads(json.dumps(dict(self.given))))  # as a row of the ledger holds them
        recorder = self.chosen_recorder
        check_inputs(recorder, {"preset": self.preset})
        if self.preset is not None:
            check_choice("preset", self.preset, PRESETS)
        fit = {name: value for name in OF_TRAINING if (value := getattr(self, name)) is not None}
        check_names(recorder, [*self.given, *fit])
        for name in self.given:
            if name in (*OF_TRAINING, "seed", "device"):
                raise SettingError(f"given has {name}, which is a setting of its own; take it out of given")
        if self.schedule is not None:
            check_choice("schedule", self.schedule, SCHEDULES)
        check_settings(recorder, shape, LEAST_SAMPLES, {**fit, **self.given})

    @property
    def chosen_recorder(self) -> Recorder:
        return get_recorder(self.recorder)

    def budget_bytes(self, num_values: int) -> int | None:
        """The budget for features of so many values."""
        assert not isinstance(self.budget, str), "parsed when the settings are made"
        return self.budget if self.bits_per_value is None else int(self.bits_per_value * num_values / 8)

    @property
    def series(self) -> Series:
        return Series(self.recorder, dict(self.given))

    def options(self, seed: int) -> dict[str, Any]:
        """Options of the fit, as `krnet bench rate` has them, and preset and schedule where they are given."""
        options = {"iterations": self.iterations, "time_budget": self.time_budget, "seed": seed}
        more = {name: getattr(self, name) for name in ("preset", "schedule", "stop_at_r2")}
        return options | {name: value for name, value in more.items() if value is not None}

    def bench(self, features: FeatureSet | ZooSet, seed: int, place: Place) -> Bench:
        """The bench that records and measures the features of a set."""
        device = pick_device(place.device)
        source = features.source()
        if isinstance(features, ZooSet):
            return self._bench("maps", source, None, scan(source), None, seed, place, {}, None)
        head = LoadedHead(features.name, features.head.to(device), digest=fingerprint(features.head))
        trunk = LoadedTrunk(features.name, features.trunk.to(device), digest=fingerprint(features.trunk))
        images = ImageInputs(open_features(features.images), trunk)
        settings = {"mean": features.mean, "std": features.std}
        return self._bench("maps", source, features.labels, scan(source), head, seed, place, settings, images)

    def image_bench(self, features: FeatureSet, seed: int, place: Place) -> Bench:
        """The bench that records the images themselves, their pixels taken as feature maps."""
        source = open_features(features.images)
        return self._bench("images", source, features.labels, scan(source), None, seed, place, {}, None)

    def measure(self, bench: Bench, watch: Watch | None) -> tuple[dict[str, Any], Path]:
        """Record, or read what an earlier run recorded; return the measurements and the file of the recording.

        The measurements of a network have its curve: [iteration, seconds, R2] of the latest batches.
        """
        budget = self.budget_bytes(bench.stats.count)
        path, curve_path = bench.path(self.series, budget), bench.folder / "curve.json"
        with making(path), following(curve_path, watch) as follow:
            point, _ = bench.point(self.series, budget, follow)
        curve = {"curve": read_curve(curve_path)} if self.chosen_recorder.trains else {}
        return {**point, **curve}, path

    def _bench(
        self, what: str, source: FeatureSource, labels: Tensor | None, stats: FeatureStats, head: LoadedHead | None,
        seed: int, place: Place, settings: Mapping[str, Any], images: ImageInputs | None,
    ) -> Bench:  # fmt: skip
        folder = self.folder(what, stats, seed, place)
        (folder / POINTS_FOLDER).mkdir(parents=True, exist_ok=True)
        return Bench(
            folder, source, labels, stats, head, pick_device(place.device), self.options(seed), settings, images
        )

    def folder(self, what: str, stats: FeatureStats, seed: int, place: Place) -> Path:
        """Where the recording of these settings is, for all runs that need it."""
        identity = json.dumps([what, asdict(self), stats.digest, seed], sort_keys=True)
        return place.shared / "recordings" / f"{self.features}-{self.recorder}-{digest(identity.encode())[:12]}"
