"""Trains a compact KRNet without axes, for samples that are too few to pay for axes.

    job, config -> ValuesFit, run by run_fit -> Content
    ids -> code (a symbol for each value) -> centroid * step + zero -> map -> + Refine(map) -> clamp -> features

The fit starts as recorder quantized: the same dead zone, symbols decoded to the centroids of their bins. Then the
network learns to correct the quantisation error, and each code moves to where its own map has the least error.
Bits have no price here. Most values are 0 and a few are large: laplace_bits would overestimate the bits of the large
ones several times, and the price would remove the values that carry most information.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from krnet.coding.matrix import CENTROID, CodedConfig, Matrix, measure
from krnet.coding.search import largest_fitting
from krnet.coding.weights import pack, rounded, rounding_plan
from krnet.recorders.axes import FINEST
from krnet.recorders.base import Content, Job, Stored
from krnet.recorders.compact.codes import BUDGET_FILL, FREEZE_LR_SHARE, CodesFit, content_with_codes, fixed_bytes
from krnet.recorders.compact.network import MAX_STEP, CompactConfig, CompactNet, stored_tensors, zero_map
from krnet.recorders.maps import normalised_chunks
from krnet.recorders.network_sizes import NET
from krnet.recorders.sizes import overhead_bytes
from krnet.train.loop import Outcome

MIN_STEP = 2e-6  # of constant features: above the 1e-6 that the settings allow, also as float32
DEAD_ZONE = 0.75  # as in quantized.py
MAX_CENTROID_SYMBOL = 8  # while training, symbols beyond it share its centroid
MEASURE_EVERY, MEASURE_ROWS = 10, 1024  # the file is measured every 10 iterations, on at most 1024 samples
MAX_LOG_STEP_CHANGE = 0.2  # a measurement changes the step by at most a factor exp(0.2)
REFINE_RATIO, MAX_REFINEMENTS = 1.003, 63  # at the end, steps up to 1.003 ** 63 times finer are tried


def values_minus_zero(job: Job, zero: Tensor, ids: Tensor | None = None) -> Tensor:
    """x - zero (values,) for all samples x, or for those with these IDs: (n, values), on the job's device."""
    return torch.cat([x.flatten(1) - zero for x in normalised_chunks(job, ids)])


