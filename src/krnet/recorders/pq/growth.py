"""Add samples to a product-quantised recording: the codebooks stay, the old codes stay, new codes follow them.

    new features, the recording's codebooks -> codes at a rate weight -> coded together with the old codes

The cost of a code is the rate weight times the bits that it takes in the recording.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from krnet.coding.matrix import CODED_TENSORS, CodedConfig, CodedMatrix, Matrix
from krnet.recorders.base import Job, Recorder
from krnet.recorders.basis import matrix_of
from krnet.recorders.growth import Growth
from krnet.recorders.pq.books import Codebooks, PQConfig
from krnet.recorders.pq.codes import CODE_CONFIG, CODES, ENTRIES

RATE_WEIGHTS = np.geomspace(1e-6, 10, 160)  # what a budget is searched among, each 11 % above the one before


def code_bits(books: Codebooks, held: CodedMatrix) -> list[Tensor]:
    """(k,) of each part: bits of each code in the recording."""
    tables = held.blocks.tables
    counts = tables.spread(held.counts, tables.radius)[:, tables.radius :]  # (T, codes)
    found = []
    for column, entries in zip(np.split(tables.column, len(books.entries)), books.entries):
        count = counts[np.unique(column)].sum(0)
        count = np.pad(count, (0, max(0, len(entries) - len(count))))[: len(entries)] + 0.5
        found.append(torch.from_numpy(-np.log2(count / count.sum())).float().to(entries.device))
    return found


class PQGrowth(Growth):
    prefix, free, limits = CODES, "rate_weight", (0, math.inf)

    def __init__(self, job: Job, recorder: Recorder):
        super().__init__(job, recorder, PQConfig)
        assert isinstance(self.basis, Codebooks), f"pq reads with a {type(self.basis).__name__}"
        self.books, self.bits = self.basis, code_bits(self.basis, self.held)

    def coding(self, value: float) -> tuple[Matrix, CodedConfig]:
        books = self.books.with_costs([value * bits for bits in self.bits])
        return matrix_of(self.new, books), replace(CODE_CONFIG, block_size=self.config.block_size)

    def own(self) -> dict[str, Tensor]:
        names = ["order", "sizes", *(["turn"] if self.config.rotations else [])]
        return {name: self.start.tensor(name) for name in names + [ENTRIES + name for name in CODED_TENSORS]}

    @property
    def stored(self) -> set[str]:
        return super().stored - {CODES + "centroids"}

    def values(self) -> Sequence[float]:
        recorded = self.config.rate_weight
        return [recorded, *RATE_WEIGHTS[recorded < RATE_WEIGHTS].tolist()]
