"""What ACIL and DS-AL share: a frozen network, and heads of random features that are solved task after task.

    readings z (N, D) -> activation(z W) (N, width) -> @ rows -> scores
    after each task:  gram <- gram + H' H,   rows <- gram^-1 (H' Y of all tasks)

Each head keeps its matrix `gram` between tasks: width^2 numbers of 8 bytes, 537 MB at 8192 random features. The rows
belong to the network, and W comes from the seed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_choice, check_int, check_range
from krnet.learners.base import RANDOM_FEATURES_PART, Context
from krnet.learners.frozen import FrozenConfig, FrozenLearner
from krnet.nn.solved_head import RecursiveHead


@dataclass(frozen=True, kw_only=True)
class AnalyticConfig(FrozenConfig):
    later = FrozenConfig.later | {"random_features", "ridge", "standardise"}
    random_features: int = 8192
    """Random features of a head. The matrix that it keeps has their number squared, in float64."""
    ridge: float = 0.1
    """Ridge (gamma of the reference) for all samples together, not per sample: the larger a data set, the less it
    counts."""
    standardise: bool = False
    """Standardise readings by the mean and deviation of the base task's, and give the random features a bias, as
    KRIL's solved head does. The reference does neither."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("random_features", self.random_features, 1)
        check_range("ridge", self.ridge, 0)
        check_choice("standardise", self.standardise, (True, False))


class AnalyticLearner(FrozenLearner):
    """Subclasses define `make_heads`, `learn_readings` and `frozen_head`."""

    config_class = AnalyticConfig
    config: AnalyticConfig

    def __init__(self, context: Context, config: AnalyticConfig):
        super().__init__(context, config)
        self.heads: dict[str, RecursiveHead] = self.make_heads()
        self.grams: dict[str, Tensor] = {}
        """By head, from the base task on: the matrix that is kept."""

    @abstractmethod
    def make_heads(self) -> dict[str, RecursiveHead]:
        """The heads by name; the base task's classes are their first outputs."""

    def new_head(self, activation: Callable[[Tensor], Tensor]) -> RecursiveHead:
        """All heads of a run have the same random weights W."""
        c, seed = self.config, self.context.seed_for(0, RANDOM_FEATURES_PART)
        (num_readings,) = self.output_shape(self.reader)
        sizes = num_readings, c.random_features, self.context.num_seen(0)
        head = RecursiveHead(*sizes, seed, activation=activation, standardise=c.standardise)
        return head.to(self.device)

    def update(self, name: str, readings: Tensor, targets: Tensor) -> None:
        """Solve a head for these samples and all earlier ones: readings (N, D), targets (N, classes seen)."""
        head = self.heads[name]
        if name not in self.grams:
            self.grams[name] = head.new_gram(self.config.ridge)
        head.learn(self.grams[name], readings, targets)

    def one_hot(self, labels: Tensor) -> Tensor:
        return F.one_hot(labels, self.context.num_seen(self.task)).float()

    def expand(self, task: int) -> None:
        super().expand(task)
        if task > 0:
            for head in self.heads.values():
                head.grow(len(self.context.split.tasks[task]))

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | self.heads

    def deployed(self) -> dict[str, nn.Module]:
        return self.modules()

    def extra_state(self) -> dict[str, Tensor]:
        return {f"{name} matrix": gram for name, gram in self.grams.items()}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.grams = {name.removesuffix(" matrix"): value.to(self.device) for name, value in state.items()}
