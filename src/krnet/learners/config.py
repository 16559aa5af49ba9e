"""The settings that all learners have, their checks, and their form in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from krnet.config import check_choice, check_int, check_rate, check_shares
from krnet.learners import base_task
from krnet.nn import backbones
from krnet.nn.backbones import backbone_name
from krnet.train.classifier import Schedule


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Settings of all learners. A learner overrides the defaults by the values of its reference implementation."""

    later: ClassVar[frozenset[str]] = frozenset({"epochs", "lr", "ce", "bn"})
    """Settings that do not affect the base task: runs that agree in all other settings share it."""

    base: str = base_task.STRONG
    """Base task: strong (one recipe for all methods, whose network tells new classes apart better), paper (the method's
    own), or a file that a run with strong wrote to its folder of shared base tasks."""
    backbone: str | backbones.Factory = "resnet32"
    """Network: resnet32 (CIFAR), resnet18 (224 px), resnet18-small (32 to 64 px), resnet8 (digits); in Python also a
    function that returns a network."""
    shortcut: str = "B"
    """Residual shortcuts where the shape changes: A (zero padding) or B (1x1 convolution)."""
    last_relu: bool = True
    """End the last block in a ReLU. LUCIR does not."""
    base_epochs: int = 160
    """Epochs of the base task."""
    epochs: int = 160
    """Epochs of every later task."""
    batch_size: int = 128
    """Samples per update."""
    base_lr: float = 0.1
    """Learning rate of the base task."""
    lr: float = 0.1
    """Learning rate of every later task."""
    drops: tuple[float, ...] = (0.5, 0.75)
    """Fractions of the training of a task after which the learning rate is multiplied by decay."""
    decay: float = 0.1
    """Factor of the learning rate at each drop."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay."""
    optimizer: str = "sgd"
    """Optimizer: sgd or adam."""
    ce: str = "seen"
    """Classes whose logits enter the cross entropy: seen (all so far) or new (those of the current task)."""
    bn: str = "train"
    """BatchNorm statistics after the base task: train (updated) or frozen."""
    augment: bool = True
    """Crop and flip the training images at random."""

    def __post_init__(self) -> None:
        if not callable(self.backbone):
            check_choice("backbone", self.backbone, backbones.BACKBONES)
        check_choice("shortcut", self.shortcut, backbones.SHORTCUTS)
        check_choice("optimizer", self.optimizer, ("sgd", "adam"))
        check_choice("ce", self.ce, ("seen", "new"))
        check_choice("bn", self.bn, ("train", "frozen"))
        for name in ("last_relu", "augment"):
            check_choice(name, getattr(self, name), (True, False))
        for name in ("base_epochs", "epochs", "batch_size"):
            check_int(name, getattr(self, name), 1)
        for name in ("base_lr", "lr", "decay", "momentum", "weight_decay"):
            check_rate(name, getattr(self, name))
        for item in fields(self):  # `drops`, and such settings of subclasses
            if isinstance(item.default, tuple):
                object.__setattr__(self, item.name, check_shares(item.name, getattr(self, item.name)))

    @classmethod
    def renewed(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Convert settings that an earlier version of krnet saved to the form of this version."""
        return {"base": base_task.PAPER, **saved}

    def comparable(self) -> dict[str, Any]:
        """Settings as JSON holds them, those with the same meaning written the same: equal ones make equal runs."""
        return plain_settings(self)

    def schedule(self, task: int) -> Schedule:
        return Schedule(
            epochs=self.epochs if task else self.base_epochs,
            lr=self.lr if task else self.base_lr,
            drops=self.drops,
            decay=self.decay,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            optimizer=self.optimizer,
        )


def plain_settings(config: LearnerConfig) -> dict[str, Any]:
    """Return the settings as values that JSON can hold."""
    values = {f.name: getattr(config, f.name) for f in fields(config)} | {"backbone": backbone_name(config.backbone)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
