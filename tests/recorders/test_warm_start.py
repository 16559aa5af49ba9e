"""A recording that starts from an earlier one knows at once what that one knew."""

from typing import Any

import pytest
import torch

import krnet
from krnet.errors import InputError, ResumeError
from maps import relu_maps
from watchers import raise_at

SIZES: dict[str, Any] = {"recorder": "paper", "d0": 32, "c0": 8, "c1": 8, "group_size": 16}
STILL: dict[str, Any] = {"iterations": 1, "lr": 0.0, "muon_lr": 0.0}


@pytest.fixture(scope="module")
def maps():
    """Class by class, as tasks bring them: 60 samples of three classes, then 30 of three more."""
    features, labels = relu_maps(90, (6, 5, 4), num_classes=6)
    order = torch.argsort(labels, stable=True)
    return features[order], labels[order]


@pytest.fixture(scope="module")
def earlier(maps, tmp_path_factory):
    features, labels = maps
    out = tmp_path_factory.mktemp("earlier") / "earlier.krn"
    return krnet.record(features[:60], labels[:60], out=out, iterations=200, **SIZES)


def same(replayed, expected):
    return (replayed - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("factor", [0.1, 3.0])
def test_old_samples_are_known_before_the_first_update_even_if_new_ones_widen_the_range(maps, earlier, factor):
    features, labels = maps
    more = torch.cat([features[:60], factor * features[60:]])
    later = krnet.record(more, labels, start=earlier, **STILL)
    assert same(later[:60], earlier[:])


def test_old_groups_are_found_by_class_wherever_their_samples_now_stand(maps, earlier):
    features, labels = maps
    order = torch.cat([torch.arange(60, 90), torch.arange(60)])  # the new samples first
    later = krnet.record(features[order], labels[order], start=earlier.path, **STILL)
    assert same(later[30:], earlier[:])


def test_without_labels_groups_are_taken_over_in_their_order(maps):
    features, _ = maps
    first = krnet.record(features[:40], iterations=5, **SIZES)
    later = krnet.record(features, start=first, **STILL)
    assert same(later[:32], first[:32])  # two full groups of 16


def test_a_warm_start_gets_further_than_a_cold_one_in_as_many_updates(maps, earlier):
    features, labels = maps
    warm, cold = (
        krnet.record(features, labels, iterations=40, **settings).info()["r2"]
        for settings in ({"start": earlier}, SIZES)
    )
    assert warm > cold + 0.1


def test_other_shapes_and_sizes_are_refused(maps, earlier):
    features, labels = maps
    with pytest.raises(InputError, match="same shape"):
        krnet.record(features[:, :3], labels, start=earlier, iterations=1)
    with pytest.raises(InputError, match="has c0 8, not 16"):
        krnet.record(features, labels, start=earlier, iterations=1, recorder="paper", c0=16)
    with pytest.raises(InputError, match="preset"):
        krnet.record(features, labels, start=earlier, iterations=1, preset="cifar100")


def test_a_fit_is_not_resumed_from_another_start(maps, earlier, tmp_path, monkeypatch):
    features, labels = maps
    out = tmp_path / "later.krn"

    stop = raise_at(10, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        krnet.record(features, labels, start=earlier, iterations=20, checkpoint_s=0, out=out, watch=stop)
    with pytest.raises(ResumeError, match="start"):
        krnet.record(features, labels, iterations=20, checkpoint_s=0, out=out, resume=True, **SIZES)


def test_a_damaged_earlier_recording_is_refused_and_nothing_is_written(maps, earlier, tmp_path):
    features, labels = maps
    damaged = bytearray(earlier.path.read_bytes())
    damaged[len(damaged) // 2] ^= 1  # among the weights
    (tmp_path / "damaged.krn").write_bytes(damaged)
    with pytest.raises(krnet.RecordingError):
        krnet.record(features, labels, start=tmp_path / "damaged.krn", iterations=1, out=tmp_path / "later.krn")
    assert not (tmp_path / "later.krn").exists()
