"""`krnet plan`: what to expect of a recording before it is made.

--shape, --class-counts -> krnet.plan    -> the size of the file
FEATURES                -> krnet.predict -> the R2 of each recorder in files of three sizes, and its time
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import (
    Budget,
    Device,
    Json,
    Key,
    Preset,
    Quiet,
    RecorderName,
    Set,
    check_setting_names,
    merge,
    option,
)
from krnet.cli.output import Rows, megabytes, print_unwrapped, ratio_text, shape_text, short_size, titled_table
from krnet.config import format_size, parse_counts, parse_duration, parse_shape, parse_sizes, plain_text, settings_text
from krnet.io.places import parse_place

FROM_FEATURES = ("channels", "height", "width", "vector", "groups")  # settings that follow from the features


def plan(
    features: Annotated[
        Any,
        typer.Argument(
            parser=parse_place,
            metavar="[FEATURES]",
            help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr, or a folder of shards; a path or a URL. A "
            "sample of them is recorded, to predict R2. Give this or --shape.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        Any,
        typer.Option(parser=option(parse_shape), metavar="C,H,W", help="Shape of one feature map.", show_default=False),
    ] = None,
    class_counts: Annotated[
        Any,
        typer.Option(
            parser=option(parse_counts),
            metavar="N,N,...",
            help="With --shape: number of samples of each class; 500x50 means 50 classes of 500. Give this or "
            "--num-samples.",
            show_default=False,
        ),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(
            help="With --shape: number of samples, for features without classes. Give this or --class-counts.",
            show_default=False,
        ),
    ] = None,
    preset: Preset = None,
    recorder: RecorderName = None,
    budget: Budget = None,
    budgets: Annotated[
        Any,
        typer.Option(
            parser=option(parse_sizes),
            metavar="SIZE,SIZE,...",
            help="With FEATURES: sizes of the file (MB = 10^6 bytes).",
            show_default="1/4, 1 and 4 bits a value",
        ),
    ] = None,
    recorders: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="With FEATURES: ways to store them; pca:components=64 fixes a setting.",
            show_default="all that learn from a sample",
        ),
    ] = None,
    time_budget: Annotated[
        Any,
        typer.Option(
            parser=option(parse_duration),
            metavar="SECONDS|10m",
            help="With FEATURES: time for each fit of a network to the sample.",
            show_default="5 s",
        ),
    ] = None,
    key: Key = None,
    settings: Set = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes nothing; prints on stdout what to expect of a recording before it is made.

    With FEATURES: the R2 that each recorder would reach in files of three sizes, the time that it would take on this
    machine, and which recorder to take. All follow from a sample of FEATURES, in about a minute.

    With --shape: the size in bytes of the file that `krnet record` would write with the same options, and that of the
    features. For recorder paper, which --preset selects, it is printed beside the size of the paper's autoencoder.

    \b
    Example:
      krnet plan features.npy
      krnet plan features.npy --budgets 2MB,8MB --recorders krnet,pca,transform
      krnet plan --shape 64,8,8 --class-counts 500x50
      krnet plan --shape 256,14,14 --class-counts 1296x50 --preset imagenet-published
    """
    given = merge(settings or [])
    of_shape = {"class_counts": class_counts, "num_samples": num_samples, "preset": preset, "recorder": recorder}
    of_shape |= {"budget": budget, "set": given or None}
    of_features = {"budgets": budgets, "recorders": recorders, "time_budget": time_budget, "key": key, "device": device}
    if (features is None) == (shape is None):
        raise typer.BadParameter("give either FEATURES or --shape")
    _refuse_others(of_features if features is None else of_shape, "FEATURES" if features is None else "--shape")
    if features is not None:
        _predict(features, of_features, as_json, quiet)
        return
    if (num_samples is None) == (class_counts is None):
        raise typer.BadParameter("give either --class-counts or --num-samples")
    from krnet.bench.plan import plan as make_plan

    check_setting_names(given)
    table = make_plan(
        shape, num_samples, class_counts=class_counts, preset=preset, recorder=recorder, budget=budget, **given
    )
    output.show(table, plan_rows(table), as_json)


