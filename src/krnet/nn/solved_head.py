"""Heads whose weights are solved in closed form, not trained: ridge regression on random features.

    readings z (B, D) -> standardise -> random features relu(z W + b) -> @ rows -> scores (B, classes)

W and b are drawn from a seed, so they cost no bytes. With H (N, width) the random features, and Y the one-hot labels:

    SolvedHead      all samples at once:   rows = (H' H + ridge N I)^-1 H' Y
    RecursiveHead   task after task:       gram = ridge I + H' H of all tasks,   rows = gram^-1 H' Y of all tasks

Random features with ridge regression are the head of ACIL (Zhuang et al. 2022) and RanPAC (McDonnell et al. 2023),
which keep `gram` between tasks, in one form or another. KRIL computes it from replays instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.errors import SettingError
from krnet.nn.readout import ReadingHead

BIAS_STD = 0.5
PLAIN_STD = 3**-0.5  # of a weight, times sqrt(D), without standardising: that of a new torch.nn.Linear, as in ACIL
AT_ONCE = 4096  # samples whose random features are in memory together


class RandomFeatureHead(ReadingHead):
    """readings (B, num_readings) -> scores (B, num_classes)

    Without `standardise` readings are taken as they are and the random features have no bias: activation(z W).
    """

    def __init__(
        self,
        num_readings: int,
        width: int,
        num_classes: int,
        seed: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.relu,
        standardise: bool = True,
    ):
        super().__init__(num_readings, standardise=standardise)
        self.activation = activation
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn(num_readings, width, generator=generator) / num_readings**0.5
        bias = BIAS_STD * torch.randn(width, generator=generator)
        self.projection: Tensor
        self.bias: Tensor
        self.register_buffer("projection", projection if standardise else PLAIN_STD * projection, persistent=False)
        self.register_buffer("bias", bias if standardise else torch.zeros(width), persistent=False)
        self.rows: Tensor
        self.register_buffer("rows", torch.zeros(width, num_classes))

    def grow(self, num_new: int) -> None:
        """Add classes; their rows are 0 until the head is solved."""
        self.rows = F.pad(self.rows, (0, num_new))

    def random_features(self, readings: Tensor) -> Tensor:
        return self.activation(torch.addmm(self.bias, self.standardised(readings), self.projection))

    def forward(self, readings: Tensor) -> Tensor:
        return self.random_features(readings) @ self.rows


class SolvedHead(RandomFeatureHead):
    """Solved from all samples at once; `ridge` is per sample."""

    def __init__(self, num_readings: int, width: int, num_classes: int, seed: int, ridge: float):
        super().__init__(num_readings, width, num_classes, seed)
        self.ridge = ridge

    @torch.no_grad()
    def solve(self, readings: Tensor, labels: Tensor) -> None:
        """Solve the rows of all classes from readings (N, D) and labels (N,). The first call also sets the scale."""
        self.set_scale(readings)
        width, num_classes = self.rows.shape
        gram = torch.zeros(width, width, dtype=torch.float64, device=readings.device)
        target = torch.zeros(width, num_classes, dtype=torch.float64, device=readings.device)
        for values, classes in zip(readings.split(AT_ONCE), labels.to(readings.device).split(AT_ONCE), strict=True):
            features = self.random_features(values)
            gram += features.T @ features  # a product in float32, summed in float64
            target.index_add_(1, classes, features.T.double())
        gram.diagonal().add_(self.ridge * len(readings))
        self.rows.copy_(solve_positive(gram, target))


class RecursiveHead(RandomFeatureHead):
    """Solved task after task, to what all samples together would give.

    The caller keeps `gram`. It and the rows hold all that the regression has to know of earlier samples: H' Y of those
    is gram @ rows.
    """

    def new_gram(self, ridge: float) -> Tensor:
        """The matrix before the first sample. `ridge` is absolute: it does not grow with the number of samples."""
        width = len(self.rows)
        gram = torch.zeros(width, width, dtype=torch.float64, device=self.rows.device)
        gram.diagonal().fill_(ridge)
        return gram

    @torch.no_grad()
    def learn(self, gram: Tensor, readings: Tensor, targets: Tensor) -> None:
        """Add samples: readings (N, D) with targets (N, classes). Changes `gram` in place, and the rows.

        Products are in float64: the rounding of float32 may be as large as an absolute ridge.
        """
        self.set_scale(readings)
        cross = gram @ self.rows.double()  # H' Y of earlier samples, (width, classes)
        for values, answers in zip(readings.split(AT_ONCE), targets.split(AT_ONCE), strict=True):
            features = self.random_features(values).double()
            gram.addmm_(features.T, features)
            cross.addmm_(features.T, answers.double())
        self.rows.copy_(solve_positive(gram, cross))


def solve_positive(matrix: Tensor, target: Tensor) -> Tensor:
    """matrix^-1 target, by Cholesky: the matrix must be symmetric with positive eigenvalues."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        raise SettingError("the head cannot be solved: its features depend on each other. Give a larger ridge")
    return torch.cholesky_solve(target, factor)
