"""What coded recordings have in common, whether made at once or grown: a Basis, the way back, and a size.

    features --normalise--> [0, 1] --Basis.forward--> numbers (N, columns), to be coded
    ids -> Reader -> numbers --Basis.inverse--> [0, 1] --denormalise--> features

A recorder brings its Basis; how numbers are coded is in _numbers.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from krnet.coding.matrix import Numbers, Reader
from krnet.device import exact_math
from krnet.features.samples import Samples
from krnet.features.stats import denormalise
from krnet.recorders.base import Content, Job, Replayer, planned_overhead
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
    def __init__(self, reader: Reader, basis: Basis, samples: Samples, low: Tensor, high: Tensor):
        self.reader, self.basis, self.shape, self.low, self.high = reader, basis, samples.shape, low, high

    @torch.inference_mode()
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        with exact_math():
            found = self.basis.inverse(self.reader.read(ids)).reshape(len(ids), *(self.shape or (1,)))
        # No feature lies outside [0, 1]: what the basis puts there is nearer at the edge.
        return denormalise(found.clamp_(0, 1), self.low, self.high).reshape(len(ids), *self.shape)


def numbers_of(job: Job, basis: Basis) -> Numbers:
    return Numbers(lambda ids: basis.forward(normalised(job, ids)), len(job.source), basis.num_columns)


def planned_bytes(job: Job, content: Content, prefix: str, held: int = 0) -> int:
    """Size of a file at most, when it has grown to all planned samples: like those behind the first `held`."""
    own = sum(tensor.nbytes for tensor in content.tensors.values())
    lengths, num_samples = content.tensors[prefix + "lengths"], len(job.source)
    first = held // content.settings["block_size"]  # the block in which they begin
    fresh = int(lengths[first:].long().sum()) + lengths[first:].nbytes
    share = (job.num_planned - num_samples) / (num_samples - first * content.settings["block_size"])
    return own + math.ceil(share * fresh) + planned_overhead(job, len(content.tensors), content.settings)
