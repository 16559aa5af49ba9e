"""The folder of a run: one process at a time, seconds that add up, refusals before anything is written or trained."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
import krnet
from krnet import data, protocol, work_files
from krnet import task_loop as learning
from krnet.errors import BusyFolderError, InputError, RecordingError, ResumeError, SettingError
from krnet.io import archive
from krnet.io.atomic import MKDIR_ATTEMPTS, atomic_write, make_folder
from krnet.io.lock import LOCK_NAME, making, working_in
from krnet.learners import base
from krnet.progress import Progress, Watch
from krnet.train.classifier import Descent, Saving
from learning_tools import assert_same_run, settings_for, small_digits, small_tasks

QUICK: dict[str, Any] = {"base": "paper", "backbone": "resnet8", "base_epochs": 1, "epochs": 1, "batch_size": 16}
TRAINED = {**QUICK, "head": "trained", "recorder_iterations": 12, "fixed_layers": 3}
KRIL = {**TRAINED, "recorder_settings": "d0=16,c0=8,c1=8"}
GROWING = {**TRAINED, "budget": 60_000, "recorder_settings": "components=8"}
LONG = 1000.0  # seconds that no run here takes


@pytest.fixture(scope="module")
def digits() -> data.DataSet:
    return small_digits(12, 4)


def learn(method: str, digits: data.DataSet, out: Path, **options: Any) -> dict[str, Any]:
    options = {"settings": KRIL if method == "kril" else QUICK, "device": "cpu", "seed": 1, **options}
    return learning.learn(method, digits, small_tasks(1), out=out, **options)


class Killed:
    """Ctrl-C at the first look at a loss."""

    def __call__(self, progress: Progress) -> None:
        if progress.unit == "iterations":
            raise KeyboardInterrupt


class Stop:
    """Ctrl-C during the piece of work of a task and name."""

    def __init__(self, task: int, name: str):
        self.name = f"kril, {'task 1 of 1' if task else 'base task'}: {name}"

    def __call__(self, progress: Progress) -> None:
        if progress.name == self.name and progress.unit == "iterations":
            self.stop()

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], tensors: Any = None) -> None:
    kept = archive.open_archive(path)
    metadata = dict(kept.metadata)
    change(metadata)
    archive.write(path, tensors or {name: kept.tensor(name) for name in kept.names}, metadata)


# ------------------------------------------------------------------ one process at a time

AT_WORK = """
    import sys, time
    from pathlib import Path
    import test_task_loop as here
    class Wait(here.Stop):
        def stop(self):
            print("at work", flush=True)
            time.sleep(600)
    here.learn("kril", here.small_digits(12, 4), Path(sys.argv[1]), watch=Wait(1, "recorder"), checkpoint_s=0.0,
               settings=here.GROWING)
