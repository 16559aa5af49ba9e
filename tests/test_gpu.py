"""What only a GPU can show: skipped without one."""

from __future__ import annotations

import pytest
import torch

import krnet
from krnet.bench.speed import StreamedFeed
from krnet.data import trivial_augment
from krnet.device import pick_device
from krnet.features.feed import Feed
from krnet.features.source import open_features
from learning_tools import settings_for, small_digits, small_tasks
from maps import relu_maps

pytestmark = pytest.mark.gpu
SETTINGS = {"recorder": "paper", "iterations": 300, "group_size": 64, "d0": 64, "c0": 64, "c1": 16, "stride": 1}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    features, labels = relu_maps(300, (16, 8, 8))
    path = tmp_path_factory.mktemp("gpu") / "a.krn"
    return features, labels, krnet.record(features, labels, out=path, device="cuda", **SETTINGS)


def test_a_fit_on_the_gpu_is_as_good_as_on_the_cpu(recorded):
    features, labels, recording = recorded
    on_cpu = krnet.record(features, labels, device="cpu", **SETTINGS)
    assert abs(recording.info()["r2"] - on_cpu.info()["r2"]) < 0.05


def test_plain_and_fused_fits_agree(recorded):
    features, labels, recording = recorded
    plain = krnet.record(features, labels, device="cuda", compile=False, **SETTINGS)
    assert abs(recording.info()["r2"] - plain.info()["r2"]) < 0.03


def test_fast_replay_adds_little_error_at_every_batch_size(recorded):
    _, _, recording = recorded
    exact = recording.replay(torch.arange(300))
    scale = exact.std()
    for size in (1, 7, 100, 300):
        for _ in range(4):  # from the third on it is a graph
            ids = torch.randperm(300)[:size]
            fast = recording.replay(ids, precision="fast")
            assert (fast - exact[ids.to(exact.device)]).std() < 0.03 * scale
            torch.testing.assert_close(recording.replay(ids), exact[ids.to(exact.device)], atol=1e-4, rtol=1e-4)


def test_a_loader_one_batch_ahead_gives_what_replay_gives(recorded):
    _, labels, recording = recorded
    for number, (values, found) in enumerate(recording.loader(64)):
        ids = torch.arange(300)[64 * number : 64 * number + 64]
        torch.testing.assert_close(values, recording.replay(ids), atol=1e-5, rtol=1e-5)
        assert torch.equal(found.cpu(), labels[ids])


def test_streamed_batches_are_what_lies_at_their_ids():
    values = torch.randn(500, 3, 4, 4)
    feed = StreamedFeed(open_features(values), 64, 0, pick_device("cuda"))
    for iteration in range(30):
        ids, found = feed.batch(iteration)
        assert torch.equal(found.cpu(), values[ids.cpu()])
    feed.close()
    resident = Feed(open_features(values), 64, 0, pick_device("cuda"))
    (ids,) = resident.batch(0)
    assert torch.equal(resident.values(ids).cpu(), values[ids.cpu()])


def test_a_fit_killed_and_resumed_on_the_gpu_goes_on_from_its_weights(tmp_path):
    features, labels = relu_maps(300, (16, 8, 8))
    stopped = False

    def stop(progress):
        nonlocal stopped
        if progress.unit == "iterations" and progress.done >= 200 and not stopped:
            stopped = True
            raise KeyboardInterrupt

    path = tmp_path / "b.krn"
    with pytest.raises(KeyboardInterrupt):
        krnet.record(features, labels, out=path, device="cuda", checkpoint_s=0.0, watch=stop, **SETTINGS)
    resumed = krnet.record(features, labels, out=path, device="cuda", resume=True, **SETTINGS)
    whole = krnet.record(features, labels, device="cuda", **SETTINGS)
    assert abs(resumed.info()["r2"] - whole.info()["r2"]) < 0.02


SMALL_FILES = {
    "compact": {"budget": 40_000, "iterations": 200},
    "compact, values": {"budget": 120_000, "components": 0, "iterations": 100},
    "few bits": {"bits": 4.0, "code": 8, **SETTINGS},
    "autoencoder": {"recorder": "autoencoder", "budget": 60_000, "iterations": 200},
    "autoencoder, floats": {"recorder": "autoencoder", "iterations": 200, "code_width": 32, "d0": 64, "c0": 32},
    "pca": {"recorder": "pca", "budget": 40_000},
    "pq": {"recorder": "pq", "parts": 4, "bits": 4},
}


