"""The compact KRNet: a few learned bytes for each sample, and a small network that makes its feature map of them.

    ids -> code (k whole numbers) * step -> axes (k, values) + mean -> map -> + Refine(map) -> clamp -> features
           '-- entropy-coded --'           '---- entropy-coded ----'          '- few bits -'

The file's bytes lie where they tell most. It starts as principal components: code and axes rounded as recorder pca does
it, which shares bits out by how much each direction varies. Then all of it is trained together, as it will be stored:
the network learns what features look like (zeros, edges, which channels go together) and repairs the map, the axes
learn what the network leaves to them, and each code moves to where its own map comes out best. Codes and axes pay for
their bits what a bit is worth, as a coder of Laplace variables counts them (Sullivan 1996), and the step follows the
bytes that are to be kept.

Gradients pass straight through all rounding (Bengio et al. 2013). Codes need no optimizer: along orthonormal axes the
squared error of a sample curves alike in all directions, so that plain descent is nearly Newton's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from krnet import parallel
from krnet.budget import largest
from krnet.config import from_dict
from krnet.errors import InputError, SettingError
from krnet.lowbit import NUM_TENSORS, StraightThrough, pack, packed_bytes, rounded
from krnet.recorders._compact_network import (
    CODES,
    WHOLE,
    CompactConfig,
    CompactNet,
    read_codes,
    read_config,
    read_network,
)
from krnet.recorders._features import coordinates, learned_once
from krnet.recorders._fitting import NET, NetworkFit, NetworkReplayer, rounding_plan, run_fit
from krnet.recorders._numbers import CODED_TENSORS, CodedConfig, Numbers, encode, survey
from krnet.recorders.base import Content, Job, Recorder, TensorStore, overhead_bytes
from krnet.recorders.pca import AXES, EXACT, FINEST, WORTH, Axes, principal_axes
from krnet.samples import Samples
from krnet.sizing import map_shape
from krnet.training import Outcome

FILE_TENSORS = NUM_TENSORS + 2 * len(CODED_TENSORS) + 5  # those of axes and codes; mean, scale, unit, low and high
DEFAULT_STEP = 0.25
AXES_RATE = 0.1  # learning rate of the axes, as a share of the network's
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
    def moved(self, ids: Tensor) -> None:
        assert self.chosen.grad is not None
        # The loss is a mean over the batch, a code's own error is not. Its gradient was taken where the code is rounded
        # to: brought back to where it is, it does not drive codes to and fro over the edges of their bins.
        remainder = self.chosen - (self.chosen / self.step_size).round() * self.step_size
        downhill = len(ids) * self.chosen.grad + 2 * remainder
        # By a step at most: seen through a head, the error may curve more than the squares alone.
        move = (0.5 * CODE_RATE * downhill).clamp(-self.step_size, self.step_size)
        self.codes.index_copy_(0, ids, self.chosen - self.rate * move)

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


class CompactFit(CodesFit):
    def __init__(self, job: Job, config: CompactConfig, axes: Axes):
        k, device = config.components, job.device
        self.spread, self.finest = axis_spread(axes, k)
        self.codes = coordinates(job, axes.mean, axes.axes[:k].T)
        # Finer ones have more values than the coder's tables take.
        self.least_step = float(self.codes.abs().max()) / FINEST
        step = config.step if config.most_bytes is None else max(config.step, self.least_step)
        self.config, self.axes = replace(config, step=step), axes
        self.step_size = torch.tensor(step, device=device)
        self.wanted = None
        super().__init__(job, self._start)

    def _start(self) -> CompactNet:
        net = CompactNet(self.job.source.shape, self.config)
        with torch.no_grad():
            net.axes.copy_(self.axes.axes[: self.config.components])
            net.mean.copy_(self.axes.mean)
            net.unit.fill_(max(math.sqrt(self.job.stats.variance), 1e-6))
        self.plan = rounding_plan(net.refine, self.config.bits)
        if self.config.most_bytes is not None:
            # Bits are counted by a formula while the network is fitted; it is as far off now as it will be then.
            free = max(self.config.most_bytes - fixed_bytes(self.job, self.config), 1)
            with torch.no_grad():
                lines = net.axes.to(self.device)
                of_axes, of_codes = (survey(*part).size_bytes for part in self.numbers(lines, self.config))
                taken = laplace_bits(self.codes.abs().mean(0) / self.step_size).sum() + self.axis_bits(lines)
                self.wanted = taken * (ALMOST * free / (of_axes + of_codes * self.growth))
        return net

    @property
    def growth(self) -> float:
        """By how much there will be more samples than now."""
        return self.job.num_planned / len(self.codes)

    def numbers(self, axes: Tensor, config: CompactConfig) -> tuple[tuple[Numbers, CodedConfig], ...]:
        """What is to be coded, and how: the axes, and the codes."""
        lines = (axes.detach() * self.scale).T  # (values, k)
        return (
            (Numbers.of(lines), WHOLE),
            (Numbers(lambda rows: config.thinned(self.codes[rows.to(self.device)]), *self.codes.shape), config.coding),
        )

    @property
    def scale(self) -> Tensor:
        """(k, 1): what each axis is multiplied by before it is rounded."""
        return axis_scale(self.spread, self.finest, self.step_size, self.job.num_planned)[:, None]

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        cuda, lr = self.device.type == "cuda", self.job.fit.lr

        def adam(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            peak = torch.tensor(lr, device=self.device) if cuda else lr  # a graph reads it from memory
            return torch.optim.Adam(params, lr=peak, fused=cuda, foreach=not cuda, capturable=cuda)

        made = [adam([self.net.axes, self.net.mean], AXES_RATE * lr)]
        return [adam(list(self.net.refine.parameters()), lr), *made] if self.config.c1 else made

    def axis_bits(self, axes: Tensor) -> Tensor:
        """A sample's share of them."""
        return laplace_bits((axes * self.scale).abs().mean(1)).sum() * axes.shape[1] / self.job.num_planned

    def bits(self, codes: Tensor) -> Tensor:
        """Of a sample: its code, and its share of the axes."""
        return super().bits(codes) + self.axis_bits(self.net.axes)

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """Computed with codes and weights as the file will hold them."""
        weights = rounded(dict(self.net.refine.named_parameters()), self.plan)
        weights = {f"refine.{name}": value for name, value in weights.items()}
        weights["axes"] = StraightThrough.apply(self.net.axes, 1 / self.scale)
        weights["mean"] = StraightThrough.apply(self.net.mean, None)
        return functional_call(self.net, weights, (StraightThrough.apply(self.chosen, self.step_size),))

    @torch.no_grad()
    def moved(self, ids: Tensor) -> None:
        """The step goes to where the file has its size."""
        super().moved(ids)
        self.follow(self.step_size, self.taken, self.least_step)

    @torch.no_grad()
    def content(self, outcome: Outcome) -> Content:
        if self.wanted is not None:  # codes may have become wider
            self.step_size.clamp_(min=float(self.codes.abs().max()) / FINEST)
        refine = pack(dict(self.net.refine.named_parameters()), self.plan) if self.config.c1 else {}
        tensors = {f"{NET}{name}": value for name, value in refine.items()}
        axes, _ = self.numbers(self.net.axes, self.config)
        tensors |= encode(*axes, survey(*axes)).tensors(AXES)
        tensors |= {"mean": self.net.mean.half(), "scale": self.scale[:, 0].half(), "unit": self.net.unit.clone()}
        tensors |= {"low": self.job.stats.low, "high": self.job.stats.high}
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        config = replace(self.config, step=float(self.step_size))
        return with_codes(
            self.job, tensors, config, outcome, lambda c: self.numbers(self.net.axes, c)[1], growth=self.growth
        )


