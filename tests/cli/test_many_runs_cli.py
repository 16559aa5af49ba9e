"""`krnet learn` with several seeds or class orders: where the runs are, their summary, stop and resume, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from krnet import data, protocol
from krnet.cli import app as cli
from krnet.cli import output
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.learners.scores import summarize
from krnet.many_runs import learn_many, run_folder
from krnet.train.classifier import Descent
from learning_tools import assert_same_run, ctrl_c_at

QUICK = [
    "--data",
    "digits",
    "--sizes",
    "6,4",
    "--device",
    "cpu",
    "--epochs",
    "1",
    "--base",
    "paper",
    "--set",
    "batch_size=64",
]
pytestmark = pytest.mark.usefixtures("few_digits")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["learn", *(str(a) for a in arguments)])


def learn(*arguments: object, out: Path) -> Any:
    """The JSON value of a command that succeeds."""
    result = run(*arguments, *QUICK, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def runs_in(folder: Path) -> set[str]:
    return {str(path.parent.relative_to(folder)) for path in folder.rglob("run.json")}


def test_every_method_learns_in_every_order_with_every_seed_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_tasks = []
    train = Descent.run

    def note(self: Descent, *arguments: Any) -> None:
        base_tasks.extend([self.name] if self.shared else [])
        train(self, *arguments)

    monkeypatch.setattr(Descent, "run", note)
    found = learn("finetune", "joint", "--seeds", "0,3", "--orders", "natural,gfr1993", out=tmp_path)
    expected = [
        (order, seed, method) for order in ("natural", "gfr1993") for seed in (0, 3) for method in ("finetune", "joint")
    ]
    assert [(made["order"], made["seed"], made["method"]) for made in found["runs"]] == expected
    for made, (order, seed, method) in zip(found["runs"], expected, strict=True):
        assert json.loads((tmp_path / order / f"seed-{seed}" / method / "run.json").read_text()) == made
    assert len(base_tasks) == 4  # one for each order and seed, for both methods
    assert found["summary"] == json.loads(json.dumps(summarize(found["runs"])))
    assert [(entry["method"], entry["num_runs"]) for entry in found["summary"]] == [("finetune", 4), ("joint", 4)]
    # A run of the product is the run that the command for one seed and order makes.
    alone = learn("finetune", "--seed", 3, "--order", "gfr1993", out=tmp_path / "alone")
    assert_same_run(found["runs"][6], alone)


def test_a_stopped_product_goes_on_and_each_run_has_one_row_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    command = ("finetune", "--seeds", "0,1", *QUICK, "-o", tmp_path / "runs", "--ledger")
    with ctrl_c_at(4):  # one look at the loss for each task: the first run has two
        stopped = run(*command)
    assert stopped.exit_code == 130 and "--resume" in stopped.stderr
    assert runs_in(tmp_path / "runs") == {"lucir1993/seed-0/finetune"}
    assert [row["seed"] for row in ledger.read()] == [0]
    done = (tmp_path / "runs/lucir1993/seed-0/finetune/run.json").read_bytes()
    refused = run(*command)
    assert refused.exit_code == 1 and "holds a run already" in refused.stderr

    resumed = learn("finetune", "--seeds", "0,1", "--ledger", "--resume", out=tmp_path / "runs")
    assert (tmp_path / "runs/lucir1993/seed-0/finetune/run.json").read_bytes() == done
    straight = learn("finetune", "--seeds", "0,1", out=tmp_path / "straight")
    for one, other in zip(resumed["runs"], straight["runs"], strict=True):
        assert_same_run(one, other)
    # A seed that is added later joins the runs that are there.
    more = learn("finetune", "--seeds", "0,1,2", "--ledger", "--resume", out=tmp_path / "runs")
    assert more["runs"][:2] == resumed["runs"] and more["summary"][0]["num_runs"] == 3
    assert [(row["recipe"], row["seed"]) for row in ledger.read()] == [("learn", 0), ("learn", 1), ("learn", 2)]
    assert runs_in(tmp_path / "runs") == {f"lucir1993/seed-{seed}/finetune" for seed in range(3)}


def test_runs_that_were_finished_without_a_ledger_get_their_rows_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    learn("finetune", "--seeds", "4", out=tmp_path / "runs")
    assert ledger.read() == []
    for _ in range(2):
        learn("finetune", "--seeds", "4", "--ledger", "--resume", out=tmp_path / "runs")
    assert [row["seed"] for row in ledger.read()] == [4]


def test_the_table_has_the_number_of_runs_and_a_deviation_only_for_several(tmp_path: Path) -> None:
    several = run("joint", "--seeds", "0,1", *QUICK, "-o", tmp_path / "two")
    assert several.exit_code == 0, several.output
    title, note, head, row, parts = several.stdout.splitlines()
    assert title.startswith("digits, classes 6+4, order lucir1993 (") and title.endswith("seeds 0, 1")
    assert "standard deviation" in note
    assert head.split()[:3] == ["method", "runs", "last"] and row.split()[:2] == ["joint", "2"]
    runs = [json.loads(path.read_text()) for path in sorted((tmp_path / "two").rglob("run.json"))]
    first, second = (100 * made["last"] for made in runs)
    half = abs(first - second) / 2**0.5  # the sample deviation of two numbers
    assert f"{(first + second) / 2:.2f} ± {half:.2f}" in row
    assert output.short_size(runs[0]["network_bytes"]) in row
    assert parts == "joint stores: images 12.8 kB, labels 800 bytes"  # 200 images of 64 pixels
    one = run("joint", "--seeds", "0", *QUICK, "-o", tmp_path / "one")
    assert one.exit_code == 0 and "±" not in one.stdout
    assert one.stdout.splitlines()[2].split()[:3] == ["joint", "1", f"{100 * runs[0]['last']:.2f}"]


def test_progress_says_which_run_it_is_and_logs_are_kept_apart(tmp_path: Path) -> None:
    result = run("finetune", "--seed", 5, "--orders", "natural", *QUICK, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "finetune natural seed 5, task 1 of 1 done  accuracy " in result.stderr
    assert f"written to {tmp_path}" in result.stderr
    assert {path.parent for path in tmp_path.rglob("tensorboard")} <= {tmp_path / "natural" / "seed-5"}


def test_without_out_the_folder_has_neither_seed_nor_order_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("finetune", "--seeds", "2", *QUICK, "--quiet").exit_code == 0
    assert runs_in(tmp_path) == {"runs/finetune-digits-1/lucir1993/seed-2/finetune"}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--orders lucir1993,gfr1939", 1, "unknown class order 'gfr1939'; did you mean 'gfr1993'?"),
        ("--orders zzz", 1, "unknown class order 'zzz'; known orders: lucir1993, gfr1993, icarl, natural"),
        ("--orders natural,icarl", 1, "class order 'icarl' is one of CIFAR-100's 100 classes, and there are 10"),
        ("--orders 3,1,2", 2, "give a list of class numbers with --order"),
        ("--orders natural,natural", 2, "natural is given twice"),
        ("--orders natural,", 2, "are not names"),
        ("--seeds 0,1,0", 2, "seeds: 0 is given twice"),
        ("--seeds 0,one", 2, "are not seeds"),
        ("--seeds=-1", 2, "are not seeds"),
        ("--seeds 0,3000000000", 1, "seed is 3000000000; expected 0 to"),
        ("--seeds 0,1 --seed 0", 2, "give either --seed or --seeds"),
        ("--orders natural --order natural", 2, "give either --order or --orders"),
        ("joint --seeds 0,1 --set ce=new", 1, "ce is 'new'; expected seen"),
    ],
)
def test_refusals_come_before_any_training(tmp_path: Path, options: str, code: int, message: str) -> None:
    result = run("finetune", *options.split(), *QUICK, "-o", tmp_path / "runs")
    assert result.exit_code == code, result.output
    words = " ".join("".join(" " if c in "│╭╮╰╯─" else c for c in result.stderr).split())
    assert message in words and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_the_last_seed_that_was_begun_otherwise_stops_the_product_before_the_first(tmp_path: Path) -> None:
    learn("finetune", "--seeds", "7", out=tmp_path)
    result = run("finetune", "--seeds", "0,7", *QUICK, "--set", "momentum=0.5", "-o", tmp_path, "--resume")
    assert result.exit_code == 1 and "made with momentum 0.9; this run has 0.5" in result.stderr
    assert runs_in(tmp_path) == {"lucir1993/seed-7/finetune"}


def test_orders_of_ones_own_have_folders_of_their_own_and_no_order_comes_twice(tmp_path: Path) -> None:
    first, second = (protocol.split(order, num_classes=3, sizes=[2, 1]) for order in ([2, 0, 1], [1, 0, 2]))
    assert run_folder(tmp_path, first, 0) == tmp_path / f"custom-{first.hash}" / "seed-0"
    assert run_folder(tmp_path, first, 0) != run_folder(tmp_path, second, 0)
    for splits, seeds in (([first, first], [0]), ([first], [1, 1]), ([], [0]), ([first], [])):
        with pytest.raises(SettingError, match=r"twice|none given"):
            learn_many(["finetune"], data.load("digits"), splits, seeds, out=tmp_path)
    assert list(tmp_path.iterdir()) == []
