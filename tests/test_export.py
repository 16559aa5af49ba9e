"""Replays in a .npy file: the samples asked for, in chunks, whole or not at all."""

from pathlib import Path

import numpy as np
import pytest
import torch

import krnet
from krnet import export
from krnet.config import parse_ids
from krnet.errors import InputError, UnknownSampleError
from krnet.progress import Progress

N = 12


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> krnet.Recording:
    out = tmp_path_factory.mktemp("export") / "a.krn"
    return krnet.record(torch.randn(N, 3, 4, 4).relu(), [i % 3 for i in range(N)], out=out, iterations=2, device="cpu")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("5", [5]),
        ("-1", [11]),
        ("0:3", [0, 1, 2]),
        ("::5", [0, 5, 10]),
        ("5,3,7:9", [5, 3, 7, 8]),
        ("3,3", [3, 3]),
        ("10:99", [10, 11]),
        ("2::-1", [2, 1, 0]),
        (":", list(range(N))),
        ("99:,4", [4]),
    ],
)
def test_selection_means_what_it_means_in_python(recording: krnet.Recording, text: str, ids: list[int]) -> None:
    assert export.choose_ids(recording, parse_ids(text)).tolist() == ids


@pytest.mark.parametrize(
    ("ids", "chosen"),
    [
        (np.array([3, -1], np.int16), [3, 11]),
        (np.array([3, 1], np.uint64), [3, 1]),
        (np.arange(N) % 6 == 0, [0, 6]),
    ],
)
def test_ids_and_masks_can_come_from_a_file(
    recording: krnet.Recording, tmp_path: Path, ids: np.ndarray, chosen: list[int]
) -> None:
    np.save(tmp_path / "ids.npy", ids)
    assert export.choose_ids(recording, tmp_path / "ids.npy").tolist() == chosen


@pytest.mark.parametrize("text", ["12", "-13", "3,12", "99999999999999999999", "12:", "5:5"])
def test_ids_outside_the_recording_are_refused(recording: krnet.Recording, text: str) -> None:
    with pytest.raises(UnknownSampleError, match=r"this file holds 0\.\.11"):
        export.choose_ids(recording, parse_ids(text))


@pytest.mark.parametrize(
    "ids", [np.array([0.5]), np.array([[1]]), np.array([True]), np.array([2**64 - 1], np.uint64), np.array(["a"])]
)
def test_files_without_ids_are_refused(recording: krnet.Recording, tmp_path: Path, ids: np.ndarray) -> None:
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises((InputError, UnknownSampleError)):
        export.choose_ids(recording, tmp_path / "ids.npy")


def test_a_file_that_is_not_npy_is_refused_by_name(recording: krnet.Recording, tmp_path: Path) -> None:
    (tmp_path / "ids.npy").write_text("1 2 3")
    with pytest.raises(InputError, match=r"ids\.npy"):
        export.choose_ids(recording, tmp_path / "ids.npy")


def test_written_in_chunks_it_is_what_replay_gives(
    recording: krnet.Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "CHUNK_BYTES", 5 * 3 * 4 * 4 * 4)  # five samples
    told = []
    ids = torch.arange(N).flip(0)
    size_bytes = export.write_replays(
        recording, ids, tmp_path / "x.npy", labels_path=tmp_path / "y.npy", watch=told.append
    )
    found = np.load(tmp_path / "x.npy")
    assert found.dtype == np.float32 and found.flags.c_contiguous
    # Batches of another size: exact replay promises 1e-5 of the largest value.
    np.testing.assert_allclose(found, recording[ids], rtol=0, atol=1e-5 * float(recording[ids].abs().max()))
    assert np.load(tmp_path / "y.npy").tolist() == [i % 3 for i in range(N)][::-1]
    assert [(progress.done, progress.share) for progress in told] == [(5, 5 / N), (10, 10 / N), (N, 1.0)]
    assert size_bytes == (tmp_path / "x.npy").stat().st_size


def test_failure_half_way_leaves_no_file(
    recording: krnet.Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "CHUNK_BYTES", 1)

    def fail(progress: Progress) -> None:
        if progress.done == 3:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export.write_replays(recording, torch.arange(N), tmp_path / "x.npy", labels_path=tmp_path / "y.npy", watch=fail)
    assert list(tmp_path.iterdir()) == []


def test_outputs_never_replace_an_input_or_each_other(recording: krnet.Recording, tmp_path: Path) -> None:
    before = recording.path.read_bytes()
    for path, labels_path in [
        (recording.path, None),
        (tmp_path / "x", tmp_path / "x"),
        (tmp_path / "x", recording.path),
    ]:
        with pytest.raises(InputError, match="overwritten"):
            export.write_replays(recording, torch.arange(2), path, labels_path=labels_path)
    assert recording.path.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_labels_of_a_recording_without_labels_are_refused(tmp_path: Path) -> None:
    recording = krnet.record(torch.rand(4, 2, 2, 2), iterations=1, device="cpu")
    with pytest.raises(InputError, match="without labels"):
        export.write_replays(recording, torch.arange(2), tmp_path / "x.npy", labels_path=tmp_path / "y.npy")
    assert list(tmp_path.iterdir()) == []


def test_single_numbers_are_a_flat_file(tmp_path: Path) -> None:
    recording = krnet.record(torch.rand(6), iterations=1, device="cpu")
    export.write_replays(recording, torch.arange(6), tmp_path / "x.npy")
    assert np.load(tmp_path / "x.npy").shape == (6,)
