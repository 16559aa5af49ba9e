"""Weights of few bits: trained as multiples of a step, kept as whole numbers, entropy-coded.

    weights --rounded--> what the network computes with; gradients pass straight through
    weights --pack--> whole numbers, one ANS stream for all of them --unpack--> the weights, rounded

A step is a share of the root mean square of its row, so that one table of frequencies serves a whole tensor, and the
bits of a weight follow from that share alone. Nothing is clipped: large weights are rare, and cost what rare symbols
cost. Straight-through gradients: Bengio et al. (2013). Uniform steps before an entropy coder lose a quarter of a bit
to the best possible: Gish and Pierce (1968).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from krnet.coding.entropy import MAX_ALPHABET, RESTORE, Tables
from krnet.errors import NotARecordingError
from krnet.io.archive import TensorStore

FINE_BITS = 5.0  # of weights that are few and matter much
NORM_STEP = 1 / 32  # of scales and shifts, which are about 1
MANY = 2048  # values for which a table of frequencies of their own pays
LEAST_SCALE = 2.0**-14  # the smallest normal fp16
NORMAL_BITS = math.log2(math.sqrt(2 * math.pi * math.e))  # of a normal variable, rounded to multiples of its deviation
TABLES = {"first": torch.int16, "sizes": torch.uint16, "weights": torch.uint16}
PACKED_TENSORS = ("stream", *TABLES, "scales", "rest")
NUM_TENSORS = len(PACKED_TENSORS)
TABLE_BYTES = 300  # of a table of frequencies, at most


@dataclass(frozen=True)
class Rounding:
    """How a tensor is rounded."""

    axis: int | None
    """The axis along which each index has a scale of its own: 0 for rows, 1 for columns. None: one step for all."""
    step: float
    """As a share of the root mean square at that index, or as it is."""


def matrices(net: nn.Module) -> list[nn.Linear | nn.Conv2d | nn.ConvTranspose2d]:
    """Modules whose weight is a matrix, and not a filter for each channel."""
    layers_of = (module for module in net.modules() if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)))
    return [module for module in layers_of if isinstance(module, nn.Linear) or module.groups == 1]


def rounding_plan(net: nn.Module, bits: float | None) -> dict[str, Rounding]:
    """Which weights are kept in so many bits, or a few more; those it leaves out are few. None: nothing is rounded."""
    if bits is None:
        return {}
    large = {id(module.weight) for module in matrices(net)}
    plan = {}
    for name, p in net.named_parameters():
        if id(p) in large:
            plan[name] = Rounding(0, step_for(bits))
        elif p.dim() > 1:  # vectors of groups, filters of single channels
            plan[name] = Rounding(0, step_for(max(bits, FINE_BITS)))
        elif p.numel() >= MANY:  # of a norm with a scale for each value
            plan[name] = Rounding(None, NORM_STEP)
    return plan


def step_for(bits: float) -> float:
    """The share of its deviation to which a normal variable is rounded, for so many bits of entropy."""
    return 2.0 ** (NORMAL_BITS - bits)


def scales(weight: Tensor, rounding: Rounding) -> Tensor:
    """The step of each value, broadcastable, as fp16 can hold it."""
    if rounding.axis is None:
        return torch.full([1] * weight.dim(), rounding.step, device=weight.device)
    others = [axis for axis in range(weight.dim()) if axis != rounding.axis]
    size = weight[rounding.axis].numel() if rounding.axis == 0 else len(weight)
    rms = torch.linalg.vector_norm(weight.detach(), dim=others, keepdim=True) / math.sqrt(max(1, size))
    return (rms * rounding.step).clamp(min=LEAST_SCALE).half().float()


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor | None) -> Tensor:
        """Multiples of the scale; without one, what fp16 can hold."""
        return weight.half().float() if scale is None else (weight / scale).round_().mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def rounded(weights: Mapping[str, Tensor], plan: Mapping[str, Rounding]) -> dict[str, Tensor]:
    """The weights as a file will hold them: those of the plan in steps, the others as fp16."""
    return {n: StraightThrough.apply(w, scales(w, plan[n]) if n in plan else None) for n, w in weights.items()}


# ------------------------------------------------------------------ files


def pack(weights: Mapping[str, Tensor], plan: Mapping[str, Rounding]) -> dict[str, Tensor]:
    """To be unpacked with the shapes in the same order."""
    import constriction

    coded = {name: weight.detach() for name, weight in weights.items() if name in plan}
    steps = {name: scales(weight, plan[name]) for name, weight in coded.items()}
    symbols = [(w / steps[n]).round_().flatten().to(torch.int32).cpu().numpy() for n, w in coded.items()]
    tables = _tables(symbols)
    coder = constriction.stream.stack.AnsCoder()
    for table, values in reversed(list(enumerate(symbols))):  # what goes in last comes out first
        if (model := tables.model(table)) is not None:
            coder.encode_reverse(values - np.int32(tables.first[table]), model)
    stream = coder.get_compressed().astype("<u4").view(np.uint8)
    return {
        "stream": torch.from_numpy(stream.copy()),
        **{name: torch.from_numpy(getattr(tables, name)) for name in TABLES},
        "scales": _joined([steps[name] for name in coded if plan[name].axis is not None]),
        "rest": _joined([weight.detach() for name, weight in weights.items() if name not in plan]),
    }


def unpack(
    store: TensorStore, prefix: str, shapes: Mapping[str, tuple[int, ...]], plan: Mapping[str, Rounding]
) -> dict[str, Tensor]:
    """What `pack` put into a file. Every size follows from the shapes, and is checked before anything is decoded."""
    import constriction

    def get(name: str, dtype: torch.dtype, *size: int) -> Tensor:
        found = store.tensor(prefix + name, shape=size or None, dtype=dtype)
        if found.dim() != 1:
            raise NotARecordingError(f"tensor {prefix + name!r} has {found.dim()} dimensions; expected one. {RESTORE}")
        return found

    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    coded = [name for name in shapes if name in plan]
    columns = np.arange(len(coded), dtype=np.uint8)
    tables = Tables(columns, *(get(name, dtype).numpy() for name, dtype in TABLES.items()))
    tables.check()
    stream = get("stream", torch.uint8).numpy()
    kept = {name: shapes[name][axis] for name in coded if (axis := plan[name].axis) is not None}
    steps = dict(zip(kept, get("scales", torch.float16, sum(kept.values())).float().split(list(kept.values()))))
    plain = {name: size for name, size in sizes.items() if name not in plan}
    rest = dict(zip(plain, get("rest", torch.float16, sum(plain.values())).float().split(list(plain.values()))))
    if len(stream) % 4 or (len(stream) and not stream[-4:].any()):
        raise NotARecordingError(
            f"a stream of {len(stream)} bytes that ends in {stream[-4:].tolist()}; expected words of four bytes, the "
            f"last of them not zero. {RESTORE}"
        )
    coder = constriction.stream.stack.AnsCoder(stream.view("<u4").astype(np.uint32))
    found = {}
    for name, shape in shapes.items():
        if name not in plan:
            found[name] = rest[name].view(shape)
            continue
        table, model = coded.index(name), tables.model(coded.index(name))
        values = np.zeros(sizes[name], np.int32) if model is None else coder.decode(model, sizes[name])
        scale = (
            steps[name].view([-1 if axis == plan[name].axis else 1 for axis in range(len(shape))])
            if name in kept
            else plan[name].step
        )
        found[name] = torch.from_numpy(values + np.int32(tables.first[table])).view(shape).float() * scale
    if not coder.is_empty():  # as it is after what was encoded; most damage shows here
        raise NotARecordingError(f"the weights' stream of {len(stream)} bytes goes on after its last weight. {RESTORE}")
    return found


def packed_bytes(shapes: Mapping[str, tuple[int, ...]], plan: Mapping[str, Rounding]) -> int:
    """Most that `pack` makes of weights of these shapes."""
    total = 4.0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if name not in plan:
            total += 2 * size
        elif (axis := plan[name].axis) is None:
            total += size + TABLE_BYTES
        else:
            total += size * coded_bits(plan[name].step) / 8 + 2 * shape[axis] + TABLE_BYTES
    return math.ceil(total)


def coded_bits(step: float) -> float:
    """Entropy of numbers of mean square 1 in such steps: at most that of normal ones, to whose power rounding adds."""
    return 0.5 * math.log2(2 * math.pi * math.e * (1 / step**2 + 1 / 12))


def _tables(symbols: list[np.ndarray]) -> Tables:
    """One for each tensor."""
    lowest, highest = (min(int(v.min()) for v in symbols), max(int(v.max()) for v in symbols)) if symbols else (0, 0)
    assert highest - lowest < MAX_ALPHABET, f"weights of {highest - lowest} steps; expected fewer than {MAX_ALPHABET}"
    counts = np.stack([np.bincount(v - lowest, minlength=highest - lowest + 1) for v in symbols])
    return Tables.from_counts(np.arange(len(symbols)), counts, lowest)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.half().flatten() for part in parts] or [torch.zeros(0, dtype=torch.float16)]).cpu()
