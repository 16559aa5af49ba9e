"""Recordings are made, opened and read by sample ID; what cannot be is refused before anything is fitted."""

import gc
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import krnet
from krnet import recording as replay
from krnet.errors import (
    FeatureError,
    InputError,
    LabelError,
    RecordingError,
    ResumeError,
    SettingError,
    UnknownSampleError,
)
from krnet.io import archive
from krnet.recorders.compact.axes_fit import CompactFit
from krnet.recorders.compact.recorder import CompactRecorder
from krnet.recorders.compact.values_fit import ValuesFit
from krnet.recorders.paper.recorder import KRNetFit, PaperRecorder
from maps import relu_maps

TINY = {"recorder": "paper", "iterations": 5, "d0": 16, "c0": 8, "c1": 8}


def tiny(**changes) -> krnet.Recording:
    features, labels = relu_maps(20, (3, 4, 5))
    return krnet.record(features, labels, **TINY | changes)


@pytest.fixture(scope="module")
def recording(recorded) -> krnet.Recording:
    return krnet.open(recorded.path)


@pytest.fixture(scope="module")
def everything(recording) -> torch.Tensor:
    return recording.replay(torch.arange(len(recording)))


@pytest.fixture
def no_fit(monkeypatch):
    def fit(self, job):
        raise AssertionError("fitted")

    for recorder in (PaperRecorder, CompactRecorder):
        monkeypatch.setattr(recorder, "fit", fit)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-5 of the largest value of the sample, as replay promises for any batch and order."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    limit = 1e-5 * expected.flatten(1).abs().amax(1)
    assert ((found - expected).flatten(1).abs().amax(1) <= limit).all()


# ---------------------------------------------------------------- indexing


MASK = torch.arange(60) % 7 == 3


@pytest.mark.parametrize(
    "which",
    [
        slice(2, 9), slice(None), slice(-5, None), slice(None, None, -1), slice(50, 3, -7), slice(0, 60, 13),
        slice(9, 2), slice(2, 9, -1), slice(55, 99), [5, 3], [3, 3, 3], [-1, 0, -60], (4, 2), range(7, 3, -1),
        torch.tensor([59, 0, 7]), torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([-3], dtype=torch.int32),
        np.array([7, 5]), np.arange(6)[::-1], np.array([7], dtype=np.uint64), MASK, MASK.numpy(), MASK.tolist(),
        torch.zeros(60, dtype=torch.bool), [], torch.tensor([]), np.array([]),
    ],
    ids=str,
)  # fmt: skip
def test_a_batch_comes_in_the_order_asked(recording, everything, which):
    plain = list(which) if isinstance(which, (tuple, range)) else which
    if isinstance(plain, torch.Tensor):
        plain = plain.numpy()
    expected = np.arange(60)[plain if isinstance(plain, slice) or len(plain) else []]
    assert_near(recording[which], everything[expected.tolist()])


@pytest.mark.parametrize("which", [0, 59, -1, -60, np.int64(7), torch.tensor(7), np.uint8(7)], ids=repr)
def test_one_number_gives_one_sample(recording, everything, which):
    found = recording[which]
    assert found.shape == (6, 7, 5) and found.dtype == torch.float32
    assert_near(found[None], everything[int(which)][None])


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: range(2, 5)])
def test_ids_may_be_any_whole_numbers_in_order(recording, everything, kind):
    assert_near(recording.replay(kind([2, 3, 4])), everything[2:5])


def test_a_table_of_ids_gives_a_table_of_samples(recording, everything):
    found = recording[torch.tensor([[1, 2, 3], [4, 5, -1]])]
    assert found.shape == (2, 3, 6, 7, 5)
    assert_near(found.flatten(0, 1), everything[[1, 2, 3, 4, 5, 59]])


@pytest.mark.parametrize(
    "which",
    [
        60, -61, 2**40, 2**80, [0, 60], [-61], torch.tensor([5, 99]), 1.0, [1.5], torch.tensor([1.0]), True,
        [True, False], torch.ones(61, dtype=torch.bool), "5", None, {}, [[1], [2, 3]], [None],
        torch.tensor([1j]), np.array(["a"]), object(),
    ],
    ids=lambda which: "object" if type(which) is object else repr(which),
)  # fmt: skip
def test_what_is_no_sample_of_the_recording_is_refused(recording, which):
    with pytest.raises(UnknownSampleError, match=r"small\.krn: ") as caught:
        recording[which]
    assert isinstance(caught.value, IndexError) and isinstance(caught.value, RecordingError)


