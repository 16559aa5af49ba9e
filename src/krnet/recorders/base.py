"""The contract of a way to store features, and the registry of all of them.

    Job (features, labels, settings) -> Recorder.fit    -> Content (tensors, settings)   what the file holds
    Content or an opened file        -> Recorder.replay -> Replayer: ids (B,) -> features (B, *shape)

A recorder knows nothing of files: `tensor(name, shape=..., dtype=...)` reads from a Content before it is saved and
from an Archive afterwards, so that what is measured is what is stored.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from krnet.config import check_choice, unknown_setting
from krnet.errors import InputError, MissingTensorError, SettingError, TensorShapeError, UnknownRecorderError
from krnet.features.samples import Samples
from krnet.features.source import FeatureSource
from krnet.features.stats import FeatureStats
from krnet.io.archive import TensorStore
from krnet.train.config import FitConfig
from krnet.train.loop import Status

PROBE_SAMPLES = 8
PROBE_VALUES = 64  # per sample, evenly spaced: 2 KB in all, enough to notice a wrong decoder
FIT_NAMES = frozenset(f.name for f in fields(FitConfig))
FITTING_NONE = frozenset({"target_r2", "seed", "device"})  # those that mean something where no network is fitted


class Earlier(TensorStore, Protocol):
    """A finished recording to start from: what a recorder may ask of a Recording, which is defined further down."""

    @property
    def path(self) -> Path: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def recorder(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def labels(self) -> Tensor | None: ...
    def __len__(self) -> int: ...
    def replay(self, ids: Tensor) -> Tensor: ...
    def info(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Job:
    """Everything a recorder may need to fit."""

    source: FeatureSource
    samples: Samples
    stats: FeatureStats
    fit: FitConfig
    device: torch.device
    preset: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The recorder's own settings, as given by the caller."""
    head: nn.Module | None = None
    start: Earlier | None = None
    room: int | None = None
    """Samples that the file is to hold when it has grown: a budget is what it may take then."""
    checkpoint: Path | None = None
    resume: bool = False
    watch: Callable[[Status, float], None] | None = None
    """Told the state of the fit and the R2 of the latest batches."""

    @property
    def num_planned(self) -> int:
        """Samples that a budget is for."""
        return max(len(self.source), self.room or 0)


