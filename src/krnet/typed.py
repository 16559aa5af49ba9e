"""What a user types, as values: shapes, class counts, durations, settings and sample IDs.

"256,14,14" -> (256, 14, 14)    "500x50" -> 50 counts of 500    "10m" -> 600.0    "c0=64" -> ("c0", 64)
"5,3,7:9" -> [5, 3, slice(7, 9)]    "drops=0.5,0.75" -> ("drops", (0.5, 0.75))    "0.95,0.98" -> (0.95, 0.98)

A ValueError says what is wrong; the command line makes exit code 2 of it (option). Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import typer

T = TypeVar("T")

WORDS = {"true": True, "false": False, "none": None}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Selection = list[int | slice] | Path
"""Numbers and slices in the order asked, or a .npy file of IDs."""


def option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The parser of an option: of a ValueError some versions of typer show too much, others only the value."""

    @wraps(parse)
    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


def parse_sizes(text: str) -> tuple[int, ...]:
    """256,14,14 or 256x14x14"""
    if not re.fullmatch(r"\d+([,x]\d+)*", text):
        raise ValueError(f"{text!r} is not a shape; expected sizes such as 256,14,14")
    return tuple(int(size) for size in re.split("[,x]", text))


def parse_counts(text: str) -> list[int]:
    """1300,1300,732 or 500x50, fifty times 500, or both mixed"""
    if not re.fullmatch(r"\d+(x\d+)?(,\d+(x\d+)?)*", text):
        raise ValueError(f"{text!r} are not counts; expected a list such as 1300,1300,732, or 500x50 for 50 times 500")
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("x")
        counts += [int(count)] * int(times or 1)
    return counts


def parse_duration(text: str) -> float:
    """90, 90s, 10m, 1h30m"""
    number = r"\d+(?:\.\d+)?|\.\d+"
    if re.fullmatch(number, text):
        return float(text)
    if not re.fullmatch(f"(({number})[smhd])+", text):
        raise ValueError(f"{text!r} is not a duration; expected seconds, or 90s, 10m, 1h30m")
    return sum(float(amount) * UNITS[unit] for amount, unit in re.findall(f"({number})([smhd])", text))


def parse_targets(text: str) -> tuple[float, ...]:
    """0.95,0.98"""
    if not text:
        return ()
    found = [_parse_number(part) for part in text.split(",")]
    if not all(number is not None and number <= 1 for number in found):
        raise ValueError(f"{text!r} are not targets; expected R2 of at most 1, such as 0.95,0.98")
    return tuple(float(number) for number in found if number is not None)


def parse_setting(text: str) -> tuple[str, Any]:
    """name=value, the value true, false, none, a number, numbers with commas between them, or a word"""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is not a setting; expected name=value, such as c0=128")
    if value.lower() in WORDS:  # written as Python prints them, too
        return name, WORDS[value.lower()]
    numbers = [_parse_number(part) for part in value.split(",")]
    if None in numbers:
        return name, value
    return name, numbers[0] if len(numbers) == 1 else tuple(numbers)


def _parse_number(text: str) -> int | float | None:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return None


def parse_ids(text: str) -> Selection:
    """`5`, `0:100`, `::10`, `5,3,7:9`, `-1` or `@file.npy`; a ValueError says what is wrong."""
    if text.startswith("@"):
        return Path(text[1:])
    return [_parse_part(part.strip()) for part in text.split(",")]


def _parse_part(part: str) -> int | slice:
    if re.fullmatch(r"[+-]?\d+", part):
        return int(part)
    if not re.fullmatch(r"([+-]?\d+)?:([+-]?\d+)?(:([+-]?\d+)?)?", part):
        raise ValueError(f"{part!r} is not a sample ID; expected 5, 0:100, ::10, a list such as 5,3,7:9, or @file.npy")
    chosen = slice(*(int(number) if number else None for number in part.split(":")))
    if chosen.step == 0:
        raise ValueError(f"{part!r} has step 0; expected at least 1, or a negative step to go backwards")
    return chosen
