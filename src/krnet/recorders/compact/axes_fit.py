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
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from krnet.coding.matrix import CodedConfig, Matrix, encode, measure
from krnet.coding.weights import StraightThrough, pack, rounded, rounding_plan
from krnet.device import exact_math
from krnet.recorders.axes import AXES, EXACT, FINEST, Axes, principal_axes
from krnet.recorders.base import Content, Job
from krnet.recorders.compact.codes import ALMOST, CodesFit, fixed_bytes, laplace_bits, with_codes
from krnet.recorders.compact.network import WHOLE, CompactConfig, CompactNet
from krnet.recorders.fit import NET
from krnet.recorders.maps import coordinates, once_for_features
from krnet.train.loop import Outcome

AXES_RATE = 0.1  # learning rate of the axes, as a share of the network's


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
        assert net.axes is not None, "no axes; values alone are fitted elsewhere"
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
                of_axes, of_codes = (measure(*part).size_bytes for part in self.numbers(lines, self.config))
                taken = laplace_bits(self.codes.abs().mean(0) / self.step_size).sum() + self.axis_bits(lines)
                self.wanted = taken * (ALMOST * free / (of_axes + of_codes * self.growth))
        return net

    @property
    def growth(self) -> float:
        """By how much there will be more samples than now."""
        return self.job.num_planned / len(self.codes)

    def numbers(self, axes: Tensor, config: CompactConfig) -> tuple[tuple[Matrix, CodedConfig], ...]:
        """What is to be coded, and how: the axes, and the codes."""
        lines = (axes.detach() * self.scale).T  # (values, k)
        return (
            (Matrix.of(lines), WHOLE),
            (Matrix(lambda rows: config.thinned(self.codes[rows.to(self.device)]), *self.codes.shape), config.coding),
        )

    @property
    def scale(self) -> Tensor:
        """(k, 1): what each axis is multiplied by before it is rounded."""
        return axis_scale(self.spread, self.finest, self.step_size, self.job.num_planned)[:, None]

    @property
    def lines(self) -> nn.Parameter:
        assert self.net.axes is not None, "no axes; values alone are fitted elsewhere"
        return self.net.axes

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        cuda, lr = self.device.type == "cuda", self.job.fit.lr

        def adam(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            peak = torch.tensor(lr, device=self.device) if cuda else lr  # a graph reads it from memory
            return torch.optim.Adam(params, lr=peak, fused=cuda, foreach=not cuda, capturable=cuda)

        made = [adam(list(self.net.parameters(recurse=False)), AXES_RATE * lr)]
        return [adam(list(self.net.refine.parameters()), lr), *made] if self.config.c1 else made

    def axis_bits(self, axes: Tensor) -> Tensor:
        """A sample's share of them."""
        return laplace_bits((axes * self.scale).abs().mean(1)).sum() * axes.shape[1] / self.job.num_planned

    def bits(self, codes: Tensor) -> Tensor:
        """Of a sample: its code, and its share of the axes."""
        return super().bits(codes) + self.axis_bits(self.lines)

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """Computed with codes and weights as the file will hold them."""
        weights = rounded(dict(self.net.refine.named_parameters()), self.plan)
        weights = {f"refine.{name}": value for name, value in weights.items()}
        weights["axes"] = StraightThrough.apply(self.lines, 1 / self.scale)
        weights["mean"] = StraightThrough.apply(self.net.mean, None)
        return functional_call(self.net, weights, (StraightThrough.apply(self.chosen, self.step_size),))

    @torch.no_grad()
    def after_step(self, ids: Tensor) -> None:
        """The step goes to where the file has its size."""
        super().after_step(ids)
        self.follow(self.step_size, self.taken, self.least_step)

    @torch.no_grad()
    def content(self, outcome: Outcome) -> Content:
        if self.wanted is not None:  # codes may have become wider
            self.step_size.clamp_(min=float(self.codes.abs().max()) / FINEST)
        refine = pack(dict(self.net.refine.named_parameters()), self.plan) if self.config.c1 else {}
        tensors = {f"{NET}{name}": value for name, value in refine.items()}
        axes, _ = self.numbers(self.lines, self.config)
        tensors |= encode(*axes, measure(*axes)).tensors(AXES)
        tensors |= {"mean": self.net.mean.half(), "scale": self.scale[:, 0].half(), "unit": self.net.unit.clone()}
        tensors |= {"low": self.job.stats.low, "high": self.job.stats.high}
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        config = replace(self.config, step=float(self.step_size))
        return with_codes(
            self.job, tensors, config, outcome, lambda c: self.numbers(self.lines, c)[1], growth=self.growth
        )


def axis_spread(axes: Axes, components: int) -> tuple[Tensor, Tensor]:
    """How far each axis' numbers reach (k,), and the finest that axes, times that, need be rounded to."""
    std = axes.std[:components]
    std = torch.where(std > 0, std, 1.0)
    return std, (axes.axes[:components] * std[:, None]).abs().max() / FINEST


def axis_scale(spread: Tensor, finest: Tensor, step: Tensor, num_samples: int) -> Tensor:
    """As in pca.py: a bit more for an axis then gains as much as a bit more for its numbers. As fp16 can hold it."""
    scale = spread / torch.maximum(finest, step / math.sqrt(num_samples))
    return scale.clamp(max=torch.finfo(torch.float16).max).half().float()


def learned(job: Job) -> Axes:
    """Once for the same features: a search fits them several times."""
    components = job.settings.get("components") if math.prod(job.source.shape) > EXACT else None
    with exact_math(), torch.inference_mode():
        return once_for_features(job, "compact", components, lambda: principal_axes(job, components))
