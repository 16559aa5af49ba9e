"""Crops, flips and normalisation against versions that loop over every pixel."""

import pytest
import torch

from krnet.data.augment import centre, crop_flip, draw, standardise


def slow_crop_flip(images, draws, pad, crop=None):
    num_images, channels, height, width = images.shape
    rows, columns = (crop, crop) if crop else (height, width)
    out = torch.zeros(num_images, channels, rows, columns, dtype=torch.uint8)
    for b in range(num_images):
        dy, dx, flip = draws[b].tolist()
        for c in range(channels):
            for y in range(rows):
                for x in range(columns):
                    row, column = y + dy - pad, (columns - 1 - x if flip else x) + dx - pad
                    if 0 <= row < height and 0 <= column < width:
                        out[b, c, y, x] = images[b, c, row, column]
    return out


@pytest.mark.parametrize(("shape", "pad"), [((3, 6, 5), 2), ((1, 8, 8), 1), ((2, 4, 7), 0), ((1, 3, 3), 4)], ids=str)
def test_crop_flip_is_padding_cropping_and_mirroring_pixel_by_pixel(shape, pad):
    images = torch.randint(1, 256, (16, *shape), dtype=torch.uint8)
    draws = draw(16, pad, True, seed=3, iteration=5)
    found = crop_flip(images, draws, pad)
    assert found.dtype == torch.uint8
    assert torch.equal(found, slow_crop_flip(images, draws, pad))


def test_the_middle_crop_without_a_flip_is_the_image_itself():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(crop_flip(images, torch.tensor([[2, 2, 0]]).expand(4, 3), 2), images)
    assert torch.equal(crop_flip(images, torch.tensor([[2, 2, 1]]).expand(4, 3), 2), images.flip(3))


@pytest.mark.parametrize(("size", "crop", "pad"), [(8, 4, 0), (9, 5, 0), (8, 6, 2), (5, 5, 1)])
def test_a_window_is_cut_out_at_the_drawn_place_and_mirrored_pixel_by_pixel(size, crop, pad):
    images = torch.randint(1, 256, (40, 3, size, size), dtype=torch.uint8)
    shift = pad + (size - crop) // 2
    draws = draw(40, shift, True, seed=1, iteration=0)
    found = crop_flip(images, draws, pad, crop)
    assert found.shape == (40, 3, crop, crop) and found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, slow_crop_flip(images, draws, pad, crop))
    assert set(draws[:, 0].tolist()) == set(range(2 * shift + 1))  # from one border to the other


@pytest.mark.parametrize(("size", "crop"), [(8, 4), (9, 5), (5, 5)])
def test_the_middle_draw_is_the_window_in_the_centre(size, crop):
    images = torch.randint(256, (4, 3, size, size), dtype=torch.uint8)
    border = (size - crop) // 2
    found = centre(images, crop)
    assert torch.equal(found, images[:, :, border : size - border, border : size - border])
    assert torch.equal(found, crop_flip(images, torch.tensor([[border, border, 0]]).expand(4, 3), 0, crop))
    assert centre(images, None) is images


def test_images_are_not_changed_and_may_lie_in_any_order_in_memory():
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    before, draws = images.clone(), draw(5, 2, True, 0, 0)
    found = crop_flip(images, draws, 2)
    assert torch.equal(images, before)
    assert torch.equal(crop_flip(images.contiguous(memory_format=torch.channels_last), draws, 2), found)


def test_draws_depend_on_seed_and_iteration_only():
    first = draw(64, 4, True, seed=1, iteration=2)
    torch.manual_seed(99)
    torch.rand(10)
    assert torch.equal(draw(64, 4, True, seed=1, iteration=2), first)
    assert first.shape == (64, 3) and first.dtype == torch.int64
    others = [(1, 3), (2, 2), (2, 1), (0, 3), (3, 0), (12, 0)]
    for seed, iteration in others:
        assert not torch.equal(draw(64, 4, True, seed, iteration), first)


def test_drawing_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draw(64, 4, True, 0, 0)
    assert torch.equal(torch.rand(3), expected)


def test_crops_are_the_same_with_and_without_flips():
    assert torch.equal(draw(64, 4, True, 7, 8)[:, :2], draw(64, 4, False, 7, 8)[:, :2])


def test_every_crop_is_drawn_equally_often():
    draws = torch.cat([draw(1000, 2, True, 0, iteration) for iteration in range(100)])
    counts = torch.bincount(draws[:, 0] * 10 + draws[:, 1] * 2 + draws[:, 2], minlength=50).double()
    # 2,000 expected of each of the 50; the chi-squared statistic has mean 49 and standard deviation 9.9.
    assert len(counts) == 50 and ((counts - 2000) ** 2 / 2000).sum() < 100


def test_without_padding_and_flips_nothing_is_drawn():
    assert draw(100, 0, False, 0, 0).tolist() == [[0, 0, 0]] * 100
    assert set(draw(100, 0, True, 0, 0)[:, 2].tolist()) == {0, 1}


def test_normalise_is_the_formula_per_channel():
    images = torch.randint(256, (4, 3, 5, 6), dtype=torch.uint8)
    mean, std = (0.5, 0.25, 0.1), (0.2, 0.5, 1.0)
    found = standardise(images, torch.tensor(mean), torch.tensor(std))
    assert found.dtype == torch.float32
    for c in range(3):
        expected = (images[:, c].double() / 255 - mean[c]) / std[c]
        torch.testing.assert_close(found[:, c].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_memory_format_of_crops_lasts_through_normalise():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    found = standardise(crop_flip(images, draw(4, 1, True, 0, 0), 1), torch.zeros(3), torch.ones(3))
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "pad", "crop"), [(32, 4, None), (40, 0, 32)])
def test_a_cuda_graph_of_it_replays_what_the_cpu_does(size, pad, crop):
    images = torch.randint(256, (32, 3, size, size), dtype=torch.uint8)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    device_images, draws, device_mean, device_std = (
        t.cuda() for t in (images, draw(32, 4, True, 0, 0), mean, std)
    )  # fmt: skip
    standardise(crop_flip(device_images, draws, pad, crop), device_mean, device_std)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = standardise(crop_flip(device_images, draws, pad, crop), device_mean, device_std)
    for iteration in range(3):
        draws.copy_(draw(32, 4, True, 0, iteration))
        graph.replay()
        expected = standardise(slow_crop_flip(images, draws.cpu(), pad, crop), mean, std)
        torch.testing.assert_close(out.cpu(), expected)
