"""A compact KRNet grows: its network stays as it is, new samples get codes of their own.

    new features -> nearest point along the axes -> code, which goes down its own error through the network
    old codes, as they are, and new ones -> entropy-coded together -> the file, with the earlier one's network

A network that was fitted to some classes serves others of the same trunk: what features look like, it knows.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict

import torch
from torch import Tensor

from krnet.coding.matrix import CODED_TENSORS, CodedConfig, Matrix, measure
from krnet.coding.weights import StraightThrough
from krnet.config import from_dict
from krnet.device import exact_math
from krnet.recorders.axes import least_squares
from krnet.recorders.base import Content, Earlier, Job, Recorder, overhead_bytes
from krnet.recorders.compact.codes import ALMOST, CodesFit, with_codes
from krnet.recorders.compact.network import (
    CODES,
    CompactConfig,
    read_codes,
    read_config,
    read_network,
    stored_tensors,
    zero_map,
)
from krnet.recorders.compact.values_fit import DEAD_ZONE, thinned, values
from krnet.recorders.fit import run_fit
from krnet.recorders.growth import keep_settings, rest
from krnet.recorders.maps import coordinates
from krnet.train.loop import Outcome

DEAREST = 64.0  # price of a bit, in what it is worth


class GrownFit(CodesFit):
    """Codes of new samples, for a network that stays as it is."""

    def __init__(self, job: Job, config: CompactConfig, whole: Job):
        """job: of the new samples; whole: of all."""
        assert job.start is not None, "nothing to grow from"
        self.whole, self.config, self.start, device = whole, config, job.start, job.device
        self.old = read_codes(len(self.start), math.prod(job.source.shape), config, self.start, device)
        net = read_network(job.source.shape, config, self.start).to(device).requires_grad_(False)
        assert net.axes is not None, "no axes; values grow by grow_values"
        self.step_size = torch.tensor(config.step, device=device)
        self.price = torch.ones((), device=device)
        with exact_math(), torch.no_grad():
            # The axes are no longer quite orthonormal: what lies nearest to a map along them.
            self.codes = coordinates(job, net.mean, least_squares(net.axes).T)
            self.wanted = self._wanted()
        super().__init__(job, lambda: net)

    def _wanted(self) -> Tensor | None:
        if self.config.most_bytes is None:
            return None
        stored = stored_tensors(self.whole.source.shape, len(self.whole.source), self.config)
        before = sum(tensor.nbytes for tensor in network(self.start, self.config).values())
        before += sum(self.start.tensor(f"{CODES}{name}").nbytes for name in CODED_TENSORS)
        before += overhead_bytes(self.whole, len(stored), asdict(self.config))
        found = measure(Matrix.of(self.codes), self.config.coding)
        share = max(self.config.most_bytes - before, 1) / found.size_bytes
        return super().bits(self.codes) * min(ALMOST * share, 1.0)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return []

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.net(StraightThrough.apply(self.chosen, self.step_size))

    def bits(self, codes: Tensor) -> Tensor:
        """At a price: the step does not change, so that what goes beyond the room there is must."""
        return super().bits(codes) * self.price

    @torch.no_grad()
    def after_step(self, ids: Tensor) -> None:
        super().after_step(ids)
        self.follow(self.price, self.taken / self.price, 1.0, DEAREST)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"price": self.price}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.price.copy_(state["price"])

    def numbers(self, config: CompactConfig) -> tuple[Matrix, CodedConfig]:
        """Codes of all samples: those from before are whole steps, and stay what they are."""
        held = len(self.start)

        def read(rows: Tensor) -> Tensor:
            new = config.thinned(self.codes[(rows[rows >= held] - held).to(self.device)])
            return torch.cat([self.old.read(rows[rows < held]), new])

        return Matrix(read, held + len(self.codes), config.components), config.coding

    @torch.no_grad()
    def content(self, outcome: Outcome) -> Content:
        return with_codes(self.whole, network(self.start, self.config), self.config, outcome, self.numbers)


def network(start: Earlier, config: CompactConfig) -> dict[str, Tensor]:
    """All that the earlier file has beside its codes."""
    stored = stored_tensors(start.shape, len(start), config)
    return {name: start.tensor(name) for name in stored if not name.startswith(CODES)}


def grow_values(job: Job, config: CompactConfig, whole: Job) -> Content:
    """Where there are no axes nothing is fitted: new values are rounded as the old ones were, and read back there."""
    assert job.start is not None, "nothing to grow from"
    started, start = time.perf_counter(), job.start
    held = read_codes(len(start), math.prod(job.source.shape), config, start, job.device).coded
    codes = values(job, zero_map(job.source.shape, job.stats.low, job.stats.high).to(job.device))

    def numbers(config: CompactConfig) -> tuple[Matrix, CodedConfig]:
        return Matrix.of(thinned(codes, config)), config.coding

    outcome = Outcome(0, time.perf_counter() - started, "done")
    return with_codes(whole, network(start, config), config, outcome, numbers, held=held)


def grow(recorder: Recorder, job: Job) -> Content:
    assert job.start is not None, "nothing to grow from"
    others = rest(job, recorder.name)
    config = read_config(job.start.settings)
    free = {"dead_zone": 0.5 if config.components else DEAD_ZONE, "most_bytes": None}
    keep_settings(job, config, tuple(free))
    config = from_dict(CompactConfig, asdict(config) | free | dict(job.settings))
    if not config.components:
        return grow_values(others, config, job)
    return run_fit(recorder, GrownFit(others, config, job), asdict(config))
