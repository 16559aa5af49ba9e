"""Recordings of a few kilobytes, with valid checksums, that ask for memory: one maker for each recorder.

    MAKERS[name](path, size) -> a file whose settings are `size` times a small unit; larger sizes ask for more

All symbols are the same, or nearly: an entropy coder then needs next to no bytes for any number of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.coding.entropy import Tables
from krnet.coding.weights import PACKED_TENSORS
from krnet.io import archive
from krnet.nn.paper_config import NetworkConfig
from krnet.recorders.autoencoder.network import AutoencoderConfig
from krnet.recorders.base import get_recorder

Tensors = dict[str, Tensor]


def coded(prefix: str, num_rows: int, num_columns: int, block_size: int, symbol: int = 0) -> Tensors:
    """A matrix of one number, as the file holds it: two symbols, of which the rare one never comes."""
    tables = Tables(
        np.zeros(num_columns, np.uint8), np.array([symbol], np.int16), np.array([2], np.uint16),
        np.array([2**16 - 2, 0], np.uint16),
    )  # fmt: skip
    full, rest = divmod(num_rows, block_size)
    symbols = np.full((block_size, num_columns), symbol, np.int32)
    streams = list(tables.encode(symbols, block_size)) * full
    streams += list(tables.encode(symbols[:rest], block_size)) if rest else []
    arrays = {
        "stream": np.frombuffer(b"".join(streams), np.uint8).copy(),
        "lengths": np.array([len(stream) for stream in streams], np.uint32), "column": tables.column,
        "first": tables.first, "sizes": tables.sizes, "weights": tables.weights, "centroids": np.zeros(2, np.int8),
    }  # fmt: skip
    return {prefix + name: torch.from_numpy(array) for name, array in arrays.items()}


def packed(shapes: dict[str, tuple[int, ...]], plan: dict[str, Any]) -> Tensors:
    """Weights that are all 0, as coding.weights.pack stores them: a table of one symbol for each tensor."""
    names = [name for name in shapes if name in plan]
    num_scales = sum(shapes[name][plan[name].axis] for name in names if plan[name].axis is not None)
    num_rest = sum(math.prod(shape) for name, shape in shapes.items() if name not in plan)
    values = {
        "stream": torch.zeros(0, dtype=torch.uint8), "first": torch.zeros(len(names), dtype=torch.int16),
        "sizes": torch.ones(len(names), dtype=torch.int16).to(torch.uint16),
        "weights": torch.full((len(names),), -1, dtype=torch.int16).view(torch.uint16),
        "scales": torch.ones(num_scales, dtype=torch.float16), "rest": torch.ones(num_rest, dtype=torch.float16),
    }  # fmt: skip
    assert values.keys() == set(PACKED_TENSORS)
    return {f"net.{name}": value for name, value in values.items()}


def write(path: Path, recorder: str, shape: tuple[int, ...], num_samples: int, settings: Any, tensors: Tensors) -> Path:
    """A recording of these tensors; its probe says what it decodes to where that is 0."""
    num_channels = shape[0] if shape else 1
    ids = torch.linspace(0, num_samples - 1, 8).round().long().unique()
    edges = {} if recorder == "raw" else {"low": torch.zeros(num_channels), "high": torch.ones(num_channels)}
    probe = {"probe.ids": ids, "probe.values": torch.zeros(len(ids), min(64, math.prod(shape)))}
    metadata = {
        "kind": "recording", "recorder": get_recorder(recorder).header_name or recorder, "num_samples": num_samples,
        "shape": list(shape), "classes": None, "features": "0" * 32, "feature_bytes": 1, "feature_dtype": "float32",
        "metrics": {"mse": 0.1, "r2": 0.5, "zero_ratio": 0.5}, "settings": settings, "fit": {}, "iterations": 1,
        "stopped_by": "iterations", "times": {"fit_seconds": 1.0}, "versions": {},
    }  # fmt: skip
    archive.write(path, {**edges, **probe, **tensors}, metadata)
    return path


def quantized(path: Path, size: int) -> Path:
    """Wide rows in large blocks."""
    settings = {"step": 0.1, "dead_zone": 0.5, "centroid": 1.0, "block_size": 64}
    return write(path, "quantized", (1, size * 1000), 512, settings, coded("coded.", 512, size * 1000, 64))


def pca(path: Path, size: int) -> Path:
    """Axes of far more numbers than the file has bytes."""
    shape, k = (8, size * 100), 1000
    settings = {"step": 0.1, "dead_zone": 0.5, "centroid": 1.0, "block_size": 16, "components": k}
    basis = {"mean": torch.zeros(math.prod(shape), dtype=torch.float16), "scale": torch.ones(k)}
    axes = coded("axes.", math.prod(shape), k, 256)
    return write(path, "pca", shape, 128, settings, {**basis, **axes, **coded("coded.", 128, k, 16)})


def transform(path: Path, size: int) -> Path:
    """Long axes: each needs a matrix of its size, squared."""
    shape = (1, size * 10, 10)
    settings = {"step": 0.1, "dead_zone": 0.5, "centroid": 0.25, "block_size": 16}
    basis = {"mean": torch.zeros(shape, dtype=torch.float16), "klt": torch.ones(1, 1, dtype=torch.float16)}
    return write(path, "transform", shape, 128, settings, {**basis, **coded("coded.", 128, math.prod(shape), 16)})


def pq(path: Path, size: int) -> Path:
    """Many entries for many channels."""
    channels, bits = size * 100, 12
    settings = {
        "parts": 1, "bits": bits, "rate_weight": 0.0, "rotations": 0, "rounds": 1, "train_positions": 1,
        "entry_step": 0.1, "block_size": 16,
    }  # fmt: skip
    tensors = {
        "order": torch.arange(channels, dtype=torch.int32), "sizes": torch.tensor([2**bits], dtype=torch.int16),
        **coded("entries.", 2**bits, channels, 256), **coded("codes.", 128, 4, 16),
    }  # fmt: skip
    del tensors["codes.centroids"]
    return write(path, "pq", (channels, 2, 2), 128, settings, tensors)


def compact(path: Path, size: int) -> Path:
    """A wide network on large maps."""
    shape, c1, k = (8, 256, 128), size * 8, 4
    settings = {
        "network": "compact", "step": 0.25, "components": k, "c1": c1, "blocks": 1, "bits": 5.0, "dead_zone": 0.5,
        "block_size": 16, "most_bytes": None,
    }  # fmt: skip
    values = math.prod(shape)
    tensors = {
        "unit": torch.ones(()), "mean": torch.zeros(values, dtype=torch.float16),
        "scale": torch.ones(k, dtype=torch.float16), **coded("axes.", values, k, 256), **coded("codes.", 128, k, 16),
        **packed(*network_of("krnet", shape, 128, settings)),
    }  # fmt: skip
    return write(path, "krnet", shape, 128, settings, tensors)


def without_axes(path: Path, size: int) -> Path:
    """A code is the map itself, of any shape that the header names."""
    shape = (8, 40, size * 10)
    settings = {
        "network": "compact", "step": 0.25, "components": 0, "c1": 0, "blocks": 1, "bits": 5.0, "dead_zone": 0.5,
        "block_size": 16, "most_bytes": None,
    }  # fmt: skip
    tensors = {"unit": torch.ones(()), **coded("codes.", 16, math.prod(shape), 16)}
    return write(path, "krnet", shape, 16, settings, tensors)


def paper(path: Path, size: int) -> Path:
    """Layers of weights that are all 0."""
    settings = decoder_settings(size) | {"group_size": 64, "bits": 4.0, "code": 0, "code_bits": 4.0, "groups": [64, 64]}
    tensors = packed(*network_of("paper", (8, 16, 16), 128, settings))
    return write(path, "paper", (8, 16, 16), 128, settings, tensors)


def autoencoder(path: Path, size: int) -> Path:
    settings = decoder_settings(size) | {"code_width": 64, "code_bits": 4.0, "weight_bits": 4.0, "block_size": 16}
    tensors = packed(*network_of("autoencoder", (8, 16, 16), 128, settings)) | coded("codes.", 128, 64, 16)
    return write(path, "autoencoder", (8, 16, 16), 128, settings, tensors)


def decoder_settings(size: int) -> dict[str, Any]:
    return {
        "channels": 8, "height": 16, "width": 16, "vector": False, "d0": 4 * size, "c0": 2 * size, "c1": 16,
        "stride": 1, "conv_before": "depthwise", "conv_after": "full", "last_norm": False,
    }  # fmt: skip


def network_of(recorder: str, shape: tuple[int, ...], num_samples: int, settings: Any) -> tuple[Any, Any]:
    """The shapes of a network's weights, and how they are quantised."""
    from krnet.coding.weights import rounding_plan
    from krnet.nn.paper_net import Decoder
    from krnet.recorders.autoencoder.network import rounding_of
    from krnet.recorders.compact.network import CompactConfig, CompactNet
    from krnet.recorders.paper.recorder import meta_network, rounding

    with torch.device("meta"):
        if recorder == "krnet":
            net = CompactNet(shape, CompactConfig(**settings)).refine
            plan = rounding_plan(net, settings["bits"])
        elif recorder == "paper":
            config = NetworkConfig(**{name: value for name, value in settings.items() if name != "groups"})
            net = meta_network(config, len(settings["groups"]), num_samples)
            plan = rounding(net, config)
        else:
            code = AutoencoderConfig(**settings)
            net = Decoder(code, code.code_width)
            plan = rounding_of(net, code.weight_bits)
    return {name: tuple(p.shape) for name, p in net.named_parameters()}, plan


