"""The group table: which group and slot of the ID embedding belong to each sample.

    number of samples, labels, group size H -> GroupTable: sample ID -> (group m, slot n), n < H

The network stores two vectors per group instead of one per sample (nn/paper_net.py). Zhang et al., "KRNet: Towards
Efficient Knowledge Replay" (2022), section "Batched ID Embedding".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from krnet.features.samples import class_index


@dataclass(frozen=True)
class GroupTable:
    """The group of each sample, and its slot in that group.

    Groups hold at most `group_size` samples of one class. Classes come in order of first appearance, and the samples
    of a class in order of their IDs, so the table follows from the labels alone and is not stored.
    """

    group: Tensor  # (N,) int64
    slot: Tensor  # (N,) int64
    num_groups: int
    group_size: int

    @classmethod
    def build(cls, num_samples: int, labels: Tensor | None, group_size: int) -> GroupTable:
        if labels is None:
            ids = torch.arange(num_samples)
            return cls(ids // group_size, ids % group_size, -(-num_samples // group_size), group_size)
        index, counts = class_index(labels)
        # A stable sort by class keeps the order of IDs inside each class.
        by_class = torch.argsort(index, stable=True)
        first = torch.cumsum(counts, 0) - counts
        rank = torch.empty(num_samples, dtype=torch.long)  # (N,) of each sample within its class
        rank[by_class] = torch.arange(num_samples) - first[index[by_class]]
        groups_of_class = -(-counts // group_size)
        first_group = torch.cumsum(groups_of_class, 0) - groups_of_class
        return cls(first_group[index] + rank // group_size, rank % group_size, int(groups_of_class.sum()), group_size)

    def counts(self) -> list[int]:
        """Number of samples in each group."""
        return torch.bincount(self.group, minlength=self.num_groups).tolist()


def num_groups(class_counts: list[int], group_size: int) -> int:
    """M = sum over classes c of ceil(N_c / H), with N_c samples in class c and group size H."""
    return sum(-(-count // group_size) for count in class_counts)
