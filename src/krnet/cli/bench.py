"""The commands that measure: `krnet bench speed` and `krnet bench rate`.

options -> krnet.bench -> a table or JSON on stdout; rate also writes DIR/rate.json, DIR/rate.png and DIR/points
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import (
    NO_TIME_LIMIT,
    Device,
    FeaturesFile,
    Images,
    Json,
    Key,
    Quiet,
    Trunk,
    fit_option,
    option,
    set_option,
)
from krnet.cli.output import Rows, print_unwrapped, say, titled_table
from krnet.config import format_size, parse_duration, parse_sizes, parse_targets, series_name
from krnet.nn.paper_config import PRESETS
from krnet.train.config import SCHEDULES, FitConfig

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure speed, or file size against quality.")


@bench.command(short_help="Time a training step and replay.")
def speed(
    features: Annotated[
        Path | None,
        typer.Argument(metavar="FEATURES", help="Feature maps (N, ...) to fit.", show_default="random maps"),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="L.npy", help="Class of each sample.", show_default="none")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Named group of settings to start from: {', '.join(PRESETS)} (network sizes of the paper); or none, "
            f"for sizes solved from the data."
        ),
    ] = "cifar100",
    targets: Annotated[
        Any,
        typer.Option(
            parser=option(parse_targets),
            metavar="R2,R2,...",
            help="Also measure the seconds of a fit of FEATURES to each of these R2.",
            show_default="none",
        ),
    ] = "",
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes nothing; prints on stdout the time of a training step, its lower bound (floor), and the speed of replay.

    The floor is the time that the FLOPs and bytes of a step take at the peak rates of the device (ceilings), which are
    measured in the same run. Replay is compared with the plain network and with reading raw features from disk.

    \b
    Example:
      krnet bench speed features.npy --labels labels.npy --targets 0.95,0.98
    """
    from krnet.bench.speed import bench as measure
    from krnet.cli.progress import Display

    if targets and features is None:
        raise typer.BadParameter("--targets needs FEATURES to reach them on")
    chosen_preset = None if preset == "none" else preset
    with Display(quiet) as display:
        result = measure(features, labels, preset=chosen_preset, device=device, targets=targets, watch=display)
    output.show(result, speed_rows(result), as_json)


