"""The demo in its short form: all three ways to learn, few updates."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from typer.testing import CliRunner

import krnet
from krnet import task_loop as learning
from krnet.cli import app as cli
from krnet.cli import demo as demo_command
from krnet.data.digits import load_digits
from learning_tools import assert_same_run, ctrl_c_at

FOLDERS = {"fine-tuning": "fine-tuning", "KRIL": "kril", "all images": "all-images"}
BUDGET = demo_command.KRIL["budget"]
FEW_BUDGET = 12_000  # for the 200 images of few_digits
pytestmark = pytest.mark.usefixtures("few_digits", "few_bytes")


@pytest.fixture(scope="module")
def few_bytes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo_command.KRIL, "budget", FEW_BUDGET)
        yield


def demo(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["demo", "--short", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def done(few_digits: None, few_bytes: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The demo once: its folder, and the command's result."""
    out = tmp_path_factory.mktemp("demo") / "a new folder"
    return out, demo("--out", out, "--json")


def test_the_demo_leaves_three_runs_and_a_picture(done: tuple[Path, Any]) -> None:
    out, result = done
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert "reading the digits" in result.stderr and "kril, task 2 of 2: recorder" in result.stderr
    assert list(found["runs"]) == list(FOLDERS) and found["seconds"] > 0
    for name, folder in FOLDERS.items():
        run = found["runs"][name]
        assert json.loads((out / folder / "run.json").read_text()) == run
        assert (run["data"], run["tasks"], run["order"]) == ("digits", [6, 2, 2], "lucir1993")
    assert len({run["accuracy"][0] for run in found["runs"].values()}) == 1  # the base task is trained once
    assert {path.name for path in out.iterdir()} == {*FOLDERS.values(), "shared", "demo.png"}
    assert found["picture"] == str(out / "demo.png")


def test_the_picture_is_drawn_at_a_size_to_look_at(done: tuple[Path, Any]) -> None:
    picture = imread(done[0] / "demo.png")
    height, width = picture.shape[:2]
    assert 400 < height < 1000 and 1000 < width < 2000
    assert picture[..., :3].std() > 0.05  # something was drawn
    assert picture[0, 0, :3].tolist() == [1, 1, 1]


def test_bytes_are_those_on_disk(done: tuple[Path, Any]) -> None:
    stored = {name: run["storage_bytes"] for name, run in json.loads(done[1].stdout)["runs"].items()}
    assert stored["fine-tuning"]["total"] == 0
    assert stored["all images"]["total"] == 200 * (64 + 4)
    recording = done[0] / "kril" / "recording-2.krn"
    assert stored["KRIL"]["total"] == recording.stat().st_size <= FEW_BUDGET
    assert len(krnet.open(recording)) == 200


def test_kril_may_keep_less_than_half_the_bytes_of_all_images() -> None:
    train = load_digits().train  # all of them, not the few of the other tests
    assert (train.images.numel() + 4 * len(train.labels)) / 2 > BUDGET


def test_the_last_sentence_has_the_bytes_and_accuracies_of_both() -> None:
    runs = {
        name: {"last": last, "storage_bytes": {"total": total}}
        for name, last, total in (("fine-tuning", 0.101, 0), ("KRIL", 0.9734, 29_123), ("all images", 0.9881, 98_056))
    }
    text = demo_command.summary(runs)
    for part in ("KRIL keeps 29.12 kB", "97.3 %", "takes 98.06 kB", "98.8 %", "10.1 %"):
        assert part in text


@pytest.mark.parametrize("short", [False, True])
def test_only_the_short_demo_says_that_it_compares_nothing(
    short: bool, done: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = json.loads(done[1].stdout)["runs"]
    methods = {method: runs[name] for name, method, _ in demo_command.RUNS}
    monkeypatch.setattr(learning, "learn", lambda method, *args, **options: methods[method])
    titles: list[str] = []
    real = Figure.suptitle
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **o: titles.append(text) or real(self, text, **o))
    shown = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), *(["--short"] if short else [])])
    assert shown.exit_code == 0, shown.output
    assert ("too briefly to compare" in shown.stdout, "too little training" in titles[0]) == (short, short)


def test_a_second_call_shows_the_runs_and_learns_nothing_anew(
    done: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "_run_task", None)
    again = demo("--out", done[0])
    assert again.exit_code == 0, again.output
    found, lines = json.loads(done[1].stdout), again.stdout.splitlines()
    assert lines[0].split() == ["method", "last", "accuracy", "average", "bytes", "kept"]
    for name, run in found["runs"].items():
        (line,) = [line for line in lines if line.startswith(f"{name}  ")]
        assert f"{100 * run['last']:.2f}" in line and line.rstrip().endswith(f"{run['storage_bytes']['total']:,}")
    assert lines[-5:-3] == [found["summary"], demo_command.SHORT_NOTE]
    assert lines[-3].startswith(f"The picture is {done[0] / 'demo.png'}; the demo took ")
    assert lines[-1].strip() == found["next"]


def test_the_next_command_to_try_works(done: tuple[Path, Any]) -> None:
    program, *arguments = shlex.split(json.loads(done[1].stdout)["next"])
    assert program == "krnet"
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0 and "200 of 8x8x8" in shown.stdout.replace("×", "x"), shown.output


@pytest.mark.parametrize("on_path", [True, False])
def test_the_next_command_names_the_program_as_a_shell_finds_it(
    on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = tmp_path / "bin" / "krnet"
    called.parent.mkdir()
    called.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(called)])
    monkeypatch.setenv("PATH", str(called.parent if on_path else tmp_path))
    assert demo_command.program() == ("krnet" if on_path else str(called))


def test_a_demo_that_was_stopped_goes_on_when_called_again(done: tuple[Path, Any], tmp_path: Path) -> None:
    with ctrl_c_at(6):
        stopped = demo("--out", tmp_path)
    assert stopped.exit_code == 130 and stopped.stdout == ""
    assert f"stopped; what was done is in {tmp_path}" in stopped.stderr
    refused = demo("--out", tmp_path, "--seed", 5)
    assert refused.exit_code == 1 and "made with seed 0; this run has 5" in refused.stderr
    resumed = demo("--out", tmp_path, "--json", "--quiet")
    assert resumed.exit_code == 0 and resumed.stderr == ""
    for name, run in json.loads(done[1].stdout)["runs"].items():
        assert_same_run(json.loads(resumed.stdout)["runs"][name], run)