def images(path: Path, size: int) -> Path:
    """Large pictures of one colour, which share all their bytes."""
    import io

    from PIL import Image

    side, target = 16 * size, io.BytesIO()
    Image.new("RGB", (side, side)).save(target, "png")
    settings = {
        "codec": "png", "quality": 90, "subsampling": 420, "mean": [0.0], "std": [1.0], "image_shape": [3, side, side],
        "trunk": "0" * 32,
    }  # fmt: skip
    start = torch.from_numpy(np.frombuffer(target.getvalue(), np.uint8).copy())
    lengths = torch.zeros(4096, dtype=torch.int16).view(torch.uint16)
    tensors = {"lengths": lengths, "stream": torch.zeros(0, dtype=torch.uint8), "start": start}
    return write(path, "images", (3, 2, 2), 4096, settings, tensors)


def rotation(path: Path, size: int) -> Path:
    """Wide rows in large blocks, and a rotation of as many values."""
    settings, values = {"levels": 4, "rotation": 0, "block_size": 64}, size * 1000
    tensors = {"mean": torch.zeros(values, dtype=torch.float16), **coded("codes.", 512, values + 1, 64)}
    return write(path, "rotation", (1, values), 512, settings, tensors)


def residual(path: Path, size: int) -> Path:
    """Many codes of a value."""
    settings = {"books": 16, "bits": 1, "block_size": 64, "beam": 1}
    tensors = {"entries": torch.zeros(16, 2, 1, dtype=torch.float16), **coded("codes.", 512, 16 * size * 100, 64)}
    return write(path, "residual", (1, size * 100), 512, settings, tensors)


