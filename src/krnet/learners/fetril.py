"""FeTrIL: the network stays as the base task left it; old classes are imitated by translated readings of new ones.

    each task:   readings of the new classes -> mean of each -> means (classes, D)
                 old class -> the new class whose mean has the largest cosine with its own
                 readings of this new class - its mean + mean of the old class -> pseudo-readings of the old class
                 readings and pseudo-readings -> unit length -> linear SVM over all classes seen
    test image:  reading -> unit length -> rows of the SVM -> scores (classes,)

Petit, Popescu, Schindler, Picard and Delezoide, "FeTrIL: Feature Translation for Exemplar-Free Class-Incremental
Learning" (WACV 2023); its main variant, with one new class for each old one. The SVM of the base task sees real
readings only.

Reference: the paper, with the defaults of scikit-learn's LinearSVC, as in PyCIL's code: one class against the rest,
squared hinge, C 1. For each class, row w and bias b minimise

    1/2 (|w|^2 + b^2) + C * sum over readings of max(0, 1 - s (w x + b))^2,   s = 1 for the class, -1 for the rest

Deviation from the reference: L-BFGS minimises this for all classes at once, on the device; LinearSVC takes one class
after another on the CPU. The minimum is the same.

Stored between tasks: the means. The SVM belongs to the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_choice, check_int, check_range
from krnet.learners.base import Context, register
from krnet.learners.frozen import FrozenConfig, FrozenLearner


@dataclass(frozen=True, kw_only=True)
class FetrilConfig(FrozenConfig):
    later = FrozenConfig.later | {
        "cost",
        "svm_iterations",
        "translate",
    }
    cost: float = 1.0
    """C of the SVM: the weight of its errors against the size of its rows."""
    svm_iterations: int = 200
    """Most iterations of L-BFGS for the SVM of a task; it ends earlier at the minimum."""
    translate: bool = True
    """Imitate old classes by translated readings; otherwise the SVM sees new classes alone, and forgets the old."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("cost", self.cost, 1e-6)
        check_int("svm_iterations", self.svm_iterations, 1)
        check_choice("translate", self.translate, (True, False))


def translated(readings: Tensor, labels: Tensor, means: Tensor, num_old: int) -> tuple[Tensor, Tensor]:
    """Pseudo-readings of the first `num_old` classes, and their labels.

    readings, labels  of the new classes
    means             (classes, D), the old ones first
    """
    units = F.normalize(means, dim=1)
    nearest = (units[:num_old] @ units[num_old:].T).argmax(1) + num_old  # (num_old,): a new class
    parts = [readings[labels == new] + (means[old] - means[new]) for old, new in enumerate(nearest.tolist())]
    return torch.cat(parts), torch.cat([labels.new_full((len(part),), old) for old, part in enumerate(parts)])


@torch.enable_grad()
def fit_svm(readings: Tensor, labels: Tensor, num_classes: int, cost: float, iterations: int) -> tuple[Tensor, Tensor]:
    """Weight (classes, D) and bias (classes,) of linear SVMs, one per class against the rest, with squared hinge."""
    inputs = F.pad(readings, (0, 1), value=1.0)  # the bias is the weight of a constant 1
    signs = 2.0 * F.one_hot(labels, num_classes).to(inputs) - 1  # (N, classes)
    rows = torch.zeros(num_classes, inputs.shape[1], dtype=inputs.dtype, device=inputs.device, requires_grad=True)
    scale = 1 / (cost * len(inputs))  # an objective per reading: the tolerances below do not depend on their number
    optimizer = torch.optim.LBFGS(
        [rows], max_iter=iterations, history_size=20, tolerance_grad=1e-7, tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def objective() -> Tensor:
        optimizer.zero_grad()
        slack = (1 - signs * (inputs @ rows.T)).clamp(min=0)
        value = slack.square().sum() / len(inputs) + scale / 2 * rows.square().sum()
        value.backward()
        return value

    optimizer.step(objective)
    return rows.detach()[:, :-1].clone(), rows.detach()[:, -1].clone()


class SVM(nn.Module):
    """readings (B, D) -> scores (B, classes)"""

    def __init__(self, num_readings: int, num_classes: int):
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", torch.zeros(num_classes, num_readings))
        self.register_buffer("bias", torch.zeros(num_classes))

    def grow(self, num_new: int) -> None:
        self.weight, self.bias = F.pad(self.weight, (0, 0, 0, num_new)), F.pad(self.bias, (0, num_new))

    def forward(self, readings: Tensor) -> Tensor:
        return F.linear(F.normalize(readings.float(), dim=1), self.weight, self.bias)


@register
class FeTrIL(FrozenLearner):
    name = "fetril"
    config_class = FetrilConfig
    config: FetrilConfig

    def __init__(self, context: Context, config: FetrilConfig):
        super().__init__(context, config)
        (num_readings,) = self.output_shape(self.reader)
        self.svm = SVM(num_readings, context.num_seen(0)).to(self.device)
        self.means = torch.empty(0, device=self.device)  # (classes, D)

    def expand(self, task: int) -> None:
        super().expand(task)
        if task > 0:
            self.svm.grow(len(self.context.split.tasks[task]))

    def learn_readings(self, task: int, readings: Tensor, labels: Tensor) -> None:
        new, readings = self.context.new_classes(task), readings.float()
        means = torch.stack([readings[labels == label].mean(0) for label in new])
        self.means = torch.cat([self.means, means]) if task else means
        if task and self.config.translate:
            pseudo, old_labels = translated(readings, labels, self.means, new.start)
            readings, labels = torch.cat([pseudo, readings]), torch.cat([old_labels, labels])
        units = F.normalize(readings, dim=1)
        num_seen = self.context.num_seen(task)
        self.svm.weight, self.svm.bias = fit_svm(units, labels, num_seen, self.config.cost, self.config.svm_iterations)

    def frozen_head(self) -> nn.Module:
        return self.svm

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"svm": self.svm}

    def deployed(self) -> dict[str, nn.Module]:
        return {"backbone": self.model.backbone, "svm": self.svm}

    def extra_state(self) -> dict[str, Tensor]:
        return {"means": self.means}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.means = state["means"].to(self.device)
