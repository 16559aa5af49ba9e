"""Work `invert`: how much of the images a recording, or the real features, give away.

    settings -> recording (that of work `record`) -> a decoder learns from its replays -> SSIM, PSNR of the other half
                                                  -> results/inversion/NAME-SEED.png

Without a recorder, the decoder learns from the real features. With reads = "class" there is no decoder: the mean image
of the class is judged, which a recording's labels give away by themselves. All runs of a feature set, a number of
samples and a seed have the same halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from krnet.bench.inversion import ClassMeans, InversionConfig, Pixels, Read, judge, learn_decoder, split_halves
from krnet.bench.invert import few_of, guesser
from krnet.bench.picture import draw_rows
from krnet.config import check_choice
from krnet.device import pick_device
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.reproduce.effort import counting
from krnet.reproduce.features import open_set
from krnet.reproduce.works.base import Place, register
from krnet.reproduce.works.examined import ExamineSettings, ExamineWork

FEATURES, CLASS = "features", "class"
PICTURES_FOLDER = "inversion"  # beside the ledger
CHECKPOINT = "decoder.ckpt"
VALUES = {"": "ssim", "SSIM": "ssim", "dB": "psnr"}
"""Unit -> metric."""


@dataclass(frozen=True, kw_only=True)
class InvertSettings(ExamineSettings):
    """What the attacker reads, and how hard it tries."""

    purpose = "attack"
    reads: str = FEATURES
    """features: those of the recording, or the real ones. class: nothing but the class of each sample."""
    samples: int | None = None
    """Samples, equally many of each class; half of them train the decoder. By default all."""
    updates: int = 8000
    """Updates of the decoder."""
    width: int = 64
    """Channels of the decoder at the size of the maps."""

    def __post_init__(self) -> None:
        if self.recording and self.reads == CLASS:
            raise SettingError(f"reads is {CLASS!r}, which needs no recording; leave out {', '.join(self.recording)}")
        check_choice("reads", self.reads, (FEATURES, CLASS))
        super().__post_init__()
        self.attack(0)  # refuses settings that are none

    def attack(self, seed: int) -> InversionConfig:
        return InversionConfig(samples=self.samples, iterations=self.updates, width=self.width, seed=seed)


@register
class Invert(ExamineWork):
    name = "invert"
    unit = "SSIM"
    settings_class = InvertSettings

    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        own = InvertSettings.of(settings)
        device = pick_device(place.device)
        with counting(place.folder) as effort:
            features = open_set(own.features, place)
            pixels = Pixels(lambda ids: features.images[ids], tuple(features.images.shape[1:]))
            halves = split_halves(features.labels, len(features.labels), own.samples, seed)
            means = ClassMeans(pixels, halves, features.labels, device)
            examined = own.open(self.name, features, seed, place)
            metrics: dict[str, Any] = {}
            guess: Read = means.images
            if own.reads == FEATURES:
                checkpoint = place.folder / CHECKPOINT
                learned = learn_decoder(
                    examined.read, features.source().shape, pixels, halves.train, means.overall, own.attack(seed),
                    device, name="replayed features" if own.recording else "real features",
                    checkpoint=checkpoint, watch=place.watch,
                )  # fmt: skip
                guess = guesser(learned.guess, examined.read, device)
                metrics = {"updates": learned.iterations, "decoder_seconds": learned.seconds}
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
            settings={**examined.settings, **own.plain, "work": self.name, "num_samples": len(features.labels)},
            metrics={
                **examined.metrics,
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
            files=examined.files,
        )

    def value(self, row: Mapping[str, Any], x: str = "", unit: str = "") -> float | None:
        """SSIM, or PSNR in dB, of images that the decoder has not seen."""
        return row["metrics"].get(VALUES.get(unit, ""))


def picture_name(own: InvertSettings, seed: int) -> str:
    """The file of the pictures, by what tells the runs of a recipe apart."""
    what = own.name_parts if own.recording else [own.features, "real" if own.reads == FEATURES else CLASS]
    return "-".join([*what, f"{own.samples or 'all'}", f"{own.updates}", f"{own.width}", str(seed)]) + ".png"
