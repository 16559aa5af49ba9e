"""What a step cannot do without is counted right, and the benchmark of speed measures what it says."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from krnet.bench import speed
from krnet.cli.app import app
from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import KRNet
from krnet.nn.sizing import preset_config

CPU = torch.device("cpu")


def test_the_papers_cifar_network_takes_about_a_hundred_million_products_a_sample():
    work = speed.step_cost(preset_config((64, 8, 8), "cifar100"), num_groups=50, batch=1000)
    assert work.flops / (3 * 2 * 1000) == pytest.approx(100e6, rel=0.02)


def test_flops_are_those_of_the_layers_written_out():
    config = NetworkConfig(channels=3, height=7, width=5, group_size=4, d0=6, c0=8, c1=10, stride=2)
    start, end = 4 * 3, 7 * 5
    products = 2 * 4 * 4 + 8 * 6 + 6 * 8 * start  # embedding and FC layers
    products += 8 * 8 * 9 * start  # eight depthwise convolutions before
    products += 8 * 10 * 25 * start  # the deconvolution, laid on every place of its input
    products += 4 * 10 * 10 * 9 * end + 10 * 3 * 9 * end  # four full convolutions after, and the last
    assert speed.step_cost(config, num_groups=2, batch=7).flops == 3 * 2 * 7 * products


def test_bytes_grow_with_the_batch_by_activations_and_not_by_weights():
    config = preset_config((64, 8, 8), "cifar100")
    one, two, three = (speed.step_cost(config, num_groups=50, batch=batch).bytes for batch in (1, 2, 3))
    with torch.device("meta"):
        num_weights = sum(p.numel() for p in KRNet(config, 50).parameters())
    assert three - two == two - one
    assert one - (two - one) == 32 * num_weights


def test_timed_takes_longer_for_more_work():
    small, large = torch.randn(16, 16), torch.randn(512, 512)
    assert speed.seconds_per_call(lambda: small @ small, CPU, 0.05) < speed.seconds_per_call(
        lambda: large @ large, CPU, 0.05
    )


@pytest.mark.slow
def test_bench_speed_reports_steps_floors_replay_and_time_to_target(tmp_path, monkeypatch):
    timed = speed.seconds_per_call
    monkeypatch.setattr(
        speed, "seconds_per_call", lambda run, device, at_least_s=0.5, repeats=3: timed(run, device, 0.05, 1)
    )
    # A rank of 2, so that the target is within reach at once.
    features = (torch.randn(60, 2) @ torch.randn(2, 4 * 3 * 3)).reshape(60, 4, 3, 3)
    np.save(tmp_path / "x.npy", features.numpy())
    arguments = ["bench", "speed", str(tmp_path / "x.npy"), "--preset", "none", "--targets", "0.3"]
    ran = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--json", "--quiet"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert set(found["steps"]) == {"adam", "muon", "muon 4 bits"}
    for step in found["steps"].values():
        assert step["milliseconds"] / step["floor_milliseconds"] == pytest.approx(step["times_floor"])
        assert 0 < step["floor_milliseconds"] < math.inf
    assert set(found["replay"]) == {"1", "256", "4096"}
    assert all(rate > 0 for ways in found["replay"].values() for rate in ways.values())
    reached = found["targets"]["0.3"]
    assert reached["stopped_by"] == "target" and reached["r2"] >= 0.3


def test_targets_without_features_are_a_usage_error():
    assert CliRunner().invoke(app, ["bench", "speed", "--targets", "0.9"]).exit_code == 2
