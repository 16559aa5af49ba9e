"""Nearest class mean: the network stays as the base task left it, and one mean is kept of each class.

    each task:   readings (N, D) -> unit length -> mean of each new class -> unit length -> means (classes, D)
    test image:  reading -> unit length -> minus the distance to each mean -> scores (classes,)

Mensink, Verbeek, Perronnin and Csurka, "Distance-Based Image Classification: Generalizing to New Classes at Near-Zero
Cost" (2013), for the classifier. Distances between unit vectors rank classes as cosines do. They are those of iCaRL's
NME (Rebuffi et al. 2017), but the mean is over all training images of a class and not over exemplars, which a frozen
network allows: a mean stays valid.

Deviations from the references:
- Mensink et al. learn a metric; here the metric is the cosine.
- iCaRL goes on training the network; here it is frozen.
- Mirror images do not enter the means.

Stored between tasks: the means.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from krnet.learners.base import Context, register
from krnet.learners.exemplars import class_means, nearest_mean_scores
from krnet.learners.frozen import FrozenConfig, FrozenLearner


class NearestMean(nn.Module):
    """readings (B, D) -> minus the distances (B, classes) between unit vectors"""

    def __init__(self) -> None:
        super().__init__()
        self.means: Tensor
        self.register_buffer("means", torch.empty(0))

    def forward(self, readings: Tensor) -> Tensor:
        return nearest_mean_scores(readings.float(), self.means)


@register
class NCM(FrozenLearner):
    name = "ncm"

    def __init__(self, context: Context, config: FrozenConfig):
        super().__init__(context, config)
        self.head = NearestMean().to(self.device)

    def learn_readings(self, task: int, readings: Tensor, labels: Tensor) -> None:
        new = self.context.new_classes(task)
        means = class_means(readings.float(), labels - new.start, len(new))
        self.head.means = torch.cat([self.head.means, means]) if task else means

    def frozen_head(self) -> nn.Module:
        return self.head

    def deployed(self) -> dict[str, nn.Module]:
        return {"backbone": self.model.backbone}  # the means are counted as stored bytes

    def extra_state(self) -> dict[str, Tensor]:
        return {"means": self.head.means}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.head.means = state["means"].to(self.device)
