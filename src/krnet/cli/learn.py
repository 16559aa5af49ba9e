"""`krnet learn`: learn classes task after task, by one or several methods.

options -> data set, class order, task split -> krnet.task_loop -> DIR/run.json, a table or JSON on stdout
                                                -> krnet.report    -> DIR/report.html
                                                                -> with --ledger, a row of the results ledger per method
with --seeds or --orders -> krnet.many_runs -> DIR/ORDER/seed-N/METHOD/run.json, a table of means
several processes of torchrun -> each learns some of the runs; rank 0 waits for all, and prints the table
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import DataDir, Device, Json, ListSettings, Quiet, Set, merge, option
from krnet.cli.output import say
from krnet.cli.run_tables import show_runs, show_summary
from krnet.config import (
    check_int,
    explain_settings,
    parse_counts,
    parse_names,
    parse_seeds,
    parse_size,
    same_settings,
)
from krnet.errors import RankError
from krnet.ranks import this_rank, wait

if TYPE_CHECKING:
    from krnet.data.protocol import TaskSplit


def learn(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD",
            help="kril finetune joint ewc mas icarl lucir gfr pass ncm fecam fetril acil dsal, or all; at least one.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="NAME|FOLDER", help="Data set: cifar100, digits, or a folder of images.")
    ] = "cifar100",
    image_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Resize a folder's images to N pixels at the shorter side; above 96 a network sees a crop of 7/8 of "
            "it (224 of 256).",
            show_default="their own size, at most 256",
        ),
    ] = None,
    subset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|N|CLASS,...",
            help="Use some of a folder's classes: lucir1993 (LUCIR's ImageNet-Subset), the first N, or those named.",
            show_default="all",
        ),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(help="Number of tasks after the base task.", show_default="10, or one per class that is left"),
    ] = None,
    base_classes: Annotated[
        int | None, typer.Option(help="Number of classes of the base task.", show_default="half of all")
    ] = None,
    sizes: Annotated[
        Any,
        typer.Option(
            parser=option(parse_counts),
            metavar="B,N,N,...",
            help="Number of classes of each task, the base task first, instead of --tasks and --base-classes; 50,5x10 "
            "means 50, then ten tasks of 5.",
            show_default="tasks of equal size",
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|3,1,2,...",
            help="Class order: lucir1993, gfr1993, icarl, natural, or a list of class numbers.",
            show_default="lucir1993",
        ),
    ] = None,
    orders: Annotated[
        Any,
        typer.Option(
            parser=option(parse_names),
            metavar="NAME,NAME,...",
            help="Several class orders, instead of --order: learn in each, and report mean and standard deviation.",
            show_default="none",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights, batches and augmentation, but not of the class order.", show_default="0"),
    ] = None,
    seeds: Annotated[
        Any,
        typer.Option(
            parser=option(parse_seeds),
            metavar="N,N,...",
            help="Several seeds, instead of --seed: learn with each, and report mean and standard deviation.",
            show_default="none",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Folder to write to.", show_default="runs/METHODS-DATA-TASKS-ORDER-SEED"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in DIR.")] = False,
    validation: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Hold out N training images of each class and judge on them instead of the test images, to choose "
            "settings. Tables of results leave such a run out.",
            show_default="0: judge on the test images",
        ),
    ] = 0,
    base_task: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="strong|paper|FILE",
            help="Base task: strong (one recipe for all methods, whose network tells new classes apart better), paper "
            "(each method's own), or a trained one, base-*.krn in the folder of --shared.",
            show_default="strong",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Epochs of each task; of the base task too, unless --set base_epochs.", show_default="the method's own"
        ),
    ] = None,
    recorder: Annotated[
        str | None,
        typer.Option(
            help="kril: way to store the features, as for `krnet record`; raw stores the features themselves, images "
            "the images.",
            show_default="pca; for feature maps krnet",
        ),
    ] = None,
    budget: Annotated[
        Any,
        typer.Option(
            parser=option(parse_size),
            metavar="SIZE",
            help="Largest size of all recordings of kril, or of all exemplars of icarl and lucir (MB = 10^6 bytes).",
            show_default="kril: one bit a recorded value; others: none",
        ),
    ] = None,
    fixed_layers: Annotated[
        int | None,
        typer.Option(
            help="kril: number of layers of F1, which the head does not read and which no task trains.",
            show_default="19; for feature maps 23",
        ),
    ] = None,
    no_aux: Annotated[
        bool,
        typer.Option(
            "--no-aux",
            help="kril, if F2 is trained: leave out L_aux, which keeps features of replayed samples as in the last "
            "task.",
        ),
    ] = False,
    no_kr2: Annotated[
        bool,
        typer.Option(
            "--no-kr2", help="kril, if maps are recorded: leave out L_kr2, the error of replays as F2 sees it."
        ),
    ] = False,
    single: Annotated[
        bool,
        typer.Option(
            "--single", help="kril: one recording for all tasks, instead of one for the base task and one for the rest."
        ),
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Named group of settings to start from: paper (as published), own (gfr, pass: on their own network).",
            show_default="none: the best that is known",
        ),
    ] = None,
    shared: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for trained base tasks: runs with the same base task train it once.",
            show_default="none; for several methods, shared in the folder of --out",
        ),
    ] = None,
    to_ledger: Annotated[
        bool,
        typer.Option(
            "--ledger",
            help="Append a row per method to the results ledger: $KRNET_LEDGER, or results/ledger.jsonl.",
            hidden=True,
        ),
    ] = False,
    recipe: Annotated[str, typer.Option(help="Name of the experiment in the rows of --ledger.", hidden=True)] = "learn",
    data_dir: DataDir = None,
    settings: Set = None,
    list_all: ListSettings = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes DIR/run.json (DIR/METHOD/run.json for several): accuracies, forgetting, stored bytes, settings, times.

    DIR is the folder of --out. It also holds DIR/report.html, a page with the curves and tables of its runs, and
    TensorBoard logs, in DIR/tensorboard. A run that was interrupted or killed continues with --resume. With --seeds or
    --orders, a run is in DIR/ORDER/seed-N/METHOD. The processes of torchrun share the runs: methods x orders x seeds.

    \b
    Example:
      krnet learn kril finetune --data digits --base-classes 4 --tasks 3
      torchrun --nproc-per-node 8 -m krnet learn kril fetril --data cifar100 --tasks 10 --seeds 0,1,2 -o runs/three
    """
    from krnet import data as data_sets
    from krnet import many_runs, task_loop
    from krnet.cli.progress import Display, TensorBoardLog, several
    from krnet.data import protocol
    from krnet.data.registry import folders_of
    from krnet.io import ledger
    from krnet.io.overlap import refuse_overlap
    from krnet.learners.scores import summarize
    from krnet.learners.settings import settings_of
    from krnet.progress import announcing
    from krnet.run import Run, append_row, has_row, load_run

    if sizes is not None and (tasks is not None or base_classes is not None):
        raise typer.BadParameter("give either --sizes, or --tasks and --base-classes")
    for name, one, several_of_it in (("seed", seed, seeds), ("order", order, orders)):
        if one is not None and several_of_it is not None:
            raise typer.BadParameter(f"give either --{name} or --{name}s, which replaces it")
    _check_orders(orders or [])
    is_product = seeds is not None or orders is not None
    seed = 0 if seed is None else seed
    chosen = _choose_methods(methods or (["all"] if list_all else []))
    if list_all:
        _print_settings(chosen)
        return
    options: dict[str, Any] = {"recorder": recorder, "budget": budget, "fixed_layers": fixed_layers, "epochs": epochs}
    options |= {"aux": 0.0 if no_aux else None, "kr2": False if no_kr2 else None, "single": True if single else None}
    options["base"] = base_task
    given = merge(settings or [], **options)
    if epochs is not None:
        given.setdefault("base_epochs", epochs)
    sources = [*folders_of(data, data_dir), *([base_task] if base_task and Path(base_task).exists() else [])]
    if out is not None:
        refuse_overlap("learn", [out], sources)
    rank = this_rank()
    num_runs = len(chosen) * len(orders or [order]) * len(seeds or [seed])
    if num_runs < rank.count:
        raise RankError(
            f"torchrun has started {rank.count} processes, which share the runs, and there are {num_runs}; expected at "
            f"least one for each. Give more methods, --seeds or --orders, or start fewer processes"
        )
    resume, device = resume or rank.restarts > 0, rank.device(device)
    with Display(quiet or not rank.is_first) as display:
        display.phase("reading the images")
        images = data_sets.load(
            data, data_dir, image_size=image_size, choose=None if subset is None else protocol.subset(subset),
            say=(lambda text: None) if quiet else say,
        )  # fmt: skip
        check_int("validation", validation, 0)
        if validation:
            images = images.with_validation(validation)
        splits = [
            protocol.split(one, num_classes=images.num_classes, base_classes=base_classes, tasks=tasks, sizes=sizes)
            for one in orders or [order or protocol.DEFAULT_ORDER]
        ]
        split = splits[0]
        # A seed may be added to a product: it is not part of the name.
        folder = out or _default_folder(chosen, images.name, split, None if is_product else seed)
        refuse_overlap("learn", [folder], sources)
        watch = several(display, TensorBoardLog(folder / "tensorboard"))
        common: dict[str, Any] = {"seed": seed, "device": device, "resume": resume, "watch": watch}

        def append_missing_row(run: Run) -> None:
            if to_ledger and not has_row(run):  # a resumed command reads the runs that it has finished
                append_row(run, recipe)

        ledger.commit()  # looked up now: the source may change before the run ends
        try:
            if is_product:
                runs = many_runs.learn_many(
                    chosen, images, splits, seeds or [seed], out=folder, settings=given, preset=preset, shared=shared,
                    device=device, resume=resume, watch=display, finished=append_missing_row,
                    log=lambda group: TensorBoardLog(group / "tensorboard"), share=rank.share,
                )  # fmt: skip
            elif len(chosen) == 1:
                (only,) = chosen
                only_settings = settings_of(chosen, given, images, preset)[only]
                run = task_loop.learn(only, images, split, out=folder, settings=only_settings, shared=shared, **common)
                runs = [run]
                if to_ledger:
                    append_row(run, recipe)
            else:
                runs = task_loop.learn_all(
                    chosen, images, split, out=folder, settings=given, preset=preset, shared=shared,
                    only=many_runs.own_share(chosen, rank.share), finished=append_missing_row, **common,
                )  # fmt: skip
            if rank.leads:
                groups = [many_runs.run_folder(folder, s, n) for s in splits for n in seeds or [seed]]
                folders = [group / method for group in (groups if is_product else [folder]) for method in chosen]
                wait(partial(_missing_runs, folders), folder, announcing(display))
                runs = [load_run(one, device=device) for one in folders]
        except KeyboardInterrupt:
            say(f"stopped; what was done is in {folder}. To go on, give the same command with --resume")
            raise typer.Exit(130) from None
    if not rank.is_first:
        return  # rank 0 prints the result
    page = _leave_page(folder)
    summary = summarize(runs) if is_product else []
    if as_json:
        output.show_json({"runs": runs, "summary": summary} if summary else runs[0] if len(runs) == 1 else runs)
        return
    if summary:
        show_summary(runs, summary)
    else:
        show_runs(runs)
    if not quiet:
        say(f"written to {folder}" + (f"; for its curves, open {page}" if page else ""))


