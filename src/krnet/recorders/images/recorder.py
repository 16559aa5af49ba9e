"""The images themselves, compressed: features are made again by the network they came from.

    images (N, C, H, W) uint8 -> JPEG, WebP (lossy or lossless) or PNG -> the file            (_encoded.py)
    ids -> image bytes -> decoded in parallel -> less mean, over std -> trunk -> features

The trunk is not in the file: who learns in increments has it anyway. It is given as a module when recording and again
when opening (`krnet.open(path, trunk=...)`, `--trunk` on the command line), and must have the very weights it was
recorded with: the file holds their fingerprint.

Within a budget, what loses nothing is taken where it fits (of lossless WebP and PNG the smaller); else JPEG with
colours of every pixel (4:4:4) or of every four (4:2:0), or lossy WebP, each in the highest quality that fits: whichever
gives the features nearest to those recorded. A few images show which. Settings that are given are not searched.

A recording that starts from an earlier one (`start`) holds the earlier one's images first, then those that are given;
features of the earlier ones are its replays. Where codec, quality and subsampling stay the same, their bytes are kept
as they are. Where they do not, because a budget has to hold more images now, the decoded images are encoded again.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from krnet.coding.search import largest_fitting
from krnet.config import from_dict
from krnet.device import exact_math, fast_math
from krnet.errors import InputError, NotARecordingError
from krnet.features.samples import Samples
from krnet.features.stats import normalise
from krnet.io.archive import TensorStore
from krnet.recorders.base import Content, Earlier, Job, Recorder, Replayer, Stored, overhead_bytes, register
from krnet.recorders.basis import stored_edges
from krnet.recorders.images.codec import (
    CODECS,
    LOSSLESS,
    SUBSAMPLINGS,
    Encoded,
    ImagesConfig,
    Originals,
    chunk_size,
    common_start,
    decode_image,
    open_images,
)

CHECKED = 64  # samples that show whether trunk, images and features belong together
SAME_R2 = 0.99  # of those: features that were made in 16 bits pass, those of another trunk do not
TRIED = 256  # images from which sizes and errors are guessed
OPEN_WITH = (
    "Open it with krnet.open(path, trunk=MODULE), or --trunk on the command line: the module that its features were "
    "made with"
)


# ------------------------------------------------------------------ the trunk


def fingerprint(trunk: nn.Module) -> str:
    """Of its weights and buffers, whatever their names, device and form of the module."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in [*trunk.parameters(), *trunk.buffers()]:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Network:
    """A trunk, ready: a copy on the device, as it is after training."""

    def __init__(self, trunk: Any, config: ImagesConfig, shape: tuple[int, ...], device: torch.device):
        self.module = copy.deepcopy(trunk).to(device).eval().requires_grad_(False)
        self.config, self.shape, self.device = config, shape, device

    @torch.inference_mode()
    def features(self, images: Tensor, fast: bool = False) -> Tensor:
        """images (n, C, H, W) uint8 -> float32 (n, *shape) on the device"""
        found = []
        for some in images.split(chunk_size(images.shape[1:])):
            with fast_math(self.device) if fast else exact_math():
                made = self.module(self.config.standardise(some.to(self.device)))
            if not isinstance(made, Tensor) or made.shape != (len(some), *self.shape):
                what = tuple(made.shape[1:]) if isinstance(made, Tensor) else type(made).__name__
                raise InputError(f"the trunk makes features of {what}; the recorded ones are {self.shape}")
            found.append(made.float())
        return torch.cat(found) if found else torch.empty(0, *self.shape, device=self.device)


def check_trunk(trunk: Any) -> nn.Module:
    if not isinstance(trunk, nn.Module):
        raise InputError(
            f"trunk is {'missing' if trunk is None else f'of type {type(trunk).__name__}'}; recorder images needs the "
            f"module that made the features from the images: give trunk=MODULE, or --trunk on the command line"
        )
    return trunk


# ------------------------------------------------------------------ the recorder


