"""Draw R2 and replay accuracy against bytes, from the ledger rows of recipe rate.

    results/ledger.jsonl (recipe rate) -> the longest fit of each recorder at each budget -> rate.png, a line per point

Of several fits of the same length the newest is drawn. A recorder has one line: at each budget the best of its
variants (pca has one for a classifier), by R2 at the left and by replay accuracy at the right. Left out are rows at
fixed settings (--measured) and rows of experiments: settings that are neither the recorder's defaults nor one of its
variants. A given width (c1) of krnet is no experiment if a budget would choose the same width today.

    python benchmarks/plot_rate.py -o rate.png
"""

import argparse
import json
from pathlib import Path

import numpy as np

from krnet.config import series_name
from krnet.recorders import base
from krnet.recorders.compact.budget import LONG_FIT_LIMITS, affordable_widths
from krnet.recorders.compact.network import CompactConfig
from krnet.report.figures import draw_rate

NO_LIMIT_BYTES = 10**9  # the budget of rows at fixed settings
NUM_SAMPLES, SHAPE = 25_000, (64, 8, 8)  # features of the base task
FULL_LENGTH = 10**9  # stands for the iterations of a fit without --iterations, which is the longest


def given_settings(row, recorder):
    """Return the settings that a recorder was given, except those that it would choose itself.

    Older rows do not name the given settings: they belong to the variant whose settings they have.
    """
    settings = row["settings"]
    if "given" in settings:
        chosen = {"c1": chosen_width(settings["budget"])} if recorder.name == "krnet" else {}
        return {name: value for name, value in settings["given"].items() if chosen.get(name) != value}
    variants = (v for v in recorder.variants if all(settings.get(name) == value for name, value in v.items()))
    return next(variants, {})


def chosen_width(budget):
    """Return the width (c1) of krnet's network that a budget chooses for a fit of full length."""
    return affordable_widths(SHAPE, budget, LONG_FIT_LIMITS, lambda c1: CompactConfig(step=1.0, components=1, c1=c1))[0]


def longest_fits(rows):
    """Return the points to draw, by (recorder, given settings as JSON, budget)."""
    points, lengths = {}, {}
    for row in rows:
        if row["recipe"] != "rate" or row["outcome"] != "ok" or row["settings"]["budget"] >= NO_LIMIT_BYTES:
            continue
        if row["settings"].get("num_samples", NUM_SAMPLES) != NUM_SAMPLES:
            continue  # trial runs on few samples
        recorder = base.get_recorder(base.recorder_name(row["settings"]["recorder"], row["settings"]))
        settings = given_settings(row, recorder)
        if settings and settings not in recorder.variants:
            continue
        point = {**row["metrics"], "recorder": recorder.name, "given": settings, "budget": row["settings"]["budget"]}
        key = recorder.name, json.dumps(settings), point["budget"]
        length = row["settings"]["iterations"] or FULL_LENGTH
        if length >= lengths.get(key, 0):
            points[key], lengths[key] = point, length
    return points


def share_of_krnet(point, points):
    """Return the bytes that krnet needs for the R2 of a point, as a share of that point's bytes.

    They are interpolated between krnet's points, log bytes over log error; NaN outside the range of krnet's errors.
    """
    ours = sorted((1 - p["r2"], p["bytes"]) for p in points if (p["recorder"], p["given"]) == ("krnet", {}))
    error, size = np.log(np.array(ours, dtype=float)).T
    return np.exp(np.interp(np.log(1 - point["r2"]), error, size, left=np.nan, right=np.nan)) / point["bytes"]


def message(points):
    """Return the title: what the picture shows, if it does."""
    r2 = {}
    for point in points:
        r2.setdefault(point["budget"], {}).setdefault(point["recorder"], []).append(point["r2"])
    if all(max(found, key=lambda name: max(found[name])) == "krnet" for found in r2.values()):
        return f"krnet keeps the most of {NUM_SAMPLES:,} feature maps at every file size"
    return f"{NUM_SAMPLES:,} feature maps, kept by each recorder"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledger", type=Path, default=Path("results/ledger.jsonl"), help="rows to read (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, required=True, help="PNG to write")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.ledger.read_text().splitlines()]
    points = longest_fits(rows)
    order = {name: number for number, name in enumerate(base.recorder_names())}
    chosen = [points[key] for key in sorted(points, key=lambda key: (order[key[0]], key[1] != "{}", key[1:]))]
    real = {point["real_accuracy"] for point in chosen}
    assert len(real) == 1, f"rows of {len(real)} sets of features: real accuracies {real}"
    result = {"num_samples": NUM_SAMPLES, "shape": [*SHAPE], "head": "F2", "real_accuracy": real.pop()}
    result |= {"points": chosen}
    draw_rate(args.out, result, title=message(chosen), best_settings=True)
    for point in chosen:
        name, accuracy = series_name(point["recorder"], point["given"]), 100 * point["replay_accuracy"]
        share = f"krnet: {share_of_krnet(point, chosen):.2f} of the bytes".replace("nan", "   ?")
        size = f"{point['bytes'] / 1e6:8.3f} MB"
        print(f"{name:26} {size}  R2 {point['r2']:.4f}  {accuracy:.2f} %  {share}  {point['device']}")


if __name__ == "__main__":
    main()
