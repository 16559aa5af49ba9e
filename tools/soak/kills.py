"""Kill a command at random moments, several times a run, and resume it: the result is that of an undisturbed run.

One trial: start, signal, start again with --resume, signal, ..., until it ends by itself; then compare.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

from cases import Found
from tasks import Task
from trials import TIMEOUT_S, Trials

MOST_KILLS = 6
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ENDS = {
    signal.SIGKILL: (-9,), signal.SIGTERM: (143, -15), signal.SIGINT: (130, -2), signal.SIGHUP: (129, -1),
}  # fmt: skip
STOPPED_S = 30.0  # a command that was told to stop has saved what it has, and ended, within this time
SPARE = 1.1  # moments are drawn from a little more than the time that the command takes
ABORTED = "Aborted"  # what typer says, with code 1, where Ctrl-C comes before a command has begun


def trial(trials: Trials, seed: int) -> Found:
    chance = random.Random(seed)
    task = trials.choose(chance)
    found = Found("kills", task.name, seed, counts={"kills": 0})
    _, seconds = trials.reference(task)
    folder = trials.fresh(f"kills-{seed}")
    task.prepare(folder)
    found.files = [str(folder)]
    for number in range(MOST_KILLS):
        signum = chance.choice(SIGNALS)
        moment = chance.uniform(0, SPARE * seconds)
        running = trials.start(task, folder, again=number > 0)
        running.wait(moment)
        running.send(signum)
        code = running.end(STOPPED_S if signum != signal.SIGKILL else TIMEOUT_S)
        if code == 0:
            break
        aborted = code == 1 and signum == signal.SIGINT and running.text.strip().rstrip("!.") == ABORTED
        if code not in ENDS[signum] and not aborted:
            found.fail("bad end", f"ended with {code} after {signum.name} at {moment:.3f} s: {running.text[-1500:]}")
            return found
        if code > 0 and not aborted and "Traceback" in running.text:
            found.fail("bad end", f"a traceback after {signum.name} at {moment:.3f} s: {running.text[-1500:]}")
            return found
        found.counts["kills"] += 1
        if task.earlier is not None and code != 0:
            _check_earlier(found, folder / task.out, task.earlier, trials, task, folder)
            if found.fault:
                return found
            if (folder / task.out).read_bytes() != task.earlier.read_bytes():
                break  # it was killed between the end of its work and its own
    else:
        running = trials.start(task, folder, again=True)
        if (code := running.end(TIMEOUT_S)) != 0:
            text = f"after {found.counts['kills']} kills, it ended with {code}: {running.text[-1500:]}"
            found.fail("cannot go on", text)
            return found
    trials.same(found, task, folder)
    trials.check_leftovers(found, folder)
    return found


def _check_earlier(found: Found, out: Path, earlier: Path, trials: Trials, task: Task, folder: Path) -> None:
    """What is to be replaced is as it was, or is the whole result."""
    if not out.exists():
        found.fail("differs", "the earlier file is gone")
    elif out.read_bytes() != earlier.read_bytes():
        trials.same(found, task, folder)
