"""Print results on stdout, as a table or as one JSON object, and messages on stderr.

(name, text) pairs -> show            -> a table of two columns, or JSON
titled_table       -> print_unwrapped -> a table, wide as it needs to be
messages           -> say, on stderr

Sizes are printed in MB of 10^6 bytes, with the exact number of bytes beside them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from krnet.config import plain_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Rows = list[tuple[str, str]]


def say(text: str) -> None:
    """Print a message on stderr: stdout holds results only."""
    print(plain_text(text), file=sys.stderr, flush=True)


def show(result: Mapping[str, Any], rows: Rows, as_json: bool) -> None:
    """Print `result` as JSON, or `rows` as a table of two columns."""
    if as_json:
        show_json(result)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(plain_text, row))
    # Without a terminal rich wraps at 80 columns, which would break paths.
    _print_table(table, Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False))


def show_json(value: Any) -> None:
    """Print one JSON value. JSON has no NaN and no infinity: they become null."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def titled_table(title: str, first_column: str) -> Table:
    from rich.table import Table

    table = Table(title=plain_text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(first_column)
    return table


def print_unwrapped(table: Table) -> None:
    """Print a table at its full width: on a narrow terminal its lines wrap, where rich would cut numbers."""
    from rich.console import Console

    width = Console(width=10_000).measure(table).maximum
    _print_table(table, Console(width=width, highlight=False, markup=False))


def _print_table(table: Table, console: Console) -> None:
    """Print a table without the blanks that rich fills its lines with."""
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def short_size(num_bytes: int) -> str:
    """Write a size to three digits, in its largest unit, for a column of a table: 12.0 MB, 45.1 kB or 512 bytes."""
    for unit, unit_bytes in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= unit_bytes:
            size = num_bytes / unit_bytes
            return f"{size:,.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"
    return f"{num_bytes} bytes"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.3f} MB ({num_bytes:,} bytes)"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f} times smaller than the features" if ratio >= 1 else f"{1 / ratio:.2f} times larger than them"


def shape_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "one number"
