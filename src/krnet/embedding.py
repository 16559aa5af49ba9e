"""Batched ID embedding: turn a sample ID into a vector, with two stored vectors per group of samples.

    sample ID -> (group m, slot n) -> static vector v_s[m]            -> FC module --+
                                      dynamic vector v_d[m], shifted n -> FC module --+-> embedding (B, 2H)

Zhang et al., "KRNet: Towards Efficient Knowledge Replay", section "Batched ID Embedding".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.layers import fc_to_map, norm_act

NORM_GROUPS = 2


@dataclass(frozen=True)
class GroupTable:
    """Where each sample lives: which group, and which slot of it.

    Groups hold at most `group_size` samples and never mix classes. Classes come in order of first appearance and
    samples of a class in order of their IDs, so the table follows from the labels alone.
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
        rank = torch.empty(num_samples, dtype=torch.long)
        rank[by_class] = torch.arange(num_samples) - first[index[by_class]]
        groups_of_class = -(-counts // group_size)
        first_group = torch.cumsum(groups_of_class, 0) - groups_of_class
        return cls(first_group[index] + rank // group_size, rank % group_size, int(groups_of_class.sum()), group_size)

    def counts(self) -> list[int]:
        """Samples in each group."""
        return torch.bincount(self.group, minlength=self.num_groups).tolist()


def class_index(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (N,) -> (class number of each sample, samples per class), classes in order of first appearance."""
    _, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    first = torch.full((len(counts),), len(labels)).scatter_reduce(0, inverse, torch.arange(len(labels)), "amin")
    order = torch.argsort(first)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return place[inverse], counts[order]


def num_groups(class_counts: list[int], group_size: int) -> int:
    """M = sum over classes of ceil(N_c / H)."""
    return sum(-(-count // group_size) for count in class_counts)


class FCModule(nn.Sequential):
    """Fully connected layer, GroupNorm(2), Leaky-ReLU."""

    def __init__(self, d_in: int, d_out: int):
        # No bias: the norm's own follows at once (and the published count leaves no room for one).
        super().__init__(
            nn.Linear(d_in, d_out, bias=False),
            nn.GroupNorm(NORM_GROUPS, d_out),
        )

    def forward(self, x: Tensor, shape: tuple[int, int, int] | None = None) -> Tensor:
        """(B, d_in) -> (B, d_out), or a batch of maps of the given shape."""
        layer, norm = self
        assert isinstance(layer, nn.Linear) and isinstance(norm, nn.GroupNorm)
        return norm_act(layer(x), norm) if shape is None else fc_to_map(x, layer, norm, shape)


class BatchedIDEmbedding(nn.Module):
    def __init__(self, num_groups: int, group_size: int):
        super().__init__()
        self.static = nn.Parameter(torch.randn(num_groups, group_size))
        self.dynamic = nn.Parameter(torch.randn(num_groups, group_size))
        self.static_fc = FCModule(group_size, group_size)
        self.dynamic_fc = FCModule(group_size, group_size)

    def forward(self, group: Tensor, slot: Tensor) -> Tensor:
        # Not self.static[group]: on a CPU its gradient is summed by several threads, in whatever order they come.
        static, dynamic = (F.embedding(group, vectors) for vectors in (self.static, self.dynamic))
        return torch.cat([self.static_fc(static), self.dynamic_fc(shift(dynamic, slot))], dim=1)  # (B, 2H)


def shift(vectors: Tensor, slot: Tensor) -> Tensor:
    """A_n v for every row: (A_n v)_i = v_((i + n) mod H), by a gather instead of the paper's matrix."""
    size = vectors.shape[1]
    index = (torch.arange(size, device=vectors.device) + slot[:, None]) % size
    return vectors.gather(1, index)
