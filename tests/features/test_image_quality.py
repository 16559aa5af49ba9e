"""SSIM and PSNR agree with their formulas, written out window by window in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from krnet.features.image_quality import LEAST_MSE, psnr, ssim


def ssim_by_hand(x, y):
    """Slow and obvious: Wang et al. 2004, a loop over windows of one channel, in float64."""
    size = min(11, len(x) - 1 + len(x) % 2), min(11, len(x[0]) - 1 + len(x[0]) % 2)
    weights = [
        [math.exp(-((i - size[0] // 2) ** 2 + (j - size[1] // 2) ** 2) / (2 * 1.5**2)) for j in range(size[1])]
        for i in range(size[0])
    ]
    total = sum(map(sum, weights))
    found = []
    for top in range(len(x) - size[0] + 1):
        for left in range(len(x[0]) - size[1] + 1):
            cells = [
                (weights[i][j] / total, x[top + i][left + j], y[top + i][left + j])
                for i in range(size[0])
                for j in range(size[1])
            ]
            mean_x, mean_y = sum(w * a for w, a, _ in cells), sum(w * b for w, _, b in cells)
            var_x = sum(w * (a - mean_x) ** 2 for w, a, _ in cells)
            var_y = sum(w * (b - mean_y) ** 2 for w, _, b in cells)
            both = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in cells)
            c1, c2 = 0.01**2, 0.03**2
            found.append(
                (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
            )
    return sum(found) / len(found)


@pytest.mark.parametrize("shape", [(3, 16, 13), (1, 8, 8), (1, 7, 12)])
def test_ssim_is_that_of_a_loop_over_windows(shape):
    images = torch.rand(2, *shape)
    others = (images + 0.2 * torch.randn_like(images)).clamp(0, 1)
    found = ssim(images, others)
    for image, other, own in zip(images.double(), others.double(), found, strict=True):
        slow = [ssim_by_hand(x.tolist(), y.tolist()) for x, y in zip(image, other, strict=True)]
        assert own.item() == pytest.approx(sum(slow) / len(slow), abs=1e-4)


def test_equal_images_have_ssim_1_and_inverted_ones_less_than_0():
    images = torch.rand(3, 3, 32, 32)
    assert torch.allclose(ssim(images, images), torch.ones(3), atol=1e-5)
    assert (ssim(images, 1 - images) < 0).all()


def test_psnr_is_that_of_the_formula_and_ends_at_rounding():
    images, others = torch.rand(2, 3, 5, 4), torch.rand(2, 3, 5, 4)
    for image, other, found in zip(images, others, psnr(images, others), strict=True):
        pairs = list(zip(image.flatten().tolist(), other.flatten().tolist(), strict=True))
        mse = sum((255 * a - 255 * b) ** 2 for a, b in pairs) / len(pairs)
        assert found.item() == pytest.approx(10 * math.log10(255**2 / mse), rel=1e-4)
    assert psnr(images, images)[0].item() == pytest.approx(-10 * math.log10(LEAST_MSE))
    assert psnr(torch.zeros(1, 1, 4, 4), torch.full((1, 1, 4, 4), 0.1)).item() == pytest.approx(20, abs=1e-3)


def test_ssim_has_gradients_that_lead_to_the_image():
    image = torch.rand(1, 1, 16, 16)
    guess = torch.full((1, 1, 16, 16), 0.5, requires_grad=True)
    before = ssim(guess, image)
    before.sum().backward()
    with torch.no_grad():
        assert ssim(guess + 0.5 * guess.grad, image) > before
