"""Recorder fp8: a byte a value, and the error that the format has."""

from __future__ import annotations

import pytest
import torch

import krnet
from krnet.io import archive
from krnet.recorders.base import get_recorder


def make(**settings) -> tuple[torch.Tensor, krnet.Recording]:
    features = torch.randn(400, 6, 5) * torch.logspace(-4, 4, 6)[:, None]  # channels of very different sizes
    return features, krnet.record(features, recorder="fp8", **settings)


@pytest.mark.parametrize(("format", "step"), [("e4m3", 1 / 16), ("e5m2", 1 / 8)])
def test_a_value_is_off_by_half_a_step_of_the_format_at_most(format, step):
    features, recording = make(format=format)
    largest = features.abs().amax((0, 2))[:, None]
    limit = torch.maximum(step * features.abs(), 2**-10 * largest / 100)  # near zero the steps are even
    assert ((recording[:] - features).abs() <= 1.001 * limit).all()


def test_a_value_takes_one_byte_and_a_channel_eight():
    features, recording = make()
    kept = archive.open_archive(recording.path)
    own = {name: kept.tensor(name).nbytes for name in kept.names if not name.startswith("probe")}
    assert own == {"values": features.numel(), "low": 24, "high": 24}


def test_replays_keep_to_the_range_of_their_channel():
    features, recording = make(format="e5m2")
    low, high = (edge((0, 2))[:, None] for edge in (features.amin, features.amax))
    replayed = recording[:]
    assert (replayed <= high).all() and (replayed >= low).all()


def test_forged_bytes_that_are_no_number_are_refused(tmp_path):
    features = torch.rand(20, 3)
    krnet.record(features, recorder="fp8", out=tmp_path / "x.krn")
    kept = archive.open_archive(tmp_path / "x.krn")
    tensors = {name: kept.tensor(name) for name in kept.names}
    tensors["values"][5, 1] = 0x7F  # NaN
    archive.write(tmp_path / "x.krn", tensors, kept.metadata)
    with pytest.raises(krnet.errors.NotARecordingError, match="values that are not finite"):
        krnet.open(tmp_path / "x.krn")[:]


def test_its_size_is_known_before_the_fit():
    recorder, (features, recording) = get_recorder("fp8"), make()
    assert recorder.least_bytes(400, (6, 5), {}) == features.numel() + 48 <= recording.nbytes
