"""Attack krnet for a given time, and say what held: kills, full disks, two writers, damaged and forged files.

    python tools/soak [--seconds 600]                    `make soak SECONDS=600` calls it
    python tools/soak --seconds 60 --only kills --commands append
    python tools/soak --replay soak-failed/forgery-pca-17

Processes ("lanes") work at the same time: --lanes of them disturb commands, and one makes hostile files. All that is
random follows from --seed, but for the moment at which a signal hits. A trial that fails is kept in the folder of
--failed, and --replay repeats it. At the end a table is printed, and a row appended to the ledger (recipe `soak`); the
exit status is 1 if anything failed.

    __main__.py   options, lanes, table, row
    tasks.py      the commands that are disturbed, and what they make      trials.py  the undisturbed results of them
    kills.py      disk.py      writers.py                                  one way to disturb them each
    corpus.py     the recordings that hostile files are made from          hostile.py the processes that read these
    damage.py     forgery.py                                               one way to make hostile files each
    processes.py  commands in forks                                        cases.py   counts, and failures that are kept
"""

from __future__ import annotations

import os

# Before torch is imported: forks need a process without threads; and no instructions that some virtual machines lack.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("MPLBACKEND", "Agg")

import argparse
import importlib
import json
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cases
import corpus
import disk
import hostile
import kills
import processes
import tasks
import writers
from cases import Found, Results
from trials import Trials

from krnet.io import ledger

