"""DS-AL: ACIL, and a second stream of random features that learns what the first one leaves over.

    readings z (N, D) -> relu(z W) -> @ rows of the main stream ------------------------- + -> scores
                     '-> tanh(z W) -> @ rows of the compensation stream -- * compensation -'

    task t:   main stream <- ACIL: ridge regression onto one-hot labels of tasks 0 to t
              residuals = one-hot labels - scores of the main stream, on the images of task t; those of old classes are
              set to 0 (previous label cleansing)
              compensation stream <- the same recursion, onto the residuals of tasks 0 to t

A linear solution on one kind of random features may underfit; the other activation gives the second stream other
features. Each stream keeps a matrix, as ACIL does: twice its bytes.

Zhuang et al., "DS-AL: A Dual-Stream Analytic Learning for Exemplar-Free Class-Incremental Learning" (2024). The width
(8192) and tanh are those of the authors' code; the ridge is 0.1 for both streams, and the weight 0.6.

Deviations:
- Residuals are those of the main stream after the whole task. The authors' code updates both streams
  batch by batch, so its residuals depend on the order and the size of the batches.
- Both streams have the same W, as in the authors' code.
- What is kept, the precision, W and the base task: as in ACIL (acil.py lists the deviations).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_range
from krnet.learners.analytic import AnalyticConfig, AnalyticLearner
from krnet.learners.base import EVALUATION_BATCH, register
from krnet.nn.solved_head import RecursiveHead


@dataclass(frozen=True, kw_only=True)
class DsalConfig(AnalyticConfig):
    later = AnalyticConfig.later | {"compensation"}
    compensation: float = 0.6
    """Weight of the compensation stream when predicting; 0 leaves ACIL."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("compensation", self.compensation, 0)


@register
class Dsal(AnalyticLearner):
    name = "dsal"
    config_class = DsalConfig
    config: DsalConfig

    def make_heads(self) -> dict[str, RecursiveHead]:
        return {"main": self.new_head(F.relu), "compensation": self.new_head(torch.tanh)}

    def learn_readings(self, task: int, readings: Tensor, labels: Tensor) -> None:
        self.update("main", readings, self.one_hot(labels))
        self.update("compensation", readings, self.residuals(readings, labels))

    @torch.no_grad()
    def residuals(self, readings: Tensor, labels: Tensor) -> Tensor:
        """What the main stream leaves over of the labels of this task, (N, classes seen); 0 for old classes."""
        scores = torch.cat([self.heads["main"](part) for part in readings.split(EVALUATION_BATCH)])
        residuals = self.one_hot(labels) - scores
        residuals[:, : self.context.new_classes(self.task).start] = 0
        return residuals

    def frozen_head(self) -> nn.Module:
        return Streams(self.heads["main"], self.heads["compensation"], self.config.compensation)


class Streams(nn.Module):
    """readings (B, D) -> scores (B, classes): those of the main stream plus `weight` times the compensation's"""

    def __init__(self, main: nn.Module, compensation: nn.Module, weight: float):
        super().__init__()
        self.main, self.compensation, self.weight = main, compensation, weight

    def forward(self, readings: Tensor) -> Tensor:
        scores: Tensor = self.main(readings) + self.weight * self.compensation(readings)
        return scores
