"""What a trial found: counts by kind and name, and a folder for each that failed, from which it can be repeated.

Found(kind, name, seed, ...) -> Results.add -> results of a lane, FAILED/KIND-NAME-SEED/ {case.json, files}
results -> count -> {kind: {name: {what: how often}}} -> total -> {kind: {what: how often}}
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CASE_FILE = "case.json"
MOST_KEPT = 50  # folders a lane: one fault may show in thousands of files
# How a trial can fail. A row says of each how often, also where that is never.
FAULTS = {
    "kills": ("differs", "cannot go on", "bad end", "leftovers"),
    "disk": ("differs", "cannot go on", "bad end", "half-written", "leftovers"),
    "writers": ("differs", "bad end", "leftovers"),
    "damage": ("wrong value", "raw exception", "above the bound", "slow", "died"),
    "forgery": ("raw exception", "above the bound", "slow", "died"),
}
COUNTS = {"kills": ("kills",), "disk": ("full",), "writers": ("refused",), "damage": ("refused",),
          "forgery": ("refused", "unchanged")}  # fmt: skip
PEAKS = ("max_cpu_s", "max_mb")


@dataclass
class Found:
    """How a trial ended."""

    kind: str
    """kills, damage, forgery, disk or writers."""
    name: str
    """The recorder or the command."""
    seed: int
    """All that is random in the trial follows from it, but for the moment that a signal hits."""
    fault: str = ""
    """How it failed, one of FAULTS[kind]; empty where it did not."""
    problem: str = ""
    """What went wrong, in words."""
    counts: dict[str, int] = field(default_factory=dict)
    """How often something happened: kills, refusals, ..."""
    cpu_seconds: float = 0.0
    """Processor time of all that a file was asked for."""
    memory_bytes: int = 0
    """That a file took, at most."""
    files: list[str] = field(default_factory=list)
    """Files and folders that show the problem."""
    commands: str = ""
    """The option --commands, which decides what can be drawn."""
    kept: str = ""
    """The folder that shows the failure."""

    def fail(self, fault: str, problem: str) -> None:
        """Note how the trial failed; the first failure stays."""
        assert fault in FAULTS[self.kind], f"{self.kind} has no fault {fault!r}"
        if not self.fault:
            self.fault, self.problem = fault, problem


class Results:
    """The results of one lane: a line each, in a file that the main process reads."""

    def __init__(self, path: Path, failed: Path):
        self.path, self.failed, self.num_kept = path, failed, 0

    def add(self, found: Found) -> None:
        if found.fault and self.num_kept < MOST_KEPT:
            self.num_kept += 1
            found.kept = keep(found, self.failed).name
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


def count(results: Iterable[Found]) -> dict[str, dict[str, dict[str, Any]]]:
    """{kind: {name: {what: how often}}}; of files also the longest processor time and the largest memory."""
    table: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for found in results:
        row = table[found.kind].setdefault(found.name, empty_row(found.kind))
        row["trials"] += 1
        for what, number in found.counts.items():
            row[what] = row.get(what, 0) + number
        if found.fault:
            row[found.fault] += 1
        if "max_mb" in row:
            row["max_cpu_s"] = max(row["max_cpu_s"], round(found.cpu_seconds, 3))
            row["max_mb"] = max(row["max_mb"], round(found.memory_bytes / 1e6))
    return {kind: dict(sorted(rows.items())) for kind, rows in sorted(table.items())}


def empty_row(kind: str) -> dict[str, Any]:
    peaks = PEAKS if kind in ("damage", "forgery") else ()
    return dict.fromkeys(("trials", *COUNTS[kind], *FAULTS[kind], *peaks), 0)


def total(counts: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The sums of each kind over all names, and the largest of the peaks."""
    totals = {}
    for kind, rows in counts.items():
        names = dict.fromkeys(what for row in rows.values() for what in row)
        found = {what: [row.get(what, 0) for row in rows.values()] for what in names}
        totals[kind] = {what: max(numbers) if what in PEAKS else sum(numbers) for what, numbers in found.items()}
    return totals


def table(counts: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A line for each kind and name, and one for the sum; what never happened to a kind is left out of its lines."""
    lines = []
    for kind, row in total(counts).items():
        for name, numbers in [*counts[kind].items(), ("all", row)]:
            shown = numbers.items() if name == "all" else [item for item in numbers.items() if item[1]]
            lines.append(f"{kind:8}  {name:18}  " + "  ".join(f"{what} {number:,}" for what, number in shown))
    return "\n".join(lines)
