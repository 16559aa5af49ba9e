"""Recording images instead of maps: what the row says of pixels, and of the maps that the trunk makes of them."""

from __future__ import annotations

import pytest
import torch

import krnet
from krnet.errors import SettingError
from krnet.reproduce.works.base import get_work

IMAGES = get_work("images")
SETTINGS = {"features": "digits", "recorder": "pca", "budget": "8kB"}


def r2_of(replayed, real):
    replayed, real = replayed.double(), real.double()
    low = real.amin((0, 2, 3))[:, None, None]
    span = real.amax((0, 2, 3))[:, None, None] - low
    span[span == 0] = 1
    replayed, real = (replayed - low) / span, (real - low) / span
    return (1 - (replayed - real).square().sum() / (real - real.mean()).square().sum()).item()


def test_the_numbers_of_a_row_are_those_of_the_definitions(place, digits):
    row = IMAGES.perform("test", SETTINGS, 0, place)
    (path,) = place.shared.glob("recordings/*/points/pca-8000.krn")
    replayed = krnet.open(path).replay(torch.arange(200))
    metrics = row["metrics"]
    assert metrics["bytes"] == path.stat().st_size == row["bytes"]["pca-8000.krn"] <= 8000
    assert metrics["image_r2"] == pytest.approx(r2_of(replayed, digits.images), abs=1e-4)
    mean, std = (torch.tensor(values)[:, None, None] for values in (digits.mean, digits.std))
    with torch.no_grad():
        maps = digits.trunk((replayed.clamp(0, 255) / 255 - mean) / std)
    assert metrics["r2"] == pytest.approx(r2_of(maps, digits.source().read(torch.arange(200))), abs=1e-4)
    right = (digits.head(maps).argmax(1) == digits.labels).double().mean().item()
    assert metrics["replay_accuracy"] == pytest.approx(right, abs=1e-9)
    assert row["settings"]["shape"] == list(digits.images.shape[1:])
    assert IMAGES.value(row) == metrics["r2"]


def test_exact_images_give_the_exact_maps(place):
    metrics = IMAGES.perform("test", {"features": "digits", "recorder": "raw"}, 0, place)["metrics"]
    assert metrics["image_r2"] == 1 and metrics["r2"] == pytest.approx(1, abs=1e-6)
    assert metrics["replay_accuracy"] == metrics["real_accuracy"]


def test_a_row_of_images_is_none_of_maps(place):
    row = IMAGES.perform("test", SETTINGS, 0, place)
    assert IMAGES.matches(row, SETTINGS, 0) and not IMAGES.matches(row, SETTINGS, 1)
    assert not IMAGES.matches(row, SETTINGS | {"budget": "5kB"}, 0)
    assert not get_work("record").matches(row, SETTINGS, 0)
    maps = get_work("record").perform("test", SETTINGS | {"budget": "9kB"}, 0, place)
    assert not IMAGES.matches(maps, SETTINGS | {"budget": "9kB"}, 0)


def test_a_recorder_that_needs_images_beside_maps_is_refused():
    with pytest.raises(SettingError, match="recorder is images, which needs images and trunk"):
        IMAGES.check({"features": "digits", "recorder": "images", "budget": "8kB"})
