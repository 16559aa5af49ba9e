"""The order of samples in a pass over a recording that may be larger than memory.

    ranges of IDs -> ranges in random order -> groups of at least `buffer` samples, each in random order -> batches

A group is what must be at hand at a time. The order follows from seed and pass alone, and any batch can be asked for
without those before it: so a pass can be taken up in the middle, and shared by any number of workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

MIX = 1_000_003  # seeds of passes and groups are far apart


class Order:
    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        buffer: int,
        drop_last: bool = False,
    ):
        """ranges: of IDs (start, stop) that are cheap to read together; in the order of IDs, without hole or overlap

        buffer: samples that are shuffled together, at least; drop_last: leave out a last batch that is not full
        """
        self.ranges, self.num_samples = ranges, ranges[-1][1]
        self.batch_size, self.shuffle, self.seed, self.buffer = batch_size, shuffle, seed, buffer
        whole, rest = divmod(self.num_samples, batch_size)
        self.num_batches = whole + bool(rest and not drop_last)
        self._groups = lru_cache(maxsize=2)(self._cut)
        self._ids = lru_cache(maxsize=2)(self._shuffle)

    def batch(self, epoch: int, number: int) -> Tensor:
        """IDs (B,) of a batch of a pass."""
        start = number * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
        if not self.shuffle:
            return torch.arange(start, stop)
        starts = self._groups(epoch)[1]
        parts = []
        while start < stop:
            group = bisect_right(starts, start) - 1
            ids = self._ids(epoch, group)[start - starts[group] :][: stop - start]
            parts.append(ids)
            start += len(ids)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cut(self, epoch: int) -> tuple[list[list[int]], list[int]]:
        """Numbers of the ranges of each group, and the place of its first sample in the pass."""
        if self.buffer >= self.num_samples:
            return [list(range(len(self.ranges)))], [0]
        order = torch.randperm(len(self.ranges), generator=self._generator(epoch, 0)).tolist()
        groups, sizes = list[list[int]](), list[int]()
        for number in order:
            if not groups or sizes[-1] >= self.buffer:
                groups.append([])
                sizes.append(0)
            groups[-1].append(number)
            sizes[-1] += self.ranges[number][1] - self.ranges[number][0]
        return groups, [0, *accumulate(sizes[:-1])]

    def _shuffle(self, epoch: int, group: int) -> Tensor:
        """IDs of a group, in the order of the pass."""
        if self.buffer >= self.num_samples:  # as it always was: the order of small recordings is that of krnet 0.1
            return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self._seed(epoch)))
        ids = torch.cat([torch.arange(*self.ranges[number]) for number in self._groups(epoch)[0][group]])
        return ids[torch.randperm(len(ids), generator=self._generator(epoch, group + 1))]

    def _seed(self, epoch: int) -> int:
        return (self.seed * MIX + epoch) % 2**63

    def _generator(self, epoch: int, number: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed(epoch) * MIX + number) % 2**63)


def even_ranges(num_samples: int, size: int) -> list[tuple[int, int]]:
    """0 .. num_samples in ranges of this size."""
    return [(start, min(start + size, num_samples)) for start in range(0, num_samples, size)]
