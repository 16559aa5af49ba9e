"""`krnet record`: features to a recording.

FEATURES, options -> krnet.record -> OUT.krn; its size and its error on stdout
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import (
    NO_TIME_LIMIT,
    Budget,
    Device,
    Images,
    Json,
    Key,
    Lengths,
    ListSettings,
    Preset,
    Quiet,
    RecorderName,
    Set,
    Trunk,
    check_setting_names,
    fit_option,
    merge,
    option,
    read_trunk,
)
from krnet.cli.output import say
from krnet.cli.recording_rows import info_rows, number_below, outlook_text
from krnet.config import parse_duration
from krnet.io.places import parse_place
from krnet.ranks import this_rank
from krnet.train.config import SCHEDULES, FitConfig


def record(
    features: Annotated[
        Any,
        typer.Argument(
            parser=parse_place,
            metavar="FEATURES",
            help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr, or a folder of shards; a path or a URL; "
            "required.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.krn",
            help="File to write; required. An existing one is replaced when the new one is complete.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="L.npy", help="Class of each sample, an integer; the file keeps them.", show_default="none"
        ),
    ] = None,
    lengths: Lengths = None,
    key: Key = None,
    preset: Preset = None,
    iterations: Annotated[
        int | None,
        fit_option(
            "iterations",
            ", ".join(f"{number} with --schedule {name}" for name, number in SCHEDULES.items()) + f", {NO_TIME_LIMIT}",
        ),
    ] = None,
    budget: Budget = None,
    room: Annotated[
        int | None,
        typer.Option(
            metavar="SAMPLES",
            help="Number of samples that the file will hold once it has grown (krnet append, --start); the budget, "
            "also the default one, is for all of them.",
            show_default="the samples of FEATURES",
        ),
    ] = None,
    target_r2: Annotated[
        float | None,
        typer.Option(
            help="R2 to reach with the smallest file, instead of --budget; a few whole fits search for it.",
            show_default="none",
        ),
    ] = None,
    stop_at_r2: Annotated[float | None, fit_option("stop_at_r2", "none")] = None,
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
            help="Continue a stopped run from its checkpoint OUT.krn.ckpt, and leave a finished OUT.krn as it is. A "
            "search for --target-r2 has no checkpoint and starts again.",
        ),
    ] = False,
    start: Annotated[
        Any,
        typer.Option(
            parser=parse_place,
            metavar="OLD.krn",
            help="Start from an earlier recording, which holds the first samples of FEATURES; krnet, pca, quantized, "
            "transform and pq keep their replays unchanged.",
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
    """Writes OUT.krn, from which any sample can be replayed by its ID; prints its size and its error on stdout.

    The file also holds the settings it was made with. While a network is fitted, a checkpoint OUT.krn.ckpt lies beside
    it.

    \b
    Example:
      krnet record features.npy --labels labels.npy -o features.krn --budget 12MB
      krnet record --recorder pca --list-settings
      krnet record features.npy -o small.krn --recorder pca --budget 6.5MB
      torchrun --nproc-per-node 8 -m krnet record features.npy -o features.krn --budget 12MB
      krnet record features.npy -o jpeg.krn --recorder images --images images.npy --trunk trunk.pt2 --set mean=0.5
    """
    from krnet import api, catalog
    from krnet.cli.progress import Display
    from krnet.device import pick_device
    from krnet.io.overlap import refuse_overlap
    from krnet.recorders.base import default_recorder, get_recorder
    from krnet.team import joined

    if list_all:
        name = recorder or default_recorder(preset, None if start is None else api.open(start))
        print(catalog.settings(get_recorder(name).name))
        return
    if features is None or out is None:
        raise typer.BadParameter("FEATURES and --out are needed", param_hint="'FEATURES'")
    rank = this_rank()
    resume = resume or rank.restarts > 0
    given = merge(
        settings or [],
        iterations=iterations,
        stop_at_r2=stop_at_r2,
        time_budget=time_budget,
        schedule=schedule,
        seed=seed,
        device=rank.device(device),
    )
    check_setting_names(given)
    refuse_overlap("record", [out], [features, labels, lengths, images, trunk, start])
    was_finished = resume and out.exists()
    checkpoint = out.with_name(out.name + ".ckpt")
    old_write_time = _write_time_ns(checkpoint)
    try:
        with Display(quiet or not rank.is_first) as display, joined(rank, pick_device(given.get("device"))):
            recording = api.record(
                features, labels, lengths=lengths, recorder=recorder, preset=preset, resume=resume, out=out, key=key,
                start=start, images=images, trunk=read_trunk(trunk, device), watch=display, budget=budget, room=room,
                target_r2=target_r2, **given,
            )  # fmt: skip
    except KeyboardInterrupt:
        if rank.is_first:
            say(_stopped_text(checkpoint, old_write_time, resume))
        raise typer.Exit(130) from None
    if not rank.is_first:
        return
    if was_finished:
        say(f"{out}: recorded already; nothing to resume")
    info = {"path": str(out), **recording.info()}
    output.show(info, info_rows(info), as_json)
    if info["twice_as_long"] and target_r2 is None and not was_finished:
        say(outlook_text(info))
    target = stop_at_r2 if target_r2 is None else target_r2
    if target is not None and info["r2"] < target:
        r2_text, advice = number_below(info["r2"], target), _advice(info, is_searched=target_r2 is not None)
        say(f"warning: {out} was written, but its R2 of {r2_text} is below the target of {target}. {advice}")


def _stopped_text(checkpoint: Path, old_write_time: int | None, resume: bool) -> str:
    if _write_time_ns(checkpoint) not in (None, old_write_time):
        return f"stopped; checkpoint saved in {checkpoint}. To go on, give the same command with --resume"
    if resume and old_write_time is not None:
        return f"stopped before the fit went on; {checkpoint} is as it was. Give the same command again"
    return "stopped before there was anything to save"


def _advice(info: Mapping[str, Any], is_searched: bool) -> str:
    """What to do about a file below its target; `is_searched`: it is the best of those that a search has made."""
    if is_searched:
        return (
            "No larger file was better: leave out settings that hold it back, fit longer where there is a network "
            "(--iterations, --time-budget), or take another recorder"
        )
    return (
        f"Record again with more --iterations (these were {info['iterations']:,}), a longer --time-budget, or a larger "
        f"--budget"
    )


def _write_time_ns(path: Path) -> int | None:
    """Return when a file was last written; None if there is no such file."""
    return path.stat().st_mtime_ns if path.exists() else None
