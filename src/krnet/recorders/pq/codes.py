"""Samples as codes of a product quantiser, the entropy tables of the codes, and the file that both would make.

samples -> code: nearest entries, which become centroids of theirs -> make_tables -> Plan, with its size in bytes
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
from krnet.recorders.base import Job, Stored, planned_overhead
from krnet.recorders.basis import stored_edges, stored_matrix
from krnet.recorders.maps import normalised_chunks
from krnet.recorders.pq.books import Codebooks, PQConfig, Trainer, kept_for

CODES, ENTRIES = "codes.", "entries."
ROUNDING = 0.005  # share that rounding the entries adds to the error
CODE = CodedConfig(step=1.0, dead_zone=0.5, centroid=0.0)  # reads codes back as the numbers they are


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


def code_entries(books: Codebooks, step: float) -> CodedMatrix:
    """All entries as one matrix (k, C), the parts side by side; those of fewer entries end in zeros."""
    num_entries = max(map(len, books.entries))
    padded = [torch.nn.functional.pad(e, (0, 0, 0, num_entries - len(e))) for e in books.entries]
    numbers = Matrix.of(torch.cat(padded, dim=1))
    config = CodedConfig(step=step, block_size=MAX_BLOCK)
    return encode(numbers, config, measure(numbers, config))


def stored_tensors(shape: Sequence[int], num_samples: int, config: PQConfig) -> dict[str, Stored]:
    shape = tuple(shape or (1,))
    num_parts, num_positions = config.parts or 1, math.prod(shape[1:])
    codes = stored_matrix(CODES, num_samples, num_parts * num_positions, config.block_size)
    del codes[CODES + "centroids"]  # codes are read back as they are
    return {
        **stored_edges(shape),
        "order": Stored(shape[:1], torch.int32),
        "sizes": Stored((num_parts,), torch.int16),
        "turn": Stored((shape[0], shape[0]), torch.float16, optional=True),  # where there are rotations
        **stored_matrix(ENTRIES, 2**config.bits, shape[0], MAX_BLOCK),
        **codes,
    }


def overhead(job: Job, config: PQConfig, settings: Mapping[str, Any]) -> int:
    """Of a file grown to all planned samples: what it takes beside its tensors."""
    return planned_overhead(job, len(stored_tensors(job.source.shape, len(job.source), config)), settings)


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


def whole_plan(job: Job, config: PQConfig) -> Plan:
    """That of all samples. The latest is kept, and its trainer, which serves every price of a bit."""
    kept, books_of = kept_for(job), replace(config, rate_weight=0.0, entry_step=None, block_size=1)
    trainer = kept.latest("trainer", books_of, lambda: Trainer(job, config))
    return kept.latest(
        "plan", (config, job.num_planned), lambda: make_plan(job, config, trainer, torch.arange(len(job.source)))
    )


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
    size = fixed + stream_bytes + 6 * num_blocks + overhead(job, config, asdict(config))
    return Plan(config, codes, tables, own, math.ceil(size))
