"""Commands in processes of their own, as a user starts them: how long they take, and how much memory.

krnet("encode", ..., num_processes=2) -> a command line: krnet alone, or torchrun and its ranks
run(command, threads=1) -> Stage: seconds, peak memory, what was printed
digests(folder) -> {name of a file: digest of its bytes}
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

POLL_S = 0.1
READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Stage:
    """What one command took."""

    seconds: float
    cpu_seconds: float
    """Of all its processes: other work on the machine stretches the seconds, not these."""
    peak_bytes: dict[str, int]
    """Peak of resident memory (VmHWM, read ten times a second): of the largest process, and of all, added up."""
    printed: str


def krnet(*words, num_processes=1):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", num_processes] if num_processes > 1 else []
    return [sys.executable, *map(str, torchrun), "-m", "krnet", *map(str, words)]


def start(command, threads=1, **pipes):
    """threads: of each process"""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def run(command, threads=1):
    """Run a command to its end; one that fails ends the benchmark."""
    with tempfile.TemporaryFile("w+") as out:
        started, cpu_started = time.perf_counter(), cpu_seconds()
        process = start(command, threads, stdout=out)
        peaks = watch(process)
        seconds, taken = time.perf_counter() - started, cpu_seconds() - cpu_started
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}; see above")
        out.seek(0)
        return Stage(seconds, taken, {"largest": max(peaks.values()), "together": sum(peaks.values())}, out.read())


def cpu_seconds():
    """Of all processes that have ended and that this one, or one that it waited for, has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watch(process):
    """Wait for the end of a process; the peak memory of it and of each that it started, {pid: bytes}."""
    peaks = {}
    while process.poll() is None:
        for pid in with_descendants(process.pid):
            with suppress(OSError, TypeError):  # it has ended: there is no file, or no such line
                status = Path(f"/proc/{pid}/status").read_text()
                peaks[pid] = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
        time.sleep(POLL_S)
    return peaks


def with_descendants(pid):
    yield pid
    for child in children(pid):
        yield from with_descendants(child)


def children(pid):
    """Processes that a process has started."""
    with suppress(OSError):  # it has ended
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())
    return []


def digests(folder):
    found = {}
    for path in sorted(Path(folder).iterdir()):
        digest = blake2b(digest_size=16)
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
        found[path.name] = digest.hexdigest()
    return found


def size_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).iterdir())
