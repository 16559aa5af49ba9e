"""What recorders that quantise and entropy-code have in common.

    features --normalise--> [0, 1] --Basis.forward--> numbers (N, columns) --encode--> CodedNumbers --> the file
    ids -> Reader: the blocks that hold them -> numbers --Basis.inverse--> [0, 1] --denormalise--> features

A recorder brings its settings and its Basis. Numbers are rounded to multiples of one step, and read back between the
middle of their bin and the centroid of what fell into it.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from krnet import parallel
from krnet.budget import search
from krnet.config import check_int, check_range, from_dict
from krnet.errors import InputError, NotARecordingError, SettingError, TensorShapeError
from krnet.features import FeatureSource
from krnet.quantize import (
    MAX_ALPHABET,
    MAX_SYMBOL,
    RESTORE,
    TABLE_BYTES,
    Blocks,
    Tables,
    group_columns,
    histograms,
    to_symbols,
)
from krnet.recorders.base import Content, Job, Recorder, Replayer, TensorStore, overhead_bytes
from krnet.samples import Samples
from krnet.scan import denormalise, normalise

if TYPE_CHECKING:
    from krnet.recorders._growing import CodedGrowth

PREFIX = "coded."
CHUNK_BYTES = 16 << 20  # of numbers in hand while fitting
CACHE_BYTES = 2 << 30  # of symbols that a reader keeps once it has decoded them
MAX_BLOCK = 256  # rows; bounds what reading one row may take
SURVEYED = 4096  # rows from which columns are grouped
SEARCHED = 1024  # rows from which sizes are guessed
CENTROID = 127  # parts of a step in which a centroid is kept
CODED_TENSORS = ("stream", "lengths", "column", "first", "sizes", "weights", "centroids")
UNUSED = 0.01  # share of a budget that may be left over
LEARNED = weakref.WeakKeyDictionary[FeatureSource, tuple[object, Any]]()  # the latest, gone with the features


@dataclass(frozen=True, kw_only=True)
class CodedConfig:
    step: float = 1 / 15
    """Width of a quantisation bin; the range of each channel is 1."""
    dead_zone: float = 0.5
    """Where the bin of zero ends, in steps: 0.5 rounds to the nearest, more sends more numbers to zero.
    Samples that a recording grows by may have another, also beyond 1."""
    centroid: float = 1.0
    """Where a number is read back: 1 at the centroid of its bin, the least error; 0 at the middle, which keeps more
    of the amplitude, and more of what a classifier reads; below 0 beyond it."""
    block_size: int = 16
    """Samples coded together: to read one is to read them all; a block costs 3 bytes beside its symbols."""

    def __post_init__(self) -> None:
        check_range("step", self.step, 1e-6, 1e3)
        check_range("dead_zone", self.dead_zone, 0.5, 1)
        check_range("centroid", self.centroid, -1, 1)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)


# ------------------------------------------------------------------ numbers, coded


@dataclass(frozen=True)
class Numbers:
    """A matrix to be coded, read a few rows at a time."""

    read: Callable[[Tensor], Tensor]
    """rows (n,) int64 -> numbers (n, num_columns), on the device"""
    num_rows: int
    num_columns: int

    def some(self, most: int) -> Tensor:
        """All rows, or `most` of them, evenly spaced."""
        num = min(most, self.num_rows)
        return torch.linspace(0, self.num_rows - 1, num, dtype=torch.float64).round().long()

    def chunks(self, rows: Tensor, block_size: int) -> Iterator[Tensor]:
        """Numbers of these rows, whole blocks of about CHUNK_BYTES at once."""
        num_blocks = max(1, CHUNK_BYTES // (4 * self.num_columns * block_size))
        yield from map(self.read, rows.split(num_blocks * block_size))


@dataclass(frozen=True, eq=False)
class Survey:
    """What is known of numbers before they are coded."""

    tables: Tables
    centroids: np.ndarray
    """(symbols of all tables,) int8: mean of the numbers of a symbol, less the symbol, in steps / CENTROID."""
    size_bytes: float
    """Of tables and streams, when all planned rows are there, to a percent or so."""


def survey(
    numbers: Numbers,
    config: CodedConfig,
    *,
    max_rows: int | None = None,
    num_planned: int | None = None,
    held: CodedNumbers | None = None,
) -> Survey:
    """Group the columns, count the symbols; of all rows, or of at most `max_rows` evenly spaced ones.

    num_planned  rows that there are to be in the end, by default those that there are
    held         rows that come before these and must be read back as they were: their groups and centroids stay
    """
    num_held = held.blocks.num_rows if held else 0
    num_planned = num_planned or num_held + numbers.num_rows
    if held is None:
        few = numbers.some(min(SURVEYED, max_rows or SURVEYED))
        met = [histograms(_symbols(chunk, config)) for chunk in numbers.chunks(few, config.block_size)]
        column, radius = group_columns(torch.stack(met).sum(0), len(few) / num_planned), 1
    else:
        column, radius = held.blocks.tables.column, held.blocks.tables.radius
    num_tables = int(column.max()) + 1

    rows = numbers.some(max_rows or numbers.num_rows)
    tallies = torch.zeros(2, num_tables, 2 * radius + 1, dtype=torch.float64)  # of symbols, and of their rests
    for chunk in numbers.chunks(rows, config.block_size):
        symbols = _symbols(chunk, config)
        wider = max(0, int(symbols.abs().max()) - radius)
        radius += wider
        tallies = torch.nn.functional.pad(tallies, (wider, wider))
        width = 2 * radius + 1
        index = symbols + (torch.from_numpy(column).to(symbols.device).int() * width + radius)
        rest = (chunk / config.step - symbols).double()
        met = [torch.bincount(index.flatten(), w, num_tables * width) for w in (None, rest.flatten())]
        tallies += torch.stack([m.double().view(num_tables, width).cpu() for m in met])

    counts, rests = tallies.numpy()
    centroids = np.rint((rests / np.maximum(counts, 1)).clip(-1, 1) * CENTROID)
    ahead = np.zeros_like(counts)  # of the rows that are held
    if held is not None:
        ahead, kept = (held.blocks.tables.spread(values, radius) for values in (held.counts, held.centroids))
        centroids = np.where(ahead > 0, kept, centroids)
    used = (ahead + counts).any(0).nonzero()[0]
    if (most := int(used[-1] - used[0]) + 1) > MAX_ALPHABET:
        raise _too_fine(config.step, most)
    tables = Tables.from_counts(column, ahead + counts, -radius)
    spans = [slice(first + radius, first + radius + size) for first, size in _pairs(tables.first, tables.sizes)]
    centroids = np.concatenate([centroids[t, span] for t, span in enumerate(spans)])
    bits = tables.bits(ahead, -radius) + tables.bits(counts, -radius) * (num_planned - num_held) / len(rows)
    num_blocks = -(-num_planned // config.block_size)
    size = bits / 8 + 3 * num_blocks + TABLE_BYTES * len(tables.weights) + 4 * num_tables + len(column)
    return Survey(tables, centroids.astype(np.int8), size)


def _pairs(*arrays: np.ndarray) -> Iterator[tuple[int, ...]]:
    return zip(*(array.tolist() for array in arrays))


def _symbols(numbers: Tensor, config: CodedConfig) -> Tensor:
    largest = numbers.abs().max().item() / config.step + 1
    if largest > MAX_SYMBOL:  # before they overflow
        raise _too_fine(config.step, 2 * largest)
    return to_symbols(numbers, config.step, config.dead_zone)


def _too_fine(step: float, found: float) -> SettingError:
    return SettingError(
        f"step is {step:g}, which gives {found:.0f} different values; expected at most {MAX_ALPHABET}. "
        f"Take a step of {step * found / MAX_ALPHABET:.2g} or more, or recorder raw"
    )


def encode(numbers: Numbers, config: CodedConfig, found: Survey, held: CodedNumbers | None = None) -> CodedNumbers:
    """All rows: those that are held already, if any, then these."""
    tables = found.tables
    lowest = tables.first.astype(np.int32)
    edges = [edge[tables.column] for edge in (lowest, lowest + tables.sizes.astype(np.int32) - 1)]
    chunks = numbers.chunks(torch.arange(numbers.num_rows), config.block_size)
    # A product that rounds otherwise than when it was counted may just miss the last bin of its table.
    symbols = (np.clip(_symbols(chunk, config).cpu().numpy(), *edges) for chunk in chunks)
    parts = chain(held.symbols() if held else (), symbols)
    return CodedNumbers(pack(tables, parts, config.block_size), found.centroids)


def pack(tables: Tables, parts: Iterable[np.ndarray], block_size: int) -> Blocks:
    """Symbols (n, columns), a few rows at a time -> the blocks that a file holds."""
    streams, num_rows = list[bytes](), 0
    left = np.empty((0, len(tables.column)), np.int32)  # rows of a block that is not full yet
    for part in parts:
        part = np.concatenate([left, part]) if len(left) else part
        whole = len(part) - len(part) % block_size
        streams += tables.encode(part[:whole], block_size)
        left, num_rows = part[whole:], num_rows + whole
    streams += tables.encode(left, block_size)
    lengths = np.array([len(stream) for stream in streams])
    lengths = lengths.astype(np.uint16 if lengths.max() < 2**16 else np.uint32)
    return Blocks(tables, np.frombuffer(b"".join(streams), np.uint8), lengths, num_rows + len(left), block_size)


@dataclass(frozen=True, eq=False)
class CodedNumbers:
    """A matrix of numbers as a file holds it."""

    blocks: Blocks
    centroids: np.ndarray

    def symbols(self) -> Iterator[np.ndarray]:
        """All rows (n, columns) int32, block by block."""
        tables = self.blocks.tables
        lowest = tables.first[tables.column].astype(np.int32)
        yield from (self.blocks.read(block) + lowest for block in range(len(self.blocks.lengths)))

    @cached_property
    def counts(self) -> np.ndarray:
        """(symbols of all tables,) int64: how often each is there."""
        tables, counts = self.blocks.tables, np.zeros(len(self.centroids), np.int64)
        for block in range(len(self.blocks.lengths)):
            index = self.blocks.read(block) + tables.starts[tables.column]
            counts += np.bincount(index.reshape(-1), minlength=len(counts))
        return counts

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        tables = self.blocks.tables
        arrays = (
            self.blocks.stream, self.blocks.lengths, tables.column, tables.first, tables.sizes, tables.weights,
            self.centroids,
        )  # fmt: skip
        return {prefix + name: torch.from_numpy(array.copy()) for name, array in zip(CODED_TENSORS, arrays)}

    @classmethod
    def load(cls, store: TensorStore, prefix: str, num_rows: int, num_columns: int, block_size: int) -> CodedNumbers:
        """Refused unless every size follows from the tensors: a file cannot ask for more than it pays for."""

        def get(name: str, dtype: torch.dtype | None, *shape: int) -> np.ndarray:
            found = store.tensor(prefix + name, shape=shape or None, dtype=dtype)
            if found.dim() != 1:
                raise TensorShapeError(
                    f"tensor {prefix + name!r} has shape {list(found.shape)}; expected one dimension"
                )
            return found.numpy()

        column = get("column", torch.uint8, num_columns)
        first, sizes = get("first", torch.int16), get("sizes", torch.uint16)
        tables = Tables(column, first, sizes, get("weights", torch.uint16))
        lengths = get("lengths", None, -(-num_rows // block_size))
        if lengths.dtype not in (np.uint16, np.uint32):
            raise TensorShapeError(f"tensor '{prefix}lengths' is {lengths.dtype}; expected uint16 or uint32")
        blocks = Blocks(tables, get("stream", torch.uint8), lengths, num_rows, block_size)
        blocks.check()
        return cls(blocks, get("centroids", torch.int8, len(tables.weights)))


class Reader:
    """Coded numbers by row. What has been decoded is kept, as symbols, where all of them fit in CACHE_BYTES."""

    def __init__(self, coded: CodedNumbers, config: CodedConfig, device: torch.device):
        self.coded, self.blocks, self.device = coded, coded.blocks, device
        tables = coded.blocks.tables
        symbols = np.concatenate([np.arange(low, low + size) for low, size in _pairs(tables.first, tables.sizes)])
        middles = symbols + np.sign(symbols) * (config.dead_zone - 0.5)
        places = middles + config.centroid * (symbols + coded.centroids / CENTROID - middles)
        self.values = torch.from_numpy(places * config.step).float().to(device)
        self.starts = torch.from_numpy(tables.starts[tables.column]).int().to(device)  # (columns,)
        shape = coded.blocks.num_rows, len(tables.column)
        small = math.prod(shape) * np.dtype(tables.index_dtype).itemsize <= CACHE_BYTES
        self.known = np.zeros(len(coded.blocks.lengths), bool)
        # Not touched, and so not in memory, before it is filled.
        self.cache = np.empty(shape, tables.index_dtype) if small else None

    def read(self, rows: Tensor) -> Tensor:
        """rows (n,) int64 -> numbers (n, columns) on the device."""
        index = torch.from_numpy(self._index(rows.numpy())).to(self.device)
        return self.values[index.int() + self.starts]

    def _index(self, rows: np.ndarray) -> np.ndarray:
        size = self.blocks.block_size
        blocks, place = np.unique(rows // size, return_inverse=True)
        if self.cache is None:
            if not len(rows):
                return np.empty((0, len(self.starts)), self.blocks.tables.index_dtype)
            # Only the last block is shorter, and it comes last.
            return np.concatenate([self.blocks.read(block) for block in blocks])[place * size + rows % size]
        for block in blocks[~self.known[blocks]]:
            self.cache[block * size : (block + 1) * size] = self.blocks.read(block)
            self.known[block] = True
        return self.cache[rows]


# ------------------------------------------------------------------ recorders


class Basis(ABC):
    """Normalised features to the numbers that are coded, and back."""

    num_columns: int

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x (n, channels, ...) in [0, 1] -> (n, num_columns)"""

    @abstractmethod
    def inverse(self, numbers: Tensor) -> Tensor:
        """(n, num_columns) -> (n, ...): as many values as x had"""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What the file holds of it."""


class CodedReplayer(Replayer):
    def __init__(self, reader: Reader, basis: Basis, samples: Samples, low: Tensor, high: Tensor):
        self.reader, self.basis, self.shape, self.low, self.high = reader, basis, samples.shape, low, high

    @torch.inference_mode()
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        with parallel.exact():
            found = self.basis.inverse(self.reader.read(ids)).reshape(len(ids), *(self.shape or (1,)))
        # No feature lies outside [0, 1]: what the basis puts there is nearer at the edge.
        return denormalise(found.clamp_(0, 1), self.low, self.high).reshape(len(ids), *self.shape)


class CodedRecorder(Recorder):
    """A recorder of quantised, entropy-coded numbers: settings, and a Basis."""

    config_class: ClassVar[type[CodedConfig]]
    fast_is_exact = True
    grows = True

    def learn(self, job: Job, config: Any) -> Any:
        """What the basis is made of, and takes long to find: the same for every step."""

    @abstractmethod
    def basis(self, job: Job, config: Any, learned: Any) -> tuple[Basis, Any]:
        """The basis, and the settings with all that they left open."""

    def draft(self, job: Job, config: Any, learned: Any) -> tuple[Numbers, Any, dict[str, int]]:
        """The numbers that would be coded, the settings, and about how many bytes each tensor of the basis takes."""
        basis, config = self.basis(job, config, learned)
        return numbers_of(job, basis), config, {name: tensor.nbytes for name, tensor in basis.tensors().items()}

    @abstractmethod
    def restore(self, samples: Samples, config: Any, store: TensorStore, low: Tensor, high: Tensor) -> Basis:
        """The basis from a file; it goes to the device that `low` is on."""

    def _learn(self, job: Job, config: Any) -> Any:
        """`learn`, once for the same features: a search among settings codes them many times."""
        key = (self.name, str(job.device), job.fit.seed, getattr(config, "components", None))
        if LEARNED.get(job.source, (None, None))[0] != key:
            LEARNED[job.source] = key, self.learn(job, config)
        return LEARNED[job.source][1]

    def fit(self, job: Job) -> Content:
        refuse_network(job, self.name)
        if job.start is not None:
            return self._growth(job).fit(job.settings)
        config = from_dict(self.config_class, job.settings)
        started = time.perf_counter()
        with parallel.exact(), torch.inference_mode():
            basis, config = self.basis(job, config, self._learn(job, config))
            numbers = numbers_of(job, basis)
            coded = encode(numbers, config, survey(numbers, config, num_planned=job.num_planned))
        tensors = {"low": job.stats.low, "high": job.stats.high, **basis.tensors(), **coded.tensors(PREFIX)}
        return Content(tensors=tensors, settings=asdict(config), seconds=time.perf_counter() - started)

    def _growth(self, job: Job) -> CodedGrowth:
        from krnet.recorders._growing import CodedGrowth  # which is made of what this file has

        return CodedGrowth(job, self)

    def size_bytes(self, job: Job, settings: Mapping[str, Any], *, max_rows: int | None = SEARCHED) -> int:
        """About how large a file `fit` would make, without coding it; from all samples, or from `max_rows` of them.

        Like all sizes that a budget is kept with, when it has grown to all samples that are planned.
        """
        config = from_dict(self.config_class, settings)
        with parallel.exact(), torch.inference_mode():
            numbers, config, own = self.draft(job, config, self._learn(job, config))
            found = survey(numbers, config, max_rows=max_rows, num_planned=job.num_planned)
        own |= {"low": job.stats.low.nbytes, "high": job.stats.high.nbytes}
        overhead = planned_overhead(job, len(CODED_TENSORS) + len(own), asdict(config))
        return round(found.size_bytes) + sum(own.values()) + overhead

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The finest step that fits: found from some of the samples, then made sure of by coding all of them.

        A recording that grows keeps its step; new samples may have a wider dead zone.
        """
        if job.start is not None:
            return self._growth(job).for_budget(budget)
        given = dict(job.settings)
        if "step" in given:
            return given
        self._learn(job, from_dict(self.config_class, given))  # refuses settings before any of them is tried
        widest = min(2 * math.sqrt(math.prod(job.source.shape)) + 1, 1e3)  # beyond all numbers of an orthonormal basis
        too_fine, aim, step, kept = 0.0, float(budget), self.config_class.step, None

        def smallness(step: float) -> float:
            nonlocal too_fine
            try:
                return -math.log(self.size_bytes(job, {**given, "step": step}))
            except SettingError:  # more symbols than a table may have
                too_fine = max(too_fine, step)
                return -math.inf

        for _ in range(4):
            found = search(smallness, -math.log(aim), start=step, low=1e-6, high=widest, slack=UNUSED / 2, tries=16)
            step = float(f"{found or widest:.5g}")
            size = self._coded_bytes(job, {**given, "step": step})
            if size <= budget:
                kept = step if kept is None else min(step, kept)
            at_an_end = found is None or step < 1.5 * too_fine
            if (1 - UNUSED) * budget <= size <= budget or (at_an_end and (size > budget) == (found is None)):
                break
            # All samples take more, or less, than those that were searched with: aim by as much lower, or higher.
            aim *= (1 - UNUSED / 4) * budget / size
        return {**given, "step": step if kept is None else kept}

    def _coded_bytes(self, job: Job, settings: Mapping[str, Any]) -> int:
        """Size of the file, as it will be at most."""
        return planned_bytes(job, self.fit(replace(job, settings=settings)), PREFIX)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> CodedReplayer:
        try:
            config = from_dict(self.config_class, settings)
        except InputError as error:
            raise NotARecordingError(f"settings of recorder {self.name} refused: {error}. {RESTORE}") from error
        shape = ((samples.shape or (1,))[0],)
        low, high = (store.tensor(name, shape=shape, dtype=torch.float32).to(device) for name in ("low", "high"))
        basis = self.restore(samples, config, store, low, high)
        coded = CodedNumbers.load(store, PREFIX, samples.num_samples, basis.num_columns, config.block_size)
        return CodedReplayer(Reader(coded, config, device), basis, samples, low, high)


