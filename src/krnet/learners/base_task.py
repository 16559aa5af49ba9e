"""Recipes of the base task: how the network is trained on the first classes, before any method differs from another.

    base=paper    each method's own training of its own network
    base=strong   a recipe of this file, the same for every method  -> backbone, and one row of the head per class
    base=FILE     the trained network of an earlier run, from its folder of shared base tasks

With `strong` or a file all methods of a comparison start from the same weights. LUCIR alone does not: its network has
no last ReLU and a cosine head. `strong` trains that network, by the same recipe; a file does not fit.

Why strong is as it is: a network that is frozen after the base task must tell apart classes that it has never seen. So
recipes are compared by what a head learns on 25 further classes, never by the accuracy on the base classes.
benchmarks/choose_base.py does it inside the base classes. Rotation labels are from Lee et al., "Self-supervised Label
Augmentation via Input Transformations" (2020).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.config import from_dict
from krnet.data.dataset import DataSet
from krnet.errors import RecordingError, ResumeError, SettingError
from krnet.io import archive
from krnet.nn import heads
from krnet.nn.backbones import backbone_name
from krnet.progress import Watch
from krnet.train.classifier import Descent, ImageBatches, Saving, Schedule

if TYPE_CHECKING:
    from krnet.learners.base import Learner

PAPER, STRONG = "paper", "strong"
TRAIN_AGAIN = "Give --base strong to train it again"
NUM_TURNS = 4  # 0, 90, 180 and 270 degrees


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """A training of backbone and head by SGD, with a learning rate that rises linearly and falls as a cosine."""

    epochs: int
    """Epochs; setting base_epochs overrides it."""
    lr: float
    """Peak learning rate; setting base_lr overrides it."""
    batch_size: int
    """Images per update, each seen upright; with `rotations` each is seen turned, too."""
    warm_up: float
    """Share of the training in which the learning rate rises."""
    weight_decay: float = 5e-4
    momentum: float = 0.9
    trivial: bool = True
    """Change each image by TrivialAugment."""
    rotations: bool = True
    """Learn each image also turned by 90, 180 or 270 degrees; a class turned by an angle is a class of its own."""

    def for_data(self, data: DataSet) -> BaseRecipe:
        """The recipe without what the images do not allow.

        Images that may not be mirrored (digits) may not be turned or changed either: their meaning depends on it.
        Images that are not square do not fit into a batch with turned ones.
        """
        height, width = data.input_shape[1:]
        return replace(
            self, trivial=self.trivial and data.flip, rotations=self.rotations and data.flip and height == width
        )


RECIPES = {STRONG: BaseRecipe(epochs=300, lr=0.5, batch_size=256, warm_up=1 / 30)}


def base_settings(name: str, learner: type[Learner]) -> dict[str, Any]:
    """The settings of a learner that follow from the name of its base task."""
    found: dict[str, Any] = {}
    if name in RECIPES:
        found |= {"base_epochs": RECIPES[name].epochs, "base_lr": RECIPES[name].lr, "shortcut": "B"}
        if has_linear_head(learner):  # so that they all have one network; a cosine head is better without
            found["last_relu"] = True
    if learner.recipe_for_all_tasks and (recipe := recipe_of(name)) is not None:
        found |= {"epochs": recipe.epochs, "lr": recipe.lr}
    return found


def has_linear_head(learner: Learner | type[Learner]) -> bool:
    return issubclass(learner.head_class, heads.LinearHead)


def check_head(learner: Learner) -> None:
    """Refuse a file, whose head is linear, for a method with another head."""
    name, head = learner.config.base, learner.head_class
    if name != PAPER and name not in RECIPES and not has_linear_head(learner):
        raise SettingError(
            f"base is {name!r}, a file with a linear head; the head of {learner.name} is a {head.__name__}. Give "
            f"{' or '.join((PAPER, *RECIPES))}, which trains the network of {learner.name}, or leave {learner.name} out"
        )


def check_base(name: str) -> None:
    if name != PAPER and name not in RECIPES and not Path(name).is_file():
        known = ", ".join((PAPER, *RECIPES))
        raise SettingError(f"base is {name!r}; expected {known}, or the file of a trained base task")


def recipe_of(name: str) -> BaseRecipe | None:
    """The recipe of this name, or the one that a file was trained by. None: the method's own training."""
    if name in RECIPES or name == PAPER or not Path(name).is_file():
        return RECIPES.get(name)
    settings, _ = open_base(Path(name))
    recipe = from_dict(BaseRecipe, settings["recipe"])
    # The caller of that training may have set another length or learning rate than the recipe's.
    return replace(recipe, epochs=settings.get("base_epochs", recipe.epochs), lr=settings.get("base_lr", recipe.lr))


