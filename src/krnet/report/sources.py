"""Find the rows that a report shows: of ledgers, and of the folders that `krnet learn` writes.

results/ledger.jsonl                                        -> its rows
DIR/run.json, DIR/METHOD/run.json, DIR/ORDER/seed-N/METHOD/ -> a row each, as if appended to a ledger
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from krnet.errors import InputError, RunError
from krnet.io import ledger
from krnet.io.run_file import RUN_FILE, read_run
from krnet.report.views.embedding import FOLDER_KEY

RUN_PATTERNS = (RUN_FILE, f"*/{RUN_FILE}", f"*/seed-*/*/{RUN_FILE}")
ROW_KEYS = ("settings", "versions", "class_order", "device", "seed", "command")
NEEDED_KEYS = ("method", "tasks", "accuracy", "last")
RUN_KEY = "run_files"
"""Only rows of run folders have it: the folder, below the one that was given."""


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of all paths, each a ledger or a folder of runs; an error names the path that is neither."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        rows += _read_runs(path) if path.is_dir() else _read_ledger(path)
    return rows


def _read_ledger(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; expected a ledger, or a folder that `krnet learn` wrote")
    if path.name == RUN_FILE:
        return [_run_row(path, path.parent)]
    try:
        rows = ledger.read(path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no text ({error}); expected a ledger: one JSON object a line") from error
    return [{**row, FOLDER_KEY: str(path.absolute().parent)} for row in rows]


def _read_runs(folder: Path) -> list[dict[str, Any]]:
    files = [file for pattern in RUN_PATTERNS for file in sorted(folder.glob(pattern))]
    if not files:
        raise RunError(
            f"{folder}: no finished run in it; expected {RUN_FILE}, as `krnet learn -o {folder}` writes at its end"
        )
    return [_run_row(file, folder) for file in files]


def _run_row(path: Path, folder: Path) -> dict[str, Any]:
    """run.json as the row that the ledger would hold."""
    run = read_run(path, NEEDED_KEYS)
    written = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    commits = run.get("commits")
    return {
        "date": written.isoformat(timespec="seconds"),
        "recipe": "",
        "outcome": "ok",
        "commit": " ".join(map(str, commits)) if isinstance(commits, list) else "",
        **{key: run.get(key) for key in ROW_KEYS},
        "seconds": run.get("seconds"),
        "metrics": {key: value for key, value in run.items() if key not in ROW_KEYS},
        RUN_KEY: str(path.parent.relative_to(folder)),
    }
