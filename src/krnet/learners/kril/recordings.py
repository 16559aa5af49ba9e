"""The recordings that KRIL keeps: in which files, how each is fitted, and how many bytes it may take.

    features, labels up to a task -> RecorderFit -> files of the task -> replay -> features, labels

Two files hold all samples, the base task's and that of all later tasks; or one, where it is said so (`single`) or where
a recording grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krnet import api
from krnet.data import augment
from krnet.errors import BudgetError
from krnet.learners.base import Context
from krnet.learners.kril.settings import KrilConfig
from krnet.nn.paper_config import PAPER_FITS
from krnet.recorders.base import get_recorder
from krnet.train.classifier import Saving, Watch
from krnet.train.config import SCHEDULES, FitConfig

# Feature maps whose sizes the paper gives a network for.
PRESET_SHAPES: dict[tuple[int, ...], str] = {
    (64, 8, 8): "cifar100",
    (256, 14, 14): "imagenet",
    (256, 16, 16): "imagenet",
}


class RecorderFit:
    """A Work: features into a recording file."""

    shared: dict[str, Any] | None = None
    epochs: int | None = None

    def __init__(
        self,
        name: str,
        path: Path,
        features: Tensor,
        labels: Tensor,
        device: torch.device,
        too_large: Callable[[int], BudgetError],
        **options: Any,
    ):
        """too_large: the refusal of a recording that takes so many bytes, in terms of the whole run's budget."""
        self.name, self.path, self.device = name, path, device
        self.features, self.labels, self.too_large, self.options = features, labels, too_large, options

    def run(self, saving: Saving | None, watch: Watch | None) -> None:
        options = self.options | {"device": str(self.device), "resume": saving is not None and saving.resume}
        if saving is not None and get_recorder(options["recorder"]).trains:
            options["checkpoint_s"] = saving.every_s
        tell = None if watch is None else (lambda status, r2: watch(status))
        try:
            api.record(self.features, self.labels, out=self.path, watch=tell, **options)
        except BudgetError as error:
            raise self.too_large(error.needed) from error

    def result(self) -> dict[str, Tensor]:
        return {"samples": torch.tensor(len(self.labels))}  # the file itself is what counts

    def take(self, result: dict[str, Tensor]) -> None:
        pass


