"""What EWC and MAS share: a penalty that holds parameters which mattered to earlier tasks near their old values.

    end of a task:   its images -> gradients, one per image and parameter -> importance of every parameter
    next task:       cross entropy + lambda / 2 * sum of importance * (parameter - anchor)^2

The anchor is the network at the end of the previous task, so it needs no extra storage. Each image's gradient is
squared, or made absolute, before images are averaged, so an importance does not depend on a batch size. Other
implementations average the gradients of a batch first, for speed. The mean of B independent gradients has 1/B of the
square and 1/sqrt(B) of the absolute value, so a lambda tuned for one way does not fit the other.

BatchNorm statistics are not parameters: the penalty does not hold them, bn="frozen" does.
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

CHUNK_IMAGES = 125  # images per backward pass: bounds memory; another number changes an importance only by rounding


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "strength",
        "clip",
        "merge",
        "scope",
    }
    strength: float = 1.0
    """Lambda in the penalty lambda / 2 * sum of importance * (parameter - anchor)^2."""
    clip: float = 0.0
    """Limit of the importance of a parameter in one task; 0: no limit."""
    merge: str = "average"
    """How importances of tasks combine: average (weighted by classes), half (0.5 old + 0.5 new) or sum."""
    scope: str = "all"
    """Parameters that the penalty holds: all (including the head's rows of old classes) or backbone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("strength", self.strength, 0)
        check_range("clip", self.clip, 0)
        check_choice("merge", self.merge, ("average", "half", "sum"))
        check_choice("scope", self.scope, ("all", "backbone"))


class ImportanceLearner(Learner):
    """Fine-tuning with the penalty; a subclass defines the importance of a parameter."""

    config: ImportanceConfig

    def __init__(self, context: Context, config: LearnerConfig):
        super().__init__(context, config)
        later_sizes = [len(classes) for classes in context.split.tasks[1:]]
        if config.ce == "new" and 1 in later_sizes and self.outputs_per_class == 1:
            raise SettingError(
                f"ce is 'new', and task {1 + later_sizes.index(1)} has one class: with no other to tell it "
                f"from, nothing is learned. Give ce=seen, or tasks of two classes and more"
            )
        self.importance: dict[str, Tensor] = {}
        """By parameter name, over all tasks so far. Growing the head keeps the names and shapes of its old parts."""

    @abstractmethod
    def objective(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The function whose gradients are measured, summed over images. Labels are those that `transform` returns."""

    @abstractmethod
    def magnitude(self, gradients: Tensor) -> Tensor:
        """The contribution of a gradient to the importance: its square or its absolute value."""

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        ids = self.context.task_ids(task)
        if task == 0:
            yield self.base_work()
        else:
            penalty = self.penalty()
            loss = lambda images, labels: self.classification_loss(self.model(images), labels) + penalty()  # noqa: E731
            yield self.descent("classifier", self.batches(ids), loss)
        self.importance = self.merge_importances(self.measure(ids))

    def penalty(self) -> Callable[[], Tensor]:
        """Return a function that computes the current penalty. The anchor is the value of the parameters now."""
        held = {name: value for name, value in self.model.named_parameters() if name in self.importance}
        # Concatenate: one penalty per parameter would launch hundreds of small kernels in every step.
        flat = lambda tensors: torch.cat([tensors[name].flatten() for name in held])  # noqa: E731
        anchor = flat(held).detach()
        stiffness = (self.config.strength * flat(self.importance)).clamp(max=self.max_stiffness())
        return lambda: (stiffness * (flat(held) - anchor).square()).sum() / 2

    def max_stiffness(self) -> float:
        """Limit of lambda * importance. At 1 / lr one gradient step returns a parameter to its anchor, so a larger
        value does not hold it better; from 2 (1 + momentum) / lr on, the steps overshoot and diverge."""
        return 1 / self.config.lr if self.config.lr else math.inf

    @torch.no_grad()
    def measure(self, ids: Tensor) -> dict[str, Tensor]:
        """By parameter: mean magnitude of its gradients over images, without random crops and flips, in eval mode."""
        prefix = "backbone." if self.config.scope == "backbone" else ""
        params = self.model.named_parameters()
        totals = {name: torch.zeros_like(value) for name, value in params if name.startswith(prefix)}
        num_images = 0  # `transform` may return more images than it is given
        self.model.eval()
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            for part in ids.split(CHUNK_IMAGES):
                images, labels = self.transformed(part)
                num_images += len(images)
                objective = partial(self.objective, labels=labels)
                for name, gradients in sample_gradients(self.model, images, objective):
                    if name in totals:
                        totals[name] += self.magnitude(gradients).sum(0)
        means = {name: total / num_images for name, total in totals.items()}
        return {name: mean.clamp(max=self.config.clip) for name, mean in means.items()} if self.config.clip else means

    def merge_importances(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Combine the importances of earlier tasks with those of this one. The head's new rows have only the latter."""
        num_old = self.context.new_classes(self.task).start
        old_share = num_old / self.context.num_seen(self.task)
        old_weight, new_weight = {"average": (old_share, 1 - old_share), "half": (0.5, 0.5), "sum": (1, 1)}[
            self.config.merge
        ]
        old = self.importance
        return {
            name: old_weight * old[name] + new_weight * value if name in old else value for name, value in new.items()
        }

    def extra_state(self) -> dict[str, Tensor]:
        return dict(self.importance)

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.importance = {name: value.to(self.device) for name, value in state.items()}

    def storage_bytes(self) -> dict[str, int]:
        """Only the importances: the anchors are the weights of the current classifier."""
        return {"importances": num_bytes(self.importance)}


# ------------------------------------------------------------------ gradients per image

SUPPORTED_LAYERS = (nn.Conv2d, BatchNorm, LinearHead)
"""The layers with parameters that `sample_gradients` supports."""


def sample_gradients(
    model: nn.Module, images: Tensor, objective: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the gradients (B, *shape) of every parameter; `objective` must be a sum over images.

    One backward pass for all images gives the gradients at the outputs of the layers. The gradient of a layer's weights
    for one image is then the product of that image's output gradient and input: one batched product per layer. vmap
    needs less code, but it runs each layer as a convolution of B groups, which is slow on GPUs.
    """
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda layer, x, y, name=name: calls.append((name, layer, x[0].detach(), y)))
        for name, layer in model.named_modules()
        if isinstance(layer, SUPPORTED_LAYERS)
    ]
    try:
        with torch.enable_grad(), layers.plain():  # unfused: hooks do not see the output of a fused layer
            total = objective(model(images))
    finally:
        for hook in hooks:
            hook.remove()
    gradients = torch.autograd.grad(total, [y for *_, y in calls])
    missing = {name for name, _ in model.named_parameters()}
    for (prefix, layer, x, _), gradient in zip(calls, gradients, strict=True):
        for name, value in _layer_gradients(layer, x, gradient).items():
            missing.discard(f"{prefix}.{name}")
            yield f"{prefix}.{name}", value
    if missing:
        raise SettingError(
            f"the importance of {', '.join(sorted(missing)[:3])} needs gradients by image, which are known of "
            f"{', '.join(kind.__name__ for kind in SUPPORTED_LAYERS)} alone. Take a backbone of these layers, or "
            f"another method"
        )


def _layer_gradients(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """By name: gradients (B, *shape) of a layer's parameters, from its input x and the gradient at its output."""
    if isinstance(layer, nn.Conv2d):
        assert layer.groups == 1 and layer.bias is None and not isinstance(layer.padding, str), f"{layer}"
        patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (B, C*k*k, h*w)
        products = gradient.flatten(2) @ patches.mT  # (B, out channels, C*k*k)
        return {"weight": products.view(len(x), *layer.weight.shape)}
    if isinstance(layer, BatchNorm):
        assert not layer.training, "batch statistics would tie the images together"
        normed = F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
        return {"weight": (gradient * normed).sum((2, 3)), "bias": gradient.sum((2, 3))}
    assert isinstance(layer, LinearHead)
    gradients: dict[str, Tensor] = {}
    rows = gradient.split([part.out_features for part in layer.linears], dim=1)
    for number, part in enumerate(rows):
        gradients |= {f"parts.{number}.weight": part[:, :, None] * x[:, None], f"parts.{number}.bias": part}
    return gradients
