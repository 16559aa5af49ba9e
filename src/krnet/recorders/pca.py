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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from krnet.coding.entropy import RESTORE
from krnet.coding.matrix import (
    CODED_TENSORS,
    MAX_BLOCK,
    CodedConfig,
    CodedMatrix,
    Matrix,
    MatrixReader,
    encode,
    measure,
)
from krnet.config import check_int
from krnet.errors import NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.axes import AXES, FINEST, WORTH, Axes, least_squares, load_axes, principal_axes
from krnet.recorders.base import Job, Stored, register
from krnet.recorders.basis import Basis, stored_matrix
from krnet.recorders.coded import SEARCH_ROWS, CodedRecorder
from krnet.recorders.maps import normalised

WHOLE = CodedConfig(step=1.0, block_size=MAX_BLOCK)  # how the axes are coded, once they are scaled


@dataclass(frozen=True, kw_only=True)
class PCAConfig(CodedConfig):
    step: float = 0.2
    # As in transform.py.
    centroid: float = 0.25
    components: int | None = None
    """Axes kept; by default those along which the features vary by more than 0.45 steps (standard deviation)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.components is not None:
            check_int("components", self.components, 1)


class Components(Basis):
    def __init__(self, mean: Tensor, scale: Tensor, coded: CodedMatrix, axes: Tensor | None = None):
        """mean (values,) float16; scale (k,); coded: the axes, scaled, (values, k); axes (k, values): not yet coded."""
        self.mean, self.scale, self.coded = mean, scale, coded
        self.num_columns = len(scale)
        scaled = MatrixReader(coded, WHOLE, mean.device).read(torch.arange(len(mean)))
        self.restored = (scaled / scale).T.contiguous()  # (k, values)
        self._axes = axes

    @cached_property
    def axes(self) -> Tensor:
        """What features are seen along. Rounded axes are not quite orthonormal: then those of the least squares."""
        return least_squares(self.restored) if self._axes is None else self._axes

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - self.mean.float()) @ self.axes.T

    def inverse(self, numbers: Tensor) -> Tensor:
        return torch.addmm(self.mean.float(), numbers, self.restored)

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "scale": self.scale, **self.coded.tensors(AXES)}


@register
class PCARecorder(CodedRecorder):
    name = "pca"
    config_class = PCAConfig
    variants = ({"centroid": -0.5},)  # a little less R2, and more that a classifier gets right

    def learn(self, job: Job, config: PCAConfig) -> Axes:
        most = min(math.prod(job.source.shape), len(job.source))
        if config.components is not None and config.components > most:
            raise SettingError(
                f"components is {config.components}; {len(job.source)} samples of shape {job.source.shape} have at "
                f"most {most}"
            )
        return principal_axes(job, config.components)

    def basis(self, job: Job, config: PCAConfig, learned: Axes) -> tuple[Components, PCAConfig]:
        axes, scale, numbers = self._scaled(job, config, learned)
        basis = Components(learned.mean.half(), scale, encode(numbers, WHOLE, measure(numbers, WHOLE)), axes)
        return basis, replace(config, components=len(axes))

    def draft(self, job: Job, config: PCAConfig, learned: Axes) -> tuple[Matrix, PCAConfig, dict[str, int]]:
        """Without coding the axes, which would take as long as all the rest of a search."""
        axes, scale, numbers = self._scaled(job, config, learned)
        own = {"mean": 2 * len(learned.mean), "scale": scale.nbytes}
        own |= {f"{AXES}{name}": 0 for name in CODED_TENSORS}
        own[f"{AXES}stream"] = round(measure(numbers, WHOLE, max_rows=SEARCH_ROWS).size_bytes)
        rows = lambda ids: (normalised(job, ids).flatten(1) - learned.mean) @ axes.T  # noqa: E731
        return Matrix(rows, len(job.source), len(axes)), replace(config, components=len(axes)), own

    def _scaled(self, job: Job, config: PCAConfig, learned: Axes) -> tuple[Tensor, Tensor, Matrix]:
        """The axes that are kept (k, values), their scales (k,), and the numbers that are to be coded of them."""
        num_kept = config.components or max(1, int((learned.std > WORTH * config.step).sum()))
        assert num_kept <= len(learned.axes), f"{num_kept} axes of {len(learned.axes)} that were learned"
        axes, std = learned.axes[:num_kept], learned.std[:num_kept]
        std = torch.where(std > 0, std, 1.0)
        wide = (axes * std[:, None]).abs().max().item()
        scale = std / max(config.step / math.sqrt(job.num_planned), wide / FINEST)
        scaled = (axes * scale[:, None]).T  # (values, k), to be rounded to whole numbers
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
