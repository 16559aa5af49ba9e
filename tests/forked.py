"""Processes of their own that start in hundredths of a second, to be stopped, killed, limited and waited for.

    start(command("record", path, ...)) -> Running -> wait() -> exit code, negative: ended by that signal
    run(script("import krnet; ...", path)) -> Done(returncode, stdout, stderr)

Each is a fork of a server that has imported torch and krnet, and nothing of the tests. A test that is about a fresh
interpreter (what it imports, how it finds krnet) starts sys.executable instead.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo: an optimiser imports it, for a second.
CONTEXT.set_forkserver_preload(["torch._dynamo", "krnet.cli.app", "krnet.task_loop", "krnet.bench.rate"])
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Program:
    """What a process does: a command of krnet, or Python code."""

    words: tuple[str, ...]
    code: str = ""


def command(*words: object) -> Program:
    """krnet WORDS"""
    return Program(("krnet", *map(str, words)))


def script(code: str, *arguments: object) -> Program:
    """python -c CODE ARGUMENTS"""
    return Program(("-c", *map(str, arguments)), textwrap.dedent(code))


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Running:
    """A process on its way, or at its end."""

    def __init__(self, program: Program, cwd: Path | str, ignored: Collection[int]):
        self._folder = tempfile.TemporaryDirectory()  # of what it prints
        given = program, self._folder.name, str(cwd), dict(os.environ), frozenset(ignored)
        self._process = CONTEXT.Process(target=_work, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it is on its way."""
        return self._process.exitcode

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Its exit code. One that goes on for longer than this is killed, and an error."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self.kill()
            raise AssertionError(f"it went on for {timeout_s} s: {self.stdout}{self.stderr}")
        return self._process.exitcode

    def until(self, found: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until it has come so far; an error if it ends before."""
        end = time.monotonic() + timeout_s
        while not found():
            assert self.poll() is None, f"it ended with {self.poll()}: {self.stdout}{self.stderr}"
            assert time.monotonic() < end, f"it did not come so far: {self.stdout}{self.stderr}"
            time.sleep(0.02)

    def send(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def stdout(self) -> str:
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        return self._text("stderr")

    def _text(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_bytes().decode() if path.exists() else ""


def start(program: Program, *, cwd: Path | str = ".", ignored: Collection[int] = ()) -> Running:
    """ignored: signals that it ignores from its start, as after `nohup` or in the background of a shell script."""
    return Running(program, cwd, ignored)


def run(program: Program, *, cwd: Path | str = ".") -> Done:
    running = start(program, cwd=cwd)
    return Done(running.wait(), running.stdout, running.stderr)


def _work(program: Program, folder: str, cwd: str, environment: dict[str, str], ignored: frozenset[int]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for signum in STOPPING:
        usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        signal.signal(signum, signal.SIG_IGN if signum in ignored else usual)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, fd)
        os.close(target)
    sys.stdout.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale of the server
    sys.argv = list(program.words)
    if program.code:
        exec(compile(program.code, "<script>", "exec"), {"__name__": "__main__"})
    else:
        from krnet.cli.app import main

        main()