def test_the_refusal_names_the_id_and_the_range(recording):
    with pytest.raises(UnknownSampleError, match=r"no sample ID 77; this file holds 0\.\.59"):
        recording[[3, 77]]


def test_iterating_ends_after_the_last_sample(recording, everything):
    assert_near(torch.stack(list(recording)), everything)


def test_replay_of_any_batch_and_order_is_the_same_to_1e5_of_the_largest_value(recording, everything, monkeypatch):
    for seed in range(3):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        for size in (1, 7, 60):
            found = torch.cat([recording[ids] for ids in order.split(size)])
            assert_near(found, everything[order])
    monkeypatch.setattr(replay, "CHUNK_BYTES", 1)
    assert_near(recording[:], everything)


def test_replays_are_ordinary_tensors_that_may_be_changed_and_trained_on(recording, everything):
    batch = recording[:4]
    batch.mul_(2)
    weight = torch.ones(6, requires_grad=True)
    (batch.mean((2, 3)) * weight).sum().backward()
    assert weight.grad.isfinite().all()
    assert_near(recording[:4], everything[:4])


def test_replays_are_near_the_features_in_their_own_scale(recording, recorded, everything):
    error = (everything - recorded.features).square().mean()
    assert error < 0.7 * recorded.features.var()
    assert everything.dtype == torch.float32 and everything.shape == recorded.features.shape


# ---------------------------------------------------------------- what it says of itself


def test_length_shape_labels_and_bytes_are_those_recorded(recording, recorded):
    assert (len(recording), recording.shape) == (60, (6, 7, 5))
    assert recording.labels.dtype == torch.int64 and torch.equal(recording.labels, recorded.labels)
    assert recording.nbytes == os.stat(recorded.path).st_size
    assert recording.path == recorded.path and "60 samples" in repr(recording)


def test_changing_the_labels_one_is_given_changes_nothing(recording, recorded):
    recording.labels.zero_()
    assert torch.equal(recording.labels, recorded.labels)


@pytest.mark.parametrize(
    "labels",
    [
        None,
        [4] * 20,
        list(range(20)),
        sorted([9, -5, 2**62, 0] * 5),
        [9, -5, 2**62, 0] * 5,
        [0] * 19 + [1],
    ],
    ids=["none", "one class", "all different", "sorted", "interleaved", "one apart"],
)
def test_labels_come_back_as_given(labels, tmp_path):
    features = relu_maps(20, (3, 4, 5))[0]
    krnet.record(features, labels, out=tmp_path / "x.krn", **TINY | {"iterations": 1})
    found = krnet.open(tmp_path / "x.krn").labels
    assert found is None if labels is None else found.tolist() == labels


def test_info_holds_plain_values_that_agree_with_the_file(recording, recorded):
    info = recording.info()
    assert info["num_samples"] == 60 and info["shape"] == [6, 7, 5] and info["recorder"] == "paper"
    assert info["bytes"] == os.stat(recorded.path).st_size
    assert info["bytes_per_sample"] == info["bytes"] / 60
    assert info["bits_per_value"] == pytest.approx(8 * info["bytes"] / (60 * 6 * 7 * 5))
    assert 0 < info["mse"] < 1 and 0 < info["r2"] < 1 and info["fit_seconds"] > 0
    assert info["zero_ratio"] == pytest.approx((recorded.features == 0).double().mean().item())
    assert info["num_classes"] == 4 and info["iterations"] == 80 and info["stopped_by"] == "iterations"
    assert info["feature_bytes"] == 60 * 6 * 7 * 5 * 4


# ---------------------------------------------------------------- copies, devices, loaders


def test_a_saved_copy_is_the_same_file(recording, recorded, everything, tmp_path):
    assert recording.save(tmp_path / "copy.krn") == tmp_path / "copy.krn"
    assert (tmp_path / "copy.krn").read_bytes() == recorded.path.read_bytes()
    assert torch.equal(krnet.open(tmp_path / "copy.krn")[:], everything)


def test_saving_over_itself_keeps_the_recording(recorded, tmp_path):
    path = tmp_path / "x.krn"
    path.write_bytes(recorded.path.read_bytes())
    assert krnet.open(path).save(path) == path
    assert path.read_bytes() == recorded.path.read_bytes()


