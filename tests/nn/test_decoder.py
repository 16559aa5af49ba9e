"""A vector becomes a feature map of any size, with the layers of the paper."""

import math

import pytest
import torch
from torch import nn

from krnet.errors import SettingError
from krnet.nn.layers import NEGATIVE_SLOPE
from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import BasicBlock, Decoder
from krnet.nn.sizing import preset_config


def config(channels: int, height: int, width: int, **changes) -> NetworkConfig:
    sizes = {"channels": channels, "height": height, "width": width, "d0": 8, "c0": 4, "c1": 6}
    return NetworkConfig(**sizes | {"group_size": 4} | changes)


def layers(module: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, kinds)]


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("height, width", [(1, 1), (7, 7), (8, 8), (17, 11), (1, 30), (13, 2)])
def test_the_output_has_the_size_asked_for_and_starts_from_its_share_of_it(height, width, stride):
    made = Decoder(config(3, height, width, stride=stride), 8)
    assert made.start_shape == (4, math.ceil(height / stride), math.ceil(width / stride))
    assert made(torch.randn(2, 8)).shape == (2, 3, height, width)


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("last_norm", [False, True])
@pytest.mark.parametrize("conv", ["depthwise", "full"])
def test_any_number_of_channels_can_be_put_out(channels, last_norm, conv):
    made = Decoder(config(channels, 3, 3, last_norm=last_norm, conv_before=conv, conv_after=conv), 8)
    assert made(torch.randn(2, 8)).isfinite().all()


def test_vectors_skip_the_spatial_layers():
    made = Decoder(config(384, 1, 1, vector=True), 8)
    assert made(torch.randn(2, 8)).shape == (2, 384)
    assert not layers(made, nn.Conv2d, nn.ConvTranspose2d, BasicBlock)
    assert all(p.dim() <= 2 for p in made.parameters())


def test_maps_pass_the_layers_of_the_paper():
    made = Decoder(config(3, 8, 8, stride=2), 8)
    assert [len(layers(part, BasicBlock)) for part in (made.before, made.after)] == [4, 2]
    (deconv,) = layers(made, nn.ConvTranspose2d)
    assert (deconv.kernel_size, deconv.stride, deconv.padding) == ((5, 5), (2, 2), (2, 2))
    assert (deconv.in_channels, deconv.out_channels) == (4, 6)
    assert [(fc.in_features, fc.out_features) for fc in layers(made, nn.Linear)] == [(8, 8), (8, 4 * 4 * 4)]
    assert {norm.num_groups for norm in layers(made, nn.GroupNorm)} == {2}
    assert all(conv.kernel_size == (3, 3) for conv in layers(made, nn.Conv2d))


def test_convolutions_are_depthwise_or_full_as_set():
    made = Decoder(config(6, 4, 4, conv_before="depthwise", conv_after="full"), 8)
    assert {conv.groups for conv in layers(made.before, nn.Conv2d)} == {4}
    assert {conv.groups for conv in layers(made.after, nn.Conv2d) + layers(made.output, nn.Conv2d)} == {1}
    made = Decoder(config(6, 4, 4, conv_before="full", conv_after="depthwise"), 8)
    assert {conv.groups for conv in layers(made.before, nn.Conv2d)} == {1}
    assert {conv.groups for conv in layers(made.after, nn.Conv2d) + layers(made.output, nn.Conv2d)} == {6}


def test_a_basic_block_adds_its_input():
    block, x = BasicBlock(4, "full"), torch.randn(2, 4, 5, 5)
    nn.init.zeros_(block.norm2.weight)
    torch.testing.assert_close(block(x), torch.where(x < 0, NEGATIVE_SLOPE * x, x))


def test_the_last_norm_gives_every_sample_the_same_variance_and_its_absence_does_not():
    samples = torch.randn(4, 6, 8, 8) * torch.tensor([0.1, 1, 10, 100]).view(4, 1, 1, 1)
    for last_norm in (True, False):
        output = Decoder(config(2, 8, 8, last_norm=last_norm), 8).output
        spread = output.norm(output.layer(samples)).std((1, 2, 3))
        assert (spread.max() / spread.min() < 1.1) == last_norm


@pytest.mark.parametrize("last_norm", [True, False])
def test_a_started_decoder_puts_out_about_the_mean_and_deviation_of_each_channel(last_norm):
    mean, std = torch.tensor([0.2, 0.5, 0.9, 0.7]), torch.tensor([0.01, 0.1, 0.02, 0.05])
    made = Decoder(config(4, 8, 8, c0=16, c1=16, d0=32, last_norm=last_norm), 8)
    made.output.start_from(mean, std)
    found = made(torch.randn(200, 8))
    torch.testing.assert_close(found.mean((0, 2, 3)), mean, atol=0.1, rtol=0)
    assert (found.std((0, 2, 3)) / std - 1).abs().max() < 1


def test_presets_are_the_papers_table():
    names = ("group_size", "d0", "c0", "c1", "stride", "start_size")
    for preset, shape, expected in (
        ("cifar100", (64, 8, 8), (512, 1024, 512, 64, 1, (8, 8))),
        ("imagenet", (256, 14, 14), (512, 1536, 1024, 256, 2, (7, 7))),
    ):
        for name in (preset, f"{preset}-published"):
            chosen = preset_config(shape, name)
            assert tuple(getattr(chosen, field) for field in names) == expected


@pytest.mark.parametrize(
    "change, message",
    [
        ({"d0": 7}, "d0 is 7.*even"),
        ({"d0": 0}, "d0 is 0.*1 to"),
        ({"c0": 3}, "c0 is 3.*even"),
        ({"group_size": 5}, "group_size is 5.*even"),
        ({"group_size": 2}, "group_size is 2"),
        ({"d0": 2}, "d0 is 2.*4 or more"),
        ({"height": 1, "width": 1, "c1": 2}, "c1 is 2; .* more than 2 channels"),
        ({"height": 1, "width": 1, "channels": 2, "last_norm": True}, "last_norm is on"),
        ({"stride": 6}, "stride is 6; expected 1 to 5"),
        ({"c1": 2.5}, "c1 is 2.5; expected a whole number"),
        ({"c1": True}, "c1 is True; expected a whole number"),
        ({"conv_after": "wide"}, "conv_after is 'wide'; expected one of depthwise, full"),
    ],
)
def test_sizes_that_no_network_can_have_are_refused(change, message):
    with pytest.raises(SettingError, match=message):
        config(**{"channels": 3, "height": 3, "width": 3} | change)
