"""The commands that learn: `krnet learn`, and `krnet demo` on data of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output as tables
from krnet.cli.options import Device, Json, Quiet, Set, explain_settings, merge, option, same_settings
from krnet.cli.output import say
from krnet.config import parse_counts, parse_size


def learn(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD", help="kril finetune joint ewc mas icarl lucir gfr, or all.", show_default=False
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="NAME|FOLDER", help="cifar100, digits, or a folder of images.")
    ] = "cifar100",
    image_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Pixels of a folder's images at the shorter side; above 96 networks see 7/8 of it (224 of 256).",
            show_default="as they are, at most 256",
        ),
    ] = None,
    subset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|N|CLASS,...",
            help="Some of a folder's classes: lucir1993 (LUCIR's ImageNet-Subset), the first N, or those named.",
            show_default="all",
        ),
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Tasks after the base task.", show_default="10")] = None,
    base_classes: Annotated[int | None, typer.Option(help="Classes of the base task.", show_default="half")] = None,
    sizes: Annotated[
        Any,
        typer.Option(
            parser=option(parse_counts),
            metavar="B,N,N,...",
            help="Classes of every task, the base task first, instead of the other two; 50,5x10 is 50 and ten times 5.",
            show_default="equal tasks",
        ),
    ] = None,
    order: Annotated[
        str, typer.Option(metavar="NAME|3,1,2,...", help="Class order: lucir1993, gfr1993, icarl, natural, or a list.")
    ] = "lucir1993",
    seed: Annotated[int, typer.Option(help="Seeds weights, batches and augmentation, not the class order.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder to write to.", show_default="runs/...")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that DIR holds.")] = False,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of every task, the base task included.", show_default="the method's")
    ] = None,
    recorder: Annotated[
        str | None,
        typer.Option(
            help="kril: how features are kept; raw keeps real ones, images the images.",
            show_default="paper; under a budget krnet",
        ),
    ] = None,
    budget: Annotated[
        Any,
        typer.Option(
            parser=option(parse_size),
            metavar="SIZE",
            help="Most bytes that kril's recordings, or the exemplars of icarl and lucir, may take (MB = 10^6).",
            show_default="none",
        ),
    ] = None,
    fixed_layers: Annotated[
        int | None, typer.Option(help="kril: layers that are frozen after the base task.", show_default="23")
    ] = None,
    no_aux: Annotated[bool, typer.Option("--no-aux", help="kril: without L_aux.")] = False,
    no_kr2: Annotated[bool, typer.Option("--no-kr2", help="kril: without L_kr2.")] = False,
    single: Annotated[bool, typer.Option("--single", help="kril: one recorder for all tasks.")] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Settings to start from, where a method has such: paper (kril), own (gfr).", show_default="none"
        ),
    ] = None,
    shared: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of base tasks: runs whose base task is the same train it once.",
            show_default="none; OUT/shared for several methods",
        ),
    ] = None,
    to_ledger: Annotated[
        bool, typer.Option("--ledger", help="Append a row a method to results/ledger.jsonl, or $KRNET_LEDGER.")
    ] = False,
    recipe: Annotated[str, typer.Option(help="Name under which --ledger files its rows.")] = "learn",
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of data sets.", show_default="$KRNET_DATA, or the user's cache"),
    ] = None,
    settings: Set = None,
    list_all: Annotated[bool, typer.Option("--list-settings", help="Print what --set knows, and leave.")] = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes DIR/run.json (DIR/METHOD/run.json for several): accuracies, forgetting, stored bytes, settings, times.

    A run that was stopped, in whatever way, goes on with --resume. TensorBoard logs lie in DIR/tensorboard.

    \b
    Example:
      krnet learn kril finetune --data digits --base-classes 4 --tasks 3
    """
    from krnet import data as data_sets
    from krnet import task_loop
    from krnet.cli.progress import Display, ProgressLine, TensorBoardLog, Watchers
    from krnet.data import protocol
    from krnet.io import ledger
    from krnet.learners import base

    if sizes is not None and (tasks is not None or base_classes is not None):
        raise typer.BadParameter("give either --sizes, or --tasks and --base-classes")
    every = base.learner_names()
    if not methods and not list_all:
        raise typer.BadParameter(f"none given; expected some of {', '.join(every)}, or all", param_hint="'METHOD...'")
    named = methods or ["all"]
    chosen = list(dict.fromkeys(name for given in named for name in (every if given == "all" else [given])))
    for method in chosen:
        base.get_learner(method)
    if list_all:
        everyone = base.LearnerConfig
        print(f"all methods\n{explain_settings(everyone)}")
        for method in chosen:
            own_config = base.get_learner(method).config_class
            print(f"\n{method}\n{explain_settings(own_config, without=same_settings(own_config, everyone))}".rstrip())
        return
    switches: dict[str, Any] = {
        "recorder": recorder,
        "budget": budget,
        "fixed_layers": fixed_layers,
        "epochs": epochs,
        "base_epochs": epochs,
    }
    switches |= {"aux": 0.0 if no_aux else None, "kr2": False if no_kr2 else None, "single": True if single else None}
    given = merge(settings or [], **switches)
    with Display(quiet) as display:
        display.phase("reading the images")
        found = data_sets.load(
            data, data_dir, image_size=image_size, choose=None if subset is None else protocol.subset(subset),
            say=(lambda text: None) if quiet else say,
        )  # fmt: skip
        split = protocol.split(
            order, num_classes=found.num_classes, base_classes=base_classes, tasks=10 if tasks is None else tasks,
            sizes=sizes,
        )  # fmt: skip
        name = f"{'-'.join(chosen) if len(chosen) < 4 else 'several'}-{found.name}-{split.num_tasks - 1}"
        folder = out or Path("runs") / f"{name}-{split.order_name}-{seed}".replace("/", "_")
        watcher = Watchers([ProgressLine(display), TensorBoardLog(folder / "tensorboard")])
        common: dict[str, Any] = {"seed": seed, "device": device, "resume": resume, "watcher": watcher}
        ledger.commit()  # of the code that runs, not of what it has become by the end
        try:
            if len(chosen) == 1:
                (only,) = chosen
                own = task_loop.settings_of(chosen, given, found, preset)[only]
                runs = [task_loop.learn(only, found, split, out=folder, settings=own, shared=shared, **common)]
            else:
                runs = task_loop.learn_all(
                    chosen, found, split, out=folder, settings=given, preset=preset, shared=shared, **common
                )
        except KeyboardInterrupt:
            say(f"stopped; what was done is in {folder}. To go on, give the same command with --resume")
            raise typer.Exit(130) from None
    if to_ledger:
        for run in runs:
            append_row(run, recipe)
    if as_json:
        tables.show_json(runs[0] if len(runs) == 1 else runs)
    else:
        tables.show_runs(runs)
        if not quiet:
            say(f"written to {folder}")


def append_row(run: Mapping[str, Any], recipe: str) -> None:
    """What a run came to, with all its settings, as a row of the ledger."""
    from krnet.io import ledger

    elsewhere = ("settings", "versions", "class_order", "device", "seed")  # in places of their own
    ledger.append(
        recipe,
        settings={**run["settings"], "tasks": run["tasks"], "data": run["data"]},
        metrics={name: value for name, value in run.items() if name not in elsewhere},
        seconds=run["seconds"],
        seed=run["seed"],
        class_order=f"{run['order']} ({run['order_hash']})",
    )
