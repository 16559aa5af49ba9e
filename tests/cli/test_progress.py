"""Progress without a terminal: a line now and then, on stderr only, and none when quiet."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import krnet
from krnet.cli import progress
from krnet.progress import Progress, counting


def test_lines_come_at_most_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.Display() as display:
        for iteration in range(10, 210, 10):  # one second each
            now += 1.0
            display(Progress("fit", iteration / 400, iteration, "iterations", now, {"R2": 0.5}))
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 20 / progress.LINE_EVERY_S
    assert "10/s" in err and "R2 0.5000" in err and "elapsed 0:01" in err and "left 0:39" in err


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Display(quiet=True) as display:
        display.phase("reading")
        display(Progress("fit", 0.1, 10, "iterations", 1.0, {"R2": 0.5}))
        display(Progress("replay", 0.5, 1, "samples"))
    assert capsys.readouterr() == ("", "")


def test_a_pass_over_samples_is_shown_until_it_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.Display() as display:
        tell = counting(display, "replay", 2000)
        tell(1000)
        tell(2000)
    line, last = capsys.readouterr().err.splitlines()
    assert line.startswith("replay   50 %  1,000 samples")
    assert last.startswith("replay  100 %  2,000 samples")


def test_the_last_line_of_a_fit_says_100_percent_however_soon_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Display() as display:
        for iteration in (10, 20, 30):
            display(Progress("fit", iteration / 30, iteration, "iterations", 0.001 * iteration))
    first, last = capsys.readouterr().err.splitlines()  # the others come within LINE_EVERY_S of the first
    assert first.startswith("fit   33 %  10 iterations") and last.startswith("fit  100 %  30 iterations  1,000/s")


def test_a_pass_that_is_over_at_once_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Display() as display:
        counting(display, "replay", 20)(20)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rate", "text"), [(28_123.0, "28,100"), (999.6, "1,000"), (100.0, "100"), (16.71, "16.7"), (0.5, "0.5")]
)
def test_a_rate_has_three_digits_and_no_exponent(rate: float, text: str) -> None:
    assert progress.rate_text(rate) == text


class Bar:
    """In the place of a bar on a terminal."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.runs = True

    def show(self, name: str, share: float | None, text: str) -> None:
        assert self.runs
        self.shown.append(name)

    def stop(self) -> None:
        self.runs = False


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """All bars that are drawn, as on a terminal."""
    made: list[Bar] = []

    def make() -> Bar:
        made.append(Bar())
        return made[-1]

    monkeypatch.setattr(progress, "_make_bar", make)
    return made


def test_a_bar_goes_when_the_call_ends_and_another_call_gets_another(bars: list[Bar]) -> None:
    features = torch.rand(20, 3, 4, 4)
    for number in range(2):
        krnet.record(features, recorder="krnet", iterations=1, watch=krnet.show_progress)
        assert len(bars) == number + 1 and not bars[number].runs
        assert bars[number].shown[:2] == ["choosing settings for the budget", "fit"]


def test_a_bar_goes_when_the_call_fails(bars: list[Bar]) -> None:
    features = torch.rand(20, 3, 4, 4)
    features[-1] = math.nan
    with pytest.raises(krnet.KrnetError):
        krnet.record(features, recorder="krnet", iterations=1, watch=krnet.show_progress)
    assert not any(bar.runs for bar in bars)


class Shell:
    """In the place of IPython's display: the outputs of a cell, each as it stands now."""

    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.num_updates = 0

    def display(self, content: dict[str, str], raw: bool, display_id: bool) -> Shell:
        assert raw and display_id
        self.outputs.append(content["text/plain"])
        return self

    def update(self, content: dict[str, str], raw: bool) -> None:
        assert raw
        self.outputs[-1] = content["text/plain"]
        self.num_updates += 1


def test_a_notebook_gets_one_output_that_ends_in_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, now = Shell(), 0.0
    ipython = SimpleNamespace(display=shell.display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=ipython))
    monkeypatch.setitem(sys.modules, "IPython.display", ipython)
    monkeypatch.setattr(progress, "Console", lambda stderr: SimpleNamespace(is_jupyter=True, is_terminal=False))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.Display() as display:
        for iteration in range(1, 501):
            now += 0.01
            display(Progress("fit", iteration / 500, iteration, "iterations", now, {"R2": 0.5}))
    expected = "fit  ━━━━━━━━━━━━━━━━━━━━  100 %  500 iterations  100/s  R2 0.5000  elapsed 0:05  left 0:00"
    assert shell.outputs == [expected]
    assert shell.num_updates <= 5 / progress.UPDATE_EVERY_S + 1


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    features, told = torch.rand(20, 3, 4, 4), []
    krnet.record(features, recorder="pca", out=tmp_path / "a.krn")
    krnet.verify(tmp_path / "a.krn", features, watch=told.append)
    assert [(p.name, p.share, p.done) for p in told] == [
        ("reading the features", 1.0, 20), ("comparing replays with the features", 1.0, 20)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3600, "1:00:00"), (math.inf, "-:--"), (59.6, "1:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert progress.clock(seconds) == text
