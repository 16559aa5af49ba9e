"""The folder of a run: the names of its files, and what a file must hold to be read.

    DIR/settings.json  what the run learns, with which settings; commits of the code that worked on it
    DIR/state.krn      the learner after its last task, and the results of the tasks that are done
    DIR/run.json       the results, once all tasks are done

A file may come from another run, an earlier version, or anyone: each error names it, and says how to go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from krnet.errors import BusyFolderError, InputError, RecordingError, ResumeError, RunError
from krnet.io import archive
from krnet.io.atomic import read_json
from krnet.io.header import RESTORE, digest
from krnet.io.run_file import RUN_FILE, read_run
from krnet.learners import base

STATE_FILE, SETTINGS_FILE = "state.krn", "settings.json"
DATA_KEY = "data"
"""The name of the data set's DataSpec among the metadata of state.krn; files of earlier versions lack it."""
KEPT_KEY = "kept_files"
"""Among the same metadata: name and checksum of each file that the learner keeps; earlier versions lack it."""
COMMITS_KEY = "commits"
"""In settings.json: the commits of the code that has worked on the run; earlier versions lack it."""
NEEDED_KEYS = ("method", "row", "class_order", "tasks", "accuracy", "last", "storage_bytes", "settings")
_START_AGAIN = "Put the file of this run back, or start again in another folder"


# ------------------------------------------------------------------ results


def read_results(folder: Path) -> dict[str, Any]:
    path = folder / RUN_FILE
    if not path.exists():
        raise RunError(f"{folder}: {_explain_missing(folder)}")
    results = read_run(path, NEEDED_KEYS)
    check_results(path, results)
    return results


def check_results(path: Path, results: Mapping[str, Any]) -> None:
    """Refuse values of another shape than those of a run: whoever uses them may rely on it."""
    tasks, order, settings = results["tasks"], results["class_order"], results["settings"]
    is_share = lambda value: _is_number(value) and 0 <= value <= 1  # noqa: E731
    valid = {
        "method": isinstance(results["method"], str) and results["method"] in base.learner_names(),
        "row": isinstance(results["row"], str),
        "class_order": isinstance(order, list)
        and all(type(label) is int for label in order)
        and sorted(order) == list(range(len(order))),
        "tasks": isinstance(tasks, list) and all(type(size) is int and size > 0 for size in tasks) and bool(tasks),
        "last": is_share(results["last"]),
        "accuracy": isinstance(results["accuracy"], list)
        and all(value is None or is_share(value) for value in results["accuracy"]),
        "storage_bytes": isinstance(results["storage_bytes"], dict)
        and all(map(_is_number, results["storage_bytes"].values()))
        and "total" in results["storage_bytes"],
        "settings": isinstance(settings, dict) and isinstance(settings.get("backbone"), str),
        "seed": type(results.get("seed", 0)) is int,
        "data": isinstance(results.get("data", ""), str),
        "average": results.get("average") is None or is_share(results["average"]),
        "validation": type(results.get("validation") or 0) is int,
    }
    valid["class_order"] = valid["class_order"] and valid["tasks"] and sum(tasks) == len(order)
    valid["accuracy"] = valid["accuracy"] and valid["tasks"] and len(results["accuracy"]) == len(tasks)
    wrong = [name for name, is_valid in valid.items() if not is_valid]
    if wrong:
        name = wrong[0]
        raise RunError(f"{path}: {name} is {results.get(name)!r:.99}; expected what `krnet learn` writes")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _explain_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder; expected that of a finished run (out=, --out)"
    runs = sorted(path.parent.name for path in folder.glob(f"*/{RUN_FILE}"))
    if runs:
        return f"holds the runs {', '.join(runs)}; give the folder of one of them, such as {folder / runs[0]}"
    if not (folder / SETTINGS_FILE).exists():
        return f"holds no {RUN_FILE}; expected the folder of a finished run (out=, --out)"
    state = folder / STATE_FILE
    num_done = len(archive.open_archive(state).metadata.get("task_seconds", ())) if state.exists() else 0
    done = "1 task is done" if num_done == 1 else f"{num_done} tasks are done"
    return (
        f"its run is unfinished: {done}. Finish it with the same call and resume=True, or the same command and --resume"
    )


# ------------------------------------------------------------------ what a run is continued from


def read_saved(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}). {start_again_advice(path.parent)}") from error


def check_same(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            # So the message names the one setting that differs; one that only the file has differs, too.
            check_same(path, found[name], dict.fromkeys(found[name]) | value)
        elif found.get(name) != value:
            raise ResumeError(
                f"{path}: made with {name} {found.get(name)!r}; this run has {value!r}. Give the same settings (those "
                f"left out have their defaults), or another folder"
            )


def check_kept_files(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse files beside state.krn that are not those it was written with, such as the recordings of another run."""
    kept = metadata.get(KEPT_KEY, {})
    for name, checksum in (kept if isinstance(kept, dict) else {}).items():
        path = folder / Path(name).name
        if not path.is_file():
            raise ResumeError(f"{path}: no such file, and {folder / STATE_FILE} needs it. {_START_AGAIN}")
        if checksum_of(path) != checksum:
            raise ResumeError(
                f"{path}: is not the file that this run wrote, but another run's, or changed since. {_START_AGAIN}"
            )


def checksum_of(path: Path) -> str:
    """The checksum of a recording, which its header states; of another file, that of its bytes."""
    return archive.open_archive(path).checksum if archive.has_magic(path) else digest(path.read_bytes())


# ------------------------------------------------------------------ errors that name the file


@contextmanager
def reading(path: Path, kind: type[InputError]) -> Iterator[None]:
    """Turn whatever goes wrong while the content of a run's file is used into an error that names the file."""
    try:
        yield
    except (RecordingError, RunError, ResumeError, BusyFolderError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise kind(f"{path}: not what `krnet learn` writes ({type(error).__name__}: {error!s:.300})") from error


@contextmanager
def with_advice(text: str) -> Iterator[None]:
    """Replace the general advice in a damaged file's error by advice that fits a file of a run."""
    try:
        yield
    except RecordingError as error:
        raise type(error)(f"{str(error).removesuffix(f'. {RESTORE}')}. {text}") from error


def start_again_advice(folder: Path) -> str:
    return f"The run cannot go on from here: start again in another folder, or remove {folder}"
