"""Resolve the settings of each method.

defaults of the method < base task < defaults for the image size < preset < settings of the caller  (the later wins)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from krnet.config import unknown_setting
from krnet.errors import SettingError
from krnet.learners import base
from krnet.learners.base_task import base_settings


class Shaped(Protocol):
    """What the defaults depend on: a DataSet, or anything that says how large its images are."""

    @property
    def image_shape(self) -> tuple[int, int, int]: ...


def defaults_for(data: Shaped, method: str) -> dict[str, Any]:
    """Defaults for the image size of this data set; the learners' own defaults are meant for CIFAR's 32 pixels."""
    size = max(data.image_shape[1:])
    if size <= 16:
        small = {"backbone": "resnet8", "fixed_layers": 5, "head_width": 512}
        return {**small, "base_epochs": 20, "epochs": 20, "batch_size": 64}
    if size <= 32:
        return {}
    common = {"backbone": "resnet18-small", "fixed_layers": 13, "base_epochs": 100, "epochs": 100}
    if size <= 96:
        return common
    return {**common, "backbone": "resnet18", **base.get_learner(method).large_images}


def settings_of(
    methods: Sequence[str], given: Mapping[str, Any], data: Shaped, preset: str | None = None
) -> dict[str, dict[str, Any]]:
    """By method: the settings to make its config from. Each method gets only those settings that it has.

    A setting that none of the methods has raises an error.

    preset  name of a set of settings to start from, for the methods that have it (gfr and pass: own)
    """
    presets = {m: base.get_learner(m).presets for m in methods}
    if preset is not None and not any(preset in named for named in presets.values()):
        known_presets = sorted({name for named in presets.values() for name in named})
        raise SettingError(f"preset is {preset!r}; these methods have {', '.join(known_presets) or 'none'}")
    known = {m: {f.name for f in fields(base.get_learner(m).config_class)} for m in methods}
    for name in given:
        if not any(name in names for names in known.values()):
            owners = [
                m for m in base.learner_names() if name in {f.name for f in fields(base.get_learner(m).config_class)}
            ]
            if owners:
                raise SettingError(
                    f"unknown setting {name!r} of {', '.join(methods)}: it is one of {', '.join(owners)}. Leave it out"
                )
            raise unknown_setting(name, set().union(*known.values()))
    merged = {}
    for m in methods:
        learner = base.get_learner(m)
        chosen = {**defaults_for(data, m), **presets[m].get(preset or "", {})}
        base_name = str(given.get("base", chosen.get("base", learner.default_base())))
        merged[m] = {"base": base_name, **base_settings(base_name, learner), **chosen, **given}
    return {m: {k: v for k, v in merged[m].items() if k in known[m]} for m in methods}
