"""benchmarks/schedule.py: the simulated schedule of a large encoding job."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "schedule.py"


@pytest.fixture(scope="module")
def schedule():
    spec = importlib.util.spec_from_file_location("schedule", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["schedule"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["schedule"]


@pytest.fixture
def job(schedule):
    return schedule.Job(1_000_000, 100.0, 4, part_samples=1000, spread=0.0, hours_to_failure=1e12)


def test_without_spread_and_failures_a_job_takes_its_ideal_time(schedule, job):
    assert schedule.simulate(job).seconds == pytest.approx(job.ideal_s)
    assert schedule.simulate_queue(job) == pytest.approx(job.ideal_s)


def test_twice_the_ranks_halve_the_time_until_parts_run_out(schedule, job):
    double = schedule.simulate(replace(job, num_ranks=8)).seconds
    assert double == pytest.approx(job.ideal_s / 2)
    assert schedule.simulate(replace(job, num_ranks=3000)).seconds == pytest.approx(10.0)  # one part each


def test_the_slowest_rank_sets_the_time_of_shares_and_a_queue_is_quicker(schedule, job):
    spread = replace(job, spread=0.3)
    shares, queue = schedule.simulate(spread, 1).seconds, schedule.simulate_queue(spread, 1)
    assert shares > 1.1 * job.ideal_s and queue < shares


def test_a_death_costs_the_pause_and_at_most_a_part_of_each_rank(schedule, job):
    run = schedule.simulate(replace(job, hours_to_failure=0.5, restart_s=60.0), 3)
    assert run.num_restarts > 0 and run.restarting == 60.0 * run.num_restarts
    part_s = job.part_samples / job.rate
    assert 0 < run.lost <= run.num_restarts * job.num_ranks * part_s
    # All that was worked is what had to be, plus what was lost; ranks are idle for at most a part per round.
    least = job.ideal_s + run.restarting + run.lost / job.num_ranks
    assert least <= run.seconds <= least + (run.num_restarts + 1) * part_s


def test_the_same_seed_gives_the_same_run(schedule, job):
    shaky = replace(job, spread=0.2, hours_to_failure=2.0)
    assert schedule.simulate(shaky, 5) == schedule.simulate(shaky, 5) != schedule.simulate(shaky, 6)
