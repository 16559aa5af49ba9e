"""The command line, thin: parse, call, print. Data on stdout, progress and messages on stderr.

    krnet plan -> record -> info, verify, replay;   krnet learn: classes task after task;   demo: on data of its own

Exit codes: 0 done; 1 refused, with `error: ...` on stderr; 2 the command itself is wrong; 130 stopped with Ctrl-C.
Torch is imported inside the commands: help comes at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from krnet import tables, typed
from krnet.budget import parse_size, parse_sizes
from krnet.config import PRESETS, SCHEDULES, FitConfig, NetworkConfig
from krnet.errors import InputError, KrnetError
from krnet.options import (
    GEOMETRY,
    Device,
    Images,
    Json,
    Key,
    Preset,
    Quiet,
    RecordingFile,
    Set,
    Trunk,
    explain_settings,
    fit_option,
    list_settings,
    merge,
    set_option,
)


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Every refusal ends here: its message, no traceback."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read stdout has gone: nothing to say, and nobody to say it to
            raise
        except (KrnetError, OSError) as error:
            _say(f"error: {error}")
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


def main() -> None:
    # Threads that sleep while they wait: beside another busy process, spinning ones slow both down many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    app(prog_name="krnet")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show_version(asked: bool) -> None:
    if asked:
        try:
            print(f"krnet {version('krnet')}")
        except PackageNotFoundError:
            print("krnet, not installed")
        raise typer.Exit()


bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure, on this machine and in one run.")
app.add_typer(bench, name="bench")


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Record feature maps in a network and replay them by sample ID."""


