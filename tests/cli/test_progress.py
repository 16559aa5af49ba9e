"""Progress without a terminal: a line now and then, on stderr only, and none when quiet."""

import math

import pytest

from krnet.cli import progress
from krnet.train.loop import Status


def test_lines_come_at_most_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.Display() as display:
        for iteration in range(10, 210, 10):  # one second each
            now += 1.0
            display.fit(Status(iteration, iteration / 400, 1.0, now), 0.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 20 / progress.LINE_EVERY_S
    assert "10 it/s" in err and "R2 0.5000" in err and "elapsed 0:01" in err and "left 0:39" in err


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Display(quiet=True) as display:
        display.phase("reading")
        display.fit(Status(10, 0.1, 1.0, 1.0), 0.5)
        display.count(1, 2, "replay")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3600, "1:00:00"), (math.inf, "-:--"), (59.6, "1:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert progress.clock(seconds) == text
