"""Principal components of whole maps: k coordinates for each sample, and k axes that all samples share.

    x (values,) in [0, 1] -> minus the mean map -> coordinates along k axes -> quantise -> ANS
    ids -> coordinates -> mean + sum over k of coordinate_k * axis_k -> x

The axes are orthonormal, so one quantisation step serves all coordinates: those that vary little take few bits.

The axes are quantised and entropy-coded, too. The error of an axis is multiplied by the coordinates along it, so each
axis is scaled by their standard deviation. All scaled axes have the step / sqrt(N): N samples share them, and with
this step a bit more for the axes gains as much as a bit more for the coordinates. (Axes in fp16 with coordinates of 8
bits take four times the bytes for the same R2.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from krnet.coding.matrix import (
    CODED_TENSORS,
    MAX_BLOCK,
    CodedConfig,
    CodedMatrix,
    Matrix,
    encode,
    measure,
)
from krnet.config import check_int
from krnet.errors import NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE
from krnet.recorders.axes import AXES, FINEST, WORTH, Axes, decode_axes, least_squares, load_axes, principal_axes
from krnet.recorders.base import Job, Stored, register
from krnet.recorders.basis import Basis, in_parts, stored_matrix
from krnet.recorders.coded import SEARCH_ROWS, CodedRecorder

AXES_CONFIG = CodedConfig(step=1.0, block_size=MAX_BLOCK)  # the scaled axes are rounded to whole numbers


@dataclass(frozen=True, kw_only=True)
class PCAConfig(CodedConfig):
    step: float = 0.2
    # For the reason given in transform.py.
    centroid: float = 0.25
    components: int | None = None
    """Number of axes; by default all along which the features have a standard deviation of more than 0.45 steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.components is not None:
            check_int("components", self.components, 1)


class Components(Basis):
    """The mean map, and the axes as the file holds them."""

    def __init__(self, mean: Tensor, scale: Tensor, coded: CodedMatrix, axes: Tensor | None = None):
        """mean (values,) float16; scale (k,); coded: the axes times their scales, (values, k); axes (k, values): the
        axes before they were coded, where they are known."""
        self.mean, self.scale, self.coded = mean, scale, coded
        self.num_columns = len(scale)
        self.decoded_axes = decode_axes(coded, AXES_CONFIG, scale)  # (k, values)
        self._exact_axes = axes

    @cached_property
    def axes(self) -> Tensor:
        """The axes (k, values) that features are projected on.

        Where only the decoded axes are known, which are not quite orthonormal, the projection is by least squares.
        """
        return least_squares(self.decoded_axes) if self._exact_axes is None else self._exact_axes

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - self.mean.float()) @ self.axes.T

    def inverse(self, numbers: Tensor) -> Tensor:
        return torch.addmm(self.mean.float(), numbers, self.decoded_axes)

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "scale": self.scale, **self.coded.tensors(AXES)}


@register
class PCARecorder(CodedRecorder):
    name = "pca"
    config_class = PCAConfig
    variants = ({"centroid": -0.5},)  # a slightly lower R2, but a classifier is right more often

    def learn(self, job: Job, config: PCAConfig) -> Axes:
        max_axes = min(math.prod(job.source.shape), len(job.source))
        if config.components is not None and config.components > max_axes:
            raise SettingError(
                f"components is {config.components}; {len(job.source)} samples of shape {job.source.shape} have at "
                f"most {max_axes}"
            )
        return principal_axes(job, config.components)

    def basis(self, job: Job, config: PCAConfig, learned: Axes) -> tuple[Components, PCAConfig]:
        axes, scale, matrix = self._scale_axes(job, config, learned)
        coded = encode(matrix, AXES_CONFIG, measure(matrix, AXES_CONFIG))
        basis = Components(learned.mean.half(), scale, coded, axes)
        return basis, replace(config, components=len(axes))

    def draft(self, job: Job, config: PCAConfig, learned: Axes) -> tuple[Matrix, PCAConfig, dict[str, int]]:
        """As in CodedRecorder, without coding the axes, which would take as long as the rest of the search."""
        axes, scale, matrix = self._scale_axes(job, config, learned)
        basis_bytes = {"mean": 2 * len(learned.mean), "scale": scale.nbytes}
        basis_bytes |= {f"{AXES}{name}": 0 for name in CODED_TENSORS}
        basis_bytes[f"{AXES}stream"] = round(measure(matrix, AXES_CONFIG, max_rows=SEARCH_ROWS).size_bytes)
        forward = lambda x: (x.flatten(1) - learned.mean) @ axes.T  # noqa: E731
        project = lambda ids: in_parts(job, ids, forward)  # noqa: E731
        return Matrix(project, len(job.source), len(axes)), replace(config, components=len(axes)), basis_bytes

    def _scale_axes(self, job: Job, config: PCAConfig, learned: Axes) -> tuple[Tensor, Tensor, Matrix]:
        """The axes that are kept (k, values), their scales (k,), and the scaled axes (values, k) that are coded."""
        num_kept = config.components or max(1, int((learned.std > WORTH * config.step).sum()))
        assert num_kept <= len(learned.axes), f"{num_kept} axes of {len(learned.axes)} that were learned"
        axes, std = learned.axes[:num_kept], learned.std[:num_kept]
        std = torch.where(std > 0, std, 1.0)
        largest = (axes * std[:, None]).abs().max().item()
        scale = std / max(config.step / math.sqrt(job.num_planned), largest / FINEST)
        scaled = (axes * scale[:, None]).T  # (values, k), rounded to whole numbers when coded
        return axes, scale, Matrix.of(scaled)

    def stored_basis(self, shape: Sequence[int], config: PCAConfig) -> tuple[dict[str, Stored], int]:
        num_values, num_kept = math.prod(shape), config.components or 0
        axes = stored_matrix(AXES, num_values, num_kept, MAX_BLOCK, num_decoded=num_values * num_kept)
        basis = {"mean": Stored((num_values,), torch.float16), "scale": Stored((num_kept,), torch.float32)}
        return {**basis, **axes}, num_kept

    def restore(self, samples: Samples, config: PCAConfig, store: TensorStore, low: Tensor, high: Tensor) -> Components:
        num_kept, num_values = config.components, math.prod(samples.shape)
        if num_kept is None:
            raise NotARecordingError(f"the number of components is missing. {RESTORE}")
        mean = store.tensor("mean", shape=(num_values,), dtype=torch.float16).to(low.device)
        scale = store.tensor("scale", shape=(num_kept,), dtype=torch.float32).to(low.device)
        return Components(mean, scale, load_axes(store, num_values, num_kept))
