"""The images, trunk and settings of a job, and whether they belong to its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from krnet.coding.image_codec import CODECS, SUBSAMPLINGS
from krnet.coding.matrix import evenly_spaced
from krnet.config import from_dict
from krnet.errors import InputError
from krnet.features.stats import normalise
from krnet.nn.fingerprint import fingerprint
from krnet.recorders.base import Earlier, Job
from krnet.recorders.images.codec import ImagesConfig, ImageSource, RecordedImages, chunk_samples, open_images
from krnet.recorders.images.network import Network, check_trunk

CHECK_SAMPLES = 64  # samples that check whether trunk, images and features belong together
MIN_CHECK_R2 = 0.99  # of these samples: features made in 16 bits pass, features of another trunk do not


@dataclass(frozen=True, eq=False)
class Inputs:
    """The images, trunk and settings of a job, checked."""

    images: ImageSource
    trunk: nn.Module
    config: ImagesConfig

    @classmethod
    def of(cls, job: Job) -> Inputs:
        config, trunk = from_dict(ImagesConfig, job.settings), check_trunk(job.trunk)
        found = cls(ImageSource(open_images(job.images)), trunk, config)
        config.check_channels(found.images.shape[0])
        if job.start is not None:
            found = found.append_to(job.start, job)
        if len(found.images) != len(job.source):
            held = found.images.num_earlier
            raise InputError(
                f"{len(found.images) - held} images; expected one of each of the {len(job.source) - held} features"
                f"{f' behind the {held} that start holds' if held else ''}, in their order"
            )
        return found

    def candidates(self, given: Mapping[str, Any]) -> list[ImagesConfig]:
        """Every codec and subsampling that a budget may choose; settings that the caller gave are fixed."""
        found = list[ImagesConfig]()
        for codec in [self.config.codec] if "codec" in given else CODECS:
            any_subsampling = codec == "jpeg" and self.images.shape[0] > 1 and "subsampling" not in given
            found += [
                replace(self.config, codec=codec, subsampling=subsampling)
                for subsampling in (SUBSAMPLINGS if any_subsampling else (self.config.subsampling,))
            ]
        return found

    def append_to(self, start: Earlier, job: Job) -> Inputs:
        """These inputs with the images of the recording `start` before the given ones."""
        if start.recorder != "images" or start.shape != job.source.shape:
            raise InputError(
                f"{start.path}: a recording of {start.shape} by {start.recorder}; these features are "
                f"{job.source.shape} and need one of the same shape by images to start from"
            )
        earlier = RecordedImages.read(start.settings, start, len(start))
        for name, old, new in (
            ("image_shape", earlier.shape, self.images.shape),
            ("mean", earlier.config.mean, self.config.mean),
            ("std", earlier.config.std, self.config.std),
            ("trunk", start.settings.get("trunk"), fingerprint(self.trunk)),
        ):
            if old != new:
                raise InputError(f"{start.path}: has {name} {old}, not {new}; give the same, or leave start out")
        return replace(self, images=replace(self.images, earlier=earlier))

    def network(self, job: Job) -> Network:
        return Network(self.trunk, self.config, job.source.shape, job.device)


def check_features_match(job: Job, images: ImageSource, network: Network) -> None:
    """Refuse images or a trunk that these features were not made with."""
    ids = evenly_spaced(len(images), CHECK_SAMPLES)
    square_sum = 0.0
    for part in ids.split(chunk_samples(images.shape)):
        made, expected = network.features(images.read(part)).cpu(), job.source.read(part).float()
        made, expected = (normalise(x, job.stats.low, job.stats.high, clamp=False) for x in (made, expected))
        square_sum += (made - expected).square().mean().item() * len(part)
    error = square_sum / len(ids)
    r2 = 1 - error / max(job.stats.variance, 1e-12)
    if error > 1e-12 and not r2 >= MIN_CHECK_R2:
        replays = " (of samples that start holds: its replays)" if images.num_earlier else ""
        raise InputError(
            f"{job.source.name}: the trunk makes other features of these images (R2 {r2:.3g} before any compression); "
            f"expected the same. Give the trunk, images, mean and std that the features were made with{replays}"
        )
