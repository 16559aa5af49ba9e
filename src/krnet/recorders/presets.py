"""Shared by recorders whose decoder is the paper's: its presets, and the settings that follow from a map's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from krnet.nn.paper_config import GEOMETRY, PAPER_FITS, PRESET_SHAPES
from krnet.nn.sizing import map_shape
from krnet.recorders.base import Recorder


class PresetRecorder(Recorder):
    """A recorder that takes the paper's presets."""

    derived = GEOMETRY
    trains = True

    def preset_for(self, shape: tuple[int, ...]) -> str | None:
        return PRESET_SHAPES.get(shape)

    def preset_fit(self, preset: str | None) -> Mapping[str, Any]:
        return PAPER_FITS.get(preset or "", {})

    def with_derived(self, settings: Mapping[str, Any], shape: tuple[int, ...], num_samples: int) -> dict[str, Any]:
        channels, height, width = map_shape(shape)
        return {**settings, "channels": channels, "height": height, "width": width, "vector": len(shape) <= 1}
