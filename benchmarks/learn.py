"""Learn CIFAR-100 (or another data set) task after task and append what came of it to the ledger, one row a method.

    python benchmarks/learn.py kril --set recorder=raw --data-dir DIR --out runs/learn
    python benchmarks/learn.py finetune ewc mas icarl lucir --data-dir DIR --out runs/learn

Methods whose base task is the same train it once, in OUT/shared; several processes may share it, if it is there.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from krnet import data, protocol
from krnet import task_loop as learning
from krnet.config import parse_counts, parse_setting
from krnet.io import ledger


class Print(learning.SilentWatcher):
    """A line per task on stderr."""

    def accuracy(self, method, task, rows):
        print(f"{method} task {task}: {', '.join(f'{k} {100 * v:.2f}' for k, v in rows.items())}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--base-classes", type=int)
    parser.add_argument("--sizes", help="classes of every task instead, such as 50,5x2")
    parser.add_argument("--order", default="lucir1993")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", help="folder of the run under OUT; by default the method's name")
    parser.add_argument("--preset", help="settings to start from, where a method has such (gfr: own)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--recipe", default="learn")
    args = parser.parse_args()
    ledger.commit()  # of the code that runs, not of what it has become by the end
    images = data.load(args.data, args.data_dir)
    sizes = {"sizes": parse_counts(args.sizes)} if args.sizes else {}
    sizes = sizes or {"base_classes": args.base_classes, "tasks": args.tasks}
    split = protocol.split(args.order, num_classes=images.num_classes, **sizes)
    given = dict(parse_setting(item) for item in args.set)
    for method, settings in learning.settings_of(args.methods, given, images, args.preset).items():
        started = time.perf_counter()
        folder = args.out / (args.name or method)
        run = learning.learn(
            method, images, split, out=folder, settings=settings, seed=args.seed, resume=True,
            shared=args.out / "shared", watcher=Print(),
        )  # fmt: skip
        metrics = {k: v for k, v in run.items() if k not in ("settings", "versions", "class_order", "device", "seed")}
        order = f"{split.order_name} ({split.hash})"
        seconds = time.perf_counter() - started
        ledger.append(
            args.recipe, settings={**run["settings"], "tasks": run["tasks"], "data": images.name}, metrics=metrics,
            seconds=seconds, seed=args.seed, class_order=order,
        )  # fmt: skip
        print(json.dumps({k: run[k] for k in ("method", "accuracy", "last", "average", "forgetting", "seconds")}))


if __name__ == "__main__":
    main()
