"""The commands that are killed, starved of disk, and run twice at once: their inputs, and the digest of what they make.

    make_inputs(folder) -> features, labels, images, a trunk and recordings to add to, all tiny
    tasks(inputs) -> [Task, ...];  task.words(folder) -> the command line;  task.digest(folder) -> what it made

Equal digests mean equal results, bit for bit: times and dates are left out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

NUM_SAMPLES, NUM_MORE = 72, 24
NUM_COPIES = 48  # of each, for encode: 18 parts of 256
# Parts of the keys whose values say when, or how fast; start, kept_files and checksum are digests of files that
# hold times.
CHANGING = (
    "seconds",
    "time",
    "date",
    "memory",
    "per_second",
    "device",
    "command",
    "versions",
    "start",
    "kept_files",
    "checksum",
)


@dataclass(frozen=True)
class Task:
    name: str
    """The command, and the recorder or method."""
    arguments: tuple[object, ...]
    out: str
    """Name of the output in the folder of a trial."""
    resume: tuple[str, ...] = ()
    """What is added to go on after a stop; without it the command starts anew."""
    earlier: Path | None = None
    """A file that is copied to `out` before the command, which replaces it."""

    def prepare(self, folder: Path) -> Path:
        """Make the folder of a trial; returns its output."""
        folder.mkdir(parents=True)
        out = folder / self.out
        if self.earlier is not None:
            shutil.copy2(self.earlier, out)
        return out

    def words(self, folder: Path, *, again: bool = False) -> list[object]:
        """The command line. again: the command was stopped before."""
        out = folder / self.out
        return [out if word == "OUT" else word for word in self.arguments] + list(self.resume if again else ())

    def digest(self, folder: Path) -> str:
        return json.dumps(describe(folder / self.out), sort_keys=True)


def describe(path: Path) -> Any:
    """What a file or a folder holds that must come out the same."""
    if path.is_dir():
        return {
            str(file.relative_to(path)): describe(file)
            for file in sorted(path.rglob("*"))
            if file.suffix in (".krn", ".json", ".safetensors") and file.name != "features.json"
        }
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text()))
    if path.suffix != ".krn":
        return blake2b(path.read_bytes()).hexdigest() if path.exists() else "nothing"
    if not path.exists():
        return "nothing"
    from krnet.io.archive import open_archive

    opened = open_archive(path)
    opened.verify()
    tensors = {name: [*map(str, opened.spec(name)), hash_of(opened, name)] for name in opened.names}
    return {"tensors": tensors, **without_times(opened.metadata)}


def hash_of(opened: Any, name: str) -> str:
    import torch

    tensor = opened.tensor(name).reshape(-1)
    return blake2b(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() if len(tensor) else "empty"


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not any(part in key for part in CHANGING)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def make_inputs(folder: Path, run: Callable[[list[object]], None]) -> list[Task]:
    """Write the inputs into a folder; `run` is called with the words of commands that are needed for it."""
    import torch
    from PIL import Image

    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    labels = np.arange(NUM_SAMPLES + NUM_MORE) % 4
    centres = generator.normal(size=(4, 6, 5, 5))
    maps = np.maximum(centres[labels] + 0.4 * generator.normal(size=(len(labels), 6, 5, 5)), 0).astype(np.float32)
    for name, part in (("first", slice(NUM_SAMPLES)), ("more", slice(NUM_SAMPLES, None)), ("all", slice(None))):
        np.save(folder / f"{name}.npy", maps[part])
        np.save(folder / f"{name}-labels.npy", labels[part])
    many = np.repeat(maps, NUM_COPIES, axis=0)
    np.save(folder / "many.npy", many + 0.1 * generator.normal(size=many.shape).astype(np.float32))
    np.save(folder / "images.npy", generator.integers(0, 255, (1500, 3, 12, 12), np.uint8))
    torch.jit.trace(torch.nn.AvgPool2d(3), torch.zeros(1, 3, 12, 12)).save(str(folder / "trunk.pt"))
    for label in range(6):
        centre = generator.integers(40, 200, (8, 8, 3))
        for part, number in (("train", 10), ("test", 4)):
            (folder / "pictures" / part / f"class-{label}").mkdir(parents=True)
            for index in range(number):
                pixels = np.clip(centre + generator.integers(-40, 40, centre.shape), 0, 255).astype(np.uint8)
                picture = Image.fromarray(pixels).resize((16, 16))
                picture.save(folder / "pictures" / part / f"class-{label}" / f"{index}.png")
    first = ["record", folder / "first.npy", "--labels", folder / "first-labels.npy", "-q"]
    for name, options in EARLIER.items():
        run([*first, "-o", folder / f"{name}.krn", *options])
    return tasks(folder)


NETWORK = ("--set", "d0=16", "--set", "c0=8", "--set", "c1=8", "--set", "checkpoint_s=0.05")
COMPACT = ("--set", "c1=8", "--set", "blocks=1", "--set", "step=0.2", "--set", "checkpoint_s=0.05")
EARLIER = {
    "krnet": (*COMPACT, "--iterations", "30", "--set", "components=8"), "pca": ("--recorder", "pca"),
    "quantized": ("--recorder", "quantized"), "transform": ("--recorder", "transform"), "pq": ("--recorder", "pq"),
}  # fmt: skip
RECORD = {
    "krnet": (*COMPACT, "--iterations", "300", "--set", "components=8"),
    "krnet budget": ("--budget", "9000", "--iterations", "150", "--set", "checkpoint_s=0.05"),
    "paper": ("--recorder", "paper", *NETWORK, "--iterations", "60"),
    "autoencoder": ("--recorder", "autoencoder", *NETWORK, "--iterations", "60"),
    "pca": ("--recorder", "pca"), "pq": ("--recorder", "pq"), "quantized": ("--recorder", "quantized"),
    "transform": ("--recorder", "transform"), "raw": ("--recorder", "raw"),
}  # fmt: skip
LEARN = {
    "kril": ("--recorder", "pca", "--set", "head_width=32", "--set", "head_epochs=3", "--fixed-layers", "5"),
    "finetune": (), "icarl": (), "lucir": (), "ewc": (),
}  # fmt: skip


def tasks(inputs: Path) -> list[Task]:
    first = ("--labels", inputs / "first-labels.npy", "-q", "-o", "OUT")
    found = [
        Task(f"record {name}", ("record", inputs / "first.npy", *first, *options), "out.krn", ("--resume",))
        for name, options in RECORD.items()
    ]
    both = ("record", inputs / "all.npy", "--labels", inputs / "all-labels.npy", "-q", "-o", "OUT")
    start = (*both, "--start", inputs / "krnet.krn", "--iterations", "200", "--set", "checkpoint_s=0.05")
    found.append(Task("record start", start, "out.krn", ("--resume",)))
    more = (inputs / "more.npy", "--labels", inputs / "more-labels.npy", "-q")
    for name in EARLIER:
        options = ("--iterations", "200") if name == "krnet" else ()
        words = ("append", "OUT", *more, "-o", "OUT", *options)
        found.append(Task(f"append {name}", words, "out.krn", earlier=inputs / f"{name}.krn"))
    for name in ("krnet", "pca"):
        words = ("encode", inputs / "many.npy", "--model", inputs / f"{name}.krn", "--part-samples", "256", "-q", "-o")
        found.append(Task(f"encode {name}", (*words, "OUT"), "maps", ("--resume",)))
    extract = ("extract", inputs / "images.npy", "--trunk", inputs / "trunk.pt", "-o", "OUT", "--batch-size", "4", "-q")
    found.append(Task("extract", extract, "out.safetensors", ("--resume",)))
    found.append(Task("extract shards", (*extract, "--shard-size", "8kB"), "shards", ("--resume",)))
    learn = ("--data", inputs / "pictures", "--base-classes", "2", "--tasks", "2", "-q", "-o", "OUT")
    small = ("--set", "backbone=resnet8", "--epochs", "2", "--set", "base_epochs=3", "--set", "batch_size=16")
    for name, options in LEARN.items():
        found.append(Task(f"learn {name}", ("learn", name, *learn, *small, *options), "run", ("--resume",)))
    recorders = ("--recorders", "pca,quantized,krnet", "--budgets", "8kB,12kB", "--iterations", "150")
    rate = ("bench", "rate", inputs / "first.npy", *first, *recorders)
    found.append(Task("bench rate", rate, "rate"))
    return found
