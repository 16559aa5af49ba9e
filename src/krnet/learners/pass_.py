"""PASS: keep one prototype of each class, and replay it with noise; learn rotated images as classes of their own.

Zhu, Zhang, Wang, Yin and Liu, "Prototype Augmentation and Self-Supervision for Incremental Learning" (CVPR 2021).

    images -> each turned by 0, 90, 180 and 270 degrees -> features -> head: 4 outputs a class, of which class c turned
              n times has output 4 c + n
    base task:   CE(logits / 0.1)
    task > 0:    CE(logits / 0.1) over all outputs, on new images
                 + 10 * CE(head(prototype + radius * noise) / 0.1), on old classes drawn at random
                 + 10 * |f - f_old|, the distance of the new images' features to those of the network before this task;
                   the norm over the whole batch, not squared
    afterwards:  the prototype of each new class is the mean feature of its upright images
    test image:  the upright output of each class

The radius is measured once, after the base task: radius^2 is the variance of a feature around its prototype, averaged
over features and base classes.

Reference: the authors' code for CIFAR-100, by default with our ResNet-32. Adam, learning rate 1e-3, weight decay 2e-4,
101 epochs for every task, batches of 64 images (256 turned ones) and as many prototypes. Its learning rate falls to a
tenth after 44 and 89 epochs: the scheduler is stepped before the first epoch. Pass.presets["own"] has the reference's
ResNet-18.

Digits, and other images that may not be mirrored, are not turned, as in base_task.py: one output a class.

With another base task than the method's own (`base`) all four rows of a class are taken from it if it was trained with
rotations. They were trained without the division by 0.1, and so are multiplied by it: the probabilities of the base
classes stay what they were.

Deviations from the reference:
- No colour jitter. Images are cropped and mirrored alone, as for the other learners.
- Prototypes and radius are those of all training images as they are. In the reference they are those of cropped and
  mirrored images, without the last, incomplete batch.
- The network sees each batch once. In the reference it sees it twice, for logits and for features, so its BatchNorm
  statistics are updated twice.
- Batches run across epoch boundaries. In the reference the last batch of each epoch is smaller.
- For images above 96 pixels the authors train the base task by SGD for 160 epochs and average standard deviations for
  the radius. Here only their temperature of 1 and their drops after 45 and 90 of 100 epochs are taken.
- Convolutions are initialised as in the other learners. On a GPU the backbone computes in bf16, the head in fp32: in
  bf16, logits that are divided by 0.1 would be too coarse.

Stored between tasks: the prototypes and the radius. The network before a task is the current classifier.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.config import check_choice, check_range
from krnet.errors import SettingError
from krnet.learners.base import PAPER_PRESET, Context, Learner, LearnerConfig, Work, num_bytes, register
from krnet.learners.base_task import NUM_TURNS, PAPER
from krnet.train.classifier import Descent, ImageBatches, step_rng


@dataclass(frozen=True, kw_only=True)
class PassConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "prototype_weight",
        "distillation",
    }
    base_epochs: int = 101
    """Epochs of the base task."""
    epochs: int = 101
    """Epochs of every later task."""
    batch_size: int = 64
    """Images per update, each in all its rotations; in later tasks also as many prototypes."""
    base_lr: float = 1e-3
    """Learning rate of the base task."""
    lr: float = 1e-3
    """Learning rate of every later task."""
    drops: tuple[float, ...] = (0.4356, 0.8812)
    """Fractions of the training of a task after which the learning rate is multiplied by decay: 44 and 89 of 101
    epochs."""
    weight_decay: float = 2e-4
    """Weight decay."""
    optimizer: str = "adam"
    """Optimizer: sgd or adam."""
    rotations: bool = True
    """Learn each image also turned by 90, 180 and 270 degrees, as classes of their own. Images that may not be mirrored
    are never turned."""
    temperature: float = 0.1
    """Divisor of the logits in each cross entropy."""
    prototype_weight: float = 10.0
    """Weight of the cross entropy of prototypes with noise; 0: no prototypes are kept, and old classes are lost."""
    distillation: float = 10.0
    """Weight of the distance to the old network's features; 0 turns it off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rotations", self.rotations, (True, False))
        check_range("temperature", self.temperature, 1e-3)
        for name in ("prototype_weight", "distillation"):
            check_range(name, getattr(self, name), 0)


