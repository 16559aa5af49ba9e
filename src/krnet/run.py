"""A finished run: its results, and the network that it ended with.

    learn, or DIR -> load_run -> Run: the contents of run.json as a dict; accuracy, storage_bytes, plot
    DIR/state.krn -> Run.model, Run.predict: images -> logits, labels
    Run -> append_row -> a row of the results ledger; has_row: whether it is there already

The network is read from state.krn when it is first used. The training images are not needed: state.krn also says what
form they had.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from krnet.config import format_size
from krnet.data import augment, protocol
from krnet.data.dataset import DataSet
from krnet.data.pixels import as_pixels
from krnet.data.spec import DataSpec
from krnet.device import exact_math, pick_device
from krnet.errors import RecordingError, RunError
from krnet.io import archive, ledger
from krnet.io.atomic import AnyPath
from krnet.io.run_file import RUN_FILE
from krnet.io.temporary import TemporaryFolder
from krnet.learners import base
from krnet.nn import backbones
from krnet.report import figures
from krnet.run_files import DATA_KEY, STATE_FILE, check_kept_files, read_results, reading
from krnet.train.classifier import Images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_COLUMNS = ("settings", "versions", "class_order", "device", "seed")
"""Keys of run.json that a row of the ledger has beside its metrics."""
STORAGE_SUMS = ("total", "equivalent_exemplars")
"""Keys of `storage_bytes` that are no parts."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run's network is built from, beside its folder. None: the folder says it."""

    data: DataSpec | None = None
    config: base.LearnerConfig | None = None
    backbone: backbones.Factory | None = None
    device: torch.device | str | None = None
    keeper: TemporaryFolder | None = None
    """Keeps a temporary folder for as long as the run is used."""


class ImageClassifier(nn.Module):
    """The classifier of a run: images (N, C, H, W) -> logits (N, classes), column k for label k of the data set.

    Images of uint8 (0 to 255) are cropped and normalised as in training. Images of floats are taken as normalised.
    """

    mean: Tensor
    std: Tensor
    columns: Tensor

    def __init__(self, network: nn.Module, data: DataSpec, columns: Tensor):
        """columns (classes,): the output of the network that belongs to each label."""
        super().__init__()
        self.network, self.crop = network, data.crop
        self.register_buffer("mean", torch.tensor(data.mean))
        self.register_buffer("std", torch.tensor(data.std))
        self.register_buffer("columns", columns)

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_floating_point():
            images = augment.standardise(augment.centre(images, self.crop), self.mean, self.std)
        logits: Tensor = self.network(images)
        return logits[:, self.columns]


