"""`krnet demo`: learn handwritten digits task after task, in under three minutes and without a download.

    digits, 4 classes, then 3 tasks of 2 -> KRIL                 -> DIR/METHOD/run.json for each,
                                         -> fine-tuning             a table on stdout, DIR/demo.png
                                         -> KRIL, real features
                                         -> all images

Fine-tuning, which keeps nothing, is the lower bound; real features and all images are upper bounds.
Data: the digits of scikit-learn (UCI, Alpaydin and Kaynak 1998), which come with that package.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import Json, Quiet
from krnet.cli.progress import Display

# A small network and small batches: a run of three minutes on two cores then has enough updates.
RECORDER: dict[str, Any] = {"group_size": 64, "d0": 96, "c0": 48, "c1": 32, "stride": 2, "batch_size": 200}
NETWORK: dict[str, Any] = {"backbone": "resnet8", "batch_size": 64, "base_epochs": 20, "epochs": 20}
KRIL: dict[str, Any] = {"fixed_layers": 5, "recorder_iterations": 250, "recorder_settings": RECORDER, "scaled": False}
# Name in the table and in the figure, method, settings.
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("fine-tuning", "finetune", {}),
    ("KRIL", "kril", KRIL),
    ("KRIL, real features", "kril", {"fixed_layers": 5, "recorder": "raw"}),
    ("all images", "joint", {}),
)
SHORT: dict[str, Any] = {"base_epochs": 3, "epochs": 2}  # settings of --short
SHORT_ITERATIONS = 10


def run(out: Path, display: Display, *, seed: int = 0, short: bool = False) -> dict[str, Any]:
    """Learn the digits four ways; write a folder for each way and demo.png to `out`; return the runs."""
    from krnet import data, task_loop
    from krnet.data import protocol
    from krnet.report import figures

    started = time.perf_counter()
    display.phase("reading the digits")
    digits = data.load("digits")
    split = protocol.split("lucir1993", num_classes=10, base_classes=4, tasks=3)
    runs = {}
    for name, method, method_settings in RUNS:
        settings = {**NETWORK, **method_settings, **(SHORT if short else {})}
        if short and "recorder_iterations" in settings:
            settings["recorder_iterations"] = SHORT_ITERATIONS
        folder = out / name.replace(",", "").replace(" ", "-").lower()
        # resume=True: an unfinished run goes on, and a finished run with the same settings is returned at once.
        runs[name] = task_loop.learn(
            method, digits, split, out=folder, settings=settings, seed=seed, device="cpu", shared=out / "shared",
            resume=True, watch=display,
        )  # fmt: skip
    display.phase("drawing")
    picture = out / "demo.png"
    figures.draw_demo(picture, runs)
    return {"runs": runs, "picture": str(picture), "seconds": time.perf_counter() - started}


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to; it is created if missing.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the networks and the recordings.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="Train for a few seconds only; the results are poor.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT/METHOD/run.json and OUT/demo.png: accuracy after each task and bytes kept. Takes under 3 minutes.

    Learns handwritten digits two classes at a time in four ways: by KRIL, which replays the feature maps of old images
    from a recording; by fine-tuning, which forgets; and by keeping the real features or all images, the upper bounds.
    Nothing is downloaded.

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
    else:
        output.show_runs([{**made, "method": name} for name, made in result["runs"].items()])
        print(f"picture: {result['picture']}; took {result['seconds']:.0f} s")
