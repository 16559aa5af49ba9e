"""Joint training: each task trains on the images of all tasks so far.

The upper bound. Every task starts from a new network, so the result of the last task is that of one training on all
classes. So tasks in between can be skipped: all of them with `only_last`, and with `learned_tasks` those that it does
not name. They have no accuracy, and there is no average. All images are kept, and storage_bytes counts them.

With base=strong, or a file that it wrote, every task is trained by the recipe of that base task, on the classes so far:
its epochs, learning rate, augmentation and rotations. So it bounds the methods that start from such a base task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from krnet.config import check_choice, check_int, parse_counts
from krnet.errors import SettingError
from krnet.learners import base_task
from krnet.learners.base import Context, Learner, LearnerConfig, Work, register


@dataclass(frozen=True, kw_only=True)
class JointConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "only_last",
        "learned_tasks",
        "warm_start",
    }
    only_last: bool = False
    """Train only on the base task and then on all classes at once; skip the tasks in between."""
    learned_tasks: str | int | Sequence[int] | None = None
    """Tasks to learn, such as 0,5,10; the others are skipped. The base task, 0, and the last one are always learned. By
    default all."""
    warm_start: bool = False
    """Start from the network of the previous task instead of a new one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("only_last", "warm_start"):
            check_choice(name, getattr(self, name), (True, False))
        if self.learned_tasks is not None:
            object.__setattr__(self, "learned_tasks", self._task_numbers())
            if self.only_last:
                raise SettingError("only_last and learned_tasks are both given; give one of them")
        if self.ce != "seen":
            raise SettingError(f"ce is {self.ce!r}; expected seen: images are of all classes, old ones too")
        if self.bn == "frozen" and not self.warm_start:
            raise SettingError("bn is 'frozen', and a new network has no statistics; leave it out, or set warm_start")

    def _task_numbers(self) -> tuple[int, ...]:
        given = self.learned_tasks
        try:
            listed = parse_counts(given) if isinstance(given, str) else [given] if isinstance(given, int) else given
            for number in listed or ():
                check_int("learned_tasks", number, 0)
        except (TypeError, ValueError) as error:
            raise SettingError(f"learned_tasks is {given!r}; expected numbers of tasks, such as 0,5,10") from error
        return tuple(sorted(set(listed or ())))


@register
class Joint(Learner):
    name = "joint"
    config_class = JointConfig
    config: JointConfig
    recipe_for_all_tasks = True

    def __init__(self, context: Context, config: JointConfig):
        super().__init__(context, config)
        last, listed = context.split.num_tasks - 1, config.learned_tasks
        if isinstance(listed, tuple) and listed and listed[-1] > last:
            raise SettingError(f"learned_tasks holds {listed[-1]}; the last task is {last}, and the base task is 0")

    def learns(self, task: int) -> bool:
        named = () if self.config.only_last else self.config.learned_tasks
        if named is None or task in (0, self.context.split.num_tasks - 1):
            return True
        assert isinstance(named, tuple), "made when the settings are"
        return task in named

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
