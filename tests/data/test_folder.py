"""Folders of images: which files, in which order, and the copies that are kept of them."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from krnet import data, protocol
from krnet.data import folder as imagefolder
from krnet.errors import DataError, SettingError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(imagefolder, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "images"


def paint(path, colour, size=(8, 8), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def folder(tmp_path):
    """Three classes of images of one colour each, whose red says which."""
    root = tmp_path / "pictures"
    for part, base in (("train", 0), ("val", 100)):
        for number, name in enumerate(("b", "a", "c")):
            for nth in range(4 if part == "train" else 2):
                paint(root / part / name / f"{nth}.png", (base + 10 * number + nth, 50, 200))
    return root


def reds(split):
    return split.images[:, 0, 0, 0].tolist()


def test_sample_ids_follow_the_names_of_classes_and_then_of_files(folder):
    found = data.load(str(folder))
    assert found.name == "pictures" and found.class_names == ("a", "b", "c")
    assert reds(found.train) == [10, 11, 12, 13, 0, 1, 2, 3, 20, 21, 22, 23]
    assert reds(found.test) == [110, 111, 100, 101, 120, 121]
    assert found.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert found.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.image_shape == (3, 8, 8) and found.train.images.dtype == torch.uint8
    assert found.train.images[:, 1:, :, :].unique().tolist() == [50, 200]
    assert (found.pad, found.flip) == (1, True)
    assert found.mean[1:] == pytest.approx((50 / 255, 200 / 255))


def test_a_folder_can_be_named_by_path_prefix_or_within_the_data_folder(folder, monkeypatch):
    ways = [
        data.load(f"imagefolder:{folder}"),
        data.load("imagefolder:pictures", folder.parent),
        data.load("pictures", folder.parent),
    ]
    monkeypatch.setenv("KRNET_DATA", str(folder.parent))
    ways.append(data.load("pictures"))
    monkeypatch.chdir(folder.parent)
    ways.append(data.load("pictures"))
    ways.append(data.load("imagefolder:pictures"))
    for found in ways:
        assert reds(found.train) == reds(ways[0].train)


def test_test_serves_where_there_is_no_val(folder):
    (folder / "val").rename(folder / "test")
    assert reds(data.load(str(folder)).test) == [110, 111, 100, 101, 120, 121]


def test_tiny_imagenet_is_read_as_it_is_published(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for number, name in enumerate(("n02", "n01")):
        for nth in range(2):
            paint(root / "train" / name / "images" / f"{name}_{nth}.JPEG", (100 * number + nth, 0, 0), (64, 64))
        (root / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t62\t62\n")
    listing = [("val_10.JPEG", "n01", 30), ("val_1.JPEG", "n02", 60), ("val_2.JPEG", "n01", 90)]
    for name, _, red in listing:
        paint(root / "val" / "images" / name, (red, 0, 0), (64, 64))
    lines = [f"{name}\t{label}\t0\t32\t44\t62\n" for name, label, _ in listing]
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    paint(root / "test" / "images" / "test_0.JPEG", (1, 2, 3), (64, 64))  # without labels: not ours
    found = data.load(str(root))
    assert found.class_names == ("n01", "n02") and found.image_shape == (3, 64, 64)
    assert found.train.labels.tolist() == [0, 0, 1, 1] and found.test.labels.tolist() == [0, 0, 1]
    np.testing.assert_allclose(reds(found.test), [30, 90, 60], atol=2)  # JPEG is not exact
    (root / "val" / "val_annotations.txt").write_text(lines[0] + "val_3.JPEG\tn01\n")
    with pytest.raises(DataError, match=r"val_annotations.txt, line 2: .*val_3"):
        data.load(str(root))


# ------------------------------------------------------------------ copies


def striped(path, num_green, num_other, upright):
    """Green in the middle, red before and blue after it."""
    row = np.zeros((1, num_green + 2 * num_other, 3), np.uint8)
    row[0, :num_other, 0] = row[0, num_other : num_other + num_green, 1] = row[0, num_other + num_green :, 2] = 255
    pixels = row.repeat(num_green, 0)
    Image.fromarray(pixels.transpose(1, 0, 2) if upright else pixels).save(path)


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("image_size", [16, 32, 64])
def test_a_copy_is_the_middle_square_at_the_size_asked_for(tmp_path, upright, image_size):
    striped(tmp_path / "a.png", 32, 20, upright)
    copy = np.frombuffer(imagefolder.square_copy(tmp_path / "a.png", image_size), np.uint8)
    copy = copy.reshape(3, image_size, image_size)
    inner = copy[:, 1:-1, 1:-1]  # resizing blends the borders of stripes
    assert (inner[1] >= 250).all() and (inner[0] <= 5).all() and (inner[2] <= 5).all()


def test_odd_sizes_and_modes_give_square_rgb(tmp_path):
    for number, (size, mode, colour) in enumerate(
        [((7, 5), "L", 9), ((3, 50), "RGB", (9, 9, 9)), ((1, 1), "P", 9), ((333, 10), "RGBA", (9, 9, 9, 50))]
    ):
        paint(tmp_path / f"{number}.png", colour, size, mode)
        copy = np.frombuffer(imagefolder.square_copy(tmp_path / f"{number}.png", 6), np.uint8)
        assert copy.shape == (3 * 6 * 6,)
        assert mode == "P" or set(copy.tolist()) == {9}


def test_the_default_size_is_that_of_the_first_image_and_at_most_256(folder):
    paint(folder / "train" / "a" / "0.png", (1, 1, 1), (30, 20))
    assert data.load(str(folder)).image_shape == (3, 20, 20)
    paint(folder / "train" / "a" / "0.png", (1, 1, 1), (300, 280))
    said = []
    found = data.load(str(folder), say=said.append)
    assert found.image_shape == (3, 256, 256)
    assert "copies of 256 are kept" in said[0]
    assert data.load(str(folder), image_size=280).image_shape == (3, 280, 280)


@pytest.mark.parametrize(
    ("image_size", "crop", "pad", "shift"),
    [(256, 224, 0, 16), (224, 196, 0, 14), (97, 85, 0, 6), (96, None, 12, 12), (64, None, 8, 8), (32, None, 4, 4)],
)
def test_large_images_are_cropped_to_seven_eighths_and_small_ones_padded(folder, image_size, crop, pad, shift):
    found = data.load(str(folder), image_size=image_size)
    assert (found.crop, found.pad, found.shift, found.flip) == (crop, pad, shift, True)
    assert found.input_shape == (3, crop or image_size, crop or image_size)


def test_copies_are_made_once_and_again_when_a_file_changes(folder, cache, monkeypatch):
    said = []
    first = data.load(str(folder), say=said.append)
    assert len(said) == 2 and len(list(cache.iterdir())) == 2
    with monkeypatch.context() as patch:
        patch.setattr(imagefolder, "square_copy", None)
        again = data.load(str(folder), say=said.append)
    assert len(said) == 2 and torch.equal(first.train.images, again.train.images)
    paint(folder / "train" / "c" / "3.png", (255, 50, 200))
    changed = data.load(str(folder), say=said.append)
    assert len(said) == 3 and "train" in said[2]
    assert reds(changed.train) == [*reds(first.train)[:-1], 255]
    os.utime(folder / "val" / "a" / "0.png", (1, 1))
    data.load(str(folder), say=said.append)
    assert len(said) == 4 and "val" in said[3]


def test_more_files_than_a_chunk_keep_their_order(folder, monkeypatch):
    expected = reds(data.load(str(folder)).train)
    monkeypatch.setattr(imagefolder, "CHUNK_IMAGES", 5)
    monkeypatch.setattr(imagefolder, "COPY_VERSION", "another")
    said = []
    assert reds(data.load(str(folder), say=said.append).train) == expected and len(said) == 2


def test_writing_to_images_leaves_their_copies_on_disk_alone(folder):
    data.load(str(folder)).train.images.zero_()
    assert reds(data.load(str(folder)).train)[0] == 10


def test_a_truncated_copy_is_made_again(folder, cache):
    expected = reds(data.load(str(folder)).train)
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:-50])
    assert reds(data.load(str(folder)).train) == expected


def test_an_image_that_cannot_be_decoded_is_named_and_leaves_no_half_copies(folder, cache):
    broken = folder / "train" / "b" / "2.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(DataError, match="cannot be read as an image") as caught:
        data.load(str(folder))
    assert str(broken) in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(folder, cache):
    cache.parent.write_text("a file where a folder should be")
    with pytest.raises(DataError, match="cannot be written") as caught:
        data.load(str(folder))
    assert str(cache) in str(caught.value)


# ------------------------------------------------------------------ refusals and choices


def test_classes_can_be_chosen(folder):
    found = data.load(str(folder), choose=lambda names: [name for name in names if name != "b"])
    assert found.class_names == ("a", "c") and reds(found.test) == [110, 111, 120, 121]
    assert found.train.labels.tolist() == [0] * 4 + [1] * 4
    for wrong in (["a", "d"], ["a", "a"], []):
        with pytest.raises(DataError, match="expected some of its 3 classes"):
            data.load(str(folder), choose=lambda names, wrong=wrong: wrong)


@pytest.mark.parametrize(
    ("subset", "names", "first"), [("2", ("a", "b"), 110), (1, ("a",), 110), ("c, a", ("c", "a"), 120)]
)
def test_a_subset_is_a_number_of_classes_or_a_list_of_them(folder, subset, names, first):
    found = data.load(str(folder), choose=protocol.subset(subset))
    assert found.class_names == names and reds(found.test)[0] == first
    assert found.digest != data.load(str(folder)).digest


def test_imagenet_subset_is_chosen_from_a_folder_of_a_thousand_classes(tmp_path):
    root = tmp_path / "imagenet"
    names = [f"n{number:08d}" for number in range(1000)]
    paint(tmp_path / "one.png", (1, 2, 3), (2, 2))
    for part in ("train", "val"):
        for name in names:
            (root / part / name).mkdir(parents=True)
            (root / part / name / "0.png").symlink_to(tmp_path / "one.png")
    found = data.load(str(root), choose=protocol.subset("lucir1993"))
    assert found.class_names == tuple(protocol.imagenet_subset(names)) and found.num_classes == 100
    assert found.train.num_samples == found.test.num_samples == 100


def test_files_that_are_no_images_are_passed_over(folder):
    (folder / "train" / "a" / "notes.txt").write_text("x")
    (folder / "train" / "a" / ".hidden.png").write_text("x")
    (folder / "train" / ".cache").mkdir()
    (folder / "train" / "list.csv").write_text("x")
    assert data.load(str(folder)).train.num_samples == 12


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda root: (root / "val").rename(root / "other"), r"pictures: expected the folders train and val \(or test"),
        (lambda root: (root / "train").rename(root / "other"), "expected the folders train and val"),
        (lambda root: (root / "val" / "d").mkdir(), "val/d: no images in it"),
        (lambda root: paint(root / "val" / "d" / "0.png", (1, 1, 1)), "class d is only in train or val"),
        (lambda root: paint(root / "train" / "d" / "0.png", (1, 1, 1)), "class d is only in train or val"),
        (lambda root: [(root / "train" / n).rename(root / n) for n in "abc"], "train: no folders in it"),
    ],
)
def test_another_layout_is_refused(folder, damage, said):
    damage(folder)
    with pytest.raises(DataError, match=said):
        data.load(str(folder))


def test_an_impossible_size_is_refused(folder):
    with pytest.raises(SettingError, match="image_size is 0; expected 1 to 4096"):
        data.load(str(folder), image_size=0)
