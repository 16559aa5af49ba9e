"""The contract of a way to store features, and the registry of all of them.

    Job (features, labels, settings) -> Recorder.fit    -> Content (tensors, settings)   what the file holds
    Content or an opened file        -> Recorder.replay -> Replayer: ids (B,) -> features (B, *shape)
    settings, shape, samples         -> Recorder.stored -> the tensors of the file, before there is one

A recorder declares its settings (a config class), the inputs that it takes beside features, and the tensors that it
writes; the calls, the command line, the benchmarks and KRIL go by that and know no recorder by name. It knows nothing
of files: `tensor(name, shape=..., dtype=...)` reads from a Content before it is saved and from an Archive afterwards,
so that what is measured is what is stored.
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
from krnet.errors import (
    InputError,
    MissingTensorError,
    OversizedRecordingError,
    SettingError,
    TensorShapeError,
    UnknownRecorderError,
)
from krnet.features.samples import Samples
from krnet.features.source import FeatureSource
from krnet.features.stats import FeatureStats
from krnet.io.archive import TensorStore as TensorStore
from krnet.io.header import RESTORE
from krnet.train.config import FitConfig
from krnet.train.loop import Status

PROBE_SAMPLES = 8
PROBE_VALUES = 64  # per sample, evenly spaced: 2 KB in all, enough to notice a wrong decoder
FIT_NAMES = frozenset(f.name for f in fields(FitConfig))
UNTRAINED_NAMES = frozenset({"target_r2", "seed", "device"})  # of FIT_NAMES: what also means something without training
HEADER_BYTES, ENTRY_BYTES = 1400, 170  # of a file, and of each tensor's line in its header: upper bounds
FREE_NUMBERS, NUMBERS_PER_BYTE = 1 << 24, 1 << 12  # that opening a file may decode: so many, and so many for each byte


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
    """Everything a recorder may need to fit. What is None by default is an input: a recorder says which it takes."""

    source: FeatureSource
    samples: Samples
    stats: FeatureStats
    fit: FitConfig
    device: torch.device
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The recorder's own settings, as given by the caller."""
    preset: str | None = None
    head: nn.Module | None = None
    """Frozen; the error of replays is also seen through it (L_kr2)."""
    start: Earlier | None = None
    images: Any = None
    """What the features were made of, uint8; with a start, only the images of the samples that it does not hold."""
    trunk: nn.Module | None = None
    """Images -> features."""
    room: int | None = None
    """Samples that the file is to hold when it has grown: a budget is what it may take then."""
    checkpoint: Path | None = None
    resume: bool = False
    watch: Callable[[Status, float], None] | None = None
    """Called with the state of the fit and the R2 of the latest batches."""

    @property
    def num_planned(self) -> int:
        """Samples that a budget is for."""
        return max(len(self.source), self.room or 0)


INPUTS = ("preset", "head", "start", "images", "trunk")
"""Fields of a Job that a recorder may take."""


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


@dataclass(frozen=True)
class Stored:
    """A tensor that a recorder writes."""

    shape: tuple[int, ...] | None = None
    """None: as long as the data make it."""
    dtype: torch.dtype | None = None
    """None: one of several."""
    most_bytes: int | None = None
    """Upper bound of what has no shape; None: unknown before a fit."""
    num_decoded: int = 0
    """Numbers that opening the file makes of it, where these are more than it has itself."""
    optional: bool = False

    @property
    def size_bytes(self) -> int | None:
        if self.shape is not None and self.dtype is not None:
            return math.prod(self.shape) * self.dtype.itemsize
        return self.most_bytes


class Replayer(ABC):
    """Reads samples back."""

    trunk: nn.Module | None = None
    """Makes features of stored images; given by whoever records or opens, as files hold no networks to run."""

    @abstractmethod
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        """ids (B,) int64 on the CPU -> float32 features (B, *shape) in the original scale, on the device."""


