"""The settings of product quantisation, and its codebooks: what they hold and how they are trained.

    positions of some samples -> channel order -> rotation -> parts -> k-means -> Trainer
    Trainer, rate weight -> Codebooks: normalised features <-> codes

A position is the vector of all channels at one place of a feature map. The rate weight is the squared error that one
bit of code is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from krnet.coding.entropy import MAX_TABLES
from krnet.coding.kmeans import constrain, kmeans, nearest
from krnet.coding.matrix import MAX_BLOCK, evenly_spaced
from krnet.config import check_int, check_range
from krnet.errors import SettingError
from krnet.recorders.base import Job
from krnet.recorders.basis import Basis
from krnet.recorders.maps import normalised_chunks, once_for_features

T = TypeVar("T")
MAX_BITS = 12  # the entropy coder's largest alphabet has 2^12 symbols
DEFAULT_PARTS = 8
# Training positions for each entry. More lower the error a little; the time grows in proportion.
POSITIONS_PER_ENTRY = {"cpu": 64, "cuda": 256}
MIN_READ_SAMPLES = 4096  # training positions are drawn from at least this many samples, or from all
DEFAULT_ROTATIONS = 8  # rounds that alternate between k-means and the best rotation
MAX_ROTATED_CHANNELS = 1024  # by default, features with more channels are not rotated
MIN_ROTATION_POSITIONS = 1 << 14  # the rotation is fitted to this many positions, or to 16 per channel if that is more
MAX_ORDERED_CHANNELS = 4096  # ordering needs a (channels, channels) correlation matrix; more channels keep their order


@dataclass(frozen=True, kw_only=True)
class PQConfig:
    parts: int | None = None
    """Parts that the channels of a position are cut into, each stored as one code; by default 8, or one per channel
    where there are fewer than 8."""
    bits: int = 8
    """Bits of a code before entropy coding: a part has at most 2^bits codebook entries."""
    rate_weight: float = 0.0
    """Squared error that one bit of code is worth, where each channel has the range 1; 0 takes the nearest entry."""
    rotations: int | None = None
    """Rounds that alternate between k-means and the best rotation of the channels (OPQ); 0 does not rotate.
    By default 8; 0 if there is one part, if each channel is a part, or if there are more than 1024 channels."""
    rounds: int = 20
    """Rounds of k-means; with a rate weight above 0, as many more that include it."""
    train_positions: int | None = None
    """Positions that k-means is trained on; by default 64 per entry, 256 on a GPU, and at least 65536."""
    entry_step: float | None = None
    """Quantisation step of the codebook entries; by default the step that adds half a percent to the error."""
    block_size: int = 16
    """Samples coded together: reading one decodes its whole block; a block costs 3 bytes beside its codes."""

    def __post_init__(self) -> None:
        if self.parts is not None:
            check_int("parts", self.parts, 1, MAX_TABLES)
        check_int("bits", self.bits, 1, MAX_BITS)
        check_range("rate_weight", self.rate_weight, 0)
        if self.rotations is not None:
            check_int("rotations", self.rotations, 0)
        check_int("rounds", self.rounds, 1)
        if self.train_positions is not None:
            check_int("train_positions", self.train_positions, 1)
        if self.entry_step is not None:
            check_range("entry_step", self.entry_step, 1 / 4000, 1)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)


def part_widths(num_channels: int, num_parts: int) -> list[int]:
    """Channels of each part; the first parts have one more where the division leaves a remainder."""
    if num_parts > num_channels:
        raise SettingError(f"parts is {num_parts}; these features have {num_channels} channels: take as many or fewer")
    return [num_channels // num_parts + (part < num_channels % num_parts) for part in range(num_parts)]


def resolve_settings(job: Job, config: PQConfig) -> PQConfig:
    """Fill in every default but `entry_step`, which depends on the error of the codes."""
    num_channels = (job.source.shape or (1,))[0]
    num_parts = config.parts or min(DEFAULT_PARTS, num_channels)
    part_widths(num_channels, num_parts)  # refuses more parts than channels
    rotations = config.rotations
    if rotations is None:
        rotations = DEFAULT_ROTATIONS if 1 < num_parts < num_channels <= MAX_ROTATED_CHANNELS else 0
    return replace(
        config,
        parts=num_parts,
        rotations=rotations,
        train_positions=config.train_positions or max(1 << 16, POSITIONS_PER_ENTRY[job.device.type] << config.bits),
    )


class Codebooks(Basis):
    """The channel order, the rotation, and the codebook entries of each part."""

    def __init__(
        self,
        shape: tuple[int, ...],
        order: Tensor,
        rotation: Tensor | None,
        entries: list[Tensor],
        costs: list[Tensor] | None = None,
    ):
        """order (C,): the channel at each place; rotation (C, C) float16, applied after the order; for each part its
        entries (k, width) and the costs (k,) of their codes: rate weight x bits, by default 0."""
        self.shape, self.order, self.rotation, self.entries = shape, order, rotation, entries
        self.costs = costs or [e.new_zeros(len(e)) for e in entries]
        self.widths = [e.shape[1] for e in entries]
        self.num_positions = math.prod(shape[1:])
        self.num_columns = len(entries) * self.num_positions
        self.inverse_order = order.argsort()  # (C,): the place of each channel

    def with_costs(self, costs: list[Tensor]) -> Codebooks:
        return Codebooks(self.shape, self.order, self.rotation, self.entries, costs)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """x (n, C, ...) -> (n * positions, width) of each part"""
        points = to_positions(x)[:, self.order]
        return (points if self.rotation is None else points @ self.rotation.float()).split(self.widths, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """x (n, C, ...) -> codes (n, parts * positions), int64"""
        parts = self.parts(x)
        codes = [nearest(p, e, c) for p, e, c in zip(parts, self.entries, self.costs)]
        return torch.stack(codes).view(len(codes), len(x), -1).movedim(1, 0).flatten(1)

    def inverse(self, numbers: Tensor) -> Tensor:
        codes = numbers.int().view(len(numbers), len(self.entries), self.num_positions)
        points = torch.cat([e[codes[:, part]] for part, e in enumerate(self.entries)], dim=2)  # (n, positions, C)
        points = points if self.rotation is None else points @ self.rotation.float().T
        return points[:, :, self.inverse_order].transpose(1, 2).contiguous()

    def tensors(self) -> dict[str, Tensor]:
        raise AssertionError("codebooks are coded by `code_entries`")


def to_positions(x: Tensor) -> Tensor:
    """x (n, C, ...) -> (n * positions, C)"""
    return x.reshape(len(x), x.shape[1], -1).transpose(1, 2).reshape(-1, x.shape[1])


# ------------------------------------------------------------------ training


def order_by_correlation(points: Tensor, widths: Sequence[int]) -> Tensor:
    """points (n, C) -> an order of the channels (C,) that puts correlated channels into the same part.

    Greedy: a part starts with the free channel of the largest variance, then takes the free channel whose absolute
    correlations with the part's channels have the largest sum.
    """
    num_channels = points.shape[1]
    if len(widths) in (1, num_channels) or num_channels > MAX_ORDERED_CHANNELS:
        return torch.arange(num_channels)
    covariance = torch.cov(points.T).cpu()  # (C, C)
    variance = covariance.diagonal()
    scale = variance.clamp(min=1e-12).rsqrt()
    correlation = (covariance * scale * scale[:, None]).abs()
    free = torch.ones(num_channels, dtype=torch.bool)
    order = []
    for width in widths:
        score = variance
        for place in range(width):
            chosen = int(torch.where(free, score, -1.0).argmax())
            free[chosen] = False
            order.append(chosen)
            score = correlation[chosen] if place == 0 else score + correlation[chosen]
    return torch.tensor(order)


def best_rotation(
    points: Tensor, widths: list[int], num_entries: int, rotations: int, generator: torch.Generator
) -> Tensor:
    """The rotation (C, C) float16 of points (n, C) that brings the parts nearest to their codebook entries.

    Non-parametric OPQ (Ge et al. 2013): alternate k-means with the orthogonal Procrustes solution, `rotations` times.
    """
    rotation = torch.eye(points.shape[1], device=points.device)
    entries: list[Tensor | None] = [None] * len(widths)
    for _ in range(rotations):
        quantized = []
        for part, part_points in enumerate((points @ rotation).split(widths, dim=1)):
            part_entries = kmeans(part_points, num_entries, 3, generator, entries[part])
            quantized.append(
                part_entries[nearest(part_points, part_entries, part_entries.new_zeros(len(part_entries)))]
            )
            entries[part] = part_entries
        u, _, vh = torch.linalg.svd(points.T @ torch.cat(quantized, dim=1))
        rotation = u @ vh
    return rotation.half()


class Trainer:
    """Makes codebooks for any rate weight, from the same training positions and the same first entries."""

    def __init__(self, job: Job, config: PQConfig):
        assert config.parts and config.train_positions, "settings that are still open"
        self.config, self.shape = config, job.source.shape or (1,)
        self.points = training_positions(job, config.train_positions)  # (n, C)
        self.widths = part_widths(self.shape[0], config.parts)
        self.order = order_by_correlation(self.points, self.widths).to(job.device)
        self.rotation: Tensor | None = None
        generator = torch.Generator(job.device).manual_seed(job.fit.seed)
        if config.rotations:
            num_points = max(MIN_ROTATION_POSITIONS, 16 * self.shape[0])
            some_points = self.points[:: max(1, len(self.points) // num_points), self.order]
            num_entries = min(2**config.bits, 256)
            self.rotation = best_rotation(some_points, self.widths, num_entries, config.rotations, generator)
        self.first_entries = [kmeans(part, 2**config.bits, config.rounds, generator) for part in self.parts()]

    def parts(self) -> list[Tensor]:
        """(n, width) of each part; computed at each call, so that all trainers of a search share one `points`."""
        points = self.points[:, self.order]
        points = points if self.rotation is None else points @ self.rotation.float()
        return [part.contiguous() for part in points.split(self.widths, dim=1)]

    def books(self, rate_weight: float) -> Codebooks:
        rounds = self.config.rounds
        found = [constrain(p, e, rate_weight, rounds) for p, e in zip(self.parts(), self.first_entries)]
        return Codebooks(self.shape, self.order, self.rotation, [e for e, _ in found], [costs for _, costs in found])


class FeatureCache:
    """Results for one set of features, so that a search among settings and the fit after it compute them once."""

    def __init__(self) -> None:
        self.points: dict[int, Tensor] = {}
        self.found: dict[str, tuple[Hashable, Any]] = {}
        self.trials: dict[PQConfig, Any] = {}

    def latest(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, or its last result of this kind if that had the same key. Each kind keeps one result."""
        if kind not in self.found or self.found[kind][0] != key:
            self.found.pop(kind, None)
            self.found[kind] = key, make()
        made: T = self.found[kind][1]
        return made


def cache_for(job: Job) -> FeatureCache:
    """The cache of the job's features; it is freed with them."""
    return once_for_features(job, "pq", None, FeatureCache)


def training_positions(job: Job, num_wanted: int) -> Tensor:
    """`read_positions`, computed once for the same features and number."""
    known = cache_for(job).points
    if num_wanted not in known:
        known[num_wanted] = read_positions(job, num_wanted)
    return known[num_wanted]


def read_positions(job: Job, num_wanted: int) -> Tensor:
    """About `num_wanted` positions (n, C), drawn at random from evenly spaced samples."""
    per_sample = math.prod((job.source.shape or (1,))[1:])
    num_read = min(len(job.source), max(MIN_READ_SAMPLES, -(-num_wanted // per_sample)))
    ids = evenly_spaced(len(job.source), num_read)
    generator = torch.Generator().manual_seed(job.fit.seed)
    found = []
    for x in normalised_chunks(job, ids):
        points = to_positions(x)
        share = min(len(points), -(-num_wanted * len(x) // num_read))
        found.append(points[torch.randperm(len(points), generator=generator)[:share].to(points.device)])
    return torch.cat(found)