class Recordings:
    """All samples of a run, as far as it has come."""

    def __init__(self, context: Context, config: KrilConfig, trunk: nn.Module, tail: nn.Module):
        """tail: F2 without its classifier, as it is whenever a recording is made."""
        self.context, self.config, self.trunk, self.tail = context, config, trunk, tail
        self.recorder = config.chosen_recorder
        self.counts = [len(context.task_ids(task)) for task in range(context.split.num_tasks)]
        """Samples of each task."""

    @property
    def grows(self) -> bool:
        """The recording leaves samples that it holds as they are, and takes up new ones: one serves all tasks."""
        return self.recorder.grows

    @property
    def one_file(self) -> bool:
        return self.config.single or self.grows

    def files(self, task: int) -> list[Path]:
        """Recordings that hold all samples up to and including a task."""
        folder = self.context.folder
        if self.one_file or task == 0:
            return [folder / (f"recording-{task}.krn" if self.one_file else "base.krn")]
        return [folder / "base.krn", folder / f"later-{task}.krn"]

    def fit(self, task: int, features: Tensor, labels: Tensor) -> RecorderFit:
        """Of all samples that the task's last file is to hold."""
        c = self.config
        by_class = labels.argsort(stable=True)  # labels then need no bytes of their own
        features, labels = features[by_class.to(features.device)], labels[by_class]
        options: dict[str, Any] = {"recorder": self.recorder.name, "seed": self.context.seed_for(task, 3)}
        options |= self._data_settings() | dict(c.recorder_settings)
        if c.budget is not None:
            options["budget"] = self._budget(task)
            if self.grows and task == 0:
                options["room"] = sum(self.counts)
        if self.recorder.trains:
            shape, learned = tuple(features.shape[1:]), self.counts[task] if self.grows else len(labels)
            options |= self._training(shape, learned)
        options |= self._inputs(task, options.get("preset"))
        name = "recorder of the base task" if task == 0 else "recorder"

        def too_large(needed: int) -> BudgetError:
            text = self._too_large(needed, len(labels), options["budget"])
            return BudgetError(f"{text}. A run keeps its budget: start again in another folder (--out)")

        return RecorderFit(name, self.files(task)[-1], features, labels, self.context.device, too_large, **options)

    def _training(self, shape: tuple[int, ...], num_samples: int) -> dict[str, Any]:
        """For a recorder that trains a network: its sizes and its fit, by the maps and how many are learned."""
        c = self.config
        fixed = c.budget is None and "preset" in self.recorder.inputs
        preset = PRESET_SHAPES.get(shape) if fixed else None
        paper = PAPER_FITS.get(preset or "", {}) if c.recorder_schedule == "paper" else {}
        iterations = c.recorder_iterations or paper.get("iterations", SCHEDULES[c.recorder_schedule])
        if c.scaled:
            iterations = max(1, round(iterations * min(1.0, num_samples / self.counts[0])))
        gamma = paper.get("gamma", FitConfig.gamma) if c.gamma is None else c.gamma
        options = {"iterations": iterations, "schedule": c.recorder_schedule, "gamma": gamma, "preset": preset}
        return options | {"head_share": c.head_share}

    def _inputs(self, task: int, preset: str | None) -> dict[str, Any]:
        """What the recorder takes of all that KRIL has: the last recording, F2, F1 and the images of the task."""
        c = self.config
        # Whose samples, in the same order, are the first of this one's.
        earlier = self.files(task - 1)[-1] if task > (0 if self.one_file else 1) else None
        # A network sized by its samples has to grow with them; one of the paper's is large enough from the start.
        warm = self.recorder.trains and not self.grows
        if warm and not (c.warm_start and preset is not None):
            earlier = None
        found: dict[str, Any] = {"head": self.tail if c.kr2 else None, "start": earlier, "trunk": self.trunk}
        found["images"] = self._images(task) if "images" in self.recorder.inputs else None
        chosen = {name: value for name, value in found.items() if name in self.recorder.inputs}
        return chosen | ({"preset": None} if warm and earlier is not None else {})

    def _images(self, task: int) -> Tensor:
        """Those of a task, class by class, as F1 is shown them."""
        ids, data = self.context.task_ids(task), self.context.data
        by_class = ids[self.context.train_labels[ids].argsort(stable=True)]
        return augment.centre(data.train.images[by_class], data.crop)

    def _data_settings(self) -> dict[str, Any]:
        """Of a recorder that has such: how images are normalised."""
        data = self.context.data
        return {n: v for n, v in (("mean", data.mean), ("std", data.std)) if n in self.recorder.setting_names}

    def replay(self, task: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Features (N, c, h, w) and labels of every sample up to a task, as its recordings have them.

        first: the first class of those wanted
        """
        trunk = self.trunk if "trunk" in self.recorder.replay_inputs else None
        features, labels = [], []
        for recording in (api.open(path, self.context.device, trunk=trunk) for path in self.files(task)):
            assert recording.labels is not None
            ids = (recording.labels >= first).nonzero()[:, 0]
            features.append(recording.replay(ids))
            labels.append(recording.labels[ids])
        return torch.cat(features), torch.cat(labels)

    def forget_before(self, task: int) -> None:
        """Those of the last task are still needed; those before it are not, now that its state is written."""
        needed = set(self.files(task - 1))
        for older in range(task - 1):
            for path in self.files(older):
                if path not in needed:
                    path.unlink(missing_ok=True)

    def size_bytes(self, task: int) -> dict[str, int]:
        names = {"base": "base recording", "later": "later recording"}
        files = {path.stem.split("-")[0]: path for path in self.files(task)}
        return {names.get(stem, stem): path.stat().st_size for stem, path in files.items()}

    # ------------------------------------------------------------------ bytes

    def _budget(self, task: int) -> int:
        """What a recording may take after a task.

        One that grows is planned for the samples of all tasks, and those of a task get their share of what is left.
        Of two that do not, the base task's gets its share, the later one all the rest from the start: what is learned
        from replays again and again is worth it.
        """
        assert self.config.budget is not None
        budget, counts = self.config.budget, self.counts
        if self.grows:
            held = self.files(task - 1)[-1].stat().st_size if task > 0 else 0
            return budget if task == 0 else held + (budget - held) * counts[task] // sum(counts[task:])
        if self.config.single:
            return budget
        return budget * counts[0] // sum(counts) if task == 0 else budget - self.files(0)[0].stat().st_size

    def check_budget(self, shape: torch.Size) -> None:
        """Where a recorder's least size is known, a budget below it is refused before the base task is trained."""
        assert self.config.budget is not None
        shares = ((self.counts[0], self._budget(0)), (sum(self.counts), self.config.budget))
        for num_samples, share in shares:
            least = self.recorder.least_bytes(num_samples, shape, self.config.recorder_settings)
            if least > share:
                raise BudgetError(self._too_large(least, num_samples, share))

    def _too_large(self, needed: int, num_samples: int, share: int) -> str:
        """What is wrong with a budget of which a recording of so many samples may take a share, and needs more."""
        recorder, num_all = self.recorder.name, sum(self.counts)
        # Shares go by samples, and so does a size, nearly: every file has a header, too.
        enough = 1000 * math.ceil((1.01 * needed * num_all / num_samples + 5000) / 1000)
        return (
            f"the budget is {self.config.budget} bytes for all {num_all} samples, of which a recording of "
            f"{num_samples} of them may take {share}; recorder {recorder} needs {needed} for it. Give a budget of "
            f"about {enough} bytes (--budget {enough}), leave out settings of your own, or take another recorder"
        )
