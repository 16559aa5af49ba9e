"""What coded recordings have in common, whether made at once or grown: a Basis, the way back, and a size.

    features --normalise--> [0, 1] --Basis.forward--> numbers (N, columns), to be coded
    ids -> Reader -> numbers --Basis.inverse--> [0, 1] --denormalise--> features

A recorder brings its Basis; how numbers are coded is in coding/matrix.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from krnet.coding.matrix import CODED_TENSORS, Matrix, MatrixReader
from krnet.device import exact_math
from krnet.features.samples import Samples
from krnet.features.stats import denormalise
from krnet.recorders.base import Content, Job, Replayer, Stored, planned_overhead
from krnet.recorders.maps import normalised

PREFIX = "coded."
UNUSED = 0.01  # share of a budget that may be left over


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
    def __init__(self, reader: MatrixReader, basis: Basis, samples: Samples, low: Tensor, high: Tensor):
        self.reader, self.basis, self.shape, self.low, self.high = reader, basis, samples.shape, low, high

    @torch.inference_mode()
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        with exact_math():
            found = self.basis.inverse(self.reader.read(ids)).reshape(len(ids), *(self.shape or (1,)))
        # No feature lies outside [0, 1]: what the basis puts there is nearer at the edge.
        return denormalise(found.clamp_(0, 1), self.low, self.high).reshape(len(ids), *self.shape)


def stored_edges(shape: Sequence[int]) -> dict[str, Stored]:
    """The range of each channel."""
    return {name: Stored((shape[0] if shape else 1,), torch.float32) for name in ("low", "high")}


def stored_matrix(
    prefix: str,
    num_rows: int,
    num_columns: int,
    block_size: int,
    *,
    num_decoded: int = 0,
    most_bytes: int | None = None,
) -> dict[str, Stored]:
    """The tensors of a CodedNumbers; its size follows from the data, and is in `most_bytes` where it has a bound."""
    found = {name: Stored() for name in CODED_TENSORS}
    found["stream"] = Stored(dtype=torch.uint8, most_bytes=most_bytes, num_decoded=num_decoded)
    found["lengths"] = Stored((-(-num_rows // block_size),))  # uint16 or uint32
    found["column"] = Stored((num_columns,))
    return {prefix + name: tensor for name, tensor in found.items()}


def matrix_of(job: Job, basis: Basis) -> Matrix:
    return Matrix(lambda ids: basis.forward(normalised(job, ids)), len(job.source), basis.num_columns)


def planned_bytes(job: Job, content: Content, prefix: str, held: int = 0) -> int:
    """Size of a file at most, when it has grown to all planned samples: like those behind the first `held`."""
    own = sum(tensor.nbytes for tensor in content.tensors.values())
    lengths, num_samples = content.tensors[prefix + "lengths"], len(job.source)
    first = held // content.settings["block_size"]  # the block in which they begin
    fresh = int(lengths[first:].long().sum()) + lengths[first:].nbytes
    share = (job.num_planned - num_samples) / (num_samples - first * content.settings["block_size"])
    return own + math.ceil(share * fresh) + planned_overhead(job, len(content.tensors), content.settings)
