"""`krnet learn` as a user meets it: run.json where it was said to be, one JSON value, exit codes, stop and resume."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import krnet
from krnet import data, protocol
from krnet import task_loop as learning
from krnet.cli import app as cli
from krnet.cli import output, run_tables
from krnet.config import describe
from krnet.data import folder as imagefolder
from krnet.io import archive, ledger
from krnet.learners import base
from krnet.nn import backbones
from krnet.train.classifier import Descent
from learning_tools import assert_same_run, ctrl_c_at

QUICK = ["--data", "digits", "--sizes", "4,3,3", "--device", "cpu", "--set", "batch_size=32"]
QUICK_KRIL = ["--preset", "paper", "--set", "recorder_iterations=12", "--set", "recorder_settings=d0=16,c0=8,c1=8"]
pytestmark = pytest.mark.usefixtures("few_digits")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["learn", *(str(a) for a in arguments)])


def learn(*arguments: object, out: Path) -> Any:
    """The JSON value of a run that succeeds."""
    result = run(*arguments, *QUICK, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------ what is written and printed


def test_run_json_lies_in_the_folder_and_is_what_json_prints(tmp_path: Path) -> None:
    found = learn("finetune", "--epochs", 1, "--seed", 3, "--order", "natural", out=tmp_path / "new" / "run")
    assert json.loads((tmp_path / "new" / "run" / "run.json").read_text()) == found
    assert (found["method"], found["data"], found["seed"]) == ("finetune", "digits", 3)
    assert (found["order"], found["class_order"], found["tasks"]) == ("natural", list(range(10)), [4, 3, 3])
    assert found["order_hash"] == protocol.order_hash(range(10))
    assert {"accuracy_matrix", "last", "average", "average_without_base", "forgetting", "storage_bytes"} <= found.keys()
    left = {name for name in files(tmp_path / "new" / "run") if not name.startswith("tensorboard")}
    assert left == {"report.html", "run.json", "settings.json", "state.krn"}


def test_ledger_appends_a_row_for_each_method_and_base_tasks_are_shared(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    shared = ("--shared", tmp_path / "shared")
    runs = learn("finetune", "joint", "--epochs", 1, "--ledger", "--recipe", "mine", *shared, out=tmp_path / "two")
    learn("finetune", "--epochs", 1, *shared, out=tmp_path / "quiet")
    rows = ledger.read()
    assert [(row["recipe"], row["metrics"]["method"]) for row in rows] == [("mine", "finetune"), ("mine", "joint")]
    for row, found in zip(rows, runs, strict=True):
        assert row["metrics"]["accuracy_matrix"] == found["accuracy_matrix"]
        assert row["settings"].items() >= found["settings"].items() and row["seed"] == found["seed"]
        assert row["class_order"] == f"{found['order']} ({found['order_hash']})"
    assert len(list((tmp_path / "shared").iterdir())) == 1


def test_a_row_has_the_bytes_of_every_part_and_those_of_the_network(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    learn("kril", "--epochs", 1, "--ledger", *QUICK_KRIL, out=tmp_path / "kril")
    learn("icarl", "--epochs", 1, "--ledger", "--set", "exemplars_per_class=3", out=tmp_path / "icarl")
    kril, icarl = ledger.read()
    on_disk = {path.name: path.stat().st_size for path in (tmp_path / "kril").glob("*.krn")}
    assert kril["bytes"] == {"base recording": on_disk["base.krn"], "later recording": on_disk["later-2.krn"]}
    assert kril["metrics"]["storage_files"] == {"base recording": "base.krn", "later recording": "later-2.krn"}
    assert icarl["bytes"] == {"exemplars": 10 * 3 * 64, "exemplar_labels": 10 * 3 * 4}
    for row, folder in ((kril, "kril"), (icarl, "icarl")):
        assert sum(row["bytes"].values()) == row["metrics"]["storage_bytes"]["total"]
        state = archive.open_archive(tmp_path / folder / "state.krn")
        network = [state.tensor(name) for name in state.names if name.startswith("model.")]
        assert row["metrics"]["network_bytes"] == sum(value.numel() * value.element_size() for value in network) > 0


def test_validation_judges_on_held_out_images_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    options = ("finetune", "--epochs", 2, "--validation", 4)
    found = learn(*options, "--ledger", "--shared", tmp_path / "shared", out=tmp_path / "run")
    assert (found["validation"], found["data"]) == (4, "digits-validation4")
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["validation"] == 4
    (row,) = ledger.read()
    assert row["metrics"]["validation"] == 4 and not ledger.is_result(row)
    # The network answers the held-out images as the run says, also when it is loaded again.
    held_out = data.load("digits").with_validation(4).test
    for loaded in (krnet.load_run(tmp_path / "run", device="cpu"), krnet.load_run(tmp_path / "run", device="cpu")):
        is_right = loaded.predict(held_out.images) == held_out.labels
        assert float(is_right.double().mean()) == pytest.approx(found["last"])
        assert "judged on 4 held-out training images a class" in repr(loaded)
    shown = run(*options, *QUICK, "-o", tmp_path / "run", "--resume")
    assert "judged on 4 held-out training images a class" in shown.stdout

    # A real run has none of it: another folder, another base task, another row.
    other = run("finetune", "--epochs", 2, *QUICK, "-o", tmp_path / "run", "--resume")
    assert other.exit_code == 1 and "made with validation 4; this run has 0" in other.stderr
    real = learn("finetune", "--epochs", 2, "--ledger", "--shared", tmp_path / "shared", out=tmp_path / "real")
    assert (real["validation"], real["data"]) == (0, "digits")
    assert len(list((tmp_path / "shared").iterdir())) == 2
    assert ledger.is_result(ledger.read()[1])
    other = run(*options, *QUICK, "-o", tmp_path / "real", "--resume")
    assert other.exit_code == 1 and "made with validation 0; this run has 4" in other.stderr


def test_several_methods_are_judged_on_the_same_held_out_images(tmp_path: Path) -> None:
    found = learn("finetune", "joint", "--epochs", 1, "--validation", 4, out=tmp_path / "runs")
    assert [made["validation"] for made in found] == [4, 4] and found[0]["data_digest"] == found[1]["data_digest"]


def test_accuracies_are_fractions_in_json_and_percent_on_the_screen(tmp_path: Path) -> None:
    found = learn("icarl", "--epochs", 2, "--set", "exemplars_per_class=3", out=tmp_path / "run")
    assert set(found["rows"]) == {"cnn", "nme"}
    for row in found["rows"].values():
        assert all(0 <= value <= 1 for value in row["accuracy"])
    shown = run(
        "icarl", *QUICK, "--epochs", 2, "--set", "exemplars_per_class=3", "-o", tmp_path / "run", "--resume"
    )  # the same run again
    assert shown.exit_code == 0, shown.output
    for name, row in found["rows"].items():
        (line,) = [line for line in shown.stdout.splitlines() if line.startswith(f"icarl ({name})")]
        *words, size, unit, _, _ = line.split()[2:]
        numbers = [float(word) for word in words]
        assert numbers[:3] == pytest.approx([100 * value for value in row["accuracy"]], abs=0.01)
        assert numbers[3:6] == pytest.approx(
            [100 * row[key] for key in ("average", "average_without_base", "forgetting")], abs=0.01
        )
        assert len(numbers) == 6 and f"{size} {unit}" == output.short_size(found["storage_bytes"]["total"])
    title = shown.stdout.splitlines()[0]
    assert "digits" in title and "4+3+3" in title and "lucir1993" in title and found["order_hash"] in title
    assert f"written to {tmp_path / 'run'}" in shown.stderr


def test_a_narrow_terminal_breaks_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = run("finetune", *QUICK, "--epochs", 1, "-o", tmp_path / "run")
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("finetune")]
    assert re.fullmatch(r"finetune +(-?[\d.]+ +){6}0 bytes +\d+ +\d+ *", row), result.stdout


def a_run(method: str = "kril", forgetting: float | None = 0.1, total: int = 45_123, **more: Any) -> dict[str, Any]:
    """What the table of `krnet learn` needs of a run.json."""
    accuracy: dict[str, Any] = {"accuracy": [0.9, 0.8], "average": 0.85, "average_without_base": 0.8}
    storage = {"total": total, "equivalent_exemplars": total / 3072}
    return {
        "method": method, "data": "digits", "tasks": [6, 4], "order": "natural", "order_hash": "0", "seed": 0,
        "row": "cnn", **accuracy, "forgetting": forgetting, "storage_bytes": storage, "seconds": 3.0, **more,
    }  # fmt: skip


def test_the_table_has_a_unit_beside_each_size_and_says_that_bytes_are_counted_as_images(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_tables.show_runs([a_run(), a_run("joint", total=153_700_000), a_run("finetune", total=0)])
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-4:] == ["stored", "as", "images", "seconds"] and len(rows) == 3
    for row, expected in zip(rows, ("45.1 kB 15", "154 MB 50,033", "0 bytes 0"), strict=True):
        assert " ".join(row.split()).endswith(f"{expected} 3")


@pytest.mark.parametrize(("forgetting", "explained"), [(-0.01, True), (0.0, False), (None, False)])
def test_only_negative_forgetting_is_explained(
    capsys: pytest.CaptureFixture[str], forgetting: float | None, explained: bool
) -> None:
    run_tables.show_runs([a_run(forgetting=0.1), a_run(forgetting=forgetting)])
    assert ("Forgetting below 0: " in capsys.readouterr().out) is explained


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (999, "999 bytes"), (1000, "1.00 kB"), (9_996, "10.0 kB"), (99_960, "100 kB"), (48_000, "48.0 kB"),
        (6_100_000, "6.10 MB"), (13_045_760_000, "13.0 GB"),
    ],
)  # fmt: skip
def test_a_short_size_has_three_digits(num_bytes: int, text: str) -> None:
    assert output.short_size(num_bytes) == text


def test_several_methods_give_a_list_and_a_folder_each_and_train_the_base_task_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_tasks = []
    train = Descent.run

    def note(self: Descent, *arguments: Any) -> None:
        base_tasks.extend([self.name] if self.shared else [])
        train(self, *arguments)

    monkeypatch.setattr(Descent, "run", note)
    found = learn("joint", "finetune", "--epochs", 2, out=tmp_path / "runs")
    assert [made["method"] for made in found] == ["joint", "finetune"]
    for made in found:
        assert json.loads((tmp_path / "runs" / made["method"] / "run.json").read_text()) == made
    assert len(base_tasks) == 1
    assert found[0]["accuracy_matrix"][0] == found[1]["accuracy_matrix"][0]
    assert len(list((tmp_path / "runs" / "shared").iterdir())) == 1


def test_sharing_the_base_task_does_not_change_what_comes_of_it(tmp_path: Path) -> None:
    together = learn("joint", "finetune", "--epochs", 1, out=tmp_path / "both")[1]
    alone = learn("finetune", "--epochs", 1, out=tmp_path / "one")
    assert_same_run(together, alone)


def test_tasks_that_joint_training_leaves_out_have_no_accuracy(tmp_path: Path) -> None:
    result = run("joint", *QUICK, "--epochs", 1, "--set", "only_last=true", "-o", tmp_path / "run")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    first, *between, last = found["accuracy"]
    assert first is not None and last == found["last"] and set(between) == {None}
    assert found["average"] is None and found["forgetting"] is None
    assert " - " in result.stdout


def test_all_stands_for_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "learner_names", lambda: ("finetune", "joint"))
    found = learn("all", "finetune", "--epochs", 1, out=tmp_path / "runs")
    assert [made["method"] for made in found] == ["finetune", "joint"]


def test_without_out_the_folder_is_named_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("finetune", *QUICK, "--epochs", 1, "--seed", 4)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs" / "finetune-digits-2-lucir1993-4" / "run.json").exists()


def test_switches_and_settings_end_in_the_settings_of_the_run(tmp_path: Path) -> None:
    found = learn(
        "kril", "--no-aux", "--no-kr2", "--single", "--fixed-layers", 3, "--recorder", "raw", "--epochs", 1,
        "--set", "head=trained",
        "--set", "tail_lr=0.5", "--set", "drops=0.4,0.8", "--set", "new_features=plain", out=tmp_path / "run",
    )  # fmt: skip
    expected = {
        "aux": 0.0, "kr2": False, "single": True, "fixed_layers": 3, "recorder": "raw", "epochs": 1, "base_epochs": 1,
        "tail_lr": 0.5, "drops": [0.4, 0.8], "new_features": "plain", "batch_size": 32, "backbone": "resnet8",
    }  # fmt: skip
    assert {name: found["settings"][name] for name in expected} == expected
    kept = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert kept["settings"] == found["settings"]


def test_without_switches_the_settings_are_the_methods_own_and_those_of_the_images(tmp_path: Path) -> None:
    quick = ("--epochs", 1, "--set", "head_epochs=2")
    found = learn("kril", "--recorder", "raw", *quick, out=tmp_path / "run")["settings"]
    assert (found["kr2"], found["single"], found["fixed_layers"], found["aux"]) == (True, False, 5, 2.0)


def test_a_setting_goes_to_the_methods_that_have_it(tmp_path: Path) -> None:
    found = learn("finetune", "icarl", "--epochs", 1, "--set", "exemplars_per_class=2", out=tmp_path / "runs")
    assert "exemplars_per_class" not in found[0]["settings"] and found[1]["settings"]["exemplars_per_class"] == 2


def test_tasks_may_be_given_by_number_or_by_sizes(tmp_path: Path) -> None:
    common = ("finetune", "--data", "digits", "--device", "cpu", "--epochs", 1, "--json")
    equal = json.loads(run(*common, "--base-classes", 4, "--tasks", 2, "-o", tmp_path / "a").stdout)
    sizes = json.loads(run(*common, "--sizes", "2,1x3,5", "-o", tmp_path / "b").stdout)
    default = json.loads(run(*common, "--tasks", 5, "-o", tmp_path / "c").stdout)
    assert equal["tasks"] == [4, 3, 3] and sizes["tasks"] == [2, 1, 1, 1, 5] and default["tasks"] == [5, 1, 1, 1, 1, 1]
    assert [len(row) for row in sizes["accuracy_matrix"]] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_whole_digits_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As a script would call it: data on stdout, progress on stderr."""
    command = ["learn", "finetune", "--data", "digits", "--sizes", "9,1", "--epochs", "1", "--set", "batch_size=256"]
    done = subprocess.run(
        [sys.executable, "-m", "krnet", *command, "--device", "cpu", "--json", "-o", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["data"] == "digits" and found["tasks"] == [9, 1]
    for text in ("reading the images", "finetune, base task: classifier", "task 1 of 1 done  accuracy ", " %"):
        assert text in done.stderr


def test_quiet_means_silence_on_stderr(tmp_path: Path) -> None:
    for out, extra in (("a", []), ("b", ["--json"])):
        result = run("finetune", *QUICK, "--epochs", 1, "-o", tmp_path / out, "--quiet", *extra)
        assert result.exit_code == 0 and result.stderr == ""


def test_tensorboard_logs_hold_the_loss_and_the_accuracy(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = learn("finetune", "--epochs", 3, out=tmp_path / "run")
    kept = loader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    kept.Reload()
    tags = kept.Tags()["scalars"]
    assert "loss/finetune, base task: classifier (strong)" in tags and "loss/finetune, task 2 of 2: classifier" in tags
    logged = [event.value for event in kept.Scalars("accuracy/finetune")]
    assert logged == pytest.approx(found["accuracy"])


# ------------------------------------------------------------------ help


def test_list_settings_names_and_describes_every_setting_of_the_methods_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("kril", "lucir", "--list-settings")
    assert result.exit_code == 0, result.output
    common, kril, lucir = re.split(r"\n\n(?:kril|lucir)\n", result.stdout)
    for text, config in ((common, base.LearnerConfig), (kril, base.get_learner("kril").config_class)):
        words = " ".join(text.split())
        own = {field.name for field in fields(config)} - (
            set() if config is base.LearnerConfig else {field.name for field in fields(base.LearnerConfig)}
        )
        for name in own:
            assert f"{name} {describe(config)[name]} [default: " in words
    assert "last_relu" in lucir and "last_relu" not in kril  # LUCIR's default is another
    assert "finetune" not in result.stdout
    assert files(tmp_path) == set()


def test_list_settings_without_a_method_lists_them_all() -> None:
    result = run("--list-settings")
    assert result.exit_code == 0, result.output
    assert result.stdout == run("all", "--list-settings").stdout
    assert all(f"\n\n{name}\n" in result.stdout for name in base.learner_names())


def test_learning_needs_a_method() -> None:
    result = run(*QUICK)
    assert result.exit_code == 2
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())
    assert "'METHOD...': none given; expected some of" in words and "kril" in words


def test_help_opens_with_what_is_written_and_its_example_is_right(tmp_path: Path, monkeypatch: Any) -> None:
    text = run("--help").stdout
    assert text.split("\n\n")[1].strip().startswith("Writes ")
    for name in base.learner_names():
        assert name in text
    example = re.search(r"krnet learn (.*)", text.split("Example:")[1])
    assert example is not None
    monkeypatch.chdir(tmp_path)
    done = run(*example[1].split(), "--epochs", 1, *QUICK_KRIL, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output


def test_base_epochs_that_are_set_win_over_those_that_epochs_implies(tmp_path: Path) -> None:
    found = learn("finetune", "--epochs", 1, "--set", "base_epochs=2", out=tmp_path / "run")["settings"]
    assert (found["epochs"], found["base_epochs"]) == (1, 2)


# ------------------------------------------------------------------ refusals

REFUSED = {
    "an unknown method": ("krill", "unknown method 'krill'; did you mean 'kril'?"),
    "an unknown method among known ones": ("finetune all fine", "unknown method 'fine'"),
    "an unknown setting": ("finetune --set epoch=3", "unknown setting 'epoch'; did you mean 'epochs'?"),
    "a setting of another method": ("finetune --set exemplars_per_class=3", "of finetune: it is one of icarl, lucir"),
    "a switch of another method": ("finetune --no-aux", "unknown setting 'aux' of finetune: it is one of kril"),
    "a setting given twice": ("kril --epochs 2 --set epochs=3", "epochs is given twice: 2 and 3"),
    "base epochs given twice": (
        "finetune --epochs 1 --set base_epochs=2 --set base_epochs=3",
        "base_epochs is given twice: 2 and 3",
    ),
    "a setting out of range": ("finetune --set lr=-1", "lr is -1; expected at least 0"),
    "a word for a number": ("finetune --epochs 1 --set drops=early", "drops is 'early'"),
    "no epochs": ("finetune --epochs 0", "epochs is 0; expected at least 1"),
    "an unknown recorder": ("kril --recorder tape", "unknown recorder 'tape'; did you mean 'paper'?"),
    "a setting the recorder has not": ("kril --preset paper --set recorder_settings=d00=8", "did you mean 'd0'?"),
    "a recorder's setting without value": (
        "kril --set recorder_settings=d0",
        "'d0' is not a setting; expected name=value",
    ),
    "a cut inside a block": ("kril --fixed-layers 4", "cannot cut after 4 layers; possible: 0, 1, 3, 5, 7"),
    "an unknown class order": ("finetune --order lucir", "did you mean 'lucir1993'?"),
    "an order of other classes": ("finetune --order 3,1,2", "the class order lists 3 classes"),
    "an unknown device": ("finetune --device abacus", "device 'abacus' is not known"),
    "a seed below 0": ("finetune --seed -1", "seed is -1"),
    "a preset that no method has": ("finetune --preset own", "preset is 'own'; these methods have paper"),
    "joint training on new logits": ("joint --set ce=new", "ce is 'new'; expected seen"),
    "frozen statistics of a new network": ("joint --set bn=frozen", "a new network has no statistics"),
    "an image size for digits": ("finetune --image-size 32", "(--image-size, --subset) are for folders of images"),
    "a subset of digits": ("finetune --subset 5", "(--image-size, --subset) are for folders of images"),
    "validation below 0": ("finetune --validation -1", "validation is -1; expected at least 0"),
    "validation that leaves no image": ("finetune --validation 20", "20 training images; expected at most 19"),
    "the second of two methods": ("finetune icarl --set ce=new", "ce is 'new'; expected seen"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_is_exit_1_with_a_message_and_writes_nothing(tmp_path: Path, case: str) -> None:
    command, message = REFUSED[case]
    device = [] if "--device" in command else ["--device", "cpu"]
    for extra in ([], ["--json"]):
        result = run(*command.split(), "--data", "digits", "--sizes", "4,3,3", *device, "-o", tmp_path / "run", *extra)
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.stdout == ""
        last = result.stderr.rstrip().splitlines()[-1]
        assert last.startswith("error: ") and message in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data digit --tasks 2", "unknown data set 'digit'; did you mean 'digits'?"),
        ("--data nowhere", "unknown data set 'nowhere', and no such folder in "),
        ("--data digits --tasks 10", "tasks is 10; the base task leaves 5 of 10 classes"),
        ("--data digits --sizes 4,3", "sizes add up to 7 classes; expected all 10"),
        ("--data digits --sizes 10,0", "sizes is 0; expected at least 1"),
    ],
)
def test_data_and_tasks_that_do_not_fit_are_refused(tmp_path: Path, options: str, message: str) -> None:
    result = run("finetune", *options.split(), "-o", tmp_path / "run", "--device", "cpu")
    assert result.exit_code == 1 and message in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    ["--sizes 4,3,3 --tasks 2", "--sizes 4,3,3 --base-classes 4", "--sizes four", "--sizes 4,,3", "--set lr", "--no"],
)
def test_misuse_is_exit_2_and_writes_nothing(tmp_path: Path, options: str) -> None:
    result = run("finetune", "--data", "digits", *options.split(), "-o", tmp_path / "run")
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    learn("finetune", "--epochs", 1, out=tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")}
    result = run("finetune", *QUICK, "--epochs", 1, "-o", tmp_path / "run")
    assert result.exit_code == 1
    assert f"error: {tmp_path / 'run'}: holds a run already. Give --resume" in result.stderr
    assert {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")} == before


def test_of_several_methods_none_is_learned_if_one_of_the_folders_holds_a_run(tmp_path: Path) -> None:
    learn("finetune", "--epochs", 1, out=tmp_path / "runs" / "finetune")
    result = run("joint", "finetune", *QUICK, "--epochs", 1, "-o", tmp_path / "runs")
    assert result.exit_code == 1 and "finetune: holds a run already" in result.stderr
    assert not (tmp_path / "runs" / "joint").exists()


def test_a_run_json_without_its_settings_is_not_shown_as_the_result(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"method": "finetune"}')
    for extra in ([], ["--resume"]):
        assert run("finetune", *QUICK, "--epochs", 1, "-o", tmp_path / "run", *extra).exit_code == 1


# ------------------------------------------------------------------ stop and resume


def test_ctrl_c_is_exit_130_with_a_hint_and_resume_goes_on_to_the_same_end(tmp_path: Path) -> None:
    command = ("finetune", *QUICK, "--epochs", 2, "-o", tmp_path / "run", "--json")
    with ctrl_c_at(2):
        stopped = run(*command)
    assert stopped.exit_code == 130 and stopped.stdout == ""
    assert f"stopped; what was done is in {tmp_path / 'run'}" in stopped.stderr and "--resume" in stopped.stderr
    assert not (tmp_path / "run" / "run.json").exists()

    # Without --resume it is not overwritten, and other settings do not belong to it.
    assert run(*command).exit_code == 1
    other = run(*command, "--resume", "--set", "momentum=0.5")
    assert other.exit_code == 1 and "made with momentum 0.9; this run has 0.5" in other.stderr
    resumed = run(*command, "--resume")
    assert resumed.exit_code == 0, resumed.output
    straight = learn("finetune", "--epochs", 2, out=tmp_path / "straight")
    assert_same_run(json.loads(resumed.stdout), straight)


def test_several_methods_go_on_where_they_were_stopped(tmp_path: Path) -> None:
    command = ("finetune", "joint", *QUICK, "--epochs", 2, "-o", tmp_path / "runs", "--json")
    with ctrl_c_at(4):  # one look at the loss for each task: those of fine-tuning, then joint's second
        stopped = run(*command)
    assert stopped.exit_code == 130
    done = (tmp_path / "runs" / "finetune" / "run.json").read_bytes()
    resumed = run(*command, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert (tmp_path / "runs" / "finetune" / "run.json").read_bytes() == done
    assert [made["method"] for made in json.loads(resumed.stdout)] == ["finetune", "joint"]


def test_resume_of_a_finished_run_shows_it_and_changes_nothing(tmp_path: Path) -> None:
    found = learn("finetune", "--epochs", 1, out=tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")}
    assert learn("finetune", "--epochs", 1, "--resume", out=tmp_path / "run") == found
    assert {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")} == before


def test_resume_where_nothing_was_begun_begins(tmp_path: Path) -> None:
    assert learn("finetune", "--epochs", 1, "--resume", out=tmp_path / "run")["method"] == "finetune"


# ------------------------------------------------------------------ folders of images


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five classes of noise around a colour of their own, 24 x 20 pixels, and a sixth that is never chosen."""
    monkeypatch.setattr(imagefolder, "cache_folder", lambda: tmp_path / "cache")
    random = np.random.RandomState(0)
    for part, number in (("train", 8), ("val", 3)):
        for label, name in enumerate("abcdef"):
            (tmp_path / "pictures" / part / name).mkdir(parents=True)
            for nth in range(number):
                pixels = random.randint(0, 60, (20, 24, 3)) + np.array([label % 2, label % 3, label // 3]) * 60
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "pictures" / part / name / f"{nth}.png")
    return tmp_path / "pictures"


def test_a_folder_is_learned_at_the_size_and_with_the_classes_asked_for(tmp_path: Path, pictures: Path) -> None:
    common = ["finetune", "--data", pictures, "--sizes", "3,2", "--device", "cpu", "--epochs", 1, "--json"]
    small = run(*common, "--image-size", 12, "--subset", "5", "-o", tmp_path / "small")
    assert small.exit_code == 0, small.output
    found = json.loads(small.stdout)
    expected = data.load(str(pictures), image_size=12, choose=protocol.subset(5))
    assert expected.class_names == tuple("abcde") and expected.image_shape == (3, 12, 12)
    assert found["data_digest"] == expected.digest
    assert found["settings"]["backbone"] == "resnet8"  # what 12 pixels get
    listed = run(*common, "--image-size", 12, "--subset", "a,b,c,d,f", "-o", tmp_path / "listed")
    assert json.loads(listed.stdout)["data_digest"] != found["data_digest"]
    other = run(*common, "--image-size", 10, "--subset", "5", "-o", tmp_path / "small", "--resume")
    assert other.exit_code == 1 and "made with data_digest" in other.stderr
    unknown = run(*common, "--subset", "lucir1993", "-o", tmp_path / "other")
    assert unknown.exit_code == 1 and "drawn from 1000 class names; found 6" in unknown.stderr


@pytest.mark.parametrize("method", ["icarl", "finetune"])
def test_images_with_a_crop_are_learned_and_kept_whole(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(imagefolder, "MAX_PADDED_SIZE_PX", 15)
    made = data.load(str(pictures), image_size=16, choose=protocol.subset(5))
    assert made.crop == 14
    seen = set()
    forward = backbones.ResNet.forward

    def note(self: backbones.ResNet, images: Tensor) -> Tensor:
        seen.add(tuple(images.shape[1:]))
        return forward(self, images)

    monkeypatch.setattr(backbones.ResNet, "forward", note)
    split = protocol.split("natural", num_classes=5, sizes=[3, 2])
    own = {"exemplars_per_class": 2} if method == "icarl" else {}
    settings = {"base_epochs": 1, "epochs": 1, **own}
    found = learning.learn(method, made, split, out=tmp_path / "run", settings=settings, device="cpu")
    assert seen == {(3, 14, 14)}  # in training, herding and judging
    if method == "icarl":
        assert found["storage_bytes"]["exemplars"] == 5 * 2 * 3 * 16 * 16


def test_large_images_get_the_references_settings_for_imagenet() -> None:
    def settings(method: str, size: int) -> Any:
        pixels = torch.zeros(2, 3, size, size, dtype=torch.uint8)
        made = data.from_arrays(pixels, [0, 1], pixels, [0, 1])
        own = learning.settings_of([method], {}, made)[method]
        return base.make_config(base.get_learner(method), own)

    for method in base.learner_names():
        large, tiny = settings(method, 256), settings(method, 64)
        assert (large.backbone, tiny.backbone) == ("resnet18", "resnet18-small")
        if method in ("lucir", "icarl"):
            assert (large.base_epochs, large.epochs, large.weight_decay) == (90, 90, 1e-4)
            assert [round(drop * 90) for drop in large.drops] == [30, 60]
        elif method == "pass":
            assert [(c.epochs, c.weight_decay, c.temperature) for c in (large, tiny)] == [
                (100, 2e-4, 1.0),
                (100, 2e-4, 0.1),
            ]
            assert [round(drop * 100) for drop in large.drops] == [45, 90]
            continue
        else:
            assert (large.base_epochs, large.drops, large.weight_decay) == (100, (0.5, 0.75), 5e-4)
        assert (tiny.base_epochs, tiny.drops, tiny.weight_decay) == (100, (0.5, 0.75), 5e-4)
    assert (settings("lucir", 256).less_forget, settings("lucir", 64).less_forget) == (10, 5)
    kril, gfr = settings("kril", 256), settings("gfr", 256)
    assert (kril.epochs, kril.fixed_layers, kril.gamma) == (100, 13, 5e-4)
    assert (gfr.epochs, gfr.gan_epochs) == (101, 201)


# ------------------------------------------------------------------ from Python


def test_a_users_own_arrays_are_learned_through_python(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    # Colour images of 12 x 10 pixels, channels last; each class bright in a place of its own.
    labels = np.arange(60) % 6
    images = random.randint(0, 60, (60, 12, 10, 3)).astype(np.uint8)
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 2, :, label % 3] = 250
    made = data.from_arrays(images[:48], labels[:48], images[48:], labels[48:], name="bars", flip=True)
    split = protocol.split([5, 0, 3, 1, 4, 2], num_classes=6, sizes=[3, 2, 1])
    settings = {"backbone": "resnet8", "base_epochs": 12, "epochs": 6, "batch_size": 16}
    found = learning.learn("joint", made, split, out=tmp_path / "run", settings=settings, device="cpu")
    assert (found["data"], found["order"], found["tasks"]) == ("bars", "custom", [3, 2, 1])
    assert found["class_order"] == [5, 0, 3, 1, 4, 2]
    assert found["accuracy"][0] > 0.8
    assert found["storage_bytes"]["images"] == 48 * 12 * 10 * 3
    assert found["storage_bytes"]["labels"] == 48 * 4
    assert found["storage_bytes"]["equivalent_exemplars"] == pytest.approx(48 * (1 + 4 / 360))
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == found


def test_learning_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    split = protocol.split("natural", num_classes=10, sizes=[4, 3, 3])
    settings = {"backbone": "resnet8", "base_epochs": 1, "epochs": 1}
    learning.learn("finetune", data.load("digits"), split, out=tmp_path, settings=settings, device="cpu")
    assert torch.equal(torch.rand(1), expected)
