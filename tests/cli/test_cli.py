"""The command line as a user meets it: files in, files out, data on stdout, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from typer.models import ArgumentInfo
from typer.testing import CliRunner

import forked
import krnet
from krnet.cli import app as cli
from krnet.cli import bench as cli_bench
from krnet.cli import progress, recording_rows
from krnet.config import describe
from krnet.io import archive
from krnet.learners.base import learner_names
from krnet.progress import Progress
from krnet.recorders.base import get_recorder, recorder_names
from krnet.train.config import FitConfig

N, SHAPE = 40, (4, 5, 3)
SMALL = ["--recorder", "paper", "--device", "cpu", "--set", "c0=8", "--set", "d0=16", "--set", "c1=8"]
INFO_KEYS = {
    "num_samples", "shape", "recorder", "bytes", "bytes_per_sample", "bits_per_value", "mse", "r2", "zero_ratio",
    "fit_seconds",
}  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """features.npy, labels.npy and a.krn recorded from them; tests write elsewhere."""
    folder = tmp_path_factory.mktemp("cli")
    generator = torch.Generator().manual_seed(0)
    np.save(folder / "features.npy", torch.randn(N, *SHAPE, generator=generator).relu().numpy())
    np.save(folder / "labels.npy", np.arange(N) % 4 + 10)
    result = run(
        "record", folder / "features.npy", "--labels", folder / "labels.npy", "-o", folder / "a.krn",
        "--iterations", 60, *SMALL,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def inputs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with good and bad inputs."""
    for name in ("features.npy", "a.krn"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    features = np.load(tmp_path / "features.npy")
    features[3, 2, 1, 0] = np.nan
    np.save(tmp_path / "nan.npy", features)
    np.save(tmp_path / "short.npy", np.arange(3))
    (tmp_path / "text.txt").write_text("1 2 3")
    damaged = bytearray((tmp_path / "a.krn").read_bytes())
    damaged[-100] ^= 1
    (tmp_path / "damaged.krn").write_bytes(damaged)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------ what commands do


def test_recorded_features_come_back_through_files(folder: Path, tmp_path: Path) -> None:
    ids = tmp_path / "x.npy"
    found = run_json("replay", folder / "a.krn", "--ids", "5,3,-1,0:2", "-o", ids, "--labels-out", tmp_path / "y.npy")
    replayed = np.load(ids)
    expected = krnet.open(folder / "a.krn")[[5, 3, N - 1, 0, 1]]
    np.testing.assert_allclose(replayed, expected, atol=1e-6)
    assert np.load(tmp_path / "y.npy").tolist() == [11, 13, 13, 10, 11]
    assert (found["num_samples"], found["shape"], found["dtype"]) == (5, list(SHAPE), "float32")
    assert found["bytes"] == ids.stat().st_size


def test_replay_without_ids_is_all_of_it(folder: Path, tmp_path: Path) -> None:
    run_json("replay", folder / "a.krn", "-o", tmp_path / "x.npy", "--precision", "fast", "--device", "cpu")
    assert np.load(tmp_path / "x.npy").shape == (N, *SHAPE)


def test_info_names_only_settings_that_were_changed_rounded_and_no_line_ends_in_blanks(tmp_path: Path) -> None:
    features = torch.rand(40, 4, 5, 3, generator=torch.Generator().manual_seed(0))
    path = krnet.record(features, budget=8_000, iterations=3, out=tmp_path / "x.krn").path
    lines = run("info", path).stdout.splitlines()
    rows = dict(line.split(maxsplit=1) for line in lines)
    shown = dict(part.split() for part in rows["recorder"].removeprefix("krnet: ").split(", "))
    settings = krnet.open(path).settings
    assert {"step", "components"} <= shown.keys() <= {"step", "components", "c1", "dead_zone"}
    assert shown["step"] == f"{settings['step']:.4g}" != str(settings["step"])
    assert all(line == line.rstrip() and len(line) < 100 for line in lines[1:])
    assert run_json("info", path)["settings"] == settings


def test_record_and_info_print_the_same_object_with_the_promised_keys(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.krn"
    recorded = run_json("record", folder / "features.npy", "-o", out, "--iterations", 3, *SMALL)
    assert recorded == run_json("info", out)
    assert recorded.keys() >= INFO_KEYS
    assert recorded["num_samples"] == N
    assert recorded["shape"] == list(SHAPE)
    assert recorded["recorder"] == "paper"
    assert recorded["bytes"] == out.stat().st_size
    assert recorded["bytes_per_sample"] == recorded["bytes"] / N
    assert recorded["bits_per_value"] == 8 * recorded["bytes"] / (N * 60)


def test_every_option_of_record_reaches_the_fit(folder: Path, tmp_path: Path) -> None:
    found = run_json(
        "record", folder / "features.npy", "-o", tmp_path / "b.krn", "--preset", "cifar100", "--iterations", 2,
        "--stop-at-r2", 0.5, "--time-budget", "1m", "--schedule", "paper", "--seed", 7, *SMALL, "--set", "lr=1e-4",
        "--set", "group_size=16", "--set", "last_norm=true", "--set", "compile=false",
    )  # fmt: skip
    expected = {"iterations": 2, "stop_at_r2": 0.5, "time_budget": 60.0, "schedule": "paper", "seed": 7, "lr": 1e-4}
    assert {name: found["fit"][name] for name in expected} == expected
    assert (found["fit"]["preset"], found["fit"]["compile"]) == ("cifar100", False)
    assert (found["settings"]["group_size"], found["settings"]["last_norm"]) == (16, True)


def test_key_names_the_array_of_a_file_with_several(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", maps=np.load(folder / "features.npy"), other=np.zeros(3))
    assert run("record", tmp_path / "two.npz", "-o", tmp_path / "b.krn", "--iterations", 1).exit_code == 1
    run_json("record", tmp_path / "two.npz", "--key", "maps", "-o", tmp_path / "b.krn", "--iterations", 1, *SMALL)
    verified = run_json("verify", tmp_path / "b.krn", "--against", tmp_path / "two.npz", "--key", "maps")
    assert verified["same_features"]


def test_verify_measures_the_error_against_the_features(folder: Path) -> None:
    assert run_json("verify", folder / "a.krn")["mse"] is None
    found = run_json("verify", folder / "a.krn", "--against", folder / "features.npy")
    assert found["ok"] and found["same_features"]
    assert found["mse"] == pytest.approx(run_json("info", folder / "a.krn")["mse"])


def test_plan_takes_class_counts_or_a_number_of_samples() -> None:
    found = run_json("plan", "--shape", "256,14,14", "--class-counts", "1300x2,732", "--preset", "imagenet-published")
    assert (found["num_samples"], found["num_classes"], found["num_groups"]) == (3332, 3, 8)
    samples = ("--shape", "64x8x8", "--num-samples", 1000)
    assert run_json("plan", *samples, "--recorder", "paper", "--set", "c0=64")["settings"]["c0"] == 64
    found = run_json("plan", *samples)
    assert (found["recorder"], found["num_samples"], found["file_bytes"]) == ("krnet", 1000, 4096 * 1000 // 8 + 6_000)
    assert run_json("plan", *samples, "--budget", "12kB")["file_bytes"] == 12_000


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("info a.krn", ["40 of 4×5×3, 4 classes", "per sample", "MB ("]),
        ("verify a.krn --against features.npy", ["the features it was recorded from", "R2"]),
        ("replay a.krn --ids 3 -o x.npy", ["x.npy: 1 samples of 4×5×3, float32"]),
        (
            "plan --shape 256,14,14 --class-counts 1300x50 --recorder paper",
            ["50 in 150 groups", "13,045.760 MB (13,045,760,000 bytes)"],
        ),
        (
            "plan --shape 256,14,14 --class-counts 1300x50",
            ["65,000 of 256×14×14, 50 classes", "krnet", "407.686 MB (407,686,000 bytes), 32.00 times smaller"],
        ),
    ],
)
def test_without_json_there_is_a_table(inputs: Path, command: str, expected: list[str]) -> None:
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    for text in expected:
        assert text in result.stdout


# ------------------------------------------------------------------ stdout, stderr, progress


def test_progress_goes_to_stderr_and_stdout_is_one_json_object(folder: Path, tmp_path: Path) -> None:
    """In a process of its own, as a script would call it."""
    command = ["record", str(folder / "features.npy"), "-o", str(tmp_path / "b.krn"), "--iterations", "20", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "krnet", *command, *SMALL], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_samples"] == N
    for text in ("/s", "R2", "elapsed", "left"):
        assert text in done.stderr


def test_quiet_means_silence_on_stderr(folder: Path, tmp_path: Path) -> None:
    result = run(
        "record", folder / "features.npy", "-o", tmp_path / "b.krn", "--iterations", 20, "--quiet", "--json", *SMALL
    )
    assert result.exit_code == 0
    assert result.stderr == ""


def test_missed_target_is_a_warning_that_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    command = ("record", folder / "features.npy", "-o", tmp_path / "b.krn", "--iterations", 2, *SMALL)
    missed = run(*command, "--stop-at-r2", 0.9999, "--json")
    assert missed.exit_code == 0
    assert (tmp_path / "b.krn").exists()
    assert "warning: " in missed.stderr and "target of 0.9999" in missed.stderr and "--iterations" in missed.stderr
    json.loads(missed.stdout)
    assert "warning" not in run(*command, "--stop-at-r2", -10).stderr


def test_the_warning_tells_an_r2_from_the_target_that_it_missed() -> None:
    assert recording_rows.number_below(0.91234, 0.95) == "0.9123"
    assert recording_rows.number_below(0.9999851, 0.99999) == "0.999985"


def test_a_fit_without_iterations_has_its_seconds() -> None:
    assert recording_rows.fit_text({"iterations": 0, "fit_seconds": 13.93}) == "13.9 s"
    assert recording_rows.fit_text({"iterations": 0, "fit_seconds": 0.0}) == "none needed"


@pytest.mark.parametrize("command", [cli.plan, cli.record, cli.verify, cli.replay, cli.learn, cli_bench.rate])
def test_an_option_whose_metavar_is_its_name_in_capitals_is_named(command: Callable[..., None]) -> None:
    """typer 0.27 would call --ids --IDS."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            named = isinstance(option, ArgumentInfo) or option.default is not ...  # typer keeps the name there
            assert (option.metavar or "").lower() != name or named


def test_append_adds_samples_to_a_file_and_leaves_the_old_ones(folder: Path, tmp_path: Path) -> None:
    features, labels, first, out = (
        folder / "features.npy",
        folder / "labels.npy",
        tmp_path / "f.krn",
        tmp_path / "g.krn",
    )
    run_json("record", features, "--labels", labels, "-o", first, "--recorder", "quantized")
    found = run_json("append", first, features, "--labels", labels, "-o", out, "--device", "cpu")
    assert found["num_samples"] == 2 * N and found["path"] == str(out) and found["num_classes"] == 4
    assert torch.equal(krnet.open(out)[:N], krnet.open(first)[:])
    run_json("append", out, features, "--labels", labels, "-o", out, "--budget", "1MB")
    assert len(krnet.open(out)) == 3 * N
    for arguments, message in {
        ("-o", out): "has labels, and none are given",
        ("--labels", labels, "-o", out, "--set", "head=1"): "head",
        ("--labels", labels, "-o", out, "--iterations", 3): "recorder quantized fits none",
    }.items():
        refused = run("append", first, features, *arguments)
        assert refused.exit_code == 1 and message in refused.stderr
    refused = run("append", folder / "a.krn", features, "--labels", labels, "-o", tmp_path / "x.krn")
    assert refused.exit_code == 1 and "recorder paper, which cannot" in refused.stderr


def test_help_needs_no_torch() -> None:
    code = "import sys, krnet.cli.app as c; c.app(['record', '--help'], standalone_mode=False)"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("False"), done.stdout + done.stderr


def test_commands_come_in_pipeline_order_and_version_is_printed() -> None:
    text = run("--help").stdout
    commands = ("plan", "extract", "record", "append", "info", "verify", "replay", "demo")
    places = [text.index(f"\n  {name} ") for name in commands]
    assert places == sorted(places)
    assert run("--version").stdout.startswith("krnet")


@pytest.mark.parametrize("command", ["plan", "extract", "record", "append", "info", "verify", "replay", "demo"])
def test_help_opens_with_what_is_written_and_has_an_example(command: str) -> None:
    text = run(command, "--help").stdout
    first = text.split("\n\n")[1].strip()
    assert first.startswith("Writes ")
    assert f"krnet {command}" in text.split("Example:")[1]


def test_help_describes_the_options_of_a_fit_in_the_words_of_its_config() -> None:
    shown = " ".join(run("record", "--help").stdout.split())
    for name in ("iterations", "stop_at_r2", "time_budget", "schedule", "seed", "device"):
        text, by_default, _ = describe(FitConfig)[name].partition(" By default ")
        assert text in shown, name
        assert bool(by_default) == (name in ("iterations", "device"))


COMMANDS = ["plan", "extract", "record", "append", "info", "verify", "replay", "learn", "demo", "bench speed"]


@pytest.mark.parametrize("command", [*COMMANDS, "bench rate"])
def test_help_says_a_default_once_and_no_name_of_python(command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    assert "y default" not in shown
    assert not re.search(r"\b(time_budget|target_r2|stop_at_r2|base_classes|--ledger|--recipe)\b", shown)


@pytest.mark.parametrize("command", ["record", "extract", "append", "replay"])
def test_help_says_what_becomes_of_an_existing_file(command: str) -> None:
    assert "existing one is replaced" in " ".join(run(command, "--help").stdout.split())


def test_presets_are_described_in_the_same_words_everywhere() -> None:
    for command in ("plan", "record", "learn", "bench speed"):
        shown = " ".join(run(*command.split(), "--help").stdout.split())
        assert "Named group of settings to start from: " in shown, command


def names_in(text: str, before: str, after: str) -> set[str]:
    """The names of a list such as `a, b and c` between two pieces of a text."""
    listed = " ".join(text.split()).split(before)[1].split(after)[0]
    return set(re.split(r", (?:or |and )?| or | and | ", listed))


def test_help_and_docstring_name_every_recorder_and_every_method() -> None:
    """These lists are written by hand: the registries import torch, for which help does not wait."""
    growing = {name for name in recorder_names() if get_recorder(name).grows}
    shown = run("record", "--help").stdout
    assert names_in(shown, "Way to store the features: ", ".") == set(recorder_names())
    assert names_in(shown, "holds the first samples of FEATURES; ", " keep their") == growing
    assert names_in(str(krnet.record.__doc__), "Recorders that grow (", ")") == growing
    words = " ".join(run("learn", "--help").stdout.split()).split(", or all;")[0].split()
    assert set(words[-len(learner_names()) :]) == set(learner_names())


@pytest.mark.parametrize("name", recorder_names())
def test_list_settings_describes_every_setting_of_a_recorder_in_the_words_of_its_config(name: str) -> None:
    recorder = get_recorder(name)
    listed = run("record", "--recorder", name, "--list-settings")
    assert listed.exit_code == 0, listed.output
    own, _, fit = (" ".join(part.split()) for part in listed.stdout.partition("\n\nits fit\n"))
    described = describe(recorder.config_class)
    for setting in recorder.setting_names:
        assert f"{setting} {described[setting]} [default: " in own
    for setting in recorder.derived:  # the features decide these
        assert f"\n  {setting} " not in listed.stdout
    for setting, text in describe(FitConfig).items():
        assert (f"{setting} {text} [default: " in fit) == recorder.trains


def test_list_settings_is_of_the_recorder_that_would_record() -> None:
    for given, expected in ((), "krnet"), (("--preset", "cifar100"), "paper"), (("--recorder", "pca"), "pca"):
        assert run("record", "--list-settings", *given).stdout.splitlines()[0] == expected


# ------------------------------------------------------------------ refusals

REFUSED = {
    "features that do not exist": "record none.npy -o OUT",
    "features of an unknown kind": "record text.txt -o OUT",
    "NaN among the features": "record nan.npy -o OUT",
    "labels that do not exist": "record features.npy --labels none.npy -o OUT",
    "labels of another length": "record features.npy --labels short.npy -o OUT",
    "an unknown preset": "record features.npy -o OUT --preset cifar",
    "an unknown setting": "record features.npy -o OUT --set c00=8",
    "a setting of another recorder": "record features.npy -o OUT --set d0=8",
    "a preset for a recorder that has none": "record features.npy -o OUT --recorder pca --preset cifar100",
    "a word for a number": "record features.npy -o OUT --set lr=abc",
    "a word for a truth value": "record features.npy -o OUT --recorder paper --set last_norm=maybe",
    "an argument of the call that is no setting": "record features.npy -o OUT --set head=x",
    "a setting given twice": "record features.npy -o OUT --set seed=1 --seed 2",
    "no time at all": "record features.npy -o OUT --time-budget 0",
    "an unknown schedule": "record features.npy -o OUT --schedule slow",
    "an unknown recorder": "record features.npy -o OUT --recorder tape",
    "an unknown device": "record features.npy -o OUT --device abacus",
    "a folder that does not exist": "record features.npy -o none/b.krn",
    "its own input as output": "record features.npy -o features.npy",
    "a recording that does not exist": "info none.krn",
    "a file that is no recording": "info features.npy",
    "a damaged recording": "verify damaged.krn",
    "other features": "verify a.krn --against short.npy",
    "a sample that is not there": "replay a.krn --ids 40 -o OUT",
    "nothing selected": "replay a.krn --ids 50: -o OUT",
    "IDs that do not exist": "replay a.krn --ids @none.npy -o OUT",
    "the recording as output": "replay a.krn -o a.krn",
    "an unknown precision": "replay a.krn -o OUT --precision rough",
    "a plan of no samples": "plan --shape 4,4,4 --num-samples 0",
}
MISUSED = {
    "an unknown option": "info a.krn --jsno",
    "an unknown command": "rewind a.krn",
    "no output": "record features.npy",
    "no recording": "info",
    "IDs that are none": "replay a.krn --ids five -o OUT",
    "a duration that is none": "record features.npy -o OUT --time-budget soon",
    "a setting without value": "record features.npy -o OUT --set c0",
    "a size that is none": "record features.npy -o OUT --budget big",
    "targets that are none": "bench speed features.npy --targets x",
    "a shape that is none": "plan --shape big --num-samples 5",
    "samples twice": "plan --shape 4,4,4 --num-samples 5 --class-counts 5",
    "no samples": "plan --shape 4,4,4",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_is_exit_1_with_a_message_and_writes_nothing(inputs: Path, case: str) -> None:
    before = {path.name: path.read_bytes() for path in inputs.iterdir()}
    for extra in ([], ["--json"]):
        result = run(*REFUSED[case].split(), *extra)
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.stdout == ""
        last = result.stderr.rstrip().splitlines()[-1]
        assert last.startswith("error: ")
        assert "Traceback" not in result.stderr
    assert {path.name: path.read_bytes() for path in inputs.iterdir()} == before


@pytest.mark.parametrize("case", MISUSED)
def test_misuse_is_exit_2_and_writes_nothing(inputs: Path, case: str) -> None:
    before = sorted(inputs.iterdir())
    result = run(*MISUSED[case].split())
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Error: " in result.stderr and "Value error" not in result.stderr
    assert sorted(inputs.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("record features.npy -o OUT --time-budget 0", "--time-budget is 0.0; expected at least 0.001"),
        ("record features.npy -o OUT --room 3", "--room is 3, fewer than the 40 samples"),
        ("record features.npy -o OUT --set batch_size=0", "batch_size is 0; expected"),  # has no option
        ("replay a.krn -o OUT --precision rough", "--precision is 'rough'"),
        ("record features.npy -o a.krn --resume", "leave out --resume (in Python, resume=True)"),
        ("record features.npy --key x -o OUT", "Leave out --key (in Python, key=)"),
    ],
)
def test_errors_name_the_options_of_the_command(inputs: Path, command: str, message: str) -> None:
    result = run(*command.split())
    assert result.exit_code == 1 and message in result.stderr, result.stderr
    start = message.split(" is ")[0]
    assert " is " not in message or result.stderr.splitlines()[-1].startswith(f"error: {start} is ")


def test_unknown_setting_is_answered_with_the_nearest_name(inputs: Path) -> None:
    assert "did you mean 'batch_size'?" in run("record", "features.npy", "-o", "b.krn", "--set", "batchsize=8").stderr


# ------------------------------------------------------------------ stop and resume


WAITING = """
    import time
    from krnet.cli import app, progress
    def wait(self, progress):
        if progress.unit == "iterations" and progress.done == 20:
            print("at 20", flush=True)
            time.sleep(600)
    progress.Display.__call__ = wait
    app.main()
"""


def test_a_record_command_that_was_killed_goes_on_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """kill -9 while its features are streamed from their file: only what was on disk by then is left."""
    common = ["record", str(folder / "features.npy"), "--labels", str(folder / "labels.npy"), "--iterations", "40"]
    common += ["--set", "checkpoint_s=0", *SMALL]
    process = forked.start(forked.script(WAITING, *common, "-o", tmp_path / "b.krn"))
    process.until(lambda: process.stdout == "at 20\n")
    process.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["b.krn.ckpt"]
    assert run(*common, "-o", tmp_path / "b.krn", "--resume", "--quiet").exit_code == 0
    assert run(*common, "-o", tmp_path / "c.krn", "--quiet").exit_code == 0
    resumed, straight = (archive.open_archive(tmp_path / name) for name in ("b.krn", "c.krn"))
    assert resumed.metadata | {"times": None} == straight.metadata | {"times": None}
    assert resumed.names == straight.names
    assert all(torch.equal(resumed.tensor(name), straight.tensor(name)) for name in resumed.names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.krn", "c.krn"]


def test_ctrl_c_saves_a_checkpoint_to_go_on_from(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "b.krn"
    command = ("record", folder / "features.npy", "-o", out, "--iterations", 40, "--json", *SMALL)

    def interrupt(self: progress.Display, told: Progress) -> None:
        if told.unit == "iterations" and told.done == 30:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Display, "__call__", interrupt)
        stopped = run(*command)
    assert stopped.exit_code == 130
    assert stopped.stdout == ""
    assert f"checkpoint saved in {out}.ckpt" in stopped.stderr and "--resume" in stopped.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["b.krn.ckpt"]
    assert archive.open_archive(tmp_path / "b.krn.ckpt").metadata["iteration"] == 30

    # Another seed does not belong to the checkpoint.
    assert run(*command, "--resume", "--seed", 5).exit_code == 1
    resumed = run(*command, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert [path.name for path in tmp_path.iterdir()] == ["b.krn"]
    assert json.loads(resumed.stdout)["iterations"] == 40


def test_ctrl_c_before_anything_was_saved_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("krnet.api.record", interrupt)
    (tmp_path / "b.krn.ckpt").write_bytes(b"of an earlier run")
    result = run("record", folder / "features.npy", "-o", tmp_path / "b.krn")
    assert result.exit_code == 130
    assert "nothing" not in result.stdout and "before" in result.stderr


def test_resume_of_a_finished_recording_returns_it_unchanged(folder: Path) -> None:
    before = (folder / "a.krn").read_bytes()
    labels = ("--labels", folder / "labels.npy")
    result = run("record", folder / "features.npy", *labels, "-o", folder / "a.krn", "--resume", "--json", *SMALL)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["iterations"] == 60
    assert "already" in result.stderr
    assert (folder / "a.krn").read_bytes() == before