@pytest.mark.parametrize("options", SMALL_FILES.values(), ids=SMALL_FILES.keys())
def test_a_file_made_on_either_device_is_as_good_and_reads_the_same_on_both(tmp_path, options):
    features, labels = relu_maps(600, (16, 8, 8))
    ids, r2 = torch.randperm(600), []
    for device in ("cuda", "cpu"):
        path = tmp_path / f"{device}.krn"
        r2.append(krnet.record(features, labels, out=path, device=device, **options).info()["r2"])
        on_gpu, on_cpu = krnet.open(path, "cuda").replay(ids).cpu(), krnet.open(path, "cpu").replay(ids)
        assert (on_gpu - on_cpu).abs().max() <= 1e-4 * on_cpu.abs().max()
        assert path.stat().st_size <= options.get("budget", 1 << 30)
    assert abs(r2[0] - r2[1]) < 0.05


def test_a_compact_network_is_fitted_through_a_head_on_the_gpu(tmp_path):
    features, labels = relu_maps(300, (16, 8, 8))
    head = torch.nn.Sequential(torch.nn.Conv2d(16, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    found = krnet.record(features, labels, device="cuda", budget=40_000, iterations=50, head=head, gamma=1e-2)
    assert found.info()["r2"] > 0.5


@pytest.mark.parametrize("recorder", ["krnet", "pca", "quantized", "transform", "pq"])
def test_a_recording_grows_on_the_gpu_and_what_it_held_stays_as_it_is(tmp_path, recorder):
    features, _ = relu_maps(900, (16, 8, 8))
    options = {"recorder": recorder, "device": "cuda"} | ({"iterations": 100} if recorder == "krnet" else {})
    krnet.record(features[:600], out=tmp_path / "a.krn", budget=90_000, room=900, **options)
    krnet.record(features, out=tmp_path / "b.krn", budget=90_000, start=tmp_path / "a.krn", **options)
    assert (tmp_path / "b.krn").stat().st_size <= 90_000
    before, after = (krnet.open(tmp_path / name).replay(torch.arange(600)) for name in ("a.krn", "b.krn"))
    assert torch.equal(before, after)
    found = krnet.open(tmp_path / "b.krn", "cuda").replay(torch.arange(600, 900)).cpu()
    assert (found - features[600:]).square().mean() < 0.6 * features.var()


def test_trivial_augment_on_the_gpu_is_that_on_the_cpu():
    images = torch.randint(256, (280, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    draws = trivial_augment.draw(280, seed=0, iteration=0)
    draws[:, 0] = torch.arange(280) % len(trivial_augment.OPERATIONS)
    on_cpu, on_gpu = (trivial_augment.apply(images.to(d), draws.to(d)).cpu() for d in ("cpu", "cuda"))
    different = (on_cpu.int() - on_gpu.int()).abs() > 1
    assert different.double().mean() < 0.002  # a pixel between two others may be rounded to either


def test_the_strong_base_task_and_a_solved_head_learn_on_the_gpu(tmp_path):
    digits = small_digits()
    parts = (digits.train.images, digits.train.labels, digits.test.images, digits.test.labels)
    data = krnet.data.from_arrays(*parts, mean=digits.mean, std=digits.std, pad=1, flip=True, layout="NCHW")
    settings = {**settings_for("kril"), "base": "strong", "base_epochs": 30, "base_lr": 0.1, "head": "solved"}
    settings |= {"plastic": False, "random_features": 256, "recorder": "krnet", "budget": 60_000}
    settings |= {"through_recorder": True, "recorder_iterations": 60}
    run = krnet.learn("kril", data, small_tasks(), out=tmp_path, settings=settings, device="cuda")
    assert run.accuracy[0] > 0.5 and run["last"] > 0.3
    labels = krnet.load_run(tmp_path, device="cuda").predict(data.test.images)
    assert torch.equal(labels, run.predict(data.test.images))


def test_a_decoder_sees_as_much_of_the_images_on_the_gpu_as_on_the_cpu():
    images = small_digits().train.images
    features = torch.nn.functional.avg_pool2d(images.float(), 2)
    recording = krnet.record(features, recorder="raw")
    settings = {"iterations": 100, "width": 16, "batch_size": 32}
    on_gpu, on_cpu = (krnet.invert(recording, images, device=d, **settings)["replayed"] for d in ("cuda", "cpu"))
    assert abs(on_gpu["ssim"] - on_cpu["ssim"]) < 0.05
    assert on_gpu["ssim"] > 0.6  # the mean image: 0.38