def test_a_damaged_recording_is_not_saved(recorded, tmp_path):
    damaged = bytearray(recorded.path.read_bytes())
    damaged[len(damaged) // 2] ^= 1  # in the weights, which opening does not read
    (tmp_path / "x.krn").write_bytes(damaged)
    opened = krnet.open(tmp_path / "x.krn")
    with pytest.raises(RecordingError):
        opened.save(tmp_path / "copy.krn")
    assert not (tmp_path / "copy.krn").exists()


def test_another_device_or_precision_gives_the_same_samples(recording, everything):
    moved = recording.to("cpu", "fast")
    assert (moved.device.type, moved.precision, recording.precision) == ("cpu", "fast", "exact")
    assert_near(moved[:], everything)
    assert recording.to(torch.device("cpu")).precision == "exact"
    with pytest.raises(SettingError, match="precision is 'half'; expected one of exact, fast"):
        recording.to("cpu", "half")
    with pytest.raises(SettingError, match="device 'tpu'"):
        recording.to("tpu")


def test_a_pickled_recording_reads_on(recording, everything):
    assert_near(pickle.loads(pickle.dumps(recording))[:], everything)


def test_pickling_does_not_carry_the_weights_along(recording):
    recording[0]
    assert len(pickle.dumps(recording)) < recording.nbytes / 4


def test_a_dataset_gives_pairs_of_feature_and_label(recording, recorded, everything):
    dataset = recording.dataset()
    assert len(dataset) == 60
    feature, label = dataset[7]
    assert_near(feature[None], everything[7][None])
    assert label == recorded.labels[7]
    unlabelled = krnet.record(recorded.features[:9], iterations=1, recorder="paper", d0=16, c0=8).dataset()
    assert unlabelled[3][1] == -1


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_dataloader_with_workers_gives_what_indexing_gives(recording, recorded, everything, context):
    loader = DataLoader(recording.dataset(), batch_size=16, num_workers=2, multiprocessing_context=context)
    features, labels = (torch.cat(parts) for parts in zip(*loader))
    assert_near(features, everything)
    assert torch.equal(labels, recorded.labels)


def test_a_loader_covers_every_sample_once_in_an_order_of_its_seed(recording, recorded, everything):
    def passes(seed: int) -> list[torch.Tensor]:
        loader = recording.loader(16, shuffle=True, seed=seed)
        assert len(loader) == 4
        return [torch.cat([features for features, _ in loader]) for _ in range(2)]

    first, second = passes(5)
    for found in (first, second):
        assert_near(found[torch.cdist(everything.flatten(1), found.flatten(1)).argmin(1)], everything)
    assert not torch.allclose(first, second)
    assert all(torch.equal(a, b) for a, b in zip(passes(5), (first, second)))
    assert not torch.allclose(passes(6)[0], first)


def test_labels_of_a_loader_belong_to_its_features(recording, recorded, everything):
    for features, labels in recording.loader(7, shuffle=True):
        ids = torch.cdist(features.flatten(1), everything.flatten(1)).argmin(1)
        assert torch.equal(labels, recorded.labels[ids])


def test_a_loader_that_does_not_shuffle_keeps_the_order_of_ids(recording, recorded, everything):
    loader = recording.loader(25)
    assert [len(labels) for _, labels in loader] == [25, 25, 10]
    assert_near(torch.cat([features for features, _ in loader]), everything)
    assert torch.equal(torch.cat([labels for _, labels in loader]), recorded.labels)
    with pytest.raises(InputError, match="batch_size is 0"):
        recording.loader(0)


# ---------------------------------------------------------------- temporary files


def test_without_out_the_file_lives_as_long_as_the_recordings_that_read_it():
    recording = tiny()
    path = recording.path
    dataset = recording.dataset()
    del recording
    gc.collect()
    assert path.exists() and dataset[0][0].isfinite().all()
    del dataset
    gc.collect()
    assert not path.exists() and not path.parent.exists()


def test_a_forked_process_leaves_its_parents_temporary_file_alone():
    recording = tiny()
    path = recording.path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forking with threads
        child = os.fork()
    if child == 0:
        recording = None
        gc.collect()
        os._exit(0 if path.exists() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.exists() and recording[0].isfinite().all()


def test_a_refused_recording_leaves_no_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    features = relu_maps(20, (3, 4, 5))[0]
    with pytest.raises(LabelError):
        krnet.record(features, [1, 2])
    gc.collect()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- recording


def test_features_and_labels_of_the_caller_are_not_changed():
    features, labels = relu_maps(20, (3, 4, 5))
    features.requires_grad_()
    before = features.detach().clone(), labels.clone()
    krnet.record(features, labels, **TINY)
    assert torch.equal(features, before[0]) and torch.equal(labels, before[1])
    assert features.requires_grad and features.grad is None


def test_the_same_seed_gives_the_same_file_apart_from_times_and_another_seed_does_not(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        tiny(out=tmp_path / name, seed=seed)
    a, b, c = (archive.open_archive(tmp_path / name) for name in "abc")
    assert a.names == b.names and all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names)
    assert a.metadata | {"times": 0} == b.metadata | {"times": 0}
    assert not torch.equal(a.tensor("net.embed.static"), c.tensor("net.embed.static"))


def test_recording_leaves_the_file_alone_and_nothing_beside_it(tmp_path):
    tiny(out=tmp_path / "x.krn", checkpoint_s=0)
    assert [path.name for path in tmp_path.iterdir()] == ["x.krn"]
    assert str(tmp_path).encode() not in (tmp_path / "x.krn").read_bytes()


@pytest.mark.parametrize("recorder", ["krnet", "paper"])
@pytest.mark.parametrize(
    "given, kind, message",
    [
        ({"iteration": 5}, SettingError, "unknown setting 'iteration'; did you mean 'iterations'"),
        ({"batchsize": 5}, SettingError, "did you mean 'batch_size'"),
        ({"chanels": 5}, SettingError, "unknown setting 'chanels'"),
        ({"height": 5}, SettingError, "unknown setting 'height'"),
        ({"xyzzy": 1}, SettingError, "known settings: .*batch_size"),
        ({"iterations": 0}, SettingError, "iterations is 0; expected at least 1"),
        ({"iterations": 1.5}, SettingError, "iterations is 1.5; expected a whole number"),
        ({"target_r2": 2}, SettingError, "target_r2 is 2"),
        ({"stop_at_r2": 2}, SettingError, "stop_at_r2 is 2"),
        ({"target_r2": float("nan")}, SettingError, "target_r2 is nan"),
        ({"stop_at_r2": float("nan")}, SettingError, "stop_at_r2 is nan"),
        ({"target_r2": "0.5"}, SettingError, "target_r2 is '0.5'"),
        ({"target_r2": -float("inf")}, SettingError, "target_r2 is -inf"),
        ({"time_budget": -1}, SettingError, "time_budget is -1"),
        ({"time_budget": 0}, SettingError, "time_budget is 0"),
        ({"time_budget": float("inf")}, SettingError, "time_budget is inf"),
        ({"lr": -1e-3}, SettingError, "lr is -0.001; expected at least 0"),
        ({"lr": "high"}, SettingError, "lr is 'high'"),
        ({"lr": None}, SettingError, "lr is None"),
        ({"lr": float("inf")}, SettingError, "lr is inf"),
        ({"seed": -1}, SettingError, "seed is -1"),
        ({"batch_size": 0}, SettingError, "batch_size is 0"),
        ({"schedule": "slow"}, SettingError, "schedule is 'slow'; expected one of fast, paper"),
        ({"recorder": "jpeg"}, SettingError, "unknown recorder 'jpeg'; known recorders: .*krnet"),
        ({"device": "tpu"}, SettingError, "device 'tpu'"),
        ({"device": "mps"}, SettingError, "device 'mps' is not supported"),
        ({"device": 1.5}, SettingError, "device 1.5"),
        ({"recorder": None, "preset": "cifar10"}, SettingError, "preset is 'cifar10'; expected one of cifar100"),
        ({"recorder": "paper", "d0": 7}, SettingError, "d0 is 7"),
        ({"recorder": "paper", "c0": "many"}, SettingError, "c0 is 'many'"),
        ({"out": "nowhere/x.krn"}, InputError, "no folder nowhere; create it"),
        ({"out": "."}, InputError, "is a folder"),
        ({"labels": [1, 2]}, LabelError, r"shape \(2,\)"),
        ({"features": torch.full((3, 4), torch.nan)}, FeatureError, "sample 0 holds nan"),
        ({"features": torch.zeros(0, 4)}, FeatureError, "no samples"),
        ({"features": "nowhere.npy"}, FeatureError, r"nowhere\.npy: no such file"),
        ({"key": "a"}, FeatureError, "the key 'a' was given for a single array"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_refused_before_fitting(recorder, given, kind, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    steps = []
    for fit in (KRNetFit, CompactFit, ValuesFit):
        monkeypatch.setattr(fit, "step", lambda *a: steps.append(a))
    usual = {"features": relu_maps(20, (3, 4, 5))[0], "recorder": recorder}
    with pytest.raises(kind, match=message):
        krnet.record(**usual | given)
    assert steps == [] and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_fitting(no_fit):
    for device in ("cuda", "cuda:0"):
        with pytest.raises(SettingError, match="no usable GPU; use device cpu"):
            tiny(device=device)


def test_opening_what_is_no_recording_is_refused(tmp_path):
    with pytest.raises(RecordingError, match=r"missing\.krn"):
        krnet.open(tmp_path / "missing.krn")
    (tmp_path / "x.krn").write_bytes(Path(__file__).read_bytes())
    with pytest.raises(RecordingError):
        krnet.open(str(tmp_path / "x.krn"))


# ---------------------------------------------------------------- a finished file


def test_resume_returns_a_finished_recording_without_fitting(recorded, everything, no_fit):
    before = recorded.path.stat()
    found = krnet.record(
        recorded.features, recorded.labels, out=recorded.path, resume=True, recorder="paper", d0=32, c0=8, c1=8
    )
    assert_near(found[:], everything)
    assert recorded.path.stat() == before


def test_resume_refuses_a_finished_recording_of_features_of_another_shape(recorded, no_fit):
    with pytest.raises(ResumeError, match="samples 60; this one is to have samples 59"):
        krnet.record(recorded.features[:59], recorder="paper", out=recorded.path, resume=True)


def test_resume_refuses_a_finished_recording_of_other_settings_labels_or_features(recorded, no_fit, tmp_path):
    finished = {"recorder": "paper", "out": recorded.path, "resume": True}
    for labels, changes, message in (
        (recorded.labels, {"c1": 16}, "c1 8; this one is to have c1 16"),
        (recorded.labels, {"recorder": "krnet"}, "recorder paper; this one is to have recorder krnet"),
        (recorded.labels.flip(0), {}, "labels"),
        (None, {}, "labels"),
    ):
        with pytest.raises(ResumeError, match=message):
            krnet.record(recorded.features, labels, **finished | changes)
    np.save(tmp_path / "same.npy", recorded.features)
    np.save(tmp_path / "other.npy", recorded.features + 1)
    krnet.record(tmp_path / "same.npy", recorded.labels, **finished)
    with pytest.raises(ResumeError, match="features"):
        krnet.record(tmp_path / "other.npy", recorded.labels, **finished)


def test_resume_without_the_budget_of_a_finished_recording_says_that_the_default_is_another(tmp_path):
    features, out = torch.rand(40, 4, 3, 3), tmp_path / "x.krn"
    krnet.record(features, recorder="krnet", budget=7000, iterations=1, out=out)
    message = r"made for a budget of 7000 bytes. No budget is given now, and the default .* is 6180. Give --budget 7000"
    with pytest.raises(ResumeError, match=message):
        krnet.record(features, recorder="krnet", iterations=1, out=out, resume=True)
    with pytest.raises(ResumeError, match="budget 7000; this one is to have budget 8000"):
        krnet.record(features, recorder="krnet", budget=8000, iterations=1, out=out, resume=True)


def test_without_resume_a_finished_recording_is_replaced(tmp_path):
    old = tiny(out=tmp_path / "x.krn", seed=1)[:]
    assert not torch.equal(tiny(out=tmp_path / "x.krn", seed=2)[:], old)


def test_a_large_batch_in_parts_is_what_it_would_be_at_once(recorded, monkeypatch):
    ids = torch.arange(60).repeat(2)
    whole = krnet.open(recorded.path).replay(ids)
    monkeypatch.setattr("krnet.recorders.network_replayer.CPU_PART_BYTES", 1)  # one sample at a time
    single = krnet.open(recorded.path).replay(ids)
    assert (whole - single).abs().max() <= 1e-5 * whole.abs().max()
