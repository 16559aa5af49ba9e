"""Fits of open length: rounds, until another would gain too little; at the same place after a kill."""

import signal
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from krnet.train import loop as training
from krnet.train.loop import Checkpoint, train
from krnet.train.open_end import LEAST_ROUND, PAYS_SHARE, OpenEnd


class Falling:
    """A trainee whose loss is a function of the iteration; it remembers the progress that it is told."""

    def __init__(self, loss):
        self.loss, self.progress = loss, []

    def step(self, iteration: int, progress: float) -> Tensor:
        self.progress.append(progress)
        return torch.tensor(float(self.loss(iteration + 1)), dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass


def stalling(iteration):
    """Falls fast for 500 iterations, and no more."""
    return min(iteration, 500) ** -1.0


def fit(loss, open_end=None, **options):
    trainee = Falling(loss)
    return train(trainee, max_iterations=None, open_end=open_end or OpenEnd(100, 1e9), **options), trainee.progress


@pytest.fixture
def second_long(monkeypatch):
    """Each look at the loop's clock takes so long that a step takes a second."""
    now = [0.0]

    def tick():
        return now[0]

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=tick))

    def loss(iteration):
        now[0] += 1
        return iteration**-0.5

    return loss


def test_each_round_is_twice_as_long_and_runs_from_0_to_1():
    outcome, progress = fit(stalling)
    starts = [i for i, share in enumerate(progress) if share == 0]
    assert starts == [0, 100, 300, 700] and outcome.iterations == 1500
    for start, length in zip(starts, (100, 200, 400, 800), strict=True):
        assert progress[start : start + length] == pytest.approx([i / length for i in range(length)])


def test_it_ends_after_the_round_that_gained_too_little():
    outcome, _ = fit(stalling)  # the round 300 .. 700 still gained, since the one before ended at 300
    assert (outcome.iterations, outcome.reason) == (1500, "no_gain")


@pytest.mark.parametrize("exponent", [0.05, 0.2, 1.0])
def test_what_a_doubling_leaves_is_told_whatever_the_lengths_of_the_rounds(exponent):
    found = OpenEnd(100, 1000.0)
    for iteration, seconds in ((100, 10.0), (300, 30.0), (500, 1000.0)):  # the clock cuts the last one short
        found.losses = [iteration**-exponent]
        found.look(iteration, seconds, iteration**-exponent)
        assert found.share_left is None or found.share_left == pytest.approx(2**-exponent)
    assert len(found.ends) == 3


@pytest.mark.parametrize("share", [PAYS_SHARE - 0.01, PAYS_SHARE + 0.01])
def test_it_goes_on_as_long_as_a_doubling_leaves_at_most_the_share(share):
    found = OpenEnd(100, 1e9, ends=[(100, 1.0)], start=100)
    found.look(300, 1.0, share ** torch.log2(torch.tensor(3.0)).item())
    assert found.reason == ("" if share < PAYS_SHARE else "no_gain")


def test_the_last_round_ends_with_the_clock(second_long):
    outcome, progress = fit(second_long, OpenEnd(100, 500.0))  # 100, 200, and what is left of 400
    assert (outcome.iterations, outcome.reason) == (500, "time_limit")
    assert progress[300:320] == pytest.approx([i / 400 for i in range(20)])
    assert progress[320:] == pytest.approx([i / 200 for i in range(20, 200)])


def test_a_slow_step_changes_nothing_where_there_is_time_enough(second_long):
    _, progress = fit(second_long, OpenEnd(100, 750.0, start_s=-20.0))  # as if 20 seconds were lost at the start
    assert progress[:300] == [i / 100 for i in range(100)] + [i / 200 for i in range(200)]


def test_no_round_is_begun_for_the_seconds_that_are_left(second_long):
    assert LEAST_ROUND * 200 > 90
    outcome, _ = fit(second_long, OpenEnd(100, 390.0))
    assert (outcome.iterations, outcome.reason) == (300, "time_limit")


def test_a_single_round_by_the_clock_says_nothing_of_the_next(second_long):
    found = OpenEnd(100, 50.0)
    outcome, _ = fit(second_long, found)
    assert (outcome.iterations, found.share_left) == (50, None)


def test_watchers_hear_how_much_of_the_time_is_spent(second_long):
    heard = []
    fit(second_long, OpenEnd(100, 500.0), watch=heard.append)
    assert [p.share for p in heard] == pytest.approx([p.done / 500 for p in heard])


@pytest.mark.parametrize("killed_at", [7, 130, 300, 600, 1499])
def test_a_killed_fit_ends_where_it_would_have_ended(tmp_path, killed_at):
    expected, _ = fit(stalling)

    def press_ctrl_c(iteration):
        if iteration == killed_at:
            signal.raise_signal(signal.SIGINT)
        return stalling(iteration)

    checkpoint = Checkpoint(tmp_path / "x.ckpt", {})
    with pytest.raises(KeyboardInterrupt):
        fit(press_ctrl_c, checkpoint=checkpoint)
    again, _ = fit(stalling, checkpoint=checkpoint, resume=True)
    assert (again.iterations, again.reason) == (expected.iterations, expected.reason)