@app.command(short_help="What a recording would take, before making it.", epilog=list_settings(NetworkConfig))
def plan(
    shape: Annotated[
        Any,
        typer.Option(parser=typed.parse_sizes, metavar="C,H,W", help="Shape of one sample.", show_default=False),
    ],
    class_counts: Annotated[
        Any,
        typer.Option(
            parser=typed.parse_counts,
            metavar="N,N,...",
            help="Samples of each class; 500x50 stands for 50 classes of 500.",
            show_default=False,
        ),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(help="Samples in all, where there are no classes.", show_default=False),
    ] = None,
    preset: Preset = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Writes nothing; prints on stdout what a recording would take, in bytes, beside the features themselves.

    \b
    Example:
      krnet plan --shape 256,14,14 --class-counts 1296x50 --preset imagenet-published
    """
    if num_samples is not None and class_counts is None:
        class_counts = [num_samples]
    elif num_samples is not None or class_counts is None:
        raise typer.BadParameter("give either --class-counts or --num-samples")
    from krnet.plan import plan as make_plan

    known = {field.name for field in fields(NetworkConfig)} - GEOMETRY
    made = make_plan(shape, class_counts, preset, **merge(settings or [], known))
    tables.show(made, tables.plan_rows(made), as_json)


@app.command(short_help="Features to a recording file.", epilog=list_settings(FitConfig, NetworkConfig))
def record(
    features: Annotated[
        Path,
        typer.Argument(
            metavar="FEATURES", help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT.krn", help="File to write.", show_default=False)],
    labels: Annotated[
        Path | None,
        typer.Option(metavar="L.npy", help="One integer per sample; classes share vectors.", show_default="none"),
    ] = None,
    key: Key = None,
    preset: Preset = None,
    iterations: Annotated[
        int | None,
        fit_option("iterations", ", ".join(f"{n} with {name}" for name, n in SCHEDULES.items())),
    ] = None,
    budget: Annotated[
        Any,
        typer.Option(
            parser=parse_size,
            metavar="12MB|800kB|BYTES",
            help="Most bytes of the file (MB = 10^6): the best recording of at most that size.",
            show_default="none",
        ),
    ] = None,
    room: Annotated[
        int | None,
        typer.Option(
            metavar="SAMPLES",
            help="Samples that the file is to hold when it has grown by --start: the budget is for all of them.",
            show_default="those there are",
        ),
    ] = None,
    target_r2: Annotated[float | None, fit_option("target_r2", "none")] = None,
    time_budget: Annotated[
        Any, fit_option("time_budget", "none", parser=typed.parse_duration, metavar="SECONDS|10m|1h30m")
    ] = None,
    schedule: Annotated[str | None, fit_option("schedule", FitConfig.schedule, metavar="|".join(SCHEDULES))] = None,
    seed: Annotated[int | None, fit_option("seed", str(FitConfig.seed))] = None,
    device: Device = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the checkpoint OUT.krn.ckpt of a run that was stopped; a search for --target-r2 keeps "
            "none and starts anew.",
        ),
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.krn",
            help="Start from an earlier recording, of the first of these samples; a compact krnet, pca, quantized, "
            "transform or pq leaves those as they are.",
            show_default="none",
        ),
    ] = None,
    recorder: Annotated[str, typer.Option(help="Way to store the features.")] = "krnet",
    images: Images = None,
    trunk: Trunk = None,
    settings: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT.krn, from which any sample can be replayed by its ID; prints on stdout how large and how good it is.

    While it runs, a checkpoint OUT.krn.ckpt lies beside it. The settings it was made with are in the file.

    \b
    Example:
      krnet record features.npy --labels labels.npy -o features.krn --time-budget 10m
      krnet record features.npy -o small.krn --recorder pca --budget 6.5MB
      krnet record features.npy -o jpeg.krn --recorder images --images images.npy --trunk trunk.pt2 --set mean=0.5
    """
    from krnet import api
    from krnet.progress import Display
    from krnet.recorders.base import choose

    if not choose(recorder).takes_trunk and (images or trunk):
        raise InputError(
            f"--images and --trunk are given, and recorder {recorder} needs features alone. Leave them out, or give "
            f"--recorder images"
        )
    given = merge(
        settings or [],
        {field.name for field in fields(FitConfig)} | choose(recorder).setting_names,
        images=images,
        trunk=_read_trunk(trunk, device),
        iterations=iterations,
        target_r2=target_r2,
        time_budget=time_budget,
        schedule=schedule,
        seed=seed,
        device=device,
    )
    if resume and out.exists():
        _say(f"{out}: recorded already; nothing to resume")
    checkpoint = out.with_name(out.name + ".ckpt")
    before = _changed(checkpoint)
    try:
        with Display(quiet) as display:
            display.phase("reading the features")
            recording = api.record(
                features, labels, recorder=recorder, preset=preset, resume=resume, out=out, key=key,
                start=start, watch=display.fit, budget=budget, room=room, **given,
            )  # fmt: skip
    except KeyboardInterrupt:
        if _changed(checkpoint) not in (None, before):
            _say(f"stopped; checkpoint saved in {checkpoint}. To go on, give the same command with --resume")
        else:
            _say("stopped before there was anything to save")
        raise typer.Exit(130) from None
    info = {"path": str(out), **recording.info()}
    tables.show(info, tables.info_rows(info), as_json)
    target = given.get("target_r2")
    if target is not None and info["r2"] < target:
        more = (
            f"Record again with more --iterations (these were {info['iterations']:,}), a longer --time-budget, or a "
            f"wider network (--set d0=... or --set c0=...)"
            if choose(recorder).stops_at_target(preset, start, given)
            else "No larger file was better: leave out settings that hold it back, fit longer where there is a network "
            "(--iterations, --time-budget), or take another recorder"
        )
        _say(f"warning: {out} was written, but its R2 of {info['r2']:.4f} is below the target of {target}. {more}")


def _read_trunk(path: Path | None, device: str | None) -> Any:
    """The module, on the device; None where no file is given."""
    from krnet.heads import read_trunk
    from krnet.parallel import pick_device

    return None if path is None else read_trunk(path, pick_device(device))


def _changed(path: Path) -> int | None:
    """When a file was last written, in nanoseconds; None where there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


@app.command(short_help="What a recording holds, how large and how good.")
def info(path: RecordingFile, as_json: Json = False) -> None:
    """Writes nothing; prints on stdout what a recording holds, how large and how good it is.

    Only the header is read; see `krnet verify` for a check of the whole file.

    \b
    Example:
      krnet info features.krn --json
    """
    from krnet import api

    found = {"path": str(path), **api.open(path).info()}
    tables.show(found, tables.info_rows(found), as_json)


@app.command(short_help="Check a recording, byte by byte, or against its features.")
def verify(
    path: RecordingFile,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FEATURES", help="The features: their error is measured, too.", show_default="none"),
    ] = None,
    key: Key = None,
    trunk: Trunk = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Writes nothing; checks every byte of a recording, decodes its probe samples, and prints on stdout what it found.

    Exit code 1 says that something is wrong with the file.

    \b
    Example:
      krnet verify features.krn --against features.npy
    """
    from krnet import api

    report = api.verify(path, against, device=device, key=key, trunk=_read_trunk(trunk, device))
    tables.show(report, tables.verify_rows(report), as_json)


@app.command(short_help="Samples of a recording to a .npy file.")
def replay(
    path: RecordingFile,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="X.npy", help="File to write.", show_default=False)],
    ids: Annotated[
        Any,
        typer.Option(
            parser=typed.parse_ids,
            metavar="IDS",
            help="Sample IDs: 5 or 0:100 or ::10 or 5,3,7:9 or -1, or @FILE.npy with integers or a mask.",
            show_default="all",
        ),
    ] = ":",
    labels_out: Annotated[
        Path | None, typer.Option(metavar="Y.npy", help="File for the labels.", show_default="none")
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="exact|fast", help="fast: bf16 products on a GPU; on a CPU the same as exact.")
    ] = "exact",
    trunk: Trunk = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes X.npy, float32 features in the order of the IDs, and their labels to Y.npy if asked.

    \b
    Example:
      krnet replay features.krn --ids 0:100 -o first.npy
    """
    from krnet import api, export
    from krnet.progress import Display

    recording = api.open(path, device, precision, trunk=_read_trunk(trunk, device))
    chosen = export.choose_ids(recording, ids)
    with Display(quiet) as display:
        num_bytes = export.write_replays(
            recording, chosen, out, labels_path=labels_out, watch=lambda done, all: display.count(done, all, "replay")
        )
    written = {
        "path": str(out),
        "labels_path": None if labels_out is None else str(labels_out),
        "num_samples": len(chosen),
        "shape": list(recording.shape),
        "dtype": "float32",
        "bytes": num_bytes,
        "precision": precision,
        "device": str(recording.device),
    }
    tables.show(written, tables.replay_rows(written), as_json)


@app.command(short_help="Learn classes task after task, by one method or by all.")
def learn(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...", help="kril finetune joint ewc mas icarl lucir gfr, or all.", show_default=False
        ),
    ],
    data: Annotated[
        str, typer.Option(metavar="NAME|FOLDER", help="cifar100, digits, or a folder of images.")
    ] = "cifar100",
    tasks: Annotated[int | None, typer.Option(help="Tasks after the base task.", show_default="10")] = None,
    base_classes: Annotated[int | None, typer.Option(help="Classes of the base task.", show_default="half")] = None,
    sizes: Annotated[
        Any,
        typer.Option(
            parser=typed.parse_counts,
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
        typer.Option(help="kril: how features are kept; raw keeps real ones, images the images.", show_default="krnet"),
    ] = None,
    budget: Annotated[
        Any,
        typer.Option(
            parser=parse_size,
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
        typer.Option(help="Settings to start from, where a method has such: own (gfr).", show_default="none"),
    ] = None,
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
    from krnet import learning, protocol
    from krnet.progress import Display
    from krnet.watching import Board, Line, Several

    if sizes is not None and (tasks is not None or base_classes is not None):
        raise typer.BadParameter("give either --sizes, or --tasks and --base-classes")
    every = learning.base.names()
    chosen = list(dict.fromkeys(name for given in methods for name in (every if given == "all" else [given])))
    for method in chosen:
        learning.base.choose(method)
    if list_all:
        everyone = learning.base.LearnerConfig
        print(f"all methods\n{explain_settings(everyone)}")
        for method in chosen:
            print(f"\n{method}\n{explain_settings(learning.base.choose(method).config_class, everyone)}".rstrip())
        return
    switches: dict[str, Any] = {
        "recorder": recorder,
        "budget": budget,
        "fixed_layers": fixed_layers,
        "epochs": epochs,
        "base_epochs": epochs,
    }
    switches |= {"aux": 0.0 if no_aux else None, "kr2": False if no_kr2 else None, "single": True if single else None}
    known = {field.name for m in every for field in fields(learning.base.choose(m).config_class)}
    given = merge(settings or [], known, **switches)
    with Display(quiet) as display:
        display.phase("reading the images")
        found = data_sets.load(data, data_dir, say=(lambda text: None) if quiet else _say)
        split = protocol.split(
            order, num_classes=found.num_classes, base_classes=base_classes, tasks=10 if tasks is None else tasks,
            sizes=sizes,
        )  # fmt: skip
        name = f"{'-'.join(chosen) if len(chosen) < 4 else 'several'}-{found.name}-{split.num_tasks - 1}"
        folder = out or Path("runs") / f"{name}-{split.order_name}-{seed}".replace("/", "_")
        watcher = Several([Line(display), Board(folder / "tensorboard")])
        common: dict[str, Any] = {"seed": seed, "device": device, "resume": resume, "watcher": watcher}
        try:
            if len(chosen) == 1:
                (only,) = chosen
                own = learning.settings_of(chosen, given, found, preset)[only]
                runs = [learning.learn(only, found, split, out=folder, settings=own, **common)]
            else:
                runs = learning.learn_all(chosen, found, split, out=folder, settings=given, preset=preset, **common)
        except KeyboardInterrupt:
            _say(f"stopped; what was done is in {folder}. To go on, give the same command with --resume")
            raise typer.Exit(130) from None
    if as_json:
        tables.show_json(runs[0] if len(runs) == 1 else runs)
    else:
        tables.show_runs(runs)
        if not quiet:
            _say(f"written to {folder}")


@app.command(short_help="Learn digits task after task: KRIL against its bounds, in minutes.")
def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to; made if missing.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seeds the networks and the recordings.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="A few updates only: seconds, and poor results.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes demo/METHOD/run.json and demo/demo.png, accuracy task by task and bytes kept; takes under three minutes.

    Learns handwritten digits two classes at a time: by KRIL, which replays the feature maps of old images from a
    recording; by fine-tuning, which forgets; and by keeping real features or all images, the upper bounds. Nothing is
    downloaded.

    \b
    Example:
      krnet demo --out demo
    """
    from krnet.demo import run
    from krnet.progress import Display

    try:
        with Display(quiet) as display:
            found = run(out, display, seed=seed, short=short)
    except KeyboardInterrupt:
        _say(f"stopped; what was done is in {out}. To go on, give the same command again")
        raise typer.Exit(130) from None
    if as_json:
        tables.show_json(found)
    else:
        tables.show_runs([{**made, "method": name} for name, made in found["runs"].items()])
        print(f"picture: {found['picture']}; took {found['seconds']:.0f} s")


