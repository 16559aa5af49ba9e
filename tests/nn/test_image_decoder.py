"""The decoder takes features of any shape, and begins with the mean image."""

from __future__ import annotations

import pytest
import torch

from krnet.nn.image_decoder import ImageDecoder


@pytest.mark.parametrize(
    "shape, image_shape",
    [
        ((8, 8, 8), (3, 32, 32)), ((5, 7, 7), (3, 30, 33)), ((2, 3, 50), (1, 12, 12)), ((16,), (1, 8, 8)),
        ((), (1, 8, 8)), ((4, 6), (3, 9, 5)), ((4, 1, 1), (3, 16, 16)), ((3, 40, 40), (1, 10, 10)),
    ],
)  # fmt: skip
def test_features_of_any_shape_become_images_that_begin_with_the_mean(shape, image_shape):
    decoder = ImageDecoder(shape, image_shape, 16)
    decoder.mean_image.copy_(torch.rand(image_shape))
    features = torch.randn(4, *shape)
    decoder.learn_scale(features)
    found = decoder(features)
    assert torch.equal(found, decoder.mean_image.expand(4, *image_shape))
    found.sum().backward()
    assert all(p.grad is not None for p in decoder.parameters())


def test_channels_of_any_scale_are_brought_to_one():
    decoder = ImageDecoder((2, 4, 4), (1, 8, 8), 16)
    features = torch.randn(500, 2, 4, 4) * torch.tensor([1e3, 1e-3]).view(2, 1, 1) + 7
    decoder.learn_scale(features)
    scaled = (features - decoder.mean) / decoder.std
    assert scaled.mean((0, 2, 3)).abs().max() < 1e-2 and (scaled.std((0, 2, 3)) - 1).abs().max() < 1e-2
