"""Read a recipe: what to run, for which number of the paper, and how to show it.

    recipes/NAME.toml -> Recipe: runs, figures, the settings of --quick

A recipe is a short file that opens with a comment: the number, the hardware and the time to expect.

    title = "CIFAR-100, 50 classes and ten tasks of 5: every method"
    work = "learn"                     # of every run that names no other
    figures = ["curves", "last"]       # names of krnet.report.views
    seeds = [0]                        # that the recipe asks for; --seeds replaces them

    [settings]                         # of every run
    data = "cifar100"
    sizes = "50,10x5"
    preset = "paper"

    [quick]                            # replace the settings of every run under --quick
    data = "digits"
    sizes = "4,3x2"

    [[runs]]
    name = "KRIL"                      # the series in figures, and in results/paper.csv
    method = "kril"

    [[runs]]
    name = "upper bound"
    method = "kril"
    recorder = "raw"
    quick = { epochs = 1 }             # replaces this run's settings, too
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """One series of a recipe: with each seed a row of the ledger."""

    name: str
    work: str
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    """Of this run: those of the recipe, unless the run has its own."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    title: str
    opening: str
    """The comment the file opens with: number, hardware and time to expect."""
    figures: tuple[str, ...]
    runs: tuple[RecipeRun, ...]
