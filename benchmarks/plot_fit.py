"""Draw R2 against iterations of two CIFAR-100 fits of the paper's network, from the ledger: docs/fit.png.

python benchmarks/plot_fit.py
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from krnet.io import ledger

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "docs" / "fit.png"
# Recipe -> (label, colour, point of the curve that the label is at, its offset in points and its alignment).
LINES = {
    "cifar100-default": ("krnet's schedule\n(Muon and Adam)", "#c2410c", 0, (-8, 0), "center"),
    "cifar100-paper-setting": ("the paper's schedule\n(Adam)", "#1d4ed8", -1, (8, -12), "top"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=DEFAULT_OUT, help="PNG to write (docs/fit.png)")
    args = parser.parse_args()
    rows = {row["recipe"]: row for row in ledger.read() if row["outcome"] == "ok"}  # the newest row of each recipe
    figure, axes = plt.subplots(figsize=(8, 4), dpi=200, layout="constrained")
    for recipe, (label, colour, place, offset, va) in LINES.items():
        metrics = rows[recipe]["metrics"]
        curve = [(i, r2) for i, _, r2 in metrics["curve"] if r2 > 0]
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=2.5)
        axes.plot(metrics["iterations"], metrics["r2"], "o", color=colour, markersize=8)
        axes.annotate(
            label, curve[place], xytext=offset, textcoords="offset points", ha="right", va=va, color=colour, fontsize=12
        )  # fmt: skip
    ours, paper = (rows[recipe]["metrics"] for recipe in LINES)
    title = (
        f"R² {ours['r2']:.3f} after {ours['iterations']:,} iterations, {paper['r2']:.3f} after {paper['iterations']:,}"
    )
    axes.set_title(title, fontsize=15, fontweight="bold", pad=12)
    axes.set(xscale="log", ylim=(0.5, 1))
    axes.set_xlabel("iterations", fontsize=12)
    axes.set_ylabel("R² of replayed features", fontsize=12)
    axes.set_xticks([300, 1000, 3000, 10_000, 30_000], ["300", "1,000", "3,000", "10,000", "30,000"], fontsize=11)
    axes.minorticks_off()
    axes.margins(x=0.15)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.out)
    print(args.out.name)


if __name__ == "__main__":
    main()
