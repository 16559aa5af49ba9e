"""Features of images in a folder of shards are the same whoever computes them, and however often it is stopped."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import krnet
from krnet.errors import DataError, InputError, ResumeError, SettingError, ShardError
from krnet.features.labels import stored_labels
from krnet.features.shards import output as module
from krnet.features.shards.index import INDEX_NAME
from krnet.features.shards.shard import shard_name
from krnet.features.source import open_features

N, BATCH, ROW_BYTES = 50, 4, 4 * 4 * 4 * 3
IMAGES = torch.randint(0, 256, (N, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(N) * 7 % 5
SHARD = 13 * (ROW_BYTES + 8)  # 13 samples fit: whole batches are 12
CELLS = [0, 12, 24, 36, 48, 50]


def make_trunk(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


def extract(out, images=IMAGES, labels=LABELS, *, trunk=None, **options):
    batch = {} if isinstance(images, DataLoader) else {"batch_size": BATCH}
    options = {"shard_size": SHARD, "device": "cpu", **batch, **options}
    return krnet.extract(trunk or make_trunk(), images, labels, out=out, **options)


def expected(images=IMAGES):
    with torch.no_grad():
        return torch.cat([make_trunk()(part.float() / 255) for part in images.split(BATCH)])


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed call writes."""
    return content(extract(tmp_path_factory.mktemp("whole") / "shards"))


class Stops(nn.Module):
    """A trunk that is interrupted at call number `at`."""

    def __init__(self, at: int):
        super().__init__()
        self.trunk, self.at = make_trunk(), at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at -= 1
        if self.at < 0:
            raise KeyboardInterrupt
        return self.trunk(x)


def stopped(out, at, **options):
    with pytest.raises(KeyboardInterrupt):
        extract(out, trunk=Stops(at), **options)


@pytest.fixture
def same_weights(monkeypatch):
    """A trunk that stops counts as the one inside it."""
    monkeypatch.setattr("krnet.features.trunk.fingerprint", lambda trunk: "0" * 32)


# ------------------------------------------------------------------ what is written


def test_shards_hold_the_features_of_the_bare_trunk_and_their_index_says_what_made_them(tmp_path, whole):
    folder = extract(f"{tmp_path / 'shards'}/")
    source = open_features(folder)
    assert torch.equal(source.read(torch.arange(N)), expected())
    assert torch.equal(stored_labels(folder, None, N), LABELS)
    index = json.loads((folder / INDEX_NAME).read_text())
    assert [shard["first"] for shard in index["shards"]] == CELLS[:-1]
    assert index["made_by"].keys() == {"trunk", "image_shape", "image_dtype", "mean", "std"}
    assert content(folder) == whole
    assert all(len(data) < SHARD + 1200 for name, data in whole.items() if name != INDEX_NAME)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_may_have_two_bytes(dtype, tmp_path):
    source = open_features(extract(tmp_path / "shards", dtype=dtype, labels=None))
    assert torch.equal(source.read(torch.arange(N)), expected().to(getattr(torch, dtype)))


def test_a_sample_may_be_larger_than_a_shard_and_a_shard_smaller_than_a_batch(tmp_path):
    for size, num_shards in ((1, N), (3 * (ROW_BYTES + 8), 17)):
        folder = extract(tmp_path / str(size), shard_size=size)
        assert len(content(folder)) == num_shards + 1
        assert torch.equal(open_features(folder).read(torch.arange(N)), expected())


@pytest.mark.parametrize("num_images", [1, 24, 25, N])
def test_batches_of_a_loader_of_unknown_length_are_cut_in_the_same_places(num_images, tmp_path, whole):
    images, labels = IMAGES[:num_images], LABELS[:num_images]
    batches = ((x, y) for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True))
    folder = extract(tmp_path / "shards", batches, None, batch_size=None, shard_size=12 * (ROW_BYTES + 8))
    assert torch.equal(open_features(folder).read(torch.arange(num_images)), expected(images))
    if num_images == N:
        assert json.loads(content(folder)[INDEX_NAME])["num_samples"] == N


# ------------------------------------------------------------------ stopped, added to, shared


