"""Principal components of whole maps: k numbers a sample, and k maps to add up.

    x (values,) in [0, 1] -> minus the mean map -> coordinates along k axes -> step -> ANS
    mean + sum over k of coordinate_k axis_k -> x

The axes are orthonormal, so that one step serves all coordinates: narrow ones take few bits by themselves. The axes are
coded, too. An axis' error matters as much as its coordinates are wide, so each is scaled by its standard deviation and
all are rounded to step / sqrt(N): with N samples to share them, a bit more for the axes then gains as much as a bit
more for the coordinates. (Stored as fp16 with coordinates of 8 bits, the same R2 takes four times the bytes.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from krnet.coding.matrix import MAX_BLOCK, CodedMatrix
from krnet.io.archive import TensorStore
from krnet.recorders.base import Job
from krnet.recorders.maps import mean_map, normalised_chunks

AXES = "axes."
WORTH = 0.45  # steps of standard deviation from which an axis is kept: fewer save less than they cost
EXACT = 8192  # rows and columns of the largest matrix from which all axes are found
SKETCHED = 1024  # axes looked for in larger samples, if the settings do not say
OVERSAMPLED, PASSES = 32, 4  # of the sketch: Halko et al. 2011
FINEST = 2000  # steps on either side that an axis may have: a 12-bit axis is as good as a float


@dataclass(frozen=True, eq=False)
class Axes:
    """Principal axes, the widest first."""

    mean: Tensor  # (values,)
    axes: Tensor  # (k, values)
    std: Tensor  # (k,) of the coordinates


def principal_axes(job: Job, components: int | None) -> Axes:
    """Of all samples: every axis along which they differ, or the widest `components` where both are large."""
    num_values, num_samples = math.prod(job.source.shape), len(job.source)
    mean = mean_map(job).flatten()
    if 4 * num_samples <= 3 * num_values and num_samples * num_values <= EXACT**2:
        # The same axes from the samples' products with each other: for few samples a much smaller matrix.
        x = torch.cat([x.flatten(1) for x in normalised_chunks(job)]) - mean
        variances, shares = torch.linalg.eigh(x @ x.T)
        # Orthonormal, the widest first; the mean is gone, and so the last one may be any direction that is left.
        axes = torch.linalg.qr(x.T @ shares.flip(1))[0].flip(1)
    elif num_values <= EXACT:
        covariance = torch.zeros(num_values, num_values, device=job.device)
        for x in normalised_chunks(job):
            x = x.flatten(1) - mean
            covariance.addmm_(x.T, x)
        variances, axes = torch.linalg.eigh(covariance)
    else:
        wanted = min(num_samples, num_values, (components or SKETCHED) + OVERSAMPLED)
        generator = torch.Generator().manual_seed(job.fit.seed)
        axes = torch.randn(num_values, wanted, generator=generator).to(job.device)

        def spread(axes: Tensor) -> Tensor:
            """The covariance matrix times the axes, without making that matrix."""
            found = torch.zeros_like(axes)
            for x in normalised_chunks(job):
                x = x.flatten(1) - mean
                found.addmm_(x.T, x @ axes)
            return found

        for _ in range(PASSES):
            axes = torch.linalg.qr(spread(axes))[0]
        variances, turned = torch.linalg.eigh(axes.T @ spread(axes))
        axes = axes @ turned
    std = (variances.flip(0) / num_samples).clamp(min=0).sqrt()
    return Axes(mean, axes.T.flip(0), std)


def load_axes(store: TensorStore, num_values: int, num_kept: int) -> CodedMatrix:
    """Axes, scaled, (values, k)."""
    return CodedMatrix.load(store, AXES, num_values, num_kept, MAX_BLOCK)


def least_squares(axes: Tensor) -> Tensor:
    """(k, values) -> (k, values), products with which give the point along the axes that lies nearest."""
    exact = axes.double()
    products = exact @ exact.T
    products.diagonal().add_(1e-6)  # an axis may have been rounded to nothing
    return torch.linalg.solve(products, exact).float()
