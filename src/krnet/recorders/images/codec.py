"""Images to bytes and back: the part of recorder images that does not involve the trunk.

    images (N, C, H, W) or (N, H, W, C) uint8 -> ImageSource.encode -> JPEG, WebP or PNG -> EncodedImages: one stream
    ids -> EncodedImages.images -> decoded in parallel -> (B, C, H, W) uint8

Images of one codec begin with the same bytes, in a JPEG hundreds of them (its tables). These are stored once.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.config import check_choice, check_int, check_range, from_dict, require
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features.source import FeatureSource, open_features
from krnet.io.archive import TensorStore

CODECS = ("jpeg", "webp", "webp-lossless", "png")
LOSSLESS = ("webp-lossless", "png")
SUBSAMPLINGS = (420, 444)
WEBP_CHUNKS = {"webp": b"VP8 ", "webp-lossless": b"VP8L"}  # name of the container's chunk with the image
CHANNELS = (1, 3)
MAX_SIDE = 4096  # pixels; bounds the memory that a few bytes of a file can ask for
CHUNK_BYTES = 64 << 20  # bytes of images, as float32, that are handled at once


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    codec: str = "jpeg"
    """jpeg or webp (lossy), webp-lossless or png (lossless; png is the smaller one for tiny images only)."""
    quality: int = 90
    """Quality of jpeg and webp, 1 to 100."""
    subsampling: int = 420
    """Colour resolution of a jpeg: 420 (4:2:0, one colour for 2 x 2 pixels) or 444 (4:4:4, one for each pixel)."""
    mean: tuple[float, ...] = (0.0,)
    """Mean of each channel, in fractions of 255, subtracted before the trunk; one number serves all channels."""
    std: tuple[float, ...] = (1.0,)
    """Standard deviation of each channel, in fractions of 255; images are divided by it before the trunk."""

    def __post_init__(self) -> None:
        check_choice("codec", self.codec, CODECS)
        check_int("quality", self.quality, 1, 100)
        check_choice("subsampling", self.subsampling, SUBSAMPLINGS)
        for name, lowest in (("mean", -1e6), ("std", 1e-6)):
            values = getattr(self, name)
            values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
            for value in values:
                check_range(name, value, lowest)
            object.__setattr__(self, name, values)

    @property
    def encoding(self) -> tuple[str, int, int]:
        """The settings that, with its pixels, determine the bytes of an image; those the codec ignores are 0."""
        quality = 0 if self.codec in LOSSLESS else self.quality
        return self.codec, quality, self.subsampling if self.codec == "jpeg" else 0

    def check_channels(self, channels: int) -> None:
        for name in ("mean", "std"):
            if len(values := getattr(self, name)) not in (1, channels):
                raise SettingError(f"{name} is {values}; the images have {channels} channels")

    def standardise(self, images: Tensor) -> Tensor:
        """uint8 images (n, C, H, W) -> float32 inputs of the trunk, of the same shape."""
        mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (self.mean, self.std))
        return (images.float() / 255 - mean) / std


def encode_image(image: np.ndarray, config: ImagesConfig) -> bytes:
    """image (H, W, C) uint8 -> the bytes that the recording holds"""
    Image = require("PIL.Image", "images")

    target = io.BytesIO()
    grey = image.shape[2] == 1
    pixels = image[:, :, 0] if grey else image
    Image.fromarray(pixels).save(target, config.codec.split("-")[0], **pillow_options(config, grey))
    content = target.getvalue()
    return pack_webp(content, config.codec) if config.codec in WEBP_CHUNKS else content


def pillow_options(config: ImagesConfig, grey: bool) -> dict[str, Any]:
    """Keyword arguments of Pillow's `save`."""
    if config.codec == "png":
        return {"optimize": True}
    if config.codec == "webp-lossless":
        # Slower methods make small images larger by 1 to 3 %, and large images smaller by less than 1 %.
        return {"lossless": True, "method": 4, "quality": 0}
    if config.codec == "webp":
        return {"quality": config.quality, "method": 6}  # the slowest method makes the smallest files
    colours = {} if grey else {"subsampling": ":".join(str(config.subsampling))}
    return {"quality": config.quality, **colours}


def pack_webp(content: bytes, codec: str = "webp") -> bytes:
    """Remove the container, 20 bytes that follow from the length, and put the bytes that all images share first.

    lossy     RIFF container | frame tag (3) | start code, size (7) | data  ->  start code, size | frame tag | data
    lossless  RIFF container | signature, size (5) | data                   ->  signature, size | data
    """
    assert content[12:16] == WEBP_CHUNKS[codec], f"a chunk {content[12:16]!r} where a {codec} image begins"
    frame = content[20 : 20 + int.from_bytes(content[16:20], "little")]
    return frame if codec == "webp-lossless" else frame[3:10] + frame[:3] + frame[10:]


