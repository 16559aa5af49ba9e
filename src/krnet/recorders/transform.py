"""Transform coding: decorrelate channels by a KLT and positions by a DCT, then quantise all coefficients alike.

    x (C, h, w) in [0, 1] -> minus the mean map -> KLT over channels -> DCT-II over h and w -> quantise -> ANS

Both transforms are orthonormal: an error in a coefficient is an error of the same size in the features, so one
quantisation step serves all. Vectors have the KLT alone; features with more axes have a DCT along each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krnet.coding.matrix import CodedConfig
from krnet.errors import InputError, OversizedRecordingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.base import Job, Stored, register
from krnet.recorders.basis import Basis
from krnet.recorders.coded import CodedRecorder
from krnet.recorders.grids import DCT_COPIES, dct
from krnet.recorders.maps import mean_map, normalised_chunks

MAX_AXIS_SIZE = 4096  # the transform of an axis is a (size, size) matrix


@dataclass(frozen=True, kw_only=True)
class TransformConfig(CodedConfig):
    step: float = 0.18
    # For maps after a ReLU a little better than 0.5 at the same size.
    dead_zone: float = 0.65
    # Replays are clamped to the range of the features. After a ReLU this favours coefficients larger than their
    # centroids: the error is lower, and a classifier is right more often.
    centroid: float = 0.25


class KLTxDCT(Basis):
    """A KLT over channels and a DCT over every further axis."""

    def __init__(self, shape: tuple[int, ...], mean: Tensor, klt: Tensor):
        self.shape, self.num_columns = shape, math.prod(shape)
        self.mean, self.klt = mean, klt  # (C, h, w) and (C, C), both float16; row k of klt is axis k
        self.dcts = [dct(size).to(mean.device) for size in shape[1:]]

    def forward(self, x: Tensor) -> Tensor:
        return self._along_axes(x - self.mean.float(), transpose=False).flatten(1)

    def inverse(self, numbers: Tensor) -> Tensor:
        return self._along_axes(numbers.view(-1, *self.shape), transpose=True) + self.mean.float()

    def _along_axes(self, x: Tensor, transpose: bool) -> Tensor:
        for axis, matrix in enumerate([self.klt.float(), *self.dcts], start=1):
            x = torch.tensordot(x, matrix, ([axis], [0 if transpose else 1])).movedim(-1, axis)
        return x

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "klt": self.klt}


@register
class TransformRecorder(CodedRecorder):
    name = "transform"
    config_class = TransformConfig
    variants = ({"centroid": -0.5},)  # a lower R2, but a classifier is right more often

    def learn(self, job: Job, config: TransformConfig) -> KLTxDCT:
        """The mean map, and the principal axes of the channels over all samples and positions."""
        shape = job.source.shape or (1,)
        if max(shape) > MAX_AXIS_SIZE:
            raise InputError(
                f"features of shape {shape}; recorder transform needs a matrix of size x size for every axis, and "
                f"takes sizes of at most {MAX_AXIS_SIZE}. Take recorder pca or quantized"
            )
        mean = mean_map(job)
        covariance = torch.zeros(shape[0], shape[0], device=job.device)
        for x in normalised_chunks(job):
            x = (x - mean).movedim(0, 1).flatten(1)  # (C, n h w)
            covariance += x @ x.T
        _, axes = torch.linalg.eigh(covariance.double())
        return KLTxDCT(shape, mean.half(), axes.T.flip(0).half())

    def basis(self, job: Job, config: TransformConfig, learned: KLTxDCT) -> tuple[KLTxDCT, TransformConfig]:
        return learned, config

    def stored_basis(self, shape: Sequence[int], config: TransformConfig) -> tuple[dict[str, Stored], int]:
        shape = tuple(shape or (1,))
        basis = {"mean": Stored(shape, torch.float16), "klt": Stored((shape[0], shape[0]), torch.float16)}
        return basis, math.prod(shape)

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        dct_numbers = sum(DCT_COPIES * size**2 for size in (*shape[1:], *shape[:1]))  # the KLT is such a matrix, too
        return super().working_numbers(shape, settings) + dct_numbers

    def restore(
        self, samples: Samples, config: TransformConfig, store: TensorStore, low: Tensor, high: Tensor
    ) -> KLTxDCT:
        shape = samples.shape or (1,)
        if max(shape) > MAX_AXIS_SIZE:
            raise OversizedRecordingError(f"shape {shape}; expected sizes of at most {MAX_AXIS_SIZE}. Record again")
        mean = store.tensor("mean", shape=shape, dtype=torch.float16)
        klt = store.tensor("klt", shape=(shape[0], shape[0]), dtype=torch.float16)
        return KLTxDCT(shape, mean.to(low.device), klt.to(low.device))
