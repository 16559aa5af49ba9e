"""What a trial found: counts by kind and name, and a folder for each that failed, from which it can be repeated.

Found(kind, name, seed, ...) -> Results.add -> results of a lane, FAILED/KIND-SEED/ {case.json, files}
"""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

CASE_FILE = "case.json"


@dataclass
class Found:
    """How a trial ended."""

    kind: str
    """kills, damage, forgery, disk or writers."""
    name: str
    """The recorder or the command."""
    seed: int
    """All that is random in the trial follows from it, but for the moment that a signal hits."""
    problem: str = ""
    """What went wrong; empty where nothing did."""
    counts: dict[str, int] = field(default_factory=dict)
    """How often something happened: kills, refusals, ..."""
    seconds: float = 0.0
    memory_bytes: int = 0
    """That a file took, at most."""
    files: list[str] = field(default_factory=list)
    """Files and folders that show the problem."""
    commands: str = ""
    """The option --commands, which decides what can be drawn."""


class Results:
    """The results of one lane: a line each, in a file that the main process reads."""

    def __init__(self, path: Path, failed: Path):
        self.path, self.failed = path, failed

    def add(self, found: Found) -> None:
        if found.problem:
            keep(found, self.failed)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")


def keep(found: Found, failed: Path) -> Path:
    """Copy what shows a problem to a folder of its own."""
    folder = failed / f"{found.kind}-{found.name.replace(' ', '-')}-{found.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in found.files:
        source = Path(name)
        if source.is_dir():
            shutil.copytree(source, folder / source.name, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy2(source, folder)
    (folder / CASE_FILE).write_text(json.dumps(asdict(found), indent=1) + "\n")
    return folder


def read(paths: Iterable[Path]) -> list[Found]:
    """All results so far; a line that is not whole yet is left out."""
    found = []
    for path in paths:
        text = path.read_text() if path.exists() else ""
        found += [Found(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]
    return found


def count(results: Iterable[Found]) -> dict[str, dict[str, dict[str, int]]]:
    """{kind: {name: {what: how often}}}; also the slowest trial, in ms, and the largest memory, in MB."""
    table: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for found in results:
        row = table[found.kind][found.name]
        row.update({"trials": 1, "failures": int(bool(found.problem)), **found.counts})
        row["max_ms"] = max(row["max_ms"], round(1000 * found.seconds))
        if found.memory_bytes:
            row["max_mb"] = max(row["max_mb"], round(found.memory_bytes / 1e6))
    return {kind: {name: dict(row) for name, row in sorted(rows.items())} for kind, rows in sorted(table.items())}


def table(counts: dict[str, dict[str, dict[str, int]]]) -> str:
    """A line for each kind and name."""
    lines = []
    for kind, rows in counts.items():
        for name, row in rows.items():
            more = "  ".join(f"{what} {number:,}" for what, number in row.items())
            lines.append(f"{kind:8}  {name:18}  {more}")
    return "\n".join(lines)
