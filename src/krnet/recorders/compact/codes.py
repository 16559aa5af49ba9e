"""Codes of a compact KRNet while they are fitted, and how they come into a file of so many bytes.

batch of codes -> network -> error, and what their bits cost -> each code goes down its own error
codes, most bytes -> the narrowest dead zone with which the file keeps to them -> Content
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import Tensor

from krnet.coding.matrix import CODED_TENSORS, CodedConfig, CodedMatrix, Matrix, encode, measure
from krnet.coding.search import largest_fitting
from krnet.recorders.axes import AXES
from krnet.recorders.base import Content, Job, overhead_bytes, tensor_bytes
from krnet.recorders.compact.network import CODES, CompactConfig, CompactNet, stored_tensors
from krnet.recorders.fit import NET, NetworkFit
from krnet.train.loop import Outcome

EMPTY_BYTES = 4  # of the coder, where there is no network
CODE_RATE = 0.5  # of a Newton step
ALMOST = 0.985  # of the bytes that codes and axes may take: what the step aims at
SPEED = 0.2  # by which the step follows the bits, at each update
SETTLED = 0.2  # of the learning rate: from there on the step stays
ZONES, WIDER = 200, 1.02  # widths of the dead zone that are tried to keep to the bytes, each so many times the last


def laplace_bits(spread: Tensor) -> Tensor:
    """Entropy of a Laplace variable rounded to whole numbers, of this mean distance from 0: no variable has more."""
    log = -1 / spread.clamp(min=1e-3)  # of theta, the ratio between neighbours
    zero = -torch.expm1(log / 2)
    theta, other = log.exp(), (log / 2).exp()
    tail = math.log(0.5) + log / 2 + torch.log1p(-theta) + theta / (1 - theta) * log
    return -(zero * zero.log() + other * tail) / math.log(2)


class CodesFit(NetworkFit):
    """Codes go down their own error, and pay for their bits what a bit is worth."""

    net: CompactNet
    codes: Tensor
    """(samples, k), not yet rounded."""
    step_size: Tensor
    wanted: Tensor | None
    """Bits of a sample that the file has room for; None where it has room for all."""

    def __init__(self, job: Job, make: Callable[[], CompactNet]):
        self.rate = torch.zeros((), device=job.device)
        super().__init__(job, make)

    def bits(self, codes: Tensor) -> Tensor:
        """Of a sample."""
        return laplace_bits(codes.abs().mean(0) / self.step_size).sum()

    def _losses(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.chosen = self.codes.index_select(0, ids).requires_grad_()
        first, total = super()._losses(ids, values)
        taken = self.bits(self.chosen)
        self.taken = taken.detach()
        # A bit more leaves a quarter of the error of rounding: what it is worth, it costs.
        return first, total + (2 * math.log(2) / 12) * self.step_size.square() * taken

    @torch.no_grad()
    def after_step(self, ids: Tensor) -> None:
        assert self.chosen.grad is not None
        # The loss is a mean over the batch, a code's own error is not. Its gradient was taken where the code is rounded
        # to: brought back to where it is, it does not drive codes to and fro over the edges of their bins.
        downhill = len(ids) * self.chosen.grad + 2 * (self.chosen - self.restored(self.chosen))
        # By a step at most: seen through a head, the error may curve more than the squares alone.
        move = (0.5 * CODE_RATE * downhill).clamp(-self.step_size, self.step_size)
        self.codes.index_copy_(0, ids, self.chosen - self.rate * move)

    def restored(self, codes: Tensor) -> Tensor:
        """As a file gives them back."""
        return (codes / self.step_size).round() * self.step_size

    def follow(self, knob: Tensor, taken: Tensor, least: float, most: float | None = None) -> None:
        """Turn what saves bits to where a sample takes those that are wanted."""
        if self.wanted is not None:
            excess = (taken / self.wanted - 1).clamp(-0.5, 0.5)
            knob.mul_((SPEED * excess * (self.rate > SETTLED)).exp()).clamp_(least, most)

    def _set_rates(self, share: float) -> None:
        super()._set_rates(share)
        self.rate.fill_(share)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"codes": self.codes, "step_size": self.step_size}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.codes.copy_(state["codes"])
        self.step_size.copy_(state["step_size"])


def with_codes(
    job: Job,
    tensors: dict[str, Tensor],
    config: CompactConfig,
    outcome: Outcome,
    numbers: Callable[[CompactConfig], tuple[Matrix, CodedConfig]],
    growth: float = 1.0,
    held: CodedMatrix | None = None,
) -> Content:
    """What the file holds: the network's tensors, and the codes, in as many bytes as there may be.

    held: codes that come before these and must be read back as they were
    """
    before = sum(t.nbytes for t in tensors.values())
    before += overhead_bytes(job, len(tensors) + len(CODED_TENSORS), asdict(config))

    def at(zone: int) -> CompactConfig:
        """Numbers that hardly left zero go back there, the more of them the higher the zone."""
        return replace(config, dead_zone=config.dead_zone * WIDER**zone)

    def too_large(num_bytes: float) -> bool:
        return config.most_bytes is not None and before + growth * num_bytes > config.most_bytes

    def size(zone: int) -> float:
        return measure(*numbers(at(zone)), held=held).size_bytes

    # Whether it is too large is known well enough from a survey; the last word has the coder.
    zone = 0
    if too_large(size(0)):
        zone = 1 + largest_fitting(lambda n: too_large(size(n)), 0, ZONES - 1)
    while True:
        codes = numbers(at(zone))
        coded = encode(*codes, measure(*codes, held=held), held).tensors(CODES)
        if zone >= ZONES or not too_large(sum(t.nbytes for t in coded.values())):
            break
        zone += 1
    return Content(tensors | coded, asdict(at(zone)), outcome.iterations, outcome.seconds, outcome.reason)


def network_bytes(shape: tuple[int, ...], config: CompactConfig) -> int:
    """Most that the network takes which repairs maps."""
    stored = stored_tensors(shape, 1, config)
    return sum(tensor.most_bytes or 0 for name, tensor in stored.items() if name.startswith(NET)) or EMPTY_BYTES


def fixed_bytes(job: Job, config: CompactConfig) -> int:
    """About how large a file is without what codes and axes take."""
    stored = stored_tensors(job.source.shape, len(job.source), config)
    fixed = {name: tensor for name, tensor in stored.items() if not name.startswith((CODES, AXES, NET))}
    # Scales are counted as float32, which is a margin of two bytes an axis.
    found = network_bytes(job.source.shape, config) + tensor_bytes(fixed) + 2 * config.components
    return found + overhead_bytes(job, len(stored), asdict(config))
