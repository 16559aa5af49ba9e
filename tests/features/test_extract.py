"""Features of images in a file: those of the bare trunk, in bounded memory, resumed to the same bytes."""

import doctest
import errno
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forked
import krnet
from krnet.data.dataset import Split
from krnet.errors import (
    BusyFolderError,
    DataError,
    FeatureError,
    InputError,
    LabelError,
    ResumeError,
    SettingError,
)
from krnet.features import feature_file
from krnet.features.feature_file import UnfinishedFile, partial_path

N, BATCH = 50, 8
IMAGES = torch.randint(0, 256, (N, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(N) * 7 % 5


def make_trunk(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    trunk[1].running_mean.uniform_()  # type: ignore[operator, union-attr]
    return trunk


def bare(trunk: nn.Module, images: torch.Tensor = IMAGES, batch: int = BATCH) -> torch.Tensor:
    modes = [module.training for module in trunk.modules()]
    trunk.eval()
    with torch.no_grad():
        found = torch.cat([trunk(part.float() / 255) for part in images.split(batch)])
    for module, mode in zip(trunk.modules(), modes, strict=True):
        module.training = mode
    return found


def loader(images=IMAGES, labels=LABELS, **options):
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH, **options)


class Stops(nn.Module):
    """A trunk that is interrupted at call number `at`."""

    def __init__(self, trunk: nn.Module, at: int, error: BaseException | None = None):
        super().__init__()
        self.trunk, self.at, self.calls = trunk, at, 0
        self.error = error or KeyboardInterrupt()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.at:
            raise self.error
        return self.trunk(x)


# ------------------------------------------------------------------ what is written


def _on_disk(folder):
    np.save(folder / "images.npy", IMAGES.numpy())
    return folder / "images.npy"


SOURCES = {
    "tensor": lambda folder: (IMAGES, LABELS),
    "array": lambda folder: (IMAGES.numpy(), LABELS.tolist()),
    "path": lambda folder: (_on_disk(folder), LABELS.numpy()),
    "memmap": lambda folder: (np.load(_on_disk(folder), mmap_mode="r"), LABELS),
    "channels last": lambda folder: (IMAGES.permute(0, 2, 3, 1).numpy(), LABELS),
    "split": lambda folder: (Split(IMAGES, LABELS), None),
    "loader": lambda folder: (loader(), None),
    "loader without labels": lambda folder: ((batch for batch, _ in loader()), LABELS),
    "generator of arrays": lambda folder: ((x.numpy() for x in IMAGES.split(BATCH)), LABELS),
    "dataset": lambda folder: (TensorDataset(IMAGES, LABELS), None),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_features_are_those_of_the_bare_trunk_to_the_bit_and_labels_lie_beside_them(kind, tmp_path):
    trunk, (images, labels) = make_trunk(), SOURCES[kind](tmp_path)
    batch_size = None if "loader" in kind or "generator" in kind else BATCH
    out = tmp_path / "features.safetensors"
    assert krnet.extract(trunk, images, labels, out=out, batch_size=batch_size) == out
    found = load_file(out)
    assert found.keys() == {"features", "labels"}
    expected = bare(trunk)
    if kind == "channels last":  # another layout in memory, and another order of sums
        torch.testing.assert_close(found["features"], expected)
    else:
        assert torch.equal(found["features"], expected)
    assert torch.equal(found["labels"], LABELS) and found["labels"].dtype == torch.int64
    assert {path.name for path in tmp_path.iterdir()} <= {"features.safetensors", "images.npy"}


def test_float_images_are_taken_as_they_are_and_shifted_by_mean_and_std(tmp_path):
    trunk, images = make_trunk().eval(), torch.randn(9, 3, 6, 5)
    plain = load_file(krnet.extract(trunk, images, out=tmp_path / "a.safetensors"))
    assert plain.keys() == {"features"}
    assert torch.equal(plain["features"], trunk(images))
    mean, std = [0.1, 0.2, 0.3], [0.5]
    shifted = load_file(krnet.extract(trunk, images, out=tmp_path / "a.safetensors", mean=mean, std=std))
    assert torch.equal(shifted["features"], trunk((images - torch.tensor(mean)[:, None, None]) / 0.5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_may_be_stored_in_two_bytes(dtype, tmp_path):
    # Three values a sample in two bytes: the labels begin at an odd place, and are read all the same.
    trunk = nn.Sequential(make_trunk(), nn.Flatten(), nn.Linear(48, 3))
    images, labels = IMAGES[:3], LABELS[:3]
    found = load_file(krnet.extract(trunk, images, labels, out=tmp_path / "a.safetensors", dtype=dtype))
    assert torch.equal(found["features"], bare(trunk, images).to(getattr(torch, dtype)))
    assert torch.equal(found["labels"], labels)
    recording = krnet.record(tmp_path / "a.safetensors", recorder="raw")
    assert torch.equal(recording.labels, labels)


def test_a_trunk_of_half_precision_gets_images_of_its_type(tmp_path):
    seen = []

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float16))

        def forward(self, x):
            seen.append(x.dtype)
            return x * self.weight

    found = load_file(krnet.extract(Half(), IMAGES, out=tmp_path / "a.safetensors"))
    assert seen == [torch.float16] and found["features"].dtype == torch.float32


def test_trunk_keeps_its_modes_and_gradients(tmp_path):
    trunk = make_trunk().train()
    trunk[1].eval()
    before = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    krnet.extract(trunk, IMAGES, out=tmp_path / "a.safetensors")
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(trunk, 1), IMAGES, out=tmp_path / "b.safetensors", batch_size=BATCH)
    assert [module.training for module in trunk.modules()] == [True, True, False, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in trunk.state_dict().items())
    assert all(parameter.requires_grad for parameter in trunk.parameters())


def test_torchscript_is_a_trunk(tmp_path):
    trunk = make_trunk()
    script = torch.jit.script(trunk)
    script.train()
    found = load_file(krnet.extract(script, IMAGES, out=tmp_path / "a.safetensors", batch_size=BATCH))
    torch.testing.assert_close(found["features"], bare(trunk))
    assert script.training


def test_a_program_of_torch_export_is_a_trunk_alone_and_inside_another(tmp_path):
    trunk = make_trunk().eval()
    batch = {0: torch.export.Dim("batch", min=2)}
    program = torch.export.export(trunk, (torch.rand(BATCH, 3, 6, 5),), dynamic_shapes=(batch,)).module()
    for number, given in enumerate((program, nn.Sequential(program, nn.Identity()))):
        modes = [module.training for module in given.modules()]
        found = load_file(krnet.extract(given, IMAGES, out=tmp_path / f"{number}.safetensors", batch_size=BATCH))
        torch.testing.assert_close(found["features"], bare(trunk))
        assert [module.training for module in given.modules()] == modes


def test_the_header_has_room_for_many_channels(tmp_path):
    images = torch.rand(20, 500, 2, 1)
    mean, std = torch.rand(500), torch.rand(500) + 0.5
    out, whole = tmp_path / "a.safetensors", tmp_path / "whole.safetensors"
    krnet.extract(nn.Identity(), images, LABELS[:20], out=whole, mean=mean, std=std)
    found = load_file(whole)
    expected = (images - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(found["features"], expected)
    assert torch.equal(found["labels"], LABELS[:20])
    options = {"out": out, "mean": mean, "std": std, "batch_size": BATCH}
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(nn.Identity(), 2), images, LABELS[:20], **options)
    krnet.extract(nn.Identity(), images, LABELS[:20], **options, resume=True)
    assert out.read_bytes() == whole.read_bytes()
    krnet.extract(nn.Identity(), images, LABELS[:20], **options, resume=True)


def test_a_loader_of_vectors_is_taken(tmp_path):
    vectors = torch.rand(N, 7)
    out = tmp_path / "a.safetensors"
    for batches in (loader(vectors), DataLoader(vectors, BATCH), [(vectors, LABELS)]):  # type: ignore[arg-type]
        found = load_file(krnet.extract(nn.Identity(), batches, out=out))
        assert torch.equal(found["features"], vectors)


def test_a_trunk_that_returns_its_input_is_written_before_the_loader_fills_it_anew(tmp_path):
    def reuse():
        buffer = torch.empty(BATCH, 3, 6, 5)
        for value in range(40):
            yield buffer.fill_(value)

    found = load_file(krnet.extract(nn.Identity(), reuse(), out=tmp_path / "a.safetensors"))["features"]
    assert found[:, 0, 0, 0].tolist() == [float(i // BATCH) for i in range(40 * BATCH)]


def test_progress_counts_samples(tmp_path):
    steps: list[krnet.progress.Progress] = []
    krnet.extract(make_trunk(), IMAGES, out=tmp_path / "a.safetensors", batch_size=20, watch=steps.append)
    assert [(step.name, step.done, step.unit, step.share) for step in steps] == [
        ("extract", done, "samples", done / N) for done in (20, 40, 50)
    ]
    steps.clear()
    krnet.extract(make_trunk(), [IMAGES[:20], IMAGES[20:]], out=tmp_path / "a.safetensors", watch=steps.append)
    assert [(step.done, step.share) for step in steps] == [(20, 0.5), (50, 1.0)]
    steps.clear()
    krnet.extract(make_trunk(), iter([IMAGES[:20], IMAGES[20:]]), out=tmp_path / "a.safetensors", watch=steps.append)
    assert [(step.done, step.share) for step in steps] == [(20, None), (50, None)]


def test_progress_of_a_resumed_call_counts_the_time_of_the_first(tmp_path):
    out, record = tmp_path / "a.safetensors", tmp_path / "a.safetensors.partial.json"
    steps: list[krnet.progress.Progress] = []
    for seconds in (1000.0, None):
        with pytest.raises(KeyboardInterrupt):
            krnet.extract(Stops(make_trunk(), 4), IMAGES, out=out, batch_size=BATCH)
        kept = json.loads(record.read_text())
        assert 0 < kept.pop("seconds") < 100
        record.write_text(json.dumps(kept if seconds is None else kept | {"seconds": seconds}))
        with pytest.raises(KeyboardInterrupt):
            krnet.extract(Stops(make_trunk(), 3), IMAGES, out=out, batch_size=BATCH, resume=True, watch=steps.append)
        before = seconds or 0.0
        assert all(before < step.seconds < before + 100 for step in steps)
        assert steps and before < json.loads(record.read_text())["seconds"] < before + 100
        steps.clear()
        record.unlink()


def test_a_watcher_is_closed_however_the_call_ends(tmp_path):
    class Bar:
        closed = 0

        def __call__(self, progress):
            pass

        def close(self):
            self.closed += 1

    bar = Bar()
    krnet.extract(make_trunk(), IMAGES, out=tmp_path / "a.safetensors", watch=bar)
    assert bar.closed == 1
    with pytest.raises(DataError):
        krnet.extract(make_trunk(), 5, out=tmp_path / "a.safetensors", watch=bar)
    assert bar.closed == 2


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder().find(krnet.extract, "extract", globs={})
    found = doctest.DocTestRunner().run(example)
    assert found.attempted and not found.failed


# ------------------------------------------------------------------ what record and verify make of it


def test_record_takes_features_and_labels_from_the_file(tmp_path):
    path = krnet.extract(make_trunk(), IMAGES, LABELS, out=tmp_path / "a.safetensors")
    recording = krnet.record(path, recorder="raw", out=tmp_path / "a.krn")
    assert torch.equal(recording.labels, LABELS)
    torch.testing.assert_close(recording[:], load_file(path)["features"])
    assert krnet.verify(tmp_path / "a.krn", path)["same_features"]
    assert torch.equal(krnet.record(path, LABELS + 1, recorder="raw").labels, LABELS + 1)
    assert krnet.record(path, recorder="raw", key="features").labels is None


def test_record_finds_labels_in_other_files_and_in_a_mapping(tmp_path):
    arrays = {"features": bare(make_trunk()).numpy(), "labels": LABELS.numpy()}
    np.savez(tmp_path / "a.npz", **arrays)
    for features in (tmp_path / "a.npz", arrays):
        assert torch.equal(krnet.record(features, recorder="raw").labels, LABELS)


@pytest.mark.parametrize("labels", [LABELS[:-1], LABELS.float(), LABELS[:, None]])
def test_an_array_called_labels_that_cannot_be_labels_is_refused(labels, tmp_path):
    save_file({"features": bare(make_trunk()), "labels": labels.contiguous()}, tmp_path / "a.safetensors")
    with pytest.raises(LabelError, match="key='features'"):
        krnet.record(tmp_path / "a.safetensors", recorder="raw")


# ------------------------------------------------------------------ interrupted and resumed


@pytest.mark.parametrize("kind", ["array", "loader"])
@pytest.mark.parametrize("at", [2, 4, 6])
def test_an_interrupted_call_resumes_to_the_same_bytes(kind, at, tmp_path):
    options = {"batch_size": BATCH} if kind == "array" else {}
    given = lambda: (IMAGES, LABELS) if kind == "array" else (loader(), None)  # noqa: E731
    whole = krnet.extract(make_trunk(), *given(), out=tmp_path / "whole.safetensors", **options).read_bytes()
    out = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(make_trunk(), at), *given(), out=out, **options)
    assert not out.exists()
    kept = json.loads((tmp_path / "a.safetensors.partial.json").read_text())["rows"]
    assert kept == (at - 1) * BATCH  # one batch was on its way
    counting = Stops(make_trunk(), 99)
    krnet.extract(counting, *given(), out=out, resume=True, **options)
    assert counting.calls == -(-N // BATCH) - at + 2  # the last batch that was kept is computed again
    assert out.read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "whole.safetensors"}


def test_rows_after_the_last_saved_one_are_not_trusted(tmp_path):
    out = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(make_trunk(), 4), IMAGES, LABELS, out=out, batch_size=BATCH)
    with partial_path(out).open("ab") as file:
        file.write(b"\x7f" * 5000)
    krnet.extract(make_trunk(), IMAGES, LABELS, out=out, batch_size=BATCH, resume=True)
    assert torch.equal(load_file(out)["features"], bare(make_trunk()))


def test_resume_with_batches_of_another_size_goes_on_in_the_middle_of_one(tmp_path):
    out = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(make_trunk(), 3), loader(), out=out)
    krnet.extract(make_trunk(), [(IMAGES[:3], LABELS[:3]), (IMAGES[3:], LABELS[3:])], out=out, resume=True)
    found = load_file(out)
    torch.testing.assert_close(found["features"], bare(make_trunk()))
    assert torch.equal(found["labels"], LABELS)


def test_a_killed_process_resumes_to_the_same_bytes(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES.numpy())
    script = """
        import sys, time, torch
        import krnet
        from krnet.features import feature_file
        feature_file.SAVE_EVERY_S = 0.0
        class Slow(torch.nn.Module):
            calls = 0
            def forward(self, x):
                self.calls += 1
                time.sleep(0 if self.calls < 6 else 600)
                return x * 2
        krnet.extract(Slow(), "images.npy", list(range(50)), out="a.safetensors", batch_size=2)
    """
    process = forked.start(forked.script(script), cwd=tmp_path)
    record = tmp_path / "a.safetensors.partial.json"
    process.until(record.exists)
    process.kill()
    kept = json.loads(record.read_text())["rows"]
    assert 0 < kept < N

    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    given = tmp_path / "images.npy", list(range(N))
    krnet.extract(Double(), *given, out=tmp_path / "a.safetensors", batch_size=2, resume=True)
    krnet.extract(Double(), *given, out=tmp_path / "b.safetensors", batch_size=2)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_without_resume_an_unfinished_file_is_replaced(tmp_path):
    out = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(make_trunk(), 4), IMAGES, out=out, batch_size=BATCH)
    krnet.extract(make_trunk(1), IMAGES, out=out, batch_size=BATCH)
    assert torch.equal(load_file(out)["features"], bare(make_trunk(1)))
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupted_call_for_a_name_that_exists_is_resumed(tmp_path):
    out = krnet.extract(make_trunk(1), IMAGES, out=tmp_path / "a.safetensors", batch_size=BATCH)
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(make_trunk(), 4), IMAGES, out=out, batch_size=BATCH)
    assert torch.equal(load_file(out)["features"], bare(make_trunk(1)))
    counting = Stops(make_trunk(), 99)
    krnet.extract(counting, IMAGES, out=out, batch_size=BATCH, resume=True)
    assert counting.calls == -(-N // BATCH) - 4 + 2
    assert torch.equal(load_file(out)["features"], bare(make_trunk()))
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("num_images", "message"), [(N, None), (N - 9, "50 samples; there are 41 images"), (N + 9, "there are at least 56")]
)
def test_an_iterable_is_counted_before_a_finished_file_is_returned(num_images, message, tmp_path):
    out = krnet.extract(make_trunk(), loader(), out=tmp_path / "a.safetensors")
    images, labels = (torch.cat([x, x])[:num_images] for x in (IMAGES, LABELS))
    given = zip(images.split(BATCH), labels.split(BATCH), strict=True)
    counting = Stops(make_trunk(), 99)
    if message is None:
        assert krnet.extract(counting, given, out=out, resume=True) == out
    else:
        with pytest.raises(ResumeError, match=message):
            krnet.extract(counting, given, out=out, resume=True)
    assert counting.calls == 1  # the first batch is compared; the others are counted


