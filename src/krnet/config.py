"""Check and parse settings. Nothing here needs torch.

    check_choice, check_int, ...           refuse a value, and say what was expected
    from_dict                              plain values -> a config dataclass
    describe                               a config dataclass -> field name -> the docstring under the field
    explain_settings                       a config dataclass -> name, description and default of each field, as text
    settings_text                          settings -> "step 0.4058, components 36"
    parse_size("6.5MB")                    -> 6_500_000; MB are 10^6 bytes, MiB 2^20
    parse_shape("256,14,14")               -> (256, 14, 14)
    parse_counts("500x2,3")                -> [500, 500, 3]
    parse_seeds("0,1,2")                   -> [0, 1, 2]
    parse_names("lucir1993,icarl")         -> ["lucir1993", "icarl"]
    parse_duration("10m")                  -> 600.0 seconds
    parse_setting("c0=64")                 -> ("c0", 64)
    parse_ids("5,3,7:9")                   -> [5, 3, slice(7, 9)]

A parser raises a ValueError that says what is wrong with its text; the command line then exits with code 2.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import os
import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from krnet.errors import MissingPackageError, SettingError

T = TypeVar("T")
VALUE_WORDS = {"true": True, "false": False, "none": None}
TIME_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Selection = list[int | slice] | Path
"""Sample IDs and slices of them, in the order of the replays; or the path of a .npy file of IDs."""
SIZE_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
MIN_PERCENTAGE = 2  # a share that is given as this or more, up to 100, was meant in percent
MAX_BYTES = 2**53  # above this a float cannot hold every integer, and no disk is that large


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    choices = tuple(choices)
    if value not in choices:
        raise SettingError(f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}")


MAX_RATE = 1e6  # far above any learning rate that trains


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Infinity is inside some ranges, but JSON, and so a recording, cannot hold it.
    if not (is_number and low <= value <= high and abs(value) < math.inf):
        is_percentage = is_number and high == 1 and MIN_PERCENTAGE <= value <= 100
        hint = f", such as {value / 100:g}" if is_percentage else ""
        raise SettingError(f"{name} is {value!r}; expected {_range_text(low, high)}{hint}")


def check_rate(name: str, value: float) -> None:
    """A learning rate: optimizers compute in float32, and would fail on a larger number without a word of ours."""
    check_range(name, value, 0)
    if value > MAX_RATE:
        check_range(name, value, 0, MAX_RATE)


def check_int(name: str, value: object, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(f"{name} is {value!r}; expected a whole number")
    if not low <= value <= high:
        raise SettingError(f"{name} is {value!r}; expected {_range_text(low, high)}")


def check_unique(name: str, values: Sequence[object]) -> None:
    """Refuse an empty list, and one that holds a value twice."""
    if not values:
        raise SettingError(f"{name}: none given; expected at least one")
    for number, value in enumerate(values):
        if value in values[:number]:
            raise SettingError(f"{name}: {value} is given twice; expected each once")


def _range_text(low: float, high: float) -> str:
    """Describe a range without naming an infinite bound."""
    if high == math.inf:
        return "a finite number" if low == -math.inf else f"at least {low}"
    return f"at most {high}" if low == -math.inf else f"{low} to {high}"


def check_shares(name: str, value: object) -> tuple[float, ...]:
    """Check one share or several, each from 0 to 1; return them as a tuple."""
    shares = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for share in shares:
        check_range(name, share, 0, 1)
    return shares


def require(module: str, extra: str) -> Any:
    """Import an optional package where it is needed; if it is missing, name the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{module.split('.')[0]} is not installed, and this needs it. Run: pip install 'krnet[{extra}]'"
        ) from error


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return find_spec(package) is not None


@cache
def describe(cls: type) -> dict[str, str]:
    """Return field name -> the docstring under it; a subclass may replace the docstring of an inherited field."""
    docstrings = {
        name: text for base in reversed(cls.__bases__) if base is not object for name, text in describe(base).items()
    }
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, docstring in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(docstring, ast.Expr):
            if "ClassVar" in ast.unparse(field.annotation):
                continue
            assert isinstance(field.target, ast.Name) and isinstance(docstring.value, ast.Constant)
            docstrings[field.target.id] = " ".join(str(docstring.value.value).split())
    return docstrings