def with_codes(
    job: Job,
    tensors: dict[str, Tensor],
    config: CompactConfig,
    outcome: Outcome,
    numbers: Callable[[CompactConfig], tuple[Numbers, CodedConfig]],
    growth: float = 1.0,
) -> Content:
    """What the file holds: the network's tensors, and the codes, in as many bytes as there may be."""
    before = sum(t.nbytes for t in tensors.values())
    before += overhead_bytes(job, len(tensors) + len(CODED_TENSORS), asdict(config))

    def at(zone: int) -> CompactConfig:
        """Numbers that hardly left zero go back there, the more of them the higher the zone."""
        return replace(config, dead_zone=config.dead_zone * WIDER**zone)

    def too_large(num_bytes: float) -> bool:
        return config.most_bytes is not None and before + growth * num_bytes > config.most_bytes

    # Whether it is too large is known well enough from a survey; the last word has the coder.
    zone = 0
    if too_large(survey(*numbers(at(0))).size_bytes):
        zone = 1 + largest(lambda n: too_large(survey(*numbers(at(n))).size_bytes), 0, ZONES - 1)
    while True:
        codes = numbers(at(zone))
        coded = encode(*codes, survey(*codes)).tensors(CODES)
        if zone >= ZONES or not too_large(sum(t.nbytes for t in coded.values())):
            break
        zone += 1
    return Content(tensors | coded, asdict(at(zone)), outcome.iterations, outcome.seconds, outcome.reason)


