"""Trains codes, axes and network of a compact KRNet together, as they will be stored.

    job, config, principal axes -> CompactFit, run by run_fit -> Content

    code (P k,) --quantise--> @ quantised axes (k, values of a block) + mean -> map -> + Refine(map) -> loss
      loss -> gradients -> Adam: axes, mean, Refine;   a Newton-like step: codes;   the bits in use: quantisation step

The fit starts from principal components, quantised as in recorder pca: one step for all coordinates gives wide axes
more bits. Then three things improve together. The network learns what features look like (zeros, edges, which
channels go together) and corrects the map; the axes learn what the network leaves over; each code moves to the place
where its own map has the least error. The loss adds a price for the bits of codes and axes, estimated as the entropy of
quantised Laplace variables (Sullivan 1996). The quantisation step is adjusted so that the file meets its budget.

Quantisation passes gradients straight through (Bengio et al. 2013). Codes need no optimizer: along orthonormal axes the
squared error of a sample has the same curvature in all directions, so gradient descent is nearly Newton's method.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from krnet.coding.matrix import CodedConfig, Matrix, encode, evenly_spaced, measure
from krnet.coding.weights import StraightThrough, pack, rounded, rounding_plan
from krnet.device import exact_math
from krnet.recorders.axes import AXES, FINEST, MAX_EXACT_SIZE, Axes, block_axes, principal_axes
from krnet.recorders.base import Content, Job
from krnet.recorders.compact.codes import (
    BUDGET_FILL,
    MEASURED_ROWS,
    CodesFit,
    content_with_codes,
    estimated_bytes,
    fixed_bytes,
    laplace_bits,
    measured_columns,
)
from krnet.recorders.compact.network import AXES_CODING, MAX_STEP, CompactConfig, CompactNet
from krnet.recorders.grids import Grid
from krnet.recorders.maps import coordinates, once_for_features
from krnet.recorders.network_sizes import NET
from krnet.train.loop import Outcome

MEASURED_AT, MEASURE_EVERY = (10, 20, 40, 80, 160), 250  # iterations at which the file is measured
AXES_LR_SHARE = 0.1  # learning rate of axes and mean, as a share of the network's


class CompactFit(CodesFit):
    """The fit with axes."""

    def __init__(self, job: Job, config: CompactConfig, axes: Axes):
        k, device = config.components, job.device
        self.grid = config.grid(job.source.shape)
        self.axis_std, self.least_axis_step = axis_std_and_least_step(axes, k)
        self.codes = coordinates(job, axes.mean, axes.axes[:k].T, self.grid)  # (samples, P k)
        # A finer step would need more symbols than the coder's tables have.
        self.least_step = float(self.codes.abs().max()) / FINEST
        step = config.step if config.most_bytes is None else max(config.step, self.least_step)
        self.config, self.start_axes = replace(config, step=step), axes
        self.step_size = torch.tensor(step, device=device)
        self.target_bits = None
        # Of the first codes, so that a resumed fit has the same.
        self.measured_columns = measured_columns(self.codes, k, self.grid)
        super().__init__(job, self._make_net)

    def _make_net(self) -> CompactNet:
        """The network that replays principal components; also sets `plan` and `target_bits`."""
        net = CompactNet(self.job.source.shape, self.config)
        assert net.axes is not None, "no axes; values alone are fitted elsewhere"
        with torch.no_grad():
            net.axes.copy_(self.start_axes.axes[: self.config.components])
            net.mean.copy_(self.start_axes.mean)
            net.unit.fill_(max(math.sqrt(self.job.stats.variance), 1e-6))
        self.plan = rounding_plan(net.refine, self.config.bits)
        if self.config.most_bytes is not None:
            with torch.no_grad():
                self.target_bits = self._find_target_bits(net.axes.to(self.device))
        return net

    def _find_target_bits(self, axes: Tensor) -> Tensor:
        """Bits per sample that fill the budget, as laplace_bits estimates them; its ratio to real sizes is measured."""
        assert self.config.most_bytes is not None, "no budget"
        config = replace(self.config, step=float(self.step_size))
        free_bytes = max(self.config.most_bytes - fixed_bytes(self.job, config), 1)
        rows, columns = evenly_spaced(len(self.codes), MEASURED_ROWS).to(self.device), self.measured_columns
        axes_part, codes_part = self.matrices(axes, config)
        measured_bytes = measure(*axes_part).size_bytes
        measured_bytes += estimated_bytes(*codes_part, columns, self.job.num_planned)
        more = 1 if columns is None else self.codes.shape[1] / len(columns)
        current_bits = more * self.mean_bits(rows, columns) + self.axis_bits(axes)
        return current_bits * (BUDGET_FILL * free_bytes / measured_bytes)

    def step(self, iteration: int, progress: float) -> Tensor:
        due = iteration in MEASURED_AT or (iteration and iteration % MEASURE_EVERY == 0)
        if due and self.target_bits is not None:
            with torch.no_grad():
                self._stay_within_tables()
                self.target_bits.copy_(self._find_target_bits(self.axes))
        return super().step(iteration, progress)

    def _stay_within_tables(self) -> None:
        """Coarsen steps where codes or axes have grown: a finer one needs more symbols than the coder's tables have."""
        if self.target_bits is not None:
            self.step_size.clamp_(min=float(self.codes.abs().max()) / FINEST)
        largest = (self.axes * self.axis_std[:, None]).abs().max()
        self.least_axis_step.copy_(torch.maximum(self.least_axis_step, largest / FINEST))

    @property
    def growth(self) -> float:
        """Planned samples / samples now."""
        return self.job.num_planned / len(self.codes)

    def matrices(self, axes: Tensor, config: CompactConfig) -> tuple[tuple[Matrix, CodedConfig], ...]:
        """Axes and codes as they are encoded: (matrix, how it is coded) for each."""
        scaled_axes = (axes.detach() * self.scale).T  # (values of a block, k)
        return (
            (Matrix.of(scaled_axes), AXES_CODING),
            (
                Matrix(lambda rows: config.apply_dead_zone(self.codes[rows.to(self.device)]), *self.codes.shape),
                config.coding,
            ),
        )

    @property
    def scale(self) -> Tensor:
        """(k, 1): each axis is multiplied by its scale before it is rounded to whole numbers."""
        num_blocks = self.job.num_planned * self.grid.num_blocks
        return axis_scale(self.axis_std, self.least_axis_step, self.step_size, num_blocks)[:, None]

    @property
    def axes(self) -> nn.Parameter:
        """(k, values of a block), not quantised."""
        assert self.net.axes is not None, "no axes; values alone are fitted elsewhere"
        return self.net.axes

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        cuda, lr = self.device.type == "cuda", self.job.fit.lr

        def adam(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            peak = torch.tensor(lr, device=self.device) if cuda else lr  # a CUDA graph reads it from device memory
            return torch.optim.Adam(params, lr=peak, fused=cuda, foreach=not cuda, capturable=cuda)

        optimizers = [adam(list(self.net.parameters(recurse=False)), AXES_LR_SHARE * lr)]  # axes and mean
        return [adam(list(self.net.refine.parameters()), lr), *optimizers] if self.config.c1 else optimizers

    def axis_bits(self, axes: Tensor) -> Tensor:
        """Estimated bits of the axes, divided by the planned number of samples."""
        return laplace_bits((axes * self.scale).abs().mean(1)).sum() * axes.shape[1] / self.job.num_planned

    def bits(self, codes: Tensor) -> Tensor:
        """Estimated bits per sample: its code, and its share of the axes."""
        return super().bits(codes) + self.axis_bits(self.axes)

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """Replays with codes and weights quantised as in the file."""
        weights = rounded(dict(self.net.refine.named_parameters()), self.plan)
        weights = {f"refine.{name}": value for name, value in weights.items()}
        weights["axes"] = StraightThrough.apply(self.axes, 1 / self.scale)
        weights["mean"] = StraightThrough.apply(self.net.mean, None)
        return functional_call(self.net, weights, (StraightThrough.apply(self.own_codes, self.step_size),))

    @torch.no_grad()
    def after_step(self, ids: Tensor) -> None:
        """Move the codes; then move the quantisation step so that the file meets its budget."""
        super().after_step(ids)
        self.follow_target(self.step_size, self.current_bits, self.least_step, MAX_STEP)

    def state(self) -> dict[str, Tensor]:
        more = {} if self.target_bits is None else {"target_bits": self.target_bits}
        return super().state() | {"least_axis_step": self.least_axis_step, **more}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        if self.target_bits is not None and "target_bits" in state:  # checkpoints of earlier versions lack it
            self.target_bits.copy_(state["target_bits"])
        if "least_axis_step" in state:
            self.least_axis_step.copy_(state["least_axis_step"])

    @torch.no_grad()
    def content(self, outcome: Outcome) -> Content:
        self._stay_within_tables()
        refine = pack(dict(self.net.refine.named_parameters()), self.plan) if self.config.c1 else {}
        tensors = {f"{NET}{name}": value for name, value in refine.items()}
        axes, _ = self.matrices(self.axes, self.config)
        tensors |= encode(*axes, measure(*axes)).tensors(AXES)
        tensors |= {"mean": self.net.mean.half(), "scale": self.scale[:, 0].half(), "unit": self.net.unit.clone()}
        tensors |= {"low": self.job.stats.low, "high": self.job.stats.high}
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        config = replace(self.config, step=float(self.step_size))
        return content_with_codes(
            self.job, tensors, config, outcome, lambda c: self.matrices(self.axes, c)[1], growth=self.growth
        )


def axis_std_and_least_step(axes: Axes, components: int) -> tuple[Tensor, Tensor]:
    """Standard deviation along each axis (k,), and the finest step that the coder's tables allow for std * axis."""
    std = axes.std[:components]
    std = torch.where(std > 0, std, 1.0)
    return std, (axes.axes[:components] * std[:, None]).abs().max() / FINEST


def axis_scale(std: Tensor, least_step: Tensor, step: Tensor, num_blocks: int) -> Tensor:
    """(k,): std / max(least_step, step / sqrt(N)), rounded to float16. Axes times their scale are rounded.

    As in recorder pca: an error of an axis counts in the N blocks of all samples, in proportion to std. With this scale
    one more bit for an axis gains as much as one more bit for the codes.
    """
    scale = std / torch.maximum(least_step, step / math.sqrt(num_blocks))
    return scale.clamp(max=torch.finfo(torch.float16).max).half().float()


def learn_axes(job: Job, grid: Grid) -> Axes:
    """The principal axes of the features or of their blocks, computed once: a search asks for them several times."""
    learned: dict[Any, Axes] = once_for_features(job, "compact", None, dict)
    components = job.settings.get("components") if grid.block_values > MAX_EXACT_SIZE else None
    key = grid.block, components  # a DCT does not change them
    if key not in learned:
        with exact_math(), torch.inference_mode():
            learned[key] = principal_axes(job, components) if grid.num_blocks == 1 else block_axes(job, grid)
    return learned[key]
