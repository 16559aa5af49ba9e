"""Data sets by name, the embedded one, and the user's own arrays."""

import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from krnet import data
from krnet.data import dataset
from krnet.data.dataset import from_arrays
from krnet.errors import DataError, LabelError, SettingError

# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("cifar10", SettingError, "did you mean 'cifar100'"),
        ("digit", SettingError, "did you mean 'digits'"),
        ("svhn", SettingError, "expected digits, cifar100.*, or the path of a folder of images, such as pictures"),
        ("imagefolder:nowhere", DataError, "nowhere: no such folder"),
        ("some/where", DataError, "some/where: no such folder; expected one with train and val"),
    ],
)
def test_an_unknown_data_set_is_refused_with_a_hint(tmp_path, monkeypatch, name, error, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        data.load(name)


def test_settings_of_folders_are_refused_elsewhere():
    for setting in ({"image_size": 32}, {"choose": list}):
        with pytest.raises(SettingError, match="for folders of images; leave them out for digits"):
            data.load("digits", **setting)


def test_a_folder_named_like_a_data_set_does_not_replace_it(tmp_path, monkeypatch):
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert data.load("digits").train.num_samples == 1442


# ------------------------------------------------------------------ digits


def test_every_fifth_digit_of_each_class_is_for_testing():
    found, source = data.load("digits"), load_digits()
    expected = {"train": [], "test": []}
    seen = [0] * 10
    for image, label in zip(source.images, source.target, strict=True):
        seen[label] += 1
        expected["test" if seen[label] % 5 == 0 else "train"].append((image, label))
    for name, split in (("train", found.train), ("test", found.test)):
        images = torch.tensor(np.stack([image for image, _ in expected[name]]))
        assert (split.images[:, 0].double() * 16 / 255 - images).abs().max() < 0.04
        assert split.labels.tolist() == [label for _, label in expected[name]]
    assert found.train.num_samples + found.test.num_samples == 1797


def test_digits_are_grey_full_range_and_never_mirrored():
    found = data.load("digits")
    assert found.image_shape == (1, 8, 8) and found.num_classes == 10 and found.class_names[3] == "3"
    assert found.train.images.min() == 0 and found.train.images.max() == 255
    assert (found.pad, found.flip) == (1, False)


def test_two_loads_give_the_same_sample_ids():
    first, second = data.load("digits"), data.load("digits")
    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.test.labels, second.test.labels)


# ------------------------------------------------------------------ arrays

IMAGES = np.random.RandomState(0).randint(0, 256, (12, 3, 6, 7), dtype=np.uint8)
LABELS = np.arange(12) % 4


def made(train_images=IMAGES, train_labels=LABELS, test_images=IMAGES[4:8], test_labels=LABELS[4:8], **settings):
    return from_arrays(train_images, train_labels, test_images, test_labels, **settings)


@pytest.mark.parametrize("images", [np.asarray, torch.from_numpy], ids=["array", "tensor"])
@pytest.mark.parametrize(
    "labels", [np.asarray, torch.from_numpy, np.ndarray.tolist, np.uint8], ids=["array", "tensor", "list", "uint8"]
)
def test_arrays_and_tensors_give_the_same_data_set(images, labels):
    found = made(images(IMAGES), labels(LABELS), images(IMAGES[4:8]), labels(LABELS[4:8]))
    assert torch.equal(found.train.images, torch.from_numpy(IMAGES))
    assert found.train.labels.tolist() == LABELS.tolist() and found.train.labels.dtype == torch.int64
    assert found.class_names == ("0", "1", "2", "3") and found.name == "arrays"
    assert (found.pad, found.flip) == (0, False)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["array", "tensor"])
def test_channels_are_found_first_or_last(kind):
    found = made(kind(IMAGES.transpose(0, 2, 3, 1)), test_images=kind(IMAGES[4:8].transpose(0, 2, 3, 1)))
    assert torch.equal(found.train.images, torch.from_numpy(IMAGES)) and found.train.images.is_contiguous()
    assert torch.equal(found.test.images, torch.from_numpy(IMAGES[4:8]))


