"""The order of a pass: every sample once, shuffled, and no more of the recording at hand than was asked for."""

import pytest
import torch

from krnet.loading.order import Order, even_ranges


def make(num_samples=1000, size=25, batch_size=16, **options):
    settings = {"shuffle": True, "seed": 3, "buffer": 100, **options}
    return Order(even_ranges(num_samples, size), batch_size, **settings)


def whole(order, epoch=0):
    return [order.batch(epoch, number) for number in range(order.num_batches)]


@pytest.mark.parametrize(
    "options", [{}, {"buffer": 1}, {"buffer": 5000}, {"size": 7, "buffer": 30}, {"shuffle": False}, {"size": 5000}]
)
@pytest.mark.parametrize("num_samples", [1, 16, 999])
def test_each_pass_has_every_sample_once_in_full_batches(options, num_samples):
    order = make(num_samples, **options)
    for epoch in (0, 1):
        batches = whole(order, epoch)
        assert torch.cat(batches).sort().values.tolist() == list(range(num_samples))
        assert all(len(batch) == 16 for batch in batches[:-1])
    dropped = make(num_samples, drop_last=True, **options)
    assert [len(batch) for batch in whole(dropped)] == [16] * (num_samples // 16)


def test_passes_and_seeds_have_other_orders_and_any_batch_is_found_without_those_before_it():
    first = torch.cat(whole(make()))
    assert not torch.equal(first, torch.cat(whole(make(), epoch=1)))
    assert not torch.equal(first, torch.cat(whole(make(seed=4))))
    order = make()
    for number in torch.randperm(order.num_batches).tolist():
        assert torch.equal(make().batch(0, number), first[16 * number :][:16])


def test_samples_of_few_ranges_are_at_hand_at_a_time():
    order = make(buffer=100, size=25)  # four ranges make a group
    ids = torch.cat(whole(order))
    for group in ids.split(100):
        ranges = (group // 25).unique()
        assert len(ranges) == 4
        assert (ranges.diff() > 1).any()  # not those beside each other
        places = (group.argsort().diff() == 1).float().mean()
        assert places < 0.1  # shuffled within


def test_neighbours_are_spread_over_a_group_as_by_a_full_shuffle():
    ids = torch.cat(whole(make(10_000, 100, buffer=2000)))
    distance = (ids.argsort().diff().abs().float())[:99].mean()  # of the neighbours in the first range
    assert 500 < distance < 830  # 667 = a third of a group, where their places are random


def test_the_order_of_a_recording_that_is_at_hand_is_a_single_permutation():
    expected = torch.randperm(1000, generator=torch.Generator().manual_seed(3 * 1_000_003 + 2))
    assert torch.equal(torch.cat(whole(make(buffer=1000), epoch=2)), expected)
