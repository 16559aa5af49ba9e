"""What F2 is trained on: feature maps of old samples, replayed, and of new ones, in the same batch.

replays (N, c, h, w) -> Maps; images -> F1 -> NewFeatures;   both -> MixedBatches -> features, labels, wanted
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from krnet.features.sampler import BatchOrder
from krnet.learners.base import Learner
from krnet.train.classifier import Draws, Images


@dataclass(frozen=True, eq=False)
class Maps:
    """Numbers by sample, plain and, where batches may mirror them, of the mirrored sample."""

    plain: Tensor
    mirrored: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> Maps:
        return Maps(function(self.plain), None if self.mirrored is None else function(self.mirrored))

    def take(self, ids: Tensor, mirror: Tensor) -> Tensor:
        found = self.plain[ids]
        if self.mirrored is not None:
            mirror = mirror.view(-1, *[1] * (found.dim() - 1))
            found = torch.where(mirror, self.mirrored[ids], found)
        return found.permute(0, 3, 1, 2) if found.dim() == 4 else found


def for_f2(maps: Tensor) -> Tensor:
    """Feature maps (N, c, h, w), held as F2 reads them: channels last, on a GPU in bf16."""
    return maps.permute(0, 2, 3, 1).to(torch.bfloat16 if maps.is_cuda else maps.dtype).contiguous()


class NewFeatures:
    """F1's features of the new images, kept or made anew for each step."""

    def __init__(self, trunk: nn.Module, images: Images, ids: Tensor, labels: Tensor, kind: str, learner: Learner):
        self.trunk, self.images, self.kind = trunk, images, kind
        self.ids, self.labels = ids.to(images.device), labels.to(images.device)
        self.shift = images.data.shift if kind == "crop" else 0
        self.plain = learner.apply(trunk, images, self.ids)
        mirrored = kind == "flip" and images.data.flip
        flipped = learner.apply(lambda x: trunk(x.flip(-1)), images, self.ids) if mirrored else None
        self.maps = Maps(self.plain, flipped).each(for_f2)

    def replace(self, maps: Tensor, labels: Tensor) -> None:
        """By what came of them, in any order."""
        self.maps, self.labels = Maps(for_f2(maps)), labels.to(maps.device)

    def take(self, places: Tensor, draws: Tensor) -> Tensor:
        if self.kind != "crop":
            return self.maps.take(places, draws[:, 2] > 0)
        with torch.no_grad():
            return self.trunk(self.images.take(self.ids[places], draws)).to(self.maps.plain.dtype)


class MixedBatches:
    """Replayed features of old samples, then features of new ones: two fixed parts of every batch."""

    def __init__(
        self, replays: Maps, old_labels: Tensor, wanted: Maps | None, new: NewFeatures, batch_size: int, seed: int
    ):
        """wanted: what is to become of the replays in the end, in the same order."""
        device = replays.plain.device
        self.replays, self.old_labels, self.wanted, self.new = replays, old_labels.to(device), wanted, new
        self.num_samples = len(old_labels) + len(new.ids)
        self.batch_size = min(batch_size, self.num_samples)
        share = round(self.batch_size * len(old_labels) / self.num_samples)
        self.num_old = max(1, min(self.batch_size - 1, share))
        self.old_order = BatchOrder(len(old_labels), self.num_old, seed, device=device)
        self.new_order = BatchOrder(len(new.ids), self.batch_size - self.num_old, seed + 1, device=device)
        self.num_old, num_new = self.old_order.batch_size, self.new_order.batch_size
        self.batch_size = self.num_old + num_new
        self.draws = Draws(self.batch_size, new.shift, new.images.data.flip, seed, device)

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        return self.old_order.ids(iteration), self.new_order.ids(iteration), self.draws(iteration)

    def tensors(self, old: Tensor, new: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
        mirrored = draws[: self.num_old, 2] > 0
        features = torch.cat([self.replays.take(old, mirrored), self.new.take(new, draws[self.num_old :])])
        labels = torch.cat([self.old_labels[old], self.new.labels[new]])
        return (features, labels) if self.wanted is None else (features, labels, self.wanted.take(old, mirrored))
