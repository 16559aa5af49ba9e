"""LUCIR: directions held, a margin for old classes, imprinted and fixed rows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from krnet import data, protocol
from krnet import task_loop as learning
from krnet.learners import base
from krnet.learners.lucir import less_forget, margin_ranking
from learning_tools import settings_for, small_tasks


def make(digits, folder, tasks=None, **settings):
    context = base.Context(digits, tasks or small_tasks(), torch.device("cpu"), 1, folder)
    torch.manual_seed(0)
    learner = base.get_learner("lucir")
    return learner(context, base.make_config(learner, {**settings_for("lucir"), **settings}))


def finish(learner, task):
    torch.manual_seed(task)
    for work in learner.learn(task):
        work.run(None, None)


def test_less_forget_is_one_less_the_cosine():
    features, old = torch.randn(7, 5), torch.randn(7, 5)
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(features, old)]
    assert less_forget(features, old).item() == pytest.approx(1 - sum(cosines) / 7, rel=1e-5)
    assert less_forget(3 * old, old).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("num_rivals", [1, 2, 3])
def test_margin_is_the_mean_over_old_samples_and_their_nearest_new_classes(num_rivals):
    cosines, labels = torch.rand(20, 9) * 2 - 1, torch.arange(20) % 9
    terms = []
    for row, label in zip(cosines.tolist(), labels.tolist()):
        if label < 5:
            terms += [max(0, 0.5 - row[label] + rival) for rival in sorted(row[5:], reverse=True)[:num_rivals]]
    found = margin_ranking(cosines, labels, 5, 0.5, num_rivals)
    assert found.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_margin_without_old_samples_is_zero_and_one_new_class_is_enough():
    cosines = torch.rand(4, 6, requires_grad=True)
    found = margin_ranking(cosines, torch.tensor([4, 5, 4, 5]), 4, 0.5, 2)
    found.backward()
    assert found.item() == 0 and cosines.grad.abs().sum() == 0
    one = margin_ranking(cosines.detach(), torch.tensor([0, 1, 2, 5]), 5, 0.5, 2)
    by_hand = [max(0, 0.5 - cosines[i, i].item() + cosines[i, 5].item()) for i in range(3)]
    assert one.item() == pytest.approx(sum(by_hand) / 3, rel=1e-5)


@pytest.mark.parametrize("tasks, published", [(5, [11.18, 12.25, 13.23, 14.14, 15.00]), (10, [15.81, 21.79])])
def test_lambda_grows_as_in_the_reference(tmp_path, tasks, published):
    images, labels = torch.zeros(100, 1, 8, 8, dtype=torch.uint8), torch.arange(100)
    hundred = data.from_arrays(images, labels, images, labels, layout="NCHW")
    learner = make(hundred, tmp_path, protocol.split("lucir1993", num_classes=100, base_classes=50, tasks=tasks))
    found = []
    for task in range(tasks + 1):
        learner.expand(task)
        found.append(learner.less_forget_weight())
    found = found[1:] if tasks == 5 else [found[1], found[-1]]
    assert found == pytest.approx(published, abs=0.006)


def test_the_rate_falls_at_half_and_at_three_quarters(digits, tmp_path):
    learner = make(digits, tmp_path, base_epochs=4, lr=0.1, base_lr=0.1)
    work = next(learner.learn(0))
    rates, loss = [], work.loss
    work.loss = lambda *batch: rates.append(work.optimizer.param_groups[0]["lr"]) or loss(*batch)
    work.run(None, None)
    expected = [0.1] * 6 + [0.01] * 3 + [0.001] * 3  # 96 images in batches of 32, four times
    assert rates == pytest.approx(expected)


def test_new_rows_start_at_the_mean_directions_and_old_rows_stay(digits, tmp_path):
    learner = make(digits, tmp_path, epochs=2)
    finish(learner, 0)
    old = copy.deepcopy(learner.model)
    torch.manual_seed(1)
    works = learner.learn(1)
    work = next(works)
    context = learner.context
    for label in context.new_classes(1):
        with torch.no_grad():
            features = old.features(context.train.take((context.train_labels == label).nonzero()[:, 0]))
        direction = F.normalize(F.normalize(features, dim=1).mean(0), dim=0)
        length = old.head.weight.norm(dim=1).mean()
        torch.testing.assert_close(learner.model.head.weight[label], direction * length)
    started = learner.model.head.weight.detach().clone()
    sigma = learner.model.head.sigma.item()
    work.run(None, None)
    assert torch.equal(learner.model.head.weight[:4], old.head.weight)
    assert not torch.equal(learner.model.head.weight[4:], started[4:]) and learner.model.head.sigma.item() != sigma
    assert next(works, None) is None


def test_switched_off_old_rows_move_and_new_rows_start_at_random(digits, tmp_path):
    learner = make(digits, tmp_path, epochs=2, imprint=False, freeze_old=False)
    finish(learner, 0)
    old = learner.model.head.weight.detach().clone()
    torch.manual_seed(1)
    work = next(learner.learn(1))
    torch.manual_seed(1)
    assert torch.equal(learner.model.head.weight[4:], torch.nn.Linear(64, 2, bias=False).weight)
    work.run(None, None)
    assert not torch.equal(learner.model.head.weight[:4], old)


def old_accuracy(run):
    """On the test images of all tasks but the last, after the last."""
    base_task, middle, _ = run["rows"]["cnn"]["accuracy_matrix"][-1]
    return (32 * base_task + 16 * middle) / 48


@pytest.mark.slow
def test_without_its_ideas_old_classes_are_forgotten(digits, tmp_path):
    off = {"less_forget": 0.0, "margin": 0.0, "imprint": False, "freeze_old": False}
    found = []
    for number, ideas in enumerate(({}, off)):
        settings = {**settings_for("lucir"), "exemplars_per_class": 2, "base_epochs": 15, "epochs": 20, **ideas}
        run = learning.learn(
            "lucir", digits, small_tasks(), out=tmp_path / str(number), settings=settings, device="cpu", seed=1
        )
        found.append(old_accuracy(run))
    assert found[0] > found[1] + 0.2


def test_less_forget_holds_the_directions_of_old_features(digits, tmp_path):
    turned = []
    for weight in (5.0, 0.0):
        learner = make(digits, tmp_path, base_epochs=8, epochs=15, less_forget=weight)
        finish(learner, 0)
        images = learner.context.test.take(small_tasks().samples(digits.test.labels, 0))
        before = learner.model.features(images).detach()
        finish(learner, 1)
        turned.append(less_forget(learner.model.features(images), before).item())
    assert turned[0] < 0.5 * turned[1]


def test_the_margin_holds_exemplars_nearer_to_their_class_than_to_new_ones(digits, tmp_path):
    gaps = []
    for margin in (1.0, 0.0):
        learner = make(digits, tmp_path, base_epochs=8, epochs=15, exemplars_per_class=2, margin=margin)
        finish(learner, 0)
        kept = learner.exemplars
        finish(learner, 1)
        images = (kept.pixels.float() / 255 - digits.mean[0]) / digits.std[0]
        with torch.no_grad():
            cosines = learner.model.head.cosine(learner.model.features(images))
        own = cosines.gather(1, kept.labels.long()[:, None])[:, 0]
        gaps.append((own - cosines[:, 4:].max(1).values).mean().item())
    assert gaps[0] > gaps[1] + 0.1
