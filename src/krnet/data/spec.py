"""The form of the images that a network was trained on, kept beside it in a run: size, channels, normalisation.

data set -> DataSpec -> JSON in the file of a run -> DataSpec -> a data set of the same form whose images are blank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from krnet.data.dataset import DataSet, Split


@dataclass(frozen=True)
class DataSpec:
    """The form of a data set: classes, how many training images each has, and how networks see an image."""

    name: str
    class_names: tuple[str, ...]
    class_counts: tuple[int, ...]
    """Training images of each class."""
    image_shape: tuple[int, int, int]
    """(C, H, W) of the stored images."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    flip: bool
    crop: int | None

    @classmethod
    def of(cls, data: DataSet) -> DataSpec:
        return cls(
            name=data.name,
            class_names=tuple(map(str, data.class_names)),
            class_counts=tuple(torch.bincount(data.train.labels, minlength=data.num_classes).tolist()),
            image_shape=data.image_shape,
            mean=tuple(map(float, data.mean)),
            std=tuple(map(float, data.std)),
            pad=int(data.pad),
            flip=bool(data.flip),
            crop=data.crop,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> DataSpec:
        """Raises a KeyError if a field is missing; fields that a later version added are left out."""
        values: dict[str, Any] = {field.name: saved[field.name] for field in fields(cls)}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def blank(self, device: torch.device) -> DataSet:
        """A data set of this form without test images. Its training images are one black image, repeated in place."""
        images = torch.zeros(1, *self.image_shape, dtype=torch.uint8, device=device)
        labels = torch.arange(len(self.class_counts)).repeat_interleave(torch.tensor(self.class_counts))
        train = Split(images.expand(len(labels), -1, -1, -1), labels)
        test = Split(images[:0], labels[:0])
        return DataSet(self.name, train, test, self.class_names, self.mean, self.std, self.pad, self.flip, self.crop)
