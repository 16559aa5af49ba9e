"""LUCIR, also called Rebalance: a cosine classifier, features that keep their direction, and a margin for old classes.

Hou, Pan, Loy, Wang and Lin, "Learning a Unified Classifier Incrementally via Rebalancing" (CVPR 2019).

    base task:   CE on sigma * cosine(features, class rows)
    task > 0:    imprint the rows of new classes and fix the rows of old ones; on images of the task + exemplars:
                 CE over all classes
                 + lambda * mean(1 - cosine(features, features of the old network)),  lambda = 5 sqrt(|old| / |new|)
                 + mean over exemplars and their 2 nearest new classes of max(0, 0.5 - cosine to own + cosine to new)
    afterwards:  herding picks exemplars; rows "cnn" and "nme", as for iCaRL

Reference: the CIFAR-100 script of the authors' repository; the paper reports an average of 60.18 for 50 + 10 x 5
classes. SGD, 160 epochs for every task, lr 0.1 divided by 10 at half and three quarters, weight decay 5e-4, batch 128,
20 exemplars per class, which are not oversampled, ResNet-32 with shortcut B and no last ReLU. There is no
class-balanced fine-tuning; the authors use it for ImageNet only. Their ImageNet-Subset: backbone=resnet18, 90 epochs,
drops at one and two thirds, weight_decay=1e-4, less_forget=10.

Deviations from the reference:
- Fixing the old rows has its own switch; in the reference it is tied to the less-forget loss. Fixed rows are left out
  of the optimizer; the reference includes them with learning rate and decay 0, which has the same effect.
- NME means, herding, memory="total" and epoch boundaries are as in icarl.py.
- A task with a single new class uses that class for the margin; the reference needs two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.config import check_choice, check_int, check_range
from krnet.learners.base import EVALUATION_BATCH, Work, register
from krnet.learners.exemplars import class_means
from krnet.learners.rehearsal import Rehearsal, RehearsalConfig
from krnet.nn.heads import Classifier, CosineHead


@dataclass(frozen=True, kw_only=True)
class LucirConfig(RehearsalConfig):
    later = RehearsalConfig.later | {
        "less_forget",
        "adapt_lambda",
        "margin",
        "margin_distance",
        "margin_classes",
        "imprint",
        "freeze_old",
    }
    last_relu: bool = False
    """End the last block in a ReLU. Without it features may be negative, so cosines use the full range."""
    less_forget: float = 5.0
    """Weight lambda of the less-forget loss; 0 turns it off."""
    adapt_lambda: bool = True
    """Multiply less_forget by sqrt(old classes / new classes)."""
    margin: float = 1.0
    """Weight of the margin ranking loss; 0 turns it off."""
    margin_distance: float = 0.5
    """Margin: how much larger an exemplar's cosine to its own class should be than its cosine to a new class."""
    margin_classes: int = 2
    """Number of nearest new classes that each exemplar is ranked against."""
    imprint: bool = True
    """Initialise the rows of new classes with the mean features of their images."""
    freeze_old: bool = True
    """Do not train the rows of old classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("adapt_lambda", "imprint", "freeze_old"):
            check_choice(name, getattr(self, name), (True, False))
        for name in ("less_forget", "margin", "margin_distance"):
            check_range(name, getattr(self, name), 0)
        check_int("margin_classes", self.margin_classes, 1)


def less_forget(features: Tensor, old_features: Tensor) -> Tensor:
    """Mean over the batch of 1 - cosine(features, features of the old network)."""
    return 1 - F.cosine_similarity(features.float(), old_features.float()).mean()


def margin_ranking(cosines: Tensor, labels: Tensor, num_old: int, distance: float, num_rivals: int) -> Tensor:
    """Mean of max(0, distance - cosine to own class + cosine to new class).

    The mean is over the samples of old classes and the `num_rivals` nearest new classes of each; 0 if the batch has no
    sample of an old class.
    """
    own = cosines.gather(1, labels[:, None])  # (B, 1)
    rivals = cosines[:, num_old:].topk(min(num_rivals, cosines.shape[1] - num_old), dim=1).values  # (B, rivals)
    terms = F.relu(distance - own + rivals).mean(1)  # (B,)
    # Mask rows instead of selecting them: shapes inside a CUDA graph cannot depend on the labels.
    is_old = (labels < num_old).to(terms)
    return (terms * is_old).sum() / is_old.sum().clamp(min=1)


@register
class Lucir(Rehearsal):
    name = "lucir"
    config_class = LucirConfig
    config: LucirConfig
    large_images: ClassVar[Mapping[str, Any]] = {**Rehearsal.large_images, "less_forget": 10.0}
    head_class = CosineHead

    def learn(self, task: int) -> Iterator[Work]:
        old = self.frozen_copy()
        self.expand(task)
        if task > 0:
            if self.config.imprint:
                self._imprint()
            if self.config.freeze_old:
                self.model.head.freeze_old()
        yield self.base_work() if task == 0 else self._later_work(old)
        self.update_exemplars()

    def less_forget_weight(self) -> float:
        """Lambda of the current task. With 50 base classes and 5 tasks of 10 it rises from 11.18 to 15.00."""
        new = len(self.context.new_classes(self.task))
        old = self.context.num_seen(self.task) - new
        return self.config.less_forget * (math.sqrt(old / new) if self.config.adapt_lambda else 1.0)

    @torch.no_grad()
    def _imprint(self) -> None:
        head, features, labels = self.model.head, [], []
        assert isinstance(head, CosineHead)
        for ids in self.context.task_ids(self.task).split(EVALUATION_BATCH):
            images, outputs = self.transformed(ids)
            features.append(self.model.features(images))
            labels.append(outputs - self.num_old_outputs)
        new_rows = head.linears[-1].weight
        means = class_means(torch.cat(features), torch.cat(labels), len(new_rows))
        # `transform` may leave an output without images: its row keeps its direction, as a row of 0 has none.
        head.imprint(torch.where(means.any(1, keepdim=True), means, new_rows))

    def _later_work(self, old: Classifier) -> Work:
        c, model, num_old, head = self.config, self.model, old.head.num_classes, self.model.head
        assert isinstance(head, CosineHead)
        weight = self.less_forget_weight()

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            features = model.features(images)
            cosines = head.cosine(features)
            value = self.classification_loss(head.sigma * cosines, labels)
            if weight:
                value = value + weight * less_forget(features, old.features(images))
            if c.margin:
                ranking = margin_ranking(cosines, labels, num_old, c.margin_distance, c.margin_classes)
                value = value + c.margin * ranking
            return value

        return self.descent("classifier", self.rehearsal_batches(), loss)
