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
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from krnet.config import check_int
from krnet.errors import NotARecordingError, OversizedRecordingError, SettingError
from krnet.quantize import RESTORE
from krnet.recorders._basis import Basis
from krnet.recorders._coded import SEARCHED, CodedRecorder
from krnet.recorders._features import mean_map, normalised, normalised_chunks
from krnet.recorders._numbers import (
    CODED_TENSORS,
    MAX_BLOCK,
    CodedConfig,
    CodedNumbers,
    Numbers,
    Reader,
    encode,
    survey,
)
from krnet.recorders.base import Job, TensorStore, register
from krnet.samples import Samples

AXES = "axes."
WORTH = 0.45  # steps of standard deviation from which an axis is kept: fewer save less than they cost
EXACT = 8192  # rows and columns of the largest matrix from which all axes are found
SKETCHED = 1024  # axes looked for in larger samples, if the settings do not say
OVERSAMPLED, PASSES = 32, 4  # of the sketch: Halko et al. 2011
FINEST = 2000  # steps on either side that an axis may have: a 12-bit axis is as good as a float
SMALL = 1 << 24  # numbers that a basis may have whatever the size of its file
NUMBERS_PER_BYTE = 1 << 12
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


def load_axes(store: TensorStore, num_values: int, num_kept: int) -> CodedNumbers:
    """Axes, scaled, (values, k); refused where the file has too few bytes for so many numbers."""
    coded = CodedNumbers.load(store, AXES, num_values, num_kept, MAX_BLOCK)
    most = SMALL + NUMBERS_PER_BYTE * len(coded.blocks.stream)
    if num_kept * num_values > most:
        raise OversizedRecordingError(
            f"{num_kept} components of {num_values} values in {len(coded.blocks.stream)} bytes; expected at most "
            f"{most} numbers. {RESTORE}"
        )
    return coded


def least_squares(axes: Tensor) -> Tensor:
    """(k, values) -> (k, values), products with which give the point along the axes that lies nearest."""
    exact = axes.double()
    products = exact @ exact.T
    products.diagonal().add_(1e-6)  # an axis may have been rounded to nothing
    return torch.linalg.solve(products, exact).float()


class Components(Basis):
    def __init__(self, mean: Tensor, scale: Tensor, coded: CodedNumbers, axes: Tensor | None = None):
        """mean (values,) float16; scale (k,); coded: the axes, scaled, (values, k); axes (k, values): not yet coded."""
        self.mean, self.scale, self.coded = mean, scale, coded
        self.num_columns = len(scale)
        scaled = Reader(coded, WHOLE, mean.device).read(torch.arange(len(mean)))
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
    setting_names = frozenset(f.name for f in fields(PCAConfig))
    variants = ("centroid=-0.5",)  # a little less R2, and more that a classifier gets right

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
        basis = Components(learned.mean.half(), scale, encode(numbers, WHOLE, survey(numbers, WHOLE)), axes)
        return basis, replace(config, components=len(axes))

    def draft(self, job: Job, config: PCAConfig, learned: Axes) -> tuple[Numbers, PCAConfig, dict[str, int]]:
        """Without coding the axes, which would take as long as all the rest of a search."""
        axes, scale, numbers = self._scaled(job, config, learned)
        own = {"mean": 2 * len(learned.mean), "scale": scale.nbytes}
        own |= {f"{AXES}{name}": 0 for name in CODED_TENSORS}
        own[f"{AXES}stream"] = round(survey(numbers, WHOLE, max_rows=SEARCHED).size_bytes)
        rows = lambda ids: (normalised(job, ids).flatten(1) - learned.mean) @ axes.T  # noqa: E731
        return Numbers(rows, len(job.source), len(axes)), replace(config, components=len(axes)), own

    def _scaled(self, job: Job, config: PCAConfig, learned: Axes) -> tuple[Tensor, Tensor, Numbers]:
        """The axes that are kept (k, values), their scales (k,), and the numbers that are to be coded of them."""
        num_kept = config.components or max(1, int((learned.std > WORTH * config.step).sum()))
        assert num_kept <= len(learned.axes), f"{num_kept} axes of {len(learned.axes)} that were learned"
        axes, std = learned.axes[:num_kept], learned.std[:num_kept]
        std = torch.where(std > 0, std, 1.0)
        wide = (axes * std[:, None]).abs().max().item()
        scale = std / max(config.step / math.sqrt(job.num_planned), wide / FINEST)
        scaled = (axes * scale[:, None]).T  # (values, k), to be rounded to whole numbers
        return axes, scale, Numbers.of(scaled)

    def restore(self, samples: Samples, config: PCAConfig, store: TensorStore, low: Tensor, high: Tensor) -> Components:
        num_kept, num_values = config.components, math.prod(samples.shape)
        if num_kept is None:
            raise NotARecordingError(f"the number of components is missing. {RESTORE}")
        mean = store.tensor("mean", shape=(num_values,), dtype=torch.float16).to(low.device)
        scale = store.tensor("scale", shape=(num_kept,), dtype=torch.float32).to(low.device)
        return Components(mean, scale, load_axes(store, num_values, num_kept))