@dataclass(frozen=True)
class Content:
    """What a recorder stores."""

    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    """Plain JSON values: all that `replay` needs beside the tensors."""
    iterations: int = 0
    seconds: float = 0.0
    stopped_by: str = "done"

    def tensor(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self.tensors:
            raise MissingTensorError(f"no tensor {name!r} among {', '.join(self.tensors)}")
        found = self.tensors[name]
        if (shape is not None and tuple(shape) != tuple(found.shape)) or dtype not in (None, found.dtype):
            raise TensorShapeError(f"tensor {name!r} is {found.dtype} {tuple(found.shape)}; expected {dtype} {shape}")
        return found


class Replayer(ABC):
    """Reads samples back."""

    trunk: nn.Module | None = None
    """What images are passed through again, given by whoever records or opens: files hold no networks to run."""

    @abstractmethod
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        """ids (B,) int64 on the CPU -> float32 features (B, *shape) in the original scale, on the device."""


class Recorder(ABC):
    name: ClassVar[str]
    setting_names: ClassVar[frozenset[str]] = frozenset()
    """Settings of its own that a caller may give."""
    fast_is_exact: ClassVar[bool] = False
    """`fast` replays are the same as exact ones on every device."""
    takes_head: ClassVar[bool] = False
    """It fits a network, which may be shown its error through a head (L_kr2)."""
    takes_trunk: ClassVar[bool] = False
    """It stores images, and replays them through a trunk: its settings `images`, `trunk`, `mean` and `std` say which.

    Given an earlier recording to start from (`Job.start`), it needs the images of the samples behind those alone.
    """
    grows: ClassVar[bool] = False
    """Given a recording of its own to start from, it leaves that one's samples as they are and records the others."""
    needs_only_features: ClassVar[bool] = True
    """Features are all that it must be given: `bench rate` then tries it unasked."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Settings, as name=value:name=value, that `bench rate` then tries beside its own: worse R2, better replays."""

    @abstractmethod
    def fit(self, job: Job) -> Content: ...

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """Settings of its own under which the file has at most `budget` bytes and is as good as it can be (R2).

        All bytes of the file count: header, labels, tables, weights. Settings that the caller gave (`job.settings`)
        stay as they are, and only the others are searched. Where no setting is that small, the smallest one.
        """
        return dict(job.settings)  # of a recorder that has one size

    def least_bytes(self, num_samples: int, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        """What no file of so many samples goes below, as far as that is known before there are features."""
        return 0

    def stops_at_target(self, preset: str | None, start: object, settings: Mapping[str, Any]) -> bool:
        """What target_r2 means: the end of a fit whose size these give, or, if not that, a size to be found."""
        return False

    def likely_bytes(self, job: Job, target_r2: float) -> tuple[float, float] | None:
        """About the budget that an R2 takes, and how much of it every file takes: where the search for it begins.

        None: nothing is known without a fit.
        """
        return None

    @abstractmethod
    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> Replayer: ...


def overhead_bytes(job: Job, num_tensors: int, settings: Mapping[str, Any]) -> int:
    """Most that a file takes beside the recorder's own tensors, of which it has so many: header, labels and probe.

    From above, by less than a kilobyte or so: how many digits the header's numbers have is known at the end only.
    """
    metadata, tensors = job.samples.describe()
    text = json.dumps(json.dumps([metadata, settings], separators=(",", ":")))  # as the header has it: text in text
    probe = min(PROBE_SAMPLES, len(job.source)) * (8 + 4 * min(PROBE_VALUES, math.prod(job.source.shape)))
    labels = sum(tensor.nbytes for tensor in tensors.values())
    return 1400 + 170 * (num_tensors + len(tensors)) + len(text) + probe + labels


def planned_overhead(job: Job, num_tensors: int, settings: Mapping[str, Any]) -> int:
    """`overhead_bytes` when the file has grown: labels and classes as many more as there are samples."""
    metadata, tensors = job.samples.describe()
    labels = len(json.dumps(metadata["classes"])) + sum(tensor.nbytes for tensor in tensors.values())
    share = (job.num_planned - len(job.source)) / len(job.source)
    return overhead_bytes(job, num_tensors, settings) + math.ceil(share * labels)


def refuse_network(job: Job, recorder: str, options: Sequence[str] = ("preset", "head")) -> None:
    for option in options:
        if getattr(job, option) is not None:
            raise InputError(f"{option} is given, and recorder {recorder} has no network to use it; leave {option} out")


def check_names(recorder: Recorder, given: Iterable[str]) -> None:
    """Refuse settings that a recorder does not have, and those of a fit where it fits nothing."""
    of_fit = FIT_NAMES if recorder.takes_head else FITTING_NONE
    for name in given:
        if name in FIT_NAMES - of_fit:
            fitted = " or ".join(sorted(other.name for other in _REGISTRY.values() if other.takes_head))
            raise SettingError(
                f"{name} is given, a setting of a network's fit, and recorder {recorder.name} fits none; leave {name} "
                f"out, or take recorder {fitted}"
            )
        if name not in of_fit | recorder.setting_names:
            raise unknown_setting(name, of_fit | recorder.setting_names)


_REGISTRY: dict[str, Recorder] = {}


def register(cls: type[Recorder]) -> type[Recorder]:
    assert cls.name not in _REGISTRY, f"two recorders are called {cls.name}"
    _REGISTRY[cls.name] = cls()
    return cls


def choose(name: str) -> Recorder:
    """A recorder by the name a caller gives."""
    check_choice("recorder", name, sorted(_REGISTRY))
    return _REGISTRY[name]


def names() -> tuple[str, ...]:
    """All recorders, in the order in which they were registered."""
    return tuple(_REGISTRY)


def written_by(name: object, path: object) -> Recorder:
    """A recorder by the name a file gives."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UnknownRecorderError(
            f"{path}: written by recorder {name!r}; this krnet has {', '.join(sorted(_REGISTRY))}. Upgrade krnet"
        )
    return _REGISTRY[name]
