"""Ask damaged and forged files for their values, thousands in one process, whose memory and time are watched.

    batch(...) -> a process that handles seeds one after the other, and writes down each before and after

A process that dies, or hangs, has failed at the seed that it wrote down last; another goes on with the next one.
"""

from __future__ import annotations

import gc
import random
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import corpus
import damage
import forgery
import processes
from cases import Found, Results
from corpus import Sample

SLOW_S = 10.0  # of processor time: on a shared machine, the clock says nothing
STUCK_S = 60.0
FREE_BYTES, FILE_FACTOR = 512 << 20, 512  # the rule that krnet.io.memory promises
SPARE_BYTES = 64 << 20  # for the values that are handed back, and for memory in pieces
ADDRESS_BYTES = 3 << 30  # above which the process gets no more (RLIMIT_AS), beside what it has at its start


def batch(kind: str, seeds: Sequence[int], paths: list[Path], folder: Path, results: Results, ends: float) -> int:
    """Handle seeds until the time `ends`; returns the number of those that were handled."""
    folder.mkdir(parents=True, exist_ok=True)
    done, seeds = 0, list(seeds)
    while seeds and time.monotonic() < ends:
        begun = folder / "begun"
        begun.unlink(missing_ok=True)
        todo = seeds[:]
        running = processes.start(lambda todo=todo: _work(kind, todo, paths, folder, results, ends), folder / "log")
        while running.wait(0.5) is None:
            if begun.exists() and time.time() - begun.stat().st_mtime > STUCK_S:
                running.send(signal.SIGKILL)
        if running.code == 0:
            return done + int((folder / "count").read_text())
        seed = int(begun.read_text() or seeds[0]) if begun.exists() else seeds[0]
        problem = f"the process ended with {running.code}: {running.text[-1500:]}"
        if running.code == -signal.SIGKILL:
            problem = f"not done after {STUCK_S:g} s, or killed for its memory"
        results.add(Found(kind, "process", seed, problem, files=[str(folder / f"{kind}.krn")]))
        done += seeds.index(seed) + 1
        seeds = seeds[seeds.index(seed) + 1 :]
    return done


def _work(kind: str, seeds: list[int], paths: list[Path], folder: Path, results: Results, ends: float) -> None:
    samples = corpus.load(paths)
    used = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_BYTES, used + ADDRESS_BYTES))
    count = 0
    for seed in seeds:
        if time.monotonic() > ends:
            break
        (folder / "begun").write_text(str(seed))
        results.add(trial(kind, seed, samples, folder / f"{kind}.krn"))
        count += 1
    (folder / "count").write_text(str(count))


def trial(kind: str, seed: int, samples: list[Sample], path: Path) -> Found:
    chance = random.Random(f"{kind} {seed}")
    sample = chance.choice(samples)
    found = Found(kind, sample.recorder, seed, files=[str(path), str(sample.path)])
    if kind == "damage":
        path.write_bytes(damage.damage(sample.content, chance))
        way = ""
    else:
        way = forgery.forge(sample, samples, path, chance)
    return examine(found, path, sample, way)


def examine(found: Found, path: Path, sample: Sample | None, way: str) -> Found:
    """Ask a file, and judge its answers, its memory and its time."""
    before, started = _reset_peak(), time.process_time()
    answers = corpus.ask(path)
    found.seconds = time.process_time() - started
    found.memory_bytes = max(0, _status("VmHWM") - before)
    refused = next((type(answer).__name__ for answer in answers.values() if isinstance(answer, Exception)), "")
    found.counts = {"refused": int(bool(refused))}
    found.problem = forgery.judge(answers)
    if not found.problem and found.kind == "damage" and sample is not None:
        found.problem = damage.judge(answers, sample.answers)
    allowed = max(FREE_BYTES, FILE_FACTOR * path.stat().st_size) + SPARE_BYTES
    if not found.problem and found.memory_bytes > allowed:
        found.problem = f"took {found.memory_bytes / 1e6:.0f} MB; {allowed / 1e6:.0f} are allowed"
    if not found.problem and found.seconds > SLOW_S:
        found.problem = f"took {found.seconds:.1f} s"
    if found.problem and way:
        found.problem += f" (forged: {way}, of {sample.path.name if sample else ''})"
    return found


def _reset_peak() -> int:
    """Set the peak of this process to what it holds now, and return that."""
    if _status("VmRSS") > 600 << 20:
        gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def repeat(kept: Found, case: Path) -> Found:
    """Examine the hostile file of a kept case again; the file that it was made from lies beside it."""
    path = case / f"{kept.kind}.krn"
    originals = [other for other in case.glob("*.krn") if other != path]
    sample = corpus.load(originals)[0] if originals else None
    return examine(Found(kept.kind, kept.name, kept.seed), path, sample, "")
