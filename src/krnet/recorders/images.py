"""The images themselves, compressed: features are made again by the network they came from.

    images (N, C, H, W) uint8 -> JPEG, WebP or PNG -> the file
    ids -> image bytes -> decoded in parallel -> less mean, over std -> trunk -> features

The trunk is not in the file: who learns in increments has it anyway. It is given as a module when recording and again
when opening (`krnet.open(path, trunk=...)`), and must have the very weights it was recorded with: the file holds their
fingerprint. Small images begin with the same hundreds of bytes (the tables of a JPEG); these are kept once.
"""

from __future__ import annotations

import copy
import hashlib
import io
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from krnet import parallel
from krnet.config import check_choice, check_int, check_range, from_dict
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features import FeatureSource, open_features
from krnet.recorders.base import Content, Job, Recorder, Replayer, TensorStore, overhead_bytes, register
from krnet.samples import Samples
from krnet.scan import normalise

CODECS = ("jpeg", "webp", "png")
CHANNELS = (1, 3)
MAX_SIDE = 4096  # pixels: bounds what a few bytes may be decoded to
CHUNK_BYTES = 64 << 20  # of float images in hand
CHECKED = 64  # samples that show whether trunk, images and features belong together
SAME_R2 = 0.99  # of those: features that were made in 16 bits pass, those of another trunk do not
TRIED = 256  # images from which sizes and errors are guessed
NUM_TENSORS = 5
OPEN_WITH = "Open it with krnet.open(path, trunk=MODULE), the module that its features were made with"


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    codec: str = "jpeg"
    """jpeg, webp (both lossy) or png (lossless)."""
    quality: int = 90
    """Of jpeg and webp, 1 to 100."""
    mean: tuple[float, ...] = (0.0,)
    """Of each channel, in fractions of 255: subtracted before the trunk; one number serves all channels."""
    std: tuple[float, ...] = (1.0,)
    """Of each channel, in fractions of 255: divided by before the trunk."""

    def __post_init__(self) -> None:
        check_choice("codec", self.codec, CODECS)
        check_int("quality", self.quality, 1, 100)
        for name, lowest in (("mean", -1e6), ("std", 1e-6)):
            values = getattr(self, name)
            values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
            for value in values:
                check_range(name, value, lowest)
            object.__setattr__(self, name, values)

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 images (n, C, H, W) as the trunk takes them."""
        mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (self.mean, self.std))
        return (images.float() / 255 - mean) / std


# ------------------------------------------------------------------ images to bytes and back


def encode_image(image: np.ndarray, config: ImagesConfig) -> bytes:
    """image (H, W, C) uint8"""
    from PIL import Image

    target = io.BytesIO()
    options: dict[str, Any] = {"optimize": True} if config.codec == "png" else {"quality": config.quality}
    if config.codec == "webp":
        options["method"] = 6  # the slowest, and the smallest
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(target, config.codec, **options)
    return target.getvalue()


def decode_image(content: bytes, codec: str, shape: Sequence[int]) -> Tensor:
    """(C, H, W) uint8 of just that shape, or refused."""
    from PIL import Image

    channels, height, width = shape
    try:
        with Image.open(io.BytesIO(content), formats=[codec]) as image:
            if image.size != (width, height):  # before so many pixels are made
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels; expected {width} x {height}")
            pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow's decoders raise nearly everything
        raise NotARecordingError(
            f"an image of {len(content)} bytes does not decode: {error}. Restore the file from a copy, or record again"
        ) from error
    return torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1)


def workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor()  # Pillow works without the interpreter's lock


def common_start(contents: Sequence[bytes]) -> bytes:
    """What all of them begin with."""
    first, last = min(contents), max(contents)  # by bytes: all others lie between them
    same = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:same]


def encode_all(images: FeatureSource, ids: Tensor, config: ImagesConfig) -> list[bytes]:
    found = list[bytes]()
    with workers() as pool:
        for some in ids.split(chunk_size(image_shape(images))):
            pixels = read_images(images, some).permute(0, 2, 3, 1).numpy()
            found += pool.map(lambda image: encode_image(np.ascontiguousarray(image), config), pixels)
    return found


def open_images(images: Any, num_samples: int) -> FeatureSource:
    if images is None:
        raise InputError("recorder images needs the images: give images=, uint8 (N, C, H, W) or (N, H, W, C)")
    found = open_features(images)
    if found.dtype != torch.uint8 or len(found.shape) != 3:
        raise InputError(
            f"images of type {found.dtype} and shape {(len(found), *found.shape)}; expected uint8 (N, C, H, W) or "
            f"(N, H, W, C)"
        )
    channels, *sides = image_shape(found)
    if channels not in CHANNELS or max(sides) > MAX_SIDE:
        raise InputError(
            f"images of shape {found.shape}; expected {' or '.join(map(str, CHANNELS))} channels, first or last, and "
            f"at most {MAX_SIDE} pixels a side"
        )
    if len(found) != num_samples:
        raise InputError(f"{len(found)} images; expected one of each of the {num_samples} features, in their order")
    return found


def image_shape(images: FeatureSource) -> tuple[int, int, int]:
    """Channels, height and width; channels come first where that can be."""
    first, second, third = images.shape
    return (first, second, third) if first in CHANNELS else (third, first, second)


def read_images(images: FeatureSource, ids: Tensor) -> Tensor:
    """(n, C, H, W) uint8"""
    found = images.read(ids)
    return found if images.shape[0] in CHANNELS else found.permute(0, 3, 1, 2)


def chunk_size(shape: Iterable[int]) -> int:
    return max(1, min(1024, CHUNK_BYTES // (4 * math.prod(shape))))


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
            with parallel.fast(self.device) if fast else parallel.exact():
                made = self.module(self.config.normalise(some.to(self.device)))
            if not isinstance(made, Tensor) or made.shape != (len(some), *self.shape):
                what = tuple(made.shape[1:]) if isinstance(made, Tensor) else type(made).__name__
                raise InputError(f"the trunk makes features of {what}; the recorded ones are {self.shape}")
            found.append(made.float())
        return torch.cat(found) if found else torch.empty(0, *self.shape, device=self.device)


def check_trunk(trunk: Any) -> None:
    if not isinstance(trunk, nn.Module):
        raise InputError(
            f"trunk is {'missing' if trunk is None else f'of type {type(trunk).__name__}'}; recorder images needs the "
            f"module that made the features from the images: give trunk=MODULE"
        )


# ------------------------------------------------------------------ the recorder


class ImagesReplayer(Replayer):
    def __init__(
        self, contents: Contents, config: ImagesConfig, trunk_fingerprint: str, shape: tuple[int, ...],
        device: torch.device,
    ):  # fmt: skip
        self.contents, self.config, self.trunk_fingerprint = contents, config, trunk_fingerprint
        self.shape, self.device = shape, device
        self._network: Network | None = None

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        unique, place = ids.unique(return_inverse=True)
        made = self.network().features(self.contents.images(unique), fast)
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
            self._network = Network(self.trunk, self.config, self.shape, self.device)
        return self._network


@dataclass(frozen=True, eq=False)
class Contents:
    """Encoded images, one after the other, without what all of them begin with."""

    stream: bytes
    ends: np.ndarray
    start: bytes
    codec: str
    shape: tuple[int, int, int]

    def images(self, ids: Tensor) -> Tensor:
        """(n, C, H, W) uint8"""
        if not len(ids):
            return torch.empty(0, *self.shape, dtype=torch.uint8)

        def one(index: int) -> Tensor:
            begin = int(self.ends[index - 1]) if index else 0
            return decode_image(self.start + self.stream[begin : int(self.ends[index])], self.codec, self.shape)

        if len(ids) == 1:
            return one(int(ids[0]))[None]
        with workers() as pool:
            return torch.stack(list(pool.map(one, ids.tolist())))


@register
class ImagesRecorder(Recorder):
    name = "images"
    setting_names = frozenset({f.name for f in fields(ImagesConfig)} | {"images", "trunk"})
    needs_only_features = False
    takes_trunk = True

    def fit(self, job: Job) -> Content:
        images, trunk, config = given_to(job)
        started = time.perf_counter()
        check_belonging(job, images, Network(trunk, config, job.source.shape, job.device))
        contents = encode_all(images, torch.arange(len(images)), config)
        start = common_start(contents)
        lengths = np.array([len(content) - len(start) for content in contents])
        lengths = lengths.astype(np.uint16 if lengths.max() < 2**16 else np.uint32)
        stream = b"".join(content[len(start) :] for content in contents)
        tensors = {
            "low": job.stats.low, "high": job.stats.high, "lengths": torch.from_numpy(lengths),
            "stream": as_tensor(stream), "start": as_tensor(start),
        }  # fmt: skip
        assert len(tensors) == NUM_TENSORS, f"{len(tensors)} tensors"
        settings = {**asdict(config), "image_shape": image_shape(images), "trunk": fingerprint(trunk)}
        return Content(tensors=tensors, settings=settings, seconds=time.perf_counter() - started)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The codec and quality whose features are nearest, of those that fit; sizes and errors from a few images."""
        images, trunk, config = given_to(job)
        network = Network(trunk, config, job.source.shape, job.device)
        ids = torch.linspace(0, len(images) - 1, min(TRIED, len(images)), dtype=torch.float64).round().long()
        expected = normalise(job.source.read(ids).to(job.device), job.stats.low, job.stats.high)
        fixed = overhead_bytes(job, NUM_TENSORS, asdict(config)) + 200 + 8 * len(job.stats.low)

        @cache
        def encoded(codec: str, quality: int) -> list[bytes]:
            return encode_all(images, ids, replace(config, codec=codec, quality=quality))

        def size(codec: str, quality: int, contents: list[bytes] | None = None) -> float:
            """Of the file; given all contents and not a few, from above by less than a kilobyte or so."""
            contents = contents or encoded(codec, quality)
            start = len(common_start(contents))
            each = sum(map(len, contents)) / len(contents) - start + (2 if max(map(len, contents)) < 2**16 else 4)
            return fixed + start + each * len(images)

        def error(codec: str, quality: int) -> float:
            decoded = [decode_image(content, codec, image_shape(images)) for content in encoded(codec, quality)]
            made = normalise(network.features(torch.stack(decoded)), job.stats.low, job.stats.high, clamp=False)
            return (made - expected).square().mean().item()

        found = list[tuple[str, int]]()
        for codec in [config.codec] if "codec" in job.settings else CODECS:
            low = high = config.quality
            if codec != "png" and "quality" not in job.settings:
                low, high = 1, 100
            while low < high:  # to the best quality that fits
                middle = (low + high + 1) // 2
                low, high = (middle, high) if size(codec, middle) <= budget else (low, middle - 1)
            found.append((codec, low))
        for codec, quality in sorted((pair for pair in found if size(*pair) <= budget), key=lambda pair: error(*pair)):
            fixed_quality = codec == "png" or "quality" in job.settings
            for lower in range(quality, quality - 1 if fixed_quality else 0, -1):  # all may take more than a few do
                contents = encode_all(images, torch.arange(len(images)), replace(config, codec=codec, quality=lower))
                if size(codec, lower, contents) <= budget:
                    return {"codec": codec, "quality": lower}
        codec, quality = min(found, key=lambda pair: size(*pair))
        return {"codec": codec, "quality": quality}

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> ImagesReplayer:
        own = dict(settings)
        shape, trunk = own.pop("image_shape", None), own.pop("trunk", None)
        try:
            config = from_dict(ImagesConfig, own)
            if not isinstance(trunk, str) or not isinstance(shape, (list, tuple)) or len(shape) != 3:
                raise SettingError(
                    f"image_shape is {shape!r:.99} and trunk {trunk!r:.99}; expected three sizes, and text"
                )
            check_choice("channels", shape[0], CHANNELS)
            for side in shape[1:]:
                check_int("image_shape", side, 1, MAX_SIDE)
            for name in ("mean", "std"):
                check_choice(f"numbers of {name}", len(getattr(config, name)), {1, shape[0]})
        except InputError as error:
            raise NotARecordingError(f"settings of recorder images refused: {error}. Record again") from error
        lengths = store.tensor("lengths", shape=(samples.num_samples,))
        if lengths.dtype not in (torch.uint16, torch.uint32):
            raise NotARecordingError(f"tensor 'lengths' is {lengths.dtype}; expected uint16 or uint32. Record again")
        stream, start = (store.tensor(name, dtype=torch.uint8).numpy().tobytes() for name in ("stream", "start"))
        ends = np.cumsum(lengths.numpy().astype(np.int64))
        if int(ends[-1]) != len(stream):
            raise NotARecordingError(
                f"images of {int(ends[-1])} bytes in all; the file holds {len(stream)}. Record again"
            )
        channels, height, width = shape
        contents = Contents(stream, ends, start, config.codec, (channels, height, width))
        return ImagesReplayer(contents, config, trunk, samples.shape, device)