def explain_settings(config: type, *, without: Collection[str] = ()) -> str:
    """List name, description and default of each setting of a config."""
    lines = []
    for field in fields(config):
        if field.name in without:
            continue
        default = default_text(field)
        text = f"{describe(config)[field.name]} [default: {default}]"
        lines += textwrap.wrap(text, 100, initial_indent=f"  {field.name:<20}", subsequent_indent=" " * 22)
    return "\n".join(lines)


def default_text(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return str(field.default)
    return "none" if field.default_factory is not MISSING else "found for the features"


def same_settings(config: type, other: type) -> set[str]:
    """Return the settings that both configs have with the same default."""
    defaults = {field.name: field.default for field in fields(other)}
    return {f.name for f in fields(config) if f.name in defaults and defaults[f.name] == f.default}


def unknown_setting(name: str, known: Iterable[str], what: str = "setting") -> SettingError:
    """Return the error for an unknown name, with the most similar known name if there is one."""
    known = sorted(known)
    similar = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"known {what}s: {', '.join(known)}"
    return SettingError(f"unknown {what} {name!r}; {hint}")


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build a config from plain values; refuse unknown and missing names."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown_setting(name, known)
    missing = [name for name, f in known.items() if name not in values and f.default is f.default_factory is MISSING]
    if missing:
        raise SettingError(f"missing settings: {', '.join(missing)}")
    return cls(**values)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse 256,14,14 or 256x14x14."""
    if not re.fullmatch(r"\d+([,x]\d+)*", text):
        raise ValueError(f"{text!r} is not a shape; expected sizes such as 256,14,14")
    return tuple(int(size) for size in re.split("[,x]", text))


def parse_counts(text: str) -> list[int]:
    """Parse 1300,1300,732, or 500x50 (50 times 500), or a mixture."""
    if not re.fullmatch(r"\d+(x\d+)?(,\d+(x\d+)?)*", text):
        raise ValueError(f"{text!r} are not counts; expected a list such as 1300,1300,732, or 500x50 for 50 times 500")
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("x")
        counts += [int(count)] * int(times or 1)
    return counts


def parse_seeds(text: str) -> list[int]:
    """Parse 0,1,2."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{text!r} are not seeds; expected whole numbers from 0 up, such as 0,1,2")
    seeds = [int(part) for part in text.split(",")]
    check_unique("seeds", seeds)
    return seeds


def parse_names(text: str) -> list[str]:
    """Parse lucir1993,icarl."""
    names = [part.strip() for part in text.split(",")]
    if "" in names:
        raise ValueError(f"{text!r} are not names; expected a list such as one,two")
    check_unique("names", names)
    return names


def parse_duration(text: str) -> float:
    """Parse 90, 90s, 10m or 1h30m; return seconds."""
    number = r"\d+(?:\.\d+)?|\.\d+"
    if re.fullmatch(number, text):
        return float(text)
    if not re.fullmatch(f"(({number})[smhd])+", text):
        raise ValueError(f"{text!r} is not a duration; expected seconds, or 90s, 10m, 1h30m")
    return sum(float(amount) * TIME_UNITS[unit] for amount, unit in re.findall(f"({number})([smhd])", text))


def parse_targets(text: str) -> tuple[float, ...]:
    """Parse R2 targets such as 0.95,0.98."""
    if not text:
        return ()
    numbers = [_parse_number(part) for part in text.split(",")]
    if not all(number is not None and number <= 1 for number in numbers):
        raise ValueError(f"{text!r} are not targets; expected R2 of at most 1, such as 0.95,0.98")
    return tuple(float(number) for number in numbers if number is not None)


def parse_channels(text: str) -> tuple[float, ...]:
    """Parse a number per channel, such as 0.51,0.49,0.44, or one for all."""
    numbers = [_parse_number(part) for part in text.split(",")]
    if None in numbers:
        raise ValueError(f"{text!r} are not numbers; expected one per channel, such as 0.51,0.49,0.44, or one for all")
    return tuple(float(number) for number in numbers if number is not None)


def parse_first_id(text: str) -> int | str:
    """Parse the sample ID of the first image: 50000, or end."""
    if text.strip() == "end":
        return "end"
    if not re.fullmatch(r"\s*\d{1,12}\s*", text, re.ASCII):
        raise SettingError(f"first_id is {text!r}; expected a sample ID, such as 50000, or end")
    return int(text)