def turn_all(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each image in all four rotations, those of 90 degrees behind all upright ones, and so on; labels 4 c + n."""
    rows = torch.cat([images.rot90(n, (2, 3)) for n in range(NUM_TURNS)])
    if images.is_cuda:
        rows = rows.contiguous(memory_format=torch.channels_last)
    return rows, torch.cat([NUM_TURNS * labels + n for n in range(NUM_TURNS)])


def summarize_classes(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, float]:
    """The mean feature of each class (num_classes, D), and the root of the mean variance around these means."""
    parts = [features[labels == label] for label in range(num_classes)]
    means = torch.stack([part.mean(0) for part in parts])
    # A class of a single image has variance 0.
    variances = [float(part.sub(mean).square().sum()) / max(1, len(part) - 1) for part, mean in zip(parts, means)]
    return means, math.sqrt(sum(variances) / num_classes / features.shape[1])


class PrototypeBatches:
    """Batches of new images with their outputs, and of prototypes of old classes, moved by noise, with their classes.
    Every old class is drawn with the same probability."""

    def __init__(self, images: ImageBatches, prototypes: Tensor, radius: Tensor, num_drawn: int, seed: int):
        """num_drawn: prototypes per batch."""
        self.images, self.prototypes, self.radius = images, prototypes, radius
        self.num_drawn, self.seed = num_drawn, seed
        self.batch_size, self.num_samples = images.batch_size, images.num_samples

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        (num_old, dim), device = self.prototypes.shape, self.prototypes.device
        rng = step_rng(self.seed, iteration, device)
        noise = torch.randn(self.num_drawn, dim, generator=rng, device=device)
        old_classes = torch.randint(num_old, (self.num_drawn,), generator=rng, device=device)
        return noise, old_classes, *self.images.inputs(iteration)

    def tensors(self, noise: Tensor, old_classes: Tensor, *image_inputs: Tensor) -> tuple[Tensor, ...]:
        augmented = self.prototypes[old_classes] + self.radius * noise  # (num_drawn, D)
        return *self.images.tensors(*image_inputs), augmented, old_classes


@register
class Pass(Learner):
    name = "pass"
    config_class = PassConfig
    config: PassConfig
    large_images: ClassVar[Mapping[str, Any]] = {"temperature": 1.0, "drops": (0.45, 0.9)}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": PAPER_PRESET,
        "matched": PAPER_PRESET,
        "own": {**PAPER_PRESET, "backbone": "resnet18-small"},
    }

    def __init__(self, context: Context, config: PassConfig):
        super().__init__(context, config)
        _, height, width = context.data.input_shape
        if self.outputs_per_class > 1 and height != width:
            raise SettingError(
                f"images of {height}x{width} pixels cannot be turned by 90 degrees; expected squares. Give "
                f"--set rotations=false (in Python, settings={{'rotations': False}}), or crop the images"
            )
        self.prototypes = torch.empty(0, self.model.head.feature_dim, device=self.device)  # (classes, D)
        self.radius = torch.zeros(1, device=self.device)

    @property
    def outputs_per_class(self) -> int:  # type: ignore[override]
        return NUM_TURNS if self.config.rotations and self.context.data.flip else 1

    # ------------------------------------------------------------------ learning

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        yield self.base_work() if task == 0 else self.later_work()
        if task == 0 and self.config.base != PAPER:
            with torch.no_grad():
                for rows in self.model.head.parameters():
                    rows.mul_(self.config.temperature)
        if self.config.prototype_weight:
            self.keep_prototypes()

    @classmethod
    def default_base(cls) -> str:
        return cls.config_class.base  # a recipe with rotations trains what PASS's own base task trains

    def transform(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (images, labels) if self.outputs_per_class == 1 else turn_all(images, labels)

    def base_work(self) -> Work:
        if self.config.base != PAPER:
            return super().base_work()
        loss = lambda images, labels: self.classification_loss(self.logits(self.model.features(images)), labels)  # noqa: E731
        return self.descent("classifier", self.batches(self.context.task_ids(0)), loss, shared=self.base_settings())

    def logits(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return self.model.head(features.float())

    def classification_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().classification_loss(logits / self.config.temperature, labels)

    def later_work(self) -> Descent:
        c = self.config
        old_backbone = copy.deepcopy(self.model.backbone).eval().requires_grad_(False)

        def loss(images: Tensor, labels: Tensor, *prototypes: Tensor) -> Tensor:
            features = self.model.features(images).float()
            value = self.classification_loss(self.logits(features), labels)
            if c.distillation:
                with torch.no_grad():
                    target = old_backbone(images).float()
                value = value + c.distillation * torch.dist(features, target)
            if prototypes:
                augmented, old_classes = prototypes
                logits = self.logits(augmented) / c.temperature  # all classes compete, whatever `ce` says
                value = value + c.prototype_weight * F.cross_entropy(logits, self.outputs_per_class * old_classes)
            return value

        batches: Any = self.batches(self.context.task_ids(self.task))
        if c.prototype_weight:
            seed = self.context.seed_for(self.task)
            batches = PrototypeBatches(batches, self.prototypes, self.radius, c.batch_size, seed)
        return self.descent("classifier", batches, loss)

    def keep_prototypes(self) -> None:
        new, ids = self.context.new_classes(self.task), self.context.task_ids(self.task)
        self.model.eval()
        features = self.apply(self.model.features, self.context.train, ids).float()
        labels = self.context.train_labels[ids].to(self.device) - new.start
        means, radius = summarize_classes(features, labels, len(new))
        self.prototypes = torch.cat([self.prototypes[: new.start], means])
        if self.task == 0:
            self.radius = torch.full_like(self.radius, radius)

    # ------------------------------------------------------------------ keeping

    def extra_state(self) -> dict[str, Tensor]:
        return {"prototypes": self.prototypes, "radius": self.radius} if self.config.prototype_weight else {}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        if self.config.prototype_weight:
            self.prototypes, self.radius = (state[name].to(self.device) for name in ("prototypes", "radius"))

    def storage_bytes(self) -> dict[str, int]:
        return {name: num_bytes([value]) for name, value in self.extra_state().items()}