"""


def test_a_second_process_is_refused_until_the_first_is_killed_and_goes_on_to_the_same_end(
    digits: data.DataSet, tmp_path: Path
) -> None:
    """kill -9 while the recording of the base task grows by those of the next."""
    out, growing = tmp_path / "run", {"settings": GROWING, "checkpoint_s": 0.0}
    child = forked.start(forked.script(AT_WORK, out))
    try:
        child.until(lambda: child.stdout == "at work\n")
        before = content(out)
        for resume in (False, True):
            with pytest.raises(BusyFolderError, match=rf"run: another process \(PID {child.pid} on .*at work here"):
                learn("kril", digits, out, resume=resume, **growing)
        assert content(out) == before
    finally:
        child.kill()
    assert not (out / "run.json").exists() and any(path.suffix == ".ckpt" for path in out.iterdir())
    resumed = learn("kril", digits, out, resume=True, **growing)
    assert_same_run(resumed, learn("kril", digits, tmp_path / "straight", **growing))
    assert not (out / LOCK_NAME).exists()


def test_what_a_dead_process_left_locked_is_no_run_and_no_obstacle(digits: data.DataSet, tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("999999 on elsewhere\n")
    assert learn("finetune", digits, tmp_path)["method"] == "finetune"
    assert set(content(tmp_path)) == {"run.json", "settings.json", "state.krn"}


def test_a_folder_that_was_made_for_nothing_is_removed_and_one_that_was_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in (tmp_path / "a" / "b" / "c", tmp_path / "there"):
        with pytest.raises(KeyboardInterrupt), working_in(place):
            raise KeyboardInterrupt
    with working_in(tmp_path / "used"):
        (tmp_path / "used" / "file").touch()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["there", "used", "used/file"]


def test_many_at_once_are_in_a_folder_one_at_a_time_though_each_removes_it_when_done(tmp_path: Path) -> None:
    inside, most, entered, failed = [0], [0], [0], []

    def come_and_go() -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            try:
                with working_in(tmp_path / "folder"):
                    inside[0] += 1
                    most[0], entered[0] = max(most[0], inside[0]), entered[0] + 1
                    time.sleep(0.0005)
                    inside[0] -= 1
            except BusyFolderError:
                pass
            except BaseException as error:
                failed.append(error)
                raise

    threads = [threading.Thread(target=come_and_go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and most == [1] and entered[0] > 1
    assert content(tmp_path) == {}


@pytest.mark.parametrize("seen", [FileExistsError, FileNotFoundError])
def test_a_folder_removed_by_another_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: type[OSError]
) -> None:
    """mkdir finds the folder there, and pathlib, looking again, does not; or a parent goes before the folder comes."""
    made, seen_first, mkdir = tmp_path / "a" / "b", [], Path.mkdir

    def removed_meanwhile(self: Path, *given: Any, **more: Any) -> None:
        if self == made and len(seen_first) < 3:
            seen_first.append(self)
            raise seen(errno.EEXIST if seen is FileExistsError else errno.ENOENT, "as pathlib says", str(self))
        mkdir(self, *given, **more)

    monkeypatch.setattr(Path, "mkdir", removed_meanwhile)
    assert make_folder(made) == [made, tmp_path / "a"] and made.is_dir() and len(seen_first) == 3
    with working_in(made):
        pass
    assert made.is_dir()  # it was there before


def test_a_folder_that_can_never_be_made_is_given_up_with_the_systems_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def never(self: Path, *given: Any, **more: Any) -> None:  # as in /proc
        asked.append(self)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))

    monkeypatch.setattr(Path, "mkdir", never)
    with pytest.raises(FileNotFoundError, match="No such file"):
        make_folder(tmp_path / "a")
    assert len(asked) == MKDIR_ATTEMPTS


@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a file"])
@pytest.mark.parametrize("below", [".", "sub", "sub/deeper"])
def test_what_is_no_folder_is_named_at_once(tmp_path: Path, kind: str, below: str) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file"
    if kind != "file":
        place = tmp_path / "link"
        place.symlink_to(tmp_path / ("file" if kind == "link to a file" else "nowhere"))
    with pytest.raises(InputError, match=f"{place.name}: is not a folder"):
        make_folder(place / below)
    (tmp_path / "folder").mkdir()
    (tmp_path / "good").symlink_to(tmp_path / "folder")
    assert make_folder(tmp_path / "good" / "x") == [tmp_path / "good" / "x"] and (tmp_path / "folder" / "x").is_dir()


def test_a_finished_run_is_shown_where_nothing_can_be_written(
    digits: data.DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learn("finetune", digits, tmp_path)
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "access", lambda *a: False)
    assert learn("finetune", digits, tmp_path, resume=True) == made


def test_a_base_task_that_another_process_finishes_first_changes_nothing(digits: data.DataSet, tmp_path: Path) -> None:
    """Not even after a kill: what follows was made with this process's own."""
    shared = tmp_path / "shared"
    straight = learn("kril", digits, tmp_path / "straight", shared=tmp_path / "other")
    (made,) = (tmp_path / "other").iterdir()
    foreign = {
        name: torch.zeros_like(archive.open_archive(made).tensor(name)) for name in archive.open_archive(made).names
    }

    class Meanwhile(Stop):
        def __call__(self, progress: Progress) -> None:
            shared.mkdir(exist_ok=True)
            if progress.unit == "iterations" and not (shared / made.name).exists():
                archive.write(shared / made.name, foreign, {"kind": "work"})
            super().__call__(progress)

    with pytest.raises(KeyboardInterrupt):
        learn("kril", digits, tmp_path / "run", shared=shared, watch=Meanwhile(0, "recorder"))
    resumed = learn("kril", digits, tmp_path / "run", shared=shared, resume=True)
    assert_same_run(resumed, straight)


