"""Elastic weight consolidation, and what it shares with MAS: the penalty, and how importances of tasks add up."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from krnet import protocol
from krnet.errors import SettingError
from krnet.learners import base, ewc, finetune
from krnet.learners import importance as _importance
from learning_tools import SMALL, small_tasks


def after_tasks(learner_class, digits, num_tasks=2, **settings):
    """A learner that has learned so many tasks, as the task loop would have it."""
    context = base.Context(digits, small_tasks(), torch.device("cpu"), 1, None)
    torch.manual_seed(1)
    learner = learner_class(context, base.make_config(learner_class, {**SMALL, **settings}))
    for task in range(num_tasks):
        torch.manual_seed(task)
        for work in learner.learn(task):
            work.run(None, None)
    return learner


def accuracy(learner, task):
    ids = learner.context.split.samples(learner.context.data.test.labels, task)
    found = learner.apply(learner.model, learner.context.test, ids).argmax(1)
    return (found == learner.context.test_labels[ids]).double().mean().item()


@pytest.fixture(scope="module")
def two_tasks(digits):
    return after_tasks(ewc.Ewc, digits, clip=0.0)


def with_settings(learner, **settings):
    """The same network under other settings."""
    other = type(learner)(learner.context, base.make_config(type(learner), {**SMALL, **settings}))
    other.restore(learner.task, learner.state())
    return other


# ------------------------------------------------------------------ the penalty


def test_the_penalty_is_zero_at_the_anchor_and_grows_away(two_tasks):
    learner = with_settings(two_tasks)
    penalty = learner.penalty()
    values = [penalty().item()]
    for _ in range(3):
        with torch.no_grad():
            for param in learner.model.parameters():
                param += 0.01
        values.append(penalty().item())
    assert values[0] == 0 and values == sorted(values) and values[1] > 0
    assert values[3] == pytest.approx(9 * values[1], rel=1e-4)


def test_the_penalty_is_half_lambda_times_importance_times_squared_distance(two_tasks):
    learner = with_settings(two_tasks, strength=3.0)
    anchor = {name: value.detach().clone() for name, value in learner.model.named_parameters()}
    penalty = learner.penalty()
    torch.manual_seed(0)
    with torch.no_grad():
        for param in learner.model.parameters():
            param += 0.01 * torch.randn_like(param)
    penalty().backward()
    total = 0.0
    for name, param in learner.model.named_parameters():
        move = param.detach() - anchor[name]
        assert torch.allclose(param.grad, 3.0 * learner.importance[name] * move, rtol=1e-4, atol=1e-9)
        total += 1.5 * (learner.importance[name] * move**2).sum().item()
    assert penalty().item() == pytest.approx(total, rel=1e-4)


def test_rows_of_new_classes_are_free(two_tasks):
    learner = with_settings(two_tasks, strength=1e6)
    learner.expand(2)
    penalty = learner.penalty()
    with torch.no_grad():
        learner.model.head.linears[-1].weight += 1.0
    assert penalty().item() == 0
    with torch.no_grad():
        learner.model.head.linears[0].weight += 1.0
    assert penalty().item() > 0


def test_no_lambda_is_so_large_that_training_diverges(digits):
    settings = {"strength": 1e12, "clip": 0.0, "weight_decay": 0.0}
    base_task = after_tasks(ewc.Ewc, digits, 1, **settings)
    before = {name: value.clone() for name, value in base_task.model.named_parameters()}
    learner = after_tasks(ewc.Ewc, digits, 2, **settings)
    held = torch.cat([(learner.model.get_parameter(name) - value).abs().flatten() for name, value in before.items()])
    free = after_tasks(finetune.FineTune, digits, 2, ce="new", weight_decay=0.0)
    moved = torch.cat([(free.model.get_parameter(name) - value).abs().flatten() for name, value in before.items()])
    assert held.isfinite().all() and held.mean() < 0.5 * moved.mean()


# ------------------------------------------------------------------ the Fisher


def fisher_by_loop(learner, ids, labels_from):
    """The definition: a backward pass for every single image."""
    first = 4 if learner.task == 1 and learner.config.ce == "new" else 0
    totals = {name: torch.zeros_like(param) for name, param in learner.model.named_parameters()}
    for sample_id in ids:
        logits = learner.model(learner.context.train.take(sample_id[None]))[:, first:]
        label = learner.context.train_labels[sample_id[None]] - first if labels_from == "true" else logits.argmax(1)
        learner.model.zero_grad()
        (-F.log_softmax(logits, dim=1)[0, label[0]]).backward()
        for name, param in learner.model.named_parameters():
            totals[name] += param.grad**2
    return {name: total / len(ids) for name, total in totals.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"labels": "true"},
        {"labels": "predicted"},
        {"labels": "true", "ce": "seen"},
        {"labels": "predicted", "ce": "seen", "shortcut": "A", "last_relu": False},
    ],
)
def test_the_fisher_is_the_mean_of_squared_gradients_of_single_images(digits, monkeypatch, settings):
    learner = after_tasks(ewc.Ewc, digits, 2, clip=0.0, **settings)
    ids = learner.context.task_ids(1)[:20]
    expected = fisher_by_loop(learner, ids, settings["labels"])
    monkeypatch.setattr(_importance, "CHUNK_IMAGES", 8)
    found = learner.measure(ids)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.max() > 0 or name.startswith("head.parts.0"), name
        assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-5 * value.max().item()), name


def test_measuring_leaves_the_network_as_it_was(two_tasks):
    before = {name: value.clone() for name, value in two_tasks.model.state_dict().items()}
    two_tasks.model.train()
    two_tasks.model.zero_grad()
    two_tasks.measure(two_tasks.context.task_ids(1))
    assert all(torch.equal(value, before[name]) for name, value in two_tasks.model.state_dict().items())
    assert all(param.grad is None for param in two_tasks.model.parameters())
    assert not any(layer._forward_hooks for layer in two_tasks.model.modules())


def test_clip_bounds_what_one_task_says(two_tasks):
    ids = two_tasks.context.task_ids(1)
    free = two_tasks.measure(ids)
    clip = torch.cat([value.flatten() for value in free.values()]).quantile(0.9).item()
    clipped = with_settings(two_tasks, clip=clip).measure(ids)
    assert all(torch.equal(clipped[name], value.clamp(max=clip)) for name, value in free.items())


def test_scope_backbone_leaves_the_head_free(two_tasks):
    names = with_settings(two_tasks, scope="backbone").measure(two_tasks.context.task_ids(1)).keys()
    assert set(names) == {name for name, _ in two_tasks.model.named_parameters() if name.startswith("backbone.")}


@pytest.mark.parametrize(("merge", "old", "new"), [("average", 4 / 6, 2 / 6), ("half", 0.5, 0.5), ("sum", 1, 1)])
def test_importances_of_tasks_are_merged_and_new_rows_keep_their_own(digits, merge, old, new):
    learner = after_tasks(ewc.Ewc, digits, 1, merge=merge)
    learner.expand(1)
    learner.importance = {name: torch.full_like(value, 3.0) for name, value in learner.importance.items()}
    measured = {name: torch.full_like(value, 5.0) for name, value in learner.model.named_parameters()}
    for name, value in learner.merge_importances(measured).items():
        expected = 5.0 if name.startswith("head.parts.1") else 3 * old + 5 * new
        assert torch.allclose(value, torch.full_like(value, expected)), name


# ------------------------------------------------------------------ a run


def test_with_lambda_zero_a_run_is_fine_tuning_bit_for_bit(digits):
    free = after_tasks(finetune.FineTune, digits, 3, ce="new").state()
    found = after_tasks(ewc.Ewc, digits, 3, strength=0.0).state()
    assert all(torch.equal(found[name], value) for name, value in free.items())
    held = after_tasks(ewc.Ewc, digits, 3, strength=100.0).state()
    assert not all(torch.equal(held[name], value) for name, value in free.items())


@pytest.mark.slow
def test_with_the_penalty_the_base_task_is_remembered_and_without_it_forgotten(digits):
    longer = {"base_epochs": 10, "epochs": 40, "clip": 0.0}
    held = after_tasks(ewc.Ewc, digits, 3, strength=1e4, **longer)
    free = after_tasks(ewc.Ewc, digits, 3, strength=0.0, **longer)
    assert accuracy(held, 0) > accuracy(free, 0) + 0.25


def test_only_importances_are_kept_beside_the_classifier(two_tasks):
    num_params = sum(param.numel() for param in two_tasks.model.parameters())
    assert two_tasks.storage_bytes() == {"importances": 4 * num_params}
    assert sum(value.numel() for value in two_tasks.extra_state().values()) == num_params


@pytest.mark.parametrize(
    "settings",
    [{"labels": "best"}, {"merge": "mean"}, {"scope": "head"}, {"strength": -1.0}, {"clip": math.inf}],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        base.make_config(ewc.Ewc, settings)


def test_a_task_of_one_class_is_refused_where_only_new_logits_compete(digits):
    split = protocol.split("natural", num_classes=digits.num_classes, sizes=[digits.num_classes - 3, 2, 1])
    context = base.Context(digits, split, torch.device("cpu"), 1, None)
    with pytest.raises(SettingError, match="task 2 has one class"):
        ewc.Ewc(context, base.make_config(ewc.Ewc, SMALL))
    ewc.Ewc(context, base.make_config(ewc.Ewc, {**SMALL, "ce": "seen"}))
