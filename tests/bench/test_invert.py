"""The attack: what features hold of an image comes back, what they do not hold does not, and wrong inputs are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import krnet
from krnet.bench.inversion import ClassMeans, InversionConfig, Pixels, judge, learn_decoder, split_halves
from krnet.errors import DataError, FeatureError, InputError, SettingError
from krnet.train import loop

CPU = torch.device("cpu")
SHORT = {"iterations": 40, "width": 16, "batch_size": 16, "lr": 5e-3, "device": "cpu"}


@pytest.fixture(scope="module")
def images():
    """Coloured squares at one of four places: 120 images of 3x8x8, in classes that say nothing of either."""
    random = torch.Generator().manual_seed(0)
    made = torch.zeros(120, 3, 8, 8, dtype=torch.uint8)
    for number, image in enumerate(made):
        top, left = 4 * (number % 4 // 2), 4 * (number % 2)
        image[:, top : top + 4, left : left + 4] = torch.randint(60, 255, (3, 1, 1), generator=random)
    return made


LABELS = torch.arange(120) // 30


def features_of(images):
    """Maps (3, 2, 2) that hold the colour and the place."""
    return torch.nn.functional.avg_pool2d(images.float() / 255, 4)


class Pool(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.avg_pool2d(x, 4)


@pytest.fixture(scope="module")
def recording(images, tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "x.krn"
    return krnet.record(features_of(images), LABELS, recorder="raw", out=path)


def test_halves_divide_each_class_follow_the_seed_and_share_no_sample():
    halves = split_halves(LABELS, 120, None, 0)
    assert sorted([*halves.train.tolist(), *halves.test.tolist()]) == list(range(120))
    assert LABELS[halves.train].bincount().tolist() == LABELS[halves.test].bincount().tolist() == [15] * 4
    assert torch.equal(halves.test, split_halves(LABELS, 120, None, 0).test)
    assert not torch.equal(halves.test, split_halves(LABELS, 120, None, 1).test)
    few = split_halves(LABELS, 120, 40, 0)
    assert LABELS[few.train].bincount().tolist() == LABELS[few.test].bincount().tolist() == [5] * 4
    assert len(split_halves(None, 7, None, 0).test) == 3
    with pytest.raises(InputError, match="leave none to judge"):
        split_halves(torch.arange(9), 9, None, 0)


def test_class_means_are_those_of_the_training_half(images):
    halves = split_halves(LABELS, 120, None, 0)
    means = ClassMeans(Pixels(lambda ids: images[ids], (3, 8, 8)), halves, LABELS, CPU)
    for label in range(4):
        own = [images[i].double() / 255 for i in halves.train.tolist() if LABELS[i] == label]
        (found,) = means.images(torch.tensor([30 * label]))
        assert torch.allclose(found.double(), sum(own) / len(own), atol=1e-6)
    overall = (images[halves.train].double() / 255).mean(0)
    assert torch.allclose(means.overall.double(), overall, atol=1e-6)


def test_true_images_are_judged_perfect_and_values_beyond_white_are_clamped(images):
    pixels = Pixels(lambda ids: images[ids], (3, 8, 8))
    ids = torch.arange(9)
    white = Pixels(lambda ids: torch.full((len(ids), 3, 8, 8), 255, dtype=torch.uint8), (3, 8, 8))
    assert judge(lambda ids: pixels.floats(ids, CPU), pixels, ids, CPU).ssim == pytest.approx(1)
    assert judge(lambda ids: torch.full((len(ids), 3, 8, 8), 3.0), white, ids, CPU).ssim == pytest.approx(1)


def test_features_that_hold_the_image_give_it_away_and_constant_ones_do_not(images, recording, tmp_path):
    found = krnet.invert(
        recording.path, images.numpy(), features=features_of(images), pictures=tmp_path / "seen", **SHORT
    )
    assert found["real"]["ssim"] == pytest.approx(found["replayed"]["ssim"])  # raw replays are the features
    assert found["replayed"]["ssim"] > found["class_mean"]["ssim"] + 0.1 > found["mean"]["ssim"]
    assert found["replayed"]["psnr"] > found["class_mean"]["psnr"] + 3
    assert (found["num_train"], found["num_test"]) == (60, 60)
    with Image.open(found["picture"]) as picture:
        assert picture.text["rows"].split("; ")[-1] == "mean of the class"
        first = np.asarray(picture)[::8, ::8][:8, :8].transpose(2, 0, 1)
    assert np.array_equal(first, images[split_halves(LABELS, 120, None, 0).test[0]].numpy())
    blind = krnet.record(torch.ones(120, 4), LABELS, recorder="raw")
    without = krnet.invert(blind, images, **SHORT)
    assert without["replayed"]["ssim"] < found["replayed"]["ssim"] - 0.1 and without["real"] is None


def test_the_same_seed_gives_the_same_numbers_and_the_callers_random_numbers_stay(images, recording):
    state = torch.random.get_rng_state()
    short = SHORT | {"iterations": 5}
    first, second = (krnet.invert(recording, images, **short)["replayed"] for _ in range(2))
    assert (first["ssim"], first["psnr"]) == (second["ssim"], second["psnr"])
    assert torch.equal(state, torch.random.get_rng_state())
    assert krnet.invert(recording, images, **short, seed=1)["replayed"]["ssim"] != first["ssim"]


def test_a_trunk_makes_the_real_features_and_channels_may_come_last(images, recording):
    short = SHORT | {"iterations": 5}
    by_trunk = krnet.invert(recording, images.permute(0, 2, 3, 1).numpy(), trunk=Pool(), **short)
    by_file = krnet.invert(recording, images, features=features_of(images), **short)
    assert by_trunk["real"]["ssim"] == pytest.approx(by_file["real"]["ssim"], abs=1e-4)


def test_a_decoder_that_was_stopped_goes_on_from_its_checkpoint_and_ends_the_same(images, tmp_path):
    pixels, halves = Pixels(lambda ids: images[ids], (3, 8, 8)), split_halves(LABELS, 120, None, 0)
    features, config = features_of(images), InversionConfig(iterations=30, width=16, batch_size=16)
    path = tmp_path / "decoder.ckpt"

    def learn(read, checkpoint):
        mean = torch.zeros(3, 8, 8)
        learned = learn_decoder(
            read, (3, 2, 2), pixels, halves.train, mean, config, CPU, name="x", checkpoint=checkpoint, watch=stop
        )
        return learned.guess(features)

    def stop(progress):
        if path.name in armed and progress.done == 20:
            armed.clear()
            raise KeyboardInterrupt

    armed = set[str]()
    whole = learn(lambda ids: features[ids], None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("krnet.bench.inversion.Checkpoint", lambda p, f: loop.Checkpoint(p, f, 0.0))
        armed.add(path.name)
        with pytest.raises(KeyboardInterrupt):
            learn(lambda ids: features[ids], path)
        assert path.exists()
        assert torch.equal(learn(lambda ids: features[ids], path), whole)


def test_features_too_many_to_hold_are_read_batch_by_batch_with_the_same_result(images, recording, monkeypatch):
    short = SHORT | {"iterations": 8}
    held = krnet.invert(recording, images, **short)["replayed"]
    monkeypatch.setattr("krnet.bench.inversion.HELD_BYTES", 10)
    assert krnet.invert(recording, images, **short)["replayed"]["ssim"] == held["ssim"]


@pytest.mark.parametrize(
    "error, message, change",
    [
        (DataError, "119 images; the recording holds 120 samples", lambda i: {"images": i[:119]}),
        (DataError, "images are torch.float32; expected uint8", lambda i: {"images": i.float()}),
        (DataError, r"images\[:, None\]", lambda i: {"images": i[:, 0]}),
        (FeatureError, "holds 120 of", lambda i: {"features": features_of(i)[:, :2]}),
        (FeatureError, "with a trunk, also mean and std", lambda i: {"features": features_of(i).flip(0) * 9}),
        (FeatureError, "the trunk gives features of", lambda i: {"trunk": torch.nn.Flatten()}),
        (InputError, "Leave one out", lambda i: {"features": features_of(i), "trunk": Pool()}),
        (InputError, "without a trunk", lambda i: {"mean": 0.5}),
        (SettingError, "unknown setting 'iteration'", lambda i: {"iteration": 3}),
        (SettingError, "width is 4; expected 8", lambda i: {"width": 4}),
    ],
)
def test_wrong_inputs_are_named(images, recording, error, message, change):
    with pytest.raises(error, match=message):
        krnet.invert(recording, **({"images": images, "device": "cpu"} | change(images)))


def test_a_picture_is_refused_before_the_attack_where_it_cannot_be_written(images, recording, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="file: is not a folder"):
        krnet.invert(recording, images, pictures=tmp_path / "file", iterations=10**9)
