"""Fits of open length: they end where twice the iterations would gain too little, at the same place after a kill."""

import math
import signal
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from krnet.train.loop import LOSS_CHECK_ITERATIONS, Checkpoint, train
from krnet.train.open_end import MIN_LOOKS, PAYS_SHARE, OpenEnd


class Falling:
    """A trainee whose loss is a function of the iteration."""

    def __init__(self, loss):
        self.loss, self.progress = loss, []

    def step(self, iteration: int, progress: float) -> Tensor:
        self.progress.append(progress)
        return torch.tensor(float(self.loss(iteration + 1)), dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass


def power(exponent):
    return lambda iteration: iteration**-exponent


def stalling(iteration):
    """Falls fast for 500 iterations, and no more."""
    return min(iteration, 500) ** -1.0


@pytest.mark.parametrize("exponent", [0.05, 0.2, 1.0])
def test_a_loss_that_falls_as_a_power_goes_on_falling_as_it_did(exponent):
    found = OpenEnd(0.3)
    train(Falling(power(exponent)), max_iterations=4000, open_end=found)
    assert found.share_left == pytest.approx(2**-exponent, rel=0.01)


def test_a_fit_goes_on_while_it_pays():
    assert train(Falling(power(0.2)), max_iterations=3000, open_end=OpenEnd(0.3)).reason == "iterations"


def test_a_fit_that_gains_little_ends_early_and_its_learning_rate_still_falls_over_the_same_share():
    trainee = Falling(stalling)
    outcome = train(trainee, max_iterations=100_000, open_end=OpenEnd(0.3))
    assert outcome.reason == "no_gain" and 500 / 0.3 < outcome.iterations < 8000
    decay = [progress for progress in trainee.progress if progress > 0.3]
    assert len(decay) == pytest.approx(0.7 * outcome.iterations, abs=2)
    assert max(b - a for a, b in pairwise(decay)) < 2 / outcome.iterations
    assert trainee.progress[-1] == pytest.approx(1, abs=1e-3)


def test_the_fewest_looks_are_waited_for():
    outcome = train(Falling(lambda iteration: 1.0), max_iterations=100_000, open_end=OpenEnd(0.3))
    assert outcome.iterations == math.ceil(MIN_LOOKS * LOSS_CHECK_ITERATIONS / 0.3)


def test_a_fit_is_not_judged_once_its_learning_rate_falls():
    found = OpenEnd(0.3)
    train(Falling(stalling), max_iterations=1600, open_end=found)
    assert len(found.losses) * LOSS_CHECK_ITERATIONS == pytest.approx(0.3 * 1600, abs=LOSS_CHECK_ITERATIONS)
    assert found.end is None


@pytest.mark.parametrize("share", [PAYS_SHARE - 0.01, PAYS_SHARE + 0.01])
def test_it_pays_as_long_as_a_doubling_leaves_the_share(share):
    found = OpenEnd(0.3)
    for look in range(MIN_LOOKS):
        found.look(10 * (look + 1), 0.1, 1.0 if look < MIN_LOOKS // 2 else share)
    assert (found.end is None) == (share < PAYS_SHARE)


@pytest.mark.parametrize("killed_at", [7, 130, 600, 900])
def test_a_killed_fit_ends_where_it_would_have_ended(tmp_path, killed_at):
    expected = train(Falling(stalling), max_iterations=100_000, open_end=OpenEnd(0.3))

    def press_ctrl_c(iteration):
        if iteration == killed_at:
            signal.raise_signal(signal.SIGINT)
        return stalling(iteration)

    checkpoint = Checkpoint(tmp_path / "x.ckpt", {})
    with pytest.raises(KeyboardInterrupt):
        train(Falling(press_ctrl_c), max_iterations=100_000, open_end=OpenEnd(0.3), checkpoint=checkpoint)
    again = train(Falling(stalling), max_iterations=100_000, open_end=OpenEnd(0.3), checkpoint=checkpoint, resume=True)
    assert (again.iterations, again.reason) == (expected.iterations, expected.reason)
