"""Let a command run out of disk: the old file is whole, the error is named, and nothing half-written has a final name.

A file may grow to a random size only (RLIMIT_FSIZE), and where a file system of one megabyte can be mounted, the
command writes there. Afterwards the same command, with room, makes the result of an undisturbed run.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cases import Found
from tasks import Task
from trials import TIMEOUT_S, Trials, is_refusal

SMALL_DRIVE_BYTES, RUN_DRIVE_BYTES = 1 << 20, 8 << 20  # a run of `learn` takes megabytes, logs included
LOG_BYTES = 1500  # the command's messages go to a file, too


def trial(trials: Trials, seed: int) -> Found:
    chance = random.Random(seed)
    task = trials.choose(chance)
    found = Found("disk", task.name, seed, counts={"full": 0})
    trials.reference(task)
    folder = trials.fresh(f"disk-{seed}")
    found.files = [str(folder)]
    if chance.random() < 0.5:
        with small_drive(folder, RUN_DRIVE_BYTES if is_run(task) else SMALL_DRIVE_BYTES) as is_mounted:
            if is_mounted:
                return _on_small_drive(found, trials, task, folder, chance)
    _with_limit(found, trials, task, folder, chance)
    return found


def is_run(task: Task) -> bool:
    return task.name.startswith("learn")


def _with_limit(found: Found, trials: Trials, task: Task, folder: Path, chance: random.Random) -> None:
    out = task.prepare(folder)
    limit = int(chance.uniform(LOG_BYTES, max(2 * LOG_BYTES, 1.1 * trials.largest_bytes(task))))
    running = trials.start(task, folder, file_bytes=limit)
    _judge(found, trials, task, folder, out, running.end(TIMEOUT_S), running.text, f"{limit} bytes a file")


def _on_small_drive(found: Found, trials: Trials, task: Task, folder: Path, chance: random.Random) -> Found:
    """The drive is filled with a file, but for a random rest."""
    inside = folder / "drive"
    out = task.prepare(inside)
    free = shutil.disk_usage(folder).free
    rest = int(chance.uniform(0, free if is_run(task) else 40_000))
    (folder / "filler").write_bytes(bytes(free - rest))
    running = trials.start(task, inside, log="../../log-of-drive")
    code, text = running.end(TIMEOUT_S), running.text
    (folder / "filler").unlink()
    _judge(found, trials, task, inside, out, code, text, f"a drive with {rest} bytes free", log="../../log-of-drive")
    if found.fault:  # the drive is gone when the trial is kept
        kept = trials.fresh(f"kept-{found.seed}")
        shutil.copytree(inside, kept)
        found.files = [str(kept)]
    return found


def _judge(
    found: Found, trials: Trials, task: Task, folder: Path, out: Path, code: int, text: str, what: str, log: str = "log"
) -> None:
    if code == 0:
        trials.same(found, task, folder, f"with {what}, ")
        return
    found.counts["full"] = 1
    if code != 1 or not is_refusal(text):
        found.fail("bad end", f"with {what}, it ended with {code}: {text[-1500:]}")
    elif task.earlier is not None and out.read_bytes() != task.earlier.read_bytes():
        found.fail("half-written", f"with {what}, the old file is another one now")
    elif task.earlier is None and out.is_file():
        found.fail("half-written", f"with {what}, {out.name} is there although the command failed")
    trials.check_leftovers(found, folder)
    if found.fault:
        return
    running = trials.start(task, folder, again=True, log=log)
    if (code := running.end(TIMEOUT_S)) != 0:
        found.fail("cannot go on", f"after {what}, with room again, it ended with {code}: {running.text[-1500:]}")
        return
    trials.same(found, task, folder, f"after {what}, ")


@contextmanager
def small_drive(folder: Path, num_bytes: int) -> Iterator[bool]:
    """A file system of a few megabytes at `folder`, where this user may mount one; else False."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    is_mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
