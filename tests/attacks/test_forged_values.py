"""Values of other types and sizes than a file or a caller should give: named errors, and never another sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import krnet
from forge import rewrite_metadata
from krnet import export
from krnet.errors import InputError, RecordingError, UnknownSampleError
from krnet.io import archive

GOLDEN = Path(__file__).parents[1] / "golden"
HUGE = np.array([2**64 - 1], np.uint64)


@pytest.mark.parametrize(
    "which", [HUGE, torch.from_numpy(HUGE), [2**64 - 1], 2**70, slice(None, None, 0), slice(1.5, 3), slice("a"),
              1.5, "a"],
)  # fmt: skip
def test_an_index_that_means_no_sample_is_refused_by_name(which):
    with pytest.raises(UnknownSampleError, match=r"quantized\.krn"):
        krnet.open(GOLDEN / "quantized.krn")[which]


@pytest.mark.parametrize("ids", [HUGE, torch.from_numpy(HUGE), [1.5], [40], [-41]])
@pytest.mark.parametrize("recorder", ["raw-float32", "quantized", "paper-floats"])
def test_replay_refuses_ids_that_mean_no_sample_too(recorder, ids):
    with pytest.raises(UnknownSampleError):
        krnet.open(GOLDEN / f"{recorder}.krn").replay(ids)


def test_ids_of_any_integer_type_and_slices_mean_what_they_do_in_python():
    recording = krnet.open(GOLDEN / "quantized.krn")
    whole = recording[:]
    for dtype in (np.uint8, np.int16, np.uint32, np.uint64):
        assert torch.equal(recording[np.array([3, 1], dtype)], whole[[3, 1]])
        assert torch.equal(recording.replay(np.array([3, 1], dtype)), whole[[3, 1]])
    for part in (slice(3, 20, 4), slice(None, None, -2), slice(5, 2), slice(-3, None), slice(0, 10**9)):
        assert torch.equal(recording[part], whole[list(range(len(whole))[part])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", ["quantized", "pq", "compact-axes", "autoencoder-bits"])
def test_lengths_of_another_type_are_refused_by_name(tmp_path, name, dtype):
    kept, path = archive.open_archive(GOLDEN / f"{name}.krn"), tmp_path / "x.krn"
    tensors = {tensor: kept.tensor(tensor) for tensor in kept.names}
    for tensor in [tensor for tensor in tensors if tensor.endswith(".lengths")]:
        archive.write(path, tensors | {tensor: tensors[tensor].to(torch.int32).to(dtype)}, kept.metadata)
        with pytest.raises(RecordingError, match=r"x\.krn: .*lengths"):
            krnet.open(path)[0]


@pytest.mark.parametrize(
    "change", [{"mean": [2**63]}, {"std": [2**63]}, {"mean": [10**400]}, {"image_shape": [3, 2**63, 1]}]
)
def test_forged_settings_of_images_are_refused_by_name(tmp_path, change: dict[str, Any]):
    path = tmp_path / "x.krn"
    path.write_bytes((GOLDEN / "images-jpeg.krn").read_bytes())
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(change))
    with pytest.raises(RecordingError, match="settings of recorder images refused"):
        krnet.open(path, trunk=torch.nn.Identity())[0]


@pytest.mark.parametrize(
    "change", [{"feature_bytes": 0}, {"feature_bytes": -5}, {"feature_bytes": 10**30}, {"iterations": -1}]
)
def test_forged_counts_are_refused_before_they_are_shown(tmp_path, change: dict[str, Any]):
    """A ratio to 0 bytes could not be printed."""
    path = tmp_path / "x.krn"
    path.write_bytes((GOLDEN / "pq.krn").read_bytes())
    rewrite_metadata(path, lambda metadata: metadata.update(change))
    with pytest.raises(RecordingError, match=next(iter(change))):
        krnet.open(path)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"PK\x03\x04\x00\x00", b"\x93NUMPY", b"\x93NUMPY\x01", b"\xff" * 7]
)
def test_files_of_a_few_bytes_end_in_named_errors(tmp_path, content):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.npy"):
        export.choose_ids(krnet.open(GOLDEN / "quantized.krn"), path)
    with pytest.raises(InputError, match=r"x\.npy"):
        krnet.record(path, recorder="raw")
    with pytest.raises(RecordingError, match=r"x\.npy"):
        krnet.open(path)
