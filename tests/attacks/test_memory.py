"""Files of a few kilobytes that ask for memory: refused before it is taken, or within the rule of krnet.io.memory.

Each maker of hungry.py forges one recorder's file. One that is just within the rule shows, by the peak of its process,
that the estimate is an upper bound; one of many times that size is refused at once.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import hungry
import numpy as np
import pytest
import torch
from PIL import Image

import krnet
from forge import read_header, rewrite_header_text
from krnet.data import cifar100, folder
from krnet.errors import DataError, OversizedRecordingError, RecordingError
from krnet.io import archive
from krnet.io.memory import FILE_FACTOR, FREE_BYTES, FREE_HEADER_BYTES, MULTIPLICATIONS_PER_BYTE
from krnet.nn.sizing import preset_config
from krnet.recorders.base import PROBE_SAMPLES, get_recorder, written_by
from krnet.recorders.memory import replay_bytes
from packages import if_usable

# Sizes whose files are just within the rule, and sizes that are far beyond it (raw and fp8 cannot be; transform has
# axes of at most 4096, which are).
WITHIN = {
    "quantized": 80, "pca": 40, "transform": 300, "pq": 60, "compact": 12, "without_axes": 80, "paper": 100,
    "autoencoder": 100, "images": 40, "residual": 40, "rotation": 60, "zfp": 150, "fp8": 20,
    "raw": 20, "zstd": 150,
}  # fmt: skip
BEYOND = {
    "quantized": 400, "pca": 400, "pq": 300, "compact": 200, "without_axes": 1500, "paper": 800,
    "autoencoder": 800, "images": 200, "residual": 400, "rotation": 1200, "zfp": 1000, "zstd": 1000,
}  # fmt: skip
RECORDER_OF = {"compact": "krnet", "without_axes": "krnet"}  # of the others, the name is that of the maker
PEAK = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
import krnet
from krnet.errors import KrnetError
from krnet.nn import fingerprint
from krnet.recorders.images import network as images

class Corner(torch.nn.Module):
    def forward(self, x):
        return x[:, :3, :2, :2]

images.fingerprint = lambda trunk: "0" * 32

def peak(reset):
    if reset:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

def use(path):
    trunk = Corner() if "images" in path else None
    krnet.open(path, trunk=trunk).info()
    krnet.open(path, trunk=trunk)[5]
    krnet.verify(path, trunk=trunk)

warm, *paths = sys.argv[1:]
use(warm)
for path in paths:
    before, error = peak(reset=True), ""
    try:
        use(path)
    except KrnetError as found:
        error = type(found).__name__
    print(json.dumps([path, peak(reset=False) - before, error]), flush=True)
"""


def makers(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [if_usable(name, RECORDER_OF.get(name, name)) for name in names])