# ------------------------------------------------------------------ seconds


def test_a_base_task_taken_over_counts_what_it_took(digits: data.DataSet, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    first = learn("finetune", digits, tmp_path / "a", shared=shared)
    (path,) = shared.iterdir()
    trained_s = archive.open_archive(path).metadata["seconds"]
    assert 0 < trained_s < first["task_seconds"][0]
    assert learn("finetune", digits, tmp_path / "b", shared=shared)["task_seconds"][0] > trained_s
    rewrite(path, lambda kept: kept.update(seconds=LONG))
    third = learn("finetune", digits, tmp_path / "c", shared=shared)
    assert third["task_seconds"][0] > LONG > third["task_seconds"][1]
    assert third["seconds"] == pytest.approx(sum(third["task_seconds"]))
    rewrite(path, lambda kept: kept.pop("seconds"))  # as older files are
    assert learn("finetune", digits, tmp_path / "d", shared=shared)["seconds"] < LONG


@pytest.mark.parametrize(
    ("task", "name", "file"),
    [
        (0, "classifier", "task-0-0.partial"),
        (0, "recorder", "task-0-0.done"),
        (0, "recorder", "base.krn.ckpt"),
        (1, "F2", "task-1-0.partial"),
        (1, "recorder", "later-1.krn.ckpt"),
    ],
)
def test_the_time_before_a_stop_counts(digits: data.DataSet, tmp_path: Path, task: int, name: str, file: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        learn("kril", digits, tmp_path, watch=Stop(task, name))
    rewrite(tmp_path / file, lambda kept: kept.update(seconds=kept["seconds"] + LONG))
    found = learn("kril", digits, tmp_path, resume=True)
    assert LONG < found["task_seconds"][task] < LONG + 60 and found["task_seconds"][1 - task] < 60


def test_a_recording_that_was_finished_just_before_a_kill_counts_what_it_took(
    digits: data.DataSet, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        learn("kril", digits, tmp_path, watch=Stop(1, "F2"))
    (tmp_path / "state.krn").unlink()  # as if the base task's recording were the last thing done
    for path in tmp_path.glob("task-*"):
        path.unlink()
    rewrite(tmp_path / "base.krn", lambda kept: kept["times"].update(fit_seconds=LONG))
    assert learn("kril", digits, tmp_path, resume=True)["task_seconds"][0] > LONG


@pytest.mark.parametrize(("method", "other"), [("icarl", "cnn"), ("finetune", None)])
def test_the_watcher_gets_the_accuracy_of_the_run_under_its_plain_name(
    digits: data.DataSet, tmp_path: Path, method: str, other: str | None
) -> None:
    told: list[Progress] = []
    run = learn(method, digits, tmp_path, watch=told.append)
    base_task, later = [progress for progress in told if progress.unit == "tasks"]
    assert (base_task.name, later.name) == (f"{method}, base task done", f"{method}, task 1 of 1 done")
    assert list(later.values) == ["accuracy", *([f"accuracy {other}"] if other else [])]
    assert [base_task.values["accuracy"], later.values["accuracy"]] == run["accuracy"]


def test_the_watcher_takes_no_seconds_of_a_task(
    digits: data.DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, late = time.perf_counter, [0.0]
    monkeypatch.setattr(learning.time, "perf_counter", lambda: clock() + late[0])

    def slow(progress: Progress) -> None:
        if progress.share is None and progress.unit == "":  # a piece of work begins
            late[0] += LONG

    assert learn("finetune", digits, tmp_path, watch=slow)["seconds"] < LONG


# ------------------------------------------------------------------ random draws


def test_random_draws_do_not_depend_on_whether_earlier_work_was_run_or_read(
    digits: data.DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What F2's training draws must not change what the recorder after it draws."""
    seen: dict[str, list[float]] = {}
    run_work = Descent.run

    def run_and_draw(self: Descent, saving: Saving | None, watch: Watch | None) -> None:
        run_work(self, saving, watch)
        torch.rand(3)  # a work may draw as many numbers as it likes

    monkeypatch.setattr(Descent, "run", run_and_draw)
    next_work = learning.run_or_load

    def note_draw(work: Any, *rest: Any) -> Any:
        before = torch.get_rng_state()
        seen.setdefault(work.name, []).append(float(torch.rand(())))
        torch.set_rng_state(before)
        return next_work(work, *rest)

    monkeypatch.setattr(learning, "run_or_load", note_draw)
    learn("kril", digits, tmp_path / "whole")
    whole = {name: list(draws) for name, draws in seen.items()}
    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        learn("kril", digits, tmp_path / "stopped", watch=Stop(1, "recorder"))
    seen.clear()
    learn("kril", digits, tmp_path / "stopped", resume=True)
    assert len(whole) >= 3
    for name, draws in seen.items():
        assert draws == whole[name][-len(draws) :], name


# ------------------------------------------------------------------ commits


@pytest.mark.parametrize(("task", "name"), [(0, "classifier"), (1, "F2")])
def test_a_resumed_run_names_all_commits_and_adds_up_its_seconds(
    digits: data.DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: int, name: str
) -> None:
    """Also that of a process that was stopped before it had finished any task."""
    monkeypatch.setenv("KRNET_COMMIT", "first")
    with pytest.raises(KeyboardInterrupt):
        learn("kril", digits, tmp_path, watch=Stop(task, name))
    rewrite(tmp_path / f"task-{task}-0.partial", lambda kept: kept.update(seconds=LONG))
    if task == 1:
        rewrite(tmp_path / "state.krn", lambda kept: kept.update(task_seconds=[2 * LONG]))
    monkeypatch.setenv("KRNET_COMMIT", "second")
    found = learn("kril", digits, tmp_path, resume=True)
    assert found["commits"] == ["first", "second"]
    assert found["seconds"] > (3 * LONG if task == 1 else LONG)
    monkeypatch.setenv("KRNET_COMMIT", "third")  # a finished run is only shown
    assert learn("kril", digits, tmp_path, resume=True)["commits"] == ["first", "second"]


def test_a_base_task_that_another_process_trains_is_waited_for_and_the_wait_is_not_counted(
    digits: data.DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, waits = tmp_path / "shared", threading.Event()
    clock, late = time.perf_counter, [0.0]
    monkeypatch.setattr(learning.time, "perf_counter", lambda: clock() + late[0])
    learn("finetune", digits, tmp_path / "first", shared=shared)
    (path,) = shared.iterdir()
    trained = path.rename(tmp_path / "trained.krn")
    monkeypatch.setattr(work_files, "making", lambda path: waits.set() or making(path))
    told: list[Progress] = []
    found: dict[str, Any] = {}

    def learn_beside() -> None:
        found.update(learn("finetune", digits, tmp_path / "second", shared=shared, watch=told.append))

    beside = threading.Thread(target=learn_beside)
    with making(path):  # as the process does that trains it
        beside.start()
        assert waits.wait(60)
        late[0] += LONG
        time.sleep(0.2)
        assert not any(progress.unit == "iterations" for progress in told)
        trained.rename(path)
    beside.join()
    assert not any(p.unit == "iterations" and "base task" in p.name for p in told)
    first_s = archive.open_archive(path).metadata["seconds"]
    assert found["task_seconds"][0] < first_s + LONG
    assert list(shared.iterdir()) == [path]


def test_who_waited_for_a_base_task_that_failed_trains_it(digits: data.DataSet, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with pytest.raises(KeyboardInterrupt):
        learn("finetune", digits, tmp_path / "first", shared=shared, watch=Killed())
    learn("finetune", digits, tmp_path / "second", shared=shared)
    assert len(list(shared.glob("base-*.krn"))) == 1


def test_the_commit_that_trained_a_shared_base_task_is_named(
    digits: data.DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for commit, expected in (("first", ["first"]), ("second", ["second", "first"])):
        monkeypatch.setenv("KRNET_COMMIT", commit)
        assert learn("finetune", digits, tmp_path / commit, shared=tmp_path / "shared")["commits"] == expected
    (path,) = (tmp_path / "shared").iterdir()
    rewrite(path, lambda kept: kept.pop("commit"))  # as older files are
    assert learn("finetune", digits, tmp_path / "old", shared=tmp_path / "shared")["commits"] == ["second", "unknown"]


# ------------------------------------------------------------------ held-out images


def test_validation_is_the_data_set_with_held_out_images(digits: data.DataSet, tmp_path: Path) -> None:
    """And the real test images are not among what a learner is given."""
    given = []

    class Spy(base.get_learner("finetune")):  # type: ignore[misc]
        def __init__(self, context: base.Context, config: base.LearnerConfig):
            given.append(context.data)
            super().__init__(context, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(base._REGISTRY, "finetune", Spy)
        found = learn("finetune", digits, tmp_path / "a", validation=3)
    assert found["validation"] == 3 and [made.validation for made in given] == [3]
    assert {image.numpy().tobytes() for image in given[0].test.images} <= {
        image.numpy().tobytes() for image in digits.train.images
    }
    assert_same_run(learn("finetune", digits.with_validation(3), tmp_path / "b"), found)
    with pytest.raises(SettingError, match=r"validation is 12, and class .* has 12 training images"):
        learn("finetune", digits, tmp_path / "c", validation=12)
    assert not (tmp_path / "c").exists()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        (["finetune", "kril"], {"fixed_layers": 4}, "cannot cut after 4 layers"),
        (["finetune", "icarl"], {"memory": "total", "memory_total": 3}, "memory_total is 3"),
    ],
)
def test_what_one_of_several_methods_refuses_comes_before_any_is_learned(
    digits: data.DataSet, tmp_path: Path, methods: list[str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        learning.learn_all(
            methods, digits, small_tasks(1), out=tmp_path / "runs", settings={**QUICK, **settings}, device="cpu"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_second_method_that_was_begun_otherwise_is_refused_before_the_first_is_learned(
    digits: data.DataSet, tmp_path: Path
) -> None:
    learn("joint", digits, tmp_path / "joint")
    with pytest.raises(ResumeError, match="seed 1; this run has 2"):
        learning.learn_all(
            ["finetune", "joint"], digits, small_tasks(1), out=tmp_path, settings=QUICK, device="cpu", seed=2,
            resume=True,
        )  # fmt: skip
    assert not (tmp_path / "finetune").exists()


def test_a_file_in_place_of_the_folder_is_named_and_left_alone(digits: data.DataSet, tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("mine")
    for out in (tmp_path / "afile", tmp_path / "afile" / "run"):
        with pytest.raises(InputError, match=r"afile: is not a folder, .* choose another place"):
            learn("finetune", digits, out)
    assert content(tmp_path) == {"afile": b"mine"}


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_a_damaged_base_task_is_to_be_removed_and_is_then_trained_again(digits: data.DataSet, tmp_path: Path) -> None:
    first = learn("finetune", digits, tmp_path / "a", shared=tmp_path / "shared")
    (path,) = (tmp_path / "shared").iterdir()
    for spoil in (damage, lambda path: path.write_bytes(b"no archive at all")):
        spoil(path)
        with pytest.raises(RecordingError, match="Remove this file: classifier of the base task is then") as caught:
            learn("finetune", digits, tmp_path / "b", shared=tmp_path / "shared", resume=True)
        assert str(path) in str(caught.value) and "record again" not in str(caught.value)
    path.unlink()
    again = learn("finetune", digits, tmp_path / "b", shared=tmp_path / "shared", resume=True)
    assert_same_run(again, first)


@pytest.mark.parametrize("name", ["state.krn", "base.krn"])
def test_a_run_whose_state_or_recording_is_damaged_is_to_be_started_again(
    digits: data.DataSet, tmp_path: Path, name: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        learn("kril", digits, tmp_path / "run", watch=Stop(1, "F2"))
    damage(tmp_path / "run" / name)
    with pytest.raises(RecordingError, match=r"start again in another folder, or remove .*run$") as caught:
        learn("kril", digits, tmp_path / "run", resume=True)
    assert name in str(caught.value) and "record again" not in str(caught.value)


def test_a_run_is_not_resumed_without_a_recorders_setting_that_it_was_begun_with(
    digits: data.DataSet, tmp_path: Path
) -> None:
    settings = {**settings_for("kril"), "recorder": "raw"}
    learn("kril", digits, tmp_path / "run", settings={**settings, "recorder_settings": {"dtype": "float16"}})
    with pytest.raises(ResumeError, match="made with dtype 'float16'; this run has None"):
        learn("kril", digits, tmp_path / "run", settings=settings, resume=True)


def test_settings_that_cannot_be_read_are_named(digits: data.DataSet, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ResumeError, match=r"settings.json: cannot be read \(.*start again in another folder"):
        learn("finetune", digits, tmp_path, resume=True)


def test_a_file_that_may_not_grow_further_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/big.krn'"):
            archive.write(tmp_path / "big.krn", {"zeros": torch.zeros(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_the_end_is_named_and_an_error_that_names_a_file_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match="other"), atomic_write(tmp_path / "file"):
        raise FileNotFoundError(errno.ENOENT, "No such file", "other")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/file'"), atomic_write(tmp_path / "file") as file:
        file.write(b"text")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ small images, presets


def tiny_images(counts: list[int]) -> data.DataSet:
    """4x4 pixels, so many of each class."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    images = torch.randint(0, 256, (len(labels), 3, 4, 4), dtype=torch.uint8)
    return data.from_arrays(images, labels, images, labels, name="tiny", layout="NCHW")


def learn_tiny(method: str, counts: list[int], out: Path, **settings: Any) -> dict[str, Any]:
    split = protocol.split("natural", num_classes=len(counts), sizes=[2, 1])
    quick = {**QUICK, "base_epochs": 1, "epochs": 1, **settings}
    return krnet.learn(method, tiny_images(counts), split, out=out, settings=quick, device="cpu")


@pytest.mark.parametrize("method", base.learner_names())
def test_one_image_at_a_time_is_refused_where_it_ends_as_one_pixel(tmp_path: Path, method: str) -> None:
    # kril wants an old and a new one in each anyhow.
    message = r"the base task trains on one image at a time, and images of 4x4 .*batch_size|batch_size is 1; expected"
    with pytest.raises(SettingError, match=message):
        learn_tiny(method, [3, 3, 3], tmp_path / "run", batch_size=1)
    assert list(tmp_path.iterdir()) == []


def test_a_task_of_one_image_is_refused_unless_old_ones_are_with_it(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="task 1 trains on one image at a time"):
        learn_tiny("finetune", [3, 3, 1], tmp_path / "finetune")
    assert learn_tiny("icarl", [3, 3, 1], tmp_path / "icarl")["tasks"] == [2, 1]
    assert learn_tiny("finetune", [3, 3, 1], tmp_path / "frozen", bn="frozen")["tasks"] == [2, 1]


def test_a_preset_is_taken_through_python_and_settings_go_over_it(digits: data.DataSet, tmp_path: Path) -> None:
    quick = {**QUICK, "gan_epochs": 1, "hidden": 8, "latent": 4}
    found = learn("gfr", digits, tmp_path / "gfr", preset="own", settings=quick)["settings"]
    own = base.get_learner("gfr").presets["own"]
    assert found["base_lr"] == own["base_lr"] and found["optimizer"] == "adam" and found["backbone"] == "resnet8"
    with pytest.raises(SettingError, match="preset is 'own'; these methods have paper"):
        learn("finetune", digits, tmp_path / "finetune", preset="own")


def test_run_json_has_averages_in_both_weightings_with_and_without_the_base_task(
    digits: data.DataSet, tmp_path: Path
) -> None:
    learn("finetune", digits, tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["average_without_base"] == found["accuracy"][1]
    assert found["average_task_mean_without_base"] == found["task_mean"][1]
    assert found["average_task_mean"] == pytest.approx(sum(found["task_mean"]) / 2)


def test_what_a_piece_of_work_announces_follows_its_name(digits: data.DataSet, tmp_path: Path) -> None:
    seen: list[Any] = []
    learn("kril", digits, tmp_path / "run", settings=GROWING, watch=seen.append)
    names = [progress.name for progress in seen if progress.share is None]
    assert names.count("kril, base task: recorder") == 1
    assert "kril, base task: recorder, choosing settings for the budget" in names
