"""Store compressed images instead of features; replay them through the trunk that made the features.

    images (N, C, H, W) uint8 -> JPEG, WebP (lossy or lossless) or PNG -> the file   (krnet/coding/image_codec.py)
    ids -> image bytes -> decoded in parallel -> (image - mean) / std -> trunk -> features

The trunk, a network from images to features, is not in the file: an incremental learner has it anyway. It is given as
a module when recording and again when opening (`krnet.open(path, trunk=...)`, `--trunk` on the command line). Its
weights must be the same both times, and what it computes: the file holds a fingerprint of the weights, and what the
trunk made of two fixed images.

With a budget, the smaller lossless codec (WebP or PNG) is taken if it fits. Else JPEG at 4:4:4, JPEG at 4:2:0 and lossy
WebP compete, each at the highest quality that fits; the one with the least error of the features on a few images wins.
Settings that the caller gives are not searched.

A recording that starts from an earlier one (`start`) holds the earlier images first, then the given ones; the features
of the earlier images are its replays. If codec, quality and subsampling stay the same, the earlier bytes are kept. If
not, because the budget has to hold more images now, the decoded images are encoded again.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from krnet.coding.image_codec import CODECS, LOSSLESS, SUBSAMPLINGS, common_prefix, decode_image
from krnet.coding.matrix import evenly_spaced
from krnet.coding.search import largest_fitting
from krnet.config import from_dict
from krnet.device import exact_math, fast_math
from krnet.errors import InputError, NotARecordingError
from krnet.features.samples import Samples
from krnet.features.stats import normalise
from krnet.io.archive import RowStore
from krnet.io.stored_rows import RESIDENT_BYTES, block_header_bytes
from krnet.nn.fingerprint import behaviour, fingerprint, is_behaviour, same_behaviour
from krnet.recorders.base import PROBE_SAMPLES, Content, Earlier, Job, Recorder, Replayer, Stored, register
from krnet.recorders.images.codec import (
    ImagesConfig,
    ImageSource,
    RecordedImages,
    SpooledImages,
    chunk_samples,
    open_images,
    read_shape,
)
from krnet.recorders.ranges import stored_range
from krnet.recorders.sizes import overhead_bytes

CHECK_SAMPLES = 64  # samples that check whether trunk, images and features belong together
MIN_CHECK_R2 = 0.99  # of these samples: features made in 16 bits pass, features of another trunk do not
IMAGE_COPIES = 6  # float32 numbers for each value of an image, from its pixels to the trunk's input
SEARCH_SAMPLES = 256  # images from which a search for a budget estimates sizes and errors
OPEN_WITH = (
    "Open it with krnet.open(path, trunk=MODULE), or --trunk on the command line: the module that its features were "
    "made with"
)


# ------------------------------------------------------------------ the trunk


class Network:
    """A copy of the trunk, on the device and in evaluation mode."""

    def __init__(self, trunk: Any, config: ImagesConfig, shape: tuple[int, ...], device: torch.device):
        with torch.no_grad():  # otherwise copied TorchScript parameters carry a gradient history
            self.module = copy.deepcopy(trunk).to(device).eval()
        for weight in self.module.parameters():  # TorchScript has no requires_grad_ of its own
            weight.requires_grad_(False)
        self.config, self.shape, self.device = config, shape, device

    @torch.inference_mode()
    def features(self, images: Tensor, fast: bool = False) -> Tensor:
        """images (n, C, H, W) uint8 -> float32 (n, *shape) on the device"""
        # Made first: small results between the large inputs would leave the memory of these in pieces.
        result = torch.empty(len(images), *self.shape, device=self.device)
        for start, chunk in enumerate_parts(images, chunk_samples(images.shape[1:])):
            with fast_math(self.device) if fast else exact_math():
                made = self.module(self.config.standardise(chunk.to(self.device)))
            if not isinstance(made, Tensor) or made.shape != (len(chunk), *self.shape):
                what = tuple(made.shape[1:]) if isinstance(made, Tensor) else type(made).__name__
                raise InputError(f"the trunk makes features of {what}; the recorded ones are {self.shape}")
            result[start : start + len(chunk)] = made
        return result

    def describe(self, image_shape: Sequence[int]) -> dict[str, Any]:
        """The settings by which a file knows its trunk again."""
        results = behaviour(self.features, image_shape)
        known = {"trunk_results": results} if all(map(math.isfinite, results)) else {}
        return {"trunk": fingerprint(self.module), **known}


def enumerate_parts(values: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """(place of the first, values) of each part of at most `size`."""
    for start in range(0, len(values), size):
        yield start, values[start : start + size]


def check_trunk(trunk: Any) -> nn.Module:
    if not isinstance(trunk, nn.Module):
        raise InputError(
            f"trunk is of type {type(trunk).__name__}; recorder images needs the module that made the features from "
            f"the images: give trunk=MODULE, or --trunk on the command line"
        )
    return trunk


# ------------------------------------------------------------------ the recorder


class ImagesReplayer(Replayer):
    def __init__(
        self, encoded: RecordedImages, settings: Mapping[str, Any], shape: tuple[int, ...], device: torch.device
    ):
        self.encoded, self.trunk_fingerprint = encoded, settings["trunk"]
        self.trunk_results: list[float] | None = settings.get("trunk_results")  # older files have none
        self.shape, self.device = shape, device
        self.chunk = chunk_samples(encoded.shape)
        self._network: Network | None = None

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        unique, index = ids.unique(return_inverse=True)
        # As many images at once as their size allows: that of the features says nothing about it. They come before the
        # network, so that images of another size than the header says are noticed first.
        features = torch.empty(len(unique), *self.shape, device=self.device)
        for start, part in enumerate_parts(unique, self.chunk):
            images = self.encoded.images(part)
            features[start : start + len(part)] = self.network().features(images, fast)
        return features[index.to(self.device)]

    def network(self) -> Network:
        """Made at first use, since the trunk is set after the file is opened."""
        if self._network is None:
            if self.trunk is None:
                raise InputError(f"the recording holds images, and no trunk to make features of them. {OPEN_WITH}")
            check_trunk(self.trunk)
            if (found := fingerprint(self.trunk)) != self.trunk_fingerprint:
                raise InputError(
                    f"the trunk has the weights {found}; the images were recorded with {self.trunk_fingerprint}: "
                    f"features of another trunk would be others. {OPEN_WITH}"
                )
            network = Network(self.trunk, self.encoded.config, self.shape, self.device)
            if self.trunk_results is not None:
                found_results = behaviour(network.features, self.encoded.shape)
                if not same_behaviour(found_results, self.trunk_results):
                    raise InputError(
                        f"the trunk has the weights that the images were recorded with, and computes something else: "
                        f"{found_results[0]:g} where it was {self.trunk_results[0]:g}. Another activation, or another "
                        f"order of its layers? {OPEN_WITH}"
                    )
            self._network = network
        return self._network


@register
class ImagesRecorder(Recorder):
    name = "images"
    config_class = ImagesConfig
    package, extra = "PIL", "images"
    inputs = frozenset({"images", "trunk", "start"})
    required = frozenset({"images", "trunk"})
    replay_inputs = frozenset({"trunk"})

    def fit(self, job: Job) -> Content:
        inputs = Inputs.of(job)
        images, config = inputs.images, inputs.config
        started = time.perf_counter()
        network = inputs.network(job)
        check_features_match(job, images, network)
        spooled = SpooledImages(None if job.checkpoint is None else job.checkpoint.parent)
        encoded, made = spooled.add(images.encode(torch.arange(len(images)), config)).tensors()
        tensors = {"low": job.stats.low, "high": job.stats.high, **encoded}
        settings = {**asdict(config), "image_shape": images.shape, **network.describe(images.shape)}
        return Content(tensors=tensors, settings=settings, seconds=time.perf_counter() - started, made=made)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The smaller lossless codec if it fits; else the lossy one with the least error of the features.

        Candidates are compared by their sizes and errors on a few images; the chosen one is checked on all images.
        """
        inputs = Inputs.of(job)
        images = inputs.images
        network = inputs.network(job)
        ids = evenly_spaced(len(images), SEARCH_SAMPLES)
        fixed_bytes = (
            overhead_bytes(job, len(self.stored(job.source.shape, len(images), {})), asdict(inputs.config))
            + 400  # of settings that are not yet known: image_shape and what tells the trunk
            + 8 * len(job.stats.low)
        )

        def size_of(contents: Iterable[bytes]) -> float:
            """Bytes of the file, estimated from a few images; from all contents, an upper bound within a kilobyte."""
            sizes, prefix = [], None
            for content in contents:
                sizes.append(len(content))
                prefix = content if prefix is None else common_prefix([prefix, content])
            prefix_bytes, length_bytes = len(prefix or b""), 2 if max(sizes) < 2**16 else 4
            image_bytes = sum(sizes) / len(sizes) - prefix_bytes + length_bytes
            stream_bytes = image_bytes * len(images)
            blocks = block_header_bytes(round(stream_bytes), 1) if stream_bytes > RESIDENT_BYTES else 0
            return fixed_bytes + prefix_bytes + stream_bytes + blocks

        @cache
        def size(config: ImagesConfig) -> float:
            return size_of(images.encode(ids, config))

        def error(config: ImagesConfig) -> float:
            """Mean squared error of the normalised features."""
            square_sum, count = 0.0, 0
            for part in ids.split(chunk_samples(images.shape)):
                decoded = [decode_image(content, config.codec, images.shape) for content in images.encode(part, config)]
                expected = normalise(job.source.read(part).to(job.device), job.stats.low, job.stats.high)
                made = normalise(network.features(torch.stack(decoded)), job.stats.low, job.stats.high, clamp=False)
                square_sum += (made - expected).square().mean().item() * len(part)
                count += len(part)
            return square_sum / count

        def qualities(config: ImagesConfig) -> tuple[int, int]:
            """The lowest and the highest quality to search."""
            searched = config.codec not in LOSSLESS and "quality" not in job.settings
            return (1, 100) if searched else (config.quality, config.quality)

        def highest_fitting(config: ImagesConfig) -> ImagesConfig:
            fits = lambda quality: size(replace(config, quality=quality)) <= budget  # noqa: E731
            return replace(config, quality=largest_fitting(fits, *qualities(config)))

        candidates, measured = inputs.candidates(job.settings), list[ImagesConfig]()
        for lossless in (True, False):  # if a lossless codec fits, no quality has to be searched
            found = [highest_fitting(config) for config in candidates if (config.codec in LOSSLESS) == lossless]
            measured += found
            fitting = [config for config in found if size(config) <= budget]
            for best in sorted(fitting, key=size if lossless else error):
                # All images may take more bytes than the few predict: lower the quality until the file fits.
                for quality in range(best.quality, qualities(best)[0] - 1, -1):
                    config = replace(best, quality=quality)
                    if size_of(images.encode(torch.arange(len(images)), config)) <= budget:
                        return searched_settings(config)
        return searched_settings(min(measured, key=size))

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        contents = {"lengths": Stored((num_samples,)), "stream": Stored(), "start": Stored()}
        return {**stored_range(shape), **contents}

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        shape = read_shape(settings)
        return IMAGE_COPIES * min(PROBE_SAMPLES, chunk_samples(shape)) * math.prod(shape)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: RowStore, device: torch.device
    ) -> ImagesReplayer:
        if not isinstance(trunk := settings.get("trunk"), str):
            raise NotARecordingError(
                f"settings of recorder images refused: trunk is {trunk!r:.99}; expected text. Record again"
            )
        results = settings.get("trunk_results")
        if results is not None and not is_behaviour(results):
            raise NotARecordingError(
                f"settings of recorder images refused: trunk_results is {results!r:.99}; expected numbers. Record again"
            )
        encoded = RecordedImages.read(settings, store, samples.num_samples)
        return ImagesReplayer(encoded, settings, samples.shape, device)


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


def searched_settings(config: ImagesConfig) -> dict[str, Any]:
    return {"codec": config.codec, "quality": config.quality, "subsampling": config.subsampling}


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