# ------------------------------------------------------------------ sizes


def axis_spread(axes: Axes, components: int) -> tuple[Tensor, Tensor]:
    """How far each axis' numbers reach (k,), and the finest that axes, times that, need be rounded to."""
    std = axes.std[:components]
    std = torch.where(std > 0, std, 1.0)
    return std, (axes.axes[:components] * std[:, None]).abs().max() / FINEST


def axis_scale(spread: Tensor, finest: Tensor, step: Tensor, num_samples: int) -> Tensor:
    """As in pca.py: a bit more for an axis then gains as much as a bit more for its numbers. As fp16 can hold it."""
    scale = spread / torch.maximum(finest, step / math.sqrt(num_samples))
    return scale.clamp(max=torch.finfo(torch.float16).max).half().float()


def network_bytes(shape: tuple[int, ...], config: CompactConfig) -> int:
    """Most that the network takes which repairs maps."""
    with torch.device("meta"):
        refine = CompactNet(shape, config).refine
    shapes = {name: tuple(p.shape) for name, p in refine.named_parameters()}
    return packed_bytes(shapes, rounding_plan(refine, config.bits))


def fixed_bytes(job: Job, config: CompactConfig) -> int:
    """About how large a file is without what codes and axes take."""
    found = network_bytes(job.source.shape, config) + 2 * math.prod(job.source.shape)
    found += 4 * config.components + 8 * map_shape(job.source.shape)[0]
    return found + overhead_bytes(job, FILE_TENSORS, asdict(config))


def learned(job: Job) -> Axes:
    """Once for the same features: a search fits them several times."""
    components = job.settings.get("components") if math.prod(job.source.shape) > EXACT else None
    with parallel.exact(), torch.inference_mode():
        return learned_once(job, "compact", components, lambda: principal_axes(job, components))


# ------------------------------------------------------------------ a recorder's two halves


def fit(recorder: Recorder, job: Job) -> Content:
    if job.start is not None or job.preset is not None:
        name = "start" if job.preset is None else "preset"
        raise InputError(
            f"{name} is given, and a compact network has sizes of its own, and grows from a compact network alone; "
            f"leave {name} out"
        )
    axes = learned(job)
    step = job.settings.get("step", DEFAULT_STEP)
    kept = max(1, min(int((axes.std > WORTH * step).sum()), len(axes.std)))
    config = from_dict(CompactConfig, {"step": step, "components": kept, **job.settings})
    if config.components > len(axes.std):
        raise SettingError(
            f"components is {config.components}; {len(job.source)} samples of shape {job.source.shape} have at most "
            f"{len(axes.std)}"
        )
    trainee = CompactFit(job, config, Axes(*(t.clone() for t in (axes.mean, axes.axes, axes.std))))
    return run_fit(recorder, trainee, asdict(config))


def replay(samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device) -> NetworkReplayer:
    config = read_config(settings)
    net = read_network(samples.shape, config, store)
    low, high = (store.tensor(n, shape=(net.shape[0],), dtype=torch.float32) for n in ("low", "high"))
    reader = read_codes(samples.num_samples, config, store, device)
    num_values = math.prod(samples.shape)
    return NetworkReplayer(
        net, reader.read, max(num_values, config.c1 * num_values // net.shape[0]), samples, low, high, device
    )
