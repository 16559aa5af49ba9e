"""Neighbours vote as counted by hand, and a row of work `embed` holds them and names its points."""

from __future__ import annotations

import csv
from collections import Counter

import numpy as np
import pytest
import torch

import krnet
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.reproduce.neighbours import embed, neighbour_accuracy, own_nearest
from krnet.reproduce.works.base import get_work
from krnet.reproduce.works.embed import choose_samples

EMBED = get_work("embed")
REAL = {"features": "digits", "classes": 5, "points": 40, "neighbours": 3}
REPLAYED = REAL | {"recorder": "pca", "budget": "12kB"}


def by_hand(queries, candidates, labels, k):
    """Slow and obvious: sort all others by distance, count the classes of the first k."""
    right = 0
    for i, query in enumerate(queries):
        others = [j for j in range(len(labels)) if j != i]
        others.sort(key=lambda j: float((query - candidates[j]).square().sum()))
        classes = [int(labels[j]) for j in others[:k]]
        votes = Counter(classes)
        best = max(votes.values())
        chosen = next(c for c in classes if votes[c] == best)  # of equals the one with the nearest
        right += chosen == int(labels[i])
    return right / len(labels)


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_neighbours_vote_as_counted_by_hand(k):
    labels = torch.randint(0, 4, (60,))
    real = torch.randn(60, 5) + labels[:, None]
    replayed = real + 0.5 * torch.randn(60, 5)
    assert neighbour_accuracy(real, real, labels, k) == pytest.approx(by_hand(real, real, labels, k))
    assert neighbour_accuracy(replayed, real, labels, k) == pytest.approx(by_hand(replayed, real, labels, k))


def test_a_sample_is_no_neighbour_of_itself_and_the_nearest_class_wins_a_tie():
    labels = torch.tensor([0, 1, 0, 1])
    line = torch.tensor([[0.0], [1.0], [3.0], [10.0]])
    # Those at 0, 3 and 10 see one of each class, and the nearer is of the other; that at 1 sees the other class twice.
    assert neighbour_accuracy(line, line, labels, 2) == 0
    assert neighbour_accuracy(line, line, torch.tensor([0, 0, 1, 0]), 2) == 0.5  # ties that those at 0 and 1 win
    assert own_nearest(line, line) == 1
    assert own_nearest(line, line.flip(0)) == 0


def test_t_sne_of_the_same_features_and_seed_is_the_same_and_keeps_clusters_apart():
    centres = 20 * torch.eye(3, 60)
    features = centres.repeat_interleave(15, 0) + torch.randn(45, 60)
    points = embed(features, 1)
    assert np.array_equal(points, embed(features, 1))
    labels = torch.arange(3).repeat_interleave(15)
    assert neighbour_accuracy(torch.from_numpy(points), torch.from_numpy(points), labels, 5) == 1


def test_a_row_of_replays_holds_the_accuracy_of_neighbours_and_names_its_points(place, digits):
    row = EMBED.perform("test", REPLAYED, 0, place)
    metrics = row["metrics"]
    ids = choose_samples(digits.labels, 5, 40, 0)
    (path,) = place.shared.glob("recordings/*/points/pca-12000.krn")
    real = digits.source().read(ids).flatten(1)
    replayed = krnet.open(path).replay(ids).flatten(1)
    labels = digits.labels[ids]
    assert metrics["neighbour_accuracy"] == pytest.approx(by_hand(replayed, replayed, labels, 3))
    assert metrics["real_neighbour_accuracy"] == pytest.approx(by_hand(real, real, labels, 3))
    assert metrics["cross_neighbour_accuracy"] == pytest.approx(by_hand(replayed, real, labels, 3))
    assert metrics["bytes"] == path.stat().st_size and 0 < metrics["r2"] < 1
    assert EMBED.value(row) == 100 * metrics["neighbour_accuracy"]
    with open(ledger.default_path().parent / metrics["points_file"], newline="") as file:
        points = list(csv.DictReader(file))
    assert [int(point["label"]) for point in points] == labels.tolist()
    assert [point["class"] for point in points] == [digits.class_names[label] for label in labels]
    assert all(np.isfinite([float(point["x"]), float(point["y"])]).all() for point in points)


def test_real_features_are_shown_without_a_recorder_and_of_the_same_samples(place):
    real, replayed = EMBED.perform("test", REAL, 0, place), EMBED.perform("test", REPLAYED, 0, place)
    assert real["metrics"]["neighbour_accuracy"] == real["metrics"]["cross_neighbour_accuracy"]
    assert real["metrics"]["neighbour_accuracy"] == replayed["metrics"]["real_neighbour_accuracy"]
    assert real["metrics"]["points_file"] != replayed["metrics"]["points_file"]
    assert EMBED.matches(real, REAL, 0) and EMBED.matches(replayed, REPLAYED, 0)
    assert not EMBED.matches(real, REPLAYED, 0) and not EMBED.matches(replayed, REAL, 0)
    assert not EMBED.matches(replayed, REPLAYED, 1) and not EMBED.matches(replayed, REPLAYED | {"points": 50}, 0)
    assert not EMBED.matches(replayed, REPLAYED | {"budget": "13kB"}, 0)


def test_samples_are_equally_many_of_each_class_and_follow_the_seed():
    labels = torch.arange(8).repeat(30)
    ids = choose_samples(labels, 4, 40, 0)
    assert sorted(Counter(labels[ids].tolist()).values()) == [10] * 4
    assert len(set(ids.tolist())) == 40
    assert torch.equal(ids, choose_samples(labels, 4, 40, 0))
    assert not torch.equal(ids, choose_samples(labels, 4, 40, 1))
    with pytest.raises(SettingError, match="classes is 9; the features are of 8"):
        choose_samples(labels, 9, 40, 0)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"budget": "3MB"}, "budget: given without a recorder"),
        ({"recorder": "pca", "clases": 5}, "unknown setting 'clases'"),
        ({"points": 2001}, "points is 2001; expected 10 to 2000"),
        ({"neighbours": 8}, "neighbours is 8; expected 1 to 7"),
        ({"recorder": "pca", "preset": "imagenet"}, "recorder pca has no use for it"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        EMBED.check(REAL | settings)
