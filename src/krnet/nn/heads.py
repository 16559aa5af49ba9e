"""Residual networks for class-incremental learning, their classifiers, and the cut into trunk (F1) and head (F2).

    images (B, 3, H, W) -> stem -> blocks -> maps (B, C, h, w) -> blocks -> mean -> features (B, D) -> head -> logits
                           '-- trunk F1 --'                       '--- tail ---'
                                                                  '-------- F2 = Classifier(tail, head) -----'

`build` makes a backbone by name, `cut` splits it after so many layers. Trunk and tail are the backbone's own modules,
not copies of them: what trains one trains the other.

He et al., "Deep Residual Learning for Image Recognition" (2016); the cosine head and the missing last ReLU are Hou et
al., "Learning a Unified Classifier Incrementally via Rebalancing" (LUCIR, 2019). Convolutions start as LUCIR's do, also
in the small-image ResNet-18, where GFR keeps PyTorch's default. iCaRL's own ResNet-32, which pads channels on both
sides, is not among them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_int
from krnet.errors import SettingError


class Head(nn.Module):
    """One row of weights per class, in one part per task.

    Parts keep their names and shapes as the head grows: old rows can be frozen or left out of an optimizer, and an
    importance measured for them (EWC, MAS) still fits.
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
        """Add a part for so many new classes; the other parts stay as they are.

        Drawn on the CPU, so that every device gets the same numbers. An optimizer made before does not know it.
        """
        check_int("num_new", num_new, 1)
        part = nn.Linear(self.feature_dim, num_new, bias=self.has_bias)
        self.parts.append(part.to(self.linears[0].weight) if len(self.parts) else part)

    def freeze_old(self) -> None:
        """Only the latest part trains on."""
        for part in self.linears[:-1]:
            part.requires_grad_(False)


class LinearHead(Head):
    """features (B, feature_dim) -> logits (B, num_classes)."""

    def __init__(self, feature_dim: int, num_classes: int):
        super().__init__(feature_dim, num_classes, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        # One product over all parts: one per task would be a dozen kernels in the training step.
        return F.linear(x, self.weight, torch.cat([part.bias for part in self.linears]))


class CosineHead(Head):
    """LUCIR's: the cosine between features and each row, times one learned scale."""

    def __init__(self, feature_dim: int, num_classes: int):
        super().__init__(feature_dim, num_classes, bias=False)
        self.sigma = nn.Parameter(torch.ones(1))

    def cosine(self, x: Tensor) -> Tensor:
        """Cosines (B, num_classes) without the scale."""
        rows = self.weight
        # In bf16 cosines near 1 come in steps of 1/256, which the scale enlarges: too coarse for a margin.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(F.normalize(x.to(rows.dtype), dim=1), F.normalize(rows, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.sigma * self.cosine(x)

    @torch.no_grad()
    def imprint(self, new_rows: Tensor) -> None:
        """Start the latest part from these rows (the mean normalised features of its classes), each brought to the
        mean length of the rows before, as LUCIR does."""
        *old, new = self.linears
        assert old, "imprinting takes its length from older rows; grow the head first"
        if new_rows.shape != new.weight.shape:
            raise SettingError(f"new_rows is {tuple(new_rows.shape)}; expected {tuple(new.weight.shape)}")
        length = torch.cat([part.weight for part in old]).norm(dim=1).mean()
        new.weight.copy_(F.normalize(new_rows.to(new.weight), dim=1) * length)


class Classifier(nn.Module):
    """A backbone and its head; with the tail of a cut in the backbone's place, the F2 that reads feature maps."""

    def __init__(self, backbone: nn.Module, head: Head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def features(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
