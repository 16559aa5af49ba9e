"""Every setting, one frozen dataclass per stage; each is described once, under its field.

    NetworkConfig   what the network looks like: a preset, or solved from the features (sizing.py)
    FitConfig       how it is fitted

Help texts, checks and the record in the file all come from here.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, TypeVar

from krnet.errors import SettingError

T = TypeVar("T")
CONVOLUTIONS = ("depthwise", "full")
KERNEL = 5  # of the deconvolution


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    choices = tuple(choices)
    if value not in choices:
        raise SettingError(f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}")


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Infinity fits some ranges, but not the JSON of a recording.
    if not (is_number and low <= value <= high and abs(value) < math.inf):
        wanted = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise SettingError(f"{name} is {value!r}; expected {wanted}")


def check_int(name: str, value: object, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(f"{name} is {value!r}; expected a whole number")
    check_range(name, value, low, high)


def check_shares(name: str, value: object) -> tuple[float, ...]:
    """One share or several, each from 0 to 1, as a tuple."""
    shares = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for share in shares:
        check_range(name, share, 0, 1)
    return shares


@cache
def describe(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it; a subclass may say it anew."""
    described = {
        name: text for base in reversed(cls.__bases__) if base is not object for name, text in describe(base).items()
    }
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant)
            described[field.target.id] = " ".join(str(below.value.value).split())
    return described


