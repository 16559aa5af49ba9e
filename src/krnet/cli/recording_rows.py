"""What the commands of a recording print: `krnet record`, `info`, `verify`, `replay`, `append` and `encode`.

info, verify report, ... -> *_rows -> (name, text) pairs, for output.show
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from krnet.cli.output import Rows, megabytes, ratio_text, shape_text
from krnet.config import format_size


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
        (_kind(info), f"{megabytes(info['bytes'])}, {ratio_text(info['compression_ratio'])}"),
        ("per sample", f"{info['bytes_per_sample']:,.1f} bytes"),
        ("R2", f"{info['r2']:.4f}"),
        *(parts_rows(info) if "num_parts" in info else []),
        ("recorder", f"{info['recorder']}: {settings}" if settings else info["recorder"]),
        ("fit", fit_text(info)),
    ]


def _kind(info: Mapping[str, Any]) -> str:
    return "folder" if "num_parts" in info else "file"


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
    why = "more time would gain little" if info["stopped_by"] == "no_gain" else "by default a CPU fit takes 5m at most"
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
        (_kind(report), megabytes(report["bytes"])),
        ("decoding", probe_text(report["probe_error"])),
    ]
    if "num_parts" in report:
        rows += [("coded with", f"R2 {report['coded_r2']:.5f}"), *parts_rows(report)]
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


def replay_rows(written: Mapping[str, Any]) -> Rows:
    rows = [
        (
            "features",
            f"{written['path']}: {written['num_samples']:,} samples of {shape_text(written['shape'])}, float32",
        ),
        ("file", megabytes(written["bytes"])),
    ]
    return rows + ([("labels", written["labels_path"])] if written["labels_path"] else [])