def unpack_webp(packed: bytes, codec: str = "webp") -> bytes:
    """The inverse of `pack_webp`."""
    frame = packed if codec == "webp-lossless" else packed[7:10] + packed[:7] + packed[10:]
    padded = frame + bytes(len(frame) % 2)
    riff_size, chunk_size = (n.to_bytes(4, "little") for n in (12 + len(padded), len(frame)))
    return b"RIFF%bWEBP%b%b%b" % (riff_size, WEBP_CHUNKS[codec], chunk_size, padded)


def decode_image(content: bytes, codec: str, shape: Sequence[int]) -> Tensor:
    """An image (C, H, W) uint8; one of another shape than `shape` is refused."""
    Image = require("PIL.Image", "images")

    channels, height, width = shape
    file = unpack_webp(content, codec) if codec in WEBP_CHUNKS else content
    try:
        with Image.open(io.BytesIO(file), formats=[codec.split("-")[0]]) as image:
            if image.size != (width, height):  # checked before the pixels are decoded
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels; expected {width} x {height}")
            pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow's decoders raise many kinds of errors
        raise NotARecordingError(
            f"an image of {len(content)} bytes does not decode: {error}. Restore the file from a copy, or record again"
        ) from error
    return torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1)


def thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor()  # threads are enough: Pillow releases the interpreter's lock


def common_prefix(contents: Sequence[bytes]) -> bytes:
    """The longest prefix that all contents share."""
    first, last = min(contents), max(contents)  # in the order of bytes, where all others lie between these two
    length = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:length]


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


def as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """Encoded images, one after the other; the prefix that all of them share is stored once."""

    stream: bytes
    ends: np.ndarray
    """(N,) int64: where each image ends in the stream."""
    prefix: bytes
    config: ImagesConfig
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, contents: Sequence[bytes], config: ImagesConfig, shape: tuple[int, int, int]) -> EncodedImages:
        prefix = common_prefix(contents)
        ends = np.cumsum([len(content) - len(prefix) for content in contents], dtype=np.int64)
        return cls(b"".join(content[len(prefix) :] for content in contents), ends, prefix, config, shape)

    @classmethod
    def read(cls, settings: Mapping[str, Any], store: TensorStore, num_samples: int) -> EncodedImages:
        own = {name: value for name, value in settings.items() if name not in ("image_shape", "trunk")}
        shape = settings.get("image_shape")
        try:
            config = from_dict(ImagesConfig, own)
            if not isinstance(shape, (list, tuple)) or len(shape) != 3:
                raise SettingError(f"image_shape is {shape!r:.99}; expected three sizes")
            channels, height, width = shape
            check_choice("channels", channels, CHANNELS)
            for side in (height, width):
                check_int("image_shape", side, 1, MAX_SIDE)
            config.check_channels(channels)
        except InputError as error:
            raise NotARecordingError(f"settings of recorder images refused: {error}. Record again") from error
        lengths = store.tensor("lengths", shape=(num_samples,))
        if lengths.dtype not in (torch.uint16, torch.uint32):
            raise NotARecordingError(f"tensor 'lengths' is {lengths.dtype}; expected uint16 or uint32. Record again")
        stream, prefix = (store.tensor(name, dtype=torch.uint8).numpy().tobytes() for name in ("stream", "start"))
        ends = np.cumsum(lengths.numpy().astype(np.int64))
        if int(ends[-1]) != len(stream):
            raise NotARecordingError(
                f"images of {int(ends[-1])} bytes in all; the file holds {len(stream)}. Record again"
            )
        return cls(stream, ends, prefix, config, (channels, height, width))

    def tensors(self) -> dict[str, Tensor]:
        lengths = np.diff(self.ends, prepend=0)
        lengths = lengths.astype(np.uint16 if lengths.max() < 2**16 else np.uint32)
        return {
            "lengths": torch.from_numpy(lengths), "stream": as_tensor(self.stream), "start": as_tensor(self.prefix)
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self.ends)

    def content(self, index: int) -> bytes:
        """The bytes of one image, its prefix included."""
        begin = int(self.ends[index - 1]) if index else 0
        return self.prefix + self.stream[begin : int(self.ends[index])]

    def images(self, ids: Tensor) -> Tensor:
        """ids (n,) -> decoded images (n, C, H, W) uint8"""
        if not len(ids):
            return torch.empty(0, *self.shape, dtype=torch.uint8)

        def decode(index: int) -> Tensor:
            return decode_image(self.content(index), self.config.codec, self.shape)

        if len(ids) == 1:
            return decode(int(ids[0]))[None]
        with thread_pool() as pool:
            return torch.stack(list(pool.map(decode, ids.tolist())))


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Images to be recorded: first those of an earlier recording, if there is one, then those that are given."""

    given: FeatureSource
    earlier: EncodedImages | None = None

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
        with thread_pool() as pool:
            for chunk in ids.split(chunk_samples(self.shape)):
                pixels = self.read(chunk).permute(0, 2, 3, 1).numpy()
                found += pool.map(lambda image: encode_image(np.ascontiguousarray(image), config), pixels)
        return found
