"""Cuts feature maps into blocks of one size, whose coordinates along shared axes are the numbers that are coded.

    maps (n, C, H, W) --cut--> blocks (n, P, values of a block) --@ axes.T--> coordinates (n, P, K)
    coordinates (n, P, K) --to_codes--> codes (n, P K) --to_coordinates--> ... --@ axes, join--> maps (n, C, H, W)

A block as large as the map is the whole map: P = 1. A block of all channels at one position makes axes of the
channels, a KLT; with `dct` the coordinates of neighbouring blocks are decorrelated by a DCT-II over the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from krnet.nn.sizing import map_shape

DCT_COPIES = 4  # float32 numbers for each number of a DCT matrix, which is computed as float64


@dataclass(frozen=True)
class Grid:
    """How maps are cut into blocks."""

    shape: tuple[int, int, int]
    """(channels, height, width) of a map"""
    block: tuple[int, int, int]
    """The same of a block; each divides that of the map."""
    dct: bool = False
    """Whether a DCT runs over the blocks of a map."""

    @classmethod
    def of(cls, shape: Sequence[int], block: Sequence[int] | None = None, dct: bool = False) -> Grid:
        """The grid of samples of any shape; block None: whole maps."""
        whole = map_shape(tuple(shape))
        c, h, w = whole if block is None else block
        return cls(whole, (c, h, w), dct)

    @property
    def is_cut_evenly(self) -> bool:
        return all(0 < b <= s and s % b == 0 for s, b in zip(self.shape, self.block))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Blocks along channels, height and width."""
        c, h, w = (s // b for s, b in zip(self.shape, self.block))
        return c, h, w

    @property
    def num_blocks(self) -> int:
        """P, of a map."""
        return math.prod(self.counts)

    @property
    def block_values(self) -> int:
        return math.prod(self.block)

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def is_sequence(self) -> bool:
        """Whether blocks are cut along axis 0: it holds tokens, and the last axis their numbers."""
        return self.counts[0] > 1

    @property
    def dct_numbers(self) -> int:
        """Float32 numbers that the DCT matrices take while they are made."""
        return DCT_COPIES * sum(size**2 for size in self.counts) if self.dct else 0

    def cut(self, maps: Tensor) -> Tensor:
        """Maps (n, C, H, W), or of any shape with as many values -> blocks (n, P, values of a block)."""
        if self.num_blocks == 1:
            return maps.reshape(len(maps), 1, -1)
        (c, h, w), (bc, bh, bw) = self.counts, self.block
        parts = maps.reshape(len(maps), c, bc, h, bh, w, bw).permute(0, 1, 3, 5, 2, 4, 6)
        return parts.reshape(len(maps), self.num_blocks, self.block_values)

    def join(self, blocks: Tensor) -> Tensor:
        """Blocks (n, P, values of a block) -> maps (n, C, H, W)."""
        (c, h, w), (bc, bh, bw) = self.counts, self.block
        parts = blocks.reshape(-1, c, h, w, bc, bh, bw).permute(0, 1, 4, 2, 5, 3, 6)
        return parts.reshape(-1, *self.shape)

    def to_codes(self, coordinates: Tensor) -> Tensor:
        """Coordinates (n, P, K) -> codes (n, P K)."""
        return self._along_grid(coordinates, inverse=False).reshape(len(coordinates), -1)

    def to_coordinates(self, codes: Tensor) -> Tensor:
        """Codes (n, P K) -> coordinates (n, P, K)."""
        return self._along_grid(codes.reshape(len(codes), self.num_blocks, -1), inverse=True)

    def to_maps(self, codes: Tensor, axes: Tensor) -> Tensor:
        """Codes (n, P K), axes (K, values of a block) -> maps (n, C, H, W), without their mean."""
        return self.join(self.to_coordinates(codes) @ axes)

    def _along_grid(self, x: Tensor, *, inverse: bool) -> Tensor:
        """The DCT of x (n, P, K) over the blocks, or its inverse; x itself if the grid has none."""
        if not self.dct or self.num_blocks == 1:
            return x
        found = x.reshape(len(x), *self.counts, -1)
        for axis, size in enumerate(self.counts, start=1):
            if size > 1:
                matrix = dct_on(size, x.device)
                found = torch.tensordot(found, matrix, ([axis], [0 if inverse else 1])).movedim(-1, axis)
        return found.reshape(x.shape)


def dct(size: int) -> Tensor:
    """The orthonormal DCT-II as a matrix (frequencies, positions)."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = (math.pi / size * k[:, None] * (k + 0.5)).cos_().mul_(math.sqrt(2 / size))
    matrix[0] /= math.sqrt(2)
    return matrix.float()


@lru_cache(maxsize=16)
def dct_on(size: int, device: torch.device) -> Tensor:
    """The same on a device. It is kept, so it must not be made in inference mode: training needs it, too."""
    with torch.inference_mode(False):
        return dct(size).to(device)
