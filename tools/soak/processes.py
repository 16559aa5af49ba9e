"""Commands of krnet in processes of their own, which can be killed, limited and waited for.

    start(action, log) -> Started -> wait() -> exit code, negative: ended by that signal
    command(words) -> an action: what `krnet WORDS` does

A process is a fork of this one, which has imported krnet and torch already: a command then takes tenths of a second
instead of seconds. This process must start no threads, since a fork has none of them.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.004


@dataclass
class Started:
    """A process on its way, or at its end."""

    pid: int
    log: Path
    code: int | None = None
    """Exit code, once it has ended."""

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None if it has not ended after this time."""
        end = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < end:
            time.sleep(POLL_S)
        return self.code

    def send(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def end(self, timeout_s: float) -> int:
        """Its exit code; one that goes on for longer than this is killed."""
        if self.wait(timeout_s) is None:
            self.send(signal.SIGKILL)
            self.wait(60)
        assert self.code is not None, f"process {self.pid} survived SIGKILL"
        return self.code

    def end_group(self) -> None:
        """Kill what a process with a group of its own has left."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def start(
    action: Callable[[], object], log: Path, *, file_bytes: int | None = None, own_group: bool = False
) -> Started:
    """Run an action in a fork; what it prints goes to `log`.

    file_bytes  no file may become larger (RLIMIT_FSIZE)
    own_group   the process and those that it starts form a group, which can be ended as a whole
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Started(pid, log)
    code = 1
    try:
        if own_group:
            os.setpgid(0, 0)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors="backslashreplace") for fd in (1, 2)
        )
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        action()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # before the action has begun
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # without the clean-up of this process, of which it is a copy


def command(words: Sequence[object], folder: Path | None = None) -> Callable[[], None]:
    """What `krnet WORDS` does, from its arguments to its exit code. folder: where its row of the ledger goes."""

    def act() -> None:
        from krnet.cli.app import main

        sys.argv = ["krnet", *map(str, words)]
        if folder is not None:
            os.environ["KRNET_LEDGER"] = str(folder / "ledger.jsonl")
        main()

    return act
