"""The recordings that KRIL keeps: their files, how each is fitted, and the bytes that each may take.

    feature maps and labels up to a task -> RecorderFit -> files of the task -> replay -> feature maps, labels

All samples are in two files, one for the base task and one for all later tasks; or in one, if `single` is set or the
recorder grows.
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
from krnet.errors import BudgetError, ResumeError
from krnet.io import archive
from krnet.learners.base import Context
from krnet.learners.kril.settings import KrilConfig
from krnet.progress import Watch
from krnet.recorders.base import get_recorder
from krnet.recording import Recording
from krnet.train.classifier import Saving
from krnet.train.config import SCHEDULES, FitConfig

LEAST_BUDGET = 64_000  # by default: few samples of many values need room for what they share


class RecorderFit:
    """A Work that records feature maps in a file."""

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
        """too_large: maps the bytes that the recording needs to an error about the budget of the whole run."""
        self.name, self.path, self.device = name, path, device
        self.features, self.labels, self.too_large, self.options = features, labels, too_large, options

    def run(self, saving: Saving | None, watch: Watch | None) -> None:
        options = self.options | {"device": str(self.device), "resume": saving is not None and saving.resume}
        if saving is not None and get_recorder(options["recorder"]).trains:
            options["checkpoint_s"] = saving.every_s
        try:
            api.record(self.features, self.labels, out=self.path, watch=watch, **options)
        except BudgetError as error:
            raise self.too_large(error.needed) from error

    def result(self) -> dict[str, Tensor]:
        # The recording file is the result; its checksum binds it to the run.
        checksum = bytes.fromhex(archive.open_archive(self.path).checksum)
        return {"samples": torch.tensor(len(self.labels)), "checksum": torch.tensor(list(checksum), dtype=torch.uint8)}

    def take(self, result: dict[str, Tensor]) -> None:
        expected = result.get("checksum")  # files of earlier versions lack it
        if expected is None:
            return
        if bytes(expected.tolist()).hex() != archive.open_archive(self.path).checksum:
            raise ResumeError(
                f"{self.path}: is not the file that this run wrote, but another run's, or changed since. Put the file "
                f"of this run back, or start again in another folder"
            )


class Recordings:
    """The recordings of all samples of the tasks learned so far."""

    def __init__(self, context: Context, config: KrilConfig, trunk: nn.Module, tail: nn.Module, shape: torch.Size):
        """tail: F2 without its classifier. It is the live module: a fit uses its current weights.

        shape: of a sample's features
        """
        self.context, self.config, self.trunk, self.tail, self.shape = context, config, trunk, tail, shape
        self.recorder = config.chosen_recorder
        self.counts = [len(context.task_ids(task)) for task in range(context.split.num_tasks)]
        """Number of samples of each task."""
        self.budget: int | None = None
        """Bytes of all files; None: the recorder's own size."""
        if config.limited:
            one_bit_a_value = sum(self.counts) * shape.numel() // 8
            self.budget = config.budget or max(one_bit_a_value, LEAST_BUDGET)
        self._opened: tuple[Path, Recording] | None = None

    @property
    def grows(self) -> bool:
        """Whether a recording can add new samples and leave the old ones unchanged. One file then holds all tasks."""
        return self.recorder.grows

    @property
    def one_file(self) -> bool:
        return self.config.single or self.grows

    def files(self, task: int) -> list[Path]:
        """Files of the recordings that hold all samples up to and including a task."""
        folder = self.context.folder
        if self.one_file or task == 0:
            return [folder / (f"recording-{task}.krn" if self.one_file else "base.krn")]
        return [folder / "base.krn", folder / f"later-{task}.krn"]

    def fit(self, task: int, features: Tensor, labels: Tensor) -> RecorderFit:
        """Return the fit of the task's last file, as Work. `features`, `labels`: all samples that the file holds."""
        c = self.config
        by_class = labels.argsort(stable=True)  # sorted labels take no bytes in the file
        features, labels = features[by_class.to(features.device)], labels[by_class]
        options: dict[str, Any] = {"recorder": self.recorder.name, "seed": self.context.seed_for(task, 3)}
        options |= self._image_settings() | dict(c.recorder_settings)
        if self.budget is not None:
            options["budget"] = self._budget_bytes(task)
            if self.grows and task == 0:
                options["room"] = sum(self.counts)
        if self.recorder.trains:
            shape, num_learned = tuple(features.shape[1:]), self.counts[task] if self.grows else len(labels)
            options |= self._training_options(shape, num_learned)
        options |= self._recorder_inputs(task, options.get("preset"))

        def too_large(needed: int) -> BudgetError:
            text = self._over_budget(needed, len(labels), options["budget"])
            return BudgetError(f"{text}. A run keeps its budget: start again in another folder (--out)")

        path = self.files(task)[-1]
        return RecorderFit("recorder", path, features, labels, self.context.device, too_large, **options)

    def _training_options(self, shape: tuple[int, ...], num_samples: int) -> dict[str, Any]:
        """Options of a recorder that trains a network: its size and its schedule."""
        c = self.config
        preset = self.recorder.preset_for(shape) if self.budget is None else None
        paper_fit = self.recorder.preset_fit(preset) if c.recorder_schedule == "paper" else {}
        iterations = c.recorder_iterations or paper_fit.get("iterations", SCHEDULES[c.recorder_schedule])
        if c.scaled:
            iterations = max(1, round(iterations * min(1.0, num_samples / self.counts[0])))
        gamma = paper_fit.get("gamma", FitConfig.gamma) if c.gamma is None else c.gamma
        options = {"iterations": iterations, "schedule": c.recorder_schedule, "gamma": gamma, "preset": preset}
        return options | {"head_share": c.head_share}

    def _recorder_inputs(self, task: int, preset: str | None) -> dict[str, Any]:
        """The inputs that the recorder declares, out of: the last recording, F2, F1 and the images of the task."""
        c = self.config
        # Its samples are the first samples of the new recording, in the same order.
        earlier = self.files(task - 1)[-1] if task > (0 if self.one_file else 1) else None
        # A network of the paper has the same size in every task and can start from its predecessor's weights. A network
        # sized by its samples gets larger, so it cannot.
        warm = self.recorder.starts_warm
        if warm and not (c.warm_start and preset is not None):
            earlier = None
        head = self.tail if c.kr2 and c.recorded == "maps" else None
        available: dict[str, Any] = {"head": head, "start": earlier, "trunk": self.trunk}
        available["images"] = self._task_images(task) if "images" in self.recorder.inputs else None
        inputs = {name: value for name, value in available.items() if name in self.recorder.inputs}
        return inputs | ({"preset": None} if warm and earlier is not None else {})

    def _task_images(self, task: int) -> Tensor:
        """Images of a task, class by class, cropped to the window that F1 sees."""
        ids, data = self.context.task_ids(task), self.context.data
        by_class = ids[self.context.train_labels[ids].argsort(stable=True)]
        return augment.centre(data.train.images[by_class], data.crop)

    def _image_settings(self) -> dict[str, Any]:
        """Mean and standard deviation of the images, if they are settings of the recorder."""
        data = self.context.data
        return {n: v for n, v in (("mean", data.mean), ("std", data.std)) if n in self.recorder.setting_names}

    def replay(self, task: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Replay the feature maps (N, c, h, w) and labels (N,) of all samples up to a task.

        first: skip samples of classes before this position in the class order
        """
        trunk = self.trunk if "trunk" in self.recorder.replay_inputs else None
        features, labels = [], []
        for recording in (api.open(path, self.context.device, trunk=trunk) for path in self.files(task)):
            assert recording.labels is not None
            ids = (recording.labels >= first).nonzero()[:, 0]
            features.append(recording.replay(ids))
            labels.append(recording.labels[ids])
        return torch.cat(features), torch.cat(labels)

    def project(self, task: int, maps: Tensor) -> Tensor:
        """The maps (B, c, h, w) as the recording of a task would replay them, if they were in it."""
        (path,) = self.files(task)
        if self._opened is None or self._opened[0] != path:
            self._opened = path, api.open(path, self.context.device)
        return self._opened[1].project(maps)

    def delete_before(self, task: int) -> None:
        """Delete recordings of tasks before `task - 1`, except files that it uses. Its state must be written."""
        needed = set(self.files(task - 1))
        for older in range(task - 1):
            for path in self.files(older):
                if path not in needed:
                    path.unlink(missing_ok=True)

    def parts(self, task: int) -> dict[str, Path]:
        """The files of `files`, by the name that results list them under."""
        names = {"base": "base recording", "later": "later recording"}
        files = {path.stem.split("-")[0]: path for path in self.files(task)}
        return {names.get(stem, stem): path for stem, path in files.items()}

    # ------------------------------------------------------------------ bytes

    def _budget_bytes(self, task: int) -> int:
        """Bytes that the task's last file may take.

        A recording that grows is planned for the samples of all tasks; the samples of each task get their share of the
        bytes that remain. Of two files that do not grow, the base task's gets its share by samples, and the later one
        gets all the rest from the start: its samples are recorded again from replays in every task, and each time adds
        an error.
        """
        assert self.budget is not None
        budget, counts = self.budget, self.counts
        if self.grows:
            current_bytes = self.files(task - 1)[-1].stat().st_size if task > 0 else 0
            return (
                budget if task == 0 else current_bytes + (budget - current_bytes) * counts[task] // sum(counts[task:])
            )
        if self.config.single:
            return budget
        return budget * counts[0] // sum(counts) if task == 0 else budget - self.files(0)[0].stat().st_size

    def check_budget(self) -> None:
        """Raise an error before the base task is trained if the budget is below the recorder's smallest size."""
        if self.budget is None:
            return
        shares = ((self.counts[0], self._budget_bytes(0)), (sum(self.counts), self.budget))
        for num_samples, share_bytes in shares:
            min_bytes = self.recorder.floor_bytes(num_samples, self.shape, self.config.recorder_settings)
            if min_bytes > share_bytes:
                raise BudgetError(self._over_budget(min_bytes, num_samples, share_bytes))

    def _over_budget(self, needed: int, num_samples: int, share: int) -> str:
        """The error message for a recording of `num_samples` that needs more bytes than its share of the budget."""
        recorder, num_all = self.recorder.name, sum(self.counts)
        # Shares and sizes are proportional to the samples; 1 % and 5,000 bytes make up for the header of each file.
        enough = 1000 * math.ceil((1.01 * needed * num_all / num_samples + 5000) / 1000)
        return (
            f"the budget is {self.budget} bytes for all {num_all} samples, of which a recording of "
            f"{num_samples} of them may take {share}; recorder {recorder} needs {needed} for it. Give a budget of "
            f"about {enough} bytes (--budget {enough}), leave out settings of your own, or take another recorder"
        )