@pytest.mark.parametrize("shape", [(4, 3, 8, 3), (4, 1, 1, 1), (4, 5, 8, 8)], ids=str)
def test_channels_that_could_be_either_axis_must_be_told(shape):
    images = np.random.RandomState(0).randint(0, 256, shape, dtype=np.uint8)
    with pytest.raises(DataError, match=r"arrays, train: .*Say layout='NCHW' or layout='NHWC'"):
        made(images, LABELS[:4], images, LABELS[:4])
    first = made(images, LABELS[:4], images, LABELS[:4], layout="NCHW")
    last = made(images, LABELS[:4], images, LABELS[:4], layout="NHWC")
    assert torch.equal(first.train.images, torch.from_numpy(images))
    assert torch.equal(last.train.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    with pytest.raises(SettingError, match="layout is 'CHW'; expected one of NCHW, NHWC"):
        made(layout="CHW")


def test_mean_and_std_are_those_of_the_training_images():
    found = made()
    pixels = IMAGES.transpose(1, 0, 2, 3).reshape(3, -1) / 255
    assert found.mean == pytest.approx(pixels.mean(1)) and found.std == pytest.approx(pixels.std(1))
    given = made(mean=(0.1, 0.2, 0.3))
    assert given.mean == (0.1, 0.2, 0.3) and given.std == found.std
    given = made(mean=np.array([0, 0, 0]), std=torch.tensor([1.0, 1.0, 2.0]))
    assert given.mean == (0, 0, 0) and given.std == (1, 1, 2)


def test_one_mean_or_std_may_stand_for_all_channels():
    found = made(mean=0.5, std=np.float32(0.25))
    assert found.mean == (0.5,) * 3 and found.std == (0.25,) * 3


def test_mean_and_std_of_very_many_images_are_those_of_evenly_spaced_ones(monkeypatch):
    monkeypatch.setattr(dataset, "MAX_STATS_BYTES", IMAGES.nbytes // 3)
    assert data.channel_stats(torch.from_numpy(IMAGES))[0] == pytest.approx(IMAGES[::3].mean((0, 2, 3)) / 255)


def test_a_constant_channel_is_not_divided_by_zero():
    images = IMAGES.copy()
    images[:, 1] = 7
    assert made(images).std[1] > 0


def test_read_only_arrays_are_taken_without_a_warning_or_a_copy():
    images = IMAGES.copy()
    images.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = made(images)
    assert found.train.images.data_ptr() == images.ctypes.data


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"train_images": IMAGES / 255}, DataError, "train: images are float64; expected uint8"),
        ({"test_images": torch.from_numpy(IMAGES).float()}, DataError, "test: images are torch.float32"),
        ({"train_images": IMAGES.astype(np.uint16)}, DataError, "images are uint16"),
        ({"train_images": IMAGES[:, 0]}, DataError, r"shape \(12, 6, 7\).*images\[:, None\]"),
        ({"train_images": IMAGES[:0]}, DataError, r"shape \(0, 3, 6, 7\)"),
        ({"test_images": IMAGES[4:8, :, :5]}, DataError, r"\(3, 6, 7\) and \(3, 5, 7\); expected the same shape"),
        ({"train_labels": LABELS[1:]}, LabelError, "train: 11 labels for 12 images"),
        ({"train_labels": LABELS * 1.0}, LabelError, "labels are float64 of shape"),
        ({"train_labels": LABELS[:, None]}, LabelError, r"labels are int64 of shape \(12, 1\)"),
        ({"train_labels": LABELS == 0}, LabelError, "labels are bool"),
        ({"train_labels": [str(label) for label in LABELS]}, LabelError, "labels are <U"),
        ({"train_labels": LABELS - 1}, LabelError, "train: label -1 is below 0. Number the classes 0, 1, 2"),
        ({"train_labels": LABELS * 0 - 3}, LabelError, "train: label -3 is below 0"),
        ({"test_labels": LABELS[4:8] - 1}, LabelError, "test: label -1 is below 0"),
        ({"train_labels": LABELS[:0]}, LabelError, "train: no labels; expected one per image"),
        ({"test_labels": []}, LabelError, "test: no labels; expected one per image"),
        ({"train_labels": LABELS * 2}, LabelError, r"train: no image of class 1 \(1\)"),
        ({"test_labels": LABELS[4:8] + 1}, LabelError, "test: label 4 is outside 0..3"),
        ({"test_labels": LABELS[4:8] * 0}, LabelError, r"test: no image of class 1 \(1\); expected at least one"),
        ({"class_names": "abc"}, LabelError, "label 3 is outside 0..2"),
        ({"class_names": "abcde"}, LabelError, r"no image of class 4 \(e\)"),
        ({"mean": (0.5,)}, SettingError, "one number per channel"),
        ({"std": (0.5, 0.5, 0)}, SettingError, r"std is \(0.5, 0.5, 0\); .* above 0"),
        ({"std": 0}, SettingError, "std is 0; .* above 0"),
        ({"mean": [float("nan")] * 3}, SettingError, r"mean is \[nan, nan, nan\]; expected one number per channel"),
        ({"std": [0.5, float("inf"), 0.5]}, SettingError, "std is .*one number per channel"),
        ({"mean": "grey"}, SettingError, "mean is 'grey'; expected one number per channel"),
        ({"mean": [[0.5, 0.5, 0.5]]}, SettingError, "one number per channel"),
        ({"class_names": "abca"}, LabelError, "two classes are named 'a'"),
        ({"flip": "no"}, SettingError, "flip is 'no'; expected one of True, False"),
        ({"crop": 4}, SettingError, "crop is 4, and the images are 6 x 7; crops need square images"),
        ({"pad": -1}, SettingError, "pad is -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arrays_are_refused_with_what_to_do(given, error, said):
    with pytest.raises(error, match=said):
        made(**given)


# ------------------------------------------------------------------ crops and digests

SQUARE = IMAGES[:, :, :, :6]


def test_a_crop_is_what_networks_see_of_images_that_are_kept_whole():
    found = made(SQUARE, test_images=SQUARE[4:8], crop=4, pad=1)
    assert found.image_shape == (3, 6, 6) and found.input_shape == (3, 4, 4)
    assert found.shift == 2  # one pixel of zeros, one of the image
    whole = replace(found, crop=None)
    assert whole.input_shape == (3, 6, 6) and whole.shift == whole.pad == 1


@pytest.mark.parametrize(
    ("crop", "said"),
    [(3, "crop is 3 of 6 pixels; .*such as 2"), (8, "crop is 8; expected 1 to 6"), (0, "crop is 0"), ("4", "crop is")],
)
def test_a_crop_without_a_centre_or_beyond_the_image_is_refused(crop, said):
    with pytest.raises(SettingError, match=said):
        made(SQUARE, test_images=SQUARE[4:8], crop=crop)


def test_the_digest_tells_data_sets_apart_that_differ_in_how_they_are_shown():
    def digest(images=SQUARE, **changes):
        settings = {"mean": 0.5, "std": 0.25, "pad": 1, "flip": True, "crop": None, **changes}
        return made(images, test_images=images[4:8], layout="NCHW", **settings).digest

    same = digest()
    assert digest() == digest(mean=(0.5, 0.5, 0.5)) == digest(flip=1) == same
    others = [
        digest(mean=(0.5, 0.5, 0.4)), digest(std=0.3), digest(pad=0), digest(flip=False), digest(crop=4),
        digest(SQUARE.reshape(12, 3, 4, 9)), digest(255 - SQUARE),
    ]  # fmt: skip
    assert len({same, *others}) == 8


# ------------------------------------------------------------------ held-out images


def test_held_out_images_are_the_middles_of_equal_stretches_of_each_class():
    """Against a slow count: of 10 images in 3 stretches, those at 1.67, 5 and 8.33."""
    labels = torch.arange(30) % 3  # ten images of each class, in turn
    images = torch.arange(30, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    whole = from_arrays(images, labels, 255 - images[:6], labels[:6], mean=0.5, std=0.5, layout="NCHW")
    held = whole.with_validation(3)
    for label in range(3):
        own = [label + 3 * place for place in range(10)]
        tested = held.test.images[held.test.labels == label, 0, 0, 0].tolist()
        trained = held.train.images[held.train.labels == label, 0, 0, 0].tolist()
        assert tested == [own[1], own[5], own[8]] and sorted(tested + trained) == own


def test_a_data_set_with_held_out_images_does_not_contain_the_test_images():
    whole = data.load("digits")
    held = whole.with_validation(20)
    assert held.test.num_samples == 200 and held.train.num_samples == whole.train.num_samples - 200
    kept = {image.numpy().tobytes() for image in torch.cat([held.train.images, held.test.images])}
    assert kept == {image.numpy().tobytes() for image in whole.train.images}
    assert (held.mean, held.std, held.pad, held.class_names) == (whole.mean, whole.std, whole.pad, whole.class_names)
    assert (whole.validation, held.validation) == (0, 20)
    assert len({whole.digest, held.digest, whole.with_validation(19).digest}) == 3
    assert len({whole.name, held.name, whole.with_validation(19).name}) == 3
    # Even a data set of the same images is another one: its results are those of a test.
    assert replace(held, validation=0).digest != held.digest


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "validation is 0; expected at least 1"),
        (2.5, "expected a whole number"),
        (8, r"class 1 \(bee\) of arrays has 8 training images; expected at most 7"),
    ],
)
def test_a_class_keeps_a_training_image(number, said):
    labels = [0] * 12 + [1] * 8
    images = torch.zeros(20, 1, 4, 4, dtype=torch.uint8)
    whole = from_arrays(images, labels, images, labels, layout="NCHW", class_names=["ant", "bee"])
    with pytest.raises(SettingError, match=said):
        whole.with_validation(number)
    assert torch.bincount(whole.with_validation(7).train.labels).tolist() == [5, 1]


def test_images_are_held_out_once():
    with pytest.raises(SettingError, match="has 5 images of each class held out already"):
        data.load("digits").with_validation(5).with_validation(5)


def test_importing_krnet_data_needs_neither_pooch_nor_pillow():
    code = (
        "import sys; sys.modules['pooch'] = sys.modules['PIL'] = None\n"
        "import krnet.data, krnet.protocol, krnet.data.augment\n"
        "assert krnet.data.load('digits').num_classes == 10"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
