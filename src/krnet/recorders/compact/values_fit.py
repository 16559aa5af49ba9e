"""A compact KRNet without axes, for samples that are too few to pay for them.

    ids -> code (a whole number for each value) * step + zero -> map -> + Refine(map) -> clamp -> features

It starts as recorder quantized does, with its dead zone, and numbers are read back where those of their bin lie on
average. Then the network learns to repair what rounding leaves, and each code moves to where its own map comes out
best. Bits have no price here: most values are 0 and a few are large, so that a coder of Laplace variables counts those
at several times what they take, and would drive out what tells most.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import torch
from torch import Tensor
from torch.func import functional_call

from krnet.coding.matrix import CENTROID, CodedConfig, Matrix, measure
from krnet.coding.search import largest_fitting
from krnet.coding.weights import pack, rounded, rounding_plan
from krnet.recorders.axes import FINEST
from krnet.recorders.base import Content, Job, Stored, overhead_bytes
from krnet.recorders.compact.codes import ALMOST, SETTLED, CodesFit, fixed_bytes, with_codes
from krnet.recorders.compact.network import CompactConfig, CompactNet, stored_tensors, zero_map
from krnet.recorders.fit import NET
from krnet.recorders.maps import normalised_chunks
from krnet.train.loop import Outcome

DEAD_ZONE = 0.75  # as in quantized.py
NEAR = 8  # numbers up to which bins have centroids of their own; those beyond have those of the last
LOOKED, ROWS = 10, 1024  # iterations between two looks at the file, at so many samples of it
FINER, TRIED = 1.003, 63  # steps at the end, each so many times finer than the last
FASTEST = 0.2  # by which the step changes at a look


def values(job: Job, zero: Tensor, ids: Tensor | None = None) -> Tensor:
    """All samples, or these, less where 0 falls (values,): (n, values), on the job's device."""
    return torch.cat([x.flatten(1) - zero for x in normalised_chunks(job, ids)])


def thinned(codes: Tensor, config: CompactConfig) -> Tensor:
    """Those below a dead zone of more than a step go to the edge of it: they count in where 0 is read back."""
    edge = 0.999 * config.step
    return torch.where(codes.abs() < config.dead_zone * config.step, codes.clamp(-edge, edge), codes)


class ValuesFit(CodesFit):
    def __init__(self, job: Job, config: CompactConfig):
        self.zero = zero_map(job.source.shape, job.stats.low, job.stats.high).to(job.device)
        self.codes = values(job, self.zero)
        self.least_step = max(float(self.codes.abs().max()) / FINEST, 1e-6)
        step = config.step if config.most_bytes is None else max(config.step, self.least_step)
        self.config = replace(config, step=step)
        self.step_size = torch.tensor(step, device=job.device)
        self.centres = torch.zeros(self.codes.shape[1], 2 * NEAR + 1, device=job.device)
        """(values, numbers): steps from a number to where it is read back."""
        self.columns = torch.arange(len(self.centres), device=job.device)
        self.wanted = None
        super().__init__(job, self._start)

    def _start(self) -> CompactNet:
        net = CompactNet(self.job.source.shape, self.config)
        net.mean.copy_(self.zero)
        net.unit.fill_(max(math.sqrt(self.job.stats.variance), 1e-6))
        self.plan = rounding_plan(net.refine, self.config.bits)
        return net

    def stored(self, config: CompactConfig) -> dict[str, Stored]:
        return stored_tensors(self.job.source.shape, len(self.job.source), config)

    def step(self, iteration: int, progress: float) -> Tensor:
        if iteration % LOOKED == 0:
            self._look()
        return super().step(iteration, progress)

    @torch.no_grad()
    def _look(self) -> None:
        """At the file as it would be now: where numbers are read back, and how large it is."""
        config = replace(self.config, step=float(self.step_size))
        found = measure(*self.numbers(config), max_rows=ROWS, num_planned=self.job.num_planned)
        tables = found.tables
        radius = max(tables.radius, NEAR)
        centres = tables.spread(found.centroids, radius)[tables.column, radius - NEAR : radius + NEAR + 1]
        self.centres.copy_(torch.from_numpy(centres / CENTROID))
        if config.most_bytes is not None and float(self.rate) > SETTLED:
            free = max(config.most_bytes - fixed_bytes(self.job, config), 1)
            change = max(-FASTEST, min(FASTEST, math.log(found.size_bytes / (ALMOST * free))))
            self.step_size.mul_(math.exp(change)).clamp_(min=self.least_step)

    def bits(self, codes: Tensor) -> Tensor:
        return self.step_size.new_zeros(())

    def restored(self, codes: Tensor) -> Tensor:
        """Rounded, and as they are read back."""
        whole = codes.sign() * (codes.abs() / self.step_size + (1 - self.config.coding.dead_zone)).floor()
        return (whole + self.centres[self.columns, whole.clamp(-NEAR, NEAR).long() + NEAR]) * self.step_size

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """Computed with codes and weights as the file will hold them."""
        weights = {f"refine.{n}": w for n, w in rounded(dict(self.net.refine.named_parameters()), self.plan).items()}
        codes = self.chosen.detach()
        return functional_call(self.net, weights, (self.chosen + (self.restored(codes) - codes),))

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return super().make_optimizers() if self.config.c1 else []

    def numbers(self, config: CompactConfig) -> tuple[Matrix, CodedConfig]:
        return Matrix(lambda rows: thinned(self.codes[rows.to(self.device)], config), *self.codes.shape), config.coding

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"centres": self.centres}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.centres.copy_(state["centres"])

    @torch.no_grad()
    def content(self, outcome: Outcome) -> Content:
        if self.config.most_bytes is not None:  # codes may have become wider
            self.least_step = max(self.least_step, float(self.codes.abs().max()) / FINEST)
            self.step_size.clamp_(min=self.least_step)
        refine = pack(dict(self.net.refine.named_parameters()), self.plan) if self.config.c1 else {}
        tensors = {f"{NET}{name}": value for name, value in refine.items()} | {"unit": self.net.unit.clone()}
        tensors |= {"low": self.job.stats.low, "high": self.job.stats.high}
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        growth = self.job.num_planned / len(self.codes)
        config = replace(self.config, step=float(self.step_size))
        if config.most_bytes is not None:
            free = config.most_bytes - sum(t.nbytes for t in tensors.values())
            free -= overhead_bytes(self.job, len(self.stored(config)), asdict(config))

            def finer(n: int) -> CompactConfig:
                return replace(config, step=max(config.step / FINER**n, self.least_step))

            # What is left over makes the step finer.
            last = largest_fitting(lambda n: measure(*self.numbers(finer(n))).size_bytes * growth <= free, 0, TRIED)
            config = finer(last)
        return with_codes(self.job, tensors, config, outcome, self.numbers, growth=growth)
