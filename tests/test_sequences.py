"""Sequences of different length in one recording: each comes back whole, by its number."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import krnet
from forge import rewrite_metadata
from krnet.cli.app import app
from krnet.errors import InputError, LengthsError, NotARecordingError, ResumeError, UnknownSampleError
from krnet.features.sequences import check_lengths, pack_lengths, unpack_lengths
from krnet.io import archive

LENGTHS = [5, 1, 0, 300, 14]
N = sum(LENGTHS)


@pytest.fixture(scope="module")
def states() -> Tensor:
    return torch.randn(N, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def recording(states, tmp_path_factory) -> krnet.Recording:
    out = tmp_path_factory.mktemp("texts") / "texts.krn"
    return krnet.record(states, torch.arange(N) % 7, lengths=LENGTHS, recorder="transform", step=0.05, out=out)


def test_a_sequence_is_the_replay_of_its_samples(recording):
    opened = krnet.open(recording.path)
    parts = opened[:].split(LENGTHS)
    assert len(opened.sequences) == len(LENGTHS) and opened.lengths.tolist() == LENGTHS
    for number, part in enumerate(parts):
        assert torch.equal(opened.sequences[number], part)
        assert torch.equal(opened.sequences[number - len(LENGTHS)], part)
    assert all(map(torch.equal, opened.sequences, parts))
    for found, number in zip(opened.sequences[[3, 0, 3, 2]], [3, 0, 3, 2], strict=True):
        assert torch.equal(found, parts[number])
    assert [len(found) for found in opened.sequences[1:4]] == LENGTHS[1:4]
    assert opened.sequences.ids([1, 0]).tolist() == [5, 0, 1, 2, 3, 4]
    assert opened.info()["num_sequences"] == len(LENGTHS)


def test_sequences_pass_to_a_worker(recording):
    again = pickle.loads(pickle.dumps(recording.sequences))
    assert torch.equal(again[4], recording.sequences[4])


def test_a_number_beyond_the_last_sequence_is_refused_by_name(recording):
    for which in (5, -6, [0, 9], 1.5):
        with pytest.raises(UnknownSampleError, match="sequence"):
            recording.sequences[which]


def test_a_recording_without_lengths_says_so(states, recording):
    plain = krnet.record(states, recorder="raw")
    assert plain.lengths is None and plain.info()["num_sequences"] is None
    with pytest.raises(InputError, match="recorded without lengths"):
        plain.sequences  # noqa: B018


def test_lengths_beside_the_features_are_found(states, tmp_path):
    tensors = {"features": states, "lengths": torch.tensor(LENGTHS)}
    save_file(tensors, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    for features in (tensors, tmp_path / "a.safetensors", tmp_path / "a.npz"):
        assert krnet.record(features, recorder="raw").lengths.tolist() == LENGTHS
    assert krnet.record(tensors, key="features", recorder="raw").lengths is None
    with pytest.raises(LengthsError, match="beside the features"):
        krnet.record(tensors | {"lengths": torch.tensor([3])}, recorder="raw")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_lengths_are_stored_in_the_smallest_type(dtype):
    lengths = torch.tensor([torch.iinfo(dtype).max // 4 if dtype == torch.int64 else torch.iinfo(dtype).max, 0])
    stored = pack_lengths(lengths)["sequences"]
    assert stored.dtype == dtype
    assert torch.equal(unpack_lengths(stored, int(lengths.sum()), "x.krn"), lengths)


@pytest.mark.parametrize(
    "lengths", [[N - 1], [N + 1], [-1, N + 1], [], [[N]], [float(N)], "no.npy", [2**63, N], [2**62] * 4 + [N], ["a"]]
)
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(LengthsError, match="expected whole numbers"):
        check_lengths(lengths, N)


@pytest.mark.parametrize(
    "forged",
    [
        torch.tensor([N + 1, -1]), torch.tensor([N - 1]), torch.tensor([2**62, 2**62, 2**62, 2**62, N]),
        torch.tensor([-(2**63), N]), torch.zeros(0, dtype=torch.int64), torch.tensor([[N]]), torch.tensor([float(N)]),
        torch.tensor([2**63 - 1]), torch.tensor([0, 1]).bool(), torch.tensor(N),
    ],
)  # fmt: skip
def test_forged_lengths_are_a_named_error(recording, tmp_path, forged):
    kept = archive.open_archive(recording.path)
    tensors = {name: kept.tensor(name) for name in kept.names} | {"sequences": forged}
    archive.write(tmp_path / "forged.krn", tensors, kept.metadata)
    with pytest.raises(NotARecordingError, match="lengths of sequences"):
        krnet.open(tmp_path / "forged.krn")


def test_a_file_that_counts_other_samples_than_its_sequences_is_refused(recording, tmp_path):
    path = recording.save(tmp_path / "a.krn")
    rewrite_metadata(path, lambda metadata: metadata.update(num_samples=10, classes=None))
    with pytest.raises(NotARecordingError, match="one is 300"):
        krnet.open(path)


def test_appended_sequences_follow_on(states, recording):
    grown = recording.append(states[:8], torch.zeros(8).long(), lengths=[2, 6])
    assert grown.lengths.tolist() == [*LENGTHS, 2, 6]
    assert torch.equal(grown.sequences[3], recording.sequences[3])
    assert torch.equal(grown.sequences[6], grown[N + 2 : N + 8])
    with pytest.raises(LengthsError, match="holds sequences"):
        recording.append(states[:8], torch.zeros(8).long())
    plain = krnet.record(states, recorder="quantized", step=0.1)
    with pytest.raises(LengthsError, match="recorded without lengths"):
        plain.append(states[:8], lengths=[8])


def test_a_budget_includes_the_lengths(states):
    lengths = [1] * N
    with_lengths = krnet.record(states, lengths=lengths, recorder="transform", budget=6000)
    assert with_lengths.nbytes <= 6000 and with_lengths.lengths.tolist() == lengths


def test_a_finished_recording_of_other_sequences_is_not_resumed(states, tmp_path):
    record = {"recorder": "raw", "out": tmp_path / "a.krn", "resume": True}
    krnet.record(states, lengths=LENGTHS, **record)
    assert krnet.record(states, lengths=LENGTHS, **record).lengths.tolist() == LENGTHS
    for other in (None, [N]):
        with pytest.raises(ResumeError, match="lengths"):
            krnet.record(states, lengths=other, **record)


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_line_records_appends_and_replays_sequences(states, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", states.numpy())
    np.save("l.npy", np.array(LENGTHS))
    run("record", "x.npy", "--lengths", "l.npy", "--recorder", "quantized", "-o", "x.krn")
    assert "5 sequences" in run("info", "x.krn")
    run("append", "x.krn", "x.npy", "--lengths", "l.npy", "-o", "x.krn")
    run("replay", "x.krn", "--sequences", "8,0", "-o", "two.npy", "--lengths-out", "two-lengths.npy")
    recording = krnet.open(Path("x.krn"))
    assert np.load("two-lengths.npy").tolist() == [300, 5]
    assert np.array_equal(np.load("two.npy"), torch.cat(recording.sequences[[8, 0]]).numpy())
    for wrong in (["--ids", "1", "--sequences", "1"], ["--lengths-out", "z.npy"], ["--sequences", "10"]):
        assert CliRunner().invoke(app, ["replay", "x.krn", "-o", "y.npy", *wrong]).exit_code != 0