def _refuse_others(options: Mapping[str, Any], needed: str) -> None:
    """Refuse options that apply only beside `needed`, which is not given."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"--{name.replace('_', '-')} applies only to {needed}; leave it out")


def _predict(features: Any, options: Mapping[str, Any], as_json: bool, quiet: bool) -> None:
    from krnet.bench.predict import predict
    from krnet.cli.progress import Display

    chosen = {name: value for name, value in options.items() if value is not None}
    if "recorders" in chosen:
        chosen["recorders"] = [part for part in chosen["recorders"].split(",") if part]
    with Display(quiet) as display:
        result = predict(features, watch=display, **chosen)
    if as_json:
        output.show_json(result)
    else:
        show_prediction(result)


def plan_rows(plan: Mapping[str, Any]) -> Rows:
    settings = settings_text(plan["settings"], without=FROM_FEATURES)
    if "krnet_bytes" not in plan:  # only the storage table of the paper's network has it
        limit = "at most " if plan["is_budget"] else ""
        classes = f", {plan['num_classes']:,} classes" if plan["num_classes"] > 1 else ""
        return [
            ("samples", f"{plan['num_samples']:,} of {shape_text(plan['shape'])}{classes}"),
            ("recorder", ": ".join(filter(None, [plan["recorder"], settings]))),
            ("features", megabytes(plan["feature_bytes"])),
            ("file", f"{limit}{megabytes(plan['file_bytes'])}, {ratio_text(plan['compression_ratio_bytes'])}"),
            ("per value", f"{plan['bits_per_value']:.3f} bits"),
        ]
    return [
        ("samples", f"{plan['num_samples']:,} of {shape_text(plan['shape'])}"),
        ("classes", f"{plan['num_classes']:,} in {plan['num_groups']:,} groups"),
        ("network", settings),
        ("features", megabytes(plan["feature_bytes"])),
        ("KRNet", megabytes(plan["krnet_bytes"])),
        ("  weights", megabytes(plan["krnet_network_bytes"])),
        ("  codes", megabytes(plan["krnet_code_bytes"])),
        ("autoencoder", megabytes(plan["autoencoder_network_bytes"] + plan["autoencoder_code_bytes"])),
        ("  weights", megabytes(plan["autoencoder_network_bytes"])),
        ("  codes", megabytes(plan["autoencoder_code_bytes"])),
        (
            "KRNet is",
            f"{ratio_text(plan['compression_ratio_bytes'])} ({plan['compression_ratio']:.2f} as the paper counts)",
        ),
    ]


def show_prediction(found: Mapping[str, Any]) -> None:
    """Print a line per recorder: the R2 to expect at each size, and the time of its slowest fit."""
    title = f"{found['num_samples']:,} samples of {shape_text(found['shape'])}, {format_size(found['feature_bytes'])} "
    title += f"as float32; predicted from {found['sample']:,}"
    table = titled_table(title, "recorder")
    for size, bits in zip(found["budgets"], found["bits_per_value"], strict=True):
        table.add_column(f"R2 in {short_size(size)}\n{bits:.3g} bits a value", justify="right")
    table.add_column("time", justify="right")
    for name in dict.fromkeys(point["recorder"] for point in found["points"]):
        points = [point for point in found["points"] if point["recorder"] == name]
        times = [point["seconds"] for point in points if point["seconds"] is not None]
        table.add_row(
            plain_text(name),
            *["-" if point["r2"] is None else f"{point['r2']:.4f}" for point in points],
            _time_text(max(times), points[0]["trains"]) if times else "-",
        )
    print_unwrapped(table)
    if found["take"] is not None:
        middle = found["budgets"][len(found["budgets"]) // 2]
        print(f"take {found['take']}: the highest R2 in {short_size(middle)}, or the quickest within 0.001 of it")
    if any(point["r2"] is None for point in found["points"]):
        print("-: no file of this recorder is so small (--json says more)")
    for name, reason in found["left_out"].items():
        print(plain_text(f"{name} is left out: {reason}"))


def _time_text(seconds: float, trains: bool) -> str:
    text = f"{seconds:,.0f} s" if seconds >= 1 else "below 1 s"
    return f"{text}; longer is better" if trains else text