def _check_orders(names: Sequence[str]) -> None:
    from krnet.data import protocol

    for name in names:
        if name.isdecimal():
            raise typer.BadParameter("--orders takes names; give a list of class numbers with --order")
        if name not in protocol.ORDERS:
            raise protocol.unknown_order(name)


def _choose_methods(given: Sequence[str]) -> list[str]:
    """Each method once, in the order given; an unknown one is refused."""
    from krnet.learners.base import get_learner, learner_names

    known = learner_names()
    if not given:
        raise typer.BadParameter(f"none given; expected some of {', '.join(known)}, or all", param_hint="'METHOD...'")
    chosen = list(dict.fromkeys(name for word in given for name in (known if word == "all" else [word])))
    for method in chosen:
        get_learner(method)
    return chosen


def _print_settings(methods: Sequence[str]) -> None:
    from krnet.learners.base import LearnerConfig, get_learner

    print(f"all methods\n{explain_settings(LearnerConfig)}")
    for method in methods:
        config = get_learner(method).config_class
        print(f"\n{method}\n{explain_settings(config, without=same_settings(config, LearnerConfig))}".rstrip())


def _default_folder(methods: Sequence[str], data: str, split: TaskSplit, seed: int | None) -> Path:
    """runs/METHODS-DATA-TASKS-ORDER-SEED; without a seed, for several of them or of orders, runs/METHODS-DATA-TASKS."""
    name = f"{'-'.join(methods) if len(methods) < 4 else 'several'}-{data}-{split.num_tasks - 1}"
    name += "" if seed is None else f"-{split.order_name}-{seed}"
    return Path("runs") / name.replace("/", "_")


def _missing_runs(folders: Sequence[Path]) -> tuple[str, object]:
    """Which runs have not ended, in words, and when files last appeared in their folders."""
    from krnet.io.run_file import RUN_FILE

    missing = [folder for folder in folders if not (folder / RUN_FILE).exists()]
    times = [folder.stat().st_mtime_ns for folder in missing if folder.exists()]
    return ", ".join(map(str, missing)), times


def _leave_page(folder: Path) -> Path | None:
    """Write the page of the runs. They are done and saved: whatever goes wrong here is a message."""
    from krnet.io import ledger
    from krnet.report.write import leave_page

    try:
        return leave_page(folder, ledger.command_line())
    except Exception as error:
        say(f"no page was written for {folder}: {error}. To try again: krnet report {folder} -o report.html")
        return None
