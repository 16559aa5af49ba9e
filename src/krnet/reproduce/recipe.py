"""Read a recipe: what to run, for which number of the paper, and how to show it.

    recipes/NAME.toml -> read_recipe -> Recipe: runs, figures; with `quick`, the settings of --quick

A recipe is a short file that opens with a comment: the number, the hardware and the time to expect.

    # KRIL ends at 55.2 % in the paper.
    # Hardware: one GPU of 8 GB.
    # Time: 11 minutes a seed.
    title = "CIFAR-100, 50 classes and ten tasks of 5: every method"
    work = "learn"                     # of every run that names no other
    figures = ["curves", "last"]       # names of krnet.report.views
    seeds = [0]                        # that the recipe asks for; --seeds replaces them

    [settings]                         # of every run
    data = "cifar100"
    sizes = "50,5x10"
    preset = "paper"

    [quick]                            # replace the settings of every run under --quick
    data = "digits"
    sizes = "4,2x3"

    [[runs]]
    name = "KRIL"                      # the series in figures, and in results/paper.csv
    method = "kril"

    [[runs]]
    name = "upper bound"
    method = "kril"
    recorder = "raw"
    quick = { epochs = 1 }             # replaces this run's settings, too; quick = false leaves the run out

    [[runs]]
    name = "pca"                       # a run for each budget, "pca, 1.3 MB" ...: points of the line "pca" in figures
    recorder = "pca"
    budgets = ["1.3 MB", "3.3 MB"]     # under --quick, the first only

    [[each]]                           # every run that has no `each` of its own, with each combination of these;
    features = ["lm", "vit"]           # under --quick, with the first only. "pca, lm, 1", "pca, lm, 4", ...
    bits_per_value = [1, 4]            # are points of the line "pca, lm"

The later wins: [settings] < the run < [quick] < the run's quick. The value "none" takes a setting away that an earlier
one of these gave; inside a table, such as given = { block = "none" }, it is None.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from krnet.errors import InputError, RecipeError, SettingError
from krnet.io.kept import find_kept
from krnet.reproduce.works.base import get_work

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPE_KEYS: dict[str, type] = {
    "title": str, "work": str, "figures": list, "seeds": list, "settings": dict, "quick": dict, "runs": list,
    "each": list,
}  # fmt: skip
RUN_KEYS: dict[str, type] = {"name": str, "work": str, "seeds": list, "line": str, "budgets": list, "each": list}
"""Keys of a run that are no settings, beside `quick`: a table, or false."""
KINDS: dict[type, str] = {str: "text", list: "a list", dict: "a table"}
LEFT_OUT = "none"


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """One series of a recipe: with each seed a row of the ledger."""

    name: str
    work: str
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    """Of this run: those of the recipe, unless the run has its own."""
    line: str = ""
    """Runs of one line differ in their bytes: figures with an axis of bytes join them. By default the name."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    title: str
    opening: str
    """The comment the file opens with: number, hardware and time to expect."""
    figures: tuple[str, ...]
    runs: tuple[RecipeRun, ...]

    @property
    def time(self) -> str:
        """The time to expect: what the opening says behind "Time:", or else its last line."""
        found = re.search(r"^Time:(.*?)(?=^\w+:|\Z)", self.opening, re.DOTALL | re.MULTILINE)
        return " ".join(found[1].split()) if found else self.opening.splitlines()[-1]


def recipe_names() -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(path.stem for path in find_kept("recipes").glob("*.toml"))


def read_recipe(name: str, *, quick: bool = False, path: Path | None = None) -> Recipe:
    """Read a recipe by its name; its settings are checked.

    quick  the runs have the settings of --quick
    path   another file than recipes/NAME.toml
    """
    path = path or _find(name)
    where = f"recipes/{path.name}" if path.parent.name == "recipes" else str(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (OSError, ValueError) as error:  # a TOMLDecodeError is a ValueError
        raise RecipeError(f"{where}: cannot be read ({error}); expected a file of TOML") from error
    _check_keys(where, content, RECIPE_KEYS)
    for key in ("title", "runs"):
        if not content.get(key):
            example = 'title = "What it shows"' if key == "title" else "a table [[runs]] for each series"
            raise RecipeError(f"{where}: has no {key}; add {example}")
    return Recipe(
        name=path.stem,
        title=content["title"],
        opening=_opening(where, text),
        figures=tuple(_texts(where, "figures", content.get("figures", []))),
        runs=tuple(_read_runs(where, content, quick)),
    )


def _find(name: str) -> Path:
    folder = find_kept("recipes")
    path = folder / f"{name}.toml"
    if "/" in name or not path.is_file():
        near = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known recipes: {', '.join(recipe_names())}"
        raise RecipeError(f"unknown recipe {name!r}; {hint}")
    return path


def _read_runs(where: str, content: Mapping[str, Any], quick: bool) -> list[RecipeRun]:
    seeds = _seeds(where, content.get("seeds", [0]))
    runs: list[RecipeRun] = []
    names: set[str] = set()
    for number, table in enumerate(content["runs"], 1):
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str) or not table["name"]:
            raise RecipeError(f'{where}: run {number} has no name; add name = "the series in figures"')
        in_run = f"{where}, run {table['name']!r}"
        for key, kind in RUN_KEYS.items():
            _check_kind(in_run, key, table, kind)
        combined = _combinations(in_run, {"each": content.get("each", []), **table})
        for position, own in enumerate(found for one in combined for found in _with_budgets(in_run, one)):
            if own["name"] in names:
                raise RecipeError(f"{where}, run {own['name']!r}: two runs have this name; give each its own")
            names.add(own["name"])
            run = _read_run(in_run, own, content, seeds, quick)
            if not quick or (own.get("quick") is not False and position == 0):
                runs.append(run)
    return runs


