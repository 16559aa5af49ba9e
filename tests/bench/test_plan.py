"""Costs before recording: the paper's storage table, and the weights that a recording really has."""

import math

import numpy as np
import pytest
import torch

import krnet
from krnet.bench.plan import plan
from krnet.errors import SettingError
from krnet.io.archive import open_archive
from maps import relu_maps

IMAGENET = (256, 14, 14)
# The paper's storage table, as printed; its MB and GB are MiB and GiB.
TABLE = [
    (50, 64_817, "12.12 GB", "253.19 MB", "0.59 MB"),
    (100, 129_395, "24.19 GB", "505.45 MB", "1.17 MB"),
    (150, 194_217, "36.30 GB", "758.66 MB", "1.76 MB"),
    (200, 255_224, "47.71 GB", "996.97 MB", "2.34 MB"),
    (250, 319_811, "59.78 GB", "1.22 GB", "2.93 MB"),
]


def even_counts(num_samples: int, num_classes: int) -> list[int]:
    """The paper prints sums, not the classes. Shared out evenly each class has 1,276 to 1,297 samples: three groups
    of 512, as the printed sizes of the codes require (2 * 150 * 512 floats are 0.59 MiB)."""
    return [num_samples // num_classes + (i < num_samples % num_classes) for i in range(num_classes)]


def printed(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MB"


@pytest.mark.parametrize(("num_classes", "num_samples", "features", "autoencoder", "krnet"), TABLE)
def test_storage_table_of_the_paper_comes_out_to_the_printed_digit(
    num_classes: int, num_samples: int, features: str, autoencoder: str, krnet: str
) -> None:
    found = plan(IMAGENET, class_counts=even_counts(num_samples, num_classes), preset="imagenet-published")
    assert (found["num_samples"], found["num_classes"]) == (num_samples, num_classes)
    assert found["num_groups"] == 3 * num_classes
    assert printed(found["feature_bytes"]) == features
    assert printed(found["autoencoder_code_bytes"]) == autoencoder
    assert printed(found["krnet_code_bytes"]) == krnet


@pytest.mark.parametrize(("num_classes", "num_samples", "ratio"), [(50, 64_817, 36), (250, 319_811, 180)])
def test_compression_ratios_of_the_paper_come_out_when_cut_as_it_cuts_them(
    num_classes: int, num_samples: int, ratio: int
) -> None:
    found = plan(IMAGENET, class_counts=even_counts(num_samples, num_classes), preset="imagenet-published")
    assert int(found["compression_ratio"]) == ratio
    assert found["compression_ratio_bytes"] == found["feature_bytes"] / found["krnet_bytes"]
    assert found["compression_ratio"] == pytest.approx(found["compression_ratio_bytes"] * 1000 / 1024)


def test_published_network_sizes_come_out() -> None:
    found = plan(IMAGENET, class_counts=[1300], preset="imagenet-published")
    assert f"{found['autoencoder_network_bytes'] / 2**20:.1f}" == "325.8"
    # Printed: 327.9. No count of layers gives it; biases in the FC layers would give 328.0.
    assert f"{found['krnet_network_bytes'] / 2**20:.1f}" == "327.8"


def test_full_imagenet_classes_take_three_groups_and_small_ones_two() -> None:
    assert plan(IMAGENET, class_counts=[1300, 1025, 1024, 732], preset="imagenet")["num_groups"] == 3 + 3 + 2 + 2


@pytest.mark.parametrize("preset", [None, "cifar100"])
def test_plan_counts_the_weights_that_a_recording_stores(preset: str | None) -> None:
    labels = [0] * 20 + [1] * 10
    small = {"recorder": "paper", "c0": 4, "d0": 16, "group_size": 8}
    recording = krnet.record(torch.rand(30, 4, 4, 4), labels, preset=preset, iterations=1, device="cpu", **small)
    found = plan((4, 4, 4), class_counts=[20, 10], preset=preset, **small)
    kept = open_archive(recording.path)
    num_weights = sum(math.prod(kept.spec(name)[1]) for name in kept.names if name.startswith("net."))
    assert found["krnet_bytes"] == 4 * num_weights and found["recorder"] == recording.recorder == "paper"
    settings = recording.info()["settings"]
    assert settings.pop("groups") == [8, 8, 4, 8, 2]
    assert found["settings"] == settings


def test_without_preset_the_plan_is_the_file_that_record_would_write() -> None:
    features, labels = relu_maps(600, (8, 6, 6))
    counts = labels.bincount().tolist()
    for budget, file_bytes in ((None, 6_000 + features.numel() // 8), ("30kB", 30_000)):
        found = plan((8, 6, 6), class_counts=counts, budget=budget)
        recording = krnet.record(features, labels, budget=budget, iterations=3, device="cpu")
        assert found["recorder"] == recording.recorder == "krnet"
        assert 0.85 * file_bytes < recording.nbytes <= found["file_bytes"] == file_bytes
        assert found["bits_per_value"] == 8 * file_bytes / features.numel()
        assert found["compression_ratio_bytes"] == features.nbytes / file_bytes
        assert (found["num_samples"], found["num_classes"], found["settings"]) == (600, len(counts), {})


def test_few_bits_and_codes_of_samples_count_in_the_plan():
    whole, few = (
        plan((16, 8, 8), class_counts=[500] * 4, recorder="paper", **more)["krnet_bytes"]
        for more in ({}, {"bits": 4.0})
    )
    assert few < whole / 5
    coded = plan((16, 8, 8), class_counts=[500] * 4, recorder="paper", code=8)
    assert coded["krnet_bytes"] >= whole + 4 * 8 * 2000 and coded["krnet_code_bytes"] >= 4 * 8 * 2000


def test_numbers_of_numpy_and_settings_of_every_recorder_can_be_planned() -> None:
    assert plan((4, 4, 4), np.int64(40)) == plan(np.array([4, 4, 4]), 40)
    for recorder in krnet.list_recorders():
        for shape in ((8, 6, 6), (1, 3, 3), (8,)):
            assert plan(shape, 40, recorder=recorder, budget="20kB")["file_bytes"] == 20_000


def test_vectors_can_be_planned() -> None:
    for recorder in ("krnet", "paper"):
        assert plan((512,), 1000, recorder=recorder)["feature_bytes"] == 1000 * 512 * 4
    assert plan((512,), 1000, recorder="paper")["settings"]["vector"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_counts": []}, "class_counts is empty"),
        ({"class_counts": None}, "give either num_samples or class_counts"),
        ({"num_samples": 5}, "give either num_samples or class_counts"),
        ({"class_counts": None, "num_samples": 0}, "num_samples is 0"),
        ({"class_counts": [2.5]}, "class_counts is 2.5; expected a whole number"),
        ({"class_counts": [5, 0]}, "class_counts is 0"),
        ({"shape": (4, 0)}, "shape is 0"),
        ({"preset": "cifar"}, "expected one of cifar100"),
        ({"recorder": "paper", "c00": 8}, "did you mean 'c0'"),
        ({"channels": 8}, "unknown setting 'channels'"),
        ({"recorder": "paper", "channels": 8}, "unknown setting 'channels'"),  # as the features have
        ({"c1": -5}, "c1 is -5; expected 0 to 4096"),
        ({"c1": -5, "budget": "20kB"}, "c1 is -5; expected 0 to 4096"),
        ({"iterations": 0}, "iterations is 0"),
        ({"recorder": "raw", "dtype": "float99"}, "dtype is 'float99'; expected one of float32, float16"),
        ({"shape": 64}, r"shape is 64; expected a list of whole numbers, such as \(64, 8, 8\)"),
        ({"shape": "64,8,8"}, "shape is '64,8,8'; expected a list"),
        ({"class_counts": 5}, "class_counts is 5; expected a list"),
        ({"c0": 8}, "c0 is given, a setting of recorder autoencoder or paper and not of krnet"),
    ],
)
def test_impossible_plans_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        plan(**{"shape": (4, 4, 4), "class_counts": [10], **arguments})
