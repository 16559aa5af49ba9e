"""Every epoch shows every sample once, in an order that any later run can take up at any iteration."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krnet.errors import FeatureError
from krnet.features import feed as module
from krnet.features.feature_source import FeatureSource
from krnet.features.feed import Feed
from krnet.features.source import open_features

CPU = torch.device("cpu")
VALUES = torch.arange(50.0).view(50, 1).expand(50, 3).contiguous()


def streaming(num_samples: int = 50) -> FeatureSource:
    """The same values by sample ID, read one by one."""
    return open_features(list(VALUES[:num_samples]))


def epochs(feed: Feed, number: int) -> list[list[int]]:
    """IDs of the first epochs, whatever batches they came in."""
    per_epoch = feed.num_samples
    flat = torch.cat([feed.ids(i) for i in range(-(-number * per_epoch // feed.batch_size))]).tolist()
    return [flat[e * per_epoch : (e + 1) * per_epoch] for e in range(number)]


@settings(max_examples=50)
@given(
    num_samples=st.integers(1, 50),
    batch_size=st.integers(1, 60),
    run_bytes=st.sampled_from([1, 24, 60]),
    resident=st.booleans(),
)
def test_every_epoch_holds_every_sample_once(num_samples, batch_size, run_bytes, resident):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RUN_BYTES", run_bytes)
        source = open_features(VALUES[:num_samples]) if resident else streaming(num_samples)
        feed = Feed(source, batch_size, 0, CPU)
    for ids in epochs(feed, 3):
        assert sorted(ids) == list(range(num_samples))
    assert len(feed.ids(7)) == min(batch_size, num_samples)
    feed.close()


def test_the_order_depends_on_seed_and_iteration_alone():
    first = Feed(open_features(VALUES), 7, 3, CPU)
    seen = [first.ids(i).tolist() for i in range(40)]
    fresh = Feed(open_features(VALUES), 7, 3, CPU)
    assert [fresh.ids(i).tolist() for i in reversed(range(40))] == seen[::-1]
    assert Feed(open_features(VALUES), 7, 3, CPU).ids(33).tolist() == seen[33]
    assert [Feed(open_features(VALUES), 7, 4, CPU).ids(i).tolist() for i in range(40)] != seen


def test_epochs_differ_from_each_other_and_from_the_order_of_ids():
    one, two, three = epochs(Feed(open_features(VALUES), 10, 0, CPU), 3)
    assert one != two and two != three and one != sorted(one)


@pytest.mark.parametrize("order", [range(20), [0, 5, 6, 7, 3, 19, 0, 0, 1]], ids=["in turn", "with jumps"])
def test_what_is_streamed_is_what_lies_at_those_ids(order):
    feed = Feed(streaming(), 16, 0, CPU)
    assert feed.resident is None
    for iteration in order:
        ids, values = feed.batch(iteration)
        assert torch.equal(ids, feed.ids(iteration)) and torch.equal(values, VALUES[ids])
    feed.close()


def test_resident_features_are_gathered_where_they_lie_and_come_in_their_own_type():
    values = VALUES.half()
    feed = Feed(open_features(values), 16, 0, CPU)
    assert feed.resident.data_ptr() == values.data_ptr()
    (ids,) = feed.batch(3)
    batch = feed.values(ids)
    assert batch.dtype == torch.float16 and torch.equal(batch, values[ids])


def test_streamed_features_come_in_runs_of_neighbours_and_at_least_eight_runs_a_batch(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1000, 16), np.float32))
    feed = Feed(open_features(tmp_path / "x.npy"), 160, 0, CPU)
    ids = feed.ids(0)
    assert feed.run == 20
    assert int((ids.diff() != 1).sum()) <= 9
    assert len(ids.unique()) == 160
    feed.close()


def test_an_error_while_reading_ahead_reaches_the_caller():
    broken = [*VALUES[:49], torch.zeros(4)]
    feed = Feed(open_features(broken), 10, 0, CPU)
    with pytest.raises(FeatureError, match="sample 49"):
        for iteration in range(5):
            feed.batch(iteration)
    feed.close()
