"""Samples as codes of a product quantiser, the entropy tables of the codes, and the size of the file they make.

    samples, Codebooks -> encode_samples -> Codes -> make_tables -> entropy tables, size of the codes
    samples, Trainer   -> make_plan      -> CodingPlan: all of a file but the packed codes, and its size in bytes

`encode_samples` moves each entry to the centroid of the positions that it codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.coding.entropy import MAX_TABLES, Tables
from krnet.coding.kmeans import tally
from krnet.coding.matrix import CHUNK_BYTES, MAX_BLOCK, CodedConfig, CodedMatrix, Matrix, encode, measure
from krnet.recorders.base import Job, Stored
from krnet.recorders.basis import stored_matrix
from krnet.recorders.maps import normalised_chunks
from krnet.recorders.pq.books import Codebooks, PQConfig, Trainer, cache_for
from krnet.recorders.ranges import stored_range
from krnet.recorders.sizes import planned_overhead

CODES, ENTRIES = "codes.", "entries."  # prefixes of tensor names
ENTRY_ERROR_SHARE = 0.005  # rounding the entries adds this share to the squared error
CODE_CONFIG = CodedConfig(step=1.0, dead_zone=0.5, centroid=0.0)  # reads codes back as the whole numbers they are


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes of some samples, and the codebooks whose entries are the centroids of these codes.

    The codes of a part are numbered from the most to the least frequent.
    """

    values: np.ndarray
    """(n, parts, positions) uint8 or int16"""
    books: Codebooks
    squared_error: float
    """Mean over all values of the normalised features, before the entries are rounded."""


def encode_samples(job: Job, books: Codebooks, ids: Tensor) -> Codes:
    """Code the samples `ids`, move each entry to the centroid of its positions, and drop entries without any."""
    num_parts, num_entries = len(books.entries), max(map(len, books.entries))
    dtype = np.uint8 if num_entries <= 256 else np.int16
    values = np.empty((len(ids), num_parts, books.num_positions), dtype)
    counts = [torch.zeros(len(e), dtype=torch.float64, device=job.device) for e in books.entries]
    sums = [torch.zeros(e.shape, dtype=torch.float64, device=job.device) for e in books.entries]
    # Squared error = sum over positions of |x|^2 - sum over entries of count * |centroid|^2.
    squares = torch.zeros((), dtype=torch.float64, device=job.device)
    num_done = 0
    for x in normalised_chunks(job, ids):
        codes = books.forward(x)
        values[num_done : num_done + len(x)] = codes.view(len(x), num_parts, -1).cpu().numpy()
        num_done += len(x)
        points = books.parts(x)
        for part, part_codes in enumerate(codes.view(len(x), num_parts, -1).unbind(1)):
            squares += points[part].double().square().sum()
            count, total = tally(points[part], part_codes.flatten(), len(counts[part]))
            counts[part] += count
            sums[part] += total
    entries = []
    for part, (count, total) in enumerate(zip(counts, sums)):
        ranked = count.argsort(descending=True, stable=True)[: int(count.count_nonzero())]
        rank = np.zeros(len(count), dtype)
        rank[ranked.cpu().numpy()] = np.arange(len(ranked))
        values[:, part] = rank[values[:, part]]
        entries.append((total[ranked] / count[ranked, None]).float())
        squares -= (total[ranked].square().sum(1) / count[ranked]).sum()
    error = max(0.0, squares.item()) / (len(ids) * math.prod(books.shape))
    return Codes(values, Codebooks(books.shape, books.order, books.rotation, entries), error)


# ------------------------------------------------------------------ tables and files


