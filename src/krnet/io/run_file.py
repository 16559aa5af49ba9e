"""run.json: the results of a run of `krnet learn`, as its folder and reports read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from krnet.errors import RunError
from krnet.io.atomic import read_json

RUN_FILE = "run.json"


def read_run(path: Path, needed: Iterable[str]) -> dict[str, Any]:
    """The results, of whatever form their values are; refused if a key of `needed` is missing."""
    try:
        results = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error}); expected what `krnet learn` writes") from error
    missing = [name for name in needed if name not in results]
    if missing:
        raise RunError(f"{path}: lacks {', '.join(missing)}; expected what `krnet learn` writes")
    return results