DISTURBED = {"kills": kills, "disk": disk, "writers": writers}
HOSTILE = ("damage", "forgery")
KINDS = (*DISTURBED, *HOSTILE)
TURNS = ("kills", "kills", "kills", "disk", "kills", "writers")  # of the lane that disturbs commands
BATCH = 100  # hostile files of one kind, in turn
PRELOADED = ("krnet.cli.app", "krnet.api", "krnet.task_loop", "krnet.appending", "krnet.bench.rate", "PIL.Image")
REPORT_S = 30.0
MOST_SHOWN = 50  # failures in the row
GRACE_S = 400.0  # after the end, for the trial that is on its way


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long to go on (default: 600)")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random (default: another at each call)")
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {','.join(KINDS)} (default: all)")
    parser.add_argument("--lanes", type=int, default=1, help="processes that disturb commands, at a time (default: 1)")
    parser.add_argument("--commands", default="", help="text that the names of the disturbed commands contain")
    parser.add_argument("--failed", type=Path, default=Path("soak-failed"), help="folder for trials that fail")
    parser.add_argument("--replay", type=Path, default=None, metavar="CASE", help="repeat a trial that was kept")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the lanes are ended, and small drives unmounted
    for module in PRELOADED:
        importlib.import_module(module)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    fast = Path(tempfile.mkdtemp(prefix="soak-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        return repeat(options.replay, folder) if options.replay else soak(parser, words, options, folder, fast)
    finally:
        for path in (folder, fast):
            shutil.rmtree(path, ignore_errors=True)


def soak(
    parser: argparse.ArgumentParser, words: list[str], options: argparse.Namespace, folder: Path, fast: Path
) -> int:
    kinds = options.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; expected some of {', '.join(KINDS)}")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"soak: {options.seconds:g} s, --seed {seed}, of {', '.join(kinds)}", flush=True)
    os.environ["KRNET_COMMIT"] = ledger.commit()  # for all processes: it is part of what a run writes
    turns, turns_of_files = ([kind for kind in order if kind in kinds] for order in (TURNS, HOSTILE))
    found = make_tasks(folder) if turns else []
    if turns_of_files:
        in_fork(lambda: corpus.make(folder / "corpus"), folder / "log")
    begun = time.monotonic()  # the set-up does not count: a slow machine would have no time left
    ends = begun + options.seconds
    lanes: list[tuple[Results, Callable[[], None]]] = []
    if turns:
        for lane in range(options.lanes):
            lane_results = Results(folder / f"disturbed-{lane}.jsonl", options.failed)
            trials = Trials(folder / f"trials-{lane}", found, options.commands)
            lane_turns, lane_seed = turns[lane % len(turns) :] + turns[: lane % len(turns)], 1000 * seed + lane
            lanes.append((lane_results, partial(disturb, trials, lane_turns, lane_seed, lane_results, ends)))
    if turns_of_files:
        paths = corpus.paths(folder / "corpus")
        results = Results(folder / "hostile.jsonl", options.failed)
        lanes.append((results, partial(attack, turns_of_files, paths, fast, seed, results, ends)))
    running = [
        processes.start(action, folder / f"log-{index}", own_group=True) for index, (_, action) in enumerate(lanes)
    ]
    watch([results.path for results, _ in lanes], running, ends)
    everything = cases.read(results.path for results, _ in lanes)
    broken = [f"ended with {process.code}: {process.text[-3000:]}" for process in running if process.code != 0]
    counts = cases.count(everything)
    print(cases.table(counts))
    failures = [found for found in everything if found.fault]
    for found in failures:
        print(f"soak: FAILED {found.kind}, {found.name}, seed {found.seed}: {found.fault}: {found.problem}")
    for text in broken:
        print(f"soak: a lane broke: {text}")
    seconds = time.monotonic() - begun
    write_row(words, counts, failures, broken, seed, options, seconds)
    kept = f"; they are kept in {options.failed}, and --replay FOLDER repeats one" if failures else ""
    print(f"soak: {len(everything):,} trials in {seconds:.0f} s, {len(failures)} failed{kept}")
    return int(bool(failures or broken))


def make_tasks(folder: Path) -> list[tasks.Task]:
    """The commands to disturb. Their inputs are made in forks, so that this process stays without threads."""

    def run(words: list[object]) -> None:
        in_fork(processes.command(words, folder), folder / "log")

    return tasks.make_inputs(folder / "inputs", run)


def in_fork(action: Callable[[], object], log: Path) -> None:
    running = processes.start(action, log)
    if (code := running.end(GRACE_S)) != 0:
        raise RuntimeError(f"the set-up failed with {code}: {running.text[-3000:]}")


def disturb(trials: Trials, turns: list[str], seed: int, results: Results, ends: float) -> None:
    """The lane of kills, full disks and several writers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # small drives are unmounted then
    number = 0
    while time.monotonic() < ends:
        kind = turns[number % len(turns)]
        results.add(disturb_once(kind, trials, 1_000_003 * seed + number))
        number += 1


def disturb_once(kind: str, trials: Trials, seed: int) -> Found:
    found = DISTURBED[kind].trial(trials, seed)
    found.commands = trials.only
    if not found.fault:
        for name in found.files:
            shutil.rmtree(name, ignore_errors=True)
    return found


def attack(kinds: list[str], paths: list[Path], folder: Path, seed: int, results: Results, ends: float) -> None:
    """The lane of hostile files."""
    first, size = 1_000_003 * seed, BATCH // 20  # small at first: a short soak sees files of each kind, too
    while time.monotonic() < ends:
        for kind in kinds:
            hostile.batch(kind, range(first, first + size), paths, folder / kind, results, ends)
        first, size = first + size, BATCH


def watch(paths: list[Path], running: list[processes.Started], ends: float) -> None:
    """Wait for the lanes, and say now and then how far they are."""
    told = time.monotonic()
    try:
        while any(process.poll() is None for process in running) and time.monotonic() < ends + GRACE_S:
            time.sleep(0.5)
            if time.monotonic() - told > REPORT_S:
                told = time.monotonic()
                found = cases.read(paths)
                failed = sum(bool(each.fault) for each in found)
                left = max(0, ends - told)
                print(f"soak: {len(found):,} trials, {failed} failed, {left:.0f} s left", flush=True)
    finally:  # Ctrl-C, too
        for process in running:
            process.send(signal.SIGTERM)
            process.end(10)
            process.end_group()


def write_row(
    words: list[str], counts: dict[str, dict[str, dict[str, Any]]], failures: list[Found], broken: list[str],
    seed: int, options: argparse.Namespace, seconds: float,
) -> None:  # fmt: skip
    shown = [
        {name: getattr(found, name) for name in ("kind", "name", "seed", "fault", "problem", "kept")}
        for found in failures[:MOST_SHOWN]
    ]
    ledger.append(
        "soak",
        settings={name: getattr(options, name) for name in ("seconds", "only", "commands", "lanes")},
        metrics={
            "totals": cases.total(counts), "killed": killed(counts.get("kills", {})), "counts": counts,
            "num_failed": len(failures), "failed": shown, "broken_lanes": broken,
        },
        seconds=round(seconds, 1),
        seed=seed,
        command=shlex.join(["python", "tools/soak", *words]),
        outcome="failed" if failures or broken else "ok",
    )  # fmt: skip


def killed(kills: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The counts of kills by command: record, append, extract, learn, bench."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for name, row in kills.items():
        groups.setdefault(name.split()[0], {})[name] = row
    return cases.total(groups)


def repeat(case: Path, folder: Path) -> int:
    """Repeat a trial that was kept: a hostile file is read again, a disturbed command is disturbed again."""
    kept = Found(**json.loads((case / cases.CASE_FILE).read_text()))
    if kept.kind in DISTURBED:
        found = disturb_once(kept.kind, Trials(folder / "trials", make_tasks(folder), kept.commands), kept.seed)
    else:
        found = hostile.repeat(kept, case)
    print(f"soak: {found.problem or 'this time nothing failed'}")
    return int(bool(found.problem))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
