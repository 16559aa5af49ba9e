"""`krnet demo`: learn handwritten digits task after task, in under two minutes and without a download.

    digits, 6 classes, then 2 tasks of 2 -> fine-tuning -> DIR/METHOD/run.json for each,
                                         -> KRIL           a table on stdout, DIR/demo.png
                                         -> all images

Fine-tuning keeps nothing and forgets: the lower bound. The upper bound keeps all images as they are stored, as raw
uint8 pixels. KRIL keeps a recording of feature maps within BUDGET, less than half the bytes of the images and their
labels.
Data: the digits of scikit-learn (UCI, Alpaydin and Kaynak 1998), which come with that package.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import Json, Quiet
from krnet.cli.progress import Display
from krnet.config import format_size

BASE_CLASSES, TASKS = 6, 2
WIDTHS = (8, 32, 64)  # channels of the network's stages; 8 at the cut, which is after the first, make maps of 8x8x8


def narrow_resnet(in_channels: int = 1, **options: Any) -> Any:
    """resnet8 with half the channels in its first stage."""
    from krnet.nn import backbones  # imports torch

    architecture = backbones.Architecture(widths=WIDTHS, blocks_per_stage=1)
    return backbones.ResNet(architecture, in_channels=in_channels, **options)


NETWORK: dict[str, Any] = {
    "base": "paper", "backbone": narrow_resnet, "batch_size": 64, "base_epochs": 20, "epochs": 20,
}  # fmt: skip
BUDGET = 48_000  # bytes; all 1,442 images with their labels take 98,056
# Chosen by the mean accuracy of three seeds on a fifth of the training images, held out. An early cut is best: F1 has
# seen six digits only, and little of what it makes of strokes is particular to them. F2 then has much to learn, so it
# learns as fast as the classifier.
KRIL: dict[str, Any] = {
    "head": "trained",
    "budget": BUDGET,
    "fixed_layers": 3,
    "recorder_iterations": 400,
    "scaled": False,
    "tail_lr": 1.0,
    "aux": 0.1,
}
# Name in the table and in the figure, method, settings.
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("fine-tuning", "finetune", {}),
    ("KRIL", "kril", KRIL),
    ("all images", "joint", {}),
)
SHORT: dict[str, Any] = {"base_epochs": 3, "epochs": 2}  # settings of --short
SHORT_ITERATIONS = 10
SHORT_TITLE = "short demo: too little training to compare the methods"
SHORT_NOTE = (
    "--short trains too briefly to compare the methods: their order may change with more training. For results, run "
    "the demo without --short and with another --out."
)


def run(out: Path, display: Display, *, seed: int = 0, short: bool = False) -> dict[str, Any]:
    """Learn the digits three ways; write a folder for each way and demo.png to `out`; return runs and messages."""
    from krnet import data, task_loop
    from krnet.data import protocol
    from krnet.report import figures

    started = time.perf_counter()
    display.phase("reading the digits")
    digits = data.load("digits")
    split = protocol.split("lucir1993", num_classes=10, base_classes=BASE_CLASSES, tasks=TASKS)
    runs = {}
    for name, method, method_settings in RUNS:
        settings = {**NETWORK, **method_settings, **(SHORT if short else {})}
        if short and "recorder_iterations" in settings:
            settings["recorder_iterations"] = SHORT_ITERATIONS
        folder = out / name.replace(" ", "-").lower()
        # resume=True: an unfinished run goes on, and a finished run with the same settings is returned at once.
        runs[name] = task_loop.learn(
            method, digits, split, out=folder, settings=settings, seed=seed, device="cpu", shared=out / "shared",
            resume=True, watch=display,
        )  # fmt: skip
    display.phase("drawing")
    picture = out / "demo.png"
    figures.draw_demo(picture, runs, note=SHORT_TITLE if short else None)
    return {
        "runs": runs,
        "summary": summary(runs),
        "note": SHORT_NOTE if short else None,
        "picture": str(picture),
        "next": shlex.join([program(), "info", str(out / "kril" / f"recording-{split.num_tasks - 1}.krn")]),
        "seconds": time.perf_counter() - started,
    }


def program() -> str:
    """krnet, or its path as it was called if a shell would not find that one: `make demo` calls .venv/bin/krnet."""
    called, found = Path(sys.argv[0]), shutil.which("krnet")
    if called.name != "krnet" or (found is not None and called.exists() and called.samefile(found)):
        return "krnet"
    return str(called)


def summary(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence with the bytes and the accuracies of KRIL and of all images."""
    stored = {name: format_size(run["storage_bytes"]["total"]) for name, run in runs.items()}
    right = {name: f"{100 * run['last']:.1f} %" for name, run in runs.items()}
    return (
        f"KRIL keeps {stored['KRIL']} and gets {right['KRIL']} of all digits right; keeping all images, as raw pixels, "
        f"takes {stored['all images']} and gets {right['all images']}; keeping nothing gets {right['fine-tuning']}."
    )


def show_table(runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line per method: accuracy after the last task, its average over the tasks, and bytes kept."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("method")
    for name in ("last accuracy", "average", "bytes kept"):
        table.add_column(name, justify="right")
    for name, run in runs.items():
        shares = (output.percent(run[key]) for key in ("last", "average"))
        table.add_row(name, *shares, f"{run['storage_bytes']['total']:,}")
    output.print_unwrapped(table)


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write to; it is created if missing.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the networks and the recordings.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="Train for a few seconds only; the results are poor.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT/METHOD/run.json and OUT/demo.png: accuracy after each task and bytes kept. Takes under 2 minutes.

    Learns handwritten digits two classes at a time in three ways: by fine-tuning, which keeps nothing and forgets; by
    KRIL, which replays the feature maps of old images from a small recording; and by keeping all images. Nothing is
    downloaded.

    \b
    Example:
      krnet demo --out demo
    """
    try:
        with Display(quiet) as display:
            result = run(out, display, seed=seed, short=short)
    except KeyboardInterrupt:
        output.say(f"stopped; what was done is in {out}. To go on, give the same command again")
        raise typer.Exit(130) from None
    if as_json:
        output.show_json(result)
        return
    show_table(result["runs"])
    print(f"\n{result['summary']}")
    if result["note"]:
        print(result["note"])
    print(f"The picture is {result['picture']}; the demo took {result['seconds']:.0f} s.")
    print(f"Next, look into the recording that KRIL kept:\n  {result['next']}")
