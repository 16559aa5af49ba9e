"""Every sample has a group, a slot and a vector of its own, for two stored vectors a group."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from krnet.features.samples import class_index
from krnet.nn.paper_net import BatchedIDEmbedding, shift
from krnet.recorders.paper.groups import GroupTable, num_groups

LABELS = st.lists(st.integers(-3, 3), min_size=1, max_size=60)


def paper_matrix(size: int, n: int) -> Tensor:
    """A_n as the paper prints it: a_ij = 1 if j - i = n or i - j = H - n, else 0."""
    return torch.tensor([[float(j - i == n or i - j == size - n) for j in range(size)] for i in range(size)])


def slow_table(labels: list[int], group_size: int) -> list[tuple[int, int]]:
    """(group, slot) of every sample: a new group whenever the class's last one is full."""
    places: dict[int, tuple[int, int]] = {}
    next_group = 0
    for label in dict.fromkeys(labels):
        members = [i for i, other in enumerate(labels) if other == label]
        for rank, sample in enumerate(members):
            places[sample] = next_group + rank // group_size, rank % group_size
        next_group += math.ceil(len(members) / group_size)
    return [places[i] for i in range(len(labels))]


# ---------------------------------------------------------------- shift


@pytest.mark.parametrize("size", [2, 7, 32])
def test_shift_is_the_papers_matrix_for_every_n(size):
    vectors = torch.randn(3, size)
    for n in range(size):
        expected = vectors @ paper_matrix(size, n).T  # (A_n v) for every row v
        assert torch.equal(shift(vectors, torch.full((3,), n)), expected), n


def test_shift_takes_a_slot_for_each_row():
    vectors, slots = torch.randn(5, 6), torch.tensor([0, 5, 2, 2, 1])
    expected = torch.stack([paper_matrix(6, int(n)) @ v for v, n in zip(vectors, slots)])
    assert torch.equal(shift(vectors, slots), expected)


# ---------------------------------------------------------------- groups


@given(labels=LABELS, group_size=st.integers(2, 9))
def test_groups_are_those_of_the_slow_version(labels, group_size):
    table = GroupTable.build(len(labels), torch.tensor(labels), group_size)
    assert list(zip(table.group.tolist(), table.slot.tolist())) == slow_table(labels, group_size)


@given(labels=LABELS, group_size=st.integers(2, 9))
def test_groups_hold_at_most_h_samples_of_one_class_and_their_number_is_m(labels, group_size):
    table = GroupTable.build(len(labels), torch.tensor(labels), group_size)
    places = list(zip(table.group.tolist(), table.slot.tolist()))
    assert len(set(places)) == len(labels)
    assert int(table.slot.min()) >= 0 and int(table.slot.max()) < group_size
    for group in range(table.num_groups):
        assert len({label for label, (other, _) in zip(labels, places) if other == group}) == 1
    expected = sum(math.ceil(count / group_size) for count in Counter(labels).values())
    assert table.num_groups == expected == num_groups(list(Counter(labels).values()), group_size)
    counts = table.counts()
    assert len(counts) == expected and sum(counts) == len(labels) and max(counts) <= group_size


@pytest.mark.parametrize("num_samples, expected", [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_without_labels_all_samples_are_one_class(num_samples, expected):
    table = GroupTable.build(num_samples, None, 8)
    assert table.num_groups == expected
    same = GroupTable.build(num_samples, torch.full((num_samples,), 7), 8)
    assert torch.equal(table.group, same.group) and torch.equal(table.slot, same.slot)


def test_classes_come_in_order_of_first_appearance():
    index, counts = class_index(torch.tensor([5, -2, 5, 9, -2, 5]))
    assert index.tolist() == [0, 1, 0, 2, 1, 0] and counts.tolist() == [3, 2, 1]


# ---------------------------------------------------------------- vectors


def test_the_embedding_joins_the_static_and_the_shifted_dynamic_vector():
    embed = BatchedIDEmbedding(3, 8)
    group, slot = torch.tensor([0, 2, 2, 1]), torch.tensor([0, 3, 7, 1])
    found = embed(group, slot)
    assert found.shape == (4, 16)
    for row, m, n in zip(found, group, slot):
        static = embed.static_fc(embed.static[m][None])
        dynamic = embed.dynamic_fc((paper_matrix(8, int(n)) @ embed.dynamic[m])[None])
        torch.testing.assert_close(row, torch.cat([static, dynamic], 1)[0])


def test_samples_of_a_group_share_the_first_half_and_no_two_samples_share_both():
    table = GroupTable.build(100, None, 32)
    vectors = BatchedIDEmbedding(table.num_groups, 32)(table.group, table.slot).detach()
    assert len(vectors[:, :32].unique(dim=0)) == table.num_groups
    assert (torch.cdist(vectors, vectors) + torch.eye(100) > 0.1).all()


def test_two_vectors_a_group_are_stored_however_many_samples_it_holds():
    stored = {name: tuple(p.shape) for name, p in BatchedIDEmbedding(3, 8).named_parameters() if "fc" not in name}
    assert stored == {"static": (3, 8), "dynamic": (3, 8)}


def test_gradients_are_bit_identical_however_many_threads_sum_them():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        table = GroupTable.build(1000, torch.arange(1000) % 2, 64)
        embed, weights = BatchedIDEmbedding(table.num_groups, 64), torch.randn(1000, 128)
        seen = []
        for _ in range(5):
            embed.zero_grad()
            (embed(table.group, table.slot) * weights).sum().backward()
            seen.append([embed.static.grad.clone(), embed.dynamic.grad.clone()])
    finally:
        torch.set_num_threads(threads)
    for later in seen[1:]:
        assert torch.equal(later[0], seen[0][0]) and torch.equal(later[1], seen[0][1])
