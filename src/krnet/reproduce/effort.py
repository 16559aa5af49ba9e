"""The time and the commits that a run has taken, over all calls that worked on it.

with counting(folder) as effort: ...   effort.seconds, effort.commits -> the row of the run
                                       folder/effort.json             -> the next call, if this one is interrupted
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from krnet.io import ledger
from krnet.io.atomic import read_json, write_json

EFFORT_FILE = "effort.json"


@dataclass
class Effort:
    earlier_s: float
    """Of the calls before this one, except those that were killed: nobody could note their time."""
    commits: list[str]
    """Of the code that worked on the run, each once, in the order of their first work."""
    started_s: float

    @property
    def seconds(self) -> float:
        return self.earlier_s + time.perf_counter() - self.started_s


@contextmanager
def counting(folder: Path) -> Iterator[Effort]:
    path = folder / EFFORT_FILE
    folder.mkdir(parents=True, exist_ok=True)
    try:
        saved = read_json(path)
    except (FileNotFoundError, ValueError):  # none yet, or cut short by a crash
        saved = {}
    commits = list(dict.fromkeys([*saved.get("commits", []), ledger.commit()]))
    effort = Effort(float(saved.get("seconds", 0.0)), commits, time.perf_counter())
    write_json(path, {"seconds": effort.earlier_s, "commits": commits})
    try:
        yield effort
    finally:
        write_json(path, {"seconds": effort.seconds, "commits": commits})
