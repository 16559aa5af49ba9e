"""Memory aware synapses: its importance, and that it is what keeps old tasks."""

from __future__ import annotations

import pytest
import torch

from krnet.errors import SettingError
from krnet.learners import base, finetune, mas
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


@pytest.mark.parametrize("squared", [True, False])
def test_importance_is_the_mean_absolute_gradient_of_the_length_of_single_images_logits(digits, squared):
    learner = after_tasks(mas.Mas, digits, 2, squared=squared)
    ids = learner.context.task_ids(1)[:20]
    totals = {name: torch.zeros_like(param) for name, param in learner.model.named_parameters()}
    for sample_id in ids:
        logits = learner.model(learner.context.train.take(sample_id[None]))
        learner.model.zero_grad()
        (logits.norm() ** 2 if squared else logits.norm()).backward()
        for name, param in learner.model.named_parameters():
            totals[name] += param.grad.abs()
    found = learner.measure(ids)
    assert found.keys() == totals.keys()
    for name, total in totals.items():
        expected = total / len(ids)
        assert expected.max() > 0, name
        assert torch.allclose(found[name], expected, rtol=1e-3, atol=1e-5 * expected.max().item()), name


def test_importance_needs_no_labels(digits):
    learner = after_tasks(mas.Mas, digits, 1)
    ids = learner.context.task_ids(0)
    before = learner.measure(ids)
    learner.context.train_labels.fill_(0)
    assert all(torch.equal(value, before[name]) for name, value in learner.measure(ids).items())


def test_importances_add_up_over_tasks(digits):
    learner = after_tasks(mas.Mas, digits, 1)
    first = learner.importance
    for work in learner.learn(1):
        work.run(None, None)
    second = learner.measure(learner.context.task_ids(1))
    for name, value in learner.importance.items():
        assert torch.equal(value, first[name] + second[name] if name in first else second[name]), name


def test_with_lambda_zero_a_run_is_fine_tuning_bit_for_bit(digits):
    free = after_tasks(finetune.FineTune, digits, 3, ce="new").state()
    found = after_tasks(mas.Mas, digits, 3, strength=0.0).state()
    assert all(torch.equal(found[name], value) for name, value in free.items())
    held = after_tasks(mas.Mas, digits, 3, strength=1.0).state()
    assert not all(torch.equal(held[name], value) for name, value in free.items())


@pytest.mark.slow
def test_with_the_penalty_the_base_task_is_remembered_and_without_it_forgotten(digits):
    longer = {"base_epochs": 10, "epochs": 40}
    held = after_tasks(mas.Mas, digits, 3, strength=1.0, **longer)
    free = after_tasks(mas.Mas, digits, 3, strength=0.0, **longer)
    assert accuracy(held, 0) > accuracy(free, 0) + 0.25


def test_only_importances_are_kept_beside_the_classifier(digits):
    learner = after_tasks(mas.Mas, digits, 2)
    assert learner.storage_bytes() == {"importances": 4 * sum(param.numel() for param in learner.model.parameters())}


def test_settings_out_of_range_are_refused():
    with pytest.raises(SettingError, match="squared"):
        base.make_config(mas.Mas, {"squared": 2})
