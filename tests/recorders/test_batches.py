"""Batches of recorder krnet: sized by values where samples are large, by samples where they are not."""

from math import prod

import pytest
import torch

import krnet
from krnet.errors import ResumeError
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import scan
from krnet.recorders.autoencoder.recorder import AutoencoderFit
from krnet.recorders.base import Job
from krnet.recorders.compact import codes
from krnet.recorders.compact.axes_fit import CompactFit, learn_axes
from krnet.recorders.compact.codes import BATCH_VALUES, CodesFit, laplace_bits
from krnet.recorders.compact.network import CompactConfig
from krnet.recorders.fit import MIN_BATCH_SAMPLES, NetworkFit, batch_size, wanted_batch_size
from krnet.recorders.paper.recorder import KRNetFit
from krnet.train.config import BATCH_SAMPLES, FitConfig
from maps import relu_maps
from watchers import of_fits

LARGE = [(96, 16, 16), (512, 8, 8), (256, 32, 32), (64, 56, 56), (4096,)]


def job_of(shape, num_samples, **fit):
    source = open_features(torch.zeros(1).expand(num_samples, *shape))
    return Job(source, Samples(num_samples, shape, None), None, FitConfig(**fit), torch.device("cpu"))


def trainee_of(features, **settings):
    source, shape = open_features(features), tuple(features.shape[1:])
    job = Job(source, Samples(len(source), shape, None), scan(source), FitConfig(), torch.device("cpu"))
    config = CompactConfig(step=0.3, **settings)
    return CompactFit(job, config, learn_axes(job, config.grid(shape)))


@pytest.mark.parametrize("shape", [*LARGE, (64, 8, 8), (16, 32, 32), (3, 224, 224), (64,), ()])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_has_a_bounded_number_of_values_at_any_map_size_and_is_as_large_as_that_allows(shape, device):
    most_values = BATCH_VALUES[device]
    found = batch_size(job_of(shape, 5000), most_values)
    assert found * prod(shape) <= most_values
    assert found == BATCH_SAMPLES or (found + 1) * prod(shape) > most_values


def test_a_gpu_keeps_the_batch_of_cifar_maps():
    assert batch_size(job_of((64, 8, 8), 25_000), BATCH_VALUES["cuda"]) == 1000


def test_the_largest_samples_still_come_a_few_at_a_time():
    assert batch_size(job_of((2048, 64, 64), 500), BATCH_VALUES["cpu"]) == MIN_BATCH_SAMPLES


@pytest.mark.parametrize("given", [8, 1000, 3000])
def test_a_batch_size_that_is_given_is_kept(given):
    assert batch_size(job_of((96, 16, 16), 9000, batch_size=given), BATCH_VALUES["cpu"]) == given


def test_a_fit_of_krnet_steps_through_batches_of_that_size_and_the_rivals_keep_1000_samples(monkeypatch):
    monkeypatch.setattr(CodesFit, "batch_values", {"cpu": 40 * 512})
    trainee = trainee_of(relu_maps(300, (8, 8, 8))[0], components=4, c1=8)
    assert len(trainee.feed.ids(0)) == 40
    for rival in (NetworkFit, KRNetFit, AutoencoderFit):
        assert wanted_batch_size(trainee.job, rival.batch_values.get("cpu")) == 1000


def test_bits_are_aimed_at_as_small_batches_show_them(monkeypatch):
    """Few samples seem to have fewer bits. Aiming at the bits of all at once would make the file too large."""
    monkeypatch.setattr(CodesFit, "batch_values", {"cpu": 8 * 288})
    trainee = trainee_of(relu_maps(600, (8, 6, 6))[0], components=60, c1=0)
    whole = laplace_bits(trainee.codes.abs().mean(0) / trainee.step_size).sum()
    batches = torch.stack([CodesFit.bits(trainee, trainee.codes[trainee.feed.ids(i)]) for i in range(75)]).mean()
    found = trainee.mean_bits(torch.arange(600))
    assert abs(found - batches) < 0.005 * batches
    assert whole > 1.02 * batches


def test_large_maps_in_small_batches_fill_their_budget_as_others_do(monkeypatch):
    features, _ = relu_maps(600, (8, 6, 6))
    sizes = []
    for num_samples in (200, 8):
        monkeypatch.setattr(CodesFit, "batch_values", {"cpu": num_samples * 288})
        sizes.append(krnet.record(features, budget=16_000, iterations=25, c1=8, block=(8, 6, 6), device="cpu").nbytes)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.03)


def test_a_fit_in_batches_of_another_size_is_not_resumed(monkeypatch, tmp_path):
    features, _ = relu_maps(300, (6, 4, 4))
    options = {"budget": 6000, "iterations": 30, "device": "cpu", "out": tmp_path / "a.krn", "checkpoint_s": 0}

    def stop(progress):
        if progress.done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        krnet.record(features, **options, watch=of_fits(stop))
    monkeypatch.setattr(CodesFit, "batch_values", {"cpu": 40 * 96})
    with pytest.raises(ResumeError, match="made with batch_size 1000; this run has 40"):
        krnet.record(features, **options, resume=True)


@pytest.mark.parametrize("dct", [False, True])
def test_a_part_of_the_columns_stands_for_all_when_the_file_of_large_maps_is_measured(monkeypatch, dct):
    features = torch.randn(200, 6, 4, 4, generator=torch.Generator().manual_seed(0))
    features = torch.nn.functional.interpolate(features, (16, 16), mode="bilinear")
    features += 0.3 * torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    settings = {"components": 6, "c1": 0, "block": (6, 1, 1), "dct": dct, "most_bytes": 100_000}
    whole = trainee_of(features, **settings)
    monkeypatch.setattr(codes, "MEASURED_COLUMNS", 6 * 64)  # a quarter of them
    some = trainee_of(features, **settings)
    assert whole.measured_columns is None and len(some.measured_columns) == 6 * 64
    assert float(some.target_bits) == pytest.approx(float(whole.target_bits), rel=0.03)