class Recorder(ABC):
    name: ClassVar[str]
    header_name: ClassVar[str | None] = None
    """What the file's header calls it, where that is another name (see `recorder_name`)."""
    config_class: ClassVar[type]
    """Its settings: a dataclass, each field described by the text under it."""
    derived: ClassVar[frozenset[str]] = frozenset()
    """Fields of the config that follow from the features, and are not the caller's to set."""
    inputs: ClassVar[frozenset[str]] = frozenset()
    """Which of INPUTS it takes."""
    required: ClassVar[frozenset[str]] = frozenset()
    """Those without which it cannot record."""
    replay_inputs: ClassVar[frozenset[str]] = frozenset()
    """Those that opening a file needs again."""
    trains: ClassVar[bool] = False
    """It trains a network: the settings of FitConfig apply, and two fits of one size differ a little."""
    grows: ClassVar[bool] = False
    """Given a recording of its own to start from, it leaves that one's samples as they are and records the others."""
    stops_at_target: ClassVar[bool] = False
    """target_r2 ends its fit; otherwise it is reached by a search for the smallest file."""
    fast_is_exact: ClassVar[bool] = False
    """`fast` replays are the same as exact ones on every device."""
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Settings that `bench rate` tries beside the default ones: worse R2, better replays."""

    @property
    def setting_names(self) -> frozenset[str]:
        """Settings that a caller may give."""
        return frozenset(f.name for f in fields(self.config_class)) - self.derived

    @abstractmethod
    def fit(self, job: Job) -> Content: ...

    @abstractmethod
    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> Replayer: ...

    @abstractmethod
    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        """The tensors of a file with these settings, which say all that its header would; labels and probe aside."""

    # ------------------------------------------------------------------ sizes

    def default_budget(self, num_values: int, settings: Mapping[str, Any]) -> int | None:
        """The size that the caller gets who asks for none; None: the settings decide."""
        return None

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """Settings of its own under which the file has at most `budget` bytes and is as good as it can be (R2).

        All bytes of the file count: header, labels, tables, weights. Settings that the caller gave (`job.settings`)
        stay as they are, and only the others are searched. Where no setting is that small, the smallest one.
        """
        return dict(job.settings)  # of a recorder that has one size

    def likely_bytes(self, job: Job, target_r2: float) -> tuple[float, float] | None:
        """About the budget that an R2 takes, and how much of it every file takes: where the search for it begins.

        None: nothing is known without a fit.
        """
        return None

    def least_bytes(self, num_samples: int, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        """A lower bound of the size of any file, as far as one is known before there are features."""
        return 0


# ------------------------------------------------------------------ bytes


def overhead_bytes(job: Job, num_tensors: int, settings: Mapping[str, Any]) -> int:
    """Most that a file takes beside the recorder's own tensors, `num_tensors` of them: header, labels and probe.

    Above the true number by less than a kilobyte or so: how many digits the header's numbers have is known at the end.
    """
    metadata, tensors = job.samples.describe()
    text = json.dumps(json.dumps([metadata, settings], separators=(",", ":")))  # as the header has it: text in text
    probe = min(PROBE_SAMPLES, len(job.source)) * (8 + 4 * min(PROBE_VALUES, math.prod(job.source.shape)))
    labels = sum(tensor.nbytes for tensor in tensors.values())
    return HEADER_BYTES + ENTRY_BYTES * (num_tensors + len(tensors)) + len(text) + probe + labels


def planned_overhead(job: Job, num_tensors: int, settings: Mapping[str, Any]) -> int:
    """`overhead_bytes` when the file has grown: labels and classes in proportion to the samples."""
    metadata, tensors = job.samples.describe()
    labels = len(json.dumps(metadata["classes"])) + sum(tensor.nbytes for tensor in tensors.values())
    share = (job.num_planned - len(job.source)) / len(job.source)
    return overhead_bytes(job, num_tensors, settings) + math.ceil(share * labels)


def tensor_bytes(stored: Mapping[str, Stored]) -> int:
    """Of those whose size is known. Single numbers are covered by what `overhead_bytes` counts for every tensor."""
    return sum(tensor.size_bytes or 0 for tensor in stored.values() if tensor.shape != ())


def file_bytes(job: Job, stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> int:
    """Most that a file of these tensors takes, as far as their sizes are known."""
    return tensor_bytes(stored) + overhead_bytes(job, len(stored), settings)


def bound_opening(stored: Mapping[str, Stored], num_file_bytes: int) -> None:
    """Refuse a file whose settings ask for far more numbers than its bytes can hold, before any is allocated."""
    claimed = sum(max(tensor.num_decoded, math.prod(tensor.shape or (0,))) for tensor in stored.values())
    most = FREE_NUMBERS + NUMBERS_PER_BYTE * num_file_bytes
    if claimed > most:
        raise OversizedRecordingError(
            f"settings of {claimed} numbers in {num_file_bytes} bytes; expected at most {most}. {RESTORE}"
        )


# ------------------------------------------------------------------ what a caller gives


def check_inputs(recorder: Recorder, given: Mapping[str, object]) -> None:
    """Refuse inputs that a recorder does not take."""
    for name, value in given.items():
        if value is not None and name not in recorder.inputs:
            takers = [other for other in recorder_names() if name in _REGISTRY[other].inputs]
            raise InputError(
                f"{name} is given, and recorder {recorder.name} has no use for it; leave {name} out, or take recorder "
                f"{' or '.join(takers)}"
            )


def check_names(recorder: Recorder, given: Iterable[str]) -> None:
    """Refuse settings that a recorder does not have, and say who has them."""
    of_fit = FIT_NAMES if recorder.trains else UNTRAINED_NAMES
    known = of_fit | recorder.setting_names
    for name in given:
        if name in known:
            continue
        if name in FIT_NAMES:
            trained = " or ".join(sorted(other.name for other in _REGISTRY.values() if other.trains))
            raise SettingError(
                f"{name} is given, a setting of a network's fit, and recorder {recorder.name} fits none; leave {name} "
                f"out, or take recorder {trained}"
            )
        having = [other.name for other in _REGISTRY.values() if name in other.setting_names]
        if having:
            raise SettingError(
                f"{name} is given, a setting of recorder {' or '.join(sorted(having))} and not of {recorder.name}; "
                f"leave {name} out, or name the recorder (recorder={having[0]!r}, --recorder {having[0]})"
            )
        raise unknown_setting(name, known)


# ------------------------------------------------------------------ registry

_REGISTRY: dict[str, Recorder] = {}


def register(cls: type[Recorder]) -> type[Recorder]:
    assert cls.name not in _REGISTRY, f"two recorders are called {cls.name}"
    _REGISTRY[cls.name] = cls()
    return cls


def get_recorder(name: str) -> Recorder:
    """A recorder by the name a caller gives."""
    check_choice("recorder", name, sorted(_REGISTRY))
    return _REGISTRY[name]


def recorder_names() -> tuple[str, ...]:
    """All recorders, in the order in which they were registered."""
    return tuple(_REGISTRY)


def recorder_name(name: str, settings: Mapping[str, Any]) -> str:
    """The recorder that a header, a ledger row or the settings.json of a KRIL run names.

    All headers, and rows and runs of before, call two recorders krnet: the compact network, which has network=compact
    among its settings, and the paper's. A run of before had the compact one under a budget; it kept the recorder's
    settings as text.
    """
    if name != "krnet":
        return name
    if "recorder_settings" in settings:
        is_old = isinstance(settings["recorder_settings"], str)
        return "paper" if is_old and settings.get("budget") is None else "krnet"
    return "krnet" if settings.get("network") == "compact" else "paper"


def written_by(name: object, settings: Any, path: object) -> Recorder:
    """The recorder that a file's header names."""
    found = recorder_name(name, settings if isinstance(settings, dict) else {}) if isinstance(name, str) else None
    if found is None or found not in _REGISTRY:
        raise UnknownRecorderError(
            f"{path}: written by recorder {name!r}; this krnet has {', '.join(sorted(_REGISTRY))}. Upgrade krnet"
        )
    return _REGISTRY[found]
