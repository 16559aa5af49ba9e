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
# Recipe -> (title, colour).
LINES = {
    "cifar100-default": ("default schedule (Muon + Adam), 6,000 iterations", "C0"),
    "cifar100-paper-setting": ("the paper's schedule (Adam), 40,000 iterations", "C1"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=DEFAULT_OUT, help="PNG to write (docs/fit.png)")
    args = parser.parse_args()
    rows = {row["recipe"]: row for row in ledger.read() if row["outcome"] == "ok"}  # the newest row of each recipe
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    for recipe, (title, colour) in LINES.items():
        metrics = rows[recipe]["metrics"]
        curve = [(i, r2) for i, _, r2 in metrics["curve"] if r2 > 0]
        if not rows[recipe]["settings"]["network"]["last_norm"]:
            title += ", no last norm"
        axes.plot(*zip(*curve, strict=True), color=colour, label=f"{title}: R² {metrics['r2']:.3f}")
        axes.plot(metrics["iterations"], metrics["r2"], "o", color=colour)
    axes.axhline(0.98, color="grey", lw=0.8, ls=":")
    axes.set(xscale="log", ylim=(0.5, 1), xlabel="iterations", ylabel="R² of replayed features")
    axes.set_title("25,000 maps of 64×8×8 in one network (preset cifar100, batch 1,000)", fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out)
    print(args.out.name)


if __name__ == "__main__":
    main()
