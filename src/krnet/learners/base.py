"""The contract of a learner (a method that learns task after task), and the registry of all learners.

    Context (data, task split, device, seed), LearnerConfig -> Learner
        learn(task)      -> pieces of Work, which the task loop runs, saves and resumes
        predict(images)  -> logits over the classes seen so far, by row name ("cnn", "nme")
        state, restore, storage_bytes

A learner has no epoch loop. It yields Work (a Descent, a recorder's fit) and continues when the work is done. After a
kill, `learn` runs again from the start of the task, and finished work is loaded from its file. So the code between two
pieces of work may depend only on the learner's state, the data and the seed.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import from_dict, unknown_setting
from krnet.data.dataset import DataSet
from krnet.data.protocol import TaskSplit, task_name
from krnet.errors import SettingError
from krnet.learners import base_task
from krnet.learners.config import LearnerConfig as LearnerConfig
from krnet.learners.config import plain_settings
from krnet.nn import backbones, heads
from krnet.progress import Watch
from krnet.train.classifier import Descent, ImageBatches, Images, Saving

EVALUATION_BATCH = 500
RANDOM_FEATURES_PART = 7  # of Context.seed_for: heads of random features have the same ones in every method


class Work(Protocol):
    """A long-running piece of a task, such as one training."""

    name: str
    epochs: int | None
    shared: dict[str, Any] | None
    """All that the result depends on: work with equal settings is done once and its result shared. None: not shared."""

    def run(self, saving: Saving | None, watch: Watch | None) -> None:
        """Do the work. `saving`: where to write checkpoints, and whether to resume. `watch` is told the progress."""

    def result(self) -> dict[str, Tensor]:
        """Tensors to save until the end of the task."""

    def take(self, result: dict[str, Tensor]) -> None:
        """Load the result of an earlier run, instead of running."""


@dataclass(frozen=True, eq=False)
class Context:
    """The inputs of a learner, besides its settings."""

    data: DataSet
    split: TaskSplit
    device: torch.device
    seed: int
    folder: Path
    """Where the learner keeps its own files between tasks, such as recordings."""

    def __post_init__(self) -> None:
        position = self.split.position
        derived = {
            "train": Images(self.data, self.data.train.images, self.device),
            "test": Images(self.data, self.data.test.images, self.device),
            "train_labels": position[self.data.train.labels],
            "test_labels": position[self.data.test.labels],
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    train: Images = field(init=False)
    test: Images = field(init=False)
    train_labels: Tensor = field(init=False)
    """(N,): position of each sample's class in the class order."""
    test_labels: Tensor = field(init=False)
    """(N,), likewise."""

    def task_ids(self, task: int) -> Tensor:
        """Sample IDs of a task's training images."""
        return self.split.samples(self.data.train.labels, task)

    def num_seen(self, task: int) -> int:
        """Number of classes of this task and all earlier tasks."""
        return len(self.split.classes_seen(task))

    def new_classes(self, task: int) -> range:
        """Positions in the class order of this task's classes."""
        return range(self.num_seen(task) - len(self.split.tasks[task]), self.num_seen(task))

    def seed_for(self, task: int, part: int = 0) -> int:
        """A seed that differs between tasks and parts, and is the same for all learners."""
        return (self.seed * 1009 + task) * 101 + part


PAPER_PRESET: Mapping[str, Any] = {"base": base_task.PAPER}


