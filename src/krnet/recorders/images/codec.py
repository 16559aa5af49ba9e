"""The images of recorder images: settings, the images to record, and those that a recording holds.

    images (N, C, H, W) or (N, H, W, C) uint8 -> ImageSource.encode -> bytes of each      (krnet/coding/image_codec.py)
    the file -> RecordedImages -> images(ids): decoded, (B, C, H, W) uint8

The trunk, which makes features of the images, is in recorder.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krnet.coding.image_codec import CHANNELS, EncodedImages, ImageEncoding, encode_images
from krnet.config import check_choice, check_int, check_range, from_dict
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features.source import FeatureSource, open_features
from krnet.io.archive import TensorStore

MAX_SIDE = 4096  # pixels; bounds the memory that a few bytes of a file can ask for
TRUNK_SETTINGS = ("trunk", "trunk_results")  # of the file: the trunk's fingerprint, and what it makes of a few images
CHUNK_BYTES = 64 << 20  # bytes of images, as float32, that are handled at once


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(ImageEncoding):
    mean: tuple[float, ...] = (0.0,)
    """Mean of each channel, in fractions of 255, subtracted before the trunk; one number serves all channels."""
    std: tuple[float, ...] = (1.0,)
    """Standard deviation of each channel, in fractions of 255; images are divided by it before the trunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, lowest in (("mean", -1e6), ("std", 1e-6)):
            values = getattr(self, name)
            values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
            for value in values:
                check_range(name, value, lowest, 1e6)
            object.__setattr__(self, name, values)

    def check_channels(self, channels: int) -> None:
        for name in ("mean", "std"):
            if len(values := getattr(self, name)) not in (1, channels):
                raise SettingError(f"{name} is {values}; the images have {channels} channels")

    def standardise(self, images: Tensor) -> Tensor:
        """uint8 images (n, C, H, W) -> float32 inputs of the trunk, of the same shape."""
        mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (self.mean, self.std))
        return (images.float() / 255 - mean) / std


def open_images(images: Any) -> FeatureSource:
    """The images as a source; refused unless they are uint8 with 1 or 3 channels."""
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
    return found


def image_shape(images: FeatureSource) -> tuple[int, int, int]:
    """Channels, height and width. The first axis is the channels if it has 1 or 3 entries, else the last axis is."""
    first, second, third = images.shape
    return (first, second, third) if first in CHANNELS else (third, first, second)


def read_images(images: FeatureSource, ids: Tensor) -> Tensor:
    """ids (n,) -> (n, C, H, W) uint8"""
    found = images.read(ids)
    return found if images.shape[0] in CHANNELS else found.permute(0, 3, 1, 2)


def chunk_samples(shape: Iterable[int]) -> int:
    """Images of shape (C, H, W) to handle at once."""
    return max(1, min(1024, CHUNK_BYTES // (4 * math.prod(shape))))


def read_shape(settings: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of the images, from the settings of a file."""
    shape = settings.get("image_shape")
    if not isinstance(shape, (list, tuple)) or len(shape) != 3:
        raise SettingError(f"image_shape is {shape!r:.99}; expected three sizes")
    channels, height, width = shape
    check_choice("channels", channels, CHANNELS)
    for side in (height, width):
        check_int("image_shape", side, 1, MAX_SIDE)
    return channels, height, width


@dataclass(frozen=True, eq=False)
class RecordedImages(EncodedImages):
    """The images of a recording."""

    config: ImagesConfig

    @classmethod
    def read(cls, settings: Mapping[str, Any], store: TensorStore, num_samples: int) -> RecordedImages:
        own = {name: value for name, value in settings.items() if name not in ("image_shape", *TRUNK_SETTINGS)}
        try:
            config = from_dict(ImagesConfig, own)
            shape = read_shape(settings)
            config.check_channels(shape[0])
        except (InputError, TypeError, OverflowError) as error:
            raise NotARecordingError(f"settings of recorder images refused: {error}. Record again") from error
        tensors = {"lengths": store.tensor("lengths", shape=(num_samples,))}
        tensors |= {name: store.tensor(name, dtype=torch.uint8) for name in ("stream", "start")}
        return cls.from_tensors(tensors, config, shape)


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Images to be recorded: first those of an earlier recording, if there is one, then those that are given."""

    given: FeatureSource
    earlier: RecordedImages | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return image_shape(self.given)

    def __len__(self) -> int:
        return self.num_earlier + len(self.given)

    @property
    def num_earlier(self) -> int:
        return 0 if self.earlier is None else len(self.earlier)

    def read(self, ids: Tensor) -> Tensor:
        """ids (n,) in rising order -> (n, C, H, W) uint8"""
        found = [read_images(self.given, ids[ids >= self.num_earlier] - self.num_earlier)]
        if self.earlier is not None:
            found.insert(0, self.earlier.images(ids[ids < self.num_earlier]))
        return torch.cat(found)

    def encode(self, ids: Tensor, config: ImagesConfig) -> list[bytes]:
        """ids in rising order -> the bytes of each image. Earlier images with the same encoding keep their bytes."""
        found = list[bytes]()
        if self.earlier is not None and self.earlier.config.encoding == config.encoding:
            found += [self.earlier.content(index) for index in ids[ids < self.num_earlier].tolist()]
            ids = ids[ids >= self.num_earlier]
        for chunk in ids.split(chunk_samples(self.shape)):
            found += encode_images(self.read(chunk), config)
        return found
