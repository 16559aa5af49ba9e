"""Sequences of different length in one recording: each comes back whole, by its number."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import krnet
from forge import rewrite_manifest, rewrite_metadata
from krnet.cli.app import app
from krnet.encoding import encode_share
from krnet.errors import ChecksumError, InputError, LengthsError, NotARecordingError, ResumeError, UnknownSampleError
from krnet.features.sequences import check_lengths, pack_lengths, unpack_lengths
from krnet.io import archive

pytestmark = pytest.mark.filterwarnings("ignore::krnet.errors.KrnetWarning")
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


@pytest.fixture(scope="module")
def folder(states, recording, tmp_path_factory) -> Path:
    """Of two parts; a sequence lies in both."""
    out = tmp_path_factory.mktemp("folder") / "texts"
    krnet.encode(recording, states, lengths=LENGTHS, out=out, part_samples=256)
    return out


def test_a_sequence_may_lie_in_two_parts_of_a_folder(folder, recording):
    found = krnet.open(folder)
    assert found.info()["num_parts"] == 2 and found.info()["num_sequences"] == len(LENGTHS)
    assert found.sequences.ids(3).tolist() == list(range(6, 306))
    assert torch.equal(found.sequences[3], recording.sequences[3])
    assert found.info()["bytes"] == sum(path.stat().st_size for path in folder.glob("*.krn"))
    krnet.verify(folder)


def test_a_folder_is_copied_with_its_sequences(folder, tmp_path):
    krnet.open(folder).save(tmp_path / "copy")
    assert krnet.open(tmp_path / "copy").lengths.tolist() == LENGTHS


def test_lengths_in_several_files_are_those_of_the_folder(states, recording, tmp_path):
    for name, chosen, lengths in (("a", states[:100], [40, 60]), ("b", states[100:], [220]), ("c", states, None)):
        tensors = {"features": chosen} | ({} if lengths is None else {"lengths": torch.tensor(lengths)})
        save_file(tensors, tmp_path / f"{name}.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in "abc"]
    assert krnet.encode(recording, files[:2], out=tmp_path / "out").lengths.tolist() == [40, 60, 220]
    with pytest.raises(LengthsError, match="others hold none"):
        krnet.encode(recording, files, out=tmp_path / "more")


def test_a_folder_is_resumed_with_the_same_lengths_only(folder, states, recording, tmp_path):
    own = shutil.copytree(folder, tmp_path / "own")
    (own / "manifest.json").unlink()
    again = {"out": own, "part_samples": 256, "resume": True}
    for other in (None, [N]):
        with pytest.raises(ResumeError, match="other sequences"):
            krnet.encode(recording, states, lengths=other, **again)
    krnet.encode(recording, states, lengths=LENGTHS, **again)
    assert (own / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()


def test_processes_that_share_the_work_write_the_same_sequences(folder, states, recording, tmp_path):
    shares = [
        encode_share(recording, states, lengths=LENGTHS, out=tmp_path / "own", share=(k, 2), part_samples=256)
        for k in range(2)
    ]
    assert shares[0] is None and shares[1].lengths.tolist() == LENGTHS
    assert (tmp_path / "own" / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()


def test_a_folder_behind_a_url_holds_sequences(folder, states, recording):
    pytest.importorskip("fsspec")
    krnet.encode(recording, states, lengths=LENGTHS, out="memory://texts/out", part_samples=256)
    found = krnet.open("memory://texts/out")
    assert found.lengths.tolist() == LENGTHS and found.fingerprint == krnet.open(folder).fingerprint
    assert torch.equal(found.sequences[3], recording.sequences[3])


@pytest.mark.parametrize("forged", [[N + 1, -1], [N - 1], [2**63 - 1, N], [N, 0]])
def test_forged_lengths_of_a_folder_are_a_named_error(folder, tmp_path, forged):
    own = shutil.copytree(folder, tmp_path / "own")
    archive.write(own / "sequences.krn", {"sequences": torch.tensor(forged)}, {"kind": "sequences"})
    kept = archive.open_archive(own / "sequences.krn")
    entry = {"name": "sequences.krn", "number": 1, "size_bytes": kept.nbytes, "digest": kept.checksum}
    rewrite_manifest(own, lambda table: table.update(sequences=entry))
    for use in (lambda: krnet.open(own).sequences, lambda: krnet.verify(own)):
        with pytest.raises(NotARecordingError, match="sequences"):
            use()


def test_a_folder_whose_lengths_are_missing_or_of_another_is_refused(folder, tmp_path):
    own = shutil.copytree(folder, tmp_path / "own")
    archive.write(own / "sequences.krn", pack_lengths(torch.tensor([5, 1, 0, 299, 15])), {"kind": "sequences"})
    with pytest.raises(ChecksumError, match="not the file"):
        krnet.verify(own)
    (own / "sequences.krn").unlink()
    with pytest.raises(NotARecordingError, match="is missing"):
        krnet.open(own)
    shutil.copy(folder / "sequences.krn", own)
    for entry in ({}, None, {"name": "../x", "number": 1, "size_bytes": 1, "digest": "0" * 32}):
        rewrite_manifest(own, lambda table, entry=entry: table.update(sequences=entry))
        with pytest.raises(NotARecordingError, match="entry"):
            krnet.open(own)


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
    run("encode", "--model", "x.krn", "x.npy", "--lengths", "l.npy", "-o", "parts")
    assert "5 sequences" in run("info", "parts")
    recording = krnet.open(Path("x.krn"))
    assert np.load("two-lengths.npy").tolist() == [300, 5]
    assert np.array_equal(np.load("two.npy"), torch.cat(recording.sequences[[8, 0]]).numpy())
    for wrong in (["--ids", "1", "--sequences", "1"], ["--lengths-out", "z.npy"], ["--sequences", "10"]):
        assert CliRunner().invoke(app, ["replay", "x.krn", "-o", "y.npy", *wrong]).exit_code != 0
