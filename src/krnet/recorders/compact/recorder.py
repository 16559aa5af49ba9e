"""Recorder krnet, the compact KRNet: each sample has a short learned code, and a small network turns codes into maps.

    ids -> code (k symbols) * step -> @ axes (k, values) + mean -> map -> + Refine(map) -> clamp -> features
           '--- entropy-coded ---'    '--- entropy-coded ---'             '- few-bit weights -'

network.py     the config, the network, and how both are read from a file
codes.py       training of codes, shared by all fits; fitting the codes into a budget
axes_fit.py    trains codes, axes and network together
values_fit.py  the same without axes, for samples too few to pay for them: a code is the quantised map itself
growth.py      fits codes of new samples to a network that is kept
moves.py       moves codes of samples that were not fitted towards the least error
plain.py       the file of a start as it is, without training
untrained.py   takes that file where it leaves less error than training has
projection.py  replays, and shows features that are not in a recording as it would replay them
starts.py      which blocks, how many axes and which step leave the least error in a budget, before training
budget.py      chooses all settings for a budget
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from krnet.config import from_dict
from krnet.errors import SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.axes import WORTH, Axes
from krnet.recorders.base import Content, Job, Recorder, Stored, register
from krnet.recorders.compact import budget as budgets
from krnet.recorders.compact.axes_fit import CompactFit, learn_axes
from krnet.recorders.compact.growth import grow
from krnet.recorders.compact.network import (
    CompactConfig,
    check_grid,
    network_multiplications,
    read_codes,
    read_config,
    read_network,
    stored_tensors,
    working_numbers,
)
from krnet.recorders.compact.projection import CompactReplayer
from krnet.recorders.compact.untrained import better_of, may_replace
from krnet.recorders.compact.values_fit import DEAD_ZONE, ValuesFit
from krnet.recorders.fit import run_fit
from krnet.recorders.ranges import read_range

DEFAULT_STEP = 0.25
DEFAULT_BITS = 1  # bits per value of the default budget, a 32nd of float32
DEFAULT_FIXED_BYTES = 6_000  # beside them: what header and tables of a small file take


@register
class CompactRecorder(Recorder):
    name = "krnet"
    config_class = CompactConfig
    derived = frozenset({"network", "most_bytes", "refined", "centroid"})
    """A budget sets most_bytes, growth refined, and codes that no training has moved a centroid."""
    inputs = frozenset({"head", "start"})
    trains = True
    grows = True
    projects = True

    def fit(self, job: Job) -> Content:
        if job.start is not None:
            return grow(self, job)
        if job.settings.get("components") == 0:
            config = from_dict(CompactConfig, {"step": DEFAULT_STEP, "dead_zone": DEAD_ZONE, **job.settings})
            content = run_fit(self, ValuesFit(job, config), config.to_settings())
            return better_of(self, job, content, config) if may_replace(job) else content
        step = job.settings.get("step", DEFAULT_STEP)
        config = from_dict(CompactConfig, {"step": step, "components": 1, **job.settings})
        check_grid(config, job.source.shape)
        axes = learn_axes(job, config.grid(job.source.shape))
        if "components" not in job.settings:
            config = replace(config, components=max(1, min(int((axes.std > WORTH * step).sum()), len(axes.std))))
        if config.components > len(axes.std):
            raise SettingError(
                f"components is {config.components}; {len(job.source)} samples of shape {job.source.shape} have at "
                f"most {len(axes.std)}"
            )
        # learn_axes caches its result, made in inference mode: training needs copies of its own.
        trainee = CompactFit(job, config, Axes(*(t.clone() for t in (axes.mean, axes.axes, axes.std))))
        content = run_fit(self, trainee, config.to_settings())
        return better_of(self, job, content, config) if may_replace(job) else content

    def default_budget(self, num_values: int, settings: Mapping[str, Any]) -> int | None:
        return None if "step" in settings else DEFAULT_FIXED_BYTES + DEFAULT_BITS * num_values // 8

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        return {"most_bytes": budget} if job.start is not None else budgets.for_budget(job, budget)

    def smallest_bytes(self, job: Job) -> tuple[int, int]:
        return super().smallest_bytes(job) if job.start is not None else budgets.smallest_bytes(job)

    def likely_bytes(self, job: Job, target_r2: float) -> tuple[float, float] | None:
        return None if job.start is not None else budgets.likely_bytes(job, target_r2)

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        return stored_tensors(shape, num_samples, from_dict(CompactConfig, settings))

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        return working_numbers(shape, from_dict(CompactConfig, settings))

    def network_multiplications(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        return network_multiplications(shape, from_dict(CompactConfig, settings))

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> CompactReplayer:
        config = read_config(settings, samples.shape)
        net = read_network(samples.shape, config, store)
        low, high = read_range(store, net.shape)
        reader = read_codes(samples.num_samples, samples.shape, config, store, device)
        return CompactReplayer(net, config, reader, samples, low, high, device)
