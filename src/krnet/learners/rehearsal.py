"""What iCaRL and LUCIR share: exemplars of old classes, and the row "nme" (nearest mean of exemplars).

    images of the task + exemplars -> rehearsal_batches -> the subclass's loss
    end of a task: update_exemplars -> herding picks exemplars of its classes -> mean feature of each class
    images -> predict -> rows "cnn" (the head's logits) and "nme"

Citations and deviations: icarl.py and lucir.py; herding: exemplars.py; compressed exemplars: compressed_exemplars.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from krnet.coding.image_codec import CHANNELS, ImageEncoding, common_prefix, encode_images
from krnet.config import check_choice, check_int, parse_size, require
from krnet.errors import SettingError
from krnet.learners.base import Context, Learner, LearnerConfig
from krnet.learners.compressed_exemplars import CompressedExemplars, image_bytes, too_small
from krnet.learners.exemplars import Exemplars, class_means, class_starts, herd_classes, nearest_mean_scores
from krnet.nn.heads import Classifier
from krnet.train.classifier import ImageBatches, Images

PIXELS = "pixels"
FORMATS = (PIXELS, "jpeg", "webp")


@dataclass(frozen=True, kw_only=True)
class RehearsalConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "memory",
        "exemplars_per_class",
        "memory_total",
        "budget",
        "exemplar_format",
        "exemplar_quality",
        "nme_flip",
    }
    memory: str = "per-class"
    """Limit of the memory: per-class (exemplars_per_class, grows with the classes) or total (memory_total, fixed)."""
    exemplars_per_class: int = 20
    """Exemplars per class, if memory is per-class."""
    memory_total: int = 2000
    """Exemplars of all classes together, if memory is total: old classes drop exemplars as new classes arrive."""
    budget: int | None = None
    """Limit of all exemplars with their labels, in bytes or as 6.1MB. Replaces their number: as many as fit."""
    exemplar_format: str = PIXELS
    """How exemplars are stored: pixels, jpeg or webp. Compressed ones are trained on as they decode."""
    exemplar_quality: int = 90
    """Quality of jpeg and webp exemplars, 1 to 100: a lower one loses more of each image, and more images fit."""
    nme_flip: bool = True
    """Include mirrored exemplars in the NME means, if the data set may be mirrored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("memory", self.memory, ("per-class", "total"))
        check_choice("exemplar_format", self.exemplar_format, FORMATS)
        check_int("exemplar_quality", self.exemplar_quality, 1, 100)
        check_choice("nme_flip", self.nme_flip, (True, False))
        for name in ("exemplars_per_class", "memory_total"):
            check_int(name, getattr(self, name), 1)
        if self.budget is not None:
            object.__setattr__(self, "budget", parse_size(self.budget))
        if self.ce != "seen":
            raise SettingError(
                f"ce is {self.ce!r}; expected seen: exemplars are of old classes, which 'new' leaves out"
            )

    @classmethod
    def renewed(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        return {"exemplar_format": PIXELS, "exemplar_quality": cls.exemplar_quality, **super().renewed(saved)}

    @property
    def encoding(self) -> ImageEncoding | None:
        """How exemplars are compressed. None: they are not."""
        if self.exemplar_format == PIXELS:
            return None
        return ImageEncoding(codec=self.exemplar_format, quality=self.exemplar_quality)


class Rehearsal(Learner):
    """A learner that keeps exemplars, trains on them together with each task's images, and has a row "nme"."""

    config: RehearsalConfig
    # From LUCIR's repository, which uses them for iCaRL as well.
    large_images: ClassVar[Mapping[str, Any]] = {
        "base_epochs": 90,
        "epochs": 90,
        "drops": (1 / 3, 2 / 3),
        "weight_decay": 1e-4,
    }

    def __init__(self, context: Context, config: RehearsalConfig):
        super().__init__(context, config)
        self.num_classes = context.num_seen(context.split.num_tasks - 1)
        self.exemplars = self._no_exemplars()
        if config.budget is not None and config.encoding is not None:
            self._check_compressed_budget(config.budget, config.encoding)
        elif not self.num_per_class(self.num_classes):
            name = "memory_total" if config.budget is None else "budget"
            minimum = self.num_classes * (1 if config.budget is None else self.exemplar_bytes)
            raise SettingError(
                f"{name} is {getattr(config, name)}; expected at least {minimum}, for one exemplar of each of "
                f"{self.num_classes} classes"
            )
        self.means = torch.empty(0, device=self.device)

    def _no_exemplars(self) -> Exemplars:
        shape, encoding = self.context.data.image_shape, self.config.encoding
        if encoding is None:
            return Exemplars.none(shape, self.device)
        require("PIL.Image", "images")
        if shape[0] not in CHANNELS:
            raise SettingError(
                f"exemplar_format is {encoding.codec!r}, and the images have {shape[0]} channels; expected pixels, or "
                f"images of {' or '.join(map(str, CHANNELS))} channels"
            )
        return CompressedExemplars.empty(shape, self.device, encoding)

    def _check_compressed_budget(self, budget: int, encoding: ImageEncoding) -> None:
        """Refuse a budget, before any training, if an image of each class takes more than that.

        Exemplars are chosen after a task is trained: the size of the smallest of a few images stands for theirs. So a
        budget that is a little too small is refused later, when the exemplars are chosen.
        """
        ids = self.context.task_ids(0)
        labels, order = self.context.train_labels[ids].sort(stable=True)
        first_of_class = ids[order[class_starts(labels).unique()]]
        first = encode_images(self.context.train.pixels[first_of_class.to(self.device)], encoding)
        needed = len(common_prefix(first)) + self.num_classes * min(image_bytes(first))
        if budget < needed:
            raise too_small(budget, needed, self.num_classes)

    def frozen_copy(self) -> Classifier:
        """Copy the current model, as the teacher of the distillation."""
        return copy.deepcopy(self.model).eval().requires_grad_(False)

    def rehearsal_batches(self) -> ImageBatches:
        """Batches of the current task's images and all exemplars."""
        c, context = self.config, self.context
        ids, seed = context.task_ids(self.task), context.seed_for(self.task)
        images, labels = context.train, context.train_labels
        return self.exemplars.batches_with(
            images, labels, ids, c.batch_size, seed, augmented=c.augment, transform=self.transform
        )

    @property
    def exemplar_bytes(self) -> int:
        pixels, labels = self.exemplars.pixels, self.exemplars.labels
        return math.prod(pixels.shape[1:]) * pixels.element_size() + labels.element_size()

    def num_per_class(self, num_seen: int) -> int:
        """Exemplars to keep of each class after `num_seen` classes, unless a budget limits compressed ones."""
        c = self.config
        if c.budget is not None:
            return c.budget // (self.exemplar_bytes * self.num_shares(num_seen))
        return c.exemplars_per_class if c.memory == "per-class" else c.memory_total // num_seen

    def num_shares(self, num_seen: int) -> int:
        """Classes that share the budget after `num_seen` classes."""
        return num_seen if self.config.memory == "total" else self.num_classes

    def update_exemplars(self) -> None:
        """At the end of a task: choose exemplars of its classes, drop some of older classes, compute all means."""
        context, budget, kept = self.context, self.config.budget, self.exemplars
        num_seen, ids = context.num_seen(self.task), context.task_ids(self.task)
        features = self.apply(self.model.features, context.train, ids)
        labels, ids = context.train_labels[ids].to(self.device), ids.to(self.device)
        if budget is not None and isinstance(kept, CompressedExemplars):
            ranked = herd_classes(features, labels, len(ids))
            shares, pixels = self.num_shares(num_seen), context.train.pixels
            self.exemplars = kept.append_within(budget, shares, pixels, ids[ranked], labels[ranked])
        else:
            per_class = self.num_per_class(num_seen)
            chosen = herd_classes(features, labels, per_class)
            pixels = context.train.pixels[ids[chosen]]
            self.exemplars = kept.truncate(per_class).append(pixels, labels[chosen])
        self.means = self._exemplar_means()

    def _exemplar_means(self) -> Tensor:
        images = Images(self.context.data, self.exemplars.pixels, self.device)
        rows, labels = torch.arange(len(images)), self.exemplars.labels
        features = self.apply(self.model.features, images, rows)
        if self.config.nme_flip and self.context.data.flip:
            mirrored = self.apply(lambda x: self.model.features(x.flip(-1)), images, rows)
            features, labels = torch.cat([features, mirrored]), labels.repeat(2)
        return class_means(features, labels, self.context.num_seen(self.task))

    def predict(self, images: Tensor) -> dict[str, Tensor]:
        features = self.model.features(images)
        scores = self.class_scores(self.model.head(features))
        return {"cnn": scores, "nme": nearest_mean_scores(features, self.means)}

    def extra_state(self) -> dict[str, Tensor]:
        return self.exemplars.tensors()

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.exemplars = self.exemplars.load(state)
        self.means = self._exemplar_means()

    def storage_bytes(self) -> dict[str, int]:
        return self.exemplars.storage_bytes()
