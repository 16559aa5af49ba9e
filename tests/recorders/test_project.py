"""Features that are not in a recording are shown as it would give them back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import krnet
from krnet.coding.open_tables import OpenTables
from krnet.errors import FeatureError, InputError
from krnet.recorders.base import get_recorder, recorder_names
from krnet.recorders.compact import projection
from maps import relu_maps

FIRST, ALL, SHAPE = 240, 300, (6, 6, 6)
NETWORK = {"recorder": "krnet", "iterations": 40, "device": "cpu", "c1": 8}
KINDS = {
    "raw": {"recorder": "raw"},
    "raw half": {"recorder": "raw", "dtype": "float16"},
    "quantized": {"recorder": "quantized", "step": 0.1},
    "transform": {"recorder": "transform", "step": 0.15},
    "pca": {"recorder": "pca", "step": 0.15},
    "pq": {"recorder": "pq", "parts": 2, "bits": 4},
    "pq priced": {"recorder": "pq", "parts": 2, "bits": 4, "rate_weight": 0.002},
    "rotation": {"recorder": "rotation", "levels": 8},
    "fp8": {"recorder": "fp8"},
    "krnet": {**NETWORK, "step": 0.3, "components": 20},
    "krnet values": {**NETWORK, "step": 0.3, "components": 0},
}
SAME_CODES = ("quantized", "transform", "pca", "pq", "pq priced")  # as appended samples have
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def features() -> Tensor:
    return relu_maps(ALL, SHAPE)[0]


@pytest.fixture(scope="module")
def recordings(features, tmp_path_factory) -> dict[str, krnet.Recording]:
    """A recording of the first samples of each kind."""
    folder = tmp_path_factory.mktemp("project")
    return {
        kind: krnet.record(features[:FIRST], out=folder / f"{kind}.krn", **settings) for kind, settings in KINDS.items()
    }


def r2(shown: Tensor, features: Tensor) -> float:
    return 1 - float((shown - features).square().mean() / features.var())


def test_every_recorder_that_projects_is_tested_here():
    able = {name for name in recorder_names() if get_recorder(name).projects}
    assert {settings["recorder"] for settings in KINDS.values()} == able


@every_kind
def test_recorded_features_come_back_about_as_well_as_in_a_replay_and_unseen_ones_nearly(recordings, features, kind):
    recording = recordings[kind]
    replayed = r2(recording[:], features[:FIRST])
    assert r2(recording.project(features[:FIRST]), features[:FIRST]) > replayed - 0.03
    assert r2(recording.project(features[FIRST:]), features[FIRST:]) > replayed - 0.1


@pytest.mark.parametrize("kind", SAME_CODES)
def test_unseen_features_get_the_codes_that_appended_ones_have(recordings, features, kind):
    recording, unseen = recordings[kind], features[FIRST:]
    assert r2(recording.project(unseen), recording.append(unseen, budget="1MB")[FIRST:]) > 0.999
    if not kind.startswith("pq"):
        # A symbol that the recording lacks gets its centroid from appended samples; the middle of a bin needs none.
        recording = krnet.record(features[:FIRST], **KINDS[kind], centroid=0.0)
    appended = recording.append(unseen, budget="1MB")[FIRST:]
    torch.testing.assert_close(recording.project(unseen), appended, atol=1e-5, rtol=1e-5)


def test_unseen_features_are_no_worse_than_appended_ones_of_a_network(recordings, features):
    for kind in ("krnet", "krnet values"):
        appended = recordings[kind].append(features[FIRST:], budget="1MB")[FIRST:]
        projected = recordings[kind].project(features[FIRST:])
        assert r2(projected, features[FIRST:]) > r2(appended, features[FIRST:]) - 0.01


@pytest.mark.parametrize("kind", ["krnet", "krnet values"])
def test_moving_codes_lowers_the_error_and_a_price_lowers_the_bits(recordings, features, kind):
    unseen, replayer = features[FIRST:], recordings[kind].load()
    tables = OpenTables.of(replayer.tables)

    def found(**how: Any) -> tuple[float, float]:
        symbols, shown = replayer.code(unseen, **how)
        return r2(shown, unseen), float(tables.bits(symbols).mean())

    plain, shown, stored = found(moves=0), found(moves=4), found(moves=4, stored=True)
    assert shown[0] > plain[0]
    if kind == "krnet":
        assert stored[0] > plain[0] and stored[1] < shown[1]


@pytest.mark.parametrize("components", [pytest.param(10, marks=pytest.mark.slow), 0])
def test_where_the_network_refines_only_the_first_samples_others_are_shown_as_appended_ones(components):
    """Few samples, fitted for long, and then others with their channels in another order: the network spoils these."""
    maps = relu_maps(120, (6, 5, 5))[0]
    settings = {"c1": 32, "components": components, "iterations": 400 if components else 100, "device": "cpu"}
    first = krnet.record(maps[:40], step=0.08 if components else 0.4, **settings)
    others = maps[40:].flip(1)
    grown = first.append(others, iterations=20)
    assert grown.settings["refined"] == 40
    assert r2(grown.project(others), grown[40:]) > (0.9999 if components else 0.99)
    # Before the file has grown, each map is left unrefined where that is better.
    assert r2(first.project(others), others) > r2(grown[40:], others) - 0.02


@every_kind
def test_the_symbols_of_unseen_features_say_all_that_is_shown_of_them(recordings, features, kind):
    recording = recordings[kind]
    replayer = recording.load()
    symbols, shown = replayer.code(features[FIRST:])
    assert len(symbols) == ALL - FIRST and torch.equal(shown, recording.project(features[FIRST:]))
    torch.testing.assert_close(replayer.show(symbols), shown)
    torch.testing.assert_close(replayer.show(symbols[7:9]), replayer.show(symbols)[7:9])
    if replayer.tables is None:
        assert symbols.dtype == recording.rows("values").dtype
    else:
        assert symbols.dtype == torch.int32 and symbols.shape[1:] == replayer.tables.column.shape


@every_kind
def test_a_batch_is_projected_as_its_parts_are_and_nothing_is_written(recordings, features, kind):
    recording, unseen = recordings[kind], features[FIRST:]
    before = recording.path.read_bytes()
    whole = recording.project(unseen)
    parts = torch.cat([recording.project(unseen[:1]), recording.project(unseen[1:7]), recording.project(unseen[7:])])
    assert ((whole - parts).abs() > 1e-4).float().mean() < 1e-3
    assert torch.equal(whole, recording.project(unseen)) and whole.dtype == torch.float32
    assert recording.path.read_bytes() == before and len(recording) == FIRST


@every_kind
def test_memory_is_bounded_by_blocks(recordings, features, kind, monkeypatch):
    whole = recordings[kind].project(features[FIRST:])
    monkeypatch.setattr("krnet.recording.CHUNK_BYTES", 7 * 4 * 216)
    monkeypatch.setattr(projection, "PART_BYTES", 3 * 4 * 288)
    blocks = krnet.open(recordings[kind].path, device="cpu").project(features[FIRST:])
    assert ((whole - blocks).abs() > 1e-4).float().mean() < 1e-3


def test_arrays_gradients_and_inference_mode_make_no_difference(recordings, features):
    unseen = features[FIRST:].clone().requires_grad_()
    for kind in ("krnet", "pca"):
        expected = recordings[kind].project(features[FIRST:])
        assert not recordings[kind].project(unseen).requires_grad
        with torch.inference_mode():
            opened = krnet.open(recordings[kind].path, device="cpu")
            opened.replay(torch.tensor([0]))
            assert torch.equal(opened.project(features[FIRST:]), expected)
        assert torch.equal(opened.project(features[FIRST:].numpy().astype(np.float64)), expected)


@every_kind
def test_other_shapes_and_values_that_are_not_finite_are_refused(recordings, features, kind):
    with pytest.raises(FeatureError, match=r"samples of \(6, 6\)"):
        recordings[kind].project(features[0])
    with pytest.raises(FeatureError, match="holds no samples"):
        recordings[kind].project(features[:0])
    spoilt = features[FIRST:].clone()
    spoilt[3, 0, 0, 0] = torch.nan
    with pytest.raises(FeatureError, match="sample 3 holds nan"):
        recordings[kind].project(spoilt)


def test_values_beyond_float16_are_refused_by_a_raw_recording_of_float16(recordings, features):
    with pytest.raises(FeatureError, match="holds float16, which ends at 65504"):
        recordings["raw half"].project(features * 1e6)


@pytest.mark.parametrize("recorder", ["paper", "autoencoder"])
def test_recorders_that_cannot_are_refused_by_name(features, recorder):
    recording = krnet.record(features[:40], recorder=recorder, iterations=1, d0=8, c0=8, c1=8, device="cpu")
    with pytest.raises(InputError, match=f"written by recorder {recorder}, .* those that can are krnet, pca"):
        recording.project(features[:2])


@pytest.mark.parametrize("shape", [(), (7,), (9, 4)])
@pytest.mark.parametrize("kind", ["raw", "quantized", "transform", "pca", "pq", "krnet", "krnet values"])
def test_vectors_and_numbers_are_projected_too(shape, kind):
    features = torch.rand(80, *shape, generator=torch.Generator().manual_seed(0)).cumsum(0) / 40
    settings = {name: value for name, value in KINDS[kind].items() if name not in ("step", "parts")}
    settings |= {"krnet": {"step": 0.05, "components": 1, "iterations": 3}, "krnet values": {"step": 0.05}}.get(
        kind, {}
    )
    recording = krnet.record(features, **settings)
    shown = recording.project(features)
    assert shown.shape == features.shape
    assert r2(shown, features) > r2(recording[:], features) - 0.01
