"""The whole of it on real data, in minutes and without a download: handwritten digits, learned task after task.

    digits 0..9 in an order of their own: 4 classes, then 3 tasks of 2 -> KRIL -> accuracy after each task, bytes
    the same by fine-tuning (lower bound), on all images (upper), and by KRIL with the real features in memory
                                                                       -> demo.png, DIR/METHOD/run.json

Data: scikit-learn's digits (UCI, Alpaydin and Kaynak 1998), shipped with the package.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import Json, Quiet
from krnet.cli.progress import Display, ProgressLine

# Small on purpose, and fitted with small batches: many quick updates suit a few minutes on two cores.
RECORDER: dict[str, Any] = {"group_size": 64, "d0": 96, "c0": 48, "c1": 32, "stride": 2, "batch_size": 200}
NETWORK: dict[str, Any] = {"backbone": "resnet8", "batch_size": 64, "base_epochs": 20, "epochs": 20}
KRIL: dict[str, Any] = {"fixed_layers": 5, "recorder_iterations": 250, "recorder_settings": RECORDER, "scaled": False}
# Name in the table and the picture, method, its settings.
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("fine-tuning", "finetune", {}),
    ("KRIL", "kril", KRIL),
    ("KRIL, real features", "kril", {"fixed_layers": 5, "recorder": "raw"}),
    ("all images", "joint", {}),
)
SHORT: dict[str, Any] = {"base_epochs": 3, "epochs": 2}


def run(out: Path, display: Display, *, seed: int = 0, short: bool = False) -> dict[str, Any]:
    """Learn the digits four ways; writes a folder for each and demo.png in `out`, and returns the runs."""
    from krnet import data, task_loop
    from krnet.data import protocol
    from krnet.report import figures

    started = time.perf_counter()
    display.phase("reading the digits")
    digits = data.load("digits")
    split = protocol.split("lucir1993", num_classes=10, base_classes=4, tasks=3)
    runs = {}
    for name, method, own in RUNS:
        settings = {**NETWORK, **own, **(SHORT if short else {})}
        if short and "recorder_iterations" in settings:
            settings["recorder_iterations"] = 10
        folder = out / name.replace(",", "").replace(" ", "-").lower()
        # Begun before and not finished: taken up. Finished with these settings: shown as it is.
        runs[name] = task_loop.learn(
            method, digits, split, out=folder, settings=settings, seed=seed, device="cpu", shared=out / "shared",
            resume=True, watcher=ProgressLine(display),
        )  # fmt: skip
    display.phase("drawing")
    picture = out / "demo.png"
    figures.draw_demo(picture, runs)
    return {"runs": runs, "picture": str(picture), "seconds": time.perf_counter() - started}


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to; made if missing.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seeds the networks and the recordings.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="A few updates only: seconds, and poor results.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes demo/METHOD/run.json and demo/demo.png, accuracy task by task and bytes kept; takes under three minutes.

    Learns handwritten digits two classes at a time: by KRIL, which replays the feature maps of old images from a
    recording; by fine-tuning, which forgets; and by keeping real features or all images, the upper bounds. Nothing is
    downloaded.

    \b
    Example:
      krnet demo --out demo
    """
    try:
        with Display(quiet) as display:
            found = run(out, display, seed=seed, short=short)
    except KeyboardInterrupt:
        output.say(f"stopped; what was done is in {out}. To go on, give the same command again")
        raise typer.Exit(130) from None
    if as_json:
        output.show_json(found)
    else:
        output.show_runs([{**made, "method": name} for name, made in found["runs"].items()])
        print(f"picture: {found['picture']}; took {found['seconds']:.0f} s")
