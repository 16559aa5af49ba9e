"""A row of work `invert` holds what a decoder sees in replays, beside the guess of who knows only the class."""

from __future__ import annotations

import pytest

from krnet.io import ledger
from krnet.report.figure import Entry
from krnet.report.views import draw
from krnet.reproduce.works.base import get_work

INVERT = get_work("invert")
REAL = {"features": "digits", "samples": 100, "updates": 3, "width": 16}
REPLAYED = REAL | {"recorder": "pca", "budget": "12kB"}
MEAN = REAL | {"reads": "class"}


def test_rows_of_replays_of_real_features_and_of_class_means_match_their_settings_and_are_drawn(place):
    real, replayed, mean = (INVERT.perform("test", own, 0, place) for own in (REAL, REPLAYED, MEAN))
    assert real["metrics"]["class_mean_ssim"] == replayed["metrics"]["class_mean_ssim"] == mean["metrics"]["ssim"]
    assert real["metrics"]["ssim"] != replayed["metrics"]["ssim"]
    assert real["metrics"]["num_train"] == real["metrics"]["num_test"] == 50
    (path,) = place.shared.glob("recordings/*/points/pca-12000.krn")
    assert replayed["metrics"]["bytes"] == path.stat().st_size and "bytes" not in real["metrics"]
    pictures = [row["metrics"]["picture"] for row in (real, replayed, mean)]
    assert len(set(pictures)) == 3
    assert all((ledger.default_path().parent / picture).is_file() for picture in pictures)
    assert INVERT.value(replayed) == replayed["metrics"]["ssim"]
    assert INVERT.value(replayed, unit="dB") == replayed["metrics"]["psnr"]
    for row, own in ((real, REAL), (replayed, REPLAYED), (mean, MEAN)):
        assert [INVERT.matches(row, other, 0) for other in (REAL, REPLAYED, MEAN)] == [
            other is own for other in (REAL, REPLAYED, MEAN)
        ]
        assert not INVERT.matches(row, own, 1) and not INVERT.matches(row, own | {"updates": 4}, 0)
    assert not INVERT.matches(replayed, REPLAYED | {"budget": "13kB"}, 0)
    assert not list(place.folder.glob("*.ckpt"))
    entries = [Entry(series="pca", row=replayed), Entry(series="none", row={**real, "metrics": {}})]
    drawn = draw("inversion", "figure", "title", entries)
    assert [(p.x, p.y) for p in drawn.points] == [("pca", replayed["metrics"]["ssim"])]
    assert "Not drawn: 1 row" in drawn.text


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"budget": "3MB"}, "budget: given without a recorder"),
        ({"reads": "labels"}, "reads is 'labels'"),
        ({"reads": "class", "recorder": "pca"}, "needs no recording; leave out recorder"),
        ({"recorder": "pca", "updatse": 5}, "unknown setting 'updatse'"),
        ({"width": 4}, "width is 4; expected 8 to 4096"),
        ({"updates": 0}, "iterations is 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        INVERT.check(REAL | settings)
