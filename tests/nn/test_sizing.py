"""Networks are counted without being built, and chosen to fit what they store."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krnet.errors import SettingError
from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import Decoder, KRNet
from krnet.nn.sizing import count_parameters, default_parameters, map_shape, preset_config, sizes_for

MIB = 2**20
SMALLEST_C0 = 8


def test_the_published_imagenet_network_has_the_size_the_paper_prints():
    config = preset_config((256, 14, 14), "imagenet-published")
    assert 4 * count_parameters(config) / MIB == pytest.approx(327.9, abs=0.2)
    with torch.device("meta"):
        decoder = Decoder(config, 2 * config.group_size)
    assert 4 * sum(p.numel() for p in decoder.parameters()) / MIB == pytest.approx(325.8, abs=0.2)


@pytest.mark.parametrize("shape", [(6, 5, 4), (10,), (2, 3)])
def test_the_count_is_that_of_the_built_network_with_its_group_vectors(shape):
    config = sizes_for(shape, [40, 3])
    assert count_parameters(config, 5) == sum(p.numel() for p in KRNet(config, 5).parameters())
    assert count_parameters(config, 5) - count_parameters(config) == 5 * 2 * config.group_size


def test_a_network_too_large_for_memory_is_counted_at_once():
    config = NetworkConfig(channels=2048, height=64, width=64, d0=2**16, c0=2**16, c1=2**16)
    started = time.process_time()  # a busy machine takes none of it away
    assert count_parameters(config, 10**6) > 10**13
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((), (1, 1, 1)),
        ((384,), (384, 1, 1)),
        ((5, 7), (5, 1, 7)),
        ((3, 17, 11), (3, 17, 11)),
        ((2, 3, 4, 5), (2, 12, 5)),
    ],
)
def test_samples_of_any_shape_are_laid_out_as_a_map(shape, expected):
    assert map_shape(shape) == expected


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 40), max_size=4).map(tuple),
    class_counts=st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    num_parameters=st.none() | st.integers(1, 10**6),
)
def test_the_chosen_network_stays_within_its_budget_unless_it_is_the_smallest(shape, class_counts, num_parameters):
    config = sizes_for(shape, class_counts, num_parameters)
    budget = num_parameters or default_parameters(sum(class_counts) * math.prod(shape))
    assert (config.channels, config.height, config.width) == map_shape(shape)
    assert config.vector == (len(shape) <= 1)
    assert count_parameters(config) <= budget or config.c0 == SMALLEST_C0
    assert 32 <= config.group_size <= 512


def test_a_budget_is_used_and_not_only_kept():
    for budget in (10**6, 10**7, 5 * 10**7):
        assert count_parameters(sizes_for((64, 8, 8), [500] * 100, budget)) > 0.75 * budget


def test_the_number_of_weights_follows_the_number_of_values():
    assert default_parameters(80_000_000) == 10_000_000
    assert default_parameters(10**12) == 100_000_000
    counts = [default_parameters(10**n) for n in range(3, 13)]
    assert counts == sorted(counts)
    assert all(count < 10**n / 2 for count, n in zip(counts, range(3, 13)))  # fewer than it stores, in any case


def test_given_sizes_are_kept_and_the_others_solved_around_them():
    config = sizes_for((16, 8, 8), [100], d0=48, c1=12, group_size=64, last_norm=True)
    assert (config.d0, config.c1, config.group_size, config.last_norm) == (48, 12, 64, True)
    config = preset_config((16, 8, 8), "cifar100", c0=16)
    assert (config.c0, config.d0) == (16, 1024)


def test_unknown_presets_and_settings_are_refused_with_those_known():
    with pytest.raises(SettingError, match="preset is 'cifar10'; expected one of cifar100"):
        preset_config((16, 8, 8), "cifar10")
    with pytest.raises(SettingError, match="unknown setting 'groupsize'; did you mean 'group_size'"):
        preset_config((16, 8, 8), "cifar100", groupsize=32)
    with pytest.raises(SettingError, match="unknown setting 'strid'; did you mean 'stride'"):
        sizes_for((16, 8, 8), [100], strid=2)
