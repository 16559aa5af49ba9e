"""Shared by recorders that quantise and entropy-code: the Basis, the replayer, and the size of a file.

    features --normalise--> [0, 1] --Basis.forward--> coefficients (N, columns) --coding/matrix.py--> the file
    ids -> MatrixReader -> coefficients --Basis.inverse--> [0, 1] --denormalise--> features

A recorder supplies its Basis. Fits from scratch are in coded.py, growing recordings in growth.py; both build on this.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from krnet.coding.entropy import Tables
from krnet.coding.matrix import CODED_TENSORS, Matrix, MatrixReader
from krnet.device import exact_math
from krnet.features.samples import Samples
from krnet.features.stats import denormalise, normalise
from krnet.recorders.base import Coded, Content, Job, Replayer, Stored
from krnet.recorders.maps import normalised_chunks
from krnet.recorders.sizes import planned_overhead

PREFIX = "coded."  # of the tensors that hold the coded coefficients
MAX_UNUSED_SHARE = 0.01  # a search for a budget ends once it leaves at most this share of the budget unused


class Basis(ABC):
    """Transforms normalised features to the coefficients that are coded, and back."""

    num_columns: int

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x (n, channels, ...) in [0, 1] -> (n, num_columns)"""

    @abstractmethod
    def inverse(self, numbers: Tensor) -> Tensor:
        """(n, num_columns) -> (n, ...) with as many values as x had"""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that store the basis in the file."""


class CodedReplayer(Replayer):
    """Replays by decoding the coefficients and inverting the basis."""

    def __init__(self, reader: MatrixReader, basis: Basis, samples: Samples, low: Tensor, high: Tensor):
        self.reader, self.basis, self.shape, self.low, self.high = reader, basis, samples.shape, low, high

    @torch.inference_mode()
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        return self._features(self.reader.read(ids))

    @property
    def tables(self) -> Tables:
        return self.reader.blocks.tables

    @cached_property
    def encoder(self) -> Basis:
        """The basis that makes the coefficients of new features."""
        return self.basis

    @torch.inference_mode()
    def code(self, features: Tensor, *, moves: int | None = None, stored: bool = False) -> Coded:
        x = normalise(features.reshape(len(features), *(self.shape or (1,))), self.low, self.high)
        with exact_math():
            symbols = self.reader.quantize(self.encoder.forward(x))
        return Coded(symbols, self.show(symbols))

    @torch.inference_mode()
    def show(self, symbols: Tensor) -> Tensor:
        return self._features(self.reader.numbers_of(symbols))

    def _features(self, numbers: Tensor) -> Tensor:
        """Coefficients (n, columns) -> features in the original scale."""
        with exact_math():
            x = self.basis.inverse(numbers).reshape(len(numbers), *(self.shape or (1,)))
        # All features lie in [0, 1], so clamping can only reduce the error.
        return denormalise(x.clamp_(0, 1), self.low, self.high).reshape(len(x), *self.shape)


def stored_matrix(
    prefix: str,
    num_rows: int,
    num_columns: int,
    block_size: int,
    *,
    num_decoded: int = 0,
    most_bytes: int | None = None,
) -> dict[str, Stored]:
    """The tensors of a CodedMatrix. The length of the stream depends on the data; `most_bytes` bounds it if given."""
    stored = {name: Stored() for name in CODED_TENSORS}
    stored["stream"] = Stored(dtype=torch.uint8, most_bytes=most_bytes, num_decoded=num_decoded)
    stored["lengths"] = Stored((-(-num_rows // block_size),))  # uint16 or uint32
    stored["column"] = Stored((num_columns,))
    return {prefix + name: tensor for name, tensor in stored.items()}


def matrix_of(job: Job, basis: Basis) -> Matrix:
    """The coefficients of all samples (N, columns), computed as they are read."""
    return Matrix(lambda ids: in_parts(job, ids, basis.forward), len(job.source), basis.num_columns)


def in_parts(job: Job, ids: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """forward(normalised features) of these samples, a few at a time: a row of few columns may need a large map."""
    found: Tensor | None = None
    start = 0
    for x in normalised_chunks(job, ids):
        part = forward(x)
        if len(part) == len(ids):
            return part
        if found is None:  # made first: small results between large chunks would leave memory in pieces
            found = part.new_empty(len(ids), *part.shape[1:])
        found[start : start + len(part)] = part
        start += len(part)
    assert found is not None
    return found


def planned_bytes(job: Job, content: Content, prefix: str, num_held: int = 0) -> int:
    """Upper bound of the file's size once it has grown to job.num_planned samples.

    Samples still to come are taken to need as many bytes each as those after the first `num_held`.
    """
    tensor_bytes = sum(tensor.nbytes for tensor in content.tensors.values())
    lengths, num_samples = content.tensors[prefix + "lengths"], len(job.source)  # lengths (blocks,)
    first_block = num_held // content.settings["block_size"]  # the block that holds sample `num_held`
    new_bytes = int(lengths[first_block:].long().sum()) + lengths[first_block:].nbytes
    growth = (job.num_planned - num_samples) / (num_samples - first_block * content.settings["block_size"])
    overhead = planned_overhead(job, len(content.tensors), content.settings)
    return tensor_bytes + math.ceil(growth * new_bytes) + overhead
