"""Heads that grow class after class, and the classifier of a backbone and a head.

    features (B, feature_dim) -> LinearHead or CosineHead           -> logits (B, num_classes)
    images or feature maps    -> Classifier = backbone or tail, head -> logits (B, num_classes)

The cosine head and its imprinting are from Hou et al., "Learning a Unified Classifier Incrementally via Rebalancing"
(LUCIR, 2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_int
from krnet.errors import SettingError


class Head(nn.Module):
    """A weight row for each class, stored as one part (an nn.Linear) for each task.

    Parts keep their names and shapes as the head grows. Old rows can be frozen or left out of an optimizer, and
    importances measured for them (EWC, MAS) still match.
    """

    def __init__(self, feature_dim: int, num_classes: int, *, bias: bool):
        super().__init__()
        self.feature_dim, self.has_bias = feature_dim, bias
        self.parts = nn.ModuleList()
        self.grow(num_classes)

    @property
    def linears(self) -> list[nn.Linear]:
        return [part for part in self.parts if isinstance(part, nn.Linear)]

    @property
    def num_classes(self) -> int:
        return sum(part.out_features for part in self.linears)

    @property
    def weight(self) -> Tensor:
        """All rows (num_classes, feature_dim), in the order in which their classes came."""
        return torch.cat([part.weight for part in self.linears])

    def grow(self, num_new: int) -> None:
        """Add a part for `num_new` classes; the other parts stay as they are.

        Its weights are drawn on the CPU, so that every device gets the same numbers. An optimizer made earlier does
        not contain them.
        """
        check_int("num_new", num_new, 1)
        part = nn.Linear(self.feature_dim, num_new, bias=self.has_bias)
        self.parts.append(part.to(self.linears[0].weight) if len(self.parts) else part)

    def freeze_old(self) -> None:
        """Freeze all parts but the latest."""
        for part in self.linears[:-1]:
            part.requires_grad_(False)


class LinearHead(Head):
    """features (B, feature_dim) -> logits (B, num_classes)."""

    def __init__(self, feature_dim: int, num_classes: int):
        super().__init__(feature_dim, num_classes, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        # One product over all parts: one product per task would add a dozen kernels to a training step.
        return F.linear(x, self.weight, torch.cat([part.bias for part in self.linears]))


class CosineHead(Head):
    """LUCIR's head: the cosine between features and each row, times one learned scale."""

    def __init__(self, feature_dim: int, num_classes: int):
        super().__init__(feature_dim, num_classes, bias=False)
        self.sigma = nn.Parameter(torch.ones(1))

    def cosine(self, x: Tensor) -> Tensor:
        """Cosines (B, num_classes) without the scale."""
        rows = self.weight
        # Not in bf16: there, cosines near 1 are multiples of 1/256, and times the scale too coarse for a margin loss.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(F.normalize(x.to(rows.dtype), dim=1), F.normalize(rows, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.sigma * self.cosine(x)

    @torch.no_grad()
    def imprint(self, new_rows: Tensor) -> None:
        """Set the weights of the latest part to `new_rows` (the mean normalised features of its classes), each scaled
        to the mean length of the older rows, as LUCIR does."""
        *old, new = self.linears
        assert old, "imprinting takes its length from older rows; grow the head first"
        if new_rows.shape != new.weight.shape:
            raise SettingError(f"new_rows is {tuple(new_rows.shape)}; expected {tuple(new.weight.shape)}")
        length = torch.cat([part.weight for part in old]).norm(dim=1).mean()
        new.weight.copy_(F.normalize(new_rows.to(new.weight), dim=1) * length)


class Classifier(nn.Module):
    """A backbone and its head. With the tail of a cut as its backbone, it is the F2 that reads feature maps."""

    def __init__(self, backbone: nn.Module, head: Head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def features(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
