"""Rows read by position: whatever the order, the layout and the byte order, they are those of the array."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from krnet.features.source import open_features


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    found = {}
    for name, shape in {"small": (3000, 3), "scalars": (500,), "large": (60, 9, 16, 16)}.items():
        for dtype in ("<f4", ">f4", "<f8", "u1"):
            array = (np.arange(np.prod(shape)) % 251).astype(dtype).reshape(shape)
            path = folder / f"{name}{dtype.replace('<', 'l').replace('>', 'b')}.npy"
            np.save(path, array)
            found[path] = array
    return found


@given(data=st.data())
def test_any_rows_in_any_order_are_those_of_the_array(files, data):
    path = data.draw(st.sampled_from(sorted(files)))
    array = files[path]
    ids = data.draw(st.lists(st.integers(0, len(array) - 1), max_size=50))
    if data.draw(st.booleans()):
        ids = [index + step for index in ids for step in range(3) if index + step < len(array)]
    read = open_features(path).read(torch.tensor(ids, dtype=torch.int64))
    assert np.array_equal(read.numpy(), array[np.array(ids, np.int64)])


def test_views_of_a_map_are_read_from_the_file_where_rows_are_whole(files, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6000, dtype=np.float32).reshape(100, 3, 20))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    ids = torch.tensor([3, 0, 7])
    for view in (mapped, mapped[10:], mapped[10:][5:50], mapped.reshape(100, 60), mapped[::2], mapped[:, 1:], mapped.T):
        assert np.array_equal(open_features(view).read(ids).numpy(), view[ids.numpy()])


def test_a_map_whose_file_was_replaced_keeps_its_values(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((50, 8), np.float32))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    (tmp_path / "a.npy").unlink()
    np.save(tmp_path / "a.npy", np.ones((50, 8), np.float32))
    assert open_features(mapped).read(torch.arange(50)).sum() == 0


def test_changes_to_a_copy_on_write_map_are_read(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((50, 8), np.float32))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="c")
    mapped[7] = 1
    assert open_features(mapped).read(torch.tensor([7])).sum() == 8


def test_a_file_without_whole_rows_in_it_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((50, 8), np.float32))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-4])
    with pytest.raises(ValueError, match=r"a\.npy"):
        open_features(tmp_path / "a.npy")
