"""The codebooks of product quantisation, and how they are found.

positions of some samples -> order of channels -> rotation -> parts -> k-means -> entries, for any price of a bit
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
MAX_BITS = 12  # the coder's largest alphabet
USUAL_PARTS = 8
# Positions to train on: more are a little better, and take as much longer.
PER_ENTRY = {"cpu": 64, "cuda": 256}
READ_SAMPLES = 4096  # that positions to train on are taken from, at least
TURNS, ROTATED = 8, 1024  # of k-means and rotation; channels up to which there is one
TURNED = 1 << 14  # positions that it is found from, or 16 a channel
ORDERED = 4096  # channels up to which likeness is looked at: a matrix of channels x channels


@dataclass(frozen=True, kw_only=True)
class PQConfig:
    parts: int | None = None
    """Parts a position's channels are cut into, each stored as one code; by default 8, or one a channel."""
    bits: int = 8
    """Bits of a code before entropy coding: a part has at most 2^bits entries."""
    rate_weight: float = 0.0
    """Squared error that a bit of code is worth, the range of each channel being 1: 0 takes the nearest entry."""
    rotations: int | None = None
    """Times that k-means and the best rotation of the channels take turns (OPQ); 0 leaves the channels as they are.
    By default 8; 0 where a part is all channels, or one, or where there are more than 1024."""
    rounds: int = 20
    """Rounds of k-means; where bits have a price, as many again with it."""
    train_positions: int | None = None
    """Positions that k-means sees; by default 64 an entry, 256 on a GPU, and at least 65536."""
    entry_step: float | None = None
    """What the entries are rounded to; by default as finely as adds half a percent to the error."""
    block_size: int = 16
    """Samples coded together: to read one is to read them all; a block costs 3 bytes beside its codes."""

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
    if num_parts > num_channels:
        raise SettingError(f"parts is {num_parts}; these features have {num_channels} channels: take as many or fewer")
    return [num_channels // num_parts + (part < num_channels % num_parts) for part in range(num_parts)]


def resolved(job: Job, config: PQConfig) -> PQConfig:
    """All that settings leave open but the step of the entries."""
    num_channels = (job.source.shape or (1,))[0]
    num_parts = config.parts or min(USUAL_PARTS, num_channels)
    part_widths(num_channels, num_parts)
    rotations = config.rotations
    if rotations is None:
        rotations = TURNS if 1 < num_parts < num_channels <= ROTATED else 0
    return replace(
        config,
        parts=num_parts,
        rotations=rotations,
        train_positions=config.train_positions or max(1 << 16, PER_ENTRY[job.device.type] << config.bits),
    )


class Codebooks(Basis):
    """Parts of channels, and the entries of each."""

    def __init__(
        self,
        shape: tuple[int, ...],
        order: Tensor,
        turn: Tensor | None,
        entries: list[Tensor],
        costs: list[Tensor] | None = None,
    ):
        """order (C,): which channel comes where; turn (C, C) float16: the rotation then; entries (k, width) of each
        part; costs (k,) of each part's codes."""
        self.shape, self.order, self.turn, self.entries = shape, order, turn, entries
        self.costs = costs or [e.new_zeros(len(e)) for e in entries]
        self.widths = [e.shape[1] for e in entries]
        self.num_positions = math.prod(shape[1:])
        self.num_columns = len(entries) * self.num_positions
        self.place = order.argsort()

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """x (n, C, ...) -> (n * positions, width) of each part"""
        points = positions(x)[:, self.order]
        return (points if self.turn is None else points @ self.turn.float()).split(self.widths, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """x (n, C, ...) -> codes (n, parts * positions), int64"""
        parts = self.parts(x)
        found = [nearest(p, e, c) for p, e, c in zip(parts, self.entries, self.costs)]
        return torch.stack(found).view(len(found), len(x), -1).movedim(1, 0).flatten(1)

    def inverse(self, numbers: Tensor) -> Tensor:
        codes = numbers.int().view(len(numbers), len(self.entries), self.num_positions)
        found = torch.cat([e[codes[:, part]] for part, e in enumerate(self.entries)], dim=2)  # (n, positions, C)
        found = found if self.turn is None else found @ self.turn.float().T
        return found[:, :, self.place].transpose(1, 2).contiguous()

    def tensors(self) -> dict[str, Tensor]:
        raise AssertionError("codebooks are coded by `code_entries`")


def positions(x: Tensor) -> Tensor:
    """x (n, C, ...) -> (n * positions, C)"""
    return x.reshape(len(x), x.shape[1], -1).transpose(1, 2).reshape(-1, x.shape[1])


# ------------------------------------------------------------------ finding them


def by_likeness(points: Tensor, widths: Sequence[int]) -> Tensor:
    """An order of the channels (C,) in which those of a part are correlated."""
    num_channels = points.shape[1]
    if len(widths) in (1, num_channels) or num_channels > ORDERED:
        return torch.arange(num_channels)
    covariance = torch.cov(points.T).cpu()
    variance = covariance.diagonal()
    scale = variance.clamp(min=1e-12).rsqrt()
    likeness = (covariance * scale * scale[:, None]).abs()
    free = torch.ones(num_channels, dtype=torch.bool)
    order = []
    for width in widths:
        closeness = variance  # the widest channel that is left begins a part
        for place in range(width):
            chosen = int(torch.where(free, closeness, -1.0).argmax())
            free[chosen] = False
            order.append(chosen)
            closeness = likeness[chosen] if place == 0 else closeness + likeness[chosen]
    return torch.tensor(order)


def best_rotation(
    points: Tensor, widths: list[int], num_entries: int, turns: int, generator: torch.Generator
) -> Tensor:
    """The rotation (C, C) float16 after which parts are nearest to their entries (Ge et al. 2013, non-parametric)."""
    turn = torch.eye(points.shape[1], device=points.device)
    entries: list[Tensor | None] = [None] * len(widths)
    for _ in range(turns):
        found = []
        for part, own in enumerate((points @ turn).split(widths, dim=1)):
            chosen = kmeans(own, num_entries, 3, generator, entries[part])
            found.append(chosen[nearest(own, chosen, chosen.new_zeros(len(chosen)))])
            entries[part] = chosen
        u, _, vh = torch.linalg.svd(points.T @ torch.cat(found, dim=1))
        turn = u @ vh
    return turn.half()


class Trainer:
    """Codebooks for any price of a bit, from the same positions and the same start."""

    def __init__(self, job: Job, config: PQConfig):
        assert config.parts and config.train_positions, "settings that are still open"
        self.config, self.shape = config, job.source.shape or (1,)
        self.points = training_positions(job, config.train_positions)
        self.widths = part_widths(self.shape[0], config.parts)
        self.order = by_likeness(self.points, self.widths).to(job.device)
        self.turn: Tensor | None = None
        generator = torch.Generator(job.device).manual_seed(job.fit.seed)
        if config.rotations:
            wanted = max(TURNED, 16 * self.shape[0])
            some = self.points[:: max(1, len(self.points) // wanted), self.order]
            self.turn = best_rotation(some, self.widths, min(2**config.bits, 256), config.rotations, generator)
        self.start = [kmeans(part, 2**config.bits, config.rounds, generator) for part in self.parts()]

    def parts(self) -> list[Tensor]:
        """Made anew each time: trainers of one search share their points."""
        points = self.points[:, self.order]
        points = points if self.turn is None else points @ self.turn.float()
        return [part.contiguous() for part in points.split(self.widths, dim=1)]

    def books(self, rate_weight: float) -> Codebooks:
        found = [constrain(p, e, rate_weight, self.config.rounds) for p, e in zip(self.parts(), self.start)]
        return Codebooks(self.shape, self.order, self.turn, [e for e, _ in found], [costs for _, costs in found])


class Kept:
    """What was found for some features, so that a search among settings, and the fit after it, find it once."""

    def __init__(self) -> None:
        self.points: dict[int, Tensor] = {}
        self.found: dict[str, tuple[Hashable, Any]] = {}
        self.tries: dict[PQConfig, Any] = {}

    def latest(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, or what it made the last time for the same key."""
        if kind not in self.found or self.found[kind][0] != key:
            self.found.pop(kind, None)
            self.found[kind] = key, make()
        made: T = self.found[kind][1]
        return made


def kept_for(job: Job) -> Kept:
    """Gone with the features."""
    return once_for_features(job, "pq", None, Kept)


def training_positions(job: Job, wanted: int) -> Tensor:
    """About so many positions (n, C), of samples evenly spaced."""
    known = kept_for(job).points
    if wanted not in known:
        known[wanted] = read_positions(job, wanted)
    return known[wanted]


def read_positions(job: Job, wanted: int) -> Tensor:
    per_sample = math.prod((job.source.shape or (1,))[1:])
    num_read = min(len(job.source), max(READ_SAMPLES, -(-wanted // per_sample)))
    ids = evenly_spaced(len(job.source), num_read)
    generator = torch.Generator().manual_seed(job.fit.seed)
    found = []
    for x in normalised_chunks(job, ids):
        points = positions(x)
        share = min(len(points), -(-wanted * len(x) // num_read))
        found.append(points[torch.randperm(len(points), generator=generator)[:share].to(points.device)])
    return torch.cat(found)
