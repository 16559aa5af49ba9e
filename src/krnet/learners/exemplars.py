"""Exemplars: images kept from earlier tasks, how they are chosen, and the classifier that they define.

    features (N, D) of a class -> herd -> row numbers, best first
    Exemplars: pixels (M, C, H, W) uint8, labels (M,) -- append, truncate, batches_with the images of a task
    features (M, D) of the exemplars -> class_means -> nearest_mean_scores: nearest mean of exemplars (NME)

Herding: Welling, "Herding Dynamical Weights to Learn" (2009), as iCaRL uses it (Rebuffi et al. 2017). Here an image is
chosen at most once. The code of iCaRL and LUCIR may choose an image again, and then stops after 1,000 rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.train.classifier import ImageBatches, Images


def herd(features: Tensor, number: int) -> Tensor:
    """Choose `number` rows (or all, if there are fewer), one at a time, and return their row numbers in that order.

    Each choice brings the mean of the chosen unit vectors as close as possible to the mean of all unit vectors.
    """
    unit = F.normalize(features.double(), dim=1)  # (N, D)
    mean, total = unit.mean(0, keepdim=True), torch.zeros_like(unit[:1])
    free = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    chosen = []
    for size in range(1, min(number, len(unit)) + 1):
        errors = (mean - (total + unit) / size).norm(dim=1)  # (N,)
        best = torch.where(free, errors, torch.inf).argmin(keepdim=True)  # (1,): stays on the device
        free.index_fill_(0, best, False)
        total = total + unit[best]
        chosen.append(best)
    return torch.cat(chosen)


def herd_classes(features: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """Row numbers of the images to keep, class by class in ascending order, the best of each class first."""
    parts = []
    for label in labels.unique():
        rows = (labels == label).nonzero().squeeze(1)
        parts.append(rows[herd(features[rows], per_class)])
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Exemplars:
    """Images stored between tasks, with their labels."""

    pixels: Tensor
    """(M, C, H, W) uint8: class by class in the order of learning, the best of each class first."""
    labels: Tensor
    """(M,) int32: positions in the class order, ascending."""

    @classmethod
    def none(cls, image_shape: tuple[int, ...], device: torch.device) -> Exemplars:
        pixels = torch.empty(0, *image_shape, dtype=torch.uint8, device=device)
        return cls(pixels, torch.empty(0, dtype=torch.int32, device=device))

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, mask: Tensor) -> Exemplars:
        """Return the exemplars where the mask (M,) is true."""
        return Exemplars(self.pixels[mask], self.labels[mask])

    def truncate(self, per_class: int) -> Exemplars:
        """Return only the first `per_class` exemplars of each class."""
        starts = class_starts(self.labels)
        return self.select(torch.arange(len(self), device=self.labels.device) - starts < per_class)

    def append(self, pixels: Tensor, labels: Tensor) -> Exemplars:
        """Return these exemplars followed by those of new classes, in the order of `herd_classes`."""
        return Exemplars(torch.cat([self.pixels, pixels]), torch.cat([self.labels, labels.to(self.labels)]))

    def batches_with(
        self, images: Images, labels: Tensor, ids: Tensor, batch_size: int, seed: int, **options: Any
    ) -> ImageBatches:
        """Batches of the images with these sample IDs and of the exemplars; each epoch has every image once.

        options: of ImageBatches, such as `augmented` and `transform`
        """
        ids = ids.to(images.device)
        pixels = torch.cat([images.pixels[ids], self.pixels])
        labels = torch.cat([labels.to(images.device)[ids], self.labels.long()])
        all_images = Images(images.data, pixels, images.device)
        return ImageBatches(all_images, labels, torch.arange(len(labels)), batch_size, seed, **options)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored."""
        return {"exemplars": self.pixels, "exemplar_labels": self.labels}

    def load(self, tensors: Mapping[str, Tensor]) -> Exemplars:
        """Return the exemplars that `tensors` has stored."""
        return Exemplars(*(tensors[name].to(self.pixels.device) for name in ("exemplars", "exemplar_labels")))

    def storage_bytes(self) -> dict[str, int]:
        return {name: value.numel() * value.element_size() for name, value in self.tensors().items()}


def class_starts(labels: Tensor) -> Tensor:
    """(M,): for each of these ascending labels, the row where its class begins."""
    counts = torch.bincount(labels)
    return (counts.cumsum(0) - counts)[labels.long()]


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """(num_classes, D): the mean of each class's unit vectors, scaled to unit length."""
    membership = F.one_hot(labels.long(), num_classes).to(features)  # (M, num_classes)
    return F.normalize(membership.T @ F.normalize(features, dim=1), dim=1)


def nearest_mean_scores(features: Tensor, means: Tensor) -> Tensor:
    """(B, num_classes): minus the distance between each row's unit vector and each mean; the largest is the answer."""
    unit = F.normalize(features, dim=1)
    return -torch.cdist(unit, means, compute_mode="donot_use_mm_for_euclid_dist")