def turn(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Add a turned copy of each image: a third of them by 90 degrees, a third by 180, a third by 270.

    The class c turned n times has label 4 c + n. Batches are drawn at random, so the position decides the angle.
    """
    parts = images.tensor_split(NUM_TURNS - 1)
    turned = [part.rot90(n, (2, 3)) for n, part in enumerate(parts, start=1)]
    turns = torch.cat([torch.full((len(p),), n, device=labels.device) for n, p in enumerate(parts, start=1)])
    rows = torch.cat([images, *turned])
    if images.is_cuda:
        rows = rows.contiguous(memory_format=torch.channels_last)
    return rows, torch.cat([NUM_TURNS * labels, NUM_TURNS * labels + turns])


def recipe_work(learner: Learner, recipe: BaseRecipe, task: int = 0) -> Descent:
    """Train the learner's network by a recipe, and give the learner's head the upright rows of its classes.

    The head that is trained has a row for each class and angle. In a later task it learns all classes so far.
    """
    context, config = learner.context, learner.config
    recipe = recipe.for_data(context.data)
    outputs = NUM_TURNS if recipe.rotations else 1
    head_class = heads.LinearHead if has_linear_head(learner) else heads.CosineHead
    head = head_class(learner.model.head.feature_dim, outputs * context.num_seen(task))
    if task:
        give_rows(learner, head, outputs)
    model = learner.to_device(heads.Classifier(learner.model.backbone, head))
    batches: Any = ImageBatches(
        context.train,
        context.train_labels,
        torch.cat([context.task_ids(t) for t in range(task + 1)]),
        recipe.batch_size,
        context.seed_for(task),
        augmented=config.augment,
        trivial=recipe.trivial and config.augment,
        transform=turn if recipe.rotations else None,
    )
    schedule = Schedule(
        epochs=config.epochs if task else config.base_epochs,
        # Of fewer images than a batch should have, each step is smaller, too.
        lr=(config.lr if task else config.base_lr) * batches.batch_size / recipe.batch_size,
        shape="cosine",
        warm_up=recipe.warm_up,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
    loss = lambda images, labels: F.cross_entropy(model(images).float(), labels)  # noqa: E731
    name = f"classifier ({config.base})"
    finished = lambda: take_rows(learner, head, outputs)  # noqa: E731
    shared = None if task else shared_settings(learner) | {"recipe": asdict(recipe)}
    return Descent(name, model, batches, loss, schedule, learner.device, shared=shared, finished=finished)


def shared_settings(learner: Learner) -> dict[str, Any]:
    """All that the trained network depends on, the recipe aside: the same for every method with a linear head."""
    context, config = learner.context, learner.config
    settings: dict[str, Any] = {"base_epochs": config.base_epochs, "base_lr": config.base_lr}
    settings |= {"augment": config.augment, "seed": context.seed, "device": learner.device.type}
    if not has_linear_head(learner):  # files of linear heads do not name theirs
        settings["head"] = learner.head_class.__name__
    # The modules too: a function that makes a backbone may make another one under the same name.
    return settings | origin(learner) | {"network": repr(learner.model.backbone)}


def origin(learner: Learner) -> dict[str, Any]:
    """What a file must agree with: the images, the classes in their order, and the network."""
    context, config = learner.context, learner.config
    found = {"data": context.data.digest, "order": context.split.hash, "base_classes": len(context.split.tasks[0])}
    network = {"backbone": backbone_name(config.backbone), "shortcut": config.shortcut, "last_relu": config.last_relu}
    return found | network


@torch.no_grad()
def take_rows(learner: Learner, head: heads.Head, outputs: int) -> None:
    """Copy a trained head's rows into the learner's head; also the scale of a cosine head.

    A learner with four outputs a class takes all rows of a recipe with rotations: in both, class c turned n times has
    output 4 c + n. Any other takes the upright row of each class as the first of its outputs; its further rows are 0.
    """
    own, every = learner.model.head, learner.outputs_per_class
    (trained,) = head.linears
    own_step, trained_step = (1, 1) if every == outputs else (every, outputs)  # from one copied row to the next
    sizes = [part.out_features // own_step for part in own.linears]
    for name, _ in trained.named_parameters():  # the weight, and the bias of a linear head
        rows = getattr(trained, name)[::trained_step]
        for part, new in zip(own.linears, rows.split(sizes), strict=True):
            values = getattr(part, name)
            values.zero_()
            values[::own_step] = new
    if isinstance(own, heads.CosineHead) and isinstance(head, heads.CosineHead):
        own.sigma.copy_(head.sigma)


@torch.no_grad()
def give_rows(learner: Learner, head: heads.Head, outputs: int) -> None:
    """The inverse of `take_rows`: the upright rows of a head that is to be trained start as the learner's rows."""
    own, (rows,) = learner.model.head, head.linears
    for name, values in rows.named_parameters():
        values[::outputs] = torch.cat([getattr(part, name) for part in own.linears])[:: learner.outputs_per_class].cpu()
    if isinstance(own, heads.CosineHead) and isinstance(head, heads.CosineHead):
        head.sigma.copy_(own.sigma)


class BaseFile:
    """A Work that trains nothing: it loads a base task that an earlier run has trained."""

    shared: dict[str, Any] | None = None
    epochs: int | None = None

    def __init__(self, learner: Learner, path: Path):
        self.learner, self.path = learner, path
        self.name = f"classifier from {path}"
        self.tensors, self.outputs = read_base(path, origin(learner))

    def run(self, saving: Saving | None, watch: Watch | None) -> None:
        self.take(self.tensors)

    def result(self) -> dict[str, Tensor]:
        return self.tensors

    def take(self, result: dict[str, Tensor]) -> None:
        model, prefix = self.learner.model, "modules.backbone."
        weights = {name.removeprefix(prefix): value for name, value in result.items() if name.startswith(prefix)}
        try:
            model.backbone.load_state_dict(weights)
        except RuntimeError as error:
            raise ResumeError(
                f"{self.path}: not the weights of backbone {self.learner.config.backbone} ({error})"
            ) from error
        with torch.device("meta"):
            head = heads.LinearHead(model.head.feature_dim, len(result["modules.head.parts.0.bias"]))
        head.load_state_dict(
            {name.removeprefix("modules.head."): v for name, v in result.items() if name.startswith("modules.head.")},
            assign=True,
        )
        take_rows(self.learner, head, self.outputs)
        model.eval()


def open_base(path: Path) -> tuple[dict[str, Any], archive.Archive]:
    """What a base task was trained with, and its file. One without a recipe, or with another head, is refused."""
    try:
        saved = archive.open_archive(path)
    except RecordingError as error:
        raise type(error)(f"{error}. {TRAIN_AGAIN}") from error
    settings = saved.metadata.get("settings", {})
    if saved.metadata.get("kind") != "work" or "recipe" not in settings:
        raise SettingError(
            f"{path}: holds no base task of a recipe; expected a file that `krnet learn --base strong` wrote to its "
            f"folder of shared base tasks"
        )
    if "head" in settings:
        raise SettingError(
            f"{path}: holds a network with a {settings['head']}; expected one with a linear head, the base task that "
            f"`krnet learn --base strong` trains for all methods but lucir"
        )
    return settings, saved


def read_base(path: Path, expected: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The tensors of a trained base task and its outputs per class. Another data set, order or network is refused."""
    made_with, saved = open_base(path)
    try:
        tensors = saved.tensors()
    except RecordingError as error:
        raise type(error)(f"{error}. {TRAIN_AGAIN}") from error
    for name, value in expected.items():
        if made_with.get(name) != value:
            raise ResumeError(
                f"{path}: trained with another {name} than this run has, so it may have seen images that the run tests "
                f"or learns later. Give a file of the same data set, class order, base classes and backbone"
            )
    return tensors, NUM_TURNS if made_with["recipe"].get("rotations") else 1