def needs(path: Path) -> int:
    metadata = archive.open_archive(path).metadata
    recorder = written_by(metadata["recorder"], metadata["settings"], path)
    return replay_bytes(recorder, metadata["shape"], metadata["num_samples"], metadata["settings"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks of memory from /proc")
def test_what_a_file_takes_is_at_most_what_was_estimated(tmp_path):
    """For info, one sample and verify together, with each recorder's file."""
    warm = hungry.raw(tmp_path / "warm.krn", 1)
    usable = [name for name in WITHIN if get_recorder(RECORDER_OF.get(name, name)).is_usable]
    paths = [hungry.MAKERS[name](tmp_path / f"{name}.krn", WITHIN[name]) for name in usable]
    done = subprocess.run([sys.executable, "-c", PEAK, *map(str, [warm, *paths])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        path, taken, error = json.loads(line)
        allowed = needs(Path(path))
        assert allowed <= FREE_BYTES, f"{path} is beyond the rule: make it smaller"
        assert taken <= allowed, f"{path} took {taken / 1e6:.0f} MB; estimated {allowed / 1e6:.0f}"
        assert error in ("", "ProbeError"), f"{path}: {error}"  # networks of zeros do not decode to the zero probe
    assert len(done.stdout.splitlines()) == len(paths)


@makers(BEYOND)
def test_a_file_that_asks_for_more_is_refused_with_what_it_asks_for(tmp_path, name):
    path = hungry.MAKERS[name](tmp_path / "x.krn", BEYOND[name])
    trunk = torch.nn.Identity() if name == "images" else None
    with pytest.raises(OversizedRecordingError, match=r"x\.krn: .* up to .* of memory.*--max-bytes \d+"):
        krnet.open(path, trunk=trunk)[0]
    with pytest.raises(OversizedRecordingError):
        krnet.verify(path, trunk=trunk)


@makers(WITHIN)
def test_max_bytes_lowers_the_limit_and_raises_it(tmp_path, name):
    path = hungry.MAKERS[name](tmp_path / "x.krn", 1)
    needed = needs(path)
    trunk = torch.nn.Identity() if name == "images" else None
    recording = krnet.open(path, max_bytes=needed - 1, trunk=trunk)
    with pytest.raises(OversizedRecordingError, match=f"--max-bytes {needed}"):
        recording[0]
    if trunk is None:
        assert krnet.open(path, max_bytes=needed)[0].shape == recording.shape


@pytest.mark.parametrize("shape", [(8, 4096, 16384), (8, 4, 4, 2**40), (2**62, 2**62), (1, 2**62)])
@pytest.mark.parametrize(
    "name",
    ["without_axes", "compact", "quantized", "pca", "transform", "pq", "paper", "residual", "rotation", "fp8", "raw"],
)
def test_a_forged_shape_is_refused_by_name(tmp_path, name, shape):
    path = hungry.MAKERS[name](tmp_path / "x.krn", 1)
    kept = archive.open_archive(path)
    tensors = {tensor: kept.tensor(tensor) for tensor in kept.names}
    archive.write(path, tensors, kept.metadata | {"shape": list(shape)})
    with pytest.raises(RecordingError, match=r"x\.krn"):
        krnet.open(path)[0]


def test_a_network_that_would_work_for_long_in_little_memory_is_refused(tmp_path):
    path = hungry.compact(tmp_path / "long.krn", 43)  # 344 channels at 256 x 128 positions
    recording = krnet.open(path)
    with pytest.raises(OversizedRecordingError, match=r"multiplications; expected at most .*--max-bytes \d+"):
        recording[0]
    widest = get_recorder("paper").network_multiplications(
        (256, 14, 14), asdict(preset_config((256, 14, 14), "imagenet-published"))
    )
    assert 4 * PROBE_SAMPLES * widest < MULTIPLICATIONS_PER_BYTE * FREE_BYTES  # the paper's widest is below


def test_labels_of_millions_of_samples_in_a_small_file_are_refused(tmp_path):
    path = hungry.raw(tmp_path / "x.krn", 40)
    kept = archive.open_archive(path)
    tensors, number = {name: kept.tensor(name) for name in kept.names}, 64_000_000
    assert kept.nbytes * 64 > number
    archive.write(path, tensors, kept.metadata | {"num_samples": number, "classes": [[0, number]]})
    with pytest.raises(OversizedRecordingError, match="the labels of 64000000 samples"):
        krnet.open(path)
    with pytest.raises(OversizedRecordingError, match="max_bytes"):
        krnet.open(path, max_bytes="1MB")


def test_a_header_of_millions_of_values_is_refused_before_it_is_parsed(tmp_path):
    path = hungry.raw(tmp_path / "x.krn", 1)
    text = read_header(path)[0].rstrip()
    num_values = FREE_HEADER_BYTES // 80
    for values in ("{}," * num_values, "0," * 2 * num_values):
        rewrite_header_text(path, text.removesuffix("}") + f',"more":[{values}0]}}')
        with pytest.raises(OversizedRecordingError, match="its header"):
            krnet.open(path)


def test_real_files_of_low_rate_and_large_axes_stay_well_below_the_limit():
    """Many axes of the maps of CIFAR-100 (64, 8, 8) and of ImageNet (256, 14, 14), in files of a few megabytes."""
    recorder = get_recorder("pca")
    for shape, num_axes, num_bytes in (((64, 8, 8), 1500, 2_000_000), ((256, 14, 14), 1000, 4_000_000)):
        settings = {"step": 0.2, "dead_zone": 0.5, "centroid": 0.25, "block_size": 16, "components": num_axes}
        assert 2 * replay_bytes(recorder, shape, 100_000, settings) <= max(FREE_BYTES, FILE_FACTOR * num_bytes)
    for path in (Path(__file__).parents[1] / "golden").glob("*.krn"):
        assert 4 * needs(path) <= FREE_BYTES


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("quantized", "pq")]


@pytest.mark.parametrize("recorder", ["pca", "krnet", "transform", *SLOWER])
def test_a_recording_at_a_very_low_rate_opens(tmp_path, recorder):
    """A fiftieth of a bit for each value, of maps of 16,384 values: axes take most of such a file."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(60, 12, generator=generator) @ torch.randn(12, 16 * 32 * 32, generator=generator)
    features = factors.view(60, 16, 32, 32).relu()
    quick = {"iterations": 2} if recorder == "krnet" else {}
    settings = {"budget": features.numel() // 8, "over_budget": True} | quick
    recording = krnet.record(features, recorder=recorder, out=tmp_path / "x.krn", **settings)
    assert 2 * needs(recording.path) <= FREE_BYTES
    assert krnet.verify(recording.path)["ok"]


# ------------------------------------------------------------------ images and pickles


def test_a_picture_of_many_pixels_in_a_small_file_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    Image.new("1", (13_000, 13_000)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("was decoded"))
    with pytest.raises(DataError, match=r"bomb.png: 13000 x 13000 pixels in a file of \d+ bytes would take 1.183 GB"):
        folder.open_image(tmp_path / "bomb.png")


def test_a_large_photograph_is_read(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (600, 800, 3), np.uint8)
    Image.fromarray(noise).resize((4800, 3600)).save(tmp_path / "photo.jpg", quality=80)
    assert folder.open_image(tmp_path / "photo.jpg").size == (4800, 3600)


@pytest.mark.parametrize(
    "content",
    [b"B\xff\xff\xff\x7f", b"T\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"\x8e\x00\x00\x00\x00\x01\x00\x00\x00",
     b"]r\xff\xff\xff\x7f.", b"\x8b\xff\xff\xff\x7f", b"\x95\x00\x00\x00\x00\x01\x00\x00\x00"],
)  # fmt: skip
def test_a_pickle_of_a_few_bytes_gets_no_gigabytes(tmp_path, content):
    import tracemalloc

    path = tmp_path / "train"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="cannot be read"):
            cifar100.read_part(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_pickle_that_encodes_one_text_again_and_again_is_refused(tmp_path):
    call = b"c_codecs\nencode\n(h\x01X\x06\x00\x00\x00latin1tR0"  # encode(the text, "latin1"), and drop the result
    text = "x" * 100_000
    content = b"\x80\x02X" + len(text).to_bytes(4, "little") + text.encode() + b"q\x01" + call * 100 + b"0}."
    (tmp_path / "train").write_bytes(content)
    assert pickle.loads(content) == {}
    with pytest.raises(DataError, match="more bytes than the file has"):
        cifar100.read_part(tmp_path / "train")
