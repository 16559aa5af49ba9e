"""Several writers of one output at once, as processes and as threads: it holds the whole result of one of them.

A writer may also be refused by name, because another is at work. Nothing temporary is left.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import processes
from cases import Found
from tasks import Task
from trials import TIMEOUT_S, Trials, is_refusal

RECORDERS = ("raw", "quantized", "pca", "transform", "krnet")  # of the threads
NUM_THREADS, ROUNDS = 4, 4


def trial(trials: Trials, seed: int) -> Found:
    chance = random.Random(seed)
    return _threads(trials, seed, chance) if chance.random() < 0.4 else _processes(trials, seed, chance)


def _processes(trials: Trials, seed: int, chance: random.Random) -> Found:
    """Two commands of the same words or, for recordings, of two kinds."""
    first = trials.choose(chance)
    alike = [task for task in trials.tasks if task.name.split()[0] == first.name.split()[0] == "record"]
    second = chance.choice(alike) if alike else first
    found = Found("writers", f"{first.name.split()[0]} processes", seed, counts={"refused": 0})
    references = {trials.reference(task)[0] for task in (first, second)}
    delay = chance.uniform(0, trials.reference(first)[1])
    folder = trials.fresh(f"writers-{seed}")
    found.files = [str(folder)]
    first.prepare(folder)
    running = [trials.start(first, folder, log="log-first")]
    running[0].wait(delay)
    running.append(trials.start(second, folder, log="log-second"))
    for process in running:
        code = process.end(TIMEOUT_S)
        if code == 1 and is_refusal(process.text):
            found.counts["refused"] += 1
        elif code != 0:
            found.fail("bad end", f"ended with {code}: {process.text[-1500:]}")
            return found
    if found.counts["refused"] == 2:
        found.fail("bad end", f"both were refused: {running[0].text[-700:]} {running[1].text[-700:]}")
        return found
    try:
        if first.earlier is not None:
            _check_grown(found, first, folder)
        elif first.digest(folder) not in references:
            found.fail("differs", "the output is that of neither writer")
    except Exception as error:  # whatever is wrong with the file
        found.fail("differs", f"the output cannot be read: {type(error).__name__}: {error}")
    trials.check_leftovers(found, folder)
    return found


def _check_grown(found: Found, task: Task, folder: Path) -> None:
    """Of two that append to one file, the second may have appended to the result of the first."""
    import krnet

    assert task.earlier is not None
    out, earlier = krnet.open(folder / task.out), krnet.open(task.earlier)
    krnet.verify(folder / task.out)
    if not np.array_equal(np.asarray(out)[: len(earlier)], np.asarray(earlier)) or len(out) == len(earlier):
        found.fail("differs", f"the file holds {len(out)} samples, and the first are not those that it had")


def _threads(trials: Trials, seed: int, chance: random.Random) -> Found:
    """Threads of one process that record into one file, again and again."""
    found = Found("writers", "record threads", seed)
    folder = trials.fresh(f"writers-{seed}")
    folder.mkdir()
    found.files = [str(folder)]
    chosen = [chance.choice(RECORDERS) for _ in range(NUM_THREADS)]
    running = processes.start(lambda: _record_in_threads(folder, chosen), folder / "log")
    if (code := running.end(TIMEOUT_S)) != 0:
        found.fail("bad end", f"{chosen}: ended with {code}: {running.text[-1500:]}")
    trials.check_leftovers(found, folder)
    return found


def _record_in_threads(folder: Path, recorders: list[str]) -> None:
    import krnet

    maps = np.random.default_rng(0).random((40, 4, 5, 5), np.float32)
    out, errors = folder / "out.krn", []
    options = {name: {"iterations": 10, "components": 4, "c1": 4} if name == "krnet" else {} for name in recorders}
    expected = [np.asarray(krnet.record(maps, recorder=name, **options[name])) for name in dict.fromkeys(recorders)]

    def work(name: str) -> None:
        for _ in range(ROUNDS):
            try:
                krnet.record(maps, recorder=name, out=out, **options[name])
            except krnet.KrnetError:
                pass  # refused by name
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    krnet.verify(out)
    found = np.asarray(krnet.open(out))
    assert any(np.array_equal(found, values) for values in expected), "the file is that of no writer"
