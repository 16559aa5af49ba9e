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

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from krnet.config import check_choice, check_int
from krnet.errors import SettingError
from krnet.learners.base import Context, Learner, LearnerConfig
from krnet.learners.exemplars import Exemplars, class_means, herd_classes, nearest
from krnet.nn.heads import Classifier
from krnet.train.classifier import ImageBatches, Images


@dataclass(frozen=True, kw_only=True)
class RehearsalConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "memory",
        "exemplars_per_class",
        "memory_total",
        "budget",
        "nme_flip",
    }
    memory: str = "per-class"
    """Which number limits the exemplars: per-class (exemplars_per_class, growing) or total (memory_total, fixed)."""
    exemplars_per_class: int = 20
    """Exemplars of every class, with memory per-class."""
    memory_total: int = 2000
    """Exemplars of all classes together, with memory total: every class gives up its last ones as others come."""
    budget: int | None = None
    """Most bytes of exemplars, their labels included: as many as fit, instead of the number that memory names."""
    nme_flip: bool = True
    """Means of exemplars take in their mirror images, where the data set may be mirrored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("memory", self.memory, ("per-class", "total"))
        check_choice("nme_flip", self.nme_flip, (True, False))
        for name in ("exemplars_per_class", "memory_total"):
            check_int(name, getattr(self, name), 1)
        if self.budget is not None:
            check_int("budget", self.budget, 1)
        if self.ce != "seen":
            raise SettingError(
                f"ce is {self.ce!r}; expected seen: exemplars are of old classes, which 'new' leaves out"
            )


class Rehearsal(Learner):
    """A learner that keeps exemplars, trains on them beside each task's images, and has a row "nme"."""

    config: RehearsalConfig
    # LUCIR's repository has them for iCaRL, too.
    large_images: ClassVar[Mapping[str, Any]] = {
        "base_epochs": 90,
        "epochs": 90,
        "drops": (1 / 3, 2 / 3),
        "weight_decay": 1e-4,
    }

    def __init__(self, context: Context, config: RehearsalConfig):
        super().__init__(context, config)
        self.exemplars = Exemplars.none(context.data.image_shape, self.device)
        self.num_classes = context.num_seen(context.split.num_tasks - 1)
        if not self.per_class(self.num_classes):
            name = "memory_total" if config.budget is None else "budget"
            least = self.num_classes * (1 if config.budget is None else self.exemplar_bytes)
            raise SettingError(
                f"{name} is {getattr(config, name)}; expected at least {least}, for one exemplar of each of "
                f"{self.num_classes} classes"
            )
        self.means = torch.empty(0, device=self.device)

    def frozen_copy(self) -> Classifier:
        """The model as it is, to distil from."""
        return copy.deepcopy(self.model).eval().requires_grad_(False)

    def rehearsal(self) -> ImageBatches:
        """Images of the current task and the exemplars of those before."""
        c, context = self.config, self.context
        ids, seed = context.task_ids(self.task), context.seed_for(self.task)
        return self.exemplars.joined(context.train, context.train_labels, ids, c.batch_size, seed, augmented=c.augment)

    @property
    def exemplar_bytes(self) -> int:
        pixels, labels = self.exemplars.pixels, self.exemplars.labels
        return math.prod(pixels.shape[1:]) * pixels.element_size() + labels.element_size()

    def per_class(self, num_seen: int) -> int:
        """Exemplars of each class, when so many have been seen."""
        c = self.config
        if c.budget is not None:
            return c.budget // (self.exemplar_bytes * (num_seen if c.memory == "total" else self.num_classes))
        return c.exemplars_per_class if c.memory == "per-class" else c.memory_total // num_seen

    def remember(self) -> None:
        """At the end of a task: exemplars of its classes, fewer of the others if need be, and everybody's means."""
        context = self.context
        per_class = self.per_class(context.num_seen(self.task))
        ids = context.task_ids(self.task)
        features = self.apply(self.model.features, context.train, ids)
        labels = context.train_labels[ids].to(self.device)
        chosen = herd_classes(features, labels, per_class)
        pixels = context.train.pixels[ids.to(self.device)[chosen]]
        self.exemplars = self.exemplars.shrunk(per_class).extended(pixels, labels[chosen])
        self.means = self._means()

    def _means(self) -> Tensor:
        images = Images(self.context.data, self.exemplars.pixels, self.device)
        places, labels = torch.arange(len(images)), self.exemplars.labels
        features = self.apply(self.model.features, images, places)
        if self.config.nme_flip and self.context.data.flip:
            mirrored = self.apply(lambda x: self.model.features(x.flip(-1)), images, places)
            features, labels = torch.cat([features, mirrored]), labels.repeat(2)
        return class_means(features, labels, self.context.num_seen(self.task))

    def predict(self, images: Tensor) -> dict[str, Tensor]:
        features = self.model.features(images)
        return {"cnn": self.model.head(features), "nme": nearest(features, self.means)}

    def extra_state(self) -> dict[str, Tensor]:
        return {"exemplars": self.exemplars.pixels, "exemplar_labels": self.exemplars.labels}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.exemplars = Exemplars(state["exemplars"].to(self.device), state["exemplar_labels"].to(self.device))
        self.means = self._means()

    def storage_bytes(self) -> dict[str, int]:
        return self.exemplars.storage_bytes()
