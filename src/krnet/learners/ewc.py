"""Elastic weight consolidation: hold the parameters that the Fisher information F marks as important.

    F = mean over a task's images of (d log p(label | image) / d parameter)^2
    loss = cross entropy + lambda / 2 * sum of F * (parameter - anchor)^2

Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (2017). No old images are kept, and nothing
in the loss compares old classes with new ones, so in class-incremental learning EWC is only a little above fine-tuning.

The defaults are those of PyCIL, converted to our scale: true labels, cross entropy over the new
logits, all parameters including the head's old rows, Fishers of tasks averaged with their numbers of classes as
weights. PyCIL squares the mean gradient of 128 images, which is about 1/128 of the mean square used here. It does so in
train mode, where gradients also pass through the batch statistics and convolutions get less than half of the Fisher.
Together that is a factor of about 300: its lambda 1000 and limit 1e-4 become 3 and 0.03. A Fisher that is computed in
another way needs other values.

Lambda is 30, ten times that of PyCIL, because it makes the stronger rival. Ten tasks of CIFAR-100 end at 8.5 % and
average 31.1; with PyCIL's 3 it is 4.7 and 14.4, with fine-tuning 4.5 and 12.5 (recipe `learn`, commits `9cc1c55` and
`f1b6632`). A larger lambda freezes the network. That scores higher when half of the classes are in the base task, but
it is another method.

Why only the new logits: with all logits, every step pushes the old logits down, since no image of an old class holds
them up, and the penalty does little against it.

Deviations from PyCIL:
- Gradients are computed per image, in eval mode, on images without augmentation.
- F uses the logits that the task trained on, not all logits.
- lambda * F is at most 1 / lr (importance.py).
- All tasks have the same schedule and weight decay, those of the other learners here.
labels="predicted", scope="backbone" and merge="half" are the choices of FACIL, except that FACIL applies no weight
decay to its old heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from krnet.config import check_choice
from krnet.learners.base import PAPER_PRESET, register
from krnet.learners.importance import ImportanceConfig, ImportanceLearner


@dataclass(frozen=True, kw_only=True)
class EwcConfig(ImportanceConfig):
    later = ImportanceConfig.later | {
        "labels",
    }
    ce: str = "new"
    """Classes whose logits enter the cross entropy and the Fisher: new (those of the current task) or seen (all)."""
    strength: float = 30_000.0  # chosen on held-out images: recipe choose-strength
    """Lambda in the penalty lambda / 2 * sum of Fisher * (parameter - anchor)^2."""
    clip: float = 0.03
    """Limit of the Fisher of a parameter in one task; 0: no limit."""
    labels: str = "true"
    """Labels of the Fisher: true (the empirical Fisher) or predicted (the network's answer)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("labels", self.labels, ("true", "predicted"))


@register
class Ewc(ImportanceLearner):
    name = "ewc"
    config_class = EwcConfig
    config: EwcConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {**PAPER_PRESET, "strength": 30.0}}

    def objective(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Negative log likelihood over the logits that the task trained on, summed over images."""
        first = self.num_old_outputs if self.config.ce == "new" else 0
        trained_logits = logits[:, first:]
        labels = trained_logits.argmax(1) if self.config.labels == "predicted" else labels - first
        return F.cross_entropy(trained_logits, labels, reduction="sum")

    def magnitude(self, gradients: Tensor) -> Tensor:
        return gradients.square()
