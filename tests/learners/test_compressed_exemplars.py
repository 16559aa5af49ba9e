"""Compressed exemplars: more of them in a budget, trained on as they decode, and kept as bytes."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from test_images import make_images

import krnet
from krnet import data, protocol
from krnet import task_loop as learning
from krnet.coding.image_codec import ImageEncoding, decode_image, encode_image, encode_images
from krnet.errors import InputError, SettingError
from krnet.learners import base, rehearsal
from krnet.learners.compressed_exemplars import CompressedExemplars, fits_in_share
from krnet.train.classifier import Images
from learning_tools import settings_for
from watchers import of_fits

CPU = torch.device("cpu")
NUM_CLASSES, PER_CLASS = 6, 30
BUDGET = 6 * 4 * 772  # 4 images of 3 x 16 x 16 bytes, with their labels, of each class
QUICK = {"base_epochs": 1, "epochs": 1, "batch_size": 32}


@pytest.fixture(scope="module")
def photos():
    """Smooth images of six classes, sixteen pixels wide."""
    images, labels = make_images(NUM_CLASSES * PER_CLASS), torch.arange(NUM_CLASSES * PER_CLASS) % NUM_CLASSES
    return data.from_arrays(images, labels, images[:60], labels[:60], layout="NCHW", flip=True, pad=1)


def tasks():
    return protocol.split([3, 1, 0, 2, 5, 4], num_classes=NUM_CLASSES, base_classes=2, tasks=2)


def make(photos, folder, method="icarl", **settings):
    context = base.Context(photos, tasks(), CPU, 1, folder)
    torch.manual_seed(0)
    learner = base.get_learner(method)
    return learner(context, base.make_config(learner, {**settings_for(method), **QUICK, **settings}))


def finish(learner, task):
    torch.manual_seed(task)
    for work in learner.learn(task):
        work.run(None, None)


@pytest.mark.parametrize("memory", ["per-class", "total"])
@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_a_budget_is_kept_and_holds_more_exemplars_than_pixels(photos, tmp_path, memory, codec):
    limits = {"memory": memory, "budget": BUDGET}
    plain, small = make(photos, tmp_path, **limits), make(photos, tmp_path, **limits, exemplar_format=codec)
    for task, num_seen in enumerate((2, 4, 6)):
        for learner in (plain, small):
            finish(learner, task)
            assert sum(learner.storage_bytes().values()) <= BUDGET
        counts = [torch.bincount(learner.exemplars.labels) for learner in (plain, small)]
        assert len(counts[1]) == num_seen and (counts[1] > 1.5 * counts[0]).all()
    assert sum(small.storage_bytes().values()) > 0.9 * BUDGET
    stored = sum(value.nbytes for value in small.extra_state().values())
    assert sum(small.storage_bytes().values()) == stored


@pytest.mark.parametrize("method", ["icarl", "lucir"])
def test_training_and_means_see_the_decoded_images_of_the_best(photos, tmp_path, method):
    learner = make(photos, tmp_path, method, budget=BUDGET, exemplar_format="jpeg", exemplar_quality=30)
    finish(learner, 0)
    kept, context, encoding = learner.exemplars, learner.context, ImageEncoding(quality=30)
    expected = []
    for label in range(2):
        ids = (context.train_labels == label).nonzero()[:, 0]
        features = learner.apply(learner.model.features, context.train, ids)
        best = ids[rehearsal.herd_classes(features, context.train_labels[ids], PER_CLASS)]
        best = best[: int((kept.labels == label).sum())]
        for image in context.train.pixels[best]:
            content = encode_image(np.ascontiguousarray(image.permute(1, 2, 0).numpy()), encoding)
            expected.append(decode_image(content, "jpeg", image.shape))
    expected = torch.stack(expected)
    assert torch.equal(kept.pixels, expected)
    # Not the images themselves.
    assert not any(torch.equal(image, pixels) for image in expected for pixels in context.train.pixels)
    learner.expand(1)
    batches = learner.rehearsal_batches()
    assert torch.equal(batches.images.pixels[-len(kept) :], kept.pixels)
    images = Images(photos, expected, CPU)
    views = [learner.apply(learner.model.features, images, torch.arange(len(expected)))]
    views.append(learner.apply(lambda x: learner.model.features(x.flip(-1)), images, torch.arange(len(expected))))
    means = rehearsal.class_means(torch.cat(views), kept.labels.repeat(2), 2)
    torch.testing.assert_close(learner.means, means)


def test_without_a_budget_the_numbers_are_those_of_pixels_in_fewer_bytes(photos, tmp_path):
    found = []
    for kind in ("pixels", "jpeg"):
        learner = make(photos, tmp_path, exemplars_per_class=5, exemplar_format=kind)
        finish(learner, 0)
        assert torch.bincount(learner.exemplars.labels).tolist() == [5, 5]
        found.append(learner.storage_bytes())
    assert found[1].keys() == {"exemplars", "exemplar_lengths", "exemplar_prefix", "exemplar_labels"}
    assert found[1]["exemplars"] < 0.7 * found[0]["exemplars"] and found[1]["exemplar_lengths"] == 2 * 10


def test_a_share_keeps_the_first_of_each_class_and_no_byte_more():
    contents = [b"ab" + bytes([number]) * length for number, length in enumerate((10, 3, 5, 10, 10, 4))]
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    # Beside the shared "ab", each image takes its other bytes, two of its length and four of its label.
    assert fits_in_share(contents, labels, 2 + 2 * 36, 2).tolist() == [True, True, True, False, True, True]
    assert fits_in_share(contents, labels, 2 + 2 * 36 - 1, 2).tolist() == [True, True, False, False, True, True]
    assert fits_in_share(contents, labels, 2 + 2 * 16, 2).tolist() == [True, False, False, False, True, False]
    with pytest.raises(SettingError, match=r"budget is 33; expected at least 34, .* 2 classes"):
        fits_in_share(contents, labels, 2 + 2 * 16 - 1, 2)


def test_images_of_many_bytes_have_longer_lengths():
    contents = [b"a" + bytes(2**16), b"b" + bytes(10)]
    assert fits_in_share(contents, torch.tensor([0, 1]), 2 * (2**16 + 1 + 8), 2).tolist() == [True, True]
    with pytest.raises(SettingError):
        fits_in_share(contents, torch.tensor([0, 1]), 2 * (2**16 + 1 + 8) - 1, 2)


def test_shrinking_drops_bytes_and_pixels_alike():
    images, labels = make_images(10), torch.tensor([0] * 6 + [1] * 4)
    empty = CompressedExemplars.empty((3, 16, 16), CPU, ImageEncoding())
    kept = empty.append(images, labels)
    small = kept.truncate(2)
    assert small.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(small.pixels, kept.pixels[[0, 1, 6, 7]])
    assert list(small.contents) == encode_images(images[[0, 1, 6, 7]], ImageEncoding())
    again = empty.load(kept.tensors())
    assert again.contents == kept.contents and torch.equal(again.pixels, kept.pixels)
    assert torch.equal(again.labels, kept.labels) and sum(empty.storage_bytes().values()) == 0


def learn(photos, folder, **options):
    settings = {**settings_for("icarl"), **QUICK, "epochs": 4, "budget": BUDGET, "exemplar_format": "webp"}
    return learning.learn("icarl", photos, tasks(), out=folder, settings=settings, device="cpu", **options)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_result(photos, tmp_path):
    whole = learn(photos, tmp_path / "whole")
    seen = []

    def stop(progress):
        seen.append(progress)
        if "task 2" in progress.name:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        learn(photos, tmp_path / "stopped", watch=of_fits(stop))
    resumed = learn(photos, tmp_path / "stopped", resume=True)
    for name in ("rows", "storage_bytes", "storage_bytes_by_task"):
        assert resumed[name] == whole[name]
    loaded = krnet.load_run(tmp_path / "stopped")
    assert torch.equal(loaded.predict(photos.test.images), whole.predict(photos.test.images))


def test_what_cannot_work_is_refused_before_training(photos, tmp_path):
    with pytest.raises(SettingError, match=r"exemplar_format is 'jpg'; expected one of pixels, jpeg, webp"):
        make(photos, tmp_path, exemplar_format="jpg")
    with pytest.raises(SettingError, match="exemplar_quality is 101"):
        make(photos, tmp_path, exemplar_format="jpeg", exemplar_quality=101)
    with pytest.raises(SettingError, match=r"budget is 900; expected at least .* 6 classes"):
        make(photos, tmp_path, exemplar_format="jpeg", budget=900)
    four = torch.zeros(12, 4, 16, 16, dtype=torch.uint8)
    transparent = data.from_arrays(four, torch.arange(12) % 6, four, torch.arange(12) % 6, layout="NCHW")
    with pytest.raises(SettingError, match="4 channels; expected pixels"):
        make(transparent, tmp_path, exemplar_format="webp")


def test_without_pillow_the_extra_to_install_is_named(photos, tmp_path, monkeypatch):
    def refuse(module, extra):
        raise InputError(f"{module} of {extra} is not installed")

    monkeypatch.setattr(rehearsal, "require", refuse)
    make(photos, tmp_path)
    with pytest.raises(InputError, match="images is not installed"):
        make(photos, tmp_path, exemplar_format="jpeg")


def test_runs_of_earlier_versions_had_pixels(photos, tmp_path):
    config = base.get_learner("icarl").config_class
    new = {"exemplar_format", "exemplar_quality"}
    saved = {name: value for name, value in base.plain_settings(config()).items() if name not in new}
    assert config.renewed(saved) == base.plain_settings(config())
