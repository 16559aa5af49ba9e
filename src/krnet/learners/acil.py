"""ACIL: ridge regression on random features of a frozen network, updated task after task to the solution for all tasks.

    images -> frozen network -> readings z (N, D) -> H = relu(z W) (N, width) -> @ rows -> scores
    task t:   gram = ridge I + H' H of tasks 0 to t (kept),   rows = gram^-1 H' Y of tasks 0 to t,   Y one-hot labels

No image, feature or label of an old task is kept, and yet the rows are those of one regression on the samples of all
tasks ("absolute memorization"): H' Y of old samples is the old gram times the old rows.

Zhuang et al., "ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy Protection" (2022). The
width (8192) and random weights without a bias are those of the authors' code; the ridge is 0.1.

Deviations:
- The paper keeps R = gram^-1 and updates it by the Woodbury identity, which takes differences of large numbers. Here
  gram is kept, which takes as many bytes, and solved by Cholesky after each task. The results differ by rounding only.
- H' H is in float64, as in the authors' code; the network, H and the rows are in float32.
- W is normal with the variance of the authors' uniform weights.
- The base task is trained as for the other methods here (settings `base`, `base_epochs` and so on). The authors train
  theirs with a cosine schedule.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from krnet.learners.analytic import AnalyticLearner
from krnet.learners.base import register
from krnet.nn.solved_head import RecursiveHead


@register
class Acil(AnalyticLearner):
    name = "acil"

    def make_heads(self) -> dict[str, RecursiveHead]:
        return {"head": self.new_head(F.relu)}

    def learn_readings(self, task: int, readings: Tensor, labels: Tensor) -> None:
        self.update("head", readings, self.one_hot(labels))

    def frozen_head(self) -> nn.Module:
        return self.heads["head"]
