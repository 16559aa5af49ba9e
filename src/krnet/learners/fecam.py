"""FeCAM: the network stays as the base task left it; each class is a mean and a covariance of its readings.

    each task:   readings (N, D) of a new class -> mean (D,)
                 readings -> Tukey's transform -> covariance (D, D)
    to predict:  covariance -> shrink twice -> correlations R
                 unit vectors u, m of the Tukey-transformed reading and mean -> score -(u - m)' R^-1 (u - m)

Goswami, Liu, Twardowski and van de Weijer, "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free
Continual Learning" (NeurIPS 2023). A class whose readings vary along some direction is not far from a reading that
differs in this direction. Tukey's transform x^tukey makes skewed readings closer to normal ones. Fewer images than
readings leave a covariance singular; shrinking adds to it `shrink_diagonal` times its mean diagonal value on the
diagonal, and `shrink_rest` times its mean other value elsewhere. Correlations make the distances of classes comparable.

Reference: the paper's code, with its settings for CIFAR-100. It shrinks each covariance twice, so the published numbers
have that; with 1 and 1 it is the same as once with 3 and 3.

Deviations from the reference:
- The base task too is scored by these distances. The code scores it by cosines with the rows of its trained head.
- The head of the base task is linear. The code's head is a cosine head.
- Negative readings (last_relu=False) are set to 0 before a Tukey transform other than 1, which is not defined for them.
- The mean of the other values counts zeros too. The code leaves out values that are exactly 0.
- R^-1 comes from Cholesky's decomposition, and from the pseudo-inverse only where R is not positive definite.
- per_class=False: the code shrinks the covariances of later tasks once, before they are merged, and never that of the
  base task. Here the merged covariance is shrunk twice. As in the code it is not normalised to correlations, it is
  computed around the mean of all images of a task, and tasks count by their numbers of classes.

Stored between tasks: the means and the covariances, D^2 numbers each. The inverses are computed from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_choice, check_range
from krnet.errors import SettingError
from krnet.learners.base import Context, register
from krnet.learners.frozen import FrozenConfig, FrozenLearner

SHRINK_ROUNDS = 2  # as the reference code has it


@dataclass(frozen=True, kw_only=True)
class FecamConfig(FrozenConfig):
    later = FrozenConfig.later | {
        "tukey",
        "shrink_diagonal",
        "shrink_rest",
        "per_class",
    }
    tukey: float = 0.5
    """Exponent of Tukey's transform of the readings; 1 leaves them as they are."""
    shrink_diagonal: float = 1.0
    """Added to a covariance's diagonal, in units of the mean of the diagonal; applied twice."""
    shrink_rest: float = 1.0
    """Added to a covariance off its diagonal, in units of the mean of these values; applied twice."""
    per_class: bool = True
    """Keep a covariance for each class; otherwise one for all, in far fewer bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("tukey", self.tukey, 0, 1)
        if not self.tukey:
            raise SettingError("tukey is 0; expected more than 0, up to 1: x^0 is the same for all readings")
        check_range("shrink_diagonal", self.shrink_diagonal, 0)
        check_range("shrink_rest", self.shrink_rest, 0)
        check_choice("per_class", self.per_class, (True, False))


def transform(readings: Tensor, exponent: float) -> Tensor:
    """Tukey's transform; negative readings become 0, unless the exponent is 1."""
    return readings if exponent == 1 else readings.clamp(min=0) ** exponent


def covariance(readings: Tensor) -> Tensor:
    """(N, D) -> (D, D), unbiased; of one reading it is 0."""
    return torch.cov(readings.double().T, correction=min(1, len(readings) - 1)).float()


def shrink(cov: Tensor, diagonal: float, rest: float) -> Tensor:
    """Add shares of the mean diagonal value to the diagonal, and of the mean other value to the rest."""
    dim = len(cov)
    mean = cov.diagonal().mean()
    mean_rest = (cov.sum() - cov.trace()) / max(1, dim * (dim - 1))
    eye = torch.eye(dim, dtype=cov.dtype, device=cov.device)
    return cov + diagonal * mean * eye + rest * mean_rest * (1 - eye)


