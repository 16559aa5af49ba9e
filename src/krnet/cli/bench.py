"""The commands that measure: `krnet bench speed` and `krnet bench rate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output as tables
from krnet.cli.options import Device, FeaturesFile, Images, Json, Key, Quiet, Trunk, fit_option, option, set_option
from krnet.cli.output import say
from krnet.config import parse_duration, parse_sizes, parse_targets
from krnet.nn.paper_config import PRESETS
from krnet.train.config import FitConfig

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure, on this machine and in one run.")


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
        Any,
        typer.Option(
            parser=option(parse_targets),
            metavar="R2,R2,...",
            help="Measure the time to reach each, on FEATURES.",
            show_default="none",
        ),
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
    from krnet.bench.speed import bench as measure

    if targets and features is None:
        raise typer.BadParameter("--targets needs FEATURES to reach them on")
    chosen = None if preset == "none" else preset
    tell = (lambda text: None) if quiet else say
    found = measure(features, labels, preset=chosen, device=device, targets=targets, say=tell)
    tables.show(found, tables.speed_rows(found), as_json)


@bench.command(short_help="Bytes against R2 and replay accuracy, for every recorder.")
def rate(
    features: FeaturesFile,
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
        Any,
        typer.Option(parser=option(parse_sizes), metavar="SIZE,SIZE,...", help="Most bytes of a file (MB = 10^6)."),
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
        Any, fit_option("time_budget", "none", parser=option(parse_duration), metavar="SECONDS|10m|1h30m")
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
    from krnet.bench import rate as rates
    from krnet.cli.progress import Display
    from krnet.report.figures import draw_rate

    chosen = None if recorders is None else [part for part in recorders.split(",") if part]
    try:
        with Display(quiet) as display:
            found = rates.bench(
                features, labels, out=out, head=head, budgets=budgets, recorders=chosen, iterations=iterations,
                time_budget=time_budget, seed=seed, device=device, key=key, images=images, trunk=trunk,
                settings=dict(settings or []), say=display.phase, watch=display.fit,
            )  # fmt: skip
    except KeyboardInterrupt:
        say(f"stopped; the points that were done are in {out}. To go on, give the same command again")
        raise typer.Exit(130) from None
    if found["points"]:
        draw_rate(out / rates.PICTURE, found)
    if as_json:
        tables.show_json(found)
    else:
        tables.show_rate(found)
        if not quiet:
            say(f"written to {out / rates.RATE} and {out / rates.PICTURE}")
    for failed in found["errors"]:
        say(f"error: {failed['recorder']} at {failed['budget']} bytes: {failed['error']}")
    if found["errors"]:
        raise typer.Exit(1)