class Run(dict[str, Any]):
    """A finished run: its results as a dict, with the contents of run.json, and the network it ended with.

    `krnet.learn` and `krnet.load_run` return one. The examples of its methods use this one:

    >>> import krnet
    >>> digits = krnet.data.load("digits")
    >>> tasks = krnet.protocol.split("natural", num_classes=10, sizes=[5, 5])
    >>> run = krnet.learn("finetune", digits, tasks, settings={"base_epochs": 1, "epochs": 1})
    >>> run["method"], run["tasks"]
    ('finetune', [5, 5])
    """

    def __init__(self, results: dict[str, Any], folder: AnyPath, setup: Setup):
        super().__init__(results)
        self.folder = Path(folder)
        """Where the files of the run are."""
        self._setup = setup

    # ------------------------------------------------------------------ results

    @property
    def accuracy(self) -> list[float | None]:
        """After each task: the share of right answers on the test images of all classes learned so far.

        It is None for a task that was skipped (method joint with `only_last`).

        >>> len(run.accuracy), run.accuracy[-1] == run["last"]
        (2, True)
        """
        return list(self["accuracy"])

    @property
    def storage_bytes(self) -> int:
        """Bytes that the method keeps of old tasks, beside its classifier; `run["storage_bytes"]` has them by part.

        >>> run.storage_bytes  # fine-tuning keeps nothing
        0
        """
        return int(self["storage_bytes"]["total"])

    def plot(self, path: AnyPath | None = None) -> Figure:
        """Draw the accuracy after each task, as a matplotlib figure; with `path`, also write it as a PNG file.

        >>> figure = run.plot("accuracy.png")
        >>> figure.axes[0].get_title()
        'finetune on digits'
        """
        figure: Figure = figures.draw_run(self, path)
        return figure

    def __repr__(self) -> str:
        return f"Run({self['method']} on {self.get('data', 'images')}: {', '.join(self._facts())}, in {self.folder})"

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        seen = np.cumsum(self["tasks"])
        cells = ["–" if value is None else f"{100 * value:.1f}" for value in self.accuracy]
        head = "".join(f"<th>{number}</th>" for number in seen)
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        title = escape(f"{self['method']} on {self.get('data', 'images')}: {', '.join(self._facts())}")
        return (
            f"<table><caption>{title}</caption><tr><th>classes seen</th>{head}</tr>"
            f"<tr><th>accuracy (%)</th>{row}</tr></table>"
        )

    def _facts(self) -> list[str]:
        tasks, average, validation = self["tasks"], self.get("average"), self.get("validation")
        return [
            f"{sum(tasks)} classes in {len(tasks)} tasks",
            *([f"judged on {validation} held-out training images a class"] if validation else []),
            f"last {100 * self['last']:.1f} %",
            *([] if average is None else [f"average {100 * average:.1f} %"]),
            f"{format_size(self.storage_bytes)} kept",
        ]

    # ------------------------------------------------------------------ the network

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes: that of label k is `class_names[k]`.

        >>> run.class_names[:3]
        ('0', '1', '2')
        """
        return self._data.class_names

    @cached_property
    def model(self) -> ImageClassifier:
        """The classifier after the last task, in evaluation mode: images (N, C, H, W) -> logits (N, classes).

        Column k is that of label k of the data set. Images of uint8 (0 to 255) are normalised as in training; images of
        floats are taken as normalised. The module is on the run's device. It is a copy: training or moving it does not
        change what `predict` answers. With icarl the answers of `predict` are not those of this classifier: they come
        from the nearest mean of the images that it keeps.

        >>> run.model(digits.test.images[:4]).shape
        torch.Size([4, 10])
        """
        learner = self._learner
        columns = learner.context.split.position * learner.outputs_per_class
        network = copy.deepcopy(learner.classifier()).requires_grad_(True)
        return ImageClassifier(network, self._data, columns).to(learner.device).eval()

    def predict(self, images: Any) -> Tensor:
        """The class of each image, (N,) int64: labels as the data set numbers them, from 0.

        images  uint8 (N, C, H, W) or (N, H, W, C), grey ones also (N, H, W); of the size that was learned. Or part of a
                data set, such as digits.test

        A method with two classifiers (icarl, lucir) answers with the one that `run["row"]` names and that
        `run["accuracy"]` is measured with.

        >>> labels = run.predict(digits.test.images)
        >>> (labels == digits.test.labels).double().mean().item() == run["last"]
        True
        """
        pixels = as_pixels(images, self._data.image_shape)
        learner, row = self._learner, self["row"]
        order = torch.tensor(self["class_order"])  # (classes,): the label of each output
        answers = [torch.empty(0, dtype=torch.int64)]
        with torch.no_grad(), exact_math():
            for part in pixels.split(base.EVALUATION_BATCH):
                batch = Images(learner.context.data, part, learner.device)
                scores = learner.predict(batch.take(torch.arange(len(part), device=learner.device)))
                if row not in scores:
                    raise RunError(
                        f"{self.folder / RUN_FILE}: row is {row!r:.99}; expected one of {', '.join(scores)}, the "
                        f"classifiers of {self['method']}"
                    )
                answers.append(order[scores[row].argmax(1).cpu()])
        return torch.cat(answers)

    @cached_property
    def _data(self) -> DataSpec:
        if self._setup.data is not None:
            return self._setup.data
        try:
            return DataSpec.from_json(self._state.metadata[DATA_KEY])
        except (RunError, RecordingError):
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise RunError(
                f"{self.folder / STATE_FILE}: does not say how images are normalised, as an earlier version of krnet "
                f"wrote it. Give the data set of the run: krnet.load_run({str(self.folder)!r}, data=...)"
            ) from error

    @cached_property
    def _state(self) -> archive.Archive:
        path = self.folder / STATE_FILE
        if not path.exists():
            raise RunError(
                f"{path}: no such file, and it holds the network of the run. Its results can be read without it; "
                f"for the network, learn again"
            )
        return archive.open_archive(path)

    @cached_property
    def _learner(self) -> base.Learner:
        """The learner as it was after the last task."""
        with reading(self.folder / STATE_FILE, RunError):
            return self._restore()

    def _restore(self) -> base.Learner:
        state, setup = self._state, self._setup
        check_kept_files(self.folder, state.metadata)
        config = self._config() if setup.config is None else setup.config
        order = self["class_order"]
        split = protocol.split(order, num_classes=len(order), sizes=self["tasks"])
        device = pick_device(setup.device)
        with torch.random.fork_rng(devices=[]), exact_math():
            context = base.Context(self._data.blank(device), split, device, self.get("seed", 0), self.folder)
            learner = base.get_learner(self["method"])(context, config)
            try:
                learner.restore(len(self["tasks"]) - 1, state.tensors())
            except (KeyError, RuntimeError, AssertionError) as error:
                raise RunError(
                    f"{self.folder / STATE_FILE}: not the network that {RUN_FILE} beside it describes ({error})"
                ) from error
        for module in learner.modules().values():
            module.eval().requires_grad_(False)
        return learner

    def _config(self) -> base.LearnerConfig:
        learner_class, given = base.get_learner(self["method"]), self._setup.backbone
        settings = learner_class.config_class.renewed(self["settings"])
        name = settings["backbone"]
        if given is not None and backbones.backbone_name(given) != name:
            raise RunError(f"{self.folder}: its backbone is {name}; {backbones.backbone_name(given)} is given")
        if given is None and name not in backbones.BACKBONES:
            raise RunError(
                f"{self.folder}: its backbone was made by the function {name}. Give that function: "
                f"krnet.load_run({str(self.folder)!r}, backbone=...)"
            )
        return base.make_config(learner_class, settings if given is None else {**settings, "backbone": given})


def load_run(
    folder: AnyPath,
    *,
    data: DataSet | None = None,
    backbone: backbones.Factory | None = None,
    device: str | None = None,
) -> Run:
    """Load a finished run of `krnet.learn` or `krnet learn` from its folder; the training images are not needed.

    data      the data set of the run; only for a folder that an earlier version of krnet wrote
    backbone  the function that made the network, if the run had one instead of a name
    device    where to compute: cpu, cuda or cuda:N; by default a GPU if there is one

    >>> import krnet
    >>> made = krnet.learn("finetune", "digits", settings={"base_epochs": 1, "epochs": 1})
    >>> run = krnet.load_run(made.folder)
    >>> run == made
    True
    >>> run.predict(krnet.data.load("digits").test.images[:5]).shape
    torch.Size([5])
    """
    folder = Path(folder)
    results = read_results(folder)
    if data is not None and results.get("data_digest") not in (None, data.digest):
        raise RunError(
            f"{folder}: learned from {results.get('data')} ({results['data_digest']}), and {data.name} ({data.digest}) "
            f"is given. Give the data set of the run, loaded with the same options"
        )
    spec = None if data is None else DataSpec.of(data)
    return Run(results, folder, Setup(data=spec, backbone=backbone, device=device))


def append_row(run: Run, recipe: str, *, command: str | None = None, **metrics: Any) -> dict[str, Any]:
    """Append a run, with all its settings and the bytes of each part that it keeps, to the results ledger.

    recipe   name of the experiment
    metrics  more numbers, beside those of run.json
    """
    files = {part: run.folder / name for part, name in run.get("storage_files", {}).items()}
    parts = {part: size for part, size in run["storage_bytes"].items() if part not in (*files, *STORAGE_SUMS)}
    return ledger.append(
        recipe,
        settings={**run["settings"], "tasks": run["tasks"], "data": run["data"]},
        metrics={name: value for name, value in run.items() if name not in ROW_COLUMNS} | metrics,
        seconds=run["seconds"],
        seed=run["seed"],
        class_order=f"{run['order']} ({run['order_hash']})",
        command=command,
        files=files,
        parts=parts,
    )


def has_row(run: Run) -> bool:
    """Whether the results ledger holds a row of this run. The times of its tasks, to the last digit, identify it."""
    keys = ("method", "order_hash", "tasks", "task_seconds")
    return any(
        row["seed"] == run["seed"] and all(row["metrics"].get(key) == run[key] for key in keys) for row in ledger.read()
    )
