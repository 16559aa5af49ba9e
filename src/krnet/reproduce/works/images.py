"""Work `images`: record the images of a feature set instead of its maps, in the same bytes and by the same recorder.

    images (N, C, H, W), each pixel a value -> recording -> replayed images -> R2, MSE of pixels
                                                         -> trunk -> maps   -> R2, MSE of maps, replay accuracy -> a row

The other side, the maps recorded within the same bytes, is a run of work `record`. What a learner makes of each is work
`learn`: with `fixed_layers=0` KRIL's F1 is the identity, so that images are what it records, replays and learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from krnet import api
from krnet.device import exact_math
from krnet.errors import SettingError
from krnet.features.metrics import fidelity
from krnet.features.stats import scan
from krnet.nn.fingerprint import fingerprint
from krnet.nn.loaded import LoadedHead
from krnet.progress import announcing
from krnet.reproduce.features import FeatureSet, open_set
from krnet.reproduce.recordings import RecordingSettings
from krnet.reproduce.works.base import Place, register
from krnet.reproduce.works.record import NOT_METRICS, Measured, Record, same_recording

OF_MAPS = ("mse", "r2", "replay_accuracy", "replay_per_second")  # of a point of images: named apart in the row


@register
class Images(Record):
    name = "images"

    def read(self, settings: Mapping[str, Any]) -> RecordingSettings:
        own = super().read(settings)
        if own.chosen_recorder.required:
            raise SettingError(
                f"recorder is {own.recorder}, which needs {' and '.join(sorted(own.chosen_recorder.required))} beside "
                f"what it records; here images are recorded as if they were maps. Take it in work record, or krnet here"
            )
        return own

    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        saved = row["settings"]
        finished = saved.get("work") == self.name and row["outcome"] == "ok" and row["seed"] == seed
        return finished and same_recording(saved, self.read(settings))

    def measure(self, own: RecordingSettings, seed: int, place: Place) -> Measured:
        features = open_set(own.features, place)
        bench = own.image_bench(features, seed, place)
        point, path = own.measure(bench, place.watch)
        recording = api.open(path, bench.device)
        announcing(place.watch)("maps of the replayed images")
        metrics = {name: value for name, value in point.items() if name not in (*NOT_METRICS, *OF_MAPS)}
        metrics |= {"image_mse": point["mse"], "image_r2": point["r2"]}
        metrics |= measure_maps(features, recording.replay, bench.device)
        return Measured(bench, point, path, metrics, features.class_order)


def measure_maps(
    features: FeatureSet, replay_images: Callable[[Tensor], Tensor], device: torch.device
) -> dict[str, float]:
    """R2, MSE and replay accuracy of the maps that the trunk makes of replayed images, beside the real maps."""
    source, trunk = features.source(), features.trunk.to(device).eval()
    head = LoadedHead(features.name, features.head.to(device), digest=fingerprint(features.head))
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (features.mean, features.std))
    num_right, real_right = 0, 0

    @torch.no_grad()
    def maps_of(ids: Tensor) -> Tensor:
        nonlocal num_right, real_right
        pixels = replay_images(ids).to(device).clamp(0, 255)  # (B, C, H, W)
        with exact_math():
            maps: Tensor = trunk((pixels / 255 - mean) / std)
        num_right += head.num_right(maps, features.labels[ids])
        real_right += head.num_right(source.read(ids).to(device).float(), features.labels[ids])
        return maps

    measured = fidelity(maps_of, source, scan(source))
    return {
        "mse": measured.mse,
        "r2": measured.r2,
        "replay_accuracy": num_right / len(source),
        "real_accuracy": real_right / len(source),
    }
