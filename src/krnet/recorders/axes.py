"""Principal axes of feature maps, or of their blocks: of recorders pca and compact, and of the paper's start.

    features (N, values) -> principal_axes -> mean (values,), axes (k, values), std (k,)
    features, grid       -> block_axes     -> mean (values,), axes (k, values of a block), std (k,)
    a file's tensors     -> load_axes      -> the coded, scaled axes (values, k) -> decode_axes -> axes (k, values)
    axes (k, values)     -> least_squares  -> the matrix that finds coordinates along axes that are not orthonormal

For many samples of many values, a randomised method finds the widest axes: Halko, Martinsson and Tropp (2011).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from krnet.coding.matrix import MAX_BLOCK, CodedConfig, CodedMatrix, MatrixReader, evenly_spaced
from krnet.io.archive import TensorStore
from krnet.recorders.base import Job
from krnet.recorders.grids import Grid
from krnet.recorders.maps import mean_map, normalised_chunks

AXES = "axes."  # prefix of the tensors that hold the coded axes
WORTH = 0.45  # an axis is kept if its standard deviation exceeds this many steps: others cost more than they gain
MAX_EXACT_SIZE = 8192  # all axes are found for up to this many values a sample, or up to its square in all samples
SKETCH_AXES = 1024  # axes that the randomised method finds if the settings name no number
SKETCH_OVERSAMPLING, SKETCH_PASSES = 32, 4  # further axes, and power iterations, of the randomised method
BLOCKS_PER_VALUE = 32  # block axes are learned from at most this many blocks for each value of a block
FINEST = 2000  # largest symbol of scaled axes: 12 bits are as good as a float, and 4001 symbols fit MAX_ALPHABET


@dataclass(frozen=True, eq=False)
class Axes:
    """Orthonormal principal axes, in order of falling variance."""

    mean: Tensor  # (values,) of a map
    axes: Tensor  # (k, values), or (k, values of a block)
    std: Tensor  # (k,) standard deviation of the coordinates along each axis


def principal_axes(job: Job, components: int | None) -> Axes:
    """Principal axes of all samples.

    All of them where the samples or their values are few; otherwise the `components` widest and a few more.
    """
    num_values, num_samples = math.prod(job.source.shape), len(job.source)
    mean = mean_map(job).flatten()  # (values,)
    if 4 * num_samples <= 3 * num_values and num_samples * num_values <= MAX_EXACT_SIZE**2:
        # Few samples: the eigenvectors of x x^T (N, N) give the same axes as those of the larger x^T x.
        x = torch.cat([x.flatten(1) for x in normalised_chunks(job)]) - mean  # (N, values)
        variances, eigenvectors = torch.linalg.eigh(x @ x.T)
        # QR orthonormalises, the widest axis first. Centring leaves N - 1 dimensions: the last axis is arbitrary.
        axes = torch.linalg.qr(x.T @ eigenvectors.flip(1))[0].flip(1)
    elif num_values <= MAX_EXACT_SIZE:
        covariance = torch.zeros(num_values, num_values, device=job.device)
        for x in normalised_chunks(job):
            x = x.flatten(1) - mean
            covariance.addmm_(x.T, x)
        variances, axes = torch.linalg.eigh(covariance)
    else:
        num_axes = min(num_samples, num_values, (components or SKETCH_AXES) + SKETCH_OVERSAMPLING)
        generator = torch.Generator().manual_seed(job.fit.seed)
        axes = torch.randn(num_values, num_axes, generator=generator).to(job.device)

        def times_covariance(axes: Tensor) -> Tensor:
            """x^T (x axes), summed over chunks of samples: the covariance matrix itself would be too large."""
            product = torch.zeros_like(axes)  # (values, num_axes)
            for x in normalised_chunks(job):
                x = x.flatten(1) - mean
                product.addmm_(x.T, x @ axes)
            return product

        for _ in range(SKETCH_PASSES):
            axes = torch.linalg.qr(times_covariance(axes))[0]
        variances, rotation = torch.linalg.eigh(axes.T @ times_covariance(axes))
        axes = axes @ rotation
    # eigh sorts by rising eigenvalue: flip, so that the widest axis comes first.
    std = (variances.flip(0) / num_samples).clamp(min=0).sqrt()
    return Axes(mean, axes.T.flip(0), std)


def block_axes(job: Job, grid: Grid) -> Axes:
    """All principal axes of the blocks of all maps, minus the mean map; std is that of one block's coordinates."""
    mean = mean_map(job)
    num_blocks = BLOCKS_PER_VALUE * grid.block_values
    ids = evenly_spaced(len(job.source), max(1, math.ceil(num_blocks / grid.num_blocks)))
    covariance = torch.zeros(grid.block_values, grid.block_values, device=job.device)
    for x in normalised_chunks(job, ids):
        blocks = grid.cut(x - mean).flatten(0, 1)
        covariance.addmm_(blocks.T, blocks)
    variances, axes = torch.linalg.eigh(covariance)
    std = (variances.flip(0) / (len(ids) * grid.num_blocks)).clamp(min=0).sqrt()
    return Axes(mean.flatten(), axes.T.flip(0), std)


def load_axes(store: TensorStore, num_values: int, num_kept: int) -> CodedMatrix:
    """The scaled axes (values, num_kept) of a file."""
    return CodedMatrix.load(store, AXES, num_values, num_kept, MAX_BLOCK)


def decode_axes(coded: CodedMatrix, config: CodedConfig, scale: Tensor) -> Tensor:
    """The axes (k, values) of a file on the device of their scales (k,); memory is needed for the result alone."""
    axes = torch.empty(len(scale), coded.blocks.num_rows, device=scale.device)
    for rows, scaled in MatrixReader(coded, config, scale.device).read_all():
        axes[:, rows] = (scaled / scale).T
    return axes


def least_squares(axes: Tensor) -> Tensor:
    """(A A^T)^-1 A for axes A (k, values): `x @ result.T` are the coordinates of the point nearest to x.

    Axes that were rounded or trained are not orthonormal; `x @ A.T` would not be the nearest point.
    """
    exact = axes.double()
    products = exact @ exact.T  # (k, k)
    products.diagonal().add_(1e-6)  # keeps it invertible if an axis was rounded to 0
    return torch.linalg.solve(products, exact).float()
