"""Memory aware synapses: parameters to which the network's output is sensitive are held where they were.

    importance = mean over a task's images of |d ||logits||^2 / d parameter|, summed over tasks
    loss = cross entropy + lambda / 2 * sum of importance * (parameter - anchor)^2

Aljundi et al., "Memory Aware Synapses: Learning what (not) to forget" (2018), the global version. No labels are needed
to measure it. Like EWC it keeps no old image, and ends low in class-incremental learning.

The importance is the original's: squared length of the logits of all classes seen, eval mode, added up over tasks, for
all parameters. squared=False, merge="half" and scope="backbone" are FACIL's, but that weight decay spares its old
heads. Cross entropy over the new logits as FACIL's, for the reason given in ewc.py.

Deviations: gradients by image before the absolute value is taken, as in the paper, where the original's code adds up a
batch first; lambda * importance is at most 1 / lr (_importance.py); lambda. The original's 1 (2 in our form, which
halves) was for AlexNet at a small learning rate. The importance grows with the square of the logits, and in a ResNet of
50 classes it is 1 to 100 and more, a thousand times EWC's: lambda 1 would freeze the network. 1e-3 brings the pull on a
convolution to the order of EWC's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from krnet.config import check_choice
from krnet.learners.base import register
from krnet.learners.importance import ImportanceConfig, ImportanceLearner


@dataclass(frozen=True, kw_only=True)
class MasConfig(ImportanceConfig):
    later = ImportanceConfig.later | {
        "squared",
    }
    ce: str = "new"
    """Cross entropy over the logits of the new classes only, or of all seen: new or seen."""
    strength: float = 1e-3
    """Lambda: weight of the penalty, lambda / 2 * sum of importance * (parameter - anchor)^2; fits squared=True."""
    merge: str = "sum"
    """Importances of several tasks: sum, average (weighted by classes) or half (of the old and of the new)."""
    squared: bool = True
    """Gradients of the squared length of the logits, or of the length itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("squared", self.squared, (True, False))


@register
class Mas(ImportanceLearner):
    name = "mas"
    config_class = MasConfig
    config: MasConfig

    def objective(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Length of the logits of all classes seen; labels play no part."""
        lengths = logits.square().sum(1)
        return (lengths if self.config.squared else lengths.sqrt()).sum()

    def magnitude(self, gradients: Tensor) -> Tensor:
        return gradients.abs()
