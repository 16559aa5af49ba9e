"""The compact KRNet: a few learned bytes for each sample, and a small network that makes its feature map of them.

    ids -> code (k whole numbers) * step -> axes (k, values) + mean -> map -> + Refine(map) -> clamp -> features
           '-- entropy-coded --'           '---- entropy-coded ----'          '- few bits -'

The file's bytes lie where they tell most. It starts as principal components: code and axes rounded as recorder pca does
it, which shares bits out by how much each direction varies. Then all of it is trained together, as it will be stored:
the network learns what features look like (zeros, edges, which channels go together) and repairs the map, the axes
learn what the network leaves to them, and each code moves to where its own map comes out best. Codes and axes pay for
their bits what a bit is worth, as a coder of Laplace variables counts them (Sullivan 1996), and the step follows the
bytes that are to be kept.

Gradients pass straight through all rounding (Bengio et al. 2013). Codes need no optimizer: along orthonormal axes the
squared error of a sample curves alike in all directions, so that plain descent is nearly Newton's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from krnet.config import from_dict
from krnet.errors import InputError, SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.axes import WORTH, Axes
from krnet.recorders.base import Content, Job, Recorder
from krnet.recorders.compact.axes_fit import CompactFit, learned
from krnet.recorders.compact.network import CompactConfig, read_codes, read_config, read_network
from krnet.recorders.compact.values_fit import DEAD_ZONE, ValuesFit
from krnet.recorders.fit import NetworkReplayer, run_fit

DEFAULT_STEP = 0.25


def fit(recorder: Recorder, job: Job) -> Content:
    if job.start is not None or job.preset is not None:
        name = "start" if job.preset is None else "preset"
        raise InputError(
            f"{name} is given, and a compact network has sizes of its own, and grows from a compact network alone; "
            f"leave {name} out"
        )
    if job.settings.get("components") == 0:
        config = from_dict(CompactConfig, {"step": DEFAULT_STEP, "dead_zone": DEAD_ZONE, **job.settings})
        return run_fit(recorder, ValuesFit(job, config), asdict(config))
    axes = learned(job)
    step = job.settings.get("step", DEFAULT_STEP)
    kept = max(1, min(int((axes.std > WORTH * step).sum()), len(axes.std)))
    config = from_dict(CompactConfig, {"step": step, "components": kept, **job.settings})
    if config.components > len(axes.std):
        raise SettingError(
            f"components is {config.components}; {len(job.source)} samples of shape {job.source.shape} have at most "
            f"{len(axes.std)}"
        )
    trainee = CompactFit(job, config, Axes(*(t.clone() for t in (axes.mean, axes.axes, axes.std))))
    return run_fit(recorder, trainee, asdict(config))


def replay(samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device) -> NetworkReplayer:
    config = read_config(settings)
    net = read_network(samples.shape, config, store)
    low, high = (store.tensor(n, shape=(net.shape[0],), dtype=torch.float32) for n in ("low", "high"))
    num_values = math.prod(samples.shape)
    reader = read_codes(samples.num_samples, num_values, config, store, device)
    return NetworkReplayer(
        net, reader.read, max(num_values, config.c1 * num_values // net.shape[0]), samples, low, high, device
    )
