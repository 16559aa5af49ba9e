"""examples/hidden_states: a draft head learns from a cache as from the states themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import krnet
from krnet.io import ledger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "hidden_states"))
import compare
from cached_states import CachedStates, collate


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of a quick run, with the alphabet as text; its folder, its results, its rows."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("states")
        patch.setattr(compare.Zoo, "text", torch.arange(3000) % 256)
        patch.setenv("KRNET_LEDGER", str(folder / "ledger.jsonl"))
        found = compare.compare(folder, effort=compare.QUICK, device="cpu")
        yield folder, found, ledger.read()


def test_each_way_has_its_bytes_its_agreement_and_a_row(results):
    _, found, rows = results
    real, fp8, quarter, eighth, sixteenth = (runs[0] for runs in found.values())
    assert real["bytes"] / fp8["bytes"] > 1.9
    assert real["bytes"] / quarter["bytes"] >= 4 and real["bytes"] / eighth["bytes"] >= 8
    assert real["bytes"] / sixteenth["bytes"] >= 16
    assert 1 == real["r2"] > quarter["r2"] > eighth["r2"] > sixteenth["r2"] > 0.5
    assert [row["metrics"]["way"] for row in rows] == list(found)
    assert all(0 < row["metrics"]["agreement"] <= 1 for row in rows)


def test_the_reader_gives_what_trainers_expect(results):
    path = results[0] / "pca-4.krn"
    recording, dataset = krnet.open(path), CachedStates.open(path, compare.WIDTH)
    assert len(dataset) == compare.QUICK.num_sequences
    for index in (0, 7):
        item, length = dataset[index], int(recording.lengths[index])
        whole = torch.cat([item["hidden_states"], item["verifier_last_hidden_states"]], 1)
        assert torch.equal(whole, recording.sequences[index])
        assert item["verifier_last_hidden_states"].shape == (length, compare.WIDTH)
        assert torch.equal(item["input_ids"].diff() % 256, torch.ones(length - 1).long())  # the alphabet
        assert item["loss_mask"].tolist() == [1] * (length - 1) + [0]


def test_workers_read_the_same_batches(results):
    dataset = CachedStates.open(results[0] / "pca-8.krn", compare.WIDTH)
    first, again = (
        next(iter(DataLoader(dataset, 4, collate_fn=collate, num_workers=number, multiprocessing_context=context)))
        for number, context in ((0, None), (1, "fork"))
    )
    lengths = dataset.sequences.lengths[:4]
    assert first["loss_mask"].sum(1).tolist() == (lengths - 1).tolist() and set(first) == set(again)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_what_follows_a_sequence_does_not_change_its_states():
    zoo_model = compare.sys.modules["zoo"].Transformer(torch.nn.Embedding(256, compare.WIDTH), 256, causal=True).eval()
    text = torch.arange(300) % 256
    made = compare.make_texts(zoo_model, text, 5, (6,), torch.Generator().manual_seed(0), torch.device("cpu"))
    ids = made.input_ids[: made.lengths[0]]
    padded = torch.nn.functional.pad(ids, (0, compare.TOKENS - len(ids)), value=9)[None]
    with torch.no_grad():
        expected = zoo_model.tokens(padded, 6)[0, : len(ids)]
    assert torch.allclose(made.states[: len(ids)].float(), expected, atol=0.05)
