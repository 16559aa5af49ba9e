"""The contract of a way to learn task after task, and the registry of all of them.

    Context (data, tasks, device, seed), LearnerConfig -> Learner
        learn(task)   -> pieces of Work, which the task loop runs, saves and takes up again
        predict(x)    -> logits over the classes seen so far, by row name ("cnn", "nme")
        state, restore, storage_bytes

A learner owns no epoch loop: it yields Work (a Descent, a recorder's fit), and goes on when that is done. After a kill
its `learn` is run again from the start of the task: work that was finished is taken from its file, so the code between
two pieces must follow from the state of the learner, the data and the seed alone.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_choice, check_int, check_range, check_shares, from_dict, unknown_setting
from krnet.data.dataset import DataSet
from krnet.data.protocol import TaskSplit
from krnet.errors import RecordingError, SettingError
from krnet.io import archive
from krnet.nn import backbones, heads
from krnet.nn.backbones import backbone_name
from krnet.train.classifier import Descent, ImageBatches, Images, Saving, Schedule, Watch

EVALUATION_BATCH = 500


class Work(Protocol):
    """A long piece of a task. `shared`: settings under which its result may serve another learner, too."""

    name: str
    epochs: int | None
    shared: dict[str, Any] | None

    def run(self, saving: Saving | None, watch: Watch | None) -> None:
        """Do it."""

    def result(self) -> dict[str, Tensor]:
        """What is to be kept of it until the end of the task."""

    def take(self, result: dict[str, Tensor]) -> None:
        """The result of an earlier run, instead of running."""


def seconds_before(work: Work, partial: Path) -> float:
    """What a piece of work that was stopped has taken up to its checkpoint, or to its finished recording."""
    recording: Path | None = getattr(work, "path", None)
    paths = [partial] if recording is None else [recording, recording.with_name(f"{recording.name}.ckpt")]
    for path in paths:
        if path.exists():
            try:
                kept = archive.open_archive(path).metadata
            except RecordingError:
                return 0.0  # whoever needs the file says what is wrong with it
            return float(kept.get("seconds") or kept.get("times", {}).get("fit_seconds", 0.0))
    return 0.0


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Settings that all learners have; each gives its reference values as its own defaults."""

    later: ClassVar[frozenset[str]] = frozenset({"epochs", "lr", "ce", "bn"})
    """Settings that cannot matter to the base task: runs that agree in all others share it."""

    backbone: str | backbones.Factory = "resnet32"
    """Network: resnet32 (CIFAR), resnet18 (224 px), resnet18-small (32 to 64 px), resnet8 (digits); in Python also a
    function that makes one."""
    shortcut: str = "B"
    """Shortcuts of a residual network where sizes change: A (zero padding) or B (1x1 convolution)."""
    last_relu: bool = True
    """Whether the last block ends in a ReLU; LUCIR's does not."""
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
    """Shares of a task after which the learning rate falls."""
    decay: float = 0.1
    """Factor by which it falls."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay."""
    optimizer: str = "sgd"
    """sgd or adam."""
    ce: str = "seen"
    """Cross entropy over the logits of all classes seen, or of the new ones only: seen or new."""
    bn: str = "train"
    """Batch statistics after the base task: train (they go on) or frozen."""
    augment: bool = True
    """Random crops and flips of the training images."""

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
            check_range(name, getattr(self, name), 0)
        for item in fields(self):  # drops, and those that a learner adds
            if isinstance(item.default, tuple):
                object.__setattr__(self, item.name, check_shares(item.name, getattr(self, item.name)))

    @classmethod
    def renewed(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that an earlier version saved, as this one would save them."""
        return dict(saved)

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


@dataclass(frozen=True, eq=False)
class Context:
    """What a learner is given, beside its settings."""

    data: DataSet
    split: TaskSplit
    device: torch.device
    seed: int
    folder: Path
    """For files of its own that it keeps between tasks, such as recordings."""

    def __post_init__(self) -> None:
        position = self.split.position
        kept = {
            "train": Images(self.data, self.data.train.images, self.device),
            "test": Images(self.data, self.data.test.images, self.device),
            "train_labels": position[self.data.train.labels],
            "test_labels": position[self.data.test.labels],
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    train: Images = field(init=False)
    test: Images = field(init=False)
    train_labels: Tensor = field(init=False)
    """(N,): the place of each sample's class in the class order."""
    test_labels: Tensor = field(init=False)

    def task_ids(self, task: int) -> Tensor:
        """Sample IDs of a task's training images."""
        return self.split.samples(self.data.train.labels, task)

    def num_seen(self, task: int) -> int:
        """Classes of this task and all before."""
        return len(self.split.classes_seen(task))

    def new_classes(self, task: int) -> range:
        """Outputs that belong to this task."""
        return range(self.num_seen(task) - len(self.split.tasks[task]), self.num_seen(task))

    def seed_for(self, task: int, part: int = 0) -> int:
        """Other random numbers for every task, the same ones for every learner."""
        return (self.seed * 1009 + task) * 101 + part


class Learner(ABC):
    """A network that grows by the classes of each task. Subclasses differ in `learn` and in what they keep."""

    name: ClassVar[str]
    config_class: ClassVar[type[LearnerConfig]] = LearnerConfig
    head_class: ClassVar[type[heads.LinearHead] | type[heads.CosineHead]] = heads.LinearHead
    main_row: ClassVar[str] = "cnn"
    """Which of the rows that `predict` gives stands for the method."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings to start from, by name; a caller's own go over them."""
    large_images: ClassVar[Mapping[str, Any]] = {}
    """Settings for images above 96 pixels: the reference's for ImageNet-Subset."""
    outputs_per_class: ClassVar[int] = 1
    """Outputs that the head has of each class; the first of them is the class's own logit."""

    def __init__(self, context: Context, config: LearnerConfig):
        self.context, self.config, self.device = context, config, context.device
        self.task = -1
        self.model = self._build()
        self._check_batch(min(config.batch_size, len(context.task_ids(0))))

    def _build(self) -> heads.Classifier:
        channels = self.context.data.image_shape[0]
        c = self.config
        backbone = backbones.build(c.backbone, in_channels=channels, shortcut=c.shortcut, last_relu=c.last_relu)
        head = self.head_class(backbone.feature_dim, self.outputs_per_class * self.context.num_seen(0))
        return self.to_device(heads.Classifier(backbone, head))

    def to_device(self, module: Any) -> Any:
        kind = torch.channels_last if self.device.type == "cuda" else torch.preserve_format
        return module.to(self.device, memory_format=kind)

    # ------------------------------------------------------------------ learning

    @abstractmethod
    def learn(self, task: int) -> Iterator[Work]:
        """One task, from its images alone and what was kept of those before."""

    def learns(self, task: int) -> bool:
        """Whether a task is learned, and so judged; one that is not is passed over."""
        return True

    def expand(self, task: int) -> None:
        """Make room for the classes of a task; the base task's are there from the start."""
        assert task == self.task + 1, f"task {task} after task {self.task}"
        self.task = task
        if task > 0:
            self.model.head.grow(self.outputs_per_class * len(self.context.split.tasks[task]))
            if self.config.bn == "frozen":
                backbones.freeze_batchnorm(self.model)

    def base_work(self) -> Descent:
        """The base task: plain cross entropy on its images. A learner may have another."""
        loss = lambda images, labels: F.cross_entropy(self.model(images).float(), labels)  # noqa: E731
        return self.descent("classifier", self.batches(self.context.task_ids(0)), loss, shared=self.base_settings())

    def base_settings(self) -> dict[str, Any]:
        """All that the base task depends on, so that learners which agree in it train it once."""
        split, config = self.context.split, plain_settings(self.config)
        kept = {name: value for name, value in config.items() if name not in self.config.later}
        kept |= {"data": self.context.data.digest, "order": split.hash, "base_classes": len(split.tasks[0])}
        kept |= {"seed": self.context.seed, "head": self.head_class.__name__, "device": self.device.type}
        own = [getattr(type(self), name).__qualname__ for name in ("base_work", "transform")]
        return kept | {"outputs_per_class": self.outputs_per_class, "code": own}

    def transform(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch of training images as the network is to see it: rotated, mixed, relabelled. Labels number outputs."""
        return images, labels

    def batches(self, ids: Tensor, *, part: int = 0) -> ImageBatches:
        c, seed = self.config, self.context.seed_for(self.task, part)
        images, labels = self.context.train, self.context.train_labels
        return ImageBatches(images, labels, ids, c.batch_size, seed, augmented=c.augment, transform=self.transform)

    def descent(self, name: str, batches: Any, loss: Callable[..., Tensor], **options: Any) -> Descent:
        """Training of the whole model with the settings of this task."""
        groups = options.pop("groups", None)
        modules = options.pop("modules", self.model)
        schedule = options.pop("schedule", self.config.schedule(self.task))
        self._check_batch(batches.batch_size)
        return Descent(name, modules, batches, loss, schedule, self.device, groups=groups, **options)

    def _check_batch(self, size: int) -> None:
        """BatchNorm has no statistics of a single number: of one sample whose maps have shrunk to one pixel."""
        if size > 1:
            return
        shape = self.context.data.input_shape
        try:
            with torch.no_grad():
                copy.deepcopy(self.model.backbone).train()(torch.zeros(1, *shape, device=self.device))
        except ValueError as error:
            raise SettingError(
                f"task {max(self.task, 0)} trains on one image at a time, and images of {shape[1]}x{shape[2]} pixels "
                f"end as one pixel, of which BatchNorm needs two; expected batch_size of at least 2, and as many "
                f"training images in the task"
            ) from error

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, over the logits that the settings say."""
        if self.config.ce == "new" and self.task > 0:
            first = self.outputs_per_class * self.context.new_classes(self.task).start
            return F.cross_entropy(logits[:, first:].float(), labels - first)
        return F.cross_entropy(logits.float(), labels)

    # ------------------------------------------------------------------ judging

    def predict(self, images: Tensor) -> dict[str, Tensor]:
        """Scores (B, classes seen) by row; the largest is the answer."""
        logits = self.model(images)
        return {"cnn": logits if self.outputs_per_class == 1 else logits[:, :: self.outputs_per_class]}

    @torch.no_grad()
    def apply(self, function: Callable[[Tensor], Tensor], images: Images, ids: Tensor) -> Tensor:
        """A function of normalised images, batch by batch, without augmentation."""
        parts = ids.to(self.device).split(EVALUATION_BATCH)
        return torch.cat([function(images.take(part)) for part in parts])

    # ------------------------------------------------------------------ keeping

    def modules(self) -> dict[str, nn.Module]:
        """What `state` covers beside `extra_state`."""
        return {"model": self.model}

    def extra_state(self) -> dict[str, Tensor]:
        """Tensors that belong to no module: exemplars, importances."""
        return {}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        assert not state, f"nobody takes {', '.join(state)}"

    def state(self) -> dict[str, Tensor]:
        """All that the next task depends on."""
        state = {f"{part}.{k}": v for part, module in self.modules().items() for k, v in module.state_dict().items()}
        return state | {f"extra.{name}": value for name, value in self.extra_state().items()}

    def restore(self, task: int, state: Mapping[str, Tensor]) -> None:
        """A new learner as it was at the end of a task."""
        while self.task < task:
            self.expand(self.task + 1)
        for part, module in self.modules().items():
            module.load_state_dict(
                {k.removeprefix(f"{part}."): v for k, v in state.items() if k.startswith(f"{part}.")}
            )
            module.eval()
        extra = {k.removeprefix("extra."): v for k, v in state.items() if k.startswith("extra.")}
        self.load_extra_state(extra)

    def finish(self) -> None:  # noqa: B027  most have none
        """All is learned and written: remove files that only going on would have needed."""

    def storage_bytes(self) -> dict[str, int]:
        """Every byte kept between tasks, by part, the current classifier aside (every method has one)."""
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
    """Its defaults, with the caller's settings over them; unknown names are refused with the nearest known."""
    return from_dict(learner.config_class, settings)


def plain_settings(config: LearnerConfig) -> dict[str, Any]:
    """For JSON."""
    found = {f.name: getattr(config, f.name) for f in fields(config)} | {"backbone": backbone_name(config.backbone)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def num_bytes(tensors: Mapping[str, Tensor] | list[Tensor]) -> int:
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    return sum(value.numel() * value.element_size() for value in values)


def check_old(kept: object, task: int) -> None:
    if task > 0 and kept is None:
        raise SettingError(f"task {task} needs what task {task - 1} left; start from the base task")
