"""Product quantisation: each position of a map is a vector of channels, cut into parts; a part is stored as a code.

    x (C, h, w) in [0, 1] -> h w positions of C channels -> parts -> nearest of 2^bits entries -> code -> ANS
    ids -> codes -> entries, put together again -> x

Jégou et al. 2011; where bits have a price, codes go to entries that are likely as well as near: Chou et al. 1989
(entropy-constrained vector quantisation, `rate_weight`). A part holds channels that are alike, and all channels are
rotated so that parts lose the least (OPQ, Ge et al. 2013, non-parametric; ours starts from the order by likeness, and
its codebooks have at most 256 entries). Each part has entropy tables of its own, which positions that are alike share.
The entries are coded, too: rounded so finely that it adds half a percent to the error.

The rotation is found by taking turns with k-means. The closed form of the same paper, principal axes spread by
eigenvalue, did worse than none in a trial on maps after a ReLU: it mixes channels that are zero together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from krnet import parallel
from krnet.config import check_int, check_range, from_dict
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.quantize import MAX_TABLES, RESTORE, Tables
from krnet.recorders._basis import Basis, CodedReplayer
from krnet.recorders._features import normalised_chunks
from krnet.recorders._kmeans import constrain, kmeans, nearest, tally
from krnet.recorders._numbers import (
    CHUNK_BYTES,
    MAX_BLOCK,
    CodedConfig,
    CodedNumbers,
    Numbers,
    Reader,
    encode,
    evenly,
    pack,
    survey,
)
from krnet.recorders.base import Content, Job, Recorder, TensorStore, planned_overhead, refuse_network, register
from krnet.samples import Samples

if TYPE_CHECKING:
    from krnet.recorders._pq_growing import PQGrowth

CODES, ENTRIES = "codes.", "entries."
NUM_TENSORS = 18
MAX_BITS = 12  # the coder's largest alphabet
USUAL_PARTS = 8
# Positions to train on: more are a little better, and take as much longer.
PER_ENTRY = {"cpu": 64, "cuda": 256}
READ_SAMPLES = 4096  # that positions to train on are taken from, at least
TURNS, ROTATED = 8, 1024  # of k-means and rotation; channels up to which there is one
ORDERED = 4096  # channels up to which likeness is looked at: a matrix of channels x channels
ROUNDING = 0.005  # share that rounding the entries adds to the error
CODE = CodedConfig(step=1.0, dead_zone=0.5, centroid=0.0)  # reads codes back as the numbers they are


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


# ------------------------------------------------------------------ positions and codes


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


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes of some samples, those of a part from the most to the least frequent, and the entries that suit them."""

    values: np.ndarray
    """(n, parts, positions) uint8 or int16"""
    books: Codebooks
    squared_error: float
    """Mean, of a value of the normalised features."""


def code(job: Job, books: Codebooks, ids: Tensor) -> Codes:
    """Samples `ids` in codes; entries become the centroids of what they stand for, and those unused are dropped."""
    num_parts, num_entries = len(books.entries), max(map(len, books.entries))
    dtype = np.uint8 if num_entries <= 256 else np.int16
    values = np.empty((len(ids), num_parts, books.num_positions), dtype)
    counts = [torch.zeros(len(e), dtype=torch.float64, device=job.device) for e in books.entries]
    sums = [torch.zeros(e.shape, dtype=torch.float64, device=job.device) for e in books.entries]
    power = torch.zeros((), dtype=torch.float64, device=job.device)
    done = 0
    for x in normalised_chunks(job, ids):
        codes = books.forward(x)
        values[done : done + len(x)] = codes.view(len(x), num_parts, -1).cpu().numpy()
        done += len(x)
        points = books.parts(x)
        for part, chosen in enumerate(codes.view(len(x), num_parts, -1).unbind(1)):
            power += points[part].double().square().sum()
            count, total = tally(points[part], chosen.flatten(), len(counts[part]))
            counts[part] += count
            sums[part] += total
    entries = []
    for part, (count, total) in enumerate(zip(counts, sums)):
        ranked = count.argsort(descending=True, stable=True)[: int(count.count_nonzero())]
        rank = np.zeros(len(count), dtype)
        rank[ranked.cpu().numpy()] = np.arange(len(ranked))
        values[:, part] = rank[values[:, part]]
        entries.append((total[ranked] / count[ranked, None]).float())
        power -= (total[ranked].square().sum(1) / count[ranked]).sum()  # what centroids leave of the squares
    error = max(0.0, power.item()) / (len(ids) * math.prod(books.shape))
    return Codes(values, Codebooks(books.shape, books.order, books.turn, entries), error)


