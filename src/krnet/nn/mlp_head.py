"""A head with one hidden layer, trained on the readings of all samples.

    readings z (B, D) -> standardise -> linear, ReLU, dropout -> linear -> logits (B, classes)

After each task it is trained from new weights: what it learned before is in the readings of all samples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.nn.readout import ReadingHead


class MLPHead(ReadingHead):
    """readings (B, num_readings) -> logits (B, num_classes)"""

    def __init__(self, num_readings: int, hidden: int, num_classes: int):
        super().__init__(num_readings)
        self.inner = nn.Linear(num_readings, hidden)
        self.outer = nn.Linear(hidden, num_classes)

    def grow(self, num_new: int) -> None:
        """Add classes. All weights are to be trained again."""
        old = self.outer
        self.outer = nn.Linear(old.in_features, old.out_features + num_new).to(old.weight.device)

    @torch.no_grad()
    def restart(self, seed: int) -> None:
        """Draw new weights, the same on every device: uniform in +-1/sqrt(inputs), as torch.nn.Linear has them."""
        generator = torch.Generator().manual_seed(seed)
        for linear in (self.inner, self.outer):
            bound = linear.in_features**-0.5
            for values in (linear.weight, linear.bias):
                values.copy_(torch.empty(values.shape).uniform_(-bound, bound, generator=generator))

    def forward(self, readings: Tensor, factors: Tensor | None = None) -> Tensor:
        """factors: of the hidden values, (B, hidden): 0 where dropout drops one."""
        values = F.relu(self.inner(self.standardised(readings.float())))
        return self.outer(values if factors is None else values * factors)