def unknown_setting(name: str, known: Iterable[str], what: str = "setting") -> SettingError:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known {what}s: {', '.join(known)}"
    return SettingError(f"unknown {what} {name!r}; {hint}")


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build a config from plain values, refusing names it does not have."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown_setting(name, known)
    missing = [name for name, f in known.items() if name not in values and f.default is MISSING]
    if missing:
        raise SettingError(f"missing settings: {', '.join(missing)}")
    return cls(**values)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Sizes of a KRNet for feature maps of channels x height x width (a vector has height = width = 1)."""

    channels: int
    """Channels of a feature map, or length of a feature vector."""
    height: int
    """Height of a feature map."""
    width: int
    """Width of a feature map."""
    vector: bool = False
    """Features are vectors: the spatial layers are left out."""
    group_size: int = 512
    """H: most samples per group, and length of the static and of the dynamic vector."""
    d0: int
    """Width of the first FC layer of the decoder."""
    c0: int
    """Channels before the deconvolution; for a vector, width of the second FC layer."""
    c1: int
    """Channels after the deconvolution."""
    stride: int = 1
    """s_d, the stride of the deconvolution: the first map has ceil(height / stride) rows."""
    conv_before: str = "depthwise"
    """3x3 convolutions before the deconvolution: depthwise or full."""
    conv_after: str = "full"
    """3x3 convolutions after the deconvolution: depthwise or full."""
    last_norm: bool = False
    """GroupNorm in the last module, as in the paper. It gives every sample the same mean and variance; without
    it (a scale and shift per channel instead) each keeps its own amplitude, and only Muon fits it well."""
    bits: float | None = None
    """Bits of a weight in the file, about: it is trained for so many and entropy-coded. None keeps fp32."""
    code: int = 0
    """Learned numbers that each sample has beside its ID."""
    code_bits: float = 4.0
    """Bits of such a number, where weights have few, too."""

    def __post_init__(self) -> None:
        for name in ("channels", "height", "width", "d0", "c0", "c1"):
            check_int(name, getattr(self, name), 1, 2**24)
        check_int("group_size", self.group_size, 4, 2**16)
        check_int("stride", self.stride, 1, KERNEL)
        start_area = self.start_size[0] * self.start_size[1]
        for name, size in (("group_size", self.group_size), ("d0", self.d0), ("c0", self.c0 * start_area)):
            if size % 2 or size < 4:
                raise SettingError(f"{name} is {getattr(self, name)}; GroupNorm(2) needs an even number of 4 or more")
        # A GroupNorm over a single value would leave nothing of it.
        area = self.height * self.width
        if not self.vector and self.c1 * area <= 2:
            raise SettingError(f"c1 is {self.c1}; GroupNorm on maps of one value needs more than 2 channels")
        if self.last_norm and self.channels * area <= 2:
            raise SettingError(f"last_norm is on; features of {self.channels} channels and {area} values need it off")
        check_choice("conv_before", self.conv_before, CONVOLUTIONS)
        check_choice("conv_after", self.conv_after, CONVOLUTIONS)
        check_choice("last_norm", self.last_norm, (True, False))
        check_int("code", self.code, 0, 2**16)
        for name in ("bits", "code_bits"):
            if getattr(self, name) is not None or name == "code_bits":
                check_range(name, getattr(self, name), 1, 8)

    @property
    def input_size(self) -> int:
        """Numbers that the decoder reads: both vectors of the group, and the sample's own."""
        return 2 * self.group_size + self.code

    @property
    def start_size(self) -> tuple[int, int]:
        """h0 x w0, the size of the map before the deconvolution."""
        return -(-self.height // self.stride), -(-self.width // self.stride)

    @property
    def output_padding(self) -> tuple[int, int]:
        """What a deconvolution of that stride lacks to reach height x width: 0 to stride - 1."""
        h0, w0 = self.start_size
        return self.height - 1 - (h0 - 1) * self.stride, self.width - 1 - (w0 - 1) * self.stride


PRESETS: dict[str, dict[str, Any]] = {
    # The paper's table of settings, with full convolutions after the deconvolution: they learn faster.
    "cifar100": {"group_size": 512, "d0": 1024, "c0": 512, "c1": 64, "stride": 1, "last_norm": True},
    "imagenet": {"group_size": 512, "d0": 1536, "c0": 1024, "c1": 256, "stride": 2, "last_norm": True},
}
# Depthwise ones throughout: the only reading that gives the sizes the paper prints.
PRESETS |= {f"{name}-published": preset | {"conv_after": "depthwise"} for name, preset in PRESETS.items()}

# What the paper changes for ImageNet-Subset; with schedule "paper" the presets bring it along.
PAPER_FITS: dict[str, dict[str, Any]] = {
    name: {"iterations": 50000, "gamma": 5e-4} for name in ("imagenet", "imagenet-published")
}
SCHEDULES = {"fast": 6000, "paper": 40000}
"""Learning-rate schedules and their iterations."""
LEAST_SHOWN = 32  # samples of a batch


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How a recorder is fitted."""

    iterations: int | None = None
    """Updates at most; by default the schedule's own number, or no limit where time_budget is given."""
    target_r2: float | None = None
    """The smallest file whose R2 over all features reaches this, found by a few whole fits; a krnet whose size is given
    (a preset, a start, network=paper, d0=...) stops there instead."""
    time_budget: float | None = None
    """Stop after so many seconds of fitting (compilation aside); the learning rate falls in step with them."""
    batch_size: int = 1000
    """Samples per update (all devices together); small data sets use a third of their samples."""
    schedule: str = "fast"
    """fast: Muon on the matrices, Adam elsewhere, warm-up, linear decay. paper: Adam, constant, then linear decay."""
    lr: float = 3e-3
    """Peak learning rate of Adam."""
    muon_lr: float = 1e-2
    """Peak learning rate of Muon (schedule fast), in Adam's units."""
    gamma: float = 1e-3
    """Weight of L_kr2, the error seen through a given head."""
    head_share: float = 1.0
    """Share of a batch that the head is shown, at least 32 samples: a quarter costs less time, and suits long fits."""
    seed: int = 0
    """Seeds the initial weights and the order of samples."""
    device: str | None = None
    """cpu, cuda or cuda:N; by default the GPU where there is one."""
    compile: bool = True
    """Fused kernels and one CUDA graph a step on a GPU; a CPU always runs the plain version."""
    checkpoint_s: float = 60.0
    """Seconds between checkpoints beside the output file."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("compile", self.compile, (True, False))
        if self.iterations is not None:
            check_int("iterations", self.iterations, 1)
        check_int("batch_size", self.batch_size, 1)
        check_int("seed", self.seed, 0, 2**63 - 1)
        if self.target_r2 is not None:
            check_range("target_r2", self.target_r2, -math.inf, 1)
        if self.time_budget is not None:
            check_range("time_budget", self.time_budget, 1e-3)
        for name in ("lr", "muon_lr", "gamma", "checkpoint_s"):
            check_range(name, getattr(self, name), 0)
        check_range("head_share", self.head_share, 0, 1)

    def num_shown(self, batch_size: int) -> int:
        """Samples of a batch that the head is shown."""
        return min(batch_size, max(LEAST_SHOWN, round(self.head_share * batch_size)))

    @property
    def max_iterations(self) -> int | None:
        if self.iterations is None and self.time_budget is None:
            return SCHEDULES[self.schedule]
        return self.iterations
