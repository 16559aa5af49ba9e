"""A compact KRNet grows: its network stays as it is, new samples get codes of their own.

    new features -> nearest point along the axes -> code, which goes down its own error through the network
    old codes, as they are, and new ones -> entropy-coded together -> the file, with the earlier one's network

A network that was fitted to some classes serves others of the same trunk: what features look like, it knows.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from krnet import parallel
from krnet.config import from_dict
from krnet.errors import InputError
from krnet.lowbit import PACKED_TENSORS, StraightThrough
from krnet.recorders._compact_network import CODES, CompactConfig, read_codes, read_config, read_network
from krnet.recorders._features import coordinates
from krnet.recorders._fitting import NET, run_fit
from krnet.recorders._numbers import CODED_TENSORS, CodedConfig, Numbers, survey
from krnet.recorders._rest import keep_settings, rest
from krnet.recorders.base import Content, Job, Recorder, overhead_bytes
from krnet.recorders.compact import ALMOST, FILE_TENSORS, CodesFit, with_codes
from krnet.recorders.pca import AXES, least_squares
from krnet.training import Outcome

DEAREST = 64.0  # price of a bit, in what it is worth


class GrownFit(CodesFit):
    """Codes of new samples, for a network that stays as it is."""

    def __init__(self, job: Job, config: CompactConfig, whole: Job):
        """job: of the new samples; whole: of all."""
        assert job.start is not None, "nothing to grow from"
        self.whole, self.config, self.start, device = whole, config, job.start, job.device
        self.old = read_codes(len(self.start), config, self.start, device)
        net = read_network(job.source.shape, config, self.start).to(device).requires_grad_(False)
        self.step_size = torch.tensor(config.step, device=device)
        self.price = torch.ones((), device=device)
        with parallel.exact(), torch.no_grad():
            # The axes are no longer quite orthonormal: what lies nearest to a map along them.
            self.codes = coordinates(job, net.mean, least_squares(net.axes).T)
            self.wanted = self._wanted()
        super().__init__(job, lambda: net)

    def _wanted(self) -> Tensor | None:
        if self.config.most_bytes is None:
            return None
        before = sum(tensor.nbytes for tensor in self.network().values())
        before += sum(self.start.tensor(f"{CODES}{name}").nbytes for name in CODED_TENSORS)
        before += overhead_bytes(self.whole, FILE_TENSORS, asdict(self.config))
        found = survey(Numbers.of(self.codes), self.config.coding)
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
    def moved(self, ids: Tensor) -> None:
        super().moved(ids)
        self.follow(self.price, self.taken / self.price, 1.0, DEAREST)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"price": self.price}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.price.copy_(state["price"])

    def numbers(self, config: CompactConfig) -> tuple[Numbers, CodedConfig]:
        """Codes of all samples: those from before are whole steps, and stay what they are."""
        held = len(self.start)

        def read(rows: Tensor) -> Tensor:
            new = config.thinned(self.codes[(rows[rows >= held] - held).to(self.device)])
            return torch.cat([self.old.read(rows[rows < held]), new])

        return Numbers(read, held + len(self.codes), config.components), config.coding

    def network(self) -> dict[str, Tensor]:
        """All that the earlier file has beside its codes."""
        names = ["mean", "scale", "unit", "low", "high", *(f"{AXES}{name}" for name in CODED_TENSORS)]
        names += [f"{NET}{name}" for name in PACKED_TENSORS] if self.config.c1 else []
        return {name: self.start.tensor(name) for name in names}

    @torch.no_grad()
    def content(self, outcome: Outcome) -> Content:
        return with_codes(self.whole, self.network(), self.config, outcome, self.numbers)


def grow(recorder: Recorder, job: Job) -> Content:
    assert job.start is not None, "nothing to grow from"
    others, path = rest(job, recorder.name), job.start.path
    for name, given in (("preset", job.preset), ("target_r2", job.fit.target_r2)):
        if given is not None:
            raise InputError(f"{path}: a compact network, which grows as it is, and {name} is given. Leave {name} out")
    config = read_config(job.start.settings)
    free = {"dead_zone": 0.5, "most_bytes": None}
    keep_settings(job, config, tuple(free))
    config = from_dict(CompactConfig, asdict(config) | free | dict(job.settings))
    return run_fit(recorder, GrownFit(others, config, job), asdict(config))
