"""Images of any kind as batches with their labels, in a fixed order.

array, memmap, path, Split      -> open_batches -> ArrayBatches    any batch can be read at once
DataLoader, iterable of batches -> open_batches -> LoaderBatches   run through from the start
    batches(first) -> (first sample ID, images (B, ...), labels (B,) int64 or None), ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from krnet.config import check_int
from krnet.data.dataset import DataSet, Split
from krnet.errors import DataError, InputError, LabelError, SettingError
from krnet.features.feature_source import FeatureSource
from krnet.features.labels import check_labels
from krnet.features.source import open_features

DEFAULT_BATCH = 256
RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

Batch = tuple[int, Tensor, Tensor | None]
Needs = Callable[[int, int], bool]  # whether the samples first .. stop - 1 are to be computed


def open_batches(
    images: Any, labels: Any, *, batch_size: int | None = None, key: str | None = None
) -> ArrayBatches | LoaderBatches:
    """Open images of any supported kind; what is wrong with them, and can be known now, is refused."""
    if batch_size is not None:
        check_int("batch_size", batch_size, 1)
    if isinstance(images, DataSet):
        raise InputError(f"images are the data set {images.name}; expected a part of it: give its train or its test")
    if isinstance(images, Split):
        labels = images.labels if labels is None else labels
        images = images.images
    is_path = isinstance(images, str | os.PathLike)
    is_array = all(hasattr(images, name) for name in ("shape", "dtype", "__getitem__"))
    if is_path or is_array or isinstance(images, FeatureSource) or hasattr(images, "keys"):
        return ArrayBatches(open_features(images, key=key), labels, batch_size or DEFAULT_BATCH)
    if key is not None:
        raise InputError(f"key={key!r} was given for images that are no file; leave it out")
    if isinstance(images, Dataset) and not isinstance(images, IterableDataset | DataLoader):
        images = DataLoader(images, batch_size or DEFAULT_BATCH)
    elif batch_size is not None:
        raise SettingError(
            f"batch_size is {batch_size}, and images come as batches of {type(images).__name__}; leave it out, or set "
            f"it there"
        )
    if not isinstance(images, Iterable):
        raise DataError(
            f"images are of type {type(images).__name__}; expected an array, a tensor, a path, a DataLoader, or an "
            f"iterable of batches"
        )
    return LoaderBatches(images, labels)


class ArrayBatches:
    """Samples first .. first + batch_size - 1 of an array."""

    def __init__(self, source: FeatureSource, labels: Any, batch_size: int):
        self.name, self.source, self.batch_size = source.name, source, batch_size
        self.labels = check_labels(labels, len(source))
        self.num_samples = len(source)

    def share(self, num_samples: int, num_batches: int) -> float | None:
        """The part that is done."""
        return num_samples / self.num_samples

    def batches(self, first: int, device: torch.device, needs: Needs | None = None) -> Iterator[Batch]:
        """The batches from sample ID `first` on; only those that are needed."""
        resident = self.source.resident
        for start in range(first, self.num_samples, self.batch_size):
            stop = min(start + self.batch_size, self.num_samples)
            if needs is not None and not needs(start, stop):
                continue
            if resident is not None and resident.device == device:
                images = resident[start:stop]
            else:
                images = self.source.read(torch.arange(start, stop), pinned=device.type == "cuda")
            yield start, images, None if self.labels is None else self.labels[start:stop]


class LoaderBatches:
    """The batches of a DataLoader, or of any iterable: images, or (images, labels)."""

    def __init__(self, loader: Iterable[Any], labels: Any):
        self.name, self.loader = type(loader).__name__, loader
        self.num_samples: int | None = None
        self.num_batches: int | None = None
        if isinstance(loader, DataLoader):
            _refuse_shuffling(loader)
            if isinstance(loader.sampler, SequentialSampler) and loader.batch_size and not loader.drop_last:
                self.num_samples = len(loader.sampler)
        if isinstance(loader, Sized):
            with suppress(TypeError):  # a DataLoader of an IterableDataset that has no length
                self.num_batches = len(loader)
        # Labels of an unknown number of images are counted when all images have come.
        self.given = None if labels is None else check_labels(labels, self.num_samples or _count_labels(labels))

    def share(self, num_samples: int, num_batches: int) -> float | None:
        """The part that is done; None if the end is unknown."""
        if self.num_samples is not None:
            return num_samples / self.num_samples
        return num_batches / self.num_batches if self.num_batches else None

    def batches(self, first: int, device: torch.device, needs: Needs | None = None) -> Iterator[Batch]:
        """All batches; those before sample ID `first` too, since they have to be run through, and for their labels."""
        start, has_labels = 0, None
        for index, batch in enumerate(self.loader):
            images, labels = self._parts(batch, index)
            if has_labels is not None and has_labels != (labels is not None):
                raise LabelError(
                    f"{self.name}: batch {index} has {'' if labels is not None else 'no '}labels, unlike those before; "
                    f"expected labels in each batch, or in none"
                )
            has_labels = labels is not None
            if self.given is not None:
                if labels is not None:
                    raise LabelError(f"{self.name}: its batches have labels, and labels are given; leave one out")
                labels = self.given[start : start + len(images)]
                if len(labels) < len(images):
                    self._refuse_number(f"at least {start + len(images)}")
            yield start, images, labels
            start += len(images)
        if self.given is not None and start != len(self.given):
            self._refuse_number(str(start))

    def _refuse_number(self, expected: str) -> None:
        assert self.given is not None
        raise LabelError(f"{len(self.given)} labels; expected {expected}, one per image of {self.name}")

    def _parts(self, batch: Any, index: int) -> tuple[Tensor, Tensor | None]:
        where = f"{self.name}: batch {index}"
        found, labels = batch, None
        if isinstance(batch, tuple | list):
            if len(batch) not in (1, 2):
                raise DataError(f"{where} has {len(batch)} parts; expected images, or (images, labels)")
            found, labels = (*batch, None)[:2]
        if not isinstance(found, Tensor | np.ndarray):
            raise DataError(
                f"{where} is of type {type(found).__name__}; expected images (B, C, H, W) as a tensor or an array, or "
                f"(images, labels)"
            )
        images = found if isinstance(found, Tensor) else torch.from_numpy(np.ascontiguousarray(found))
        if images.dim() == 0 or not len(images):
            raise DataError(f"{where} has shape {tuple(images.shape)}; expected (B, C, H, W) with at least one image")
        if images.dim() == 2 and labels is None and not isinstance(self.loader, DataLoader):
            raise DataError(
                f"{where} has shape {tuple(images.shape)}: a grey image, or a batch of vectors? Give grey images as "
                f"one array (N, 1, H, W), and vectors as one array (N, D) or in a DataLoader"
            )
        return images, None if labels is None else check_labels(labels, len(images))


Batches = ArrayBatches | LoaderBatches


def _count_labels(labels: Any) -> int:
    """The number of labels of any kind."""
    try:
        return len(np.load(labels, mmap_mode="r") if isinstance(labels, str | os.PathLike) else labels)
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise LabelError(
            f"labels of type {type(labels).__name__} cannot be read ({error}); expected integers, one per image: a "
            f"list, an array, or a path to .npy"
        ) from error


def _refuse_shuffling(loader: DataLoader[Any]) -> None:
    """A sample's ID is its place in the file: an order that is new each time would make IDs that mean nothing."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    for sampler in samplers:
        if isinstance(sampler, RANDOM_SAMPLERS):
            raise DataError(
                f"the DataLoader shuffles ({type(sampler).__name__}); expected a fixed order, as a sample's ID is its "
                f"place in the file. Make it with shuffle=False"
            )