class ImagesReplayer(Replayer):
    def __init__(self, encoded: Encoded, trunk_fingerprint: str, shape: tuple[int, ...], device: torch.device):
        self.encoded, self.trunk_fingerprint = encoded, trunk_fingerprint
        self.shape, self.device = shape, device
        self._network: Network | None = None

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        unique, place = ids.unique(return_inverse=True)
        made = self.network().features(self.encoded.images(unique), fast)
        return made[place.to(self.device)]

    def network(self) -> Network:
        if self._network is None:
            if self.trunk is None:
                raise InputError(f"the recording holds images, and no trunk to make features of them. {OPEN_WITH}")
            check_trunk(self.trunk)
            if (found := fingerprint(self.trunk)) != self.trunk_fingerprint:
                raise InputError(
                    f"the trunk has the weights {found}; the images were recorded with {self.trunk_fingerprint}: "
                    f"features of another trunk would be others. {OPEN_WITH}"
                )
            self._network = Network(self.trunk, self.encoded.config, self.shape, self.device)
        return self._network


@register
class ImagesRecorder(Recorder):
    name = "images"
    config_class = ImagesConfig
    inputs = frozenset({"images", "trunk", "start"})
    required = frozenset({"images", "trunk"})
    replay_inputs = frozenset({"trunk"})

    def fit(self, job: Job) -> Content:
        given = Given.of(job)
        images, config = given.images, given.config
        started = time.perf_counter()
        check_belonging(job, images, given.network(job))
        encoded = Encoded.of(images.encode(torch.arange(len(images)), config), config, images.shape)
        tensors = {"low": job.stats.low, "high": job.stats.high, **encoded.tensors()}
        settings = {**asdict(config), "image_shape": images.shape, "trunk": fingerprint(given.trunk)}
        return Content(tensors=tensors, settings=settings, seconds=time.perf_counter() - started)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """What loses nothing, where that fits, or the lossy form of the images whose features are nearest.

        Tried are lossless WebP and PNG, JPEG at 4:2:0 and 4:4:4, and WebP; sizes and errors are those of a few images.
        """
        given = Given.of(job)
        images = given.images
        network = given.network(job)
        ids = some_of(len(images), TRIED)
        expected = normalise(job.source.read(ids).to(job.device), job.stats.low, job.stats.high)
        fixed = (
            overhead_bytes(job, len(self.stored(job.source.shape, len(images), {})), asdict(given.config))
            + 200
            + 8 * len(job.stats.low)
        )

        @cache
        def encoded(config: ImagesConfig) -> list[bytes]:
            return images.encode(ids, config)

        def size(config: ImagesConfig, contents: list[bytes] | None = None) -> float:
            """Of the file; given all contents and not a few, from above by less than a kilobyte or so."""
            contents = contents or encoded(config)
            start = len(common_start(contents))
            each = sum(map(len, contents)) / len(contents) - start + (2 if max(map(len, contents)) < 2**16 else 4)
            return fixed + start + each * len(images)

        def error(config: ImagesConfig) -> float:
            decoded = [decode_image(content, config.codec, images.shape) for content in encoded(config)]
            made = normalise(network.features(torch.stack(decoded)), job.stats.low, job.stats.high, clamp=False)
            return (made - expected).square().mean().item()

        def qualities(config: ImagesConfig) -> tuple[int, int]:
            searched = config.codec not in LOSSLESS and "quality" not in job.settings
            return (1, 100) if searched else (config.quality, config.quality)

        def highest_that_fits(config: ImagesConfig) -> ImagesConfig:
            fits = lambda quality: size(replace(config, quality=quality)) <= budget  # noqa: E731
            return replace(config, quality=largest_fitting(fits, *qualities(config)))

        forms, tried = given.forms(job.settings), list[ImagesConfig]()
        for lossless in (True, False):  # where a lossless one fits, no quality need be searched
            found = [highest_that_fits(form) for form in forms if (form.codec in LOSSLESS) == lossless]
            tried += found
            fitting = [form for form in found if size(form) <= budget]
            for best in sorted(fitting, key=size if lossless else error):
                for quality in range(best.quality, qualities(best)[0] - 1, -1):  # all may take more than a few do
                    config = replace(best, quality=quality)
                    if size(config, images.encode(torch.arange(len(images)), config)) <= budget:
                        return searched_settings(config)
        return searched_settings(min(tried, key=size))

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        contents = {"lengths": Stored((num_samples,)), "stream": Stored(), "start": Stored()}
        return {**stored_edges(shape), **contents}

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> ImagesReplayer:
        if not isinstance(trunk := settings.get("trunk"), str):
            raise NotARecordingError(
                f"settings of recorder images refused: trunk is {trunk!r:.99}; expected text. Record again"
            )
        return ImagesReplayer(Encoded.read(settings, store, samples.num_samples), trunk, samples.shape, device)


