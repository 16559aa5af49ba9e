"""Print results on stdout, as a table or as one JSON object, and messages on stderr.

plan, info, verify report, ... -> *_rows -> (name, text) pairs -> show
runs of `krnet learn`          -> show_runs, a line per method; show_summary, over several seeds or class orders
rate.json                      -> show_rate, a line per point
messages                       -> say, on stderr

Sizes are printed in MB of 10^6 bytes, with the exact number of bytes beside them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from krnet.config import format_size, plain_text, series_name, settings_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Rows = list[tuple[str, str]]
FROM_FEATURES = ("channels", "height", "width", "vector", "groups")  # settings that follow from the features


def say(text: str) -> None:
    """Print a message on stderr: stdout holds results only."""
    print(plain_text(text), file=sys.stderr, flush=True)


def show(result: Mapping[str, Any], rows: Rows, as_json: bool) -> None:
    """Print `result` as JSON, or `rows` as a table of two columns."""
    if as_json:
        show_json(result)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(plain_text, row))
    # Without a terminal rich wraps at 80 columns, which would break paths.
    _print_table(table, Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False))


def show_json(value: Any) -> None:
    """Print one JSON value. JSON has no NaN and no infinity: they become null."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per method: accuracies after each task and their summary in percent, stored bytes, time.

    A method with several classifiers, such as iCaRL (nme and cnn), has a line for each. "as images" is the number of
    uncompressed images that take as many bytes as are stored.
    """
    from rich.table import Table

    first = runs[0]
    tasks = "+".join(map(str, first["tasks"]))
    title = f"{first['data']}, classes {tasks}, order {first['order']} ({first['order_hash']}), seed {first['seed']}"
    if first.get("validation"):
        title += f"\njudged on {first['validation']} held-out training images a class"
    table = Table(title=plain_text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("method")
    for task in range(len(first["tasks"])):
        table.add_column(f"task {task}" if task else "base", justify="right")
    for name in ("average", "without base", "forgetting", "stored", "as images", "seconds"):
        table.add_column(name, justify="right")
    for run in runs:
        for row, scores in (run.get("rows") or {run["row"]: run}).items():
            name = run["method"] if len(run.get("rows") or {}) < 2 else f"{run['method']} ({row})"
            table.add_row(
                plain_text(name),
                *[percent(value) for value in scores["accuracy"]],
                *[percent(scores[key]) for key in ("average", "average_without_base", "forgetting")],
                short_size(run["storage_bytes"]["total"]),
                f"{run['storage_bytes']['equivalent_exemplars']:,.0f}",
                f"{run['seconds']:,.0f}",
            )
    print_unwrapped(table)
    _explain_forgetting(
        [scores["forgetting"] for run in runs for scores in (run.get("rows") or {run["row"]: run}).values()]
    )


def _explain_forgetting(values: Sequence[float | None]) -> None:
    if any(value is not None and value < 0 for value in values):
        print("Forgetting below 0: on average, old classes are recognised better after the last task than ever before.")


def show_summary(runs: Sequence[Mapping[str, Any]], summary: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per method: mean and standard deviation over its runs, accuracies and forgetting in percent.

    Bytes have a standard deviation only where the runs differ. The parts of the stored bytes follow the table.
    """
    from rich.table import Table

    first = runs[0]
    orders = list(dict.fromkeys(f"{run['order']} ({run['order_hash']})" for run in runs))
    seeds = list(dict.fromkeys(str(run["seed"]) for run in runs))
    title = f"{first['data']}, classes {'+'.join(map(str, first['tasks']))}, {_listed('order', orders)}, "
    title += _listed("seed", seeds)
    if first.get("validation"):
        title += f"\njudged on {first['validation']} held-out training images a class"
    if len(orders) * len(seeds) > 1:
        title += "\nmean ± standard deviation (n - 1) over the runs of a method"
    table = Table(title=plain_text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("method")
    for name in ("runs", "last", "average", "without base", "forgetting", "stored", "network", "seconds"):
        table.add_column(name, justify="right")
    rows = [entry["method"] for entry in summary]
    for entry in summary:
        name = entry["method"] if rows.count(entry["method"]) == 1 else f"{entry['method']} ({entry['row']})"
        table.add_row(
            name,
            f"{entry['num_runs']}",
            *[_spread_text(entry[key], percent) for key in ("last", "average", "average_without_base", "forgetting")],
            *[_size_text(size) for size in (entry["storage_bytes"]["total"], entry["network_bytes"])],
            _spread_text(entry["seconds"], "{:,.1f}".format if entry["seconds"]["mean"] < 100 else "{:,.0f}".format),
        )
    print_unwrapped(table)
    _explain_forgetting([entry["forgetting"]["mean"] for entry in summary])
    for entry in {entry["method"]: entry for entry in summary}.values():
        sums = ("total", "equivalent_exemplars")
        parts = [f"{part} {_size_text(s)}" for part, s in entry["storage_bytes"].items() if part not in sums]
        if parts:
            print(f"{entry['method']} stores: {', '.join(parts)}")


def _listed(name: str, values: Sequence[str]) -> str:
    return f"{name}{'s' if len(values) > 1 else ''} {', '.join(values)}"


def _spread_text(spread: Mapping[str, float | None], text: Callable[[float], str]) -> str:
    mean, std = spread["mean"], spread["std"]
    if mean is None:
        return "-"
    return text(mean) if std is None else f"{text(mean)} ± {text(std)}"


def _size_text(spread: Mapping[str, float | None]) -> str:
    """A size; its standard deviation is left out where it is below a byte."""
    exact = {**spread, "std": None} if (spread["std"] or 0.0) < 0.5 else spread
    return _spread_text(exact, lambda num_bytes: short_size(round(num_bytes)))


def print_unwrapped(table: Table) -> None:
    """Print a table at its full width: on a narrow terminal its lines wrap, where rich would cut numbers."""
    from rich.console import Console

    width = Console(width=10_000).measure(table).maximum
    _print_table(table, Console(width=width, highlight=False, markup=False))


def _print_table(table: Table, console: Console) -> None:
    """Print a table without the blanks that rich fills its lines with."""
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def short_size(num_bytes: int) -> str:
    """Write a size to three digits, in its largest unit, for a column of a table: 12.0 MB, 45.1 kB or 512 bytes."""
    for unit, unit_bytes in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= unit_bytes:
            size = num_bytes / unit_bytes
            return f"{size:,.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"
    return f"{num_bytes} bytes"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


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
    from rich.table import Table

    title = f"{found['num_samples']:,} samples of {shape_text(found['shape'])}, {format_size(found['feature_bytes'])} "
    title += f"as float32; predicted from {found['sample']:,}"
    table = Table(title=plain_text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("recorder")
    for size, bits in zip(found["budgets"], found["bits_per_value"], strict=True):
        table.add_column(f"R2 in {short_size(size)}\n{bits:.3g} bits a value", justify="right")
    table.add_column("time", justify="right")
    for name in dict.fromkeys(point["recorder"] for point in found["points"]):
        points = [point for point in found["points"] if point["recorder"] == name]
        times = [point["seconds"] for point in points if point["seconds"] is not None]
        table.add_row(
            plain_text(name),
            *["" if point["r2"] is None else f"{point['r2']:.4f}" for point in points],
            _time_text(max(times), points[0]["trains"]) if times else "",
        )
    print_unwrapped(table)
    if found["take"] is not None:
        middle = found["budgets"][len(found["budgets"]) // 2]
        print(f"take {found['take']}: the quickest of those with the highest R2 in {short_size(middle)} (within 0.001)")
    for name, reason in found["left_out"].items():
        print(plain_text(f"{name} is left out: {reason}"))


def _time_text(seconds: float, trains: bool) -> str:
    text = f"{seconds:,.0f} s" if seconds >= 1 else "below 1 s"
    return f"{text}; longer is better" if trains else text


def info_rows(info: Mapping[str, Any]) -> Rows:
    """What a user needs to know of a recording; `--json` prints everything."""
    from krnet.recorders.base import get_recorder  # imports torch

    classes = "no labels" if info["num_classes"] is None else f"{info['num_classes']:,} classes"
    if info["num_sequences"] is not None:
        classes += f", in {info['num_sequences']:,} sequences"
    settings = get_recorder(info["recorder"]).settings_text(info["settings"])
    return [
        ("recording", info["path"]),
        ("samples", f"{info['num_samples']:,} of {shape_text(info['shape'])}, {classes}"),
        ("features", format_size(info["feature_bytes"])),
        ("file", f"{megabytes(info['bytes'])}, {ratio_text(info['compression_ratio'])}"),
        ("per sample", f"{info['bytes_per_sample']:,.1f} bytes"),
        ("R2", f"{info['r2']:.4f}"),
        *(parts_rows(info) if "num_parts" in info else []),
        ("recorder", f"{info['recorder']}: {settings}" if settings else info["recorder"]),
        ("fit", fit_text(info)),
    ]


def parts_rows(info: Mapping[str, Any]) -> Rows:
    """Of a folder of `krnet encode`: how well its parts are coded, beside the samples that the model was fitted to."""
    worst, misfits = info["worst_part"], info["misfits"]
    rows = [
        ("parts", f"{info['num_parts']:,}; the worst is {worst['name']}, R2 {worst['r2']:.4f}"),
        ("model", f"R2 {info['model_r2']:.4f} on the samples that it was fitted to"),
    ]
    if misfits["num_samples"]:
        ids = ", ".join(map(str, misfits["first_ids"]))
        more = ", ..." if misfits["num_samples"] > len(misfits["first_ids"]) else ""
        rows.append(("not fitted", f"{misfits['num_samples']:,} samples, R2 {misfits['r2']:.4f}: IDs {ids}{more}"))
    return rows


def fit_text(info: Mapping[str, Any]) -> str:
    if not info["iterations"]:
        return f"{info['fit_seconds']:.1f} s" if info["fit_seconds"] >= 0.05 else "none needed"
    return f"{info['fit_seconds']:.1f} s, {info['iterations']:,} iterations"


def outlook_text(info: Mapping[str, Any]) -> str:
    """What more time would buy, after a fit of open length."""
    now, then = (_duration_text(seconds) for seconds in (info["fit_seconds"], info["twice_as_long"]["seconds"]))
    why = "more time would gain little" if info["stopped_by"] == "no_gain" else "on a CPU it takes 5m at most"
    text = f"R2 is {info['r2']:.4f}; expect about {info['twice_as_long']['r2']:.4f} with --time-budget {then}"
    return f"the fit ended after {now}: {why}. {text}"


def _duration_text(seconds: float) -> str:
    """A time as --time-budget takes it."""
    return f"{math.ceil(seconds)}s" if seconds < 100 else f"{round(seconds / 60)}m"


def number_below(value: float, limit: float) -> str:
    """Format a value below `limit` with four digits, or with as many as it takes to look smaller than `limit`."""
    return next(text for digits in range(4, 18) if float(text := f"{value:.{digits}f}") < limit or digits == 17)


def verify_rows(report: Mapping[str, Any]) -> Rows:
    rows = [
        ("recording", f"{report['path']}: all {report['tensors']} tensors as written"),
        ("file", megabytes(report["bytes"])),
        ("decoding", probe_text(report["probe_error"])),
    ]
    if "num_parts" in report:
        lost = report["model_r2"] - report["coded_r2"]
        rows += [("coded with", f"R2 {report['coded_r2']:.5f}, {lost:.5f} below the model's"), *parts_rows(report)]
    if report["r2"] is not None:
        same = "the features it was recorded from" if report["same_features"] else "not those it was recorded from"
        rows += [("features", same), ("R2", f"{report['r2']:.5f} (MSE {report['mse']:.3g})")]
    return rows


def probe_text(error: float | None) -> str:
    if error is None:
        return "not checked: the file holds images, and features are made of them by the trunk; give it with --trunk"
    if error == 0:
        return "a few samples give exactly the values that they gave when the file was written"
    return f"a few samples give the values that they gave when the file was written, to within {error:.3g}"


def extract_rows(written: Mapping[str, Any]) -> Rows:
    samples = f"{written['num_samples']:,} samples of {shape_text(written['shape'])}, {written['dtype']}"
    return [
        ("images", normalisation_text(written)),
        ("features", f"{written['path']}: {samples}"),
        ("labels", "in the same file" + "s" * ("num_shards" in written) if written["has_labels"] else "none"),
        *_written_rows(written),
    ]


def _written_rows(written: Mapping[str, Any]) -> Rows:
    """A file; or shards, and which samples other commands still have to write."""
    if "num_shards" not in written:
        return [("file", megabytes(written["bytes"]))]
    rows = [("shards", f"{written['num_shards']:,}, {megabytes(written['bytes'])}")]
    return [*rows, ("missing", f"samples {written['missing']}")] if written["missing"] else rows


def normalisation_text(written: Mapping[str, Any]) -> str:
    """Say what was done to the images before the trunk."""
    steps = ["divided by 255"] if written["image_dtype"] == "uint8" else []
    for name, verb in (("mean", "minus mean"), ("std", "divided by std")):
        if written[name] is not None:
            steps.append(f"{verb} {', '.join(f'{value:.4g}' for value in written[name])}")
    if written["mean"] is None and written["std"] is None:
        return f"not normalised{', only ' + steps[0] if steps else ''} (--mean and --std would normalise them)"
    return f"normalised: {', then '.join(steps)}"


def replay_rows(written: Mapping[str, Any]) -> Rows:
    rows = [
        (
            "features",
            f"{written['path']}: {written['num_samples']:,} samples of {shape_text(written['shape'])}, float32",
        ),
        ("file", megabytes(written["bytes"])),
    ]
    return rows + ([("labels", written["labels_path"])] if written["labels_path"] else [])


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


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.3f} MB ({num_bytes:,} bytes)"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f} times smaller than the features" if ratio >= 1 else f"{1 / ratio:.2f} times larger than them"


def shape_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "one number"


def show_rate(result: Mapping[str, Any]) -> None:
    """Print a line per point, then a line per failure."""
    from rich.table import Table

    accuracy = result["real_accuracy"]
    real = "" if accuracy is None else f"; the head gets {100 * accuracy:.2f} % of the real features right"
    title = f"{result['features']}: {result['num_samples']:,} samples, {format_size(result['feature_bytes'])}{real}"
    table = Table(title=plain_text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("recorder")
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