class Learner(ABC):
    """A network that grows by the classes of each task. Subclasses define `learn`, and what is kept between tasks."""

    name: ClassVar[str]
    config_class: ClassVar[type[LearnerConfig]] = LearnerConfig
    head_class: ClassVar[type[heads.LinearHead] | type[heads.CosineHead]] = heads.LinearHead
    main_row: ClassVar[str] = "cnn"
    """The row of `predict` that is reported as the method's result."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": PAPER_PRESET}
    """Named sets of settings to start from; the caller's settings override them. Every learner has `paper`."""
    large_images: ClassVar[Mapping[str, Any]] = {}
    """Settings for images above 96 pixels: those of the reference implementation for ImageNet-Subset."""
    outputs_per_class: ClassVar[int] = 1
    """Outputs of the head per class. In a loss each output counts as a class; `class_scores` joins them again."""
    recipe_for_all_tasks: ClassVar[bool] = False
    """Whether later tasks, too, are trained by the recipe of the base task, if setting `base` names one."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Which of `outputs_per_class` and `transform` this learner ignores, and why: a subclass may not declare them.

    A subclass that overrides the code in question sets this to {}.
    """

    def __init__(self, context: Context, config: LearnerConfig):
        self._check_declarations()
        self.context, self.config, self.device = context, config, context.device
        base_task.check_head(self)
        self.task = -1
        self.model = self._build()
        self._check_batch_size(min(config.batch_size, len(context.task_ids(0))))

    def _check_declarations(self) -> None:
        for name, reason in self.unsupported.items():
            if getattr(type(self), name) != getattr(Learner, name):
                raise SettingError(
                    f"{type(self).__qualname__} declares its own {name}, which method {self.name} does not support: "
                    f"{reason}. Leave it out, or derive from another learner"
                )

    def _build(self) -> heads.Classifier:
        channels = self.context.data.image_shape[0]
        c = self.config
        backbone = backbones.build(c.backbone, in_channels=channels, shortcut=c.shortcut, last_relu=c.last_relu)
        head = self.head_class(backbone.feature_dim, self.outputs_per_class * self.context.num_seen(0))
        return self.to_device(heads.Classifier(backbone, head))

    def to_device(self, module: Any) -> Any:
        memory_format = torch.channels_last if self.device.type == "cuda" else torch.preserve_format
        return module.to(self.device, memory_format=memory_format)

    # ------------------------------------------------------------------ learning

    @classmethod
    def default_base(cls) -> str:
        """The base task if the caller names none: paper for learners whose base task a recipe would not train."""
        own_training = cls.transform is not Learner.transform or cls.outputs_per_class != 1
        return base_task.PAPER if own_training else cls.config_class.base

    @abstractmethod
    def learn(self, task: int) -> Iterator[Work]:
        """Learn one task from its own images and from what was kept of earlier tasks. Yields the work to run."""

    def learns(self, task: int) -> bool:
        """Whether this task is learned and scored. The others are skipped."""
        return True

    def expand(self, task: int) -> None:
        """Add outputs for the classes of a task; those of the base task exist from the start."""
        assert task == self.task + 1, f"task {task} after task {self.task}"
        self.task = task
        if task > 0:
            self.model.head.grow(self.outputs_per_class * len(self.context.split.tasks[task]))
            if self.config.bn == "frozen":
                backbones.freeze_batchnorm(self.model)

    def base_work(self) -> Work:
        """Train the base task, or load it, as setting `base` says. By default by cross entropy on its images."""
        base = self.config.base
        if base in base_task.RECIPES:
            return base_task.recipe_work(self, base_task.RECIPES[base])
        if base != base_task.PAPER:
            return base_task.BaseFile(self, Path(base))
        loss = lambda images, labels: F.cross_entropy(self.model(images).float(), labels)  # noqa: E731
        return self.descent("classifier", self.batches(self.context.task_ids(0)), loss, shared=self.base_settings())

    def base_settings(self) -> dict[str, Any]:
        """All that the base task depends on: learners with equal base settings share one trained base task."""
        split, config = self.context.split, plain_settings(self.config)
        settings = {name: value for name, value in config.items() if name not in self.config.later}
        settings |= {"data": self.context.data.digest, "order": split.hash, "base_classes": len(split.tasks[0])}
        settings |= {"seed": self.context.seed, "head": self.head_class.__name__, "device": self.device.type}
        methods = [getattr(type(self), name) for name in ("base_work", "transform")]
        names = [f"{method.__module__}.{method.__qualname__}" for method in methods]
        # The modules too: a function that makes a backbone may make another one under the same name.
        return settings | {"outputs_per_class": self.outputs_per_class, "code": names, "network": repr(self.model)}

    def transform(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Change a batch of training images before the network sees it, for example rotate, mix or relabel them.

        Given labels are classes, by their position in the class order; returned ones are indices of the head's outputs.
        Those of class c are outputs_per_class * c and the following. By default the label is the first of them.
        """
        return images, (labels if self.outputs_per_class == 1 else self.outputs_per_class * labels)

    def transformed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Training images and labels as `transform` returns them, without random crops and flips."""
        images, labels = self.context.train.take(ids.to(self.device)), self.context.train_labels[ids.cpu()]
        return self.transform(images, labels.to(self.device))

    def batches(self, ids: Tensor, *, part: int = 0) -> ImageBatches:
        c, seed = self.config, self.context.seed_for(self.task, part)
        images, labels = self.context.train, self.context.train_labels
        return ImageBatches(images, labels, ids, c.batch_size, seed, augmented=c.augment, transform=self.transform)

    def descent(self, name: str, batches: Any, loss: Callable[..., Tensor], **options: Any) -> Descent:
        """Return the training of the whole model with the schedule of this task, as Work."""
        groups = options.pop("groups", None)
        modules = options.pop("modules", self.model)
        schedule = options.pop("schedule", self.config.schedule(self.task))
        self._check_batch_size(batches.batch_size)
        return Descent(name, modules, batches, loss, schedule, self.device, groups=groups, **options)

    def _check_batch_size(self, size: int) -> None:
        """Refuse batches of one image whose feature maps shrink to one pixel: BatchNorm needs two values a channel."""
        if size > 1:
            return
        shape = self.context.data.input_shape
        try:
            with torch.no_grad():
                copy.deepcopy(self.model.backbone).train()(torch.zeros(1, *shape, device=self.device))
        except ValueError as error:
            raise SettingError(
                f"{task_name(max(self.task, 0))} trains on one image at a time, and images of {shape[1]}x{shape[2]} "
                f"pixels end as one pixel, of which BatchNorm needs two; expected batch_size of at least 2, and as "
                f"many training images in the task"
            ) from error

    @property
    def num_old_outputs(self) -> int:
        """Number of the head's outputs for classes of earlier tasks; they come before those of this task."""
        return self.outputs_per_class * self.context.new_classes(self.task).start

    def classification_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy over the logits that setting `ce` selects. Labels are those that `transform` returns."""
        if self.config.ce == "new" and self.task > 0:
            first = self.num_old_outputs
            return F.cross_entropy(logits[:, first:].float(), labels - first)
        return F.cross_entropy(logits.float(), labels)

    # ------------------------------------------------------------------ predicting

    def classifier(self) -> nn.Module:
        """The network as it is now: images (B, C, H, W) -> outputs (B, outputs)."""
        return self.model

    def predict(self, images: Tensor) -> dict[str, Tensor]:
        """By row: scores (B, classes seen). The answer is the class with the largest score."""
        return {"cnn": self.class_scores(self.model(images))}

    def class_scores(self, outputs: Tensor) -> Tensor:
        """Outputs of the head (B, outputs) -> scores (B, classes seen): of each class, its first output."""
        return outputs if self.outputs_per_class == 1 else outputs[:, :: self.outputs_per_class]

    @torch.no_grad()
    def apply(self, function: Callable[[Tensor], Tensor], images: Images, ids: Tensor) -> Tensor:
        """Apply a function to standardised images, batch by batch and without augmentation; returns all its results."""
        parts = ids.to(self.device).split(EVALUATION_BATCH)
        return torch.cat([function(images.take(part)) for part in parts])

    @torch.no_grad()
    def output_shape(self, module: nn.Module) -> torch.Size:
        """Shape of a sample's output of a module that reads images."""
        image = torch.zeros(1, *self.context.data.input_shape, device=self.device)
        return copy.deepcopy(module).eval()(image).shape[1:]

    # ------------------------------------------------------------------ keeping

    def modules(self) -> dict[str, nn.Module]:
        """Modules whose parameters and buffers belong to `state`."""
        return {"model": self.model}

    def deployed(self) -> dict[str, nn.Module]:
        """The modules that `predict` uses."""
        return {"model": self.model}

    def extra_state(self) -> dict[str, Tensor]:
        """Other tensors of `state`, such as exemplars or importances."""
        return {}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        assert not state, f"nobody takes {', '.join(state)}"

    def state(self) -> dict[str, Tensor]:
        """All tensors that the next task depends on."""
        state = {f"{part}.{k}": v for part, module in self.modules().items() for k, v in module.state_dict().items()}
        return state | {f"extra.{name}": value for name, value in self.extra_state().items()}

    def restore(self, task: int, state: Mapping[str, Tensor]) -> None:
        """Bring a new learner to the state that it had at the end of a task."""
        while self.task < task:
            self.expand(self.task + 1)
        for part, module in self.modules().items():
            module.load_state_dict(
                {k.removeprefix(f"{part}."): v for k, v in state.items() if k.startswith(f"{part}.")}
            )
            module.eval()
        extra = {k.removeprefix("extra."): v for k, v in state.items() if k.startswith("extra.")}
        self.load_extra_state(extra)

    def finish(self) -> None:  # noqa: B027  most learners have no such files
        """Called after the last task, when all results are written: remove files that only a next task would need."""

    def storage_bytes(self) -> dict[str, int]:
        """Bytes kept between tasks, by part. The current classifier, which every method has, is not counted."""
        return {}

    def kept_files(self) -> dict[str, Path]:
        """The files among the parts of `storage_bytes`; the other parts are kept in the state."""
        return {}


_REGISTRY: dict[str, type[Learner]] = {}


def register(cls: type[Learner]) -> type[Learner]:
    assert cls.name not in _REGISTRY, f"two learners are called {cls.name}"
    _REGISTRY[cls.name] = cls
    return cls


def learner_names() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def get_learner(name: str) -> type[Learner]:
    if name not in _REGISTRY:
        raise unknown_setting(name, _REGISTRY, "method")
    return _REGISTRY[name]


def make_config(learner: type[Learner], settings: Mapping[str, Any]) -> LearnerConfig:
    """Override the learner's defaults by `settings`; an unknown name raises an error with the nearest known name."""
    return from_dict(learner.config_class, settings)


def num_bytes(tensors: Mapping[str, Tensor] | list[Tensor]) -> int:
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    return sum(value.numel() * value.element_size() for value in values)