@pytest.mark.parametrize("at", [0, 3, 4, 8, 12])
@pytest.mark.parametrize("kind", ["array", "loader"])
def test_a_stopped_call_goes_on_to_the_same_bytes(at, kind, tmp_path, same_weights, whole):
    images, labels = (IMAGES, LABELS) if kind == "array" else (DataLoader(TensorDataset(IMAGES, LABELS), BATCH), None)
    out = tmp_path / "shards"
    size = {"shard_size": 12 * (ROW_BYTES + 8)}  # of a loader it is not known that its batches have a size
    stopped(out, at, images=images, labels=labels, **size)
    num_kept = len(list(out.glob("shard-*")))
    assert num_kept == max(0, at - 1) // 3  # one batch is behind the others
    for _ in range(2):
        trunk = Stops(2 + max(0, 13 - 3 * num_kept))  # what is missing, and one or two batches to compare
        found = extract(out, images, labels, trunk=trunk, resume=True, **size)
        num_kept = 5
    assert torch.equal(open_features(found).read(torch.arange(N)), expected())
    assert content(found).keys() == whole.keys()


def test_a_killed_writer_leaves_shards_that_a_later_call_takes_up(tmp_path, monkeypatch, same_weights):
    out = tmp_path / "shards"
    with monkeypatch.context() as patch:
        patch.setattr(module.ShardOutput, "close", lambda self: self.writer.shutdown())  # no index, as after a kill
        stopped(out, 8)
    assert content(out).keys() == {shard_name(0, 12), shard_name(12, 12)}
    (out / f".{shard_name(24, 12)}.host-1-0123456789abcdef.tmp").write_bytes(b"unfinished")
    found = extract(out, resume=True, trunk=Stops(8))
    assert torch.equal(open_features(found).read(torch.arange(N)), expected())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_processes_writes_the_same_shards(count, tmp_path, whole):
    out = tmp_path / "shards"
    work = [{"trunk": make_trunk(), "share": (k, count)} for k in range(count)]
    threads = [threading.Thread(target=extract, args=(out,), kwargs=options) for options in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(out) == whole


def test_a_folder_can_be_read_when_the_last_writer_is_done_and_others_may_take_over(tmp_path, whole):
    out = tmp_path / "shards"
    extract(out, share=(2, 3))
    with pytest.raises(ShardError, match=r"samples 0\.\.35 missing|samples 0\.\.23"):
        open_features(out)
    extract(out, share=(0, 3))
    extract(out, resume=True)  # one process instead of three
    assert content(out) == whole


def test_more_samples_follow_on(tmp_path):
    out = tmp_path / "shards"
    extract(out, IMAGES[:20], LABELS[:20])
    extract(out, IMAGES[20:], LABELS[20:], first_id="end")
    assert torch.equal(
        open_features(out).read(torch.arange(N)), torch.cat([expected(IMAGES[:20]), expected(IMAGES[20:])])
    )
    assert torch.equal(stored_labels(out, None, N), LABELS)
    extract(out, IMAGES[20:], LABELS[20:], first_id=20, resume=True)  # finished: nothing is computed but a check
    assert json.loads((out / INDEX_NAME).read_text())["runs"] == [[0, 20], [20, 30]]


def test_a_removed_shard_is_made_again(tmp_path, whole):
    out = extract(tmp_path / "shards")
    (out / shard_name(12, 12)).unlink()
    extract(out, resume=True)
    assert content(out) == whole


# ------------------------------------------------------------------ refusals


def _other_trunk(out):
    extract(out, resume=True, trunk=make_trunk(1))


REFUSED = {
    "written already": (lambda out: extract(out), InputError, r"holds samples 0\.\.11, 12\.\.23, 24\.\.35 and 2 more"),
    "another trunk": (_other_trunk, ResumeError, "a new shard has trunk"),
    "other images": (lambda out: extract(out, IMAGES.flip(0), resume=True), ResumeError, "computed again, differs"),
    "fewer images": (lambda out: extract(out, IMAGES[:9], LABELS[:9], resume=True), ResumeError, "of 50 images; there"),
    "other labels": (lambda out: extract(out, labels=LABELS.flip(0), resume=True), ResumeError, "labels of samples 0"),
    "no labels": (lambda out: extract(out, labels=None, resume=True), ResumeError, "a new shard has labels False"),
    "dtype": (lambda out: extract(out, dtype="float16", resume=True), ResumeError, "a new shard has dtype float16"),
    "fewer of a loader": (
        lambda out: extract(out, iter(IMAGES[:9].split(BATCH)), LABELS[:9], batch_size=None, resume=True),
        ResumeError, "of 50 images; there|wrote 50 samples; now there are 9",
    ),
    "inside another call": (lambda out: extract(out, first_id=40), InputError, "sample 40 belongs to the call"),
    "which end": (lambda out: extract(out, first_id="end", resume=True), InputError, "began with 0"),
    "IDs": (lambda out: extract(out, first_id=10**12 - 5), InputError, "IDs end at 999999999999"),
    "negative": (lambda out: extract(out, first_id=-1), SettingError, "first_id"),
    "start": (lambda out: extract(out, first_id="start"), SettingError, "first_id"),
    "share": (lambda out: extract(out, share=(3, 3)), SettingError, r"share is 3/3; expected a part 0 \.\. 2"),
    "share of a loader": (
        lambda out: extract(out, iter(IMAGES.split(BATCH)), None, batch_size=None, share=(0, 2)),
        SettingError, "run through",
    ),
    "size": (lambda out: extract(out, shard_size=0), InputError, "shard_size"),
    "a file": (lambda out: extract(out.parent / "a.safetensors", share=(0, 2)), SettingError, "for a folder of shards"),
    "the images": (lambda out: extract(out, out / shard_name(0, 12), None, key="features"), InputError, "lies in"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_calls_are_refused_by_name_and_change_nothing(case, tmp_path, whole):
    call, error, message = REFUSED[case]
    out = extract(tmp_path / "shards")
    with pytest.raises(error, match=message):
        call(out)
    assert content(out) == whole


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out, message in ((tmp_path / "file" / "shards", "file: is no folder"), ("/proc/shards", "cannot be written")):
        with pytest.raises(InputError, match=message):
            extract(out, trunk=Stops(0))


def test_a_call_that_fails_leaves_no_folder(tmp_path):
    with pytest.raises(DataError, match="no images came"):
        extract(tmp_path / "new" / "shards", iter([]), None, batch_size=None)
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------ memory, processes


@pytest.mark.slow
def test_memory_is_that_of_a_few_shards(tmp_path):
    import numpy as np

    array = np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.float32, (6400, 16, 32, 32))  # 400 MiB
    array[::500] = 1
    del array
    script = """
        import resource, torch, krnet
        torch.set_num_threads(1)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        krnet.extract(torch.nn.Identity(), torch.zeros(2, 1, 2, 2), out="warm/")
        krnet.record("warm", recorder="raw")
        before = peak()
        krnet.extract(torch.nn.Identity(), "large.npy", out="a/", batch_size=64, shard_size="16MB")
        print(peak() - before)
        krnet.record("a", recorder="raw", out="a.krn")
        print(peak() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    extracted, recorded = map(float, done.stdout.split())
    assert extracted < 120 and recorded < 400, done.stdout  # MiB


@pytest.mark.slow
def test_two_killed_processes_and_one_that_takes_over_write_what_one_would(tmp_path):
    script = """
        import sys, time, torch, krnet

        class Slow(torch.nn.Module):
            def forward(self, x):
                time.sleep(0.02)
                return x

        images = torch.arange(2000.0).reshape(-1, 1, 1, 1).expand(-1, 2, 3, 3).contiguous()
        share, resume = (int(sys.argv[1]), int(sys.argv[2])), sys.argv[3] == "resume"
        krnet.extract(Slow(), images, out="shards/", batch_size=20, shard_size=20 * 72, share=share, resume=resume)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    processes = [subprocess.Popen([*command, str(k), "2", "new"], cwd=tmp_path) for k in range(2)]
    while len(list(tmp_path.glob("shards/shard-*"))) < 20:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert len(list(tmp_path.glob("shards/shard-*"))) < 100
    subprocess.run([*command, "0", "1", "resume"], cwd=tmp_path, check=True)
    assert len(list(tmp_path.glob("shards/shard-*"))) == 100
    assert torch.equal(open_features(tmp_path / "shards").read(torch.arange(2000))[:, 0, 0, 0], torch.arange(2000.0))
