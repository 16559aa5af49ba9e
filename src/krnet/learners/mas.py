"""Memory aware synapses: hold the parameters to which the network's output is sensitive.

    importance = mean over a task's images of |d ||logits||^2 / d parameter|, summed over tasks
    loss = cross entropy + lambda / 2 * sum of importance * (parameter - anchor)^2

Aljundi et al., "Memory Aware Synapses: Learning what (not) to forget" (2018), the global version. The importance needs
no labels. Like EWC it keeps no old images, and its accuracy is low in class-incremental learning.

The importance is that of the original: the squared length of the logits of all classes seen, in eval mode, for all
parameters, summed over tasks. squared=False, merge="half" and scope="backbone" are the choices of FACIL, except that
FACIL applies no weight decay to its old heads. As in FACIL the cross entropy covers the new logits only; ewc.py says
why.

Deviations:
- The absolute value is taken of each image's gradient, as in the paper; the original code first sums over a batch.
- lambda * importance is at most 1 / lr (importance.py).
- lambda is 1e-3. The original's 1 (2 in our form, which halves it) was meant for AlexNet at a small learning rate. The
  importance grows with the square of the logits: in a ResNet of 50 classes it is 1 to 100 and more, a thousand times
  that of EWC, and lambda 1 would freeze the network. With 1e-3 the pull on a convolution is about as strong as in EWC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from krnet.config import check_choice
from krnet.learners.base import PAPER_PRESET, register
from krnet.learners.importance import ImportanceConfig, ImportanceLearner


@dataclass(frozen=True, kw_only=True)
class MasConfig(ImportanceConfig):
    later = ImportanceConfig.later | {
        "squared",
    }
    ce: str = "new"
    """Classes whose logits enter the cross entropy: new (those of the current task) or seen (all so far)."""
    strength: float = 10.0  # chosen on held-out images: recipe choose-strength
    """Lambda in the penalty lambda / 2 * sum of importance * (parameter - anchor)^2. The default fits squared=True."""
    merge: str = "sum"
    """How importances of tasks combine: sum, average (weighted by classes) or half (0.5 old + 0.5 new)."""
    squared: bool = True
    """Take gradients of the squared length of the logits; else of the length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("squared", self.squared, (True, False))


@register
class Mas(ImportanceLearner):
    name = "mas"
    config_class = MasConfig
    config: MasConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {**PAPER_PRESET, "strength": 1e-3}}

    def objective(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Length of the logits of all classes seen, squared by default. The labels are not used."""
        squared_lengths = logits.square().sum(1)
        return (squared_lengths if self.config.squared else squared_lengths.sqrt()).sum()

    def magnitude(self, gradients: Tensor) -> Tensor:
        return gradients.abs()