def group_positions(counts: Tensor, max_tables: int) -> Tensor:
    """counts (positions, k) of one part's codes -> the entropy table of each position (positions,).

    Uses as many tables as save more bits than they cost (16 per entry), at most `max_tables`. Lloyd's algorithm on
    code lengths: each position takes the table that codes it in the fewest bits.
    """
    num_positions, num_entries = counts.shape
    best_cost, best = math.inf, torch.zeros(num_positions, dtype=torch.int64)
    counts = counts.float()
    num_tables = 1
    while num_tables <= min(max_tables, num_positions):
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
    """The entropy tables of the codes, and the bytes that the codes of `num_planned` such samples take."""
    scale = num_planned / len(codes.values)
    _, num_parts, num_positions = codes.values.shape
    max_entries = max(map(len, codes.books.entries))
    columns, totals, num_tables = [], [], 0
    for part, entries in enumerate(codes.books.entries):
        counts = torch.zeros(num_positions, len(entries), dtype=torch.int64)
        chunk_rows = max(1, CHUNK_BYTES // (8 * num_positions))
        for begin in range(0, len(codes.values), chunk_rows):
            index = torch.from_numpy(codes.values[begin : begin + chunk_rows, part].astype(np.int64))
            index += torch.arange(num_positions) * len(entries)
            counts += torch.bincount(index.flatten(), minlength=counts.numel()).view_as(counts)
        table = group_positions(counts * scale, MAX_TABLES // num_parts)
        table_counts = counts.new_zeros(int(table.max()) + 1, max_entries)
        table_counts[:, : len(entries)].index_add_(0, table, counts)
        columns.append(table + num_tables)
        totals.append(table_counts)
        num_tables += len(table_counts)
    all_counts = torch.cat(totals).numpy()  # (tables, max_entries)
    tables = Tables.from_counts(torch.cat(columns).numpy(), all_counts, 0)
    return tables, tables.bits(all_counts, 0) / 8 * scale


def code_entries(books: Codebooks, step: float) -> CodedMatrix:
    """Code all entries as one matrix (k, C), the parts side by side; zeros fill up parts with fewer entries."""
    num_entries = max(map(len, books.entries))
    padded = [torch.nn.functional.pad(e, (0, 0, 0, num_entries - len(e))) for e in books.entries]
    matrix = Matrix.of(torch.cat(padded, dim=1))
    config = CodedConfig(step=step, block_size=MAX_BLOCK)
    return encode(matrix, config, measure(matrix, config))


def stored_tensors(shape: Sequence[int], num_samples: int, config: PQConfig) -> dict[str, Stored]:
    shape = tuple(shape or (1,))
    num_parts, num_positions = config.parts or 1, math.prod(shape[1:])
    codes = stored_matrix(CODES, num_samples, num_parts * num_positions, config.block_size)
    del codes[CODES + "centroids"]  # they are all 0, see CODE_CONFIG
    return {
        **stored_range(shape),
        "order": Stored(shape[:1], torch.int32),
        "sizes": Stored((num_parts,), torch.int16),
        "turn": Stored((shape[0], shape[0]), torch.float16, optional=True),  # the rotation
        **stored_matrix(ENTRIES, 2**config.bits, shape[0], MAX_BLOCK, num_decoded=2**config.bits * shape[0]),
        **codes,
    }


def overhead(job: Job, config: PQConfig, settings: Mapping[str, Any]) -> int:
    """Bytes that a file grown to all planned samples takes beside its tensors."""
    return planned_overhead(job, len(stored_tensors(job.source.shape, len(job.source), config)), settings)


@dataclass(frozen=True, eq=False)
class CodingPlan:
    """Everything that the file needs; only the codes are not yet packed."""

    config: PQConfig
    codes: Codes
    tables: Tables
    book_tensors: dict[str, Tensor]
    """The codebooks as the file holds them."""
    size_bytes: int
    """Upper bound of the file's size when grown to all planned samples; at most about a kilobyte too high."""


def whole_plan(job: Job, config: PQConfig) -> CodingPlan:
    """The plan for all samples. The cache keeps the latest plan, and the trainer, which serves every rate weight."""
    cache, trainer_key = cache_for(job), replace(config, rate_weight=0.0, entry_step=None, block_size=1)
    trainer = cache.latest("trainer", trainer_key, lambda: Trainer(job, config))
    return cache.latest(
        "plan", (config, job.num_planned), lambda: make_plan(job, config, trainer, torch.arange(len(job.source)))
    )


def make_plan(job: Job, config: PQConfig, trainer: Trainer, ids: Tensor) -> CodingPlan:
    """Code the samples `ids`, and plan the file that holds them."""
    codes = encode_samples(job, trainer.books(config.rate_weight), ids)
    # Rounding to a step adds step^2 / 12 to the squared error.
    step = math.sqrt(12 * ENTRY_ERROR_SHARE * codes.squared_error)
    # The coder has 4096 symbols: at most 2000 steps on either side of 0. A rotation leaves [0, 1].
    step = max(step, max(e.abs().max().item() for e in codes.books.entries) / 2000)
    config = replace(config, entry_step=config.entry_step or min(max(step, 1 / 2000), 1 / 8))
    tables, stream_bytes = make_tables(codes, job.num_planned)
    assert config.entry_step
    book_tensors = {
        "order": codes.books.order.int().cpu(),
        "sizes": torch.tensor([len(e) for e in codes.books.entries], dtype=torch.int16),
        **({} if codes.books.rotation is None else {"turn": codes.books.rotation.cpu()}),
        **code_entries(codes.books, config.entry_step).tensors(ENTRIES),
    }
    fixed_bytes = sum(t.nbytes for t in book_tensors.values()) + 8 * codes.books.shape[0]  # 8: low and high
    fixed_bytes += tables.weights.nbytes + tables.first.nbytes + tables.sizes.nbytes + tables.column.nbytes
    # Each block takes 2 bytes for its length, and up to 4 that its symbols do not need: the coder's final state.
    num_blocks = -(-job.num_planned // config.block_size)
    size_bytes = fixed_bytes + stream_bytes + 6 * num_blocks + overhead(job, config, asdict(config))
    return CodingPlan(config, codes, tables, book_tensors, math.ceil(size_bytes))
