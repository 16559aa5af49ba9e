"""How many bytes could contexts save in the entropy coder? An estimate, by entropies, on maps of ResNet-32.

    maps -> axes of blocks, quantised codes -> entropy of each column, and given one of CONTEXTS quantised contexts

Three contexts of a symbol are tried: the sizes of the same axis' symbols in the blocks to the left and above; the sizes
of the symbols of the same block that are decoded already; and both. A context is used in a column where it saves bytes,
its tables counted. The bytes are those of codes alone. A row goes to the ledger. Minutes on two cores.

    python benchmarks/contexts.py --data-dir DIR
"""

import argparse
import time

import numpy as np
import torch
from cifar100_base import MEAN, STD
from extract import NETWORK, resnet32
from safetensors.torch import load_file

import krnet
from krnet.coding.entropy import TABLE_SYMBOL_BYTES, to_symbols
from krnet.device import exact_math
from krnet.features.stats import normalise, scan
from krnet.io import ledger
from krnet.recorders.grids import Grid

CONTEXTS = 4
DEAD_ZONE = 0.65  # as recorder krnet starts
KEPT_SPREAD = 1.2  # axes are kept whose codes spread over more than so many steps
SETS = {"early": (5, 600), "middle": (10, 1500), "late": (11, 2500)}  # block of the network, number of maps
STEPS = (0.05, 0.1, 0.25)


@torch.no_grad()
def make_maps(name, data_dir):
    """Normalised maps of some training images."""
    last, number = SETS[name]
    trunk, head = resnet32(50)
    torch.nn.Sequential(trunk, head).load_state_dict(load_file(NETWORK))
    images = krnet.data.load("cifar100", data_dir).train.images[:number].float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    with exact_math():
        maps = trunk.eval()[: last + 1]((images - mean) / std)
    stats = scan(krnet.features.source.open_features(maps))
    return normalise(maps, stats.low, stats.high)


def bits(symbols):
    """Of these symbols with their own frequencies, and of the table of these."""
    counts = np.unique(symbols, return_counts=True)[1].astype(float)
    total = counts.sum()
    entropy = total * np.log2(total) - (counts * np.log2(counts)).sum() if total else 0.0
    return entropy + 8 * TABLE_SYMBOL_BYTES * len(counts)


def bits_given(symbols, context):
    """Of symbols with one table for each quarter of the contexts."""
    edges = np.unique(np.quantile(context, np.linspace(0, 1, CONTEXTS + 1)[1:-1]))
    groups = np.searchsorted(edges, context)
    return sum(bits(symbols[groups == group]) for group in range(len(edges) + 1) if (groups == group).any())


def shares_saved(symbols, plain_bits):
    """symbols (n, rows, columns of blocks, K) -> the share of the bits that each context saves."""
    sizes = np.abs(symbols).astype(np.float32)
    beside = np.zeros_like(sizes)
    beside[:, :, 1:] += sizes[:, :, :-1]
    beside[:, 1:] += sizes[:, :-1]
    known = np.zeros(sizes.shape[:3], np.float32)
    saved = dict.fromkeys(("neighbours", "energy", "both"), 0.0)
    for axis in range(symbols.shape[3]):
        mean = sizes[..., axis].mean() + 1e-3
        tried = {"neighbours": beside[..., axis] / mean, "energy": known / max(axis, 1)}
        tried["both"] = tried["neighbours"] / 2 + tried["energy"]
        for name, context in tried.items():
            saved[name] += max(0.0, plain_bits[axis] - bits_given(symbols[..., axis].ravel(), context.ravel()))
        known += sizes[..., axis] / mean
    return {name: float(value / plain_bits.sum()) for name, value in saved.items()}


def measure(maps, block):
    """For each step: R2 on the coded numbers, bits a value, and what contexts save."""
    grid = Grid.of(maps.shape[1:], (maps.shape[1], block, block))
    blocks = grid.cut(maps)
    flat = blocks.flatten(0, 1)
    flat = flat - flat.mean(0)
    axes = torch.linalg.eigh(flat.T @ flat)[1].flip(1)
    codes = (flat @ axes).view(len(maps), *grid.counts[1:], -1)
    found = {}
    for step in STEPS:
        spread = codes.flatten(0, 2).std(0)
        kept = max(1, int((spread > KEPT_SPREAD * step).sum()))
        symbols = to_symbols(codes[..., :kept], step, DEAD_ZONE)
        error = (codes[..., :kept] - symbols * step).square().sum() + codes[..., kept:].square().sum()
        symbols = symbols.numpy()
        plain = np.array([bits(symbols[..., axis].ravel()) for axis in range(kept)])
        found[str(step)] = {
            "axes": kept,
            "r2": 1 - float(error / flat.square().sum()),
            "bits_per_value": float(plain.sum() / maps.numel()),
            "saved": shares_saved(symbols, plain),
        }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder that holds cifar-100-python/ (KRNET_DATA)")
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends
    started, found = time.perf_counter(), {}
    for name in SETS:
        maps = make_maps(name, args.data_dir)
        for block in (2, 4):
            found[f"{name}, blocks of {block}x{block}"] = measured = measure(maps, block)
            for step, one in measured.items():
                saved = ", ".join(f"{context} {share:.1%}" for context, share in one["saved"].items())
                print(f"{name} {block}x{block} step {step}: R2 {one['r2']:.3f}, saved by {saved}", flush=True)
    most = max(share for one in found.values() for each in one.values() for share in each["saved"].values())
    settings = {"contexts": CONTEXTS, "steps": STEPS, "dead_zone": DEAD_ZONE}
    ledger.append(
        "contexts", settings=settings, metrics={"sets": found, "most_saved": most}, seed=0,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


if __name__ == "__main__":
    main()
