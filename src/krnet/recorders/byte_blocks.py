"""Samples compressed a block at a time by a codec of bytes, shared by recorders zfp and zstd.

    features -> blocks of samples -> a codec -> compress -> tensors `stream` (all blocks, joined) and `lengths`
    ids -> BlockReplayer: the bytes of their blocks -> the codec -> features

A codec is told how many samples a block holds; a file has no say in how much memory that takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from krnet.coding.matrix import evenly_spaced
from krnet.errors import NotARecordingError
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE
from krnet.recorders.base import Job, Replayer, Stored

MAX_BLOCK = 256  # samples: reading one decodes its whole block
SEARCH_SAMPLES = 1024  # from which sizes are estimated


class Codec(Protocol):
    def encode(self, features: Tensor) -> bytes:
        """features (n, *shape) float32 of a block"""

    def decode(self, content: bytes, num_samples: int) -> Tensor:
        """-> (n, *shape) float32; NotARecordingError if `content` is not what `encode` makes of so many samples."""


def compress(job: Job, codec: Codec, block_size: int) -> dict[str, Tensor]:
    """Compress all samples."""
    stream, lengths = bytearray(), list[int]()
    for ids in torch.arange(len(job.source)).split(block_size):
        content = codec.encode(job.source.read(ids))
        lengths.append(len(content))
        stream += content
    return {
        "stream": torch.from_numpy(np.frombuffer(stream, np.uint8)),
        "lengths": torch.from_numpy(np.array(lengths, np.uint32)),
    }


def estimated_bytes(job: Job, codec: Codec, block_size: int) -> float:
    """Bytes of all planned samples, estimated from whole blocks among them."""
    num_blocks = -(-len(job.source) // block_size)
    chosen = evenly_spaced(num_blocks, max(1, SEARCH_SAMPLES // block_size)) * block_size
    num_bytes, num_samples = 0, 0
    for start in chosen.tolist():
        ids = torch.arange(start, min(start + block_size, len(job.source)))
        num_bytes += len(codec.encode(job.source.read(ids))) + 4
        num_samples += len(ids)
    return num_bytes / num_samples * job.num_planned


def stored_stream(num_samples: int, block_size: int) -> dict[str, Stored]:
    return {"stream": Stored(dtype=torch.uint8), "lengths": Stored((-(-num_samples // block_size),), torch.uint32)}


class BlockReplayer(Replayer):
    """Decodes the blocks that hold the wanted samples; the latest stays decoded."""

    def __init__(self, store: TensorStore, codec: Codec, num_samples: int, block_size: int, device: torch.device):
        lengths = store.tensor("lengths", shape=(-(-num_samples // block_size),), dtype=torch.uint32)
        self.stream = store.tensor("stream", dtype=torch.uint8)
        self.ends = np.cumsum(lengths.numpy().astype(np.int64))
        if self.stream.dim() != 1 or int(self.ends[-1]) != len(self.stream):
            raise NotARecordingError(
                f"blocks of {int(self.ends[-1])} bytes in all, and a stream of {self.stream.numel()}. {RESTORE}"
            )
        self.codec, self.num_samples, self.block_size, self.device = codec, num_samples, block_size, device
        self.latest: tuple[int, Tensor] | None = None

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        if not len(ids):
            return self._block(0)[:0].to(self.device)
        found: Tensor | None = None
        for block, places in self._by_block(ids):
            decoded = self._block(block)
            if found is None:
                found = decoded.new_empty(len(ids), *decoded.shape[1:])
            found[places] = decoded[ids[places] - block * self.block_size]
        assert found is not None
        return found.to(self.device)

    def _by_block(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(block, places in ids of its samples) of each block that is needed."""
        blocks, order = (ids // self.block_size).sort(stable=True)
        numbers, counts = blocks.unique_consecutive(return_counts=True)
        yield from zip(numbers.tolist(), order.split(counts.tolist()))

    def _block(self, block: int) -> Tensor:
        latest = self.latest  # threads may read at once
        if latest is None or latest[0] != block:
            begin = int(self.ends[block - 1]) if block else 0
            content = self.stream[begin : int(self.ends[block])].numpy().tobytes()
            size = min(self.block_size, self.num_samples - block * self.block_size)
            self.latest = latest = block, self.codec.decode(content, size)
        return latest[1]