def correlations(cov: Tensor) -> Tensor:
    """Covariances divided by both standard deviations. A reading that never changes correlates with itself alone."""
    std = cov.diagonal().sqrt()
    std = torch.where(std > 0, std, torch.ones_like(std))
    return (cov / std[:, None] / std).fill_diagonal_(1)


def inverse(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return torch.linalg.pinv(matrix, hermitian=True) if failed else torch.cholesky_inverse(factor)


class MahalanobisHead(nn.Module):
    """readings (B, D) -> minus the squared Mahalanobis distances (B, classes)"""

    def __init__(self, exponent: float):
        super().__init__()
        self.exponent = exponent
        self.means: Tensor
        self.inverses: Tensor
        self.register_buffer("means", torch.empty(0))  # (classes, D)
        self.register_buffer("inverses", torch.empty(0))  # (classes, D, D), or (1, D, D) for all

    def forward(self, readings: Tensor) -> Tensor:
        units = F.normalize(transform(readings.float(), self.exponent), dim=1)
        means = F.normalize(transform(self.means, self.exponent), dim=1)
        scores = []
        for mean, matrix in zip(means, self.inverses.expand(len(means), -1, -1), strict=True):
            away = units - mean
            scores.append(-(away @ matrix * away).sum(1))
        return torch.stack(scores, dim=1)


@register
class FeCAM(FrozenLearner):
    name = "fecam"
    config_class = FecamConfig
    config: FecamConfig

    def __init__(self, context: Context, config: FecamConfig):
        super().__init__(context, config)
        self.head = MahalanobisHead(config.tukey).to(self.device)
        self.covariances = torch.empty(0, device=self.device)  # as self.head.inverses: by class, or one

    def learn_readings(self, task: int, readings: Tensor, labels: Tensor) -> None:
        new, readings = self.context.new_classes(task), readings.float()
        by_class = [readings[labels == label] for label in new]
        means = torch.stack([values.mean(0) for values in by_class])
        self.head.means = torch.cat([self.head.means, means]) if task else means
        if self.config.per_class:
            covs = torch.stack([self._covariance(values) for values in by_class])
            inverses = self._inverses(covs)
            if task:
                covs = torch.cat([self.covariances, covs])
                inverses = torch.cat([self.head.inverses, inverses])
            self.covariances, self.head.inverses = covs, inverses
        else:
            cov = self._covariance(readings)[None]
            share = len(new) / self.context.num_seen(task)
            self.covariances = (1 - share) * self.covariances + share * cov if task else cov
            self.head.inverses = self._inverses(self.covariances)

    def _covariance(self, readings: Tensor) -> Tensor:
        return covariance(transform(readings, self.config.tukey))

    def _inverses(self, covariances: Tensor) -> Tensor:
        """(K, D, D): the matrices of the distances, one by one in float64."""
        return torch.stack([inverse(self._metric(cov.double())).float() for cov in covariances])

    def _metric(self, cov: Tensor) -> Tensor:
        for _ in range(SHRINK_ROUNDS):
            cov = shrink(cov, self.config.shrink_diagonal, self.config.shrink_rest)
        return correlations(cov) if self.config.per_class else cov

    def frozen_head(self) -> nn.Module:
        return self.head

    def deployed(self) -> dict[str, nn.Module]:
        return {"backbone": self.model.backbone}  # means and covariances are counted as stored bytes

    def extra_state(self) -> dict[str, Tensor]:
        return {"means": self.head.means, "covariances": self.covariances}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.head.means = state["means"].to(self.device)
        self.covariances = state["covariances"].to(self.device)
        self.head.inverses = self._inverses(self.covariances)
