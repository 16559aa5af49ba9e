"""Which samples come when: every epoch holds each once, and nothing but seed and iteration decides the order."""

import pytest
import torch

from krnet.features.sampler import BatchOrder

# samples, batch size: dividing evenly, unevenly, one batch an epoch, more asked for than there are
SIZES = [(12, 4), (10, 4), (7, 3), (5, 5), (3, 8), (1, 1)]


def laid_out(order: BatchOrder, num_epochs: int) -> torch.Tensor:
    """(num_epochs, samples): the batches end to end, cut into epochs."""
    wanted = num_epochs * order.num_samples
    ids = torch.cat([order.ids(i) for i in range(-(-wanted // order.batch_size))])
    return ids[:wanted].view(num_epochs, order.num_samples)


@pytest.mark.parametrize("run", [1, 2, 3])
@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
def test_every_epoch_holds_each_sample_once(num_samples, batch_size, run):
    for epoch in laid_out(BatchOrder(num_samples, batch_size, seed=3, run=run), 4):
        assert epoch.sort().values.tolist() == list(range(num_samples))


@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
def test_every_batch_is_full(num_samples, batch_size):
    order = BatchOrder(num_samples, batch_size, seed=0)
    assert order.batch_size == min(batch_size, num_samples)
    assert {len(order.ids(i)) for i in range(10)} == {order.batch_size}


def test_a_batch_across_two_epochs_ends_one_and_begins_the_next():
    order = BatchOrder(10, 4, seed=1)
    first, second = laid_out(order, 2)
    assert order.ids(2).tolist() == first[8:].tolist() + second[:2].tolist()


def test_the_order_follows_from_seed_and_iteration_alone():
    one, other = BatchOrder(20, 6, seed=5), BatchOrder(20, 6, seed=5)
    expected = [one.ids(i).tolist() for i in range(30)]
    torch.manual_seed(99)
    backwards = [other.ids(i).tolist() for i in reversed(range(30))]
    assert backwards[::-1] == expected
    assert BatchOrder(20, 6, seed=5).ids(17).tolist() == expected[17]


def test_epochs_and_seeds_differ():
    epochs = [row.tolist() for seed in range(4) for row in laid_out(BatchOrder(30, 7, seed), 4)]
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_asking_for_an_order_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    BatchOrder(20, 6, seed=5).ids(9)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_samples", [12, 14])
def test_a_run_keeps_neighbours_together_and_shuffles_the_runs(num_samples):
    order = BatchOrder(num_samples, 5, seed=0, run=4)
    starts = []
    for epoch in laid_out(order, 3).tolist():
        places = {value: place for place, value in enumerate(epoch)}
        for value in range(num_samples):
            if value % 4:
                assert places[value] == places[value - 1] + 1
        starts.append([value for value in epoch if value % 4 == 0])
    assert len({tuple(row) for row in starts}) > 1


def test_a_run_longer_than_all_samples_keeps_them_in_order():
    assert BatchOrder(3, 2, seed=0, run=8).ids(0).tolist() == [0, 1]


def test_ids_are_whole_numbers_on_the_device_asked_for():
    found = BatchOrder(6, 4, seed=0, device=torch.device("meta")).ids(0)
    assert found.device.type == "meta" and found.shape == (4,)
    ids = BatchOrder(6, 4, seed=0).ids(1)
    assert ids.device.type == "cpu" and ids.dtype == torch.int64


def test_a_seed_as_large_as_a_run_may_have_is_fine():
    assert len(BatchOrder(6, 4, seed=2**63 - 1).ids(1000)) == 4
