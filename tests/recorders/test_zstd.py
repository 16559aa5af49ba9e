"""Recorder zstd: the exact values in fewer bytes, and no memory on the word of a frame."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

import krnet
from krnet.errors import BudgetError, NotARecordingError, SettingError
from krnet.recorders.zstd import ZstdCodec, ZstdConfig
from maps import relu_maps

zstandard = pytest.importorskip("zstandard", reason="needs zstandard: pip install 'krnet[rivals]'")


def test_replays_are_the_features_in_fewer_bytes_than_raw():
    features = relu_maps(300)[0]
    recording, raw = (krnet.record(features, recorder=name) for name in ("zstd", "raw"))
    assert torch.equal(recording[:], features) and recording.nbytes < 0.7 * raw.nbytes


def test_bytes_of_one_significance_lie_side_by_side():
    features = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    plain = len(zstandard.compress(features.numpy().tobytes(), 9))
    assert len(ZstdCodec(ZstdConfig(), (500,)).encode(features)) < 0.98 * plain


def test_samples_of_several_blocks_are_read_in_any_order():
    features = relu_maps(300)[0]
    recording = krnet.record(features, recorder="zstd", block_size=7)
    ids = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(recording[ids], features[ids]) and torch.equal(recording[[8, 8, 6]], features[[8, 8, 6]])


def test_float16_is_taken_where_float32_exceeds_the_budget():
    features = torch.rand(400, 50)
    sizes = [krnet.record(features, recorder="zstd", dtype=dtype).nbytes for dtype in ("float16", "float32")]
    for budget, dtype in ((sizes[1] + 2000, "float32"), (sizes[1] - 2000, "float16")):
        assert krnet.record(features, recorder="zstd", budget=budget).settings["dtype"] == dtype
    with pytest.raises(BudgetError, match=r"takes \d+ bytes"):
        krnet.record(features, recorder="zstd", budget=sizes[0] // 2)


def test_values_beyond_float16_are_refused():
    with pytest.raises(SettingError, match="float16, which ends at 65504"):
        krnet.record(torch.full((5, 3), 1e6), recorder="zstd", dtype="float16")


def test_a_frame_that_names_another_size_gets_no_memory():
    codec = ZstdCodec(ZstdConfig(), (100,))
    bomb = zstandard.compress(bytes(400_000_000), 1)
    tracemalloc.start()
    try:
        with pytest.raises(NotARecordingError, match="a block of 400000000 bytes; expected 1600"):
            codec.decode(bomb, 4)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"", b"x" * 100, zstandard.compress(bytes(1600))[:-3]])
def test_bytes_that_zstd_did_not_write_are_refused(content):
    with pytest.raises(NotARecordingError, match="zstd cannot read"):
        ZstdCodec(ZstdConfig(), (100,)).decode(content, 4)


def test_a_frame_of_the_right_size_that_holds_a_nan_is_refused():
    codec = ZstdCodec(ZstdConfig(), (4,))
    content = codec.encode(torch.tensor([[1.0, 2.0, float("nan"), 3.0]]))
    with pytest.raises(NotARecordingError, match="not finite"):
        codec.decode(content, 1)