@bench.command(short_help="Measure bytes, R2 and replay accuracy of every recorder.")
def rate(
    features: FeaturesFile,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write to.", show_default=False)],
    labels: Annotated[
        Path | None,
        typer.Option(metavar="L.npy", help="Class of each sample, numbered as the head does.", show_default="none"),
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option(
            metavar="HEAD.pt",
            help="Module from feature maps to logits, for replay accuracy: a file of torch.export or TorchScript, or "
            "the folder of a kril run.",
            show_default="none",
        ),
    ] = None,
    budgets: Annotated[
        Any,
        typer.Option(
            parser=option(parse_sizes), metavar="SIZE,SIZE,...", help="Largest sizes of a file (MB = 10^6 bytes)."
        ),
    ] = "3MB,6.5MB,12MB,24MB",
    recorders: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Ways to store the features; pca:components=64 fixes a setting at every budget.",
            show_default="all; images only with --images and --trunk",
        ),
    ] = None,
    images: Images = None,
    trunk: Trunk = None,
    key: Key = None,
    iterations: Annotated[
        int | None, fit_option("iterations", f"{SCHEDULES[FitConfig.schedule]}, {NO_TIME_LIMIT}")
    ] = None,
    time_budget: Annotated[
        Any, fit_option("time_budget", "none", parser=option(parse_duration), metavar="SECONDS|10m|1h30m")
    ] = None,
    seed: Annotated[int, fit_option("seed", str(FitConfig.seed))] = FitConfig.seed,
    settings: Annotated[
        list[Any] | None, set_option("A setting for every recorder that has it, such as mean and std of images")
    ] = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes DIR/rate.json, DIR/rate.png and the recordings in DIR/points; prints a table of all points on stdout.

    Each recorder makes a file for each budget, which is then opened again and scored. A second run makes only the
    points that are missing. A recorder that cannot keep a budget writes its smallest file, marked as over. If a
    recorder fails, the others are still measured, and the exit code is 1.

    \b
    Example:
      krnet bench rate features.npy --labels labels.npy --head head.pt2 --budgets 3MB,12MB -o rate
      krnet bench rate features.npy --images images.npy --trunk trunk.pt2 --set mean=0.5 --set std=0.25 -o rate
    """
    from krnet.bench import rate as rates
    from krnet.cli.progress import Display
    from krnet.report.figures import draw_rate

    names = None if recorders is None else [part for part in recorders.split(",") if part]
    try:
        with Display(quiet) as display:
            result = rates.bench(
                features, labels, out=out, head=head, budgets=budgets, recorders=names, iterations=iterations,
                time_budget=time_budget, seed=seed, device=device, key=key, images=images, trunk=trunk,
                settings=dict(settings or []), watch=display,
            )  # fmt: skip
    except KeyboardInterrupt:
        say(f"stopped; the finished points are in {out}. To go on, give the same command again")
        raise typer.Exit(130) from None
    if result["points"]:
        draw_rate(out / rates.PICTURE_FILE, result)
    if as_json:
        output.show_json(result)
    else:
        show_rate(result)
        if not quiet:
            written = [rates.RATE_FILE, *([rates.PICTURE_FILE] if result["points"] else [])]
            say(f"written to {' and '.join(str(out / name) for name in written)}")
    for failed in result["errors"]:
        say(f"error: {failed['recorder']} at {failed['budget']} bytes: {failed['error']}")
    if result["errors"]:
        raise typer.Exit(1)


def speed_rows(found: Mapping[str, Any]) -> Rows:
    rows = [
        ("device", found["device"]),
        ("ceilings", f"{found['flops_per_second'] / 1e12:.2f} TFLOP/s, {found['bytes_per_second'] / 1e9:,.0f} GB/s"),
    ]
    for name, step in found["steps"].items():
        floor = f"{step['times_floor']:.2f} times the floor of {step['floor_milliseconds']:.2f} ms"
        ready = f"ready in {step['ready_seconds']:.1f} s"
        rows.append(
            (f"step, {name}", f"{step['milliseconds']:.2f} ms, {floor} (batch {step['batch_size']:,}, {ready})")
        )
    for batch, ways in found["replay"].items():
        best = max(ways["exact"], ways["fast"])
        ratios = (
            f"{best / ways['plain']:.2f} times plain, {best / ways['raw_from_disk']:.2f} times reading raw features"
        )
        rate = f"exact {ways['exact']:,.0f}/s, fast {ways['fast']:,.0f}/s"
        rows.append((f"replay by {int(batch):,}", f"{rate}; the better is {ratios}"))
    for target, fit in found["targets"].items():
        reached = f"{fit['fit_seconds']:.1f} s, {fit['iterations']:,} iterations"
        rows.append((f"to R2 {target}", f"{reached}: R2 {fit['r2']:.4f}, stopped by {fit['stopped_by']}"))
    return rows


def show_rate(result: Mapping[str, Any]) -> None:
    """Print a line per point, then a line per failure."""
    accuracy = result["real_accuracy"]
    real = "" if accuracy is None else f"; the head gets {100 * accuracy:.2f} % of the real features right"
    title = f"{result['features']}: {result['num_samples']:,} samples, {format_size(result['feature_bytes'])}{real}"
    table = titled_table(title, "recorder")
    for name in ("budget", "file MB", "bytes/sample", "bits/value", "R2", "replay %", "fit s", "replays/s"):
        table.add_column(name, justify="right")
    for point in result["points"]:
        table.add_row(
            series_name(point["recorder"], point["given"]),
            format_size(point["budget"]),
            f"{point['bytes'] / 1e6:,.3f}{' over' if point['over_budget'] else ''}",
            f"{point['bytes_per_sample']:,.1f}",
            f"{point['bits_per_value']:.3f}",
            f"{point['r2']:.4f}",
            "-" if point["replay_accuracy"] is None else f"{100 * point['replay_accuracy']:.2f}",
            f"{point['fit_seconds']:,.1f}",
            f"{point['replay_per_second']:,.0f}",
        )
    for failed in result["errors"]:
        table.add_row(failed["recorder"], format_size(failed["budget"]), "failed")
    print_unwrapped(table)