@bench.command(short_help="A step against its floor, replay against its rivals.")
def speed(
    features: Annotated[
        Path | None,
        typer.Argument(metavar="[FEATURES]", help="Feature maps to fit.", show_default="random ones"),
    ] = None,
    labels: Annotated[Path | None, typer.Option(metavar="L.npy", help="One integer per sample.")] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"{', '.join(PRESETS)}; or none, for sizes from the data.")
    ] = "cifar100",
    targets: Annotated[
        str, typer.Option(metavar="R2,R2,...", help="Measure the time to reach each, on FEATURES.", show_default="none")
    ] = "",
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes nothing; prints on stdout how long a step takes and the least it could take, and how fast replay is.

    The floor counts the FLOPs and bytes that no version can avoid, over ceilings measured in the same run. Replay is
    set against the plain network and against reading raw features from disk.

    \b
    Example:
      krnet bench speed features.npy --labels labels.npy --targets 0.95,0.98
    """
    from krnet.speed import bench as measure

    wanted = tuple(float(part) for part in targets.split(",") if part)
    if wanted and features is None:
        raise typer.BadParameter("--targets needs FEATURES to reach them on")
    chosen = None if preset == "none" else preset
    say = (lambda text: None) if quiet else _say
    found = measure(features, labels, preset=chosen, device=device, targets=wanted, say=say)
    tables.show(found, tables.speed_rows(found), as_json)


@bench.command(short_help="Bytes against R2 and replay accuracy, for every recorder.")
def rate(
    features: Annotated[
        Path,
        typer.Argument(
            metavar="FEATURES", help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write to.", show_default=False)],
    labels: Annotated[
        Path | None,
        typer.Option(metavar="L.npy", help="Class of each sample, as the head numbers them.", show_default="none"),
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option(
            metavar="HEAD.pt",
            help="Feature maps to logits, as torch.export or TorchScript wrote it, or the folder of a kril run.",
            show_default="none",
        ),
    ] = None,
    budgets: Annotated[
        Any, typer.Option(parser=parse_sizes, metavar="SIZE,SIZE,...", help="Most bytes of a file (MB = 10^6).")
    ] = "3MB,6.5MB,12MB,24MB",
    recorders: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Ways to store the features; pca:components=64 holds a setting at every budget.",
            show_default="all, images if these are given",
        ),
    ] = None,
    images: Images = None,
    trunk: Trunk = None,
    key: Key = None,
    iterations: Annotated[int | None, fit_option("iterations", "the schedule's")] = None,
    time_budget: Annotated[
        Any, fit_option("time_budget", "none", parser=typed.parse_duration, metavar="SECONDS|10m|1h30m")
    ] = None,
    seed: Annotated[int, fit_option("seed", str(FitConfig.seed))] = FitConfig.seed,
    settings: Annotated[
        list[Any] | None, set_option("A setting of every recorder that has it, such as mean and std of images")
    ] = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes DIR/rate.json, DIR/rate.png and the recordings in DIR/points; prints a table of all points on stdout.

    Each recorder is fitted at each budget and scored only after its file has been opened again. A second run makes
    only what is missing. A budget that a recorder cannot keep gives its smallest file, marked as over. Exit code 1
    says that a recorder failed; the others are there.

    \b
    Example:
      krnet bench rate features.npy --labels labels.npy --head head.pt2 --budgets 3MB,12MB -o rate
      krnet bench rate features.npy --images images.npy --trunk trunk.pt2 --set mean=0.5 --set std=0.25 -o rate
    """
    from krnet import rate as rates
    from krnet import rate_report
    from krnet.progress import Display

    chosen = None if recorders is None else [part for part in recorders.split(",") if part]
    try:
        with Display(quiet) as display:
            found = rates.bench(
                features, labels, out=out, head=head, budgets=budgets, recorders=chosen, iterations=iterations,
                time_budget=time_budget, seed=seed, device=device, key=key, images=images, trunk=trunk,
                settings=dict(settings or []), say=display.phase, watch=display.fit,
            )  # fmt: skip
    except KeyboardInterrupt:
        _say(f"stopped; the points that were done are in {out}. To go on, give the same command again")
        raise typer.Exit(130) from None
    if as_json:
        tables.show_json(found)
    else:
        rate_report.show(found)
        if not quiet:
            _say(f"written to {out / rates.RATE} and {out / rates.PICTURE}")
    for failed in found["errors"]:
        _say(f"error: {failed['recorder']} at {failed['budget']} bytes: {failed['error']}")
    if found["errors"]:
        raise typer.Exit(1)