def test_all_labels_of_an_iterable_are_compared_with_a_finished_file(tmp_path):
    out = krnet.extract(make_trunk(), loader(), out=tmp_path / "a.safetensors")
    other = LABELS.clone()
    other[-1] += 1
    with pytest.raises(ResumeError, match="other labels"):
        krnet.extract(make_trunk(), iter(loader(labels=other)), out=out, resume=True)
    with pytest.raises(DataError, match="used up"):
        krnet.extract(make_trunk(), iter([]), out=out, resume=True)


CHANGES = {
    "trunk": lambda: (make_trunk(1), IMAGES, LABELS, {}),
    "trunk of another shape": lambda: (nn.Sequential(make_trunk(), nn.Flatten()), IMAGES, LABELS, {}),
    "images": lambda: (make_trunk(), 255 - IMAGES, LABELS, {}),
    "order": lambda: (make_trunk(), IMAGES.flip(0), LABELS, {}),
    "image shape": lambda: (make_trunk(), IMAGES[:, :, :5], LABELS, {}),
    "fewer images": lambda: (make_trunk(), IMAGES[:20], LABELS[:20], {}),
    "labels": lambda: (make_trunk(), IMAGES, LABELS + 1, {}),
    "no labels": lambda: (make_trunk(), IMAGES, None, {}),
    "mean": lambda: (make_trunk(), IMAGES, LABELS, {"mean": 0.5}),
    "dtype": lambda: (make_trunk(), IMAGES, LABELS, {"dtype": "float16"}),
    "float images": lambda: (make_trunk(), IMAGES / 255, LABELS, {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_resume_refuses_other_work_and_keeps_the_file(change, tmp_path):
    out = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(make_trunk(), 4), IMAGES, LABELS, out=out, batch_size=BATCH)
    trunk, images, labels, options = CHANGES[change]()
    before = partial_path(out).read_bytes()
    with pytest.raises(ResumeError):
        krnet.extract(trunk, images, labels, out=out, batch_size=BATCH, resume=True, **options)
    assert partial_path(out).read_bytes() == before and not out.exists()
    krnet.extract(make_trunk(), IMAGES, LABELS, out=out, batch_size=BATCH, resume=True)
    assert torch.equal(load_file(out)["features"], bare(make_trunk()))


@pytest.mark.parametrize("change", CHANGES)
def test_a_finished_file_is_returned_and_one_of_other_work_is_refused(change, tmp_path):
    out = krnet.extract(make_trunk(), IMAGES, LABELS, out=tmp_path / "a.safetensors", batch_size=BATCH)
    written = out.stat().st_mtime_ns
    assert krnet.extract(make_trunk(), IMAGES, LABELS, out=out, batch_size=BATCH, resume=True) == out
    assert krnet.extract(make_trunk(), loader(), out=out, resume=True) == out
    trunk, images, labels, options = CHANGES[change]()
    with pytest.raises(ResumeError):
        krnet.extract(trunk, images, labels, out=out, batch_size=BATCH, resume=True, **options)
    assert out.stat().st_mtime_ns == written


def test_a_loader_that_ends_before_the_rows_that_are_kept_is_refused(tmp_path):
    out = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(make_trunk(), 4), loader(), out=out)
    few = [(IMAGES[:8], LABELS[:8]), (IMAGES[8:16], LABELS[8:16]), (IMAGES[16:20], LABELS[16:20])]
    with pytest.raises(ResumeError, match="wrote 24 samples; now there are 20"):
        krnet.extract(make_trunk(), iter(few), out=out, resume=True)


@pytest.mark.parametrize("damage", ["no JSON", "too short", "other version"])
def test_a_damaged_unfinished_file_is_refused(damage, tmp_path):
    out = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        krnet.extract(Stops(make_trunk(), 4), IMAGES, out=out, batch_size=BATCH)
    record = tmp_path / "a.safetensors.partial.json"
    if damage == "no JSON":
        record.write_text("{")
    elif damage == "too short":
        os.truncate(partial_path(out), 5000)
    else:
        record.write_text(json.dumps({**json.loads(record.read_text()), "version": 2}))
    with pytest.raises(ResumeError, match="leave out --resume"):
        krnet.extract(make_trunk(), IMAGES, out=out, batch_size=BATCH, resume=True)


def test_a_file_of_other_origin_is_refused_by_resume(tmp_path):
    save_file({"features": bare(make_trunk())}, tmp_path / "a.safetensors")
    with pytest.raises(ResumeError, match=r"no file of krnet\.extract"):
        krnet.extract(make_trunk(), IMAGES, out=tmp_path / "a.safetensors", resume=True)


def test_two_calls_cannot_write_the_same_file(tmp_path):
    out = tmp_path / "a.safetensors"
    other = UnfinishedFile.create(out, {"shape": [2], "dtype": "float32"})
    with pytest.raises(BusyFolderError, match="another process"):
        krnet.extract(make_trunk(), IMAGES, out=out)
    other.close()
    krnet.extract(make_trunk(), IMAGES, out=out)


# ------------------------------------------------------------------ refusals


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class First(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:1]


def _with_nan() -> torch.Tensor:
    images = IMAGES.float()
    images[3, 0, 0, 0] = np.nan
    return images


REFUSED = {
    "tuple": (lambda: (Pair(), IMAGES), {}, FeatureError, "returns a tuple"),
    "rows": (lambda: (First(), IMAGES), {}, FeatureError, "a row per image"),
    "no module": (lambda: (lambda x: x, IMAGES), {}, InputError, r"torch\.nn\.Module"),
    "nan": (lambda: (make_trunk(), _with_nan()), {}, FeatureError, "sample 3 are NaN"),
    "overflow": (lambda: (nn.Identity(), IMAGES + 7e4), {"dtype": "float16"}, FeatureError, "or store float32"),
    "dtype": (lambda: (make_trunk(), IMAGES), {"dtype": "int8"}, SettingError, "float16"),
    "suffix": (lambda: (make_trunk(), IMAGES), {"out": "a.npy"}, InputError, r"\.safetensors"),
    "folder": (lambda: (make_trunk(), IMAGES), {"out": "none/a.safetensors"}, InputError, "no folder"),
    "empty array": (lambda: (make_trunk(), IMAGES[:0]), {}, FeatureError, "no samples"),
    "empty iterable": (lambda: (make_trunk(), iter([])), {}, DataError, "no images came"),
    "empty batch": (lambda: (make_trunk(), [IMAGES[:0]]), {}, DataError, "at least one image"),
    "no iterable": (lambda: (make_trunk(), 5), {}, DataError, "type int"),
    "grey": (lambda: (make_trunk(), IMAGES[:, 0]), {}, DataError, r"images\[:, None\]"),
    "integers": (lambda: (make_trunk(), IMAGES.int()), {}, DataError, "uint8 or float"),
    "batch of text": (lambda: (make_trunk(), ["a", "b"]), {}, DataError, "type str"),
    "three parts": (lambda: (make_trunk(), [(IMAGES, LABELS, LABELS)]), {}, DataError, "3 parts"),
    "shape": (lambda: (make_trunk(), [IMAGES[:9], IMAGES[9:, :, :4]]), {}, DataError, "from sample 9 on"),
    "shuffled": (lambda: (make_trunk(), loader(shuffle=True)), {}, DataError, "shuffle=False"),
    "batch size": (lambda: (make_trunk(), loader()), {"batch_size": 3}, SettingError, "batch_size"),
    "few labels": (lambda: (make_trunk(), IMAGES), {"labels": LABELS[:-1]}, LabelError, "50 integers"),
    "few labels of a loader": (lambda: (make_trunk(), [IMAGES]), {"labels": LABELS[:-1]}, LabelError, "at least 50"),
    "more labels": (lambda: (make_trunk(), [IMAGES[:9]]), {"labels": LABELS}, LabelError, "50 labels; expected 9"),
    "labels of a generator": (lambda: (make_trunk(), [IMAGES]), {"labels": iter([0])}, LabelError, "one per image"),
    "labels of a number": (lambda: (make_trunk(), [IMAGES]), {"labels": 5}, LabelError, "type int cannot be read"),
    "labels of no file": (lambda: (make_trunk(), [IMAGES]), {"labels": "none.npy"}, LabelError, "No such file"),
    "lazy": (lambda: (nn.LazyConv2d(2, 3), IMAGES), {}, InputError, r"weight has no values yet.*trunk\(images\)"),
    "list of grey images": (lambda: (nn.Identity(), list(IMAGES[:, 0])), {}, DataError, "grey image, or a batch of"),
    "iterator of arrays": (lambda: (nn.Identity(), iter(IMAGES[:, 0].numpy())), {}, DataError, "batch of vectors"),
    "labels twice": (lambda: (make_trunk(), loader()), {"labels": LABELS}, LabelError, "leave one out"),
    "labels at times": (lambda: (make_trunk(), [(IMAGES, LABELS), IMAGES]), {}, LabelError, "no labels, unlike"),
    "labels of no class": (lambda: (make_trunk(), [(IMAGES, IMAGES)]), {}, LabelError, "one per sample"),
    "mean": (lambda: (make_trunk(), IMAGES), {"mean": [0.1, 0.2]}, SettingError, "3 channels"),
    "std": (lambda: (make_trunk(), IMAGES), {"std": 0.0}, SettingError, "std"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name_and_leaves_no_file(case, tmp_path, monkeypatch):
    make, options, error, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    trunk, images = make()
    with pytest.raises(error, match=message):
        krnet.extract(trunk, images, **{"out": "a.safetensors", **options})
    left = {path.name for path in tmp_path.iterdir()}
    # What was right so far is kept, under another name.
    assert left == set() if case != "more labels" else "a.safetensors" not in left


def test_the_images_are_not_overwritten(tmp_path):
    save_file({"images": IMAGES}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="would be overwritten"):
        krnet.extract(make_trunk(), tmp_path / "a.safetensors", out=tmp_path / "a.safetensors")
    array = np.memmap(tmp_path / "b.safetensors", np.uint8, "w+", shape=tuple(IMAGES.shape))
    with pytest.raises(InputError, match="would be overwritten"):
        krnet.extract(make_trunk(), array, out=tmp_path / "b.safetensors")


def test_a_full_disk_is_named_and_the_rest_is_written_when_there_is_room(tmp_path, monkeypatch):
    out, row_bytes = tmp_path / "a.safetensors", 4 * 4 * 4 * 3
    limit = feature_file.HEADER_STEP + 20 * row_bytes
    real, failures = os.pwrite, []

    def fills(fd, data, position):
        if position >= limit and not failures:  # once: batches that wait to be written must not follow
            failures.append(position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data if failures else data[: limit - position], position)

    monkeypatch.setattr(os, "pwrite", fills)
    with pytest.raises(OSError, match=r"No space left on device; .* with resume.*a\.safetensors") as info:
        krnet.extract(make_trunk(), IMAGES, LABELS, out=out, batch_size=BATCH)
    assert info.value.errno == errno.ENOSPC and not out.exists()
    monkeypatch.setattr(os, "pwrite", real)
    assert json.loads((tmp_path / "a.safetensors.partial.json").read_text())["rows"] == 16
    krnet.extract(make_trunk(), IMAGES, LABELS, out=out, batch_size=BATCH, resume=True)
    assert torch.equal(load_file(out)["features"], bare(make_trunk()))


# ------------------------------------------------------------------ memory


def test_memory_stays_bounded_while_a_large_file_passes_through(tmp_path):
    # 200 MiB of images, sparse on disk, become 200 MiB of features; every page that is read counts until handed back.
    array = np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.float32, (3200, 16, 32, 32))
    array[::500] = 1
    del array
    script = """
        import resource, torch, krnet
        torch.set_num_threads(1)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        krnet.extract(torch.nn.Identity(), torch.zeros(2, 1, 2, 2), out="warm.safetensors")
        before = peak()
        krnet.extract(torch.nn.Identity(), "large.npy", list(range(3200)), out="a.safetensors", batch_size=64)
        print(peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.safetensors").stat().st_size > 200 << 20
    assert float(done.stdout) < 130  # MiB; about 76 in fact
