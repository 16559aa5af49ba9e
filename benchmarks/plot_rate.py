"""Draw bytes against R2 and replay accuracy from rows of the ledger that benchmarks/rate.py made, wherever it ran.

    results/ledger.jsonl (recipe rate) -> the longest fit of every recorder at every budget -> rate.png, a line each

Of fits as long as each other, the newest. Rows at fixed settings (--measured) and of experiments with a recorder's
settings are left out; a width that was given is no experiment where today's code chooses the same.

    python benchmarks/plot_rate.py -o rate.png
"""

import argparse
import json
from pathlib import Path

import numpy as np

from krnet.config import parse_setting
from krnet.recorders import base
from krnet.recorders.compact.budget import WIDE, affordable
from krnet.recorders.compact.network import CompactConfig
from krnet.report.figures import draw, series_name

ANY = 10**9  # the budget of rows at fixed settings
NUM_SAMPLES, SHAPE = 25_000, (64, 8, 8)  # of the base task
FULL = 10**9  # iterations of a fit that was not cut short


def given(row, variants):
    """The settings that a row's recorder was given; rows of before they were noted tell it by the settings they had."""
    settings = row["settings"]
    if "given" in settings:
        usual = {"c1": chosen_width(settings["budget"])} if settings["recorder"] == "krnet" else {}
        return {name: value for name, value in settings["given"].items() if usual.get(name) != value}
    return next((v for v in variants if all(settings.get(name) == value for name, value in v.items())), {})


def chosen_width(budget):
    """Of krnet's network, in a fit of full length."""
    return affordable(SHAPE, budget, WIDE, lambda c1: CompactConfig(step=1.0, components=1, c1=c1))[0]


def longest(rows):
    """(recorder, settings it was given, budget) -> point; none of experiments."""
    found, lengths = {}, {}
    for row in rows:
        if row["recipe"] != "rate" or row["outcome"] != "ok" or row["settings"]["budget"] >= ANY:
            continue
        if row["settings"].get("num_samples", NUM_SAMPLES) != NUM_SAMPLES:
            continue  # of small sets
        recorder = base.get_recorder(row["settings"]["recorder"])
        variants = [dict(parse_setting(part) for part in text.split(":")) for text in recorder.variants]
        settings = given(row, variants)
        if settings and settings not in variants:
            continue
        point = {**row["metrics"], "recorder": recorder.name, "given": settings, "budget": row["settings"]["budget"]}
        key, length = (recorder.name, json.dumps(settings), point["budget"]), row["settings"]["iterations"] or FULL
        if length >= lengths.get(key, 0):
            found[key], lengths[key] = point, length
    return found


def share_of_krnet(point, points):
    """Of a point's bytes, what krnet needs for its R2: between krnet's points, error and bytes on log scales.

    Nothing is known (nan) of what is worse than krnet's worst, or better than its best.
    """
    ours = sorted((1 - p["r2"], p["bytes"]) for p in points if (p["recorder"], p["given"]) == ("krnet", {}))
    error, size = np.log(np.array(ours, dtype=float)).T
    return np.exp(np.interp(np.log(1 - point["r2"]), error, size, left=np.nan, right=np.nan)) / point["bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledger", type=Path, default=Path("results/ledger.jsonl"))
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.ledger.read_text().splitlines()]
    points = longest(rows)
    order = {name: number for number, name in enumerate(base.recorder_names())}
    chosen = [points[key] for key in sorted(points, key=lambda key: (order[key[0]], key[1] != "{}", key[1:]))]
    real = {point["real_accuracy"] for point in chosen}
    assert len(real) == 1, f"rows of {len(real)} sets of features: real accuracies {real}"
    result = {"num_samples": NUM_SAMPLES, "shape": [*SHAPE], "head": "F2", "real_accuracy": real.pop()}
    result |= {"points": chosen}
    draw(args.out, result)
    for point in chosen:
        name, accuracy = series_name(point["recorder"], point["given"]), 100 * point["replay_accuracy"]
        share = f"krnet: {share_of_krnet(point, chosen):.2f} of the bytes".replace("nan", "   ?")
        size = f"{point['bytes'] / 1e6:8.3f} MB"
        print(f"{name:26} {size}  R2 {point['r2']:.4f}  {accuracy:.2f} %  {share}  {point['device']}")


if __name__ == "__main__":
    main()
