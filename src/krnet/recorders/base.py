"""The contract that every recorder (a way to store features) fulfils, and the registry of recorders.

    Job (features, labels, settings) -> Recorder.fit    -> Content (tensors, settings): what the file holds
    Content or an opened file        -> Recorder.replay -> Replayer: ids (B,) -> features (B, *shape)
    settings, shape, num_samples     -> Recorder.stored -> the file's tensors, known before the fit

    features that were not fitted -> Replayer.code -> Coded: symbols, and what they would be replayed as
    symbols                       -> Replayer.show -> the same

A recorder declares its settings (a config class), the inputs it takes beside features, and the tensors it writes. The
API, the command line, the benchmarks and KRIL read these declarations; none of them asks for a recorder by name.
A recorder does not read or write files. It reads tensors through `store.tensor(name, shape=..., dtype=...)`, which a
Content offers before the file is saved and an Archive afterwards. So R2 is measured on exactly what is stored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from krnet.coding.entropy import Tables
from krnet.config import is_installed, settings_text, unknown_setting
from krnet.errors import (
    MissingTensorError,
    TensorShapeError,
    UnknownRecorderError,
)
from krnet.features.feature_source import FeatureSource
from krnet.features.samples import Samples
from krnet.features.stats import FeatureStats
from krnet.io.archive import RowStore as RowStore
from krnet.io.archive import TensorStore as TensorStore
from krnet.io.stored_rows import MadeRows, Rows, TensorRows
from krnet.progress import Watch
from krnet.train.config import FitConfig

FLOAT_BYTES = 4  # fp32
# The probe: a few replayed values, stored in the file so that a decoder that computes something else is noticed.
PROBE_SAMPLES = 8
PROBE_VALUES = 64  # per sample, evenly spaced: 2 KB in all
FIT_NAMES = frozenset(f.name for f in fields(FitConfig))
UNTRAINED_NAMES = frozenset({"seed", "device"})  # the FIT_NAMES that recorders without training take, too
LEAST_HEADER_BYTES = 1000  # a lower bound: recorder raw, without labels, takes 1,200


class Earlier(RowStore, Protocol):
    """A finished recording to start from.

    krnet.recording.Recording satisfies this protocol; recorders cannot import it, because it imports them.
    """

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
    @property
    def lengths(self) -> Tensor | None: ...
    def __len__(self) -> int: ...
    def replay(self, ids: Tensor) -> Tensor: ...
    def info(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Job:
    """Everything a recorder may need to fit. The fields named in INPUTS reach only recorders that take them."""

    source: FeatureSource
    samples: Samples
    stats: FeatureStats
    fit: FitConfig
    device: torch.device
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The recorder's own settings, as given by the caller."""
    chosen: frozenset[str] = frozenset()
    """Names of the settings that a budget chose, not the caller."""
    preset: str | None = None
    head: nn.Module | None = None
    """A frozen network on top of the features; the loss L_kr2 compares its outputs for true and replayed features."""
    start: Earlier | None = None
    """The recording to start from."""
    images: Any = None
    """The uint8 images that the features were computed from. With `start`: only those of samples not in `start`."""
    trunk: nn.Module | None = None
    """The network images -> features."""
    frozen: bool = False
    """Nothing is trained: samples that are not in `start` are coded with what it has."""
    room: int | None = None
    """Number of samples that the file will hold once it has grown; the budget is meant for that many."""
    checkpoint: Path | None = None
    resume: bool = False
    watch: Watch | None = None
    """Told the progress of the fit, with the R2 of the latest batches."""

    @property
    def num_planned(self) -> int:
        """Number of samples that the budget is meant for."""
        return max(len(self.source), self.room or 0)


INPUTS = ("preset", "head", "start", "images", "trunk")
"""The optional fields of a Job; `Recorder.inputs` names those that a recorder takes."""