# ------------------------------------------------------------------ tables and files


def group_positions(counts: Tensor, most: int) -> Tensor:
    """counts (positions, k) of a part's codes -> the table of each position (positions,), of at most `most`.

    As many as pay for themselves, found by Lloyd's algorithm on code lengths.
    """
    num_positions, num_entries = counts.shape
    best_cost, best = math.inf, torch.zeros(num_positions, dtype=torch.int64)
    counts = counts.float()
    num_tables = 1
    while num_tables <= min(most, num_positions):
        table = torch.arange(num_positions) * num_tables // num_positions
        for _ in range(12):
            totals = torch.zeros(num_tables, num_entries).index_add_(0, table, counts) + 0.01
            lengths = -(totals / totals.sum(1, keepdim=True)).log2()
            bits, table = (counts @ lengths.T).min(1)
        cost = bits.double().sum().item() + 16 * num_entries * len(table.unique())
        if cost < best_cost:
            best_cost, best = cost, table
        num_tables *= 2
    return best.unique(return_inverse=True)[1]


def make_tables(codes: Codes, num_planned: int) -> tuple[Tables, float]:
    """Entropy tables of codes, and the bytes in which they code as many samples as are planned."""
    times = num_planned / len(codes.values)
    _, num_parts, num_positions = codes.values.shape
    widest = max(map(len, codes.books.entries))
    columns, totals, num_tables = [], [], 0
    for part, entries in enumerate(codes.books.entries):
        counts = torch.zeros(num_positions, len(entries), dtype=torch.int64)
        step = max(1, CHUNK_BYTES // (8 * num_positions))
        for begin in range(0, len(codes.values), step):
            index = torch.from_numpy(codes.values[begin : begin + step, part].astype(np.int64))
            index += torch.arange(num_positions) * len(entries)
            counts += torch.bincount(index.flatten(), minlength=counts.numel()).view_as(counts)
        table = group_positions(counts * times, MAX_TABLES // num_parts)
        merged = counts.new_zeros(int(table.max()) + 1, widest)
        merged[:, : len(entries)].index_add_(0, table, counts)
        columns.append(table + num_tables)
        totals.append(merged)
        num_tables += len(merged)
    counted = torch.cat(totals).numpy()
    tables = Tables.from_counts(torch.cat(columns).numpy(), counted, 0)
    return tables, tables.bits(counted, 0) / 8 * times


def code_entries(books: Codebooks, step: float) -> CodedNumbers:
    """All entries as one matrix (k, C), the parts side by side; those of fewer entries end in zeros."""
    num_entries = max(map(len, books.entries))
    padded = [torch.nn.functional.pad(e, (0, 0, 0, num_entries - len(e))) for e in books.entries]
    numbers = Numbers.of(torch.cat(padded, dim=1))
    config = CodedConfig(step=step, block_size=MAX_BLOCK)
    return encode(numbers, config, survey(numbers, config))


@dataclass(frozen=True, eq=False)
class Plan:
    """All that is stored but the codes, which are still to be coded."""

    config: PQConfig
    codes: Codes
    tables: Tables
    own: dict[str, Tensor]
    """Tensors of the codebooks."""
    size_bytes: int
    """Of the file, grown to all planned samples, from above by less than a kilobyte or so."""


class WithoutCentroids:
    """A store of coded numbers that are read back as they are: their centroids are all 0, and not in the file."""

    def __init__(self, store: TensorStore):
        self.store = store

    def tensor(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if name == CODES + "centroids":
            return torch.zeros(tuple(shape or ()), dtype=dtype)
        return self.store.tensor(name, shape=shape, dtype=dtype)


@register
class PQRecorder(Recorder):
    name = "pq"
    setting_names = frozenset(f.name for f in fields(PQConfig))
    fast_is_exact = True
    grows = True

    def fit(self, job: Job) -> Content:
        refuse_network(job, self.name)
        if job.start is not None:
            return self._growth(job).fit(job.settings)
        config = resolved(job, from_dict(PQConfig, job.settings))
        started = time.perf_counter()
        with parallel.exact(), torch.inference_mode():
            plan = make_plan(job, config, Trainer(job, config), torch.arange(len(job.source)))
        tables, values = plan.tables, plan.codes.values.reshape(len(job.source), -1)
        step = config.block_size * max(1, CHUNK_BYTES // (4 * values.shape[1] * config.block_size))
        parts = (values[begin : begin + step] for begin in range(0, len(values), step))
        blocks = pack(tables, parts, config.block_size)
        coded = CodedNumbers(blocks, np.zeros(0, np.int8)).tensors(CODES)
        del coded[CODES + "centroids"]
        tensors = {"low": job.stats.low, "high": job.stats.high, **plan.own, **coded}
        return Content(tensors=tensors, settings=asdict(plan.config), seconds=time.perf_counter() - started)

    def _growth(self, job: Job) -> PQGrowth:
        from krnet.recorders._pq_growing import PQGrowth  # which is made of what this file has

        return PQGrowth(job, self)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """Parts and bits from a few samples, then the price of a bit from all of them. On a CPU fewer are tried.

        A recording that grows keeps its codebooks; the codes of new samples may go by another price.
        """
        if job.start is not None:
            return self._growth(job).for_budget(budget)
        from krnet.recorders._pq_budget import search_settings  # which is made of what this file has

        with parallel.exact(), torch.inference_mode():
            return search_settings(job, budget)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> CodedReplayer:
        shape = samples.shape or (1,)
        try:
            config = from_dict(PQConfig, settings)
            num_parts, step = config.parts, config.entry_step
            if num_parts is None or step is None or config.rotations is None:
                raise SettingError(f"parts, entry_step, rotations are {num_parts}, {step}, {config.rotations}")
            widths = part_widths(shape[0], num_parts)
        except InputError as error:
            raise NotARecordingError(f"settings of recorder pq refused: {error}. {RESTORE}") from error
        low, high = (store.tensor(name, shape=shape[:1], dtype=torch.float32).to(device) for name in ("low", "high"))
        order = store.tensor("order", shape=shape[:1], dtype=torch.int32).long()
        num_entries = store.tensor("sizes", shape=(num_parts,), dtype=torch.int16).long()
        if not torch.equal(order.sort().values, torch.arange(shape[0])):
            raise NotARecordingError(f"the order of channels leaves some out. {RESTORE}")
        if not 1 <= int(num_entries.min()) <= int(num_entries.max()) <= 2**MAX_BITS:
            raise NotARecordingError(f"codebooks of {num_entries.tolist()} entries. {RESTORE}")
        coded = CodedNumbers.load(store, ENTRIES, int(num_entries.max()), shape[0], MAX_BLOCK)
        reader = Reader(coded, CodedConfig(step=step, block_size=MAX_BLOCK), device)
        matrix = reader.read(torch.arange(int(num_entries.max())))
        parts = zip(matrix.split(widths, dim=1), num_entries.tolist())
        turn = store.tensor("turn", shape=(shape[0],) * 2, dtype=torch.float16).to(device) if config.rotations else None
        books = Codebooks(shape, order.to(device), turn, [part[:size].contiguous() for part, size in parts])
        codes = CodedNumbers.load(
            WithoutCentroids(store), CODES, samples.num_samples, books.num_columns, config.block_size
        )
        tables = codes.blocks.tables
        last = (tables.first.astype(np.int64) + tables.sizes)[tables.column]  # of each column, and one more
        if tables.first.min() < 0 or (last > num_entries.repeat_interleave(books.num_positions).numpy()).any():
            raise NotARecordingError(f"the tables have codes that no codebook has. {RESTORE}")
        return CodedReplayer(Reader(codes, CODE, device), books, samples, low, high)


# ------------------------------------------------------------------ fitting


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


class Trainer:
    """Codebooks for any price of a bit, from the same positions and the same start."""

    def __init__(self, job: Job, config: PQConfig):
        assert config.parts and config.train_positions, "settings that are still open"
        self.config, self.shape = config, job.source.shape or (1,)
        points = training_positions(job, config.train_positions)
        widths = part_widths(self.shape[0], config.parts)
        self.order = by_likeness(points, widths).to(job.device)
        generator = torch.Generator(job.device).manual_seed(job.fit.seed)
        points, self.turn = points[:, self.order], None
        if config.rotations:
            some = points[: 1 << 16]
            self.turn = best_rotation(some, widths, min(2**config.bits, 256), config.rotations, generator)
            points = points @ self.turn.float()
        self.points = [part.contiguous() for part in points.split(widths, dim=1)]
        self.start = [kmeans(part, 2**config.bits, config.rounds, generator) for part in self.points]

    def books(self, rate_weight: float) -> Codebooks:
        found = [constrain(p, e, rate_weight, self.config.rounds) for p, e in zip(self.points, self.start)]
        return Codebooks(self.shape, self.order, self.turn, [e for e, _ in found], [costs for _, costs in found])


def training_positions(job: Job, wanted: int) -> Tensor:
    """About so many positions (n, C), of samples evenly spaced."""
    per_sample = math.prod((job.source.shape or (1,))[1:])
    num_read = min(len(job.source), max(READ_SAMPLES, -(-wanted // per_sample)))
    ids = evenly(len(job.source), num_read)
    generator = torch.Generator().manual_seed(job.fit.seed)
    found = []
    for x in normalised_chunks(job, ids):
        points = positions(x)
        share = min(len(points), -(-wanted * len(x) // num_read))
        found.append(points[torch.randperm(len(points), generator=generator)[:share].to(points.device)])
    return torch.cat(found)


def make_plan(job: Job, config: PQConfig, trainer: Trainer, ids: Tensor) -> Plan:
    """What a file of these samples would hold."""
    codes = code(job, trainer.books(config.rate_weight), ids)
    finest = math.sqrt(12 * ROUNDING * codes.squared_error)
    # The coder has 4096 symbols, and a rotation goes beyond [0, 1].
    finest = max(finest, max(e.abs().max().item() for e in codes.books.entries) / 2000)
    config = replace(config, entry_step=config.entry_step or min(max(finest, 1 / 2000), 1 / 8))
    tables, stream_bytes = make_tables(codes, job.num_planned)
    assert config.entry_step
    own = {
        "order": codes.books.order.int().cpu(),
        "sizes": torch.tensor([len(e) for e in codes.books.entries], dtype=torch.int16),
        **({} if codes.books.turn is None else {"turn": codes.books.turn.cpu()}),
        **code_entries(codes.books, config.entry_step).tensors(ENTRIES),
    }
    fixed = sum(t.nbytes for t in own.values()) + 8 * codes.books.shape[0]
    fixed += tables.weights.nbytes + tables.first.nbytes + tables.sizes.nbytes + tables.column.nbytes
    # A stream ends at a whole byte, and holds up to four that its symbols do not need.
    num_blocks = -(-job.num_planned // config.block_size)
    size = fixed + stream_bytes + 6 * num_blocks + planned_overhead(job, NUM_TENSORS, asdict(config))
    return Plan(config, codes, tables, own, math.ceil(size))
