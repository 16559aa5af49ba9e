"""TrivialAugment against Pillow's operations, one image at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from krnet.data import trivial_augment
from krnet.data.trivial_augment import MAX_ANGLE, MAX_BLEND, MAX_SHEAR, MAX_TRANSLATION, NUM_STRENGTHS, OPERATIONS

Image = pytest.importorskip("PIL.Image", reason="needs Pillow, the oracle of these operations")


def by_pillow(image, name, share, signed):
    from PIL import ImageEnhance, ImageOps

    centre = (image.width - 1) / 2 + 0.5  # Pillow samples at the middle of a pixel

    def affine(a, b, c, d):  # (x', y') = (a x + b y, c x + d y), seen from the centre
        x0, y0 = centre - a * centre - b * centre, centre - c * centre - d * centre
        return image.transform(image.size, Image.Transform.AFFINE, (a, b, x0, c, d, y0))

    blend = 1 + MAX_BLEND * signed
    return {
        "identity": lambda: image,
        "shear_x": lambda: affine(1, MAX_SHEAR * signed, 0, 1),
        "shear_y": lambda: affine(1, 0, MAX_SHEAR * signed, 1),
        "translate_x": lambda: image.transform(image.size, 0, (1, 0, -MAX_TRANSLATION * signed, 0, 1, 0)),
        "translate_y": lambda: image.transform(image.size, 0, (1, 0, 0, 0, 1, -MAX_TRANSLATION * signed)),
        "rotate": lambda: image.rotate(np.degrees(MAX_ANGLE * signed)),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(blend),
        "colour": lambda: ImageEnhance.Color(image).enhance(blend),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(blend),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(blend),
        "posterize": lambda: ImageOps.posterize(image, 8 - round(6 * share)),
        "solarize": lambda: ImageOps.solarize(image, round(255 * (1 - share), 9)),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
    }[name]()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_pillows(name):
    generator = torch.Generator().manual_seed(0)
    images = (torch.rand(12, 3, 32, 32, generator=generator) ** 2 * 200 + 20).to(torch.uint8)
    draws = trivial_augment.draw(12, seed=0, iteration=0)
    draws[:, 0] = OPERATIONS.index(name)
    found = trivial_augment.apply(images, draws)
    assert found.dtype == torch.uint8 and found.shape == images.shape
    num_wrong = 0
    for image, result, (_, strength, sign) in zip(images, found, draws.tolist(), strict=True):
        share = strength / (NUM_STRENGTHS - 1)
        expected = by_pillow(Image.fromarray(image.permute(1, 2, 0).numpy()), name, share, -share if sign else share)
        error = (torch.from_numpy(np.array(expected)).permute(2, 0, 1).int() - result.int()).abs()
        num_wrong += int((error > 1).sum())  # Pillow truncates where we round
    # A pixel that lies between two others may be rounded to either.
    assert num_wrong <= (0.005 * found.numel() if name in trivial_augment.MOVES else 0)


def test_draws_depend_on_seed_and_iteration_and_have_all_operations_and_strengths():
    draws = trivial_augment.draw(5000, seed=1, iteration=2)
    assert torch.equal(draws, trivial_augment.draw(5000, seed=1, iteration=2))
    for other in (trivial_augment.draw(5000, 1, 3), trivial_augment.draw(5000, 2, 2)):
        assert not torch.equal(draws, other)
    for column, limit in enumerate((len(OPERATIONS), NUM_STRENGTHS, 2)):
        assert draws[:, column].unique().tolist() == list(range(limit))


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_images_of_any_number_of_channels_are_changed(channels):
    images = torch.randint(256, (28, channels, 9, 7), dtype=torch.uint8)
    draws = trivial_augment.draw(28, seed=0, iteration=0)
    draws[:, 0] = torch.arange(28) % len(OPERATIONS)
    found = trivial_augment.apply(images, draws)
    assert found.shape == images.shape
    assert torch.equal(found[draws[:, 0] == 0], images[draws[:, 0] == 0]) and not torch.equal(found, images)


def test_each_image_has_its_own_operation():
    images = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8)
    draws = trivial_augment.draw(6, seed=3, iteration=0)
    together = trivial_augment.apply(images, draws)
    alone = [trivial_augment.apply(images[i : i + 1], draws[i : i + 1]) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))
