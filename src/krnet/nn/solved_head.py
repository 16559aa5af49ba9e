"""A head whose weights are solved in closed form, not trained.

    readings z (B, D) -> standardise -> random features relu(z W + b) -> @ rows -> scores (B, classes)

W and b are drawn from a seed, so they cost no bytes. The rows minimise the squared error to one-hot labels plus
`ridge` times their size per sample:   rows = (H' H + ridge N I)^-1 H' Y   with H (N, width) the random features.

Random features with ridge regression are the head of ACIL (Zhuang et al. 2022) and RanPAC (McDonnell et al. 2023),
which keep H' H between tasks. Here it is computed from replays instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.errors import SettingError

BIAS_STD = 0.5
AT_ONCE = 4096  # samples whose random features are in memory together
LEAST_STD = 1e-6  # a reading that never changes is left as it is


class SolvedHead(nn.Module):
    """readings (B, num_readings) -> scores (B, num_classes)"""

    def __init__(self, num_readings: int, width: int, num_classes: int, seed: int, ridge: float):
        super().__init__()
        self.ridge = ridge
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn(num_readings, width, generator=generator) / num_readings**0.5
        self.projection: Tensor
        self.bias: Tensor
        self.register_buffer("projection", projection, persistent=False)
        self.register_buffer("bias", BIAS_STD * torch.randn(width, generator=generator), persistent=False)
        self.mean: Tensor
        self.std: Tensor
        self.rows: Tensor
        self.register_buffer("mean", torch.zeros(num_readings))
        self.register_buffer("std", torch.zeros(num_readings))
        self.register_buffer("rows", torch.zeros(width, num_classes))

    def grow(self, num_new: int) -> None:
        """Add classes; their rows are 0 until the head is solved."""
        self.rows = F.pad(self.rows, (0, num_new))

    def random_features(self, readings: Tensor) -> Tensor:
        return F.relu(torch.addmm(self.bias, (readings - self.mean) / self.std, self.projection))

    def forward(self, readings: Tensor) -> Tensor:
        return self.random_features(readings) @ self.rows

    @torch.no_grad()
    def solve(self, readings: Tensor, labels: Tensor) -> None:
        """Solve the rows of all classes from readings (N, D) and labels (N,). The first call also sets the scale."""
        if not self.std.any():
            std, mean = torch.std_mean(readings, 0, correction=0)
            self.mean.copy_(mean)
            self.std.copy_(torch.where(std > LEAST_STD, std, torch.ones_like(std)))
        width, num_classes = self.rows.shape
        gram = torch.zeros(width, width, dtype=torch.float64, device=readings.device)
        target = torch.zeros(width, num_classes, dtype=torch.float64, device=readings.device)
        for values, classes in zip(readings.split(AT_ONCE), labels.to(readings.device).split(AT_ONCE), strict=True):
            features = self.random_features(values)
            gram += features.T @ features  # a product in float32, summed in float64
            target.index_add_(1, classes, features.T.double())
        self.rows.copy_(solve_ridge(gram, target, self.ridge * len(readings)))


def solve_ridge(gram: Tensor, target: Tensor, ridge: float) -> Tensor:
    """(gram + ridge I)^-1 target, by Cholesky. `gram` is overwritten."""
    gram.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if failed:
        raise SettingError("the head cannot be solved: its features depend on each other. Give a larger ridge")
    return torch.cholesky_solve(target, factor)


