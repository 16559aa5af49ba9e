"""What EWC and MAS share: weights that mattered to the tasks so far are held near where those tasks left them.

    end of a task:   its images -> gradients, one per image and parameter -> importance of every parameter
    next task:       cross entropy + lambda / 2 * sum of importance * (parameter - anchor)^2

The anchor is the network as the task before left it, which the next task has anyway. Every image counts by itself:
the gradients of a batch are never added up before they are squared or made absolute, as other implementations do for
speed, so an importance here depends on no batch size. A mean of B gradients has 1/B of the square and 1/sqrt(B) of the
absolute value, where they are independent: a lambda found with one way does not fit the other.

Batch statistics are no parameters, so nothing holds them; bn="frozen" does.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_choice, check_range
from krnet.errors import SettingError
from krnet.learners.base import Context, Learner, LearnerConfig, Work, num_bytes
from krnet.nn import layers
from krnet.nn.backbones import BatchNorm
from krnet.nn.heads import LinearHead

CHUNK = 125  # images at a time: it bounds memory, and changes an importance by rounding alone


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "strength",
        "clip",
        "merge",
        "scope",
    }
    strength: float = 1.0
    """Lambda: weight of the penalty, lambda / 2 * sum of importance * (parameter - anchor)^2."""
    clip: float = 0.0
    """Largest importance that one task may give a parameter; 0 sets no limit."""
    merge: str = "average"
    """Importances of several tasks: average (weighted by classes), half (of the old and of the new) or sum."""
    scope: str = "all"
    """Parameters that are held: all, the head's rows of old classes among them, or backbone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("strength", self.strength, 0)
        check_range("clip", self.clip, 0)
        check_choice("merge", self.merge, ("average", "half", "sum"))
        check_choice("scope", self.scope, ("all", "backbone"))