def parse_share(text: str) -> tuple[int, int]:
    """Parse K/N, part K of N, counted from 0."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
    if not found or int(found[1]) >= int(found[2]):
        raise SettingError(f"share is {text!r}; expected K/N with K from 0 to N - 1: 0/4, 1/4, 2/4 and 3/4")
    return int(found[1]), int(found[2])


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse name=value. The value is true, false, none, a number, numbers separated by commas, or a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is not a setting; expected name=value, such as c0=128")
    if value.lower() in VALUE_WORDS:  # also True, False and None, as Python prints them
        return name, VALUE_WORDS[value.lower()]
    numbers = [_parse_number(part) for part in value.split(",")]
    if None in numbers:
        return name, value
    return name, numbers[0] if len(numbers) == 1 else tuple(numbers)


def parse_settings(text: str) -> dict[str, Any]:
    """Parse name=value,name=value or name=value:name=value; a piece without = continues the value before it."""
    pieces: list[str] = []
    for piece in re.split("[,:]", text) if text.strip() else []:
        if "=" in piece or not pieces:
            pieces.append(piece.strip())
        else:
            pieces[-1] += f",{piece.strip()}"
    settings: dict[str, Any] = {}
    for piece in pieces:
        try:
            name, value = parse_setting(piece)
        except ValueError as error:
            raise SettingError(str(error)) from error
        if name in settings:
            raise SettingError(f"{name} is given twice in {text!r}; give it once")
        settings[name] = value
    return settings


def settings_text(settings: Mapping[str, Any], config: type | None = None, *, without: Collection[str] = ()) -> str:
    """List settings for messages, floats to four digits: "step 0.4058, components 36".

    config   leave out settings that have this config's defaults
    without  leave out settings of these names
    """
    defaults = {} if config is None else {field.name: field.default for field in fields(config)}
    shown = (item for item in settings.items() if item[0] not in without)
    shown = (item for item in shown if item[0] not in defaults or defaults[item[0]] != item[1])
    return ", ".join(f"{name} {value:.4g}" if type(value) is float else f"{name} {value}" for name, value in shown)


def series_name(recorder: str, settings: Mapping[str, Any]) -> str:
    """Name a recorder with some settings, in figures and tables: pca, or pca:components=64:dead_zone=0.5."""
    return ":".join([recorder, *(f"{name}={value}" for name, value in settings.items())])


def _parse_number(text: str) -> int | float | None:
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            pass
    return None


def parse_ids(text: str) -> Selection:
    """Parse `5`, `0:100`, `::10`, `5,3,7:9`, `-1` or `@file.npy`."""
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
    """Parse 12MB, 6.5 MB, 800kB, 3MiB or plain bytes; return whole bytes, rounded down."""
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
    if not 1 <= value < MAX_BYTES:
        raise SettingError(f"{expected}, at least 1 byte and less than {MAX_BYTES}")
    return math.floor(value + 1e-6)  # float(6.7) * 10**6 is 6699999.999...


def parse_sizes(text: str, name: str = "budgets") -> list[int]:
    """Parse sizes such as 3MB,6.5MB,12MB; return each once, the smallest first."""
    sizes = sorted({parse_size(part, name) for part in text.split(",") if part.strip()})
    if not sizes:
        raise SettingError(f"{name} is {text!r}; expected sizes such as 3MB,6.5MB,12MB")
    return sizes


UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # kinds of characters: controls, marks of direction, bytes of no text


def plain_text(text: str) -> str:
    """Text that is safe to print, whatever names are in it.

    Names of files and classes may hold control characters, which move a terminal's cursor or colour it, and bytes that
    are not UTF-8, which cannot be printed. Both are shown as Python escapes: \\x1b, \\udcff.
    """
    if text.isprintable():
        return text
    return "".join(char.encode("unicode_escape").decode() if _is_unprintable(char) else char for char in text)


def _is_unprintable(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in UNPRINTABLE


def readable_name(name: str) -> str:
    """A file's name as text that any file can hold: bytes that are not UTF-8 become escapes such as \\xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def format_size(num_bytes: int) -> str:
    """Write a size to four digits, in its largest unit: 12 MB, 6.5 MB, 800 kB or 512 bytes."""
    for unit in ("GB", "MB", "kB"):
        if num_bytes >= SIZE_UNITS[unit.lower()]:
            return f"{num_bytes / SIZE_UNITS[unit.lower()]:.4g} {unit}"
    return f"{num_bytes} bytes"