def fp8(path: Path, size: int) -> Path:
    """Nothing to gain, as with raw."""
    values = torch.zeros(16, 8, size * 100, dtype=torch.uint8)
    return write(path, "fp8", (8, size * 100), 16, {"format": "e4m3"}, {"values": values})


def zfp(path: Path, size: int) -> Path:
    """Blocks of zeros, of a bit each."""
    import zfpy

    shape = (1, size * 1000)
    block = zfpy.compress_numpy(np.zeros((64, size * 1000), np.float32), tolerance=1.0, write_header=False)
    settings = {"step": 0.1, "dims": 2, "block_size": 64}
    return write(path, "zfp", shape, 512, settings, joined([block] * 8))


def zstd(path: Path, size: int) -> Path:
    """Blocks of zeros."""
    import zstandard

    shape = (1, size * 1000)
    block = zstandard.compress(bytes(4 * 64 * size * 1000))
    return write(path, "zstd", shape, 512, {"dtype": "float32", "level": 9, "block_size": 64}, joined([block] * 8))


def joined(blocks: list[bytes]) -> Tensors:
    stream = torch.from_numpy(np.frombuffer(b"".join(blocks), np.uint8).copy())
    return {"stream": stream, "lengths": torch.tensor([len(block) for block in blocks]).to(torch.uint32)}


def raw(path: Path, size: int) -> Path:
    """Nothing to gain: the values are in the file."""
    values = torch.zeros(16, 8, size * 100, dtype=torch.float16)
    return write(path, "raw", (8, size * 100), 16, {"dtype": "float16"}, {"values": values})


MAKERS: dict[str, Callable[[Path, int], Path]] = {
    maker.__name__: maker
    for maker in (
        quantized, pca, transform, pq, compact, without_axes, paper, autoencoder, images, residual, rotation, zfp,
        fp8, raw, zstd,
    )
}  # fmt: skip
