"""What the trials of commands share: the tasks, the result of each when nothing disturbs it, and folders to work in."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import processes
from cases import Found
from tasks import Task

# How often a command is drawn: those that keep checkpoints often, those that take long less often.
WEIGHTS = {"record": 8, "append": 4, "encode": 4, "extract": 4, "learn": 2, "bench": 2}
TIMEOUT_S = 300.0  # after which a command counts as stuck


class Trials:
    """One lane's tasks. A reference is made when it is first needed."""

    def __init__(self, folder: Path, tasks: list[Task], only: str = ""):
        self.folder, self.only = folder, only
        self.tasks = [task for task in tasks if only in task.name]
        self._references: dict[str, tuple[str, float]] = {}
        self._largest: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def choose(self, chance: random.Random) -> Task:
        groups = {word: [task for task in self.tasks if task.name.split()[0] == word] for word in WEIGHTS}
        known = [word for word, group in groups.items() if group]
        return chance.choice(groups[chance.choices(known, [WEIGHTS[word] for word in known])[0]])

    def reference(self, task: Task) -> tuple[str, float]:
        """The digest of an undisturbed result, and the seconds that it took."""
        if task.name not in self._references:
            folder = self.fresh("reference")
            task.prepare(folder)
            started = time.monotonic()
            running = self.start(task, folder)
            code = running.end(TIMEOUT_S)
            if code != 0:
                raise RuntimeError(f"{task.name} fails when nothing disturbs it: {running.text[-2000:]}")
            self._references[task.name] = task.digest(folder), time.monotonic() - started
            sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
            self._largest[task.name] = max(sizes)
        return self._references[task.name]

    def largest_bytes(self, task: Task) -> int:
        """Size of the largest file that an undisturbed run leaves."""
        self.reference(task)
        return self._largest[task.name]

    def fresh(self, name: str) -> Path:
        """A folder that is not there yet."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def start(
        self, task: Task, folder: Path, *, again: bool = False, file_bytes: int | None = None, log: str = "log"
    ) -> processes.Started:
        action = processes.command(task.words(folder, again=again), folder)
        return processes.start(action, folder / log, file_bytes=file_bytes)

    def same(self, found: Found, task: Task, folder: Path, what: str = "") -> None:
        """Note where the result is not that of the reference. what: was done to the command"""
        expected = self.reference(task)[0]
        try:
            digest = task.digest(folder)
        except Exception as error:  # whatever is wrong with the file
            found.fail("differs", f"{what}the result cannot be read: {type(error).__name__}: {error}")
            return
        if digest != expected:
            found.fail("differs", f"{what}the result differs: {first_difference(digest, expected)}")

    def check_leftovers(self, found: Found, folder: Path) -> None:
        """Note temporary files that are left."""
        if left := [path.name for path in folder.rglob("*.tmp")]:
            found.fail("leftovers", f"temporary files are left: {left}")


def first_difference(found: str, expected: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
    start = max(0, place - 60)
    return f"{found[start : place + 40]!r} instead of {expected[start : place + 40]!r}"


def is_refusal(text: str) -> bool:
    """Whether a command that failed said why, in its own words."""
    return "error: " in text and "Traceback" not in text
