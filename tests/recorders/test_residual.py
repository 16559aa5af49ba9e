"""Recorders residual and local-search: what faiss codes, read back without faiss, with the codebooks counted."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import krnet
from krnet.io import archive
from krnet.recorders.additive import Quantiser, draw_positions, to_positions
from krnet.recorders.residual import ResidualRecorder
from maps import relu_maps

faiss = pytest.importorskip("faiss", reason="needs faiss: pip install 'krnet[rivals]'")
SETTINGS = {
    "residual": {"books": 3, "bits": 5},
    "local-search": {"books": 3, "bits": 5, "rounds": 2, "train_rounds": 5},
}
each = pytest.mark.parametrize("recorder", SETTINGS)


def vectors(number: int = 1500, size: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(size, size, generator=generator) * torch.logspace(0, -1, size)[:, None]
    return torch.randn(number, size, generator=generator) @ mixing


@each
def test_replays_are_what_faiss_decodes(recorder, monkeypatch):
    features, kept, codes = vectors(), [], Quantiser.codes
    monkeypatch.setattr(Quantiser, "codes", lambda self, points: kept.append(self) or codes(self, points))
    recording = krnet.record(features, recorder=recorder, **SETTINGS[recorder])
    low, high = features.amin(0), features.amax(0)
    x = (features - low) / (high - low)
    theirs = kept[-1].trained.decode(kept[-1].trained.compute_codes(x.numpy()))
    expected = torch.from_numpy(theirs).clamp(0, 1) * (high - low) + low
    torch.testing.assert_close(recording[:], expected, atol=1e-4, rtol=1e-4)


def test_a_file_is_read_where_faiss_is_missing(tmp_path):
    paths = [tmp_path / f"{recorder}.krn" for recorder in SETTINGS]
    replays = []
    for path in paths:
        replays.append(krnet.record(vectors(200), recorder=path.stem, out=path, **SETTINGS[path.stem])[:])
    script = "import sys; sys.modules['faiss'] = None\nimport krnet, torch\n"
    script += "torch.save([krnet.open(p)[:] for p in sys.argv[2:]], sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.pt"), *map(str, paths)], check=True)
    for found, expected in zip(torch.load(tmp_path / "x.pt"), replays, strict=True):
        assert torch.equal(found, expected)


@each
def test_all_entries_are_in_the_file_and_count(recorder):
    recording = krnet.record(vectors(), recorder=recorder, **SETTINGS[recorder])
    kept = archive.open_archive(recording.path)
    assert kept.tensor("entries", shape=(3, 32, 12), dtype=torch.float16).nbytes == 3 * 32 * 12 * 2
    code_bytes = kept.tensor("codes.stream").nbytes
    assert code_bytes <= 1.02 * 1500 * 3 * 5 / 8 + 4 * 24  # entropy coding never costs more than a block's last word
    assert recording.nbytes > code_bytes + 3 * 32 * 12 * 2


@each
def test_more_books_lower_the_error(recorder):
    features = vectors()
    made = [krnet.record(features, recorder=recorder, **SETTINGS[recorder] | {"books": n}).r2 for n in (1, 2, 4)]
    assert all(one + 0.02 < other for one, other in pairwise(made))


def test_a_beam_lowers_the_error():
    greedy, beam = (krnet.record(vectors(), recorder="residual", books=8, bits=4, beam=n).r2 for n in (1, 8))
    assert 1 - beam < 0.85 * (1 - greedy)


def test_each_book_quantises_what_those_before_it_left():
    """Trained one after the other: the first books of many are those of few."""
    features = vectors()
    made = [krnet.record(features, recorder="residual", books=n, bits=4) for n in (2, 5)]
    entries = [archive.open_archive(recording.path).tensor("entries") for recording in made]
    assert torch.equal(entries[0], entries[1][:2])


def test_channels_at_a_position_are_a_vector_and_come_back_in_their_place():
    maps = relu_maps(60, (6, 3, 4))[0]
    points = to_positions(maps)
    assert torch.equal(points[1 * 12 + 7], maps[1].flatten(1)[:, 7])
    recording = krnet.record(maps, recorder="residual", books=16, bits=8)
    assert recording.r2 > 0.99


def test_large_codebooks_are_left_to_sets_that_can_pay_for_them():
    made = []
    for features in (vectors(1000, 16), vectors(20_000, 16)):  # two bits a value
        made.append(krnet.record(features, recorder="residual", budget=features.numel() // 4, beam=1).settings["bits"])
    assert made[0] + 2 <= made[1]


def test_a_budget_is_used_up_to_a_book():
    features = vectors(4000)
    found = krnet.record(features, recorder="residual", budget="9kB")
    more = krnet.record(features, recorder="residual", **found.settings | {"books": found.settings["books"] + 1})
    assert found.nbytes <= 9000 < more.nbytes + 1500  # the size of a header is estimated to 1.4 kB


@pytest.mark.parametrize("forged", [float("nan"), float("inf")])
def test_forged_entries_that_are_no_numbers_are_refused(tmp_path, forged):
    path = krnet.record(vectors(100), recorder="residual", books=2, bits=2, out=tmp_path / "x.krn").path
    kept = archive.open_archive(path)
    tensors = {name: kept.tensor(name) for name in kept.names}
    tensors["entries"][1, 2, 3] = forged
    archive.write(path, tensors, kept.metadata)
    with pytest.raises(krnet.errors.NotARecordingError, match="entries that are no numbers"):
        krnet.open(path)[0]


def test_forged_codes_that_no_codebook_has_are_refused(tmp_path):
    path = krnet.record(vectors(100), recorder="residual", books=2, bits=3, out=tmp_path / "x.krn").path
    kept = archive.open_archive(path)
    tensors = {name: kept.tensor(name) for name in kept.names}
    settings = kept.metadata["settings"] | {"bits": 2}
    tensors["entries"] = tensors["entries"][:, :4].contiguous()
    archive.write(path, tensors, kept.metadata | {"settings": settings})
    with pytest.raises(krnet.errors.NotARecordingError, match="codes from 0 to 7; expected 0 to 3"):
        krnet.open(path)[:]


def test_positions_are_drawn_from_all_samples_and_never_more_than_there_are(monkeypatch):
    jobs, fit = [], ResidualRecorder.fit
    monkeypatch.setattr(ResidualRecorder, "fit", lambda self, job: jobs.append(job) or fit(self, job))
    krnet.record(relu_maps(50, (4, 3, 3))[0], recorder="residual", books=1, bits=1)
    assert draw_positions(jobs[0], 10_000).shape == (450, 4)
    assert draw_positions(jobs[0], 100).shape == (100, 4)


def test_a_search_for_a_budget_codes_all_samples_twice_at_most(monkeypatch):
    calls, find = [], ResidualRecorder._find_codes
    monkeypatch.setattr(ResidualRecorder, "_find_codes", lambda *given: calls.append(given) or find(*given))
    krnet.record(vectors(2000), recorder="residual", budget="6kB")
    assert 1 <= len(calls) <= 2
