"""The loop: it stops when it should, looks at the loss, and goes on where a killed run was."""

import math
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from krnet.errors import KrnetWarning, NonFiniteLossError, ResumeError
from krnet.io import archive
from krnet.progress import Progress
from krnet.train import loop as training
from krnet.train.loop import LOSS_CHECK_ITERATIONS, Checkpoint, train


class Halving:
    """A trainee whose loss halves at every step; it remembers what it was told."""

    def __init__(self):
        self.value = torch.ones(1)
        self.steps: list[tuple[int, float]] = []
        self.at_step = lambda iteration: None

    def step(self, iteration: int, progress: float) -> Tensor:
        self.steps.append((iteration, progress))
        self.at_step(iteration)
        self.value = self.value / 2
        return self.value[0]

    def state(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"]


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    return Checkpoint(tmp_path / "x.ckpt", {"lr": 0.1, "network": {"d0": 8}}, every_s=0)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The loop's clock: it shows clock[0], and stands still unless a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def second_long(clock: list[float]) -> Halving:
    """A trainee that takes a second a step."""

    def pass_a_second(iteration: int) -> None:
        clock[0] += 1

    trainee = Halving()
    trainee.at_step = pass_a_second
    return trainee


def raise_at(number: int, error: BaseException):
    def act(iteration: int) -> None:
        if iteration == number:
            raise error

    return act


# ---------------------------------------------------------------- when it stops


@pytest.mark.parametrize("iterations", [1, LOSS_CHECK_ITERATIONS, 37])
def test_it_stops_after_the_iterations_and_progress_runs_evenly(iterations):
    trainee = Halving()
    outcome = train(trainee, max_iterations=iterations)
    assert (outcome.iterations, outcome.reason) == (iterations, "iterations")
    assert trainee.steps == [(i, i / iterations) for i in range(iterations)]


def test_it_stops_when_the_time_is_up_and_progress_runs_with_the_clock(clock):
    trainee = second_long(clock)
    outcome = train(trainee, max_iterations=None, time_budget_s=7.5)
    assert (outcome.reason, outcome.iterations, outcome.seconds) == ("time_budget", 8, 8.0)
    assert [share for _, share in trainee.steps] == [i / 7.5 for i in range(8)]


def test_whichever_of_time_and_iterations_ends_first_ends_it(clock):
    assert train(second_long(clock), max_iterations=10**6, time_budget_s=5).reason == "time_budget"
    assert train(second_long(clock), max_iterations=3, time_budget_s=100).reason == "iterations"


def test_it_stops_once_the_target_is_reached_and_asks_with_the_mean_of_the_last_losses():
    asked = []

    def reached(iteration: int, loss: float) -> bool:
        asked.append((iteration, loss))
        return iteration == 3 * LOSS_CHECK_ITERATIONS

    outcome = train(Halving(), max_iterations=1000, reached=reached)
    assert (outcome.iterations, outcome.reason) == (3 * LOSS_CHECK_ITERATIONS, "target")
    losses = [0.5 ** (i + 1) for i in range(3 * LOSS_CHECK_ITERATIONS)]
    means = [
        sum(losses[i : i + LOSS_CHECK_ITERATIONS]) / LOSS_CHECK_ITERATIONS
        for i in range(0, len(losses), LOSS_CHECK_ITERATIONS)
    ]
    assert [i for i, _ in asked] == [LOSS_CHECK_ITERATIONS, 2 * LOSS_CHECK_ITERATIONS, 3 * LOSS_CHECK_ITERATIONS]
    assert [loss for _, loss in asked] == pytest.approx(means)


def test_watchers_hear_of_every_look_and_of_the_end():
    heard: list[Progress] = []
    train(Halving(), max_iterations=25, watch=heard.append)
    assert [(p.done, p.share) for p in heard] == [(10, 0.4), (20, 0.8), (25, 1.0)]
    assert heard[-1].seconds_left == 0 and Progress("fit", 0.0, seconds=1.0).seconds_left == math.inf
    assert Progress("fit", 0.25, 10, seconds=3.0).seconds_left == pytest.approx(9)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at, found_by", [(0, LOSS_CHECK_ITERATIONS), (13, 2 * LOSS_CHECK_ITERATIONS), (24, 25)])
def test_a_loss_that_is_not_finite_stops_the_run_and_takes_the_checkpoint_with_it(checkpoint, bad, at, found_by):
    trainee = Halving()

    def spoil(iteration: int) -> None:
        if iteration == at:
            trainee.value = trainee.value * bad

    trainee.at_step = spoil
    with pytest.raises(NonFiniteLossError, match=f"by iteration {found_by}; nothing was written. Lower the learning"):
        train(trainee, max_iterations=25, checkpoint=checkpoint)
    assert list(checkpoint.path.parent.iterdir()) == []


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("killed_at", [LOSS_CHECK_ITERATIONS, 17])
def test_a_killed_run_goes_on_from_its_checkpoint_to_the_same_end(checkpoint, killed_at):
    expected, heard = Halving(), []
    train(expected, max_iterations=30, watch=heard.append)
    killed, later = Halving(), Halving()
    killed.at_step = raise_at(killed_at, MemoryError())
    with pytest.raises(MemoryError):
        train(killed, max_iterations=30, checkpoint=checkpoint)
    heard_later: list[Progress] = []
    outcome = train(later, max_iterations=30, checkpoint=checkpoint, resume=True, watch=heard_later.append)
    assert [i for i, _ in later.steps] == list(range(killed_at, 30))
    assert torch.equal(later.value, expected.value) and outcome.iterations == 30
    # Losses from before the kill count in the first mean after it: a target stops both runs at the same place.
    both = [[(p.done, p.values["loss"]) for p in log if p.done > killed_at] for log in (heard, heard_later)]
    assert both[0] == both[1]


def test_time_spent_before_counts_towards_the_budget_and_the_total(checkpoint, clock):
    checkpoint.save(Halving(), 5, 99.0, [])
    outcome = train(second_long(clock), max_iterations=None, time_budget_s=101.5, checkpoint=checkpoint, resume=True)
    assert (outcome.reason, outcome.seconds) == ("time_budget", 102.0)


def test_without_a_checkpoint_or_without_resume_it_starts_afresh(checkpoint):
    trainee = Halving()
    assert train(trainee, max_iterations=3, checkpoint=checkpoint, resume=True).iterations == 3
    assert checkpoint.path.exists()
    assert trainee.steps[0][0] == 0
    again = Halving()
    train(again, max_iterations=3, checkpoint=checkpoint)
    assert again.steps[0][0] == 0


def test_checkpoints_are_written_as_often_as_asked(tmp_path, monkeypatch, clock):
    saved = []
    monkeypatch.setattr(Checkpoint, "save", lambda self, trainee, iteration, *rest: saved.append(iteration))
    train(second_long(clock), max_iterations=20, checkpoint=Checkpoint(tmp_path / "x", {}, every_s=60))
    assert saved == []
    train(second_long(clock), max_iterations=20, checkpoint=Checkpoint(tmp_path / "x", {}, every_s=5))
    assert saved == [5, 10, 15]


@pytest.mark.parametrize(
    "fingerprint, message",
    [
        ({"lr": 0.2, "network": {"d0": 8}}, "made with lr 0.1; this run has 0.2"),
        ({"lr": 0.1, "network": {"d0": 16}}, "made with network .*8.*; this run has .*16"),
        ({"lr": 0.1, "network": {"d0": 8}, "seed": 1}, "made with seed None; this run has 1"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(checkpoint, fingerprint, message):
    checkpoint.save(Halving(), 5, 1.0, [])
    other = Checkpoint(checkpoint.path, fingerprint)
    with pytest.raises(ResumeError, match=message):
        train(Halving(), max_iterations=9, checkpoint=other, resume=True)
    assert checkpoint.path.exists()


def test_a_damaged_checkpoint_is_refused_with_what_to_do(checkpoint):
    checkpoint.save(Halving(), 5, 1.0, [])
    whole = checkpoint.path.read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        checkpoint.path.write_bytes(damaged)
        with pytest.raises(ResumeError, match="remove"):
            train(Halving(), max_iterations=9, checkpoint=checkpoint, resume=True)
    checkpoint.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResumeError, match="remove"):
        train(Halving(), max_iterations=9, checkpoint=checkpoint, resume=True)


def test_another_number_of_threads_is_said_and_does_not_stop_the_run(checkpoint, monkeypatch, recwarn):
    checkpoint.save(Halving(), 5, 1.0, [])
    train(Halving(), max_iterations=9, checkpoint=checkpoint, resume=True)
    assert not recwarn.list
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.warns(KrnetWarning, match="this process has 77.*OMP_NUM_THREADS="):
        assert train(Halving(), max_iterations=9, checkpoint=checkpoint, resume=True).iterations == 9


def test_another_file_in_the_place_of_the_checkpoint_is_refused(checkpoint):
    archive.write(checkpoint.path, {"value": torch.ones(1)}, {"kind": "recording"})
    with pytest.raises(ResumeError, match="made with lr None"):
        train(Halving(), max_iterations=9, checkpoint=checkpoint, resume=True)


# ---------------------------------------------------------------- Ctrl-C


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint_of_it(tmp_path):
    checkpoint = Checkpoint(tmp_path / "x.ckpt", {}, every_s=1e9)
    before = signal.getsignal(signal.SIGINT)
    trainee = Halving()
    trainee.at_step = lambda iteration: signal.raise_signal(signal.SIGINT) if iteration == 4 else None
    with pytest.raises(KeyboardInterrupt):
        train(trainee, max_iterations=9, checkpoint=checkpoint)
    assert signal.getsignal(signal.SIGINT) == before
    kept = archive.open_archive(checkpoint.path)
    assert kept.metadata["iteration"] == 5 and kept.tensor("value") == 0.5**5


def test_a_second_ctrl_c_stops_at_once(checkpoint):
    trainee, reached_the_end = Halving(), []

    def twice(iteration: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached_the_end.append(iteration)

    trainee.at_step = twice
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(trainee, max_iterations=9, checkpoint=checkpoint)
    assert reached_the_end == [] and signal.getsignal(signal.SIGINT) == before


def test_it_runs_outside_the_main_thread_where_signals_cannot_be_caught():
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(train(Halving(), max_iterations=3)))
    thread.start()
    thread.join(30)
    assert outcomes[0].iterations == 3
