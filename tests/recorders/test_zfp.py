"""Recorder zfp: errors within its tolerance, any tolerance, and nothing read beyond what a block can need."""

from __future__ import annotations

import pytest
import torch

import krnet
from krnet.errors import NotARecordingError
from krnet.io import archive
from krnet.recorders.zfp import ZfpCodec, ZfpConfig
from maps import relu_maps

zfpy = pytest.importorskip("zfpy", reason="needs zfpy: pip install 'krnet[rivals]'")


def smooth(number: int = 150) -> torch.Tensor:
    return relu_maps(number, (5, 9, 7))[0]  # no side is a multiple of 4


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [0.5, 0.07, 0.003])
def test_errors_are_within_the_tolerance(step, dims):
    features = smooth()
    recording = krnet.record(features, recorder="zfp", step=step, dims=dims)
    span = (features.amax((0, 2, 3)) - features.amin((0, 2, 3)))[:, None, None]
    assert ((recording[:] - features).abs() <= step * span).all()


def test_the_tolerance_may_be_any_number():
    """zfp's own is rounded down to a power of two: two of these would be alike."""
    features = smooth()
    made = [krnet.record(features, recorder="zfp", step=step, dims=3) for step in (0.13, 0.17, 0.22)]
    assert made[0].nbytes > made[1].nbytes > made[2].nbytes and made[0].r2 > made[1].r2 > made[2].r2


def test_the_dimensions_with_the_fewest_bytes_are_chosen():
    features = smooth()
    sizes = {d: krnet.record(features, recorder="zfp", step=0.05, dims=d).nbytes for d in (1, 2, 3, 4)}
    chosen = krnet.record(features, recorder="zfp", step=0.05)
    assert sizes[chosen.settings["dims"]] == min(sizes.values()) < max(sizes.values())


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x00", bytes(range(256)) * 3])
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_bytes_that_zfp_did_not_write_give_finite_values_or_a_named_error(content, dims):
    config, low, high = ZfpConfig(dims=dims), torch.zeros(3), torch.ones(3)
    codec = ZfpCodec(config, (3, 5, 2), low, high)
    try:
        found = codec.decode(content, 6)
    except NotARecordingError:
        return
    assert found.shape == (6, 3, 5, 2) and found.isfinite().all() and 0 <= found.min() <= found.max() <= 1


def test_a_block_of_more_bytes_than_its_array_can_need_is_refused():
    codec = ZfpCodec(ZfpConfig(dims=2), (8,), torch.zeros(8), torch.ones(8))
    most = len(codec.encode(torch.rand(4, 8) * 1e-3)) + 1000
    with pytest.raises(NotARecordingError, match="expected at most"):
        codec.decode(b"\xff" * most, 4)


def test_what_zfp_writes_at_its_finest_is_within_what_is_accepted():
    noise = torch.rand(64, 6, 5, generator=torch.Generator().manual_seed(0))
    for dims in (1, 2, 3):
        codec = ZfpCodec(ZfpConfig(dims=dims, step=1e-7), (6, 5), torch.zeros(6), torch.ones(6))
        assert (codec.decode(codec.encode(noise), 64) - noise).abs().max() < 1e-6


def test_a_budget_is_used():
    recording = krnet.record(smooth(400), recorder="zfp", budget="60kB")
    assert 58_000 < recording.nbytes <= 60_000


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    path = krnet.record(smooth(), recorder="zfp", out=tmp_path / "x.krn").path
    kept = archive.open_archive(path)
    tensors = {name: kept.tensor(name) for name in kept.names}
    tensors["lengths"] = (tensors["lengths"].long() + 1).to(torch.uint32)
    archive.write(path, tensors, kept.metadata)
    with pytest.raises(NotARecordingError, match="bytes in all"):
        krnet.open(path)[0]
