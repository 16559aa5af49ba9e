"""Growing a compact KRNet: its network and old codes are kept, and only the codes of new samples are fitted.

    new features -> nearest point along the axes -> code -> moved down its own error through the network (moves.py)
                 -> fitted on, unless the job is frozen
    old codes, unchanged, and new codes -> entropy-coded together -> the file, with the old network

The network knows what features of its trunk look like, so one that was fitted to some classes serves others, too. One
that was fitted to few samples may not; then it is left out for the new ones (`better_of`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from krnet.coding.matrix import CODED_TENSORS, CodedConfig, Matrix, measure
from krnet.coding.weights import StraightThrough
from krnet.config import from_dict
from krnet.device import exact_math
from krnet.recorders.axes import least_squares
from krnet.recorders.base import Content, Earlier, Job, Recorder
from krnet.recorders.compact.codes import BUDGET_FILL, CodesFit, content_with_codes
from krnet.recorders.compact.moves import MANY_MOVES, bit_prices, move_codes
from krnet.recorders.compact.network import (
    CODES,
    START_ZONE,
    CompactConfig,
    CompactNet,
    read_codes,
    read_config,
    read_network,
    stored_tensors,
    zero_map,
)
from krnet.recorders.compact.values_fit import DEAD_ZONE, values_minus_zero
from krnet.recorders.fit import run_fit
from krnet.recorders.growth import check_kept_settings, new_samples_job
from krnet.recorders.maps import coordinates, normalised
from krnet.recorders.sizes import overhead_bytes
from krnet.train.loop import Outcome

NUM_COMPARED, COMPARED_AT_ONCE = 1024, 128  # new samples on which the network is tried, and how many at a time
MAX_BIT_PRICE = 64.0  # a multiple of the usual price of a bit in the loss (CodesFit._losses)


class GrownFit(CodesFit):
    """Fits codes of new samples to a network that is kept."""

    def __init__(self, job: Job, config: CompactConfig, full_job: Job, moves: int = MANY_MOVES):
        """job: the new samples alone; full_job: all samples; moves: how often codes are moved before the fit."""
        assert job.start is not None, "nothing to grow from"
        self.job, self.full_job, self.config, self.start, device = job, full_job, config, job.start, job.device
        self.old_codes = read_codes(len(self.start), job.source.shape, config, self.start, device)
        net = read_network(job.source.shape, config, self.start).to(device).requires_grad_(False)
        assert net.axes is not None, "no axes; values grow by grow_plainly"
        self.step_size = torch.tensor(config.step, device=device)
        self.price = torch.ones((), device=device)
        with exact_math(), torch.no_grad():
            # Trained axes are not quite orthonormal: least squares gives the point along them nearest to each map.
            self.codes = coordinates(job, net.mean, least_squares(net.axes).T, net.grid)  # (new samples, P k)
            if moves and config.c1:
                self._move(net, moves)
            self.target_bits = self._find_target_bits()
        super().__init__(job, lambda: net)

    def _move(self, net: CompactNet, moves: int) -> None:
        """Bring the codes nearer to what the network needs."""
        prices = bit_prices(self.old_codes.blocks.tables, self.config.step).to(self.codes.device)
        for ids in torch.arange(len(self.codes)).split(COMPARED_AT_ONCE):
            rows = ids.to(self.codes.device)
            target = normalised(self.job, ids).reshape(-1, *net.shape)
            self.codes[rows] = move_codes(net, self.codes[rows], target, moves, self.config.step, prices)

    def _find_target_bits(self) -> Tensor | None:
        """Bits per new sample that fill what the old file leaves of the budget; at most those that codes have now."""
        if self.config.most_bytes is None:
            return None
        stored = stored_tensors(self.full_job.source.shape, len(self.full_job.source), self.config)
        old_bytes = sum(tensor.nbytes for tensor in network_tensors(self.start, self.config).values())
        old_bytes += sum(self.start.tensor(f"{CODES}{name}").nbytes for name in CODED_TENSORS)
        old_bytes += overhead_bytes(self.full_job, len(stored), self.config.to_settings())
        stats = measure(Matrix.of(self.codes), self.config.coding)
        free_share = max(self.config.most_bytes - old_bytes, 1) / stats.size_bytes
        rows = torch.arange(len(self.codes), device=self.codes.device)
        return self.mean_bits(rows) * min(BUDGET_FILL * free_share, 1.0)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return []

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.net(StraightThrough.apply(self.own_codes, self.step_size))

    def bits(self, codes: Tensor) -> Tensor:
        """Estimated bits times their price: the step is kept, so a budget can only be met by a higher price."""
        return super().bits(codes) * self.price

    @torch.no_grad()
    def after_step(self, ids: Tensor) -> None:
        """Move the codes; then move the price of a bit so that the file meets its budget."""
        super().after_step(ids)
        self.follow_target(self.price, self.current_bits / self.price, 1.0, MAX_BIT_PRICE)

    def decoder(self, recorder: Recorder, content: Content) -> Callable[[Tensor], Tensor]:
        replayer = recorder.replay(self.full_job.samples, content.settings, content, self.device)
        return lambda ids: replayer.decode(ids + len(self.start))

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"price": self.price}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.price.copy_(state["price"])

    def code_matrix(self, config: CompactConfig) -> tuple[Matrix, CodedConfig]:
        """Codes of all samples, and how they are coded. Old codes are multiples of the step, which rounding keeps."""
        num_held = len(self.start)

        def read(rows: Tensor) -> Tensor:
            new = config.apply_dead_zone(self.codes[(rows[rows >= num_held] - num_held).to(self.device)])
            return torch.cat([self.old_codes.read(rows[rows < num_held]), new])

        return Matrix(read, num_held + len(self.codes), self.codes.shape[1]), config.coding

    @torch.no_grad()
    def content(self, outcome: Outcome) -> Content:
        tensors = network_tensors(self.start, self.config)
        return content_with_codes(self.full_job, tensors, self.config, outcome, self.code_matrix)


def network_tensors(start: Earlier, config: CompactConfig) -> dict[str, Tensor]:
    """All tensors of the recording `start`, except its codes."""
    stored = stored_tensors(start.shape, len(start), config)
    return {name: start.tensor(name) for name in stored if not name.startswith(CODES)}


@torch.no_grad()
def grow_plainly(job: Job, config: CompactConfig, full_job: Job) -> Content:
    """Growth that trains nothing: new codes get the step, the tables and the centroids of the old."""
    assert job.start is not None, "nothing to grow from"
    started, start = time.perf_counter(), job.start
    held = read_codes(len(start), job.source.shape, config, start, job.device).coded
    if config.components:
        net = read_network(job.source.shape, config, start).to(job.device)
        assert net.axes is not None, "components without axes"
        with exact_math():
            codes = coordinates(job, net.mean, least_squares(net.axes).T, net.grid)  # (new samples, P k)
    else:
        zero = zero_map(job.source.shape, job.stats.low, job.stats.high).to(job.device)
        codes = values_minus_zero(job, zero)  # (new samples, values)

    def code_matrix(config: CompactConfig) -> tuple[Matrix, CodedConfig]:
        return Matrix.of(config.apply_dead_zone(codes)), config.coding

    outcome = Outcome(0, time.perf_counter() - started, "done")
    return content_with_codes(full_job, network_tensors(start, config), config, outcome, code_matrix, held=held)


def grow(recorder: Recorder, job: Job) -> Content:
    """The file of all samples: those of `job.start`, bit for bit, and the new ones."""
    assert job.start is not None, "nothing to grow from"
    new_job = new_samples_job(job, recorder.name)
    config = read_config(job.start.settings, job.source.shape)
    # A file keeps its settings, except these two: the old values met the budget of the old file.
    zone = (START_ZONE if config.has_centroids else 0.5) if config.components else DEAD_ZONE
    free = {"dead_zone": zone, "most_bytes": None}
    check_kept_settings(job, config, tuple(free))
    config = from_dict(CompactConfig, config.to_settings() | free | dict(job.settings))
    if config.has_centroids:
        content = grow_plainly(new_job, config, job)
        return content if no_choice(config) else better_of(new_job, content, content, len(job.start))
    if config.refined is not None:
        return codes_along_axes(new_job, config, job)
    trainee = GrownFit(new_job, config, job)
    content = unfitted(trainee) if job.frozen else run_fit(recorder, trainee, config.to_settings())
    if no_choice(config):
        return content
    return better_of(new_job, content, codes_along_axes(new_job, config, job), len(job.start))


def no_choice(config: CompactConfig) -> bool:
    """Whether new samples cannot be refined, or have been left unrefined before."""
    return not config.c1 or config.refined is not None


def codes_along_axes(job: Job, config: CompactConfig, full_job: Job) -> Content:
    """The file whose new codes are what the axes make of the features: those that do best without the network."""
    return unfitted(GrownFit(replace(job, fit=replace(job.fit, compile=False)), config, full_job, moves=0))


def unfitted(trainee: GrownFit) -> Content:
    """The file of codes as they are."""
    trainee.feed.close()
    return trainee.content(Outcome(0, 0.0, "done"))


def better_of(job: Job, refined: Content, unrefined: Content, num_held: int) -> Content:
    """Leave the network out for new samples, those of `job`, if it makes them worse.

    A network that was fitted to few samples may know only these. Measured on CIFAR-100 maps: the first 500 have an R2
    of 0.96; 500 more have -0.25 through the network, and 0.87 without it.
    """
    errors = [_square_error(job, content, num_held, gate) for content, gate in ((refined, 1.0), (unrefined, 0.0))]
    if errors[0] <= errors[1]:
        return refined
    return replace(unrefined, settings={**unrefined.settings, "refined": num_held})


@torch.no_grad()
def _square_error(job: Job, content: Content, num_held: int, gate: float) -> float:
    """Squared error of some new samples' replays; gate: 1 with the network, 0 without it."""
    config = read_config(content.settings, job.source.shape)
    reader = read_codes(num_held + len(job.source), job.source.shape, config, content, job.device)
    net = read_network(job.source.shape, config, content).to(job.device)
    square_sum = 0.0
    with exact_math():
        compared = torch.linspace(0, len(job.source) - 1, NUM_COMPARED).round().long().unique()
        for ids in compared.split(COMPARED_AT_ONCE):
            target = normalised(job, ids).reshape(-1, *net.shape)
            replayed = net(reader.read(ids + num_held), torch.full((len(ids), 1, 1, 1), gate, device=job.device))
            square_sum += (replayed - target).double().square().sum().item()
    return square_sum
