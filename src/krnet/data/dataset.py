"""Images with permanent sample IDs.

    DataSet: a train and a test Split, class names, mean and std, and how networks see the images
    Split: images (N, C, H, W) uint8, labels (N,) int64
    the user's own arrays -> from_arrays -> DataSet
    DataSet -> with_validation -> DataSet without the test images: held-out training images take their place

The sample ID of an image is its row number: its position in the publisher's file, in the arrays, or in the sorted list
of files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.config import check_choice, check_int
from krnet.device import dtype_name, share_memory
from krnet.errors import DataError, LabelError, SettingError

CHANNEL_COUNTS = (1, 3, 4)  # an axis of one of these lengths is taken as the channels, to tell NCHW from NHWC
MAX_STATS_BYTES = 1 << 30  # mean and std are computed on at most this many bytes of training images
STATS_CHUNK_IMAGES = 256


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels, for training or for testing. Row i of both belongs to sample ID i.

    >>> import krnet
    >>> train = krnet.data.load("digits").train
    >>> train.num_samples, train.images[5].shape, int(train.labels[5])
    (1442, torch.Size([1, 8, 8]), 5)
    """

    images: Tensor
    """(N, C, H, W) uint8 on the CPU; images of a folder are memory-mapped from a file."""
    labels: Tensor
    """(N,) int64: 0..num_classes - 1; each occurs at least once."""

    @property
    def num_samples(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Images to learn from and images to test with, and how networks see them.

    `krnet.data.load` and `krnet.data.from_arrays` return one; `krnet.learn` and `krnet.extract` take it or its parts.

    >>> import krnet
    >>> digits = krnet.data.load("digits")
    >>> digits.train.num_samples, digits.test.num_samples, digits.image_shape, digits.class_names[3]
    (1442, 355, (1, 8, 8), '3')
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """Per channel, as a fraction of 255."""
    std: tuple[float, ...]
    """Per channel, as a fraction of 255."""
    pad: int
    """Width in pixels of the zero border around an image that random crops may include."""
    flip: bool
    """Whether images may be mirrored."""
    crop: int | None = None
    """Side in pixels of the window that networks see: a random window in training, else the centre. None: the window is
    as large as the image."""
    validation: int = 0
    """Training images of each class that `with_validation` held out; the test split is made of them. 0: the test split
    holds the real test images."""

    def __post_init__(self) -> None:
        check_int("pad", self.pad, 0)
        check_choice("flip", self.flip, (True, False))
        if self.crop is None:
            return
        _, height, width = self.image_shape
        if height != width:
            raise SettingError(f"crop is {self.crop}, and the images are {height} x {width}; crops need square images")
        check_int("crop", self.crop, 1, height)
        if (height - self.crop) % 2:
            raise SettingError(
                f"crop is {self.crop} of {height} pixels; expected one that leaves as many on either side, such as "
                f"{self.crop - 1 or self.crop + 1}"
            )

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def digest(self) -> str:
        """Hash of all labels, of up to 256 images per split and of how networks see them.

        It distinguishes data sets of the same name.
        """
        # Rounded, as the last digit of a sum differs between machines.
        stats = [f"{value:.6g}" for value in (*self.mean, *self.std)]
        input_settings = (tuple(self.image_shape), stats, int(self.pad), bool(self.flip), self.crop)
        hasher = hashlib.sha256(repr(input_settings).encode())
        for split in (self.train, self.test):
            hasher.update(split.labels.contiguous().numpy().tobytes())
            sampled_ids = torch.linspace(0, split.num_samples - 1, min(256, split.num_samples)).round().long()
            hasher.update(split.images[sampled_ids].contiguous().numpy().tobytes())
        if self.validation:
            hasher.update(f"validation {self.validation}".encode())
        return hasher.hexdigest()[:16]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the stored images."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images that networks see."""
        channels, height, width = self.image_shape
        return (channels, height, width) if self.crop is None else (channels, self.crop, self.crop)

    @property
    def shift(self) -> int:
        """Largest offset in pixels of a random crop from the centre, in each direction; 0: no random crops."""
        return self.pad + (self.image_shape[1] - self.input_shape[1]) // 2

    def with_validation(self, num_per_class: int) -> DataSet:
        """Hold out training images of each class and judge on them: a data set to choose settings with.

        num_per_class  images of each class that leave the training split; they become the test split

        The new data set does not contain the real test images. The held-out images of a class are evenly spaced among
        its training images, so they do not depend on a seed or a class order, and files that were sorted by anything
        are represented from first to last. Mean and standard deviation stay those of this data set. Images are copied
        into memory.

        >>> import krnet
        >>> digits = krnet.data.load("digits").with_validation(20)
        >>> digits.name, digits.train.num_samples, digits.test.num_samples
        ('digits-validation20', 1242, 200)
        """
        check_int("validation", num_per_class, 1)
        if self.validation:
            raise SettingError(
                f"validation is {num_per_class}, and {self.name} has {self.validation} images of each class held out "
                f"already. Give the data set with its test images, or leave validation out"
            )
        labels = self.train.labels
        counts = torch.bincount(labels, minlength=self.num_classes)
        if int(counts.min()) <= num_per_class:
            label = int(counts.argmin())
            raise SettingError(
                f"validation is {num_per_class}, and class {label} ({self.class_names[label]}) of {self.name} has "
                f"{int(counts[label])} training images; expected at most {int(counts[label]) - 1}, so that one is left"
            )
        is_held_out = torch.zeros(len(labels), dtype=torch.bool)
        for label, count in enumerate(counts.tolist()):
            # The middle of each of num_per_class equal stretches of the class.
            places = [(2 * k + 1) * count // (2 * num_per_class) for k in range(num_per_class)]
            is_held_out[(labels == label).nonzero()[:, 0][places]] = True
        train, test = (Split(self.train.images[part], labels[part]) for part in (~is_held_out, is_held_out))
        name = f"{self.name}-validation{num_per_class}"
        return replace(self, name=name, train=train, test=test, validation=num_per_class)


def from_arrays(
    train_images: Any,
    train_labels: Any,
    test_images: Any,
    test_labels: Any,
    *,
    name: str = "arrays",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    pad: int = 0,
    flip: bool = False,
    crop: int | None = None,
    class_names: Sequence[str] | None = None,
    layout: str | None = None,
) -> DataSet:
    """Make a data set of your own images, for `krnet.learn`.

    train_images, test_images  uint8 arrays or tensors, (N, C, H, W) or (N, H, W, C)
    train_labels, test_labels  one of 0, 1, ..., K - 1 per image; each of the K classes must occur in both
    name  as it is to appear in results
    mean, std  of the pixels, as fractions of 255; one number for all channels or one each. By default computed from the
            training images of all classes, as is usual; `krnet.learn` then normalises the images of the first task by
            numbers to which those of later tasks contribute. Give fixed numbers to exclude that
    pad, flip, crop  how training images are shifted, mirrored and cropped at random, see DataSet; by default not at all
    class_names  by default "0", "1", ...
    layout  NCHW or NHWC; by default found from the axis that has 1, 3 or 4 channels

    >>> import krnet, numpy
    >>> images = numpy.zeros((6, 32, 32, 3), dtype="uint8")
    >>> data = krnet.data.from_arrays(images, [0, 1, 0, 1, 0, 1], images[:2], [0, 1], class_names=["ant", "bee"])
    >>> data.num_classes, data.image_shape
    (2, (3, 32, 32))
    """
    images = [_as_images(*part, layout) for part in ((train_images, f"{name}, train"), (test_images, f"{name}, test"))]
    labels = [_as_labels(*part) for part in ((train_labels, f"{name}, train"), (test_labels, f"{name}, test"))]
    if images[0].shape[1:] != images[1].shape[1:]:
        shapes = " and ".join(str(tuple(part.shape[1:])) for part in images)
        raise DataError(f"{name}: images for training and testing are {shapes}; expected the same shape")
    if class_names is None:
        class_names = [str(label) for label in range(int(labels[0].max()) + 1)]
    duplicates = [label for label, times in Counter(class_names).items() if times > 1]
    if duplicates:
        raise LabelError(f"{name}: two classes are named {duplicates[0]!r}; expected another name for each")
    train = make_split(images[0], labels[0], class_names, f"{name}, train")
    test = make_split(images[1], labels[1], class_names, f"{name}, test")
    measured_mean, measured_std = channel_stats(train.images) if mean is None or std is None else ((), ())
    mean = _check_per_channel("mean", measured_mean if mean is None else mean, train.images.shape[1])
    std = _check_per_channel("std", measured_std if std is None else std, train.images.shape[1])
    return DataSet(name, train, test, tuple(class_names), mean, std, pad, flip, crop)


def _check_per_channel(name: str, given: Any, channels: int) -> tuple[float, ...]:
    try:
        array = np.asarray(given.tolist() if isinstance(given, Tensor) else given, np.float64)
        values = np.broadcast_to(array, channels) if array.ndim == 0 else array
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.shape != (channels,) or not np.isfinite(values).all() or (name == "std" and values.min() <= 0):
        above = ", above 0" if name == "std" else ""
        raise SettingError(f"{name} is {given!r}; expected one number per channel ({channels}) or one for all{above}")
    return tuple(values.tolist())


def _as_images(images: Any, where: str, layout: str | None) -> Tensor:
    """Check the images and return them as (N, C, H, W) uint8 on the CPU, without a copy if they have that form."""
    found = images if isinstance(images, Tensor) else np.asarray(images)
    if dtype_name(found.dtype) != "uint8":
        raise DataError(f"{where}: images are {found.dtype}; expected uint8. Scale them to 0..255 and convert them")
    if found.ndim != 4 or 0 in found.shape:
        raise DataError(
            f"{where}: images have shape {tuple(found.shape)}; expected (N, C, H, W) or (N, H, W, C), none of them 0. "
            f"Give grey images an axis for their channel: images[:, None]"
        )
    if layout is None:
        likely = [name for name, axis in (("NCHW", 1), ("NHWC", 3)) if found.shape[axis] in CHANNEL_COUNTS]
        if len(likely) != 1:
            raise DataError(
                f"{where}: images of shape {tuple(found.shape)} may be NCHW or NHWC: {len(likely)} of the axes 1 and 3 "
                f"look like channels ({', '.join(map(str, CHANNEL_COUNTS))}). Say layout='NCHW' or layout='NHWC'"
            )
        layout = likely[0]
    check_choice("layout", layout, ("NCHW", "NHWC"))
    if isinstance(found, np.ndarray):
        found = share_memory(np.ascontiguousarray(found))
    return (found if layout == "NCHW" else found.permute(0, 3, 1, 2)).cpu().contiguous()


def _as_labels(labels: Any, where: str) -> Tensor:
    # Convert tensors to Python numbers first: numpy cannot read all of them (bfloat16, CUDA).
    found = np.asarray(labels.tolist() if isinstance(labels, Tensor) else labels)
    if found.size == 0:
        raise LabelError(f"{where}: no labels; expected one per image")
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise LabelError(
            f"{where}: labels are {found.dtype} of shape {found.shape}; expected (N,) whole numbers. "
            f"Number the classes 0, 1, 2, ..."
        )
    if found.min() < 0:
        raise LabelError(f"{where}: label {found.min()} is below 0. Number the classes 0, 1, 2, ...")
    return torch.from_numpy(found.astype(np.int64))


def make_split(images: Tensor, labels: Tensor, class_names: Sequence[str], where: object) -> Split:
    """Check images and labels. Every class must occur: a task without images can neither be learned nor tested."""
    num_classes = len(class_names)
    if len(labels) != len(images):
        raise LabelError(f"{where}: {len(labels)} labels for {len(images)} images; expected one per image")
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise LabelError(
            f"{where}: label {int(outside[0])} is outside 0..{num_classes - 1}, the {num_classes} classes there are. "
            f"Number the classes 0, 1, 2, ... for training and testing alike"
        )
    absent = (torch.bincount(labels, minlength=num_classes) == 0).nonzero()
    if len(absent):
        number = int(absent[0])
        raise LabelError(
            f"{where}: no image of class {number} ({class_names[number]}); expected at least one of each of the "
            f"{num_classes} classes. Add one, or leave the class out and number the others 0, 1, 2, ..."
        )
    return Split(images, labels)


def channel_stats(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the pixels of each channel, as fractions of 255.

    images  uint8 (N, C, H, W). Of more than a gigabyte of images, evenly spaced ones are used

    >>> import krnet, torch
    >>> krnet.data.channel_stats(torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    step = -(-images.numel() // MAX_STATS_BYTES)
    counts = np.zeros((images.shape[1], 256), np.int64)  # (C, 256): histogram of the pixels of each channel
    for chunk in images[::step].split(STATS_CHUNK_IMAGES):
        counts += [np.bincount(channel.ravel(), minlength=256) for channel in chunk.transpose(0, 1).numpy()]
    values, frequencies = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = frequencies @ values
    std = np.sqrt((frequencies * (values - mean[:, None]) ** 2).sum(1))
    # At least 1 / 255: a constant channel would be divided by zero.
    return tuple(mean.tolist()), tuple(np.maximum(std, 1 / 255).tolist())
