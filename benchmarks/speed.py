"""Run `krnet bench speed` and append what it measured to the ledger.

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
    parser.add_argument("base", type=Path, nargs="?", help="folder written by cifar100_base.py")
    parser.add_argument("--preset", default="cifar100")
    parser.add_argument("--targets", default="", help="R2 values to reach, on real features only")
    args = parser.parse_args()
    ledger.commit()  # of the code that runs, not of what it has become by the end
    features, labels = (args.base / "features.npy", args.base / "labels.npy") if args.base else (None, None)
    targets = tuple(float(part) for part in args.targets.split(",") if part)
    started = time.perf_counter()
    say = lambda text: print(text, file=sys.stderr)  # noqa: E731
    found = bench(features, labels, preset=args.preset, targets=targets, say=say)
    settings = {"preset": args.preset, "features": "random" if args.base is None else "base task", "targets": targets}
    ledger.append("speed", settings=settings, metrics=found, seconds=time.perf_counter() - started, seed=0)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
