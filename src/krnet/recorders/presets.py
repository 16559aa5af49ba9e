"""Shared by recorders whose decoder is the paper's: presets, and settings that follow from the shape of a map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from krnet.errors import OversizedRecordingError, SettingError
from krnet.nn.paper_config import GEOMETRY, PAPER_FITS, PRESET_SHAPES, DecoderConfig
from krnet.nn.sizing import geometry
from krnet.recorders.base import Recorder

Net = TypeVar("Net", bound=nn.Module)


class PresetRecorder(Recorder):
    """A recorder that takes the paper's presets."""

    derived = GEOMETRY
    trains = True

    def preset_for(self, shape: tuple[int, ...]) -> str | None:
        return PRESET_SHAPES.get(shape)

    def preset_fit(self, preset: str | None) -> Mapping[str, Any]:
        return PAPER_FITS.get(preset or "", {})

    def with_derived(self, settings: Mapping[str, Any], shape: tuple[int, ...], num_samples: int) -> dict[str, Any]:
        return {**settings, **geometry(shape)}


def check_geometry(config: DecoderConfig, shape: tuple[int, ...]) -> None:
    """Refuse a decoder for samples of another shape than those of the file."""
    if any(getattr(config, name) != value for name, value in geometry(shape).items()):
        raise SettingError(f"a network for other features than the file's {shape}")


def on_meta(make: Callable[[], Net]) -> Net:
    """Make a network on the meta device: shapes without memory."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, TypeError) as error:  # sizes whose product overflows
        raise OversizedRecordingError(f"a network of no possible size: {error}. Record again") from error
