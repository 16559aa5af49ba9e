"""Training of the codes of a compact KRNet, and fitting them into the bytes of a budget.

    batch of codes -> network -> error + price of the codes' bits -> each code moves down its own gradient
    codes, most_bytes -> the narrowest dead zone whose file has at most most_bytes -> Content

axes_fit.py, values_fit.py and growth.py derive their fits from CodesFit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from krnet.coding.matrix import CODED_TENSORS, CodedConfig, CodedMatrix, Matrix, encode, evenly_spaced, measure
from krnet.coding.search import largest_fitting
from krnet.recorders.axes import AXES
from krnet.recorders.base import Content, Job, tensor_bytes
from krnet.recorders.compact.network import CODES, CompactConfig, CompactNet, stored_tensors
from krnet.recorders.fit import NetworkFit, batch_size, wanted_batch_size
from krnet.recorders.grids import Grid
from krnet.recorders.network_sizes import NET
from krnet.recorders.sizes import overhead_bytes
from krnet.train.config import BATCH_SAMPLES
from krnet.train.loop import Outcome

NO_NETWORK_BYTES = 4  # counted for a file without network; packed_bytes of no weights is 4 as well
CODE_LR = 0.5  # peak learning rate of codes, as a share of a Newton step
# The price of a bit, in squares of the step, is what it gains. Quantisation error is step^2 / 12, one more bit halves
# the step: -d error / d bits = 2 ln 2 step^2 / 12.
BIT_PRICE = 2 * math.log(2) / 12
BUDGET_FILL = 0.985  # share of the budget that the fit aims at: it only estimates bits, so it keeps a margin
MIN_BITS = 1e-6  # keeps the ratio of bits finite where codes take none
FOLLOW_RATE = 0.2  # an update multiplies the step by exp(FOLLOW_RATE * (current_bits / target_bits - 1))
FREEZE_LR_SHARE = 0.2  # once the learning rate has fallen to this share of its peak, the step stays fixed
GROWING = {f"{CODES}stream", f"{CODES}lengths"}  # tensors of the codes that grow with the samples
# Values of a batch where the caller names no number of samples: a step takes well under a second on two cores.
# A GPU keeps 1,000 samples up to maps of 256x16x16.
BATCH_VALUES = {"cpu": 1 << 20, "cuda": 1 << 26}
# Of fits by the clock. Measured on 6,000 CIFAR-100 maps, 25 s: without it some seeds leave a quarter more of the error.
WARM_UP_ITERATIONS = 20
MEASURED_ROWS, MEASURED_COLUMNS = 1024, 4096  # at most so many are read to estimate the size of codes
NUM_ZONES, ZONE_RATIO = 200, 1.02  # dead zones that are tried: zone n is ZONE_RATIO ** n times as wide as the first


def laplace_bits(mean_size: Tensor) -> Tensor:
    """Entropy in bits of a Laplace variable x rounded to whole numbers, where mean_size = E|x| (Sullivan 1996).

    No variable of the same E|x| has a higher entropy. With theta = exp(-1 / E|x|):
    P(0) = 1 - theta^(1/2), P(n) = (1 - theta) theta^(|n| - 1/2) / 2.
    """
    log_theta = -1 / mean_size.clamp(min=1e-3)
    p_zero = -torch.expm1(log_theta / 2)
    theta, p_other = log_theta.exp(), (log_theta / 2).exp()
    mean_log_p = math.log(0.5) + log_theta / 2 + torch.log1p(-theta) + theta / (1 - theta) * log_theta  # for n != 0
    return -(p_zero * p_zero.log() + p_other * mean_log_p) / math.log(2)


class CodesFit(NetworkFit):
    """Trains codes: each moves down the gradient of its own sample's error, to which the price of its bits is added."""

    batch_values = BATCH_VALUES
    ends_by_itself = True
    least_warm_up = WARM_UP_ITERATIONS
    net: CompactNet
    config: CompactConfig
    codes: Tensor
    """(samples, P k), not quantised."""
    step_size: Tensor
    """() the quantisation step of the codes."""
    target_bits: Tensor | None
    """Bits per sample that fill the budget; None if there is no budget."""

    def __init__(self, job: Job, make: Callable[[], CompactNet]):
        self.lr_share = torch.zeros((), device=job.device)  # learning rate as a share of its peak
        super().__init__(job, make)

    def bits(self, codes: Tensor) -> Tensor:
        """Estimated bits per sample of a batch of codes (B, P k), or of those of some of its blocks."""
        mean_size = codes.abs().mean(0)
        grid = self.config.grid(self.job.source.shape)
        if grid.num_blocks > 1 and not grid.dct:  # all blocks of a map are alike
            blocks = mean_size.view(-1, self.config.components)
            mean_size = blocks.mean(0).repeat(len(blocks))
        return laplace_bits(mean_size / self.step_size).sum()

    def mean_bits(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        """Estimated bits per sample of these rows of the codes, or of some of their columns, as batches show them.

        Fewer samples seem to have fewer bits. So where samples are so large that batches are small, the bits of batches
        are compared with those of as many samples at a time.
        """
        most_values = self.batch_values.get(self.job.device.type)
        is_small = self.job.fit.batch_size is None and wanted_batch_size(self.job, most_values) < BATCH_SAMPLES
        at_once = min(len(rows), batch_size(self.job, most_values)) if is_small else len(rows)
        parts = [self.codes[part] for part in rows.split(at_once) if len(part) == at_once]
        parts = [part if columns is None else part[:, columns] for part in parts]
        return torch.stack([CodesFit.bits(self, part) for part in parts]).mean()

    def _losses(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """L_kr1, and the total loss with the price of the bits."""
        self.batch_codes = self.codes.index_select(0, ids).requires_grad_()  # (B, k)
        feature_loss, total_loss = super()._losses(ids, values)
        current_bits = self.bits(self.batch_codes)
        self.current_bits = current_bits.detach()
        # Of several processes each knows the bits of the whole batch, and counts its share of their price.
        price = BIT_PRICE * self.step_size.square() / self.team.count
        return feature_loss, total_loss + price * current_bits

    @property
    def own_codes(self) -> Tensor:
        """The codes of the batch whose samples this process replays."""
        return self.batch_codes[self.team.own()]

    def gradients(self) -> list[Tensor]:
        assert self.batch_codes.grad is not None
        return [*super().gradients(), self.batch_codes.grad]

    @torch.no_grad()
    def after_step(self, ids: Tensor) -> None:
        """Move the codes of the batch."""
        assert self.batch_codes.grad is not None
        # The loss is a mean over the batch: times B it is the sum, whose gradient is that of each code's own error.
        # The gradient was taken at the quantised code q. Along orthonormal axes that of code c is larger by 2 (c - q);
        # without this term codes would jump to and fro across the edges of their bins.
        gradient = len(ids) * self.batch_codes.grad + 2 * (self.batch_codes - self.dequantize(self.batch_codes))
        # The squared error has second derivative 2: a Newton step is gradient / 2. It is limited to one quantisation
        # step, because the error seen through a head may curve more.
        move = (0.5 * CODE_LR * gradient).clamp(-self.step_size, self.step_size)
        self.codes.index_copy_(0, ids, self.batch_codes - self.lr_share * move)

    def dequantize(self, codes: Tensor) -> Tensor:
        """The codes as a file would give them back: quantised and decoded."""
        return (codes / self.step_size).round() * self.step_size

    def follow_target(self, knob: Tensor, current_bits: Tensor, least: float, most: float | None = None) -> None:
        """Scale `knob` within least .. most until current_bits meet target_bits. A larger knob saves bits."""
        if self.target_bits is not None:
            excess = (current_bits / self.target_bits.clamp(min=MIN_BITS) - 1).clamp(-0.5, 0.5)
            knob.mul_((FOLLOW_RATE * excess * (self.lr_share > FREEZE_LR_SHARE)).exp()).clamp_(least, most)

    def _set_rates(self, lr_share: float) -> None:
        super()._set_rates(lr_share)
        self.lr_share.fill_(lr_share)

    def state(self) -> dict[str, Tensor]:
        # lr_share, too: the next step may look at that of the one before.
        return super().state() | {"codes": self.codes, "step_size": self.step_size, "lr_share": self.lr_share}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.codes.copy_(state["codes"])
        self.step_size.copy_(state["step_size"])
        if "lr_share" in state:  # checkpoints of earlier versions lack it
            self.lr_share.copy_(state["lr_share"])


def content_with_codes(
    job: Job,
    tensors: dict[str, Tensor],
    config: CompactConfig,
    outcome: Outcome,
    code_matrix: Callable[[CompactConfig], tuple[Matrix, CodedConfig]],
    growth: float = 1.0,
    held: CodedMatrix | None = None,
) -> Content:
    """The network's `tensors` and the encoded codes, with the narrowest dead zone whose file fits config.most_bytes.

    code_matrix  config -> the codes with its dead zone applied, and how they are coded
    growth       planned samples / samples now: the bytes of codes, but not of their tables, grow by this factor
    held         codes that come before these and must be decoded as before
    """
    other_bytes = sum(t.nbytes for t in tensors.values())
    other_bytes += overhead_bytes(job, len(tensors) + len(CODED_TENSORS), config.to_settings())

    def widened(zone: int) -> CompactConfig:
        return replace(config, dead_zone=config.dead_zone * ZONE_RATIO**zone)

    def too_large(num_bytes: float) -> bool:
        return config.most_bytes is not None and other_bytes + num_bytes > config.most_bytes

    def estimate_bytes(zone: int) -> float:
        matrix, coding = code_matrix(widened(zone))
        num_rows = matrix.num_rows + (held.blocks.num_rows if held else 0)
        return measure(matrix, coding, num_planned=round(growth * num_rows), held=held).size_bytes

    def planned_bytes(coded: dict[str, Tensor]) -> float:
        return sum((growth if name in GROWING else 1.0) * tensor.nbytes for name, tensor in coded.items())

    # The search goes by estimates, which are quick; the loop then encodes, and widens the zone where they were too low.
    zone = 0
    if too_large(estimate_bytes(0)):
        zone = 1 + largest_fitting(lambda n: too_large(estimate_bytes(n)), 0, NUM_ZONES - 1)
    while True:
        codes = code_matrix(widened(zone))
        coded = encode(*codes, measure(*codes, held=held), held).tensors(CODES)
        if zone >= NUM_ZONES or not too_large(planned_bytes(coded)):
            break
        zone += 1
    return Content(tensors | coded, widened(zone).to_settings(), outcome.iterations, outcome.seconds, outcome.reason)


def measured_columns(codes: Tensor, components: int, grid: Grid) -> Tensor | None:
    """The columns (n,) of codes that stand for all of them when their size is estimated; None: all are few enough.

    Grouping columns into tables takes seconds where they are many. Without a DCT all blocks are alike: some of them are
    taken whole. With one, frequencies differ: columns are taken evenly along their spread.
    """
    num_columns = codes.shape[1]
    if grid.num_blocks == 1 or num_columns <= MEASURED_COLUMNS:
        return None
    if grid.dct:
        by_spread = codes.square().mean(0).argsort()
        return by_spread[evenly_spaced(num_columns, MEASURED_COLUMNS).to(codes.device)]
    blocks = evenly_spaced(grid.num_blocks, max(1, MEASURED_COLUMNS // components))
    return (blocks[:, None] * components + torch.arange(components)).flatten().to(codes.device)


def estimated_bytes(matrix: Matrix, coding: CodedConfig, columns: Tensor | None, num_planned: int) -> float:
    """Size of a coded matrix once it has num_planned rows, measured on MEASURED_ROWS of them and on these columns."""
    if columns is None:
        return measure(matrix, coding, max_rows=MEASURED_ROWS, num_planned=num_planned).size_bytes
    # The bytes of all columns are those of as many more rows of some, and one for each to name its table.
    part = Matrix(lambda rows: matrix.read(rows)[:, columns], matrix.num_rows, len(columns))
    more_planned = round(matrix.num_columns / len(columns) * num_planned)
    measured = measure(part, coding, max_rows=MEASURED_ROWS, num_planned=more_planned).size_bytes
    return measured + (matrix.num_columns - len(columns))


def network_bytes(shape: tuple[int, ...], config: CompactConfig) -> int:
    """Upper bound of the bytes of the network that refines maps."""
    stored = stored_tensors(shape, 1, config)
    return sum(tensor.most_bytes or 0 for name, tensor in stored.items() if name.startswith(NET)) or NO_NETWORK_BYTES


def fixed_bytes(job: Job, config: CompactConfig) -> int:
    """Estimated size of the file without codes and axes."""
    stored = stored_tensors(job.source.shape, len(job.source), config)
    fixed = {name: tensor for name, tensor in stored.items() if not name.startswith((CODES, AXES, NET))}
    # Scales are float16 and counted as float32: a margin of two bytes per axis.
    size_bytes = network_bytes(job.source.shape, config) + tensor_bytes(fixed) + 2 * config.components
    return size_bytes + overhead_bytes(job, len(stored), config.to_settings())
