"""Product quantisation: cut the channels at each position of a map into parts, and store each part as a code.

    x (C, h, w) in [0, 1] -> h w positions of C channels -> parts -> nearest of 2^bits entries -> code -> ANS
    ids -> codes -> entries of all parts, joined -> x

Jégou et al., "Product quantization for nearest neighbor search" (2011). What we add:

- With `rate_weight` above 0 the code minimises squared error + rate_weight * bits (Chou et al. 1989,
  entropy-constrained vector quantisation).
- A part holds correlated channels, and the channels are rotated to minimise the error (Ge et al. 2013,
  non-parametric OPQ; ours starts from that order of channels, with codebooks of at most 256 entries). OPQ's closed
  form, principal axes spread by eigenvalue, did worse than no rotation on maps after a ReLU: it mixes channels that
  are zero together.
- Each part has entropy tables of its own, shared by positions with similar frequencies.
- The entries are quantised and entropy-coded, too; their rounding adds half a percent to the error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.coding.matrix import CHUNK_BYTES, MAX_BLOCK, CodedConfig, CodedMatrix, MatrixReader, pack
from krnet.config import from_dict
from krnet.device import exact_math
from krnet.errors import NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE
from krnet.recorders.base import Content, Job, Recorder, Stored, register
from krnet.recorders.basis import CodedReplayer
from krnet.recorders.checks import reading_settings
from krnet.recorders.memory import block_numbers
from krnet.recorders.pq.books import Codebooks, PQConfig, part_widths, resolve_settings
from krnet.recorders.pq.budget import likely_bytes, search_settings
from krnet.recorders.pq.codes import CODE_CONFIG, CODES, ENTRIES, stored_tensors, whole_plan
from krnet.recorders.pq.growth import PQGrowth, code_bits
from krnet.recorders.ranges import read_range

TURN_COPIES = 3  # of the rotation, a (channels, channels) matrix: as the file holds it, as float32, and transposed


class WithoutCentroids:
    """A store whose codes get centroids of 0, which are not in the file: codes are read back as whole numbers."""

    def __init__(self, store: TensorStore):
        self.store = store

    def tensor(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if name == CODES + "centroids":
            return torch.zeros(tuple(shape or ()), dtype=dtype)
        return self.store.tensor(name, shape=shape, dtype=dtype)


class PQReplayer(CodedReplayer):
    """Replays product-quantised samples, and codes new features at the recording's rate weight."""

    def __init__(self, reader: MatrixReader, books: Codebooks, rate_weight: float, samples: Samples, *edges: Tensor):
        super().__init__(reader, books, samples, *edges)
        self.books, self.rate_weight = books, rate_weight

    @cached_property
    def encoder(self) -> Codebooks:
        if not self.rate_weight:
            return self.books
        return self.books.with_costs([self.rate_weight * bits for bits in code_bits(self.books, self.reader.coded)])


@register
class PQRecorder(Recorder):
    name = "pq"
    config_class = PQConfig
    inputs = frozenset({"start"})
    fast_is_exact = True
    grows = True
    projects = True

    def fit(self, job: Job) -> Content:
        if job.start is not None:
            return PQGrowth(job, self).fit(job.settings)
        config = resolve_settings(job, from_dict(PQConfig, job.settings))
        started = time.perf_counter()
        with exact_math(), torch.inference_mode():
            plan = whole_plan(job, config)
        tables, values = plan.tables, plan.codes.values.reshape(len(job.source), -1)
        chunk_rows = config.block_size * max(1, CHUNK_BYTES // (4 * values.shape[1] * config.block_size))
        chunks = (values[begin : begin + chunk_rows] for begin in range(0, len(values), chunk_rows))
        blocks = pack(tables, chunks, config.block_size)
        coded = CodedMatrix(blocks, np.zeros(0, np.int8)).tensors(CODES)
        del coded[CODES + "centroids"]
        tensors = {"low": job.stats.low, "high": job.stats.high, **plan.book_tensors, **coded}
        return Content(tensors=tensors, settings=asdict(plan.config), seconds=time.perf_counter() - started)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """Choose parts and bits on a few samples, then the rate weight on all. A CPU tries fewer of them than a GPU.

        A recording that grows keeps its codebooks; only the rate weight of new samples may differ.
        """
        if job.start is not None:
            return PQGrowth(job, self).for_budget(budget)
        with exact_math(), torch.inference_mode():
            return search_settings(job, budget)

    def likely_bytes(self, job: Job, target_r2: float) -> tuple[float, float] | None:
        if job.start is not None:
            return None
        with exact_math(), torch.inference_mode():
            return likely_bytes(job, target_r2)

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        return stored_tensors(shape, num_samples, from_dict(PQConfig, settings))

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        shape, config = tuple(shape or (1,)), from_dict(PQConfig, settings)
        turns = TURN_COPIES * shape[0] ** 2 if config.rotations else 0
        return block_numbers(config.block_size, (config.parts or 1) * math.prod(shape[1:])) + turns

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> PQReplayer:
        shape = samples.shape or (1,)
        with reading_settings(self.name):
            config = from_dict(PQConfig, settings)
            num_parts, step = config.parts, config.entry_step
            if num_parts is None or step is None or config.rotations is None:
                raise SettingError(f"parts, entry_step, rotations are {num_parts}, {step}, {config.rotations}")
            widths = part_widths(shape[0], num_parts)
        low, high = read_range(store, shape, device)
        order = store.tensor("order", shape=shape[:1], dtype=torch.int32).long()
        num_entries = store.tensor("sizes", shape=(num_parts,), dtype=torch.int16).long()
        if not torch.equal(order.sort().values, torch.arange(shape[0])):
            raise NotARecordingError(f"the order of channels leaves some out. {RESTORE}")
        if not 1 <= int(num_entries.min()) <= int(num_entries.max()) <= 2**config.bits:
            raise NotARecordingError(f"codebooks of {num_entries.tolist()} entries. {RESTORE}")
        coded = CodedMatrix.load(store, ENTRIES, int(num_entries.max()), shape[0], MAX_BLOCK)
        reader = MatrixReader(coded, CodedConfig(step=step, block_size=MAX_BLOCK), device)
        matrix = torch.empty(int(num_entries.max()), shape[0], device=device)
        for rows, numbers in reader.read_all():
            matrix[rows] = numbers
        parts = zip(matrix.split(widths, dim=1), num_entries.tolist())
        rotation = (
            store.tensor("turn", shape=(shape[0],) * 2, dtype=torch.float16).to(device) if config.rotations else None
        )
        books = Codebooks(shape, order.to(device), rotation, [part[:size].contiguous() for part, size in parts])
        codes = CodedMatrix.load(
            WithoutCentroids(store), CODES, samples.num_samples, books.num_columns, config.block_size
        )
        tables = codes.blocks.tables
        code_ends = (tables.first.astype(np.int64) + tables.sizes)[tables.column]  # (columns,) largest code + 1
        if tables.first.min() < 0 or (code_ends > num_entries.repeat_interleave(books.num_positions).numpy()).any():
            raise NotARecordingError(f"the tables have codes that no codebook has. {RESTORE}")
        return PQReplayer(MatrixReader(codes, CODE_CONFIG, device), books, config.rate_weight, samples, low, high)
