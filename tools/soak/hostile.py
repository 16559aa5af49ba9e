"""Ask damaged and forged files for their values, thousands in one process, whose memory and time are watched.

    batch(...) -> a process that handles seeds one after the other, and writes down each before and after

A process that dies, or hangs, has failed at the seed that it wrote down last; another goes on with the next one.
Time is processor time, since the machine may be shared. Memory is the largest resident set of the process while it
handles a file, above that at its start: what earlier files have left behind counts, too.
"""

from __future__ import annotations

import ctypes
import gc
import json
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

SLOW_S = 10.0  # of processor time; more is a failure
STUCK_S = 60.0  # of processor time, after which the process is ended (ITIMER_PROF)
ASLEEP_S = 900.0  # by the clock: for a process that waits for ever
FREE_BYTES, FILE_FACTOR = 512 << 20, 512  # the rule of SECURITY.md
ADDRESS_BYTES = 3 << 30  # above which the process gets no more (RLIMIT_AS), beside what it has at its start

_libc = ctypes.CDLL(None)


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
            if begun.exists() and time.time() - begun.stat().st_mtime > ASLEEP_S:
                running.send(signal.SIGKILL)
        if running.code == 0:
            return done + int((folder / "count").read_text())
        seed, name, files = json.loads(begun.read_text()) if begun.exists() else (seeds[0], "set-up", [])
        found = Found(kind, name, seed, files=files)
        if running.code == -signal.SIGPROF:
            found.fail("slow", f"not done after {STUCK_S:g} s of processor time")
        found.fail("died", f"the process ended with {running.code}: {running.text[-1500:]}")
        results.add(found)
        done += seeds.index(seed) + 1
        seeds = seeds[seeds.index(seed) + 1 :]
    return done


def _work(kind: str, seeds: list[int], paths: list[Path], folder: Path, results: Results, ends: float) -> None:
    samples = corpus.load(paths)
    gc.freeze()  # or each collection would look through all of torch
    at_start, used = settle(), _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_BYTES, used + ADDRESS_BYTES))
    count = 0
    for seed in seeds:
        if time.monotonic() > ends:
            break
        results.add(trial(kind, seed, samples, folder, at_start))
        count += 1
    (folder / "count").write_text(str(count))


def trial(kind: str, seed: int, samples: list[Sample], folder: Path, at_start: int | None = None) -> Found:
    chance = random.Random(f"{kind} {seed}")
    sample = chance.choice(samples)
    path, files = corpus.place(sample, folder, kind)
    found = Found(kind, sample.name, seed, files=files)
    (folder / "begun").write_text(json.dumps([seed, sample.name, files]))
    way = ""
    if kind == "damage":
        path.write_bytes(damage.damage(sample.content, chance))
    else:
        way = forgery.forge(sample, samples, path, chance)
        found.counts["unchanged"] = int(way == forgery.UNCHANGED)
    return examine(found, path, sample, way, at_start)


def examine(found: Found, path: Path, sample: Sample | None, way: str, at_start: int | None = None) -> Found:
    """Ask a file, and judge its answers, its memory and its time. at_start: the memory that peaks are compared with."""
    now = settle()
    at_start = now if at_start is None else at_start
    signal.setitimer(signal.ITIMER_PROF, STUCK_S)
    started = time.process_time()
    answers = corpus.ask(path)
    found.cpu_seconds = time.process_time() - started
    signal.setitimer(signal.ITIMER_PROF, 0)
    found.memory_bytes = max(0, _status("VmHWM") - at_start)
    found.counts["refused"] = int(any(isinstance(answer, Exception) for answer in answers.values()))
    origin = f" (forged: {way}, of {sample.path.name})" if way and sample is not None else ""
    if raw := forgery.judge(answers):
        found.fail("raw exception", raw + origin)
    if found.kind == "damage" and sample is not None and (wrong := damage.judge(answers, sample.answers)):
        found.fail("wrong value", wrong)
    allowed = max(FREE_BYTES, FILE_FACTOR * path.stat().st_size)
    if found.memory_bytes > allowed:
        text = f"took {found.memory_bytes / 1e6:.0f} MB; {allowed / 1e6:.0f} are allowed"
        found.fail("above the bound", text + origin)
    if found.cpu_seconds > SLOW_S:
        found.fail("slow", f"took {found.cpu_seconds:.1f} s of processor time" + origin)
    return found


def settle() -> int:
    """Give free memory back, so that what is allocated later shows; set the peak to what is left, and return that."""
    gc.collect()
    _libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def repeat(kept: Found, case: Path) -> Found:
    """Examine the hostile file of a kept case again; the file that it was made from lies beside it."""
    path, originals = corpus.kept(case, kept.kind, kept.name)
    sample = corpus.load(originals)[0] if originals else None
    return examine(Found(kept.kind, kept.name, kept.seed), path, sample, "")