@dataclass(frozen=True, eq=False)
class Given:
    """Images, trunk and settings that the caller gave."""

    images: Originals
    trunk: nn.Module
    config: ImagesConfig

    @classmethod
    def of(cls, job: Job) -> Given:
        config, trunk = from_dict(ImagesConfig, job.settings), check_trunk(job.trunk)
        found = cls(Originals(open_images(job.images)), trunk, config)
        config.check_channels(found.images.shape[0])
        if job.start is not None:
            found = found.after(job.start, job)
        if len(found.images) != len(job.source):
            held = found.images.num_earlier
            raise InputError(
                f"{len(found.images) - held} images; expected one of each of the {len(job.source) - held} features"
                f"{f' behind the {held} that start holds' if held else ''}, in their order"
            )
        return found

    def forms(self, chosen: Mapping[str, Any]) -> list[ImagesConfig]:
        """What a budget may be spent on, in any quality: all but what the caller chose otherwise."""
        found = list[ImagesConfig]()
        for codec in [self.config.codec] if "codec" in chosen else CODECS:
            colours = codec == "jpeg" and self.images.shape[0] > 1 and "subsampling" not in chosen
            found += [
                replace(self.config, codec=codec, subsampling=subsampling)
                for subsampling in (SUBSAMPLINGS if colours else (self.config.subsampling,))
            ]
        return found

    def after(self, start: Earlier, job: Job) -> Given:
        """The same, behind what an earlier recording holds."""
        if start.recorder != "images" or start.shape != job.source.shape:
            raise InputError(
                f"{start.path}: a recording of {start.shape} by {start.recorder}; these features are "
                f"{job.source.shape} and need one of the same shape by images to start from"
            )
        earlier = Encoded.read(start.settings, start, len(start))
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


def searched_settings(config: ImagesConfig) -> dict[str, Any]:
    return {"codec": config.codec, "quality": config.quality, "subsampling": config.subsampling}


def check_belonging(job: Job, images: Originals, network: Network) -> None:
    """Refuse images, or a trunk, that these features were not made from."""
    ids = some_of(len(images), CHECKED)
    made = network.features(images.read(ids)).cpu()
    expected = job.source.read(ids).float()
    made, expected = (normalise(x, job.stats.low, job.stats.high, clamp=False) for x in (made, expected))
    error = (made - expected).square().mean().item()
    r2 = 1 - error / max(job.stats.variance, 1e-12)
    if error > 1e-12 and not r2 >= SAME_R2:
        replays = " (of samples that start holds: its replays)" if images.num_earlier else ""
        raise InputError(
            f"{job.source.name}: the trunk makes other features of these images (R2 {r2:.3g} before any compression); "
            f"expected the same. Give the trunk, images, mean and std that the features were made with{replays}"
        )


def some_of(num_samples: int, most: int) -> Tensor:
    """IDs, evenly spaced, in rising order."""
    return torch.linspace(0, num_samples - 1, min(most, num_samples), dtype=torch.float64).round().long()