def _combinations(in_run: str, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The run itself, or one for each combination of the values in each of its tables `each`."""
    own = {"line": table["name"], **table}
    found = []
    for choices in own.pop("each"):
        if not isinstance(choices, Mapping) or not all(isinstance(v, list) and v for v in choices.values()):
            raise RecipeError(
                f"{in_run}: each holds {choices!r}; expected tables of lists, such as bits_per_value = [1, 4]"
            )
        for values in product(*choices.values()):
            chosen = dict(zip(choices, values))
            texts = [value for value in values if isinstance(value, str)]
            name, line = ", ".join([own["name"], *map(str, values)]), ", ".join([own["line"], *texts])
            found.append({**own, **chosen, "name": name, "line": line})
    return found or [own]


def _with_budgets(in_run: str, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The run itself, or one for each of its budgets."""
    own = {"line": table["name"], **table}
    if "budgets" not in own:
        return [own]
    budgets = _texts(in_run, "budgets", own.pop("budgets"))
    if "budget" in own or not budgets:
        raise RecipeError(f'{in_run}: expected either budget = "6.1MB" or budgets = ["1.6 MB", "6.1 MB"]')
    return [{**own, "name": f"{own['name']}, {budget}", "budget": budget.replace(" ", "")} for budget in budgets]


def _read_run(
    in_run: str, table: Mapping[str, Any], content: Mapping[str, Any], seeds: tuple[int, ...], quick: bool
) -> RecipeRun:
    run_quick = table.get("quick", {})
    if run_quick is not False and not isinstance(run_quick, Mapping):
        raise RecipeError(f"{in_run}: quick is {run_quick!r}; expected a table of settings, or false")
    work_name = table.get("work", content.get("work"))
    if work_name is None:
        raise RecipeError(f'{in_run}: has no work; add work = "learn", at the top of the file or to the run')
    own = {key: value for key, value in table.items() if key not in (*RUN_KEYS, "quick")}
    layers = [content.get("settings", {}), own]
    layers += [content.get("quick", {}), run_quick or {}] if quick else []
    settings = merge_settings(layers)
    try:
        get_work(work_name).check(settings)
    except SettingError as error:
        raise RecipeError(f"{in_run}: {error}") from error
    except InputError as error:
        raise type(error)(f"{in_run}: {error}") from error
    run_seeds = _seeds(in_run, table["seeds"]) if "seeds" in table else seeds
    if quick:
        run_seeds = run_seeds[:1]  # the code is the same with every seed
    return RecipeRun(name=table["name"], work=work_name, settings=settings, seeds=run_seeds, line=table["line"])


def merge_settings(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join settings, the later ones over the earlier; "none" takes a setting away."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= layer
    return {name: _with_none(value) for name, value in merged.items() if value != LEFT_OUT}


def _with_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: None if inner == LEFT_OUT else inner for name, inner in value.items()}
    return value


def _opening(where: str, text: str) -> str:
    """The lines of the comment at the top of the file, without their marks."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    opening = "\n".join(lines).strip()
    if not opening:
        raise RecipeError(
            f"{where}: does not open with a comment; begin it with # and the number, hardware and time to expect"
        )
    return opening


def _check_keys(where: str, content: Mapping[str, Any], known: Mapping[str, type]) -> None:
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise RecipeError(f"{where}: unknown key {key!r} ({hint}); settings of every run belong below [settings]")
    for key, kind in known.items():
        _check_kind(where, key, content, kind)


def _check_kind(where: str, key: str, content: Mapping[str, Any], kind: type) -> None:
    if key in content and not isinstance(content[key], kind):
        raise RecipeError(f"{where}: {key} is {content[key]!r}; expected {KINDS[kind]}")


def _texts(where: str, key: str, values: list[Any]) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise RecipeError(f"{where}: {key} holds {value!r}; expected names")
    return values


def _seeds(where: str, values: list[Any]) -> tuple[int, ...]:
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
    if not values or not whole or len(set(values)) < len(values):
        raise RecipeError(
            f"{where}: seeds is {values!r}; expected different whole numbers from 0 up, such as [0, 1, 2]"
        )
    return tuple(values)
