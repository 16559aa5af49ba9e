"""The batches that F2 is trained on, and those of a head with a hidden layer.

replays (N, c, h, w) of old samples -> SampleValues ----.
new images -> F1 -> NewFeatures ------------------------+--> MixedBatches -> features, labels, targets of L_aux

readings (N, D) of all samples -> ReadingBatches -> readings, labels, factors of dropout
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from krnet.features.sampler import BatchOrder
from krnet.learners.base import Learner
from krnet.train.classifier import Draws, Images, step_rng


@dataclass(frozen=True, eq=False)
class SampleValues:
    """One row of values per sample, and one per mirrored sample if batches may mirror samples."""

    plain: Tensor
    """(N, ...), one row per sample; `take` expects feature maps as (N, h, w, c)."""
    mirrored: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> SampleValues:
        return SampleValues(function(self.plain), None if self.mirrored is None else function(self.mirrored))

    def take(self, ids: Tensor, mirror: Tensor) -> Tensor:
        """Rows of the samples `ids`, mirrored where `mirror` (B,) is True; maps are returned as (B, c, h, w)."""
        rows = self.plain[ids]
        if self.mirrored is not None:
            mirror = mirror.view(-1, *[1] * (rows.dim() - 1))
            rows = torch.where(mirror, self.mirrored[ids], rows)
        return rows.permute(0, 3, 1, 2) if rows.dim() == 4 else rows


def to_f2_layout(maps: Tensor) -> Tensor:
    """Convert feature maps (N, c, h, w) to (N, h, w, c), the memory order that F2 reads; on a GPU to bf16."""
    return maps.permute(0, 2, 3, 1).to(torch.bfloat16 if maps.is_cuda else maps.dtype).contiguous()


class NewFeatures:
    """F1's features of the new images, computed once, or in each step if images are cropped at random."""

    def __init__(self, trunk: nn.Module, images: Images, ids: Tensor, labels: Tensor, kind: str, learner: Learner):
        """kind: setting new_features of KrilConfig."""
        self.trunk, self.images, self.kind = trunk, images, kind
        self.ids, self.labels = ids.to(images.device), labels.to(images.device)
        self.shift = images.data.shift if kind == "crop" else 0
        self.plain = learner.apply(trunk, images, self.ids)
        mirrors = kind == "flip" and images.data.flip
        flipped = learner.apply(lambda x: trunk(x.flip(-1)), images, self.ids) if mirrors else None
        self.maps = SampleValues(self.plain, flipped).map(to_f2_layout)

    def replace(self, maps: Tensor, labels: Tensor) -> None:
        """Use these maps and labels instead, such as replays of the same samples; their order may differ."""
        self.maps, self.labels = SampleValues(to_f2_layout(maps)), labels.to(maps.device)

    def take(self, rows: Tensor, draws: Tensor) -> Tensor:
        if self.kind != "crop":
            return self.maps.take(rows, draws[:, 2] > 0)
        with torch.no_grad():
            return self.trunk(self.images.take(self.ids[rows], draws)).to(self.maps.plain.dtype)


class MixedBatches:
    """Batches of replays of old samples, followed by features of new ones. Both parts have a fixed size."""

    def __init__(
        self,
        replays: SampleValues,
        old_labels: Tensor,
        aux_targets: SampleValues | None,
        new: NewFeatures,
        batch_size: int,
        seed: int,
    ):
        """aux_targets: the last F2's features of the replays, in the same order; None: there is no L_aux."""
        device = replays.plain.device
        self.replays, self.old_labels, self.aux_targets, self.new = replays, old_labels.to(device), aux_targets, new
        self.num_samples = len(old_labels) + len(new.ids)
        self.batch_size = min(batch_size, self.num_samples)
        num_old = round(self.batch_size * len(old_labels) / self.num_samples)
        self.num_old = max(1, min(self.batch_size - 1, num_old))
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
        return (
            (features, labels) if self.aux_targets is None else (features, labels, self.aux_targets.take(old, mirrored))
        )


class ReadingBatches:
    """Readings of all samples, with factors (B, hidden) of dropout: 0, or 1 / (1 - dropout)."""

    def __init__(self, readings: Tensor, labels: Tensor, batch_size: int, seed: int, hidden: int, dropout: float):
        self.readings, self.labels, self.seed = readings, labels.to(readings.device), seed
        self.order = BatchOrder(len(labels), batch_size, seed, device=readings.device)
        self.batch_size, self.num_samples = self.order.batch_size, len(labels)
        self.hidden, self.dropout = hidden, dropout

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        device = self.readings.device
        rng = step_rng(self.seed, iteration, device)
        kept = torch.rand(self.batch_size, self.hidden, device=device, generator=rng) >= self.dropout
        return self.order.ids(iteration), kept / (1 - self.dropout)

    def tensors(self, ids: Tensor, factors: Tensor) -> tuple[Tensor, ...]:
        return self.readings[ids], self.labels[ids], factors
