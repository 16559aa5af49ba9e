"""The processes that torchrun starts for one command: which of them this is, and what its share of the work is.

    torchrun --nproc-per-node 4 -m krnet encode ...  ->  this_rank() -> Rank(number=2, count=4): share 2/4, GPU 2

The command line alone asks for ranks, and gives the library a share and a device: a training script that torchrun
starts may call krnet in one of its processes, and gets all of the work done. Ranks that encode, extract or learn do not
talk to each other (those that record do: team.py). Each writes files of its own; rank 0 looks until those of all are
there, and prints the result. torchrun ends them all if one of them dies.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from krnet.errors import RankError, SettingError

NEEDED = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")  # torchrun sets all of them; other launchers some
PATIENCE_S = 6 * 3600.0  # a rank that goes on may have to check hours of finished work, and writes nothing meanwhile
LONGEST_SLEEP_S = 5.0

Look = Callable[[], tuple[str, object]]
"""Returns what is missing ("" if nothing is), and something that changes while the other ranks are at work."""


@dataclass(frozen=True)
class Rank:
    """One process of a job."""

    number: int = 0
    count: int = 1
    local: int = 0
    """Its number on this machine."""
    restarts: int = 0
    """How often torchrun has started the job again."""

    @property
    def share(self) -> tuple[int, int]:
        return self.number, self.count

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def leads(self) -> bool:
        """Whether this is the one of several that waits for the others, and prints the result."""
        return self.count > 1 and self.is_first

    @property
    def prefix(self) -> str:
        """What messages begin with, where there are several processes."""
        return f"rank {self.number} of {self.count}: " if self.count > 1 else ""

    def device(self, asked: str | None) -> str | None:
        """The device of this rank: a GPU of its own, if it may have any."""
        if self.count == 1 or asked not in (None, "cuda"):
            return asked
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"cuda:{self.local % num_gpus}" if num_gpus else asked

    def share_of(self, given: tuple[int, int]) -> tuple[int, int]:
        """The share of this process; `given` is that of the command line."""
        if self.count > 1 and given != (0, 1):
            raise SettingError(
                f"share is {given[0]}/{given[1]}, and torchrun has started {self.count} processes, which share the "
                f"work by themselves; expected one of both. Leave --share out, or start this command without torchrun"
            )
        return self.share if self.count > 1 else given


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    if not all(name in environment for name in NEEDED):
        return Rank()
    found = [_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")]
    rank = Rank(*found)
    if rank.number >= rank.count:
        raise SettingError(f"RANK is {rank.number} and WORLD_SIZE {rank.count}; expected a rank from 0 to that minus 1")
    return rank


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isascii() or not text.isdecimal():
        raise SettingError(f"{name} is {text!r:.99} in the environment; expected a number, as torchrun sets it")
    return int(text)


def refuse_several(command: str, rank: Rank) -> None:
    """Refuse a command that would do, and write, the same in every process."""
    if rank.count > 1:
        raise RankError(
            f"`krnet {command}` runs in one process, and torchrun has started {rank.count}; expected record, "
            f"encode, extract or learn, which share their work. Give this command without torchrun; if one process of "
            f"a job starts it, and it is to run alone, unset WORLD_SIZE for it"
        )


def wait(look: Look, where: object, say: Callable[[str], None], patience_s: float = PATIENCE_S) -> None:
    """Return when nothing is missing any more; refuse to wait on when nothing has changed for long."""
    missing, state = look()
    changed_s = now_s = time.monotonic()
    while missing:
        say(f"waiting for the other processes: {missing}")
        if now_s - changed_s > patience_s:
            raise RankError(
                f"{where}: {missing} missing, and nothing came for {patience_s:,.0f} s; expected it of the other "
                f"processes. See what they say, and give the command again with --resume, with any number of processes"
            )
        time.sleep(min(LONGEST_SLEEP_S, 0.05 + (now_s - changed_s) / 10))
        now_s, before = time.monotonic(), state
        missing, state = look()
        changed_s = now_s if state != before else changed_s


def leave_reason(message: str) -> None:
    """Leave the reason of an error where torchrun looks for it, to print it in the summary of the job."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        reason = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": reason}))
