"""iCaRL: exemplars chosen by herding, distillation of the old logits, and the nearest mean of exemplars as classifier.

Rebuffi, Kolesnikov, Sperl and Lampert, "iCaRL: Incremental Classifier and Representation Learning" (CVPR 2017).

    task > 0:  images of the task + exemplars -> CE over all classes + beta T^2 KL(old logits || logits of old classes)
    after it:  herding picks exemplars of the new classes; means of all exemplars' features -> row "nme"

Reference setting: the iCaRL of LUCIR's repository (Hou et al. 2019), the source of the iCaRL-CNN and iCaRL-NME rows of
LUCIR-style tables: CE and KL (T 2, beta 0.25, mean over the batch) in place of iCaRL's own sigmoids, 160 epochs for
every task, lr 0.1 falling tenfold at half and three quarters, weight decay 5e-4, batch 128, 20 exemplars per class,
ResNet-32 with shortcut B and last ReLU. iCaRL's own: 2,000 exemplars in all (memory="total"), lr 2 for 70 epochs.

Deviations from that implementation:
- NME means take in the exemplars mirrored left to right. The reference meant to, and reversed the colour channels
  (its images have channels last). iCaRL's own code mirrors them. Off where the data set may not be mirrored.
- Herding never chooses an image twice (exemplars.py).
- memory="total" keeps floor(total / classes seen) of each class; the reference rounds up and so may exceed the total.
- Epochs are laid end to end: no short batch at the end of each.
- Test features are brought to unit length before distances are taken: the same nearest mean, since means are unit long.

Stored between tasks: the exemplars' pixels and labels. Their means follow from them and the current network, and are
computed again when a run is taken up.

Rehearsal, the part without a loss, is what LUCIR builds on, too.
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
    """Weight of the distillation, which is then multiplied by temperature squared; 0: no distillation."""
    temperature: float = 2.0
    """What logits are divided by for the distillation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0)
        check_range("temperature", self.temperature, 1e-3)


def distillation(logits: Tensor, old_logits: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(old / T) || softmax(logits / T)), mean over the batch."""
    target = F.softmax(old_logits.float() / temperature, dim=1)
    found = F.log_softmax(logits.float() / temperature, dim=1)
    return F.kl_div(found, target, reduction="batchmean") * temperature**2


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
        self.remember()

    def _later_work(self, old: Classifier) -> Work:
        beta, temperature, num_old = self.config.beta, self.config.temperature, old.head.num_classes

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            logits = self.model(images)
            value = self.classification(logits, labels)
            if beta:
                value = value + beta * distillation(logits[:, :num_old], old(images), temperature)
            return value

        return self.descent("classifier", self.rehearsal(), loss)