@dataclass(frozen=True)
class Content:
    """The result of a fit: what the file will hold."""

    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    """Plain JSON values. `replay` needs nothing beside these and the tensors."""
    iterations: int = 0
    seconds: float = 0.0
    stopped_by: str = "done"
    share_left: float | None = None
    """The share of the error that a fit twice as long would leave, as far as one of open length can tell."""
    made: Mapping[str, MadeRows] = field(default_factory=dict)
    """Further tensors, too large for the memory, whose rows are made when they are needed."""

    def tensor(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self.tensors:
            raise MissingTensorError(f"no tensor {name!r} among {', '.join(self.tensors)}")
        found = self.tensors[name]
        if (shape is not None and tuple(shape) != tuple(found.shape)) or dtype not in (None, found.dtype):
            raise TensorShapeError(f"tensor {name!r} is {found.dtype} {tuple(found.shape)}; expected {dtype} {shape}")
        return found

    def rows(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Rows:
        if name not in self.made:
            return TensorRows(self.tensor(name, shape=shape, dtype=dtype))
        found = self.made[name]
        assert tuple(shape or found.shape) == found.shape and dtype in (None, found.dtype), f"{found}: {dtype} {shape}"
        return found


@dataclass(frozen=True)
class Stored:
    """Declares one tensor that a recorder writes."""

    shape: tuple[int, ...] | None = None
    """None: the length depends on the data, as that of an entropy-coded stream does."""
    dtype: torch.dtype | None = None
    """None: the data decide which of several types is used."""
    most_bytes: int | None = None
    """Upper bound of the size where shape is None; None: unknown before a fit."""
    num_decoded: int = 0
    """How many numbers opening the file decodes from this tensor, if more than the tensor itself has."""
    optional: bool = False
    """The file may lack it."""

    @property
    def size_bytes(self) -> int | None:
        if self.shape is not None and self.dtype is not None:
            return math.prod(self.shape) * self.dtype.itemsize
        return self.most_bytes

    @property
    def is_fixed(self) -> bool:
        """Every file has the tensor, and in this size."""
        return self.shape is not None and self.dtype is not None and not self.optional


def tensor_bytes(stored: Mapping[str, Stored]) -> int:
    """Bytes of all tensors whose size is known. Scalars are left out: `overhead_bytes` covers them."""
    return sum(tensor.size_bytes or 0 for tensor in stored.values() if tensor.shape != ())


class Coded(NamedTuple):
    """Samples that were coded with what a recorder has fitted."""

    symbols: Tensor
    """(B, ...) what a file would hold of them."""
    shown: Tensor
    """(B, *shape) float32: what they would be replayed as."""


class Replayer(ABC):
    """Reads samples from a recording."""

    trunk: nn.Module | None = None
    """Computes features from stored images. The caller gives it: a file holds no network for images."""

    @abstractmethod
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        """ids (B,) int64 on the CPU -> float32 features (B, *shape) in the original scale, on the device."""

    # The rest is for recorders that `projects`: what was fitted is frozen, and codes samples that it has not seen.

    @property
    def tables(self) -> Tables | None:
        """The frequencies that entropy-code symbols; None: symbols are numbers that are stored as they are."""
        return None

    def code(self, features: Tensor, *, moves: int | None = None, stored: bool = False) -> Coded:
        """float32 features (B, *shape) on the device, not in the recording -> their symbols, and what these show.

        Each sample is coded on its own. Where a network is behind the symbols, they are moved `moves` times towards
        the least error; None: as often as pays. `stored` says that their bits count as well.
        """
        raise NotImplementedError(f"{type(self).__name__} codes no features")

    def show(self, symbols: Tensor) -> Tensor:
        """symbols (B, ...) -> float32 features (B, *shape), as `decode` gives those that are stored."""
        raise NotImplementedError(f"{type(self).__name__} shows no symbols")


class Recorder(ABC):
    """A way to store features: fits them, replays them, and says how large its files are."""

    name: ClassVar[str]
    header_name: ClassVar[str | None] = None
    """The recorder's name in file headers, if it differs from `name` (see `recorder_name`)."""
    config_class: ClassVar[type]
    """The dataclass of its settings; the string under each field is the setting's help text."""
    derived: ClassVar[frozenset[str]] = frozenset()
    """Fields of the config that are computed from the features; callers cannot set them."""
    inputs: ClassVar[frozenset[str]] = frozenset()
    """Which of INPUTS it takes."""
    required: ClassVar[frozenset[str]] = frozenset()
    """Inputs without which it cannot record."""
    replay_inputs: ClassVar[frozenset[str]] = frozenset()
    """Inputs that must be given again to open a file."""
    trains: ClassVar[bool] = False
    """It trains a network: the settings of FitConfig apply, and R2 varies a little between fits of the same size."""
    grows: ClassVar[bool] = False
    """With a recording of its own as `start`, it keeps that recording's samples bit for bit and adds the others."""
    projects: ClassVar[bool] = False
    """Its replayers have `code` and `show`: they code features that were not fitted, and show what comes back."""
    starts_warm: ClassVar[bool] = False
    """Given a recording of its own to start from, its network starts from that one's weights."""
    fast_is_exact: ClassVar[bool] = False
    """`fast` replays equal exact ones on every device."""
    package: ClassVar[str | None] = None
    """The package that it needs beyond those of krnet, as it is imported."""
    extra: ClassVar[str | None] = None
    """The extra of krnet that installs `package`."""
    replays_without_package: ClassVar[bool] = False
    """Only recording needs `package`."""
    bench_values: ClassVar[int | None] = None
    """It is slow: `bench rate` measures it on sets of more values only when it is named."""
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Further settings that `bench rate` measures: their R2 is lower, but a classifier reads their replays better."""

    @property
    def setting_names(self) -> frozenset[str]:
        """Names of the settings that a caller may give."""
        return frozenset(f.name for f in fields(self.config_class)) - self.derived

    @property
    def needs(self) -> str:
        """Package and extra, as in "needs faiss: pip install 'krnet[faiss]'"; empty if it needs none."""
        return "" if self.package is None else f"needs {self.package}: pip install 'krnet[{self.extra}]'"

    @property
    def is_usable(self) -> bool:
        """Its package is installed, or it needs none."""
        return self.package is None or is_installed(self.package)

    def settings_text(self, settings: Mapping[str, Any]) -> str:
        """List the settings that are not at their defaults, without derived ones."""
        return settings_text(settings, self.config_class, without=self.derived)

    def preset_for(self, shape: tuple[int, ...]) -> str | None:
        """The preset made for maps of this shape, if there is one."""
        return None

    def preset_fit(self, preset: str | None) -> Mapping[str, Any]:
        """Settings of FitConfig that a preset brings along with schedule paper."""
        return {}

    def with_derived(self, settings: Mapping[str, Any], shape: tuple[int, ...], num_samples: int) -> dict[str, Any]:
        """`settings` with the derived ones that follow from the shape and the number of samples.

        Where labels decide one of them, its value is that of the smallest file.
        """
        return dict(settings)

    @abstractmethod
    def fit(self, job: Job) -> Content: ...

    @abstractmethod
    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: RowStore, device: torch.device
    ) -> Replayer: ...

    @abstractmethod
    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        """The tensors of a file, without labels and probe. `settings` are complete, as in the file's header."""

    # ------------------------------------------------------------------ sizes

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        """Upper bound of the float32 numbers that exist at once while PROBE_SAMPLES samples are replayed.

        They come on top of what `stored` says is decoded at opening, and of the samples themselves: the maps of a
        network, the block of symbols that holds a sample. memory.py refuses files that ask for too much.
        """
        return 0

    def network_multiplications(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        """About how many multiplications a network takes to replay one sample; files that ask for too many are refused.

        Work without a network needs no bound of its own: it is in proportion to the memory.
        """
        return 0

    def default_budget(self, num_values: int, settings: Mapping[str, Any]) -> int | None:
        """The budget in bytes if the caller gives none; None: the settings alone decide the size."""
        return None

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The recorder's settings with the highest R2 whose file has at most `budget` bytes.

        All bytes of the file count: header, labels, tables, weights. Settings that the caller gave (`job.settings`)
        are kept; only the others are searched. If no settings fit the budget, those of the smallest file.
        """
        return dict(job.settings)  # the default is for recorders whose size cannot be chosen

    def likely_bytes(self, job: Job, target_r2: float) -> tuple[float, float] | None:
        """Estimates, in bytes, of the budget that reaches target_r2, and of the part that does not depend on R2.

        The search for the smallest file starts from them. None: nothing is known without a fit.
        """
        return None

    def least_bytes(self, num_samples: int, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        """A lower bound of the file's size that needs no features; 0 if none is known.

        By default, the sum of all tensors of fixed size, if all settings are given: a missing one may still be chosen
        for a budget.
        """
        known = self.with_derived(settings, tuple(shape), num_samples)
        if any(f.name not in known for f in fields(self.config_class)):
            return 0
        stored = self.stored(shape, num_samples, known)
        return tensor_bytes({name: tensor for name, tensor in stored.items() if tensor.is_fixed})

    def floor_bytes(self, num_samples: int, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        """A lower bound of a file's bytes with its header and probe: what no budget can do without."""
        probe_bytes = min(PROBE_SAMPLES, num_samples) * (8 + 4 * min(PROBE_VALUES, math.prod(shape)))
        return LEAST_HEADER_BYTES + probe_bytes + self.least_bytes(num_samples, shape, settings)

    def smallest_bytes(self, job: Job) -> tuple[int, int]:
        """(least, enough), for the samples and the settings of a job, which are complete; needs no fit.

        A budget below `least` leaves no byte for the features; one of `enough` bytes can be met. Unless a recorder
        knows better, both are `least_bytes`.
        """
        least = self.least_bytes(len(job.source), job.source.shape, job.settings)
        return least, least

    def storage_table(
        self, shape: tuple[int, ...], class_counts: list[int], preset: str | None, settings: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """What `krnet plan` shows of this recorder if no budget is given; None: the sum of its tensors."""
        return None


# ------------------------------------------------------------------ registry

_REGISTRY: dict[str, Recorder] = {}


def register(cls: type[Recorder]) -> type[Recorder]:
    assert cls.name not in _REGISTRY, f"two recorders are called {cls.name}"
    _REGISTRY[cls.name] = cls()
    return cls


def get_recorder(name: str) -> Recorder:
    """The recorder with the name that a caller gives; an unknown one raises an error with the nearest known name."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise unknown_setting(str(name), _REGISTRY, "recorder")
    return _REGISTRY[name]


def recorder_names() -> tuple[str, ...]:
    """Names of all recorders, in order of registration."""
    return tuple(_REGISTRY)


def default_recorder(preset: str | None = None, start: Earlier | None = None) -> str:
    """The recorder of a caller who names none."""
    if preset is not None:
        return "paper"  # presets are those of the paper
    return "krnet" if start is None else start.recorder


def recorder_name(name: str, settings: Mapping[str, Any]) -> str:
    """The recorder that a file header, a ledger row or the settings.json of a KRIL run means by `name`.

    The name krnet is ambiguous in all headers, and in rows and runs written before both recorders had their own names.
    It means the compact network if the settings have network=compact, and the paper's network otherwise. KRIL runs
    of that time kept the recorder's settings as text, and used the compact network if they had a budget.
    """
    if name != "krnet":
        return name
    if "recorder_settings" in settings:  # a KRIL run
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
