"""Learners that freeze the network after the base task and learn a head alone, from each task's readings.

    images -> frozen network -> readings (N, D) -> learn_readings(task, ...) -> what is kept: means, matrices
    test images -> frozen network -> readings -> frozen_head() -> scores (B, classes seen)

A subclass says what it keeps (`extra_state`); all of it counts as stored bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from krnet.config import check_choice, check_int
from krnet.learners.base import Context, Learner, LearnerConfig, Work, num_bytes
from krnet.nn import backbones
from krnet.nn.readout import Readout


@dataclass(frozen=True, kw_only=True)
class FrozenConfig(LearnerConfig):
    later = LearnerConfig.later | {"reads", "fixed_layers"}
    reads: str = "features"
    """What the head reads: features (the network's last ones, as published), or layers (mean and deviation of every
    layer behind fixed_layers, as KRIL's head does)."""
    fixed_layers: int | str = 19
    """With reads=layers: the first layers, which are not read; counted as KRIL counts them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("reads", self.reads, ("features", "layers"))
        if not isinstance(self.fixed_layers, str):
            check_int("fixed_layers", self.fixed_layers, 1)

    def comparable(self) -> dict[str, Any]:
        settings = super().comparable()
        if self.reads == "features":
            settings["fixed_layers"] = None  # not used
        return settings


class FrozenLearner(Learner):
    """Subclasses define `learn_readings`, `frozen_head`, and `extra_state` with what they keep."""

    config_class = FrozenConfig
    config: FrozenConfig
    unsupported: ClassVar[Mapping[str, str]] = {
        "outputs_per_class": "its head has one score per class",
        "transform": "its head reads the images as they are",
    }

    def __init__(self, context: Context, config: FrozenConfig):
        super().__init__(context, config)
        backbone = self.model.backbone
        self.reader: nn.Module = backbone
        if config.reads == "layers":
            trunk, tail = backbones.cut(backbone, config.fixed_layers)
            self.reader = nn.Sequential(trunk, Readout(tail))

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        if task == 0:
            yield self.base_work()
        self.model.eval()
        ids = self.context.task_ids(task)
        readings = self.apply(self.reader, self.context.train, ids)
        self.learn_readings(task, readings, self.context.train_labels[ids].to(self.device))

    @abstractmethod
    def learn_readings(self, task: int, readings: Tensor, labels: Tensor) -> None:
        """Learn a task from the readings (N, D) and labels (N,) of its training images."""

    @abstractmethod
    def frozen_head(self) -> nn.Module:
        """The head as it is now: readings (B, D) -> scores (B, classes seen)."""

    def classifier(self) -> nn.Module:
        return nn.Sequential(self.reader, self.frozen_head()).eval()

    def predict(self, images: Tensor) -> dict[str, Tensor]:
        return {"cnn": self.classifier()(images)}

    def storage_bytes(self) -> dict[str, int]:
        return {name: num_bytes([value]) for name, value in self.extra_state().items()}
