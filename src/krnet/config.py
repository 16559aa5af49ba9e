"""Checks and parsers of settings. Nothing here needs torch.

    check_choice, check_int, ...     refuse a value, with what was expected
    from_dict, describe              plain values -> a config dataclass; field -> the docstring under it
    parse_size("6.5MB") -> 6_500_000   parse_shape("256,14,14")   parse_counts("500x50")   parse_duration("10m")
    parse_setting("c0=64") -> ("c0", 64)   parse_ids("5,3,7:9") -> [5, 3, slice(7, 9)]

A ValueError says what is wrong with a text; the command line makes exit code 2 of it. MB are 10^6 bytes, MiB 2^20.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from krnet.errors import InputError, SettingError

T = TypeVar("T")
WORDS = {"true": True, "false": False, "none": None}
TIME_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Selection = list[int | slice] | Path
"""Numbers and slices in the order asked, or a .npy file of IDs."""
SIZE_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
MOST_BYTES = 2**53  # beyond this a float skips whole numbers, and no disk is that large


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    choices = tuple(choices)
    if value not in choices:
        raise SettingError(f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}")


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Infinity fits some ranges, but not the JSON of a recording.
    if not (is_number and low <= value <= high and abs(value) < math.inf):
        wanted = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise SettingError(f"{name} is {value!r}; expected {wanted}")


def check_int(name: str, value: object, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(f"{name} is {value!r}; expected a whole number")
    check_range(name, value, low, high)


def check_shares(name: str, value: object) -> tuple[float, ...]:
    """One share or several, each from 0 to 1, as a tuple."""
    shares = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for share in shares:
        check_range(name, share, 0, 1)
    return shares


def require(module: str, extra: str) -> Any:
    """An optional package, imported when it is first needed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(
            f"{module.split('.')[0]} is not installed, and this needs it. Run: pip install 'krnet[{extra}]'"
        ) from error


@cache
def describe(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it; a subclass may say it anew."""
    described = {
        name: text for base in reversed(cls.__bases__) if base is not object for name, text in describe(base).items()
    }
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant)
            described[field.target.id] = " ".join(str(below.value.value).split())
    return described


def unknown_setting(name: str, known: Iterable[str], what: str = "setting") -> SettingError:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known {what}s: {', '.join(known)}"
    return SettingError(f"unknown {what} {name!r}; {hint}")


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build a config from plain values, refusing names it does not have."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown_setting(name, known)
    missing = [name for name, f in known.items() if name not in values and f.default is f.default_factory is MISSING]
    if missing:
        raise SettingError(f"missing settings: {', '.join(missing)}")
    return cls(**values)


def parse_shape(text: str) -> tuple[int, ...]:
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
    return sum(float(amount) * TIME_UNITS[unit] for amount, unit in re.findall(f"({number})([smhd])", text))


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


def parse_settings(text: str) -> dict[str, Any]:
    """name=value,name=value or name=value:name=value; a piece without = belongs to the value before it."""
    pieces: list[str] = []
    for piece in re.split("[,:]", text) if text.strip() else []:
        if "=" in piece or not pieces:
            pieces.append(piece.strip())
        else:
            pieces[-1] += f",{piece.strip()}"
    found: dict[str, Any] = {}
    for piece in pieces:
        try:
            name, value = parse_setting(piece)
        except ValueError as error:
            raise SettingError(str(error)) from error
        if name in found:
            raise SettingError(f"{name} is given twice in {text!r}; give it once")
        found[name] = value
    return found


def series_name(recorder: str, settings: Mapping[str, Any]) -> str:
    """What a recorder with some settings is called: pca, or pca:components=64:dead_zone=0.5."""
    return ":".join([recorder, *(f"{name}={value}" for name, value in settings.items())])


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


def parse_size(size: Any, name: str = "budget") -> int:
    """12MB, 6.5 MB, 800kB, 3MiB or plain bytes, as whole bytes, rounded down."""
    expected = f"{name} is {size!r}; expected bytes, such as 12MB, 6.5 MB, 800kB, 3MiB or 12000000"
    if isinstance(size, str):
        found = re.fullmatch(r"\s*([\d_]*\d(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", size, re.IGNORECASE)
        if not found or found[2].lower() not in SIZE_UNITS:
            raise SettingError(expected)
        value = float(found[1].replace("_", "")) * SIZE_UNITS[found[2].lower()]
    elif isinstance(size, (int, float)) and not isinstance(size, bool):
        value = float(size)
    else:
        raise SettingError(expected)
    if not 1 <= value < MOST_BYTES:
        raise SettingError(f"{expected}, at least 1 byte and less than {MOST_BYTES}")
    return math.floor(value + 1e-6)  # 6.7 MB is 6699999.999...


def parse_sizes(text: str, name: str = "budgets") -> list[int]:
    """3MB,6.5MB,12MB: each once, the smallest first."""
    found = sorted({parse_size(part, name) for part in text.split(",") if part.strip()})
    if not found:
        raise SettingError(f"{name} is {text!r}; expected sizes such as 3MB,6.5MB,12MB")
    return found


def format_size(num_bytes: int) -> str:
    """The shortest of 12 MB, 6.5 MB, 800 kB or 512 bytes that is exact, or nearly so."""
    for unit in ("GB", "MB", "kB"):
        if num_bytes >= SIZE_UNITS[unit.lower()]:
            return f"{num_bytes / SIZE_UNITS[unit.lower()]:.4g} {unit}"
    return f"{num_bytes} bytes"
