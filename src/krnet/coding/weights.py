"""Quantise a network's weights while it trains, and entropy-code them for the file.

    weights --rounded--> quantised weights, which the network computes with; gradients pass straight through
    weights --pack--> tensors of a file: one ANS stream of symbols, tables, scales --unpack--> quantised weights

The quantisation step of a row is a fixed share of the row's root mean square. One frequency table therefore serves a
whole tensor, and the share alone determines the bits per weight. Nothing is clipped: large weights are rare, and cost
as many bits as rare symbols do.

Straight-through gradients: Bengio et al. (2013). Uniform quantisation followed by an entropy coder is within a quarter
of a bit of the optimum: Gish and Pierce (1968).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from krnet.coding.coder import ans
from krnet.coding.entropy import MAX_ALPHABET, Tables
from krnet.errors import NotARecordingError
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE

MIN_SMALL_BITS = 5.0  # bits, at least, of the weights of small tensors: they are few and matter much
NORM_STEP = 1 / 32  # quantisation step of norm scales and shifts, whose values are about 1
MIN_TABLE_VALUES = 2048  # a vector of at least this size repays its frequency table
MIN_SCALE = 2.0**-14  # the smallest normal fp16
# Entropy of a normal variable, quantised with a step of one standard deviation.
NORMAL_BITS = math.log2(math.sqrt(2 * math.pi * math.e))
TABLE_DTYPES = {"first": torch.int16, "sizes": torch.uint16, "weights": torch.uint16}
PACKED_TENSORS = ("stream", *TABLE_DTYPES, "scales", "rest")
MAX_TABLE_BYTES = 300  # of one frequency table


@dataclass(frozen=True)
class Rounding:
    """How a tensor is quantised."""

    axis: int | None
    """The axis along which each index has its own scale: 0 for rows, 1 for columns. None: one step for all values."""
    step: float
    """The quantisation step: a share of the root mean square at an index of the axis; without an axis, absolute."""


def matrices(net: nn.Module) -> list[nn.Linear | nn.Conv2d | nn.ConvTranspose2d]:
    """Return the linear layers and the ungrouped convolutions: those whose weight is a matrix."""
    layers = (module for module in net.modules() if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)))
    return [module for module in layers if isinstance(module, nn.Linear) or module.groups == 1]


def rounding_plan(net: nn.Module, bits: float | None) -> dict[str, Rounding]:
    """Decide how each parameter is quantised for `bits` per weight of the matrices; None quantises nothing.

    Parameters that the plan leaves out are few, and stored as fp16.
    """
    if bits is None:
        return {}
    matrix_ids = {id(module.weight) for module in matrices(net)}
    plan = {}
    for name, p in net.named_parameters():
        if id(p) in matrix_ids:
            plan[name] = Rounding(0, step_for(bits))
        elif p.dim() > 1:  # group embeddings, depthwise filters
            plan[name] = Rounding(0, step_for(max(bits, MIN_SMALL_BITS)))
        elif p.numel() >= MIN_TABLE_VALUES:  # a norm with a scale for each value
            plan[name] = Rounding(None, NORM_STEP)
    return plan


def step_for(bits: float) -> float:
    """Return the quantisation step, in standard deviations, that gives a normal variable an entropy of `bits`."""
    return 2.0 ** (NORMAL_BITS - bits)


def scales(weight: Tensor, rounding: Rounding) -> Tensor:
    """Return the quantisation step of each value, as a tensor that broadcasts to the weight, rounded to fp16."""
    if rounding.axis is None:
        return torch.full([1] * weight.dim(), rounding.step, device=weight.device)
    others = [axis for axis in range(weight.dim()) if axis != rounding.axis]
    size = weight[rounding.axis].numel() if rounding.axis == 0 else len(weight)
    rms = torch.linalg.vector_norm(weight.detach(), dim=others, keepdim=True) / math.sqrt(max(1, size))
    return (rms * rounding.step).clamp(min=MIN_SCALE).half().float()


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor | None) -> Tensor:
        """Round to multiples of the scale; without a scale, to fp16."""
        return weight.half().float() if scale is None else (weight / scale).round_().mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def rounded(weights: Mapping[str, Tensor], plan: Mapping[str, Rounding]) -> dict[str, Tensor]:
    """Return the weights as a file will hold them: quantised by the plan, or else rounded to fp16."""
    return {n: StraightThrough.apply(w, scales(w, plan[n]) if n in plan else None) for n, w in weights.items()}


# ------------------------------------------------------------------ files


def pack(weights: Mapping[str, Tensor], plan: Mapping[str, Rounding]) -> dict[str, Tensor]:
    """Code the weights as tensors of a file. `unpack` needs their shapes in the same order."""
    coded = {name: weight.detach() for name, weight in weights.items() if name in plan}
    steps = {name: scales(weight, plan[name]) for name, weight in coded.items()}
    symbols = [(w / steps[n]).round_().flatten().to(torch.int32).cpu().numpy() for n, w in coded.items()]
    tables = _make_tables(symbols)
    coder = ans().stack.AnsCoder()
    for table, values in reversed(list(enumerate(symbols))):  # ANS is a stack: last in, first out
        if (model := tables.model(table)) is not None:
            coder.encode_reverse(values - np.int32(tables.first[table]), model)
    stream = coder.get_compressed().astype("<u4").view(np.uint8)
    return {
        "stream": torch.from_numpy(stream.copy()),
        **{name: torch.from_numpy(getattr(tables, name)) for name in TABLE_DTYPES},
        "scales": _join_fp16([steps[name] for name in coded if plan[name].axis is not None]),
        "rest": _join_fp16([weight.detach() for name, weight in weights.items() if name not in plan]),
    }


def unpack(
    store: TensorStore, prefix: str, shapes: Mapping[str, tuple[int, ...]], plan: Mapping[str, Rounding]
) -> dict[str, Tensor]:
    """Decode the weights that `pack` coded. Every size follows from the shapes, and is checked before decoding."""

    def get(name: str, dtype: torch.dtype, *size: int) -> Tensor:
        found = store.tensor(prefix + name, shape=size or None, dtype=dtype)
        if found.dim() != 1:
            raise NotARecordingError(f"tensor {prefix + name!r} has {found.dim()} dimensions; expected one. {RESTORE}")
        return found

    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    coded = [name for name in shapes if name in plan]
    columns = np.arange(len(coded), dtype=np.uint8)
    tables = Tables(columns, *(get(name, dtype).numpy() for name, dtype in TABLE_DTYPES.items()))
    tables.check()
    stream = get("stream", torch.uint8).numpy()
    num_scales = {name: shapes[name][axis] for name in coded if (axis := plan[name].axis) is not None}
    steps = _split_fp16(num_scales, get("scales", torch.float16, sum(num_scales.values())))
    num_plain = {name: size for name, size in sizes.items() if name not in plan}
    plain = _split_fp16(num_plain, get("rest", torch.float16, sum(num_plain.values())))
    if len(stream) % 4 or (len(stream) and not stream[-4:].any()):
        raise NotARecordingError(
            f"a stream of {len(stream)} bytes that ends in {stream[-4:].tolist()}; expected words of four bytes, the "
            f"last of them not zero. {RESTORE}"
        )
    coder = ans().stack.AnsCoder(stream.view("<u4").astype(np.uint32))
    weights = {}
    for name, shape in shapes.items():
        if name not in plan:
            weights[name] = plain[name].view(shape)
            continue
        table, model = coded.index(name), tables.model(coded.index(name))
        values = np.zeros(sizes[name], np.int32) if model is None else coder.decode(model, sizes[name])
        scale = (
            steps[name].view([-1 if axis == plan[name].axis else 1 for axis in range(len(shape))])
            if name in num_scales
            else plan[name].step
        )
        values += np.int32(tables.first[table])  # in place, as below: a forged file may ask for large tensors
        weights[name] = torch.from_numpy(values).view(shape).float().mul_(scale)
    if not coder.is_empty():  # an undamaged stream is used up exactly; most damage shows here
        raise NotARecordingError(f"the weights' stream of {len(stream)} bytes goes on after its last weight. {RESTORE}")
    return weights


def packed_bytes(shapes: Mapping[str, tuple[int, ...]], plan: Mapping[str, Rounding]) -> int:
    """Return an upper bound of the bytes that `pack` makes of weights of these shapes."""
    total = 4.0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if name not in plan:
            total += 2 * size
        elif (axis := plan[name].axis) is None:
            total += size + MAX_TABLE_BYTES
        else:
            total += size * coded_bits(plan[name].step) / 8 + 2 * shape[axis] + MAX_TABLE_BYTES
    return math.ceil(total)


def coded_bits(step: float) -> float:
    """Return an upper bound of the entropy, in bits, of a variable of mean square 1 that is quantised with this step.

    Quantisation adds step^2 / 12 to the mean square, and no distribution of that mean square has more entropy than the
    normal one.
    """
    return 0.5 * math.log2(2 * math.pi * math.e * (1 / step**2 + 1 / 12))


def _make_tables(symbols: list[np.ndarray]) -> Tables:
    """Count the symbols of each tensor, and make one table per tensor."""
    lowest, highest = (min(int(v.min()) for v in symbols), max(int(v.max()) for v in symbols)) if symbols else (0, 0)
    assert highest - lowest < MAX_ALPHABET, f"weights of {highest - lowest} steps; expected fewer than {MAX_ALPHABET}"
    counts = np.stack([np.bincount(v - lowest, minlength=highest - lowest + 1) for v in symbols])
    return Tables.from_counts(np.arange(len(symbols)), counts, lowest)


def _join_fp16(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.half().flatten() for part in parts] or [torch.zeros(0, dtype=torch.float16)]).cpu()


def _split_fp16(sizes: Mapping[str, int], joined: Tensor) -> dict[str, Tensor]:
    """Undo `_join_fp16`, given the number of values of each part."""
    return dict(zip(sizes, joined.float().split(list(sizes.values()))))
