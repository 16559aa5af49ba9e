"""iCaRL: keep exemplars chosen by herding, distil the old logits, and classify by the nearest mean of exemplars (NME).

Rebuffi, Kolesnikov, Sperl and Lampert, "iCaRL: Incremental Classifier and Representation Learning" (CVPR 2017).

    task > 0:   images of the task + exemplars -> CE over all classes + beta T^2 KL(old logits || logits of old classes)
    afterwards: herding picks exemplars of the new classes; mean features of all exemplars -> row "nme"

Reference: the iCaRL in LUCIR's repository (Hou et al. 2019), where the iCaRL-CNN and iCaRL-NME rows of most tables come
from. It replaces iCaRL's sigmoids by CE and KL (T 2, beta 0.25, mean over the batch). 160 epochs for every task, lr 0.1
divided by 10 at half and three quarters, weight decay 5e-4, batch 128, 20 exemplars per class, ResNet-32 with shortcut
B and a last ReLU. The original paper has 2,000 exemplars in total (memory="total") and lr 2 for 70 epochs.

Deviations from the reference:
- Each NME mean includes the exemplars mirrored left to right, as in iCaRL's own code. The reference intends the same
  but reverses the colour channels, since its images are channels-last. Data sets that may not be mirrored are not.
- Herding never chooses an image twice (exemplars.py).
- memory="total" keeps floor(total / classes seen) exemplars per class. The reference rounds up, past the total.
- Batches run across epoch boundaries: no epoch ends in a short batch.
- Test features are scaled to unit length before distances are computed. The means have unit length, so the nearest mean
  stays the same.

Stored between tasks: the exemplars, as pixels or compressed, and their labels. The means are computed from them and the
current network, also when a run is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from krnet.config import check_range
from krnet.learners.base import Work, register
from krnet.learners.rehearsal import Rehearsal, RehearsalConfig
from krnet.nn.heads import Classifier


@dataclass(frozen=True, kw_only=True)
class IcarlConfig(RehearsalConfig):
    later = RehearsalConfig.later | {
        "beta",
        "temperature",
    }
    beta: float = 0.25
    """Weight of the distillation loss beta * temperature^2 * KL; 0 turns it off."""
    temperature: float = 2.0
    """Divisor of the logits in the distillation loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0)
        check_range("temperature", self.temperature, 1e-3)


def distillation(logits: Tensor, old_logits: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(old / T) || softmax(logits / T)), mean over the batch."""
    target = F.softmax(old_logits.float() / temperature, dim=1)
    log_probs = F.log_softmax(logits.float() / temperature, dim=1)
    return F.kl_div(log_probs, target, reduction="batchmean") * temperature**2


@register
class Icarl(Rehearsal):
    name = "icarl"
    config_class = IcarlConfig
    config: IcarlConfig
    main_row = "nme"

    def learn(self, task: int) -> Iterator[Work]:
        old = self.frozen_copy()
        self.expand(task)
        yield self.base_work() if task == 0 else self._later_work(old)
        self.update_exemplars()

    def _later_work(self, old: Classifier) -> Work:
        beta, temperature, num_old = self.config.beta, self.config.temperature, old.head.num_classes

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            logits = self.model(images)
            value = self.classification_loss(logits, labels)
            if beta:
                value = value + beta * distillation(logits[:, :num_old], old(images), temperature)
            return value

        return self.descent("classifier", self.rehearsal_batches(), loss)
