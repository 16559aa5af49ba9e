"""The commands of a recording: `krnet plan`, `record`, `info`, `verify` and `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output as tables
from krnet.cli.options import (
    Budget,
    Device,
    Images,
    Json,
    Key,
    ListSettings,
    Preset,
    Quiet,
    RecorderName,
    RecordingFile,
    Set,
    Trunk,
    fit_option,
    merge,
    option,
    show_recorder_settings,
)
from krnet.cli.output import say
from krnet.config import parse_counts, parse_duration, parse_ids, parse_shape
from krnet.train.config import SCHEDULES, FitConfig


def plan(
    shape: Annotated[
        Any,
        typer.Option(parser=option(parse_shape), metavar="C,H,W", help="Shape of one sample.", show_default=False),
    ],
    class_counts: Annotated[
        Any,
        typer.Option(
            parser=option(parse_counts),
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
    recorder: RecorderName = None,
    budget: Budget = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Writes nothing; prints on stdout what a recording would take, in bytes, beside the features themselves.

    Without a preset, what `krnet record` would write: recorder krnet at one bit a value. A preset is of the paper's
    network, which is shown beside the paper's autoencoder.

    \b
    Example:
      krnet plan --shape 64,8,8 --class-counts 500x50
      krnet plan --shape 256,14,14 --class-counts 1296x50 --preset imagenet-published
    """
    if num_samples is not None and class_counts is None:
        class_counts = [num_samples]
    elif num_samples is not None or class_counts is None:
        raise typer.BadParameter("give either --class-counts or --num-samples")
    from krnet.bench.plan import plan as make_plan

    made = make_plan(shape, class_counts, preset, recorder=recorder, budget=budget, **merge(settings or []))
    tables.show(made, tables.plan_rows(made), as_json)


def record(
    features: Annotated[
        Path | None,
        typer.Argument(
            metavar="FEATURES", help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.krn", help="File to write.", show_default=False)
    ] = None,
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
    budget: Budget = None,
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
        Any, fit_option("time_budget", "none", parser=option(parse_duration), metavar="SECONDS|10m|1h30m")
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
            help="Start from an earlier recording, of the first of these samples; krnet, pca, quantized, transform and "
            "pq leave those as they are.",
            show_default="none",
        ),
    ] = None,
    recorder: RecorderName = None,
    images: Images = None,
    trunk: Trunk = None,
    settings: Set = None,
    list_all: ListSettings = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT.krn, from which any sample can be replayed by its ID; prints on stdout how large and how good it is.

    While it runs, a checkpoint OUT.krn.ckpt lies beside it. The settings it was made with are in the file.

    \b
    Example:
      krnet record features.npy --labels labels.npy -o features.krn --budget 12MB
      krnet record --recorder pca --list-settings
      krnet record features.npy -o small.krn --recorder pca --budget 6.5MB
      krnet record features.npy -o jpeg.krn --recorder images --images images.npy --trunk trunk.pt2 --set mean=0.5
    """
    from krnet import api
    from krnet.cli.progress import Display
    from krnet.recorders.base import get_recorder

    if list_all:
        show_recorder_settings(get_recorder(recorder or ("krnet" if preset is None else "paper")))
        return
    if features is None or out is None:
        raise typer.BadParameter("FEATURES and --out are needed", param_hint="'FEATURES'")
    given = merge(
        settings or [],
        iterations=iterations,
        target_r2=target_r2,
        time_budget=time_budget,
        schedule=schedule,
        seed=seed,
        device=device,
    )
    if resume and out.exists():
        say(f"{out}: recorded already; nothing to resume")
    checkpoint = out.with_name(out.name + ".ckpt")
    before = _changed(checkpoint)
    try:
        with Display(quiet) as display:
            display.phase("reading the features")
            recording = api.record(
                features, labels, recorder=recorder, preset=preset, resume=resume, out=out, key=key, start=start,
                images=images, trunk=_read_trunk(trunk, device), watch=display.fit, budget=budget, room=room, **given,
            )  # fmt: skip
    except KeyboardInterrupt:
        if _changed(checkpoint) not in (None, before):
            say(f"stopped; checkpoint saved in {checkpoint}. To go on, give the same command with --resume")
        else:
            say("stopped before there was anything to save")
        raise typer.Exit(130) from None
    info = {"path": str(out), **recording.info()}
    tables.show(info, tables.info_rows(info), as_json)
    target = given.get("target_r2")
    if target is not None and info["r2"] < target:
        more = (
            f"Record again with more --iterations (these were {info['iterations']:,}), a longer --time-budget, or a "
            f"wider network (--set d0=... or --set c0=...)"
            if get_recorder(info["recorder"]).stops_at_target
            else "No larger file was better: leave out settings that hold it back, fit longer where there is a network "
            "(--iterations, --time-budget), or take another recorder"
        )
        shown = tables.below(info["r2"], target)
        say(f"warning: {out} was written, but its R2 of {shown} is below the target of {target}. {more}")


def _read_trunk(path: Path | None, device: str | None) -> Any:
    """The module, on the device; None where no file is given."""
    from krnet.device import pick_device
    from krnet.nn.loaded import read_trunk

    return None if path is None else read_trunk(path, pick_device(device))


def _changed(path: Path) -> int | None:
    """When a file was last written, in nanoseconds; None where there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


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


def replay(
    path: RecordingFile,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="X.npy", help="File to write.", show_default=False)],
    ids: Annotated[
        Any,
        typer.Option(
            "--ids",
            parser=option(parse_ids),
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
    from krnet.cli.progress import Display

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