class ValuesFit(CodesFit):
    """The fit without axes: codes (samples, values) are the maps themselves, minus `zero`."""

    def __init__(self, job: Job, config: CompactConfig):
        self.zero = zero_map(job.source.shape, job.stats.low, job.stats.high).to(job.device)  # (values,)
        self.codes = values_minus_zero(job, self.zero)
        self.least_step = max(float(self.codes.abs().max()) / FINEST, MIN_STEP)
        step = config.step if config.most_bytes is None else max(config.step, self.least_step)
        self.config = replace(config, step=step)
        self.step_size = torch.tensor(step, device=job.device)
        self.centroids = torch.zeros(self.codes.shape[1], 2 * MAX_CENTROID_SYMBOL + 1, device=job.device)
        """(values, symbols): centroid of a symbol's bin, minus the symbol, in steps."""
        self.columns = torch.arange(len(self.centroids), device=job.device)
        self.target_bits = None  # the step follows measured sizes instead
        super().__init__(job, self._make_net)

    def _make_net(self) -> CompactNet:
        net = CompactNet(self.job.source.shape, self.config)
        net.mean.copy_(self.zero)
        net.unit.fill_(max(math.sqrt(self.job.stats.variance), 1e-6))
        self.plan = rounding_plan(net.refine, self.config.bits)
        return net

    def stored(self, config: CompactConfig) -> dict[str, Stored]:
        return stored_tensors(self.job.source.shape, len(self.job.source), config)

    def step(self, iteration: int, progress: float) -> Tensor:
        if iteration % MEASURE_EVERY == 0:
            self._measure_file()
        return super().step(iteration, progress)

    @torch.no_grad()
    def _measure_file(self) -> None:
        """Update the centroids, and move the quantisation step so that the file meets its budget."""
        self._stay_within_tables()
        config = replace(self.config, step=float(self.step_size))
        stats = measure(*self.code_matrix(config), max_rows=MEASURE_ROWS, num_planned=self.job.num_planned)
        tables, last = stats.tables, MAX_CENTROID_SYMBOL
        radius = max(tables.radius, last)
        centroids = tables.spread(stats.centroids, radius)[tables.column, radius - last : radius + last + 1]
        self.centroids.copy_(torch.from_numpy(centroids / CENTROID))
        if config.most_bytes is not None and float(self.lr_share) > FREEZE_LR_SHARE:
            free_bytes = max(config.most_bytes - fixed_bytes(self.job, config), 1)
            log_excess = math.log(stats.size_bytes / (BUDGET_FILL * free_bytes))
            log_change = max(-MAX_LOG_STEP_CHANGE, min(MAX_LOG_STEP_CHANGE, log_excess))
            self.step_size.mul_(math.exp(log_change)).clamp_(min=self.least_step, max=MAX_STEP)

    def _stay_within_tables(self) -> None:
        """Coarsen the step where codes have grown: a finer one needs more symbols than the coder's tables have."""
        if self.config.most_bytes is not None:
            self.least_step = max(self.least_step, float(self.codes.abs().max()) / FINEST)
            self.step_size.clamp_(min=self.least_step, max=MAX_STEP)

    def bits(self, codes: Tensor) -> Tensor:
        """0: bits have no price here (see the module's docstring)."""
        return self.step_size.new_zeros(())

    def dequantize(self, codes: Tensor) -> Tensor:
        """The codes as a file would give them back: quantised, and decoded to the centroids of their bins."""
        symbols = codes.sign() * (codes.abs() / self.step_size + (1 - self.config.coding.dead_zone)).floor()
        index = symbols.clamp(-MAX_CENTROID_SYMBOL, MAX_CENTROID_SYMBOL).long() + MAX_CENTROID_SYMBOL
        return (symbols + self.centroids[self.columns, index]) * self.step_size

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """Replays with codes and weights quantised as in the file; the gradient passes straight through."""
        weights = {f"refine.{n}": w for n, w in rounded(dict(self.net.refine.named_parameters()), self.plan).items()}
        codes = self.own_codes.detach()
        return functional_call(self.net, weights, (self.own_codes + (self.dequantize(codes) - codes),))

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return super().make_optimizers() if self.config.c1 else []

    def code_matrix(self, config: CompactConfig) -> tuple[Matrix, CodedConfig]:
        """The codes as they are encoded, and how they are coded."""
        matrix = Matrix(lambda rows: config.apply_dead_zone(self.codes[rows.to(self.device)]), *self.codes.shape)
        return matrix, config.coding

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"centroids": self.centroids}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.centroids.copy_(state["centroids"])

    @torch.no_grad()
    def content(self, outcome: Outcome) -> Content:
        self._stay_within_tables()
        refine = pack(dict(self.net.refine.named_parameters()), self.plan) if self.config.c1 else {}
        tensors = {f"{NET}{name}": value for name, value in refine.items()} | {"unit": self.net.unit.clone()}
        tensors |= {"low": self.job.stats.low, "high": self.job.stats.high}
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        growth = self.job.num_planned / len(self.codes)
        config = replace(self.config, step=float(self.step_size))
        if config.most_bytes is not None:
            free_bytes = config.most_bytes - sum(t.nbytes for t in tensors.values())
            free_bytes -= overhead_bytes(self.job, len(self.stored(config)), config.to_settings())

            def refined(n: int) -> CompactConfig:
                return replace(config, step=max(config.step / REFINE_RATIO**n, self.least_step))

            def fits(n: int) -> bool:
                stats = measure(*self.code_matrix(refined(n)), num_planned=self.job.num_planned)
                return stats.size_bytes <= free_bytes

            # The fit aims below the budget: the bytes that are still free allow a finer step.
            config = refined(largest_fitting(fits, 0, MAX_REFINEMENTS))
        return content_with_codes(self.job, tensors, config, outcome, self.code_matrix, growth=growth)
