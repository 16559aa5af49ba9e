"""Which images are kept, and how they come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from krnet.learners.exemplars import Exemplars, class_means, herd, herd_classes, nearest_mean_scores
from krnet.train.classifier import Images
from learning_tools import small_digits

CPU = torch.device("cpu")


def slow_herd(features, number):
    """As iCaRL's Algorithm 4 reads, one candidate after the other."""
    rows = [row / np.linalg.norm(row) for row in features.double().numpy()]
    mean = sum(rows) / len(rows)
    chosen = []
    while len(chosen) < min(number, len(rows)):
        errors = {}
        for place in range(len(rows)):
            if place not in chosen:
                together = [rows[i] for i in [*chosen, place]]
                errors[place] = np.linalg.norm(mean - sum(together) / len(together))
        chosen.append(min(errors, key=errors.get))
    return chosen


@pytest.mark.parametrize("seed", range(4))
def test_herding_is_greedy_mean_matching_on_unit_vectors(seed):
    features = torch.randn(30, 5, generator=torch.Generator().manual_seed(seed)) + 0.5
    assert herd(features, 12).tolist() == slow_herd(features, 12)
    lengths = torch.rand(30, 1, generator=torch.Generator().manual_seed(seed)) + 0.1
    assert herd(features * lengths, 12).tolist() == slow_herd(features, 12)


def test_herding_ranks_so_that_fewer_are_the_first_of_more():
    features = torch.randn(25, 4)
    assert herd(features, 5).tolist() == herd(features, 20).tolist()[:5]


def test_herding_chooses_nothing_twice_and_at_most_everything():
    features = torch.randn(3, 4).repeat(3, 1)
    assert sorted(herd(features, 50).tolist()) == list(range(9))


def test_herded_images_have_nearly_the_mean_of_all():
    features = torch.randn(200, 16).abs()
    unit = torch.nn.functional.normalize(features, dim=1)
    error = lambda places: (unit[places].mean(0) - unit.mean(0)).norm()  # noqa: E731
    assert error(herd(features, 10)) < 0.5 * min(error(torch.randperm(200)[:10]) for _ in range(20))


def test_choice_goes_class_by_class_with_the_best_first():
    features, labels = torch.randn(40, 6), torch.randint(3, (40,)) + 5
    places = herd_classes(features, labels, 4)
    assert labels[places].tolist() == [5] * 4 + [6] * 4 + [7] * 4
    for number, label in enumerate((5, 6, 7)):
        own = (labels == label).nonzero()[:, 0]
        assert places[4 * number : 4 * number + 4].tolist() == own[slow_herd(features[own], 4)].tolist()


def stored(counts):
    """Exemplars whose one pixel is their rank."""
    ranks = torch.cat([torch.arange(n) for n in counts]).to(torch.uint8)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Exemplars.none((1, 1, 1), CPU).append(ranks.view(-1, 1, 1, 1), labels)


def test_shrinking_drops_the_last_of_every_class():
    small = stored([5, 2, 4]).truncate(3)
    assert small.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert small.pixels.flatten().tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert len(stored([5, 2, 4]).truncate(5)) == 11 and len(Exemplars.none((1, 8, 8), CPU).truncate(3)) == 0


def test_exemplars_are_copies():
    pixels = torch.zeros(2, 1, 1, 1, dtype=torch.uint8)
    kept = Exemplars.none((1, 1, 1), CPU).append(pixels, torch.tensor([0, 1]))
    pixels.fill_(9)
    assert kept.pixels.sum() == 0


def test_bytes_are_those_of_pixels_and_labels():
    kept = Exemplars.none((3, 32, 32), CPU).append(
        torch.zeros(20, 3, 32, 32, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64)
    )
    assert kept.storage_bytes() == {"exemplars": 20 * 3072, "exemplar_labels": 20 * 4}


@pytest.mark.parametrize("augmented", [False, True])
def test_a_task_and_the_exemplars_are_seen_alike_each_image_once_an_epoch(augmented):
    digits = small_digits()
    images, labels = Images(digits, digits.train.images, CPU), digits.train.labels
    ids, kept_ids = torch.arange(100, 130), torch.tensor([3, 7, 11, 12, 40, 41])
    kept = Exemplars.none(digits.image_shape, CPU).append(images.pixels[kept_ids], labels[kept_ids])
    batches = kept.batches_with(images, labels, ids, 12, 5, augmented=augmented)
    assert batches.num_samples == 36
    found = [batches.tensors(*batches.inputs(i)) for i in range(3)]
    seen = torch.cat([x for x, _ in found]).flatten(1), torch.cat([y for _, y in found])
    both = torch.cat([ids, kept_ids])
    assert seen[1].sort().values.tolist() == labels[both].sort().values.tolist()
    plain = images.take(both).flatten(1)
    distance = (seen[0][:, None] - plain).norm(dim=2)
    if augmented:
        # Shifted ones are no longer at distance 0; some of both kinds are shifted.
        assert (distance.min(0).values[:30] > 1e-3).any() and (distance.min(0).values[30:] > 1e-3).any()
    else:
        nearest_place = distance.argmin(1)
        assert sorted(nearest_place.tolist()) == list(range(36)) and distance.min(1).values.max() < 1e-4
        assert torch.equal(labels[both[nearest_place]], seen[1])


def test_means_and_distances_are_those_of_unit_vectors():
    features, labels = torch.randn(12, 5), torch.tensor([0, 1, 2] * 4)
    means = class_means(features, labels, 3)
    for label in range(3):
        rows = [row / row.norm() for row in features[labels == label]]
        mean = sum(rows) / len(rows)
        torch.testing.assert_close(means[label], mean / mean.norm())
    scores = nearest_mean_scores(features, means)
    for row, found in zip(features, scores):
        torch.testing.assert_close(found, -torch.stack([(row / row.norm() - mean).norm() for mean in means]))
