"""Choose a recipe of the base task, without a test image and without an image of a later class.

    the 50 base classes of the real run -> 25 base classes and 5 tasks of 5; 50 training images a class are held out
    recipe -> base task -> frozen network; a head solved on the real maps of all tasks -> accuracy on held-out images

A recipe is judged by the accuracy after the last task, not by that on the classes it was trained on.

    python benchmarks/choose_base.py --data-dir DIR --out runs/choose paper strong strong:rotations=False

A recipe is NAME[:SETTING=VALUE]...: paper, or a recipe of krnet/learners/base_task.py with other settings. Each leaves
a ledger row of recipe choose-base.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import torch

from krnet import data as data_sets
from krnet import task_loop
from krnet.cli.progress import Display
from krnet.config import parse_setting
from krnet.data import protocol
from krnet.data.dataset import DataSet, Split
from krnet.learners import base_task
from krnet.learners.settings import settings_of
from krnet.run import append_row

RECIPE = "choose-base"
TASKS = 5


def only_classes(data: DataSet, classes: list[int]) -> DataSet:
    """The data set of these classes alone, relabelled in their order."""
    position = torch.full((data.num_classes,), -1)
    position[torch.tensor(classes)] = torch.arange(len(classes))

    def part(split: Split) -> Split:
        ids = (position[split.labels] >= 0).nonzero()[:, 0]
        return Split(split.images[ids], position[split.labels[ids]])

    names = tuple(data.class_names[label] for label in classes)
    return replace(
        data, name=f"{data.name}-{len(classes)}", train=part(data.train), test=part(data.test), class_names=names
    )


def register(text: str) -> str:
    """Register the recipe that a text such as strong:epochs=160 describes, and return its name."""
    name, *words = text.split(":")
    if words:
        changes = dict(parse_setting(word) for word in words)
        base_task.RECIPES[text] = replace(base_task.RECIPES[name], **changes)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--order", default=protocol.DEFAULT_ORDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=50, help="training images of each class to judge on")
    parser.add_argument("--random-features", type=int, default=8192)
    args = parser.parse_args()
    whole = data_sets.load(args.data, args.data_dir)
    half = protocol.split(args.order, num_classes=whole.num_classes).tasks[0]
    data = only_classes(whole, list(half)).with_validation(args.held_out)
    num_base = len(half) // 2
    tasks = min(TASKS, len(half) - num_base)
    split = protocol.split("natural", num_classes=len(half), base_classes=num_base, tasks=tasks)
    for text in args.recipes:
        recipe = register(text)
        given = {"base": recipe, "recorder": "raw", "head": "solved", "plastic": False}
        given |= {"random_features": args.random_features}
        settings = settings_of(["kril"], given, data)["kril"]
        with Display() as display:
            run = task_loop.learn(
                "kril", data, split, out=args.out / f"{text.replace(':', '-')}-{args.seed}", settings=settings,
                seed=args.seed, watch=display,
            )  # fmt: skip
        known = base_task.RECIPES.get(recipe)
        append_row(run, RECIPE, base_recipe={} if known is None else asdict(known))
        figures = {"base": run.accuracy[0], "last": run["last"], "average": run["average"]}
        print(f"{text:40s}", *(f"{name} {100 * value:.2f}" for name, value in figures.items()), sep="  ")


if __name__ == "__main__":
    main()
