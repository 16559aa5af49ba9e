"""A loader goes on where it stopped, in the same order whoever decodes."""

import json
from itertools import chain

import pytest
import torch

import krnet
from krnet.errors import InputError, ResumeError
from krnet.loading import loader as module

N = 90
FEATURES = torch.randn(N, 3, 2, 2, generator=torch.Generator().manual_seed(0))
FEATURES[:, 0, 0, 0] = torch.arange(N) / 100  # each sample can be told


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    out = tmp_path_factory.mktemp("loader") / "a.krn"
    return krnet.record(FEATURES, torch.arange(N) * 7 % 5, recorder="raw", out=out)


def ids_of(batches):
    return [(features[:, 0, 0, 0] * 100).round().long().tolist() for features, _ in batches]


OPTIONS = {"batch_size": 8, "shuffle": True, "seed": 1, "buffer": 32}


@pytest.mark.parametrize("at", [0, 1, 5, 11, 12])
def test_a_pass_is_taken_up_behind_the_last_batch_that_was_handed_out(at, recording):
    whole = recording.loader(**OPTIONS)
    first, second = ids_of(whole), ids_of(whole)
    assert first != second and len(first) == 12
    stopped = recording.loader(**OPTIONS)
    passes = iter(stopped)
    before = ids_of(next(passes) for _ in range(at))
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = recording.loader(**OPTIONS)
    resumed.load_state_dict(state)
    assert before + ids_of(resumed) == first
    assert ids_of(resumed) == second
    assert resumed.state_dict()["epoch"] == 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_order_is_the_same_for_any_number_of_workers_also_after_a_stop(num_workers, recording):
    plain, shared = (recording.loader(**OPTIONS, num_workers=n) for n in (0, num_workers))
    expected = list(plain)
    found = list(shared)
    assert all(torch.equal(a, b) for one, other in zip(expected, found, strict=True) for a, b in zip(one, other))
    shared.load_state_dict({**plain.state_dict(), "epoch": 0, "batch": 7})
    assert ids_of(shared) == ids_of(expected)[7:]


def test_a_pass_that_is_left_in_the_middle_is_followed_by_the_next_and_set_epoch_chooses_one(recording):
    loader = recording.loader(**OPTIONS)
    passes = [ids_of(loader) for _ in range(3)]
    loader.set_epoch(0)
    for _ in loader:
        break
    assert loader.state_dict()["batch"] == 1
    assert ids_of(loader) == passes[1]
    loader.set_epoch(2)
    assert ids_of(loader) == passes[2]


def test_shares_are_the_batches_of_one_process_together(recording):
    whole = ids_of(recording.loader(**OPTIONS))
    parts = [ids_of(recording.loader(**OPTIONS, share=(k, 3))) for k in range(3)]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert sorted(batch) == sorted(chain.from_iterable(shares))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_few_samples_of_a_large_file_are_shuffled_together(recording, monkeypatch):
    assert recording.loader(8, shuffle=True).order.buffer == N
    monkeypatch.setattr(module, "RESIDENT_BYTES", recording.nbytes // 3)
    order = recording.loader(8, shuffle=True).order
    assert order.buffer in (N // 3 - 1, N // 3) and len(order.ranges) > 40
    assert sorted(chain.from_iterable(ids_of(recording.loader(8, shuffle=True)))) == list(range(N))


def test_a_folder_of_parts_is_loaded_as_the_file_that_it_was_made_with(tmp_path):
    features = torch.randn(600, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    features[:, 0, 0, 0] = torch.arange(600) / 100
    labels = torch.arange(600) * 7 % 5
    krnet.record(features[:300], recorder="raw", out=tmp_path / "model.krn")
    shards = krnet.extract(torch.nn.Identity(), features, labels, out=tmp_path / "shards", shard_size="20kB")
    folder = krnet.encode(tmp_path / "model.krn", shards, out=tmp_path / "parts", part_samples=256)
    assert folder.info()["num_parts"] == 3
    whole = ids_of(folder.loader(**OPTIONS))
    assert sorted(chain.from_iterable(whole)) == list(range(600))
    loader = folder.loader(**OPTIONS, num_workers=2)
    passes = iter(loader)
    before = ids_of(next(passes) for _ in range(20))
    state = loader.state_dict()
    resumed = krnet.open(tmp_path / "parts").loader(**OPTIONS)
    resumed.load_state_dict(state)
    assert before + ids_of(resumed) == whole
    for found, targets in folder.loader(**OPTIONS):
        assert torch.equal(targets, labels[(found[:, 0, 0, 0] * 100).round().long()])


def test_labels_belong_to_features_and_are_read_once(recording, monkeypatch):
    reads = []
    labels = recording.labels
    monkeypatch.setattr(type(recording), "labels", property(lambda self: reads.append(1) or labels))
    for features, found in recording.loader(**OPTIONS):
        ids = (features[:, 0, 0, 0] * 100).round().long()
        assert torch.equal(found, labels[ids])
    assert len(reads) == 1


def test_a_state_of_another_loader_is_refused(recording):
    loader = recording.loader(**OPTIONS)
    state = loader.state_dict()
    for name, value in {"seed": 2, "batch_size": 9, "buffer": 33, "recording": "0" * 32, "shuffle": None}.items():
        with pytest.raises(ResumeError, match=f"a loader with {name}"):
            loader.load_state_dict({**state, name: value})
    for name, value in {"batch": 13, "epoch": -1}.items():
        with pytest.raises(InputError, match=name):
            loader.load_state_dict({**state, name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"buffer": 0}, "buffer is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"share": (2, 2)}, r"share is \(2, 2\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(recording, options, message):
    with pytest.raises(InputError, match=message):
        recording.loader(**{**OPTIONS, **options})
