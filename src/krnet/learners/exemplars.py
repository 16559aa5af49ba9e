"""Images kept from earlier tasks: which, how many, and how they come back.

    features (N, D) of a class -> herd -> places of the best, best first
    Exemplars: pixels (M, C, H, W) uint8, labels (M,) -- extended, shrunk, joined with the images of a task
    features (M, D) of the exemplars -> class_means -> nearest: the nearest mean of exemplars (NME) as a classifier

Herding: Welling, "Herding Dynamical Weights to Learn" (2009), as iCaRL uses it (Rebuffi et al. 2017). A chosen image is
not chosen again; iCaRL's and LUCIR's own code may pass it a second time, and then stops after 1,000 rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.train.classifier import ImageBatches, Images


def herd(features: Tensor, number: int) -> Tensor:
    """Places of `number` rows (all, if there are fewer) whose unit vectors, taken in this order, keep their mean as
    close as can be to the mean of all rows' unit vectors."""
    unit = F.normalize(features.double(), dim=1)  # (N, D)
    mean, total = unit.mean(0, keepdim=True), torch.zeros_like(unit[:1])
    free = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    chosen = []
    for size in range(1, min(number, len(unit)) + 1):
        errors = (mean - (total + unit) / size).norm(dim=1)
        best = torch.where(free, errors, torch.inf).argmin(keepdim=True)  # (1,): stays on the device
        free.index_fill_(0, best, False)
        total = total + unit[best]
        chosen.append(best)
    return torch.cat(chosen)


def herd_classes(features: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """Places of the images to keep of each class: class after class in rising order, the best of each first."""
    parts = []
    for label in labels.unique():
        places = (labels == label).nonzero().squeeze(1)
        parts.append(places[herd(features[places], per_class)])
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Exemplars:
    """What is stored between tasks."""

    pixels: Tensor
    """(M, C, H, W) uint8: class after class as they were learned, the best of each first."""
    labels: Tensor
    """(M,) int32: places in the class order, rising."""

    @classmethod
    def none(cls, image_shape: tuple[int, ...], device: torch.device) -> Exemplars:
        pixels = torch.empty(0, *image_shape, dtype=torch.uint8, device=device)
        return cls(pixels, torch.empty(0, dtype=torch.int32, device=device))

    def __len__(self) -> int:
        return len(self.labels)

    def shrunk(self, per_class: int) -> Exemplars:
        """Without the last of every class that has more than so many."""
        counts = torch.bincount(self.labels)
        starts = counts.cumsum(0) - counts
        ranks = torch.arange(len(self), device=self.labels.device) - starts[self.labels.long()]
        return Exemplars(self.pixels[ranks < per_class], self.labels[ranks < per_class])

    def extended(self, pixels: Tensor, labels: Tensor) -> Exemplars:
        """With copies of the images of new classes, ordered as `choose` does."""
        return Exemplars(torch.cat([self.pixels, pixels]), torch.cat([self.labels, labels.to(self.labels)]))

    def joined(
        self, images: Images, labels: Tensor, ids: Tensor, batch_size: int, seed: int, *, augmented: bool
    ) -> ImageBatches:
        """Images of the given sample IDs and the exemplars as one set: every image once an epoch, old or new."""
        ids = ids.to(images.device)
        pixels = torch.cat([images.pixels[ids], self.pixels])
        labels = torch.cat([labels.to(images.device)[ids], self.labels.long()])
        both = Images(images.data, pixels, images.device)
        return ImageBatches(both, labels, torch.arange(len(labels)), batch_size, seed, augmented=augmented)

    def storage_bytes(self) -> dict[str, int]:
        sizes = {"exemplars": self.pixels, "exemplar_labels": self.labels}
        return {name: value.numel() * value.element_size() for name, value in sizes.items()}


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """(num_classes, D): the mean of each class's unit vectors, brought to unit length."""
    member = F.one_hot(labels.long(), num_classes).to(features)  # (M, num_classes)
    return F.normalize(member.T @ F.normalize(features, dim=1), dim=1)


def nearest(features: Tensor, means: Tensor) -> Tensor:
    """(B, num_classes): how far each mean is from the unit vector of each row, negative, so that the largest is the
    answer."""
    unit = F.normalize(features, dim=1)
    return -torch.cdist(unit, means, compute_mode="donot_use_mm_for_euclid_dist")
