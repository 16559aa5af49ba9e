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

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.coding.entropy import RESTORE
from krnet.coding.matrix import CHUNK_BYTES, MAX_BLOCK, CodedConfig, CodedMatrix, MatrixReader, pack
from krnet.config import from_dict
from krnet.device import exact_math
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.base import Content, Job, Recorder, Stored, register
from krnet.recorders.basis import CodedReplayer
from krnet.recorders.pq.books import MAX_BITS, Codebooks, PQConfig, part_widths, resolved
from krnet.recorders.pq.budget import likely_bytes, search_settings
from krnet.recorders.pq.codes import CODE, CODES, ENTRIES, stored_tensors, whole_plan
from krnet.recorders.pq.growth import PQGrowth


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
    config_class = PQConfig
    inputs = frozenset({"start"})
    fast_is_exact = True
    grows = True

    def fit(self, job: Job) -> Content:
        if job.start is not None:
            return PQGrowth(job, self).fit(job.settings)
        config = resolved(job, from_dict(PQConfig, job.settings))
        started = time.perf_counter()
        with exact_math(), torch.inference_mode():
            plan = whole_plan(job, config)
        tables, values = plan.tables, plan.codes.values.reshape(len(job.source), -1)
        step = config.block_size * max(1, CHUNK_BYTES // (4 * values.shape[1] * config.block_size))
        parts = (values[begin : begin + step] for begin in range(0, len(values), step))
        blocks = pack(tables, parts, config.block_size)
        coded = CodedMatrix(blocks, np.zeros(0, np.int8)).tensors(CODES)
        del coded[CODES + "centroids"]
        tensors = {"low": job.stats.low, "high": job.stats.high, **plan.own, **coded}
        return Content(tensors=tensors, settings=asdict(plan.config), seconds=time.perf_counter() - started)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """Parts and bits from a few samples, then the price of a bit from all of them. On a CPU fewer are tried.

        A recording that grows keeps its codebooks; the codes of new samples may go by another price.
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
        coded = CodedMatrix.load(store, ENTRIES, int(num_entries.max()), shape[0], MAX_BLOCK)
        reader = MatrixReader(coded, CodedConfig(step=step, block_size=MAX_BLOCK), device)
        matrix = reader.read(torch.arange(int(num_entries.max())))
        parts = zip(matrix.split(widths, dim=1), num_entries.tolist())
        turn = store.tensor("turn", shape=(shape[0],) * 2, dtype=torch.float16).to(device) if config.rotations else None
        books = Codebooks(shape, order.to(device), turn, [part[:size].contiguous() for part, size in parts])
        codes = CodedMatrix.load(
            WithoutCentroids(store), CODES, samples.num_samples, books.num_columns, config.block_size
        )
        tables = codes.blocks.tables
        last = (tables.first.astype(np.int64) + tables.sizes)[tables.column]  # of each column, and one more
        if tables.first.min() < 0 or (last > num_entries.repeat_interleave(books.num_positions).numpy()).any():
            raise NotARecordingError(f"the tables have codes that no codebook has. {RESTORE}")
        return CodedReplayer(MatrixReader(codes, CODE, device), books, samples, low, high)
