"""Labels of any values in any order come back from a file, and tables that do not add up are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from krnet.errors import NotARecordingError, OversizedRecordingError, RecordingError
from krnet.features.samples import LABELS, SAMPLES_PER_BYTE, Samples

INT64 = st.integers(-(2**63), 2**63 - 1)


def recall(metadata: dict, tensors: dict[str, torch.Tensor], file_bytes: int = 10**6) -> Samples:
    return Samples.recall(metadata, file_bytes, tensors.get, "x.krn")


@given(
    labels=st.none() | st.lists(st.sampled_from([0, 1, -5, 2**63 - 1, -(2**63)]) | INT64, min_size=1, max_size=50),
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
)
def test_samples_come_back_as_described(labels, shape):
    samples = Samples(7 if labels is None else len(labels), shape, None if labels is None else torch.tensor(labels))
    found = recall(*samples.describe())
    assert (found.num_samples, found.shape) == (samples.num_samples, shape)
    assert found.labels is None if labels is None else found.labels.tolist() == labels


def test_samples_that_come_class_by_class_need_no_tensor():
    metadata, tensors = Samples(5, (2,), torch.tensor([9, 9, -1, 4, 4])).describe()
    assert metadata == {"num_samples": 5, "shape": [2], "classes": [[9, 2], [-1, 1], [4, 2]]} and tensors == {}


@pytest.mark.parametrize("num_classes, dtype", [(256, torch.uint8), (257, torch.int16), (40000, torch.int32)])
def test_mixed_labels_take_the_smallest_type_that_holds_the_classes(num_classes, dtype):
    labels = torch.arange(num_classes).repeat(2) * 1000
    metadata, tensors = Samples(2 * num_classes, (), labels).describe()
    assert tensors[LABELS].dtype == dtype
    assert torch.equal(recall(metadata, tensors).labels, labels)


def test_classes_are_counted_in_order_of_first_appearance():
    assert Samples(5, (), torch.tensor([3, 1, 3, 3, 1])).class_counts() == [3, 2]
    assert Samples(5, (), None).class_counts() == [5]


@pytest.mark.parametrize("name", ["num_samples", "shape"])
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, True, "5", {}, [0], [-1], [2.0], [[1]], 2**48, [2**48]])
def test_a_number_or_shape_that_is_none_is_refused(name, value):
    metadata = Samples(3, (4,), None).describe()[0]
    with pytest.raises(NotARecordingError, match="expected positive numbers"):
        recall(metadata | {name: value}, {})


def test_more_samples_than_the_bytes_could_hold_are_refused():
    metadata = Samples(10 * SAMPLES_PER_BYTE, (4,), None).describe()[0]
    assert recall(metadata, {}, file_bytes=10).num_samples == 10 * SAMPLES_PER_BYTE
    with pytest.raises(OversizedRecordingError, match="640 samples in 9 bytes"):
        recall(metadata, {}, file_bytes=9)


@pytest.mark.parametrize(
    "classes",
    [
        5,
        "abc",
        {"0": 4},
        [],
        [[0, 3]],
        [[0, 5]],
        [[0, 4, 1]],
        [[0]],
        [0, 4],
        [["a", 4]],
        [[None, 4]],
        [[0.5, 4]],
        [[True, 4]],
        [[2**63, 4]],
        [[0, 2.0], [1, 2]],
        [[0, 5], [1, -1]],
        [[0, 2**47], [1, 4 - 2**47]],
        [[7, 2], [7, 2]],
    ],
    ids=str,
)
def test_a_class_table_that_does_not_add_up_is_refused(classes):
    with pytest.raises(NotARecordingError, match="class table is wrong"):
        recall({"num_samples": 4, "shape": [2], "classes": classes}, {})


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1, 1], dtype=torch.uint8),
        torch.tensor([0, 1, 1, 1], dtype=torch.uint8),
        torch.tensor([0, 1, 2, 0], dtype=torch.uint8),
        torch.tensor([0, 1, -1, 0]),
        torch.tensor([0, 1, 2**31 - 1, 0], dtype=torch.int32),  # counting up to this one takes 16 GiB
        torch.tensor([0, 1, -1, 0], dtype=torch.int16),
        torch.tensor([[0, 1], [0, 1]]),
        torch.tensor([0, 1.5, 0.5, 1]),
        torch.tensor([False, True, False, True]),
    ],
    ids=str,
)
def test_labels_that_are_not_those_counted_are_refused(labels):
    with pytest.raises(RecordingError):
        recall({"num_samples": 4, "shape": [2], "classes": [[5, 2], [6, 2]]}, {LABELS: labels})
