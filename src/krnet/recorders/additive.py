"""Additive quantisation, shared by recorders residual and local-search: a vector is a sum of codebook entries.

    x (C, h, w) in [0, 1] -> h w positions of C channels -> faiss -> books codes each -> ANS
    ids -> codes -> sum over the books of entry[code] -> x

Codebooks and codes come from faiss, the library that people use for this; the file holds them as plain tensors, and
all their bytes count. To replay takes a sum of entries, and no faiss. What we add: codes are entropy-coded, entries are
float16, and a budget chooses the size of the codebooks: few large ones if the samples can pay for them.

A recorder supplies its settings and its quantiser.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from krnet.coding.matrix import MAX_BLOCK, Matrix, evenly_spaced
from krnet.coding.search import largest_fitting
from krnet.config import check_int, from_dict
from krnet.device import exact_math
from krnet.errors import NotARecordingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE
from krnet.recorders.base import Content, Job, Recorder, Stored
from krnet.recorders.basis import Basis, CodedReplayer, planned_bytes, stored_matrix
from krnet.recorders.checks import reading_settings
from krnet.recorders.codes import CODES, check_codes, code_reader, encode_codes
from krnet.recorders.maps import normalised_chunks, once_for_features
from krnet.recorders.memory import block_numbers
from krnet.recorders.ranges import read_range, stored_range
from krnet.recorders.sizes import planned_overhead

MAX_BOOKS, MAX_BITS = 128, 12
TRAIN_POSITIONS, POSITIONS_PER_ENTRY = 1 << 16, 64  # that codebooks are trained on, at most: the larger number
TRIAL_POSITIONS, TRIAL_BOOKS = 1 << 13, 48  # of the trials of a budget, at most
TRIAL_BITS = (1, 2, 3, 4, 5, 6, 7, 8, 10)
DISTANCE_BYTES = 256 << 20  # that faiss may use at once; its own limit is 5 GB
MAX_BOOK_SHARE = 0.5  # of a budget, for the codebooks of a trial
ENTRY_BYTES, TABLE_BYTES = 2, 2  # of a number of an entry, and of an entry in the coder's table


@dataclass(frozen=True, kw_only=True)
class AdditiveConfig:
    books: int = 8
    """Codebooks: a position is the sum of one entry of each."""
    bits: int = 8
    """Bits of a code before entropy coding: a codebook has 2^bits entries."""
    block_size: int = 64
    """Samples whose codes are entropy-coded together; reading one decodes its whole block."""

    def __post_init__(self) -> None:
        check_int("books", self.books, 1, MAX_BOOKS)
        check_int("bits", self.bits, 1, MAX_BITS)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)


# ------------------------------------------------------------------ faiss


def residual_quantiser(num_channels: int, config: AdditiveConfig, seed: int) -> Any:
    """A residual quantiser of faiss that trains and codes with a single candidate, the fastest way."""
    import faiss

    made = faiss.ResidualQuantizer(num_channels, config.books, config.bits)
    made.train_type = faiss.ResidualQuantizer.Train_default | faiss.ResidualQuantizer.Skip_codebook_tables
    made.max_beam_size, made.max_mem_distances = 1, DISTANCE_BYTES
    made.cp.seed, made.cp.min_points_per_centroid, made.cp.max_points_per_centroid = seed + 1, 1, 1 << 20
    return made


@dataclass(frozen=True, eq=False)
class Quantiser:
    """A trained quantiser of faiss. Its entries are those of the file, rounded as the file has them."""

    trained: Any
    entries: Tensor
    """(books, 2^bits, C) float16"""

    @classmethod
    def train(cls, quantiser: Any, points: Tensor, config: AdditiveConfig) -> Quantiser:
        """points (n, C) on the CPU"""
        import faiss

        few = torch.arange(max(len(points), 2**config.bits)) % len(points)  # faiss wants a point for each entry
        quantiser.train(points[few].numpy())
        found = faiss.vector_to_array(quantiser.codebooks).reshape(config.books, 2**config.bits, points.shape[1])
        entries = torch.from_numpy(found).half()
        faiss.copy_array_to_vector(entries.float().numpy().reshape(-1), quantiser.codebooks)
        return cls(quantiser, entries)

    def codes(self, points: Tensor) -> Tensor:
        """points (n, C) on the CPU -> (n, books) int32"""
        import faiss

        packed = self.trained.compute_codes(np.ascontiguousarray(points.numpy()))
        return torch.from_numpy(faiss.unpack_bitstrings(packed, self.trained.M, self.trained.nbits.at(0)))

    def error(self, points: Tensor) -> float:
        """Mean squared error of a number."""
        codes, entries = self.codes(points), self.entries.float()
        found = sum(entries[book][codes[:, book]] for book in range(len(entries)))
        return float((points - found).square().mean())


def to_positions(x: Tensor) -> Tensor:
    """x (n, C, ...) -> (n * positions, C) on the CPU"""
    return x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1]).cpu() if x.dim() > 2 else x.cpu()


def draw_positions(job: Job, count: int) -> Tensor:
    """(n, C): about `count` positions, as many of each of evenly spaced samples; all if there are no more."""
    generator = torch.Generator().manual_seed(job.fit.seed)
    ids = evenly_spaced(len(job.source), count)
    each = -(-count // len(ids))

    def parts() -> Iterator[Tensor]:
        for x in normalised_chunks(job, ids):
            points = to_positions(x)
            chosen = torch.randperm(len(points), generator=generator)[: each * len(x)]
            yield points[chosen]

    return torch.cat(list(parts()))[:count]


# ------------------------------------------------------------------ the recorder


class Sums(Basis):
    """Decodes: the codes of a sample are those of all positions by the first book, then by the second, ..."""

    def __init__(self, entries: Tensor, shape: tuple[int, ...]):
        """entries (books, 2^bits, C) float16"""
        self.entries, self.num_positions = entries.float(), math.prod(shape[1:])
        self.num_columns = len(entries) * self.num_positions

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("faiss finds the codes: see Quantiser")

    def inverse(self, numbers: Tensor) -> Tensor:
        codes = check_codes(numbers, 0, self.entries.shape[1] - 1).view(len(numbers), -1, self.num_positions)
        found = self.entries[0][codes[:, 0]]  # (n, positions, C)
        for book in range(1, len(self.entries)):
            found += self.entries[book][codes[:, book]]
        return found.transpose(1, 2).contiguous()

    def tensors(self) -> dict[str, Tensor]:
        return {"entries": self.entries.half()}


class AdditiveRecorder(Recorder):
    """A recorder whose codes and codebooks an additive quantiser of faiss finds."""

    config_class: ClassVar[type[AdditiveConfig]]
    package, extra = "faiss", "rivals"
    replays_without_package = True
    fast_is_exact = True
    train_positions: ClassVar[int] = 1 << 20
    """Positions that codebooks are trained on, at most."""
    most_books: ClassVar[int] = MAX_BOOKS
    """That a budget chooses."""

    @abstractmethod
    def quantiser(self, num_channels: int, config: Any, seed: int) -> Any:
        """A quantiser of faiss, to be trained."""

    def prepare(self, quantiser: Any, config: Any) -> None:
        """Called when it is trained, before it codes."""

    def train(self, points: Tensor, config: AdditiveConfig, seed: int) -> Quantiser:
        found = Quantiser.train(self.quantiser(points.shape[1], config, seed), points[: self.train_positions], config)
        self.prepare(found.trained, config)
        return found

    def fit(self, job: Job) -> Content:
        config, started = from_dict(self.config_class, job.settings), time.perf_counter()
        with exact_math(), torch.inference_mode():
            # Kept: after a search, the fit of what it found is that of its last look.
            entries, found = once_for_features(job, self.name, config, lambda: self._find_codes(job, config))
            codes = encode_codes(Matrix(lambda rows: found[rows].float(), *found.shape), config.block_size)
        tensors = {"low": job.stats.low, "high": job.stats.high, "entries": entries, **codes}
        return Content(tensors=tensors, settings=asdict(config), seconds=time.perf_counter() - started)

    def _find_codes(self, job: Job, config: AdditiveConfig) -> tuple[Tensor, Tensor]:
        """The entries (books, 2^bits, C), and the codes of all samples (N, books * positions)."""
        points = draw_positions(job, max(TRAIN_POSITIONS, POSITIONS_PER_ENTRY << config.bits))
        quantiser = self.train(points, config, job.fit.seed)
        num_books, num_entries = quantiser.entries.shape[:2]
        dtype = torch.uint8 if num_entries <= 256 else torch.int16
        found = torch.empty(len(job.source), num_books * math.prod(job.source.shape[1:]), dtype=dtype)
        start = 0
        for x in normalised_chunks(job):
            codes = quantiser.codes(to_positions(x)).view(len(x), -1, num_books)
            found[start : start + len(x)] = codes.transpose(1, 2).flatten(1)
            start += len(x)
        return quantiser.entries, found

    # -------------------------------------------------------------- budgets

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The bits with the least error of a few positions, each with as many books as fit; verified by a fit."""
        given = dict(job.settings)
        if {"books", "bits"} <= given.keys():
            return given
        with exact_math(), torch.inference_mode():
            config = self._best_trial(job, budget, from_dict(self.config_class, given))
        if "books" not in given:
            config = self._verified(job, budget, config)
        return {**given, "books": config.books, "bits": config.bits}

    def _verified(self, job: Job, budget: int, config: AdditiveConfig) -> AdditiveConfig:
        """With as many books as fit once the codes are entropy-coded, which a fit tells."""
        measured = cache(lambda books: self._fitted_bytes(job, replace(config, books=books)))
        plain = self._size_bytes(job, config, 1.0) - self._size_bytes(job, config, 0.0)
        share = 1.0 + 1.001 * (measured(config.books) - self._size_bytes(job, config, 1.0)) / plain
        books = self._most_books(job, budget, config, share)
        while books > 1 and measured(books) > budget:
            books -= 1
        return replace(config, books=books)

    def _fitted_bytes(self, job: Job, config: AdditiveConfig) -> int:
        return planned_bytes(job, self.fit(replace(job, settings=asdict(config))), CODES)

    def _best_trial(self, job: Job, budget: int, given: AdditiveConfig) -> AdditiveConfig:
        fixed = job.settings
        trials = [replace(given, bits=bits) for bits in ([given.bits] if "bits" in fixed else TRIAL_BITS)]
        if "books" not in fixed:
            trials = [replace(trial, books=self._most_books(job, budget, trial, 1.0)) for trial in trials]
        fitting = [trial for trial in trials if self._size_bytes(job, trial, 1.0) <= budget]
        num_channels = (job.source.shape or (1,))[0]
        num_positions = len(job.source) * math.prod(job.source.shape[1:])

        def is_sensible(trial: AdditiveConfig) -> bool:
            entry_bytes = ENTRY_BYTES * num_channels * trial.books << trial.bits
            few_books = trial.books <= TRIAL_BOOKS
            return entry_bytes <= MAX_BOOK_SHARE * budget and 2**trial.bits <= num_positions and few_books

        fitting = [trial for trial in fitting if is_sensible(trial)] or fitting
        if len(fitting) < 2:
            return (fitting or trials)[0]
        points = draw_positions(job, 2 * TRIAL_POSITIONS)
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(job.fit.seed))
        # Where all positions fit into the trial, errors are of those that the codebooks were trained on, as in the fit.
        seen, unseen = points[order[:TRIAL_POSITIONS]], points[order[-TRIAL_POSITIONS:]]

        def error(trial: AdditiveConfig) -> float:
            quantiser = residual_quantiser(num_channels, trial, job.fit.seed)
            return Quantiser.train(quantiser, seen, trial).error(unseen)

        return min(fitting, key=error)

    def _most_books(self, job: Job, budget: int, config: AdditiveConfig, share: float) -> int:
        fits = lambda books: self._size_bytes(job, replace(config, books=books), share) <= budget  # noqa: E731
        return largest_fitting(fits, 1, self.most_books)

    def _size_bytes(self, job: Job, config: AdditiveConfig, share: float) -> float:
        """Estimated size of the file; `share` of the bits of a code is left after entropy coding."""
        shape = job.source.shape or (1,)
        columns = config.books * math.prod(shape[1:])
        code_bytes = job.num_planned * columns * config.bits / 8
        entry_bytes = (ENTRY_BYTES * shape[0] + TABLE_BYTES) * config.books << config.bits
        block_bytes = 6 * -(-job.num_planned // config.block_size)
        stored = self.stored(job.source.shape, len(job.source), asdict(config))
        overhead = planned_overhead(job, len(stored), asdict(config)) + 8 * shape[0] + columns
        return share * code_bytes + entry_bytes + block_bytes + overhead

    # -------------------------------------------------------------- the file

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        config, shape = from_dict(self.config_class, settings), tuple(shape) or (1,)
        codes = stored_matrix(CODES, num_samples, config.books * math.prod(shape[1:]), config.block_size)
        entries = Stored((config.books, 2**config.bits, shape[0]), torch.float16)
        return {**stored_range(shape), "entries": entries, **codes}

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        config, shape = from_dict(self.config_class, settings), tuple(shape) or (1,)
        numbers = config.books * shape[0] << config.bits
        return block_numbers(config.block_size, config.books * math.prod(shape[1:])) + 2 * numbers

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> CodedReplayer:
        shape = samples.shape or (1,)
        with reading_settings(self.name):
            config = from_dict(self.config_class, settings)
        low, high = read_range(store, shape, device)
        entries = store.tensor("entries", shape=(config.books, 2**config.bits, shape[0]), dtype=torch.float16)
        if not entries.isfinite().all():
            raise NotARecordingError(f"codebook entries that are no numbers. {RESTORE}")
        basis = Sums(entries.to(device), shape)
        reader = code_reader(store, samples.num_samples, basis.num_columns, config.block_size, device)
        return CodedReplayer(reader, basis, samples, low, high)
