"""Measure each choice of docs/choices.md: the same short fit of the paper's network, one thing changed at a time.

    runs/base/features.npy (the first 500 maps) -> 250 iterations per variant -> R2 -> a ledger row, a line on stdout

It takes about five minutes on a CPU. Compare seconds within one run only.

    python benchmarks/cifar100_base.py --data-dir DIR --network network.safetensors --limit 1000 --out runs/base
    python benchmarks/choices.py runs/base
"""

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn as nn

import krnet
from krnet.io import ledger
from krnet.nn import paper_net
from krnet.recorders import fit as network_fit

muon_and_adam = network_fit.optimizers_for


def muon_on_fc_only(net, fit, device):
    adam, muon = muon_and_adam(net, fit, device)
    linear = [m.weight for m in net.modules() if isinstance(m, nn.Linear)]
    rest = [p for p in net.parameters() if not any(p is q for q in linear)]
    return [type(adam)(rest, lr=fit.lr), type(muon)(linear, lr=fit.muon_lr)]


def adam_only(net, fit, device):
    return [torch.optim.Adam(net.parameters(), lr=fit.lr)]


LAST_NORM = {"last_norm": True}  # as in the paper
# Name -> (settings, patches by (object, attribute)).
VARIANTS = {
    "default": ({}, {}),
    "default, last norm kept as in the paper": (LAST_NORM, {}),
    "last norm; all convolutions depthwise": ({**LAST_NORM, "conv_after": "depthwise"}, {}),
    "last norm; all convolutions full": ({**LAST_NORM, "conv_before": "full"}, {}),
    "last norm; not started from the data": (LAST_NORM, {(paper_net.Output, "start_from"): lambda *a: None}),
    "last norm; Muon on the FC layers only": (LAST_NORM, {(network_fit, "optimizers_for"): muon_on_fc_only}),
    "last norm; Adam only": (LAST_NORM, {(network_fit, "optimizers_for"): adam_only}),
    "last norm; Adam only, not started from the data": (
        LAST_NORM,
        {(network_fit, "optimizers_for"): adam_only, (paper_net.Output, "start_from"): lambda *a: None},
    ),
    "no last norm; Adam only": ({}, {(network_fit, "optimizers_for"): adam_only}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder written by cifar100_base.py")
    parser.add_argument("--samples", type=int, default=500, help="number of maps (%(default)s)")
    parser.add_argument("--iterations", type=int, default=250, help="updates of each fit (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (%(default)s)")
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends
    features = np.load(args.base / "features.npy", mmap_mode="r")[: args.samples]
    labels = np.load(args.base / "labels.npy")[: args.samples]
    for name, (settings, patches) in VARIANTS.items():
        with ExitStack() as stack:
            for (target, attribute), value in patches.items():
                stack.enter_context(patch.object(target, attribute, value))
            started = time.perf_counter()
            recording = krnet.record(
                features, labels, recorder="paper", iterations=args.iterations, seed=args.seed, **settings
            )
        info = recording.info()
        metrics = {key: info[key] for key in ("mse", "r2", "bytes", "fit_seconds")}
        ledger.append(
            "choices-small",
            settings={
                "variant": name,
                "recorder": "paper",
                "samples": args.samples,
                "iterations": args.iterations,
                **settings,
            },
            metrics=metrics,
            seconds=time.perf_counter() - started,
            seed=args.seed,
            class_order="lucir1993",
            files=[recording.path],
        )
        print(f"{name:48s} R2 {info['r2']:.3f}  {info['bytes'] / 1e6:.2f} MB  {info['fit_seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