def given_to(job: Job) -> tuple[FeatureSource, nn.Module, ImagesConfig]:
    """Images, trunk and settings that the caller gave."""
    for option, given in (("preset", job.preset), ("head", job.head), ("start", job.start)):
        if given is not None:
            raise InputError(f"{option} is given, and recorder images fits nothing that could use it; leave it out")
    own = dict(job.settings)
    images, trunk = own.pop("images", None), own.pop("trunk", None)
    config = from_dict(ImagesConfig, own)
    source = open_images(images, len(job.source))
    check_trunk(trunk)
    for name in ("mean", "std"):
        if len(values := getattr(config, name)) not in (1, image_shape(source)[0]):
            raise SettingError(f"{name} is {values}; the images have {image_shape(source)[0]} channels")
    return source, trunk, config


def check_belonging(job: Job, images: FeatureSource, network: Network) -> None:
    """Refuse images, or a trunk, that these features were not made from."""
    ids = torch.linspace(0, len(images) - 1, min(CHECKED, len(images)), dtype=torch.float64).round().long()
    made = network.features(read_images(images, ids)).cpu()
    expected = job.source.read(ids).float()
    made, expected = (normalise(x, job.stats.low, job.stats.high, clamp=False) for x in (made, expected))
    error = (made - expected).square().mean().item()
    r2 = 1 - error / max(job.stats.variance, 1e-12)
    if error > 1e-12 and not r2 >= SAME_R2:
        raise InputError(
            f"{job.source.name}: the trunk makes other features of these images (R2 {r2:.3g} before any compression); "
            f"expected the same. Give the trunk, images, mean and std that the features were made with"
        )


def as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())
