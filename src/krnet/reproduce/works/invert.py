"""Work `invert`: how much of the images a recording, or the real features, give away.

    settings -> recording (that of work `record`) -> a decoder learns from its replays -> SSIM, PSNR of the other half
                                                  -> results/inversion/NAME-SEED.png

Without a recorder, the decoder learns from the real features. With reads = "class" there is no decoder: the mean image
of the class is judged, which a recording's labels give away by themselves. All runs of a feature set, a number of
samples and a seed have the same halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from krnet import api
from krnet.bench.inversion import ClassMeans, InversionConfig, Pixels, Read, judge, learn_decoder, split_halves
from krnet.bench.invert import few_of, guesser
from krnet.bench.picture import draw_rows
from krnet.config import check_choice, from_dict
from krnet.device import pick_device
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.reproduce.effort import counting
from krnet.reproduce.features import FeatureSet, open_set, origin_of
from krnet.reproduce.recordings import RecordingSettings
from krnet.reproduce.works.base import Place, Work, register
from krnet.reproduce.works.record import row_settings, same_recording

FEATURES, CLASS = "features", "class"
PICTURES_FOLDER = "inversion"  # beside the ledger
CHECKPOINT = "decoder.ckpt"
VALUES = {"": "ssim", "SSIM": "ssim", "dB": "psnr"}
"""Unit -> metric."""


@dataclass(frozen=True, kw_only=True)
class InvertSettings:
    """What the attacker reads, how hard it tries, and the recording."""

    features: str
    """Feature set."""
    reads: str = FEATURES
    """features: those of the recording, or the real ones. class: nothing but the class of each sample."""
    samples: int | None = None
    """Samples, equally many of each class; half of them train the decoder. By default all."""
    updates: int = 8000
    """Updates of the decoder."""
    width: int = 64
    """Channels of the decoder at the size of the maps."""
    recording: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the recording, those of work `record`; none: the real features."""

    def __post_init__(self) -> None:
        origin_of(self.features)
        check_choice("reads", self.reads, (FEATURES, CLASS))
        self.attack(0)  # refuses settings that are none
        if self.recording:
            self.recorded  # noqa: B018  likewise

    @property
    def recorded(self) -> RecordingSettings:
        return from_dict(RecordingSettings, {"features": self.features, **self.recording})

    def attack(self, seed: int) -> InversionConfig:
        return InversionConfig(samples=self.samples, iterations=self.updates, width=self.width, seed=seed)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> InvertSettings:
        """From the flat settings of a recipe: those that are not of this class are of the recording."""
        names = {f.name for f in fields(cls)} - {"recording"}
        own = {name: value for name, value in settings.items() if name in names}
        recording = {name: value for name, value in settings.items() if name not in names}
        if recording and "recorder" not in recording:
            raise SettingError(
                f"{', '.join(recording)}: given without a recorder, whose settings they are. Add a recorder, or leave "
                f"them out to attack the real features"
            )
        if recording and own.get("reads") == CLASS:
            raise SettingError(f"reads is {CLASS!r}, which needs no recording; leave out {', '.join(recording)}")
        return from_dict(cls, {**own, "recording": recording})

    @property
    def plain(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "recording"}


@register
class Invert(Work):
    name = "invert"
    unit = "SSIM"

    def check(self, settings: Mapping[str, Any]) -> None:
        InvertSettings.of(settings)

    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        own, saved = InvertSettings.of(settings), row["settings"]
        if saved.get("work") != self.name or row["outcome"] != "ok" or row["seed"] != seed:
            return False
        if any(saved.get(name) != value for name, value in own.plain.items()):
            return False
        return same_recording(saved, own.recorded) if own.recording else saved.get("recorder") is None

    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        own = InvertSettings.of(settings)
        device = pick_device(place.device)
        with counting(place.folder) as effort:
            features = open_set(own.features, place)
            pixels = Pixels(lambda ids: features.images[ids], tuple(features.images.shape[1:]))
            halves = split_halves(features.labels, len(features.labels), own.samples, seed)
            means = ClassMeans(pixels, halves, features.labels, device)
            read, files, metrics, row_own = self._source(own, features, seed, place)
            guess: Read = means.images
            if own.reads == FEATURES:
                checkpoint = place.folder / CHECKPOINT
                learned = learn_decoder(
                    read, features.source().shape, pixels, halves.train, means.overall, own.attack(seed), device,
                    name="replayed features" if own.recording else "real features", checkpoint=checkpoint,
                    watch=place.watch,
                )  # fmt: skip
                guess = guesser(learned.guess, read, device)
                metrics |= {"updates": learned.iterations, "decoder_seconds": learned.seconds}
            metrics |= asdict(judge(guess, pixels, halves.test, device))
            baseline = judge(means.images, pixels, halves.test, device)
            shown = few_of(halves.test)
            picture = f"{PICTURES_FOLDER}/{picture_name(own, seed)}"
            rows = {"image": pixels.floats(shown, device), "guess": guess(shown), "class mean": means.images(shown)}
            draw_rows(ledger.default_path().parent / picture, rows)
            if own.reads == FEATURES:
                checkpoint.unlink(missing_ok=True)
        return ledger.append(
            recipe,
            settings={**row_own, **own.plain, "work": self.name, "num_samples": len(features.labels)},
            metrics={
                **metrics,
                "class_mean_ssim": baseline.ssim,
                "class_mean_psnr": baseline.psnr,
                "num_train": len(halves.train),
                "num_test": len(halves.test),
                "picture": picture,
                "commits": effort.commits,
            },
            seconds=effort.seconds,
            seed=seed,
            class_order=features.class_order,
            files=files,
        )

    def _source(
        self, own: InvertSettings, features: FeatureSet, seed: int, place: Place
    ) -> tuple[Read, list[Path], dict[str, Any], dict[str, Any]]:
        """The reader of what the attacker has; the recording's file, its measurements and its settings."""
        if not own.recording:
            source = features.source()

            def read(ids: Tensor) -> Tensor:
                return source.read(ids).float()

            return read, [], {}, {"recorder": None}
        recorded = own.recorded
        bench = recorded.bench(features, seed, place)
        point, path = recorded.measure(bench, place.watch)
        trunk = features.trunk if recorded.chosen_recorder.replay_inputs else None
        if trunk is not None and bench.image_inputs is not None:
            trunk = bench.image_inputs.trunk
        recording = api.open(path, bench.device, trunk=trunk)
        metrics = {name: point[name] for name in ("bytes", "mse", "r2", "replay_accuracy", "iterations")}
        return recording.replay, [path], metrics, row_settings(self.name, recorded, point["settings"])

    def value(self, row: Mapping[str, Any], x: str = "", unit: str = "") -> float | None:
        """SSIM, or PSNR in dB, of images that the decoder has not seen."""
        return row["metrics"].get(VALUES.get(unit, ""))


def picture_name(own: InvertSettings, seed: int) -> str:
    """The file of the pictures, by what tells the runs of a recipe apart."""
    what = [own.features, "real" if own.reads == FEATURES else CLASS]
    if own.recording:
        recorded = own.recorded
        size = [str(value) for value in (recorded.preset, recorded.budget, recorded.iterations) if value is not None]
        what = [own.features, recorded.recorder, *size]
    return "-".join([*what, f"{own.samples or 'all'}", f"{own.updates}", f"{own.width}", str(seed)]) + ".png"