def refuse_network(job: Job, recorder: str) -> None:
    for option, given in (("preset", job.preset), ("head", job.head)):
        if given is not None:
            raise InputError(f"{option} is given, and recorder {recorder} has no network to use it; leave {option} out")


def planned_bytes(job: Job, content: Content, prefix: str, held: int = 0) -> int:
    """Size of a file at most, when it has grown to all planned samples: like those behind the first `held`."""
    own = sum(tensor.nbytes for tensor in content.tensors.values())
    lengths, num_samples = content.tensors[prefix + "lengths"], len(job.source)
    first = held // content.settings["block_size"]  # the block in which they begin
    fresh = int(lengths[first:].long().sum()) + lengths[first:].nbytes
    share = (job.num_planned - num_samples) / (num_samples - first * content.settings["block_size"])
    return own + math.ceil(share * fresh) + planned_overhead(job, len(content.tensors), content.settings)


def planned_overhead(job: Job, num_tensors: int, settings: Mapping[str, Any]) -> int:
    """`overhead_bytes` when the file has grown: labels and classes as many more as there are samples."""
    metadata, tensors = job.samples.describe()
    labels = len(json.dumps(metadata["classes"])) + sum(tensor.nbytes for tensor in tensors.values())
    share = (job.num_planned - len(job.source)) / len(job.source)
    return overhead_bytes(job, num_tensors, settings) + math.ceil(share * labels)


def numbers_of(job: Job, basis: Basis) -> Numbers:
    return Numbers(lambda ids: basis.forward(normalised(job, ids)), len(job.source), basis.num_columns)


def normalised(job: Job, ids: Tensor) -> Tensor:
    """Features (n, channels, ...) in [0, 1], on the job's device."""
    values = job.source.read(ids).to(job.device)
    return normalise(values.reshape(len(ids), *(job.source.shape or (1,))), job.stats.low, job.stats.high)


def all_normalised(job: Job) -> Iterator[Tensor]:
    for ids in torch.arange(len(job.source)).split(max(1, CHUNK_BYTES // (4 * math.prod(job.source.shape)))):
        yield normalised(job, ids)


def mean_map(job: Job) -> Tensor:
    """Mean of all samples, normalised: (channels, ...) float32."""
    total = torch.zeros(job.source.shape or (1,), dtype=torch.float64, device=job.device)
    for x in all_normalised(job):
        total += x.sum(0, dtype=torch.float64)
    return (total / len(job.source)).float()
