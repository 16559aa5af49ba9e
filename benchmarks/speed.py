"""Run `krnet bench speed` and append its measurements to the ledger.

python benchmarks/speed.py                       # random maps, preset cifar100: about five minutes on two CPU cores
python benchmarks/speed.py runs/base --targets 0.956,0.98
"""

import argparse
import json
import sys
import time
from pathlib import Path

from krnet.bench.speed import bench
from krnet.io import ledger


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, nargs="?", help="folder written by cifar100_base.py (random maps)")
    parser.add_argument("--preset", default="cifar100", help="network sizes of the paper (%(default)s)")
    parser.add_argument(
        "--targets", default="", help="R2,R2,...: also time a fit to each, on the features of BASE (none)"
    )
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends
    features, labels = (args.base / "features.npy", args.base / "labels.npy") if args.base else (None, None)
    targets = tuple(float(part) for part in args.targets.split(",") if part)
    started = time.perf_counter()
    say = lambda text: print(text, file=sys.stderr)  # noqa: E731
    result = bench(features, labels, preset=args.preset, targets=targets, say=say)
    settings = {"preset": args.preset, "features": "random" if args.base is None else "base task", "targets": targets}
    ledger.append("speed", settings=settings, metrics=result, seconds=time.perf_counter() - started, seed=0)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
