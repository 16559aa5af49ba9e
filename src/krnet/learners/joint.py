"""Joint training: each task trains on the images of all tasks so far.

The upper bound. Every task starts from a new network, so the result of the last task is that of one training on all
classes. With `only_last` the tasks in between are skipped; they have no accuracy, so there is no average either. All
images are kept, and storage_bytes counts them.

With base=strong, or a file that it wrote, every task is trained by the recipe of that base task, on the classes so far:
its epochs, learning rate, augmentation and rotations. So it bounds the methods that start from such a base task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from krnet.config import check_choice
from krnet.errors import SettingError
from krnet.learners import base_task
from krnet.learners.base import Learner, LearnerConfig, Work, register


@dataclass(frozen=True, kw_only=True)
class JointConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "only_last",
        "warm_start",
    }
    only_last: bool = False
    """Train only on the base task and then on all classes at once; skip the tasks in between."""
    warm_start: bool = False
    """Start from the network of the previous task instead of a new one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("only_last", "warm_start"):
            check_choice(name, getattr(self, name), (True, False))
        if self.ce != "seen":
            raise SettingError(f"ce is {self.ce!r}; expected seen: images are of all classes, old ones too")
        if self.bn == "frozen" and not self.warm_start:
            raise SettingError("bn is 'frozen', and a new network has no statistics; leave it out, or set warm_start")


@register
class Joint(Learner):
    name = "joint"
    config_class = JointConfig
    config: JointConfig
    recipe_for_all_tasks = True

    def learns(self, task: int) -> bool:
        return not self.config.only_last or task in (0, self.context.split.num_tasks - 1)

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        if task == 0:
            yield self.base_work()
            return
        if not self.learns(task):
            return
        if not self.config.warm_start:
            fresh = self._build()
            self.model.backbone.load_state_dict(fresh.backbone.state_dict())
            for part in self.model.head.linears:
                part.reset_parameters()
        recipe = base_task.recipe_of(self.config.base)
        if recipe is not None:
            yield base_task.recipe_work(self, recipe, task)
            return
        ids = torch.cat([self.context.task_ids(t) for t in range(task + 1)])
        loss = lambda images, labels: self.classification_loss(self.model(images), labels)  # noqa: E731
        yield self.descent("classifier", self.batches(ids), loss)

    def storage_bytes(self) -> dict[str, int]:
        num_samples = sum(len(self.context.task_ids(t)) for t in range(self.task + 1))
        return {"images": num_samples * self.context.data.train.images[0].numel(), "labels": 4 * num_samples}