class ImportanceLearner(Learner):
    """Fine-tuning with the penalty; a subclass says what a parameter's importance is."""

    config: ImportanceConfig

    def __init__(self, context: Context, config: LearnerConfig):
        super().__init__(context, config)
        later = [len(classes) for classes in context.split.tasks[1:]]
        if config.ce == "new" and 1 in later:
            raise SettingError(
                f"ce is 'new', and task {1 + later.index(1)} has one class: with no other to tell it from, nothing is "
                f"learned. Give ce=seen, or tasks of two classes and more"
            )
        self.importance: dict[str, Tensor] = {}
        """By parameter name, of the tasks so far. The head's parts keep their names, so those of old rows still fit."""

    @abstractmethod
    def objective(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum over images of what the gradients are taken of."""

    @abstractmethod
    def magnitude(self, gradients: Tensor) -> Tensor:
        """What a gradient counts: its square or its absolute value."""

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        ids = self.context.task_ids(task)
        if task == 0:
            yield self.base_work()
        else:
            penalty = self.penalty()
            loss = lambda images, labels: self.classification(self.model(images), labels) + penalty()  # noqa: E731
            yield self.descent("classifier", self.batches(ids), loss)
        self.importance = self.merged(self.measure(ids))

    def penalty(self) -> Callable[[], Tensor]:
        """Of the parameters as they are when it is called, against what they are now."""
        held = {name: value for name, value in self.model.named_parameters() if name in self.importance}
        # One long vector: by parameter it would be hundreds of small kernels in every step.
        flat = lambda tensors: torch.cat([tensors[name].flatten() for name in held])  # noqa: E731
        anchor = flat(held).detach()
        stiffness = (self.config.strength * flat(self.importance)).clamp(max=self.stiffest())
        return lambda: (stiffness * (flat(held) - anchor).square()).sum() / 2

    def stiffest(self) -> float:
        """Largest lambda * importance that is used. One step of descent undoes any move at 1 / lr, so more would hold
        no better, and from 2 (1 + momentum) / lr on the steps overshoot ever further."""
        return 1 / self.config.lr if self.config.lr else math.inf

    @torch.no_grad()
    def measure(self, ids: Tensor) -> dict[str, Tensor]:
        """Mean magnitude of the gradients over images as they are, without augmentation, at fixed batch statistics."""
        prefix = "backbone." if self.config.scope == "backbone" else ""
        params = self.model.named_parameters()
        totals = {name: torch.zeros_like(value) for name, value in params if name.startswith(prefix)}
        self.model.eval()
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            for part in ids.split(CHUNK):
                images, labels = self.context.train.take(part.to(self.device)), self.context.train_labels[part.cpu()]
                objective = partial(self.objective, labels=labels.to(self.device))
                for name, gradients in sample_gradients(self.model, images, objective):
                    if name in totals:
                        totals[name] += self.magnitude(gradients).sum(0)
        means = {name: total / len(ids) for name, total in totals.items()}
        return {name: mean.clamp(max=self.config.clip) for name, mean in means.items()} if self.config.clip else means

    def merged(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the tasks so far, this one included. Its own rows of the head have no past: theirs stay as measured."""
        old_classes = self.context.new_classes(self.task).start
        share = old_classes / self.context.num_seen(self.task)
        old_weight, new_weight = {"average": (share, 1 - share), "half": (0.5, 0.5), "sum": (1, 1)}[self.config.merge]
        past = self.importance
        return {
            name: old_weight * past[name] + new_weight * value if name in past else value for name, value in new.items()
        }

    def extra_state(self) -> dict[str, Tensor]:
        return dict(self.importance)

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.importance = {name: value.to(self.device) for name, value in state.items()}

    def storage_bytes(self) -> dict[str, int]:
        """The importances alone: between tasks the anchors are the current classifier's own weights."""
        return {"importances": num_bytes(self.importance)}


# ------------------------------------------------------------------ gradients by image

LAYERS = (nn.Conv2d, BatchNorm, LinearHead)
"""All kinds of layers with parameters that a classifier has."""


def sample_gradients(
    model: nn.Module, images: Tensor, objective: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Name and gradients (B, *shape) of every parameter, where `objective` of the logits is a sum over images.

    One backward pass for all images gives the gradients at the outputs of the layers; an image's gradient of a layer's
    weights is a product of its part of that with its input. vmap would take less code: it runs every layer as a
    convolution of B groups, which GPUs are slow at, where this is one batched product.
    """
    passed: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda layer, x, y, name=name: passed.append((name, layer, x[0].detach(), y)))
        for name, layer in model.named_modules()
        if isinstance(layer, LAYERS)
    ]
    try:
        with torch.enable_grad(), layers.plain():  # a fused layer has no output of its own for a hook to see
            total = objective(model(images))
    finally:
        for hook in hooks:
            hook.remove()
    gradients = torch.autograd.grad(total, [y for *_, y in passed])
    missing = {name for name, _ in model.named_parameters()}
    for (prefix, layer, x, _), gradient in zip(passed, gradients, strict=True):
        for name, value in _by_image(layer, x, gradient).items():
            missing.discard(f"{prefix}.{name}")
            yield f"{prefix}.{name}", value
    if missing:
        raise SettingError(
            f"the importance of {', '.join(sorted(missing)[:3])} needs gradients by image, which are known of "
            f"{', '.join(kind.__name__ for kind in LAYERS)} alone. Take a backbone of these layers, or another method"
        )


def _by_image(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Gradients (B, *shape) of a layer's parameters from its input and the gradient at its output."""
    if isinstance(layer, nn.Conv2d):
        assert layer.groups == 1 and layer.bias is None and not isinstance(layer.padding, str), f"{layer}"
        patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (B, C*k*k, h*w)
        products = gradient.flatten(2) @ patches.mT
        return {"weight": products.view(len(x), *layer.weight.shape)}
    if isinstance(layer, BatchNorm):
        assert not layer.training, "batch statistics would tie the images together"
        normed = F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
        return {"weight": (gradient * normed).sum((2, 3)), "bias": gradient.sum((2, 3))}
    assert isinstance(layer, LinearHead)
    found: dict[str, Tensor] = {}
    rows = gradient.split([part.out_features for part in layer.linears], dim=1)
    for number, part in enumerate(rows):
        found |= {f"parts.{number}.weight": part[:, :, None] * x[:, None], f"parts.{number}.bias": part}
    return found
