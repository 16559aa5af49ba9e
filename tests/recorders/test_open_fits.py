"""Fits of krnet that are given neither iterations nor a time: they end by themselves, and say what more would buy."""

import json
import signal

import pytest
from typer.testing import CliRunner

import krnet
from krnet.cli.app import app
from krnet.recorders import fit as fits
from krnet.train import open_end
from maps import relu_maps
from watchers import of_fits


@pytest.fixture(scope="module")
def features():
    return relu_maps(200, (6, 4, 4))[0]


@pytest.fixture
def impatient(monkeypatch):
    """No gain is enough."""
    monkeypatch.setattr(open_end, "PAYS_SHARE", 0.0)


@pytest.fixture(scope="module")
def ended(features):
    """What an impatient fit of open length makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_end, "PAYS_SHARE", 0.0)
        return record(features)


def record(features, **options):
    # With a width that is given, what was trained is kept, even after a few iterations.
    return krnet.record(features, **{"budget": 9000, "c1": 8, "device": "cpu"} | options)


def test_a_fit_of_open_length_ends_where_it_no_longer_pays_and_tells_what_twice_the_time_would_buy(ended):
    info = ended.info()
    assert info["stopped_by"] == "no_gain" and info["iterations"] < 1000
    found = info["twice_as_long"]
    assert found["seconds"] == 2 * info["fit_seconds"] and found["r2"] != info["r2"]


def test_a_fit_of_open_length_ends_at_the_latest_when_its_time_is_up(features, monkeypatch):
    monkeypatch.setattr(fits, "OPEN_FIT_S", 0.5)
    monkeypatch.setattr(open_end, "PAYS_SHARE", 2.0)
    info = record(features).info()
    assert info["stopped_by"] == "time_limit" and 0.2 < info["fit_seconds"] < 100


@pytest.mark.parametrize(
    ("given", "stopped_by"), [({"iterations": 400}, "iterations"), ({"time_budget": 0.5}, "time_budget")]
)
def test_a_fit_of_given_length_is_that_long(features, impatient, given, stopped_by):
    info = record(features, **given).info()
    assert info["stopped_by"] == stopped_by and info["twice_as_long"] is None


def test_the_same_seed_ends_at_the_same_iteration_with_the_same_file(features, impatient, ended):
    again = record(features)
    assert again.info()["iterations"] == ended.info()["iterations"] and (again[:] == ended[:]).all()


@pytest.mark.parametrize("killed_at", [60, 200])
def test_a_killed_fit_of_open_length_ends_as_it_would_have(features, impatient, ended, tmp_path, killed_at):
    out = tmp_path / "a.krn"

    def press_ctrl_c(progress):
        if progress.done == killed_at:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        record(features, out=out, watch=of_fits(press_ctrl_c))
    again = record(features, out=out, resume=True)
    assert again.info()["iterations"] == ended.info()["iterations"] and (again[:] == ended[:]).all()


def test_the_papers_network_keeps_the_iterations_of_its_schedule(features, impatient, monkeypatch):
    monkeypatch.setattr("krnet.train.config.SCHEDULES", {"fast": 150, "paper": 40000})
    info = krnet.record(features, recorder="paper", device="cpu", d0=8, c0=4, c1=4).info()
    assert info["iterations"] == 150 and info["twice_as_long"] is None


def test_the_command_line_says_what_more_time_would_buy_and_how_to_ask_for_it(features, impatient, tmp_path):
    import numpy as np

    np.save(tmp_path / "x.npy", features)
    out = tmp_path / "x.krn"
    found = CliRunner().invoke(
        app, ["record", str(tmp_path / "x.npy"), "-o", str(out), "--budget", "9000", "--set", "c1=8", "--json", "-q"]
    )
    info = json.loads(found.stdout)
    assert "the fit ended after" in found.stderr and "more time would gain little. R2 is" in found.stderr
    expected = f"R2 is {info['r2']:.4f}; expect about {info['twice_as_long']['r2']:.4f} with --time-budget"
    assert expected in found.stderr
