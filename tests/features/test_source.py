"""Features are read right from every kind of storage, never changed, and refused when they are no good."""

import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from krnet.errors import FeatureError, InputError, LabelError
from krnet.features import arrays
from krnet.features.labels import check_labels
from krnet.features.source import open_features
from krnet.features.stats import denormalise, normalise, scan

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

NUM_SAMPLES, SHAPE = 23, (3, 4, 5)
IDS = torch.tensor([7, 22, 0, 7, 8, 9, 1, 1, 21, 12, 4, 3, 2])  # unordered, with repeats and with runs
VALUES = np.random.default_rng(0).normal(size=(NUM_SAMPLES, *SHAPE)).astype(np.float32).round(2)
VALUES[VALUES < 0] = 0  # like a ReLU


def _python(script, *arguments):
    """Run a script in a fresh interpreter that finds the package under test."""
    environment = {**os.environ, "PYTHONPATH": str(Path(arrays.__file__).parents[2])}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


class Pairs(torch.utils.data.Dataset):
    """A data set of (sample, label), as torchvision has them."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return torch.from_numpy(self.values[index].copy()), index % 2


def _memmap(path, mode="w+"):
    array = np.memmap(path / "raw", np.float32, "w+", shape=VALUES.shape)
    array[:] = VALUES
    array.flush()
    return array if mode == "w+" else np.memmap(path / "raw", np.float32, mode, shape=VALUES.shape)


def _memmap_slice(path):
    array = np.memmap(path / "raw", np.float32, "w+", shape=(NUM_SAMPLES + 6, *SHAPE))
    array[5:-1] = VALUES
    return array[5:-1]


def _npy(path, values=VALUES):
    np.save(path / "features.npy", values)
    return path / "features.npy"


def _npz(path, save=np.savez):
    save(path / "features.npz", features=VALUES, labels=np.arange(NUM_SAMPLES))
    return str(path / "features.npz")


def _safetensors(path, dtype):
    # The odd-sized tensor in front leaves the features at an unaligned offset.
    tensors = {"a": torch.zeros(3, dtype=torch.uint8), "features": torch.from_numpy(VALUES).to(dtype)}
    save_file(tensors, path / "features.safetensors")
    return path / "features.safetensors"


def _h5(path, **options):
    with h5py.File(path / "features.h5", "w") as file:
        file.create_dataset("group/features", data=VALUES, **options)
    return path / "features.h5"


def _zarr(path, **options):
    zarr.save_array(path / "features.zarr", VALUES, **options)
    return path / "features.zarr"


def _zarr_group(path):
    group = zarr.open_group(path / "group.zarr", mode="w")
    group.create_array("labels", data=np.arange(NUM_SAMPLES))
    group.create_array("features", data=VALUES, chunks=(4, 3, 4, 5))
    return path / "group.zarr"


KINDS = {
    "tensor": lambda path: torch.from_numpy(VALUES.copy()),
    "tensor that requires grad": lambda path: torch.from_numpy(VALUES.copy()).requires_grad_(),
    "transposed tensor": lambda path: torch.from_numpy(VALUES.transpose(0, 2, 3, 1).copy()).permute(0, 3, 1, 2),
    "bfloat16 tensor": lambda path: torch.from_numpy(VALUES).bfloat16(),
    "array": lambda path: VALUES.copy(),
    "fortran array": lambda path: np.asfortranarray(VALUES),
    "reversed array": lambda path: VALUES[::-1].copy()[::-1],
    "big-endian array": lambda path: VALUES.astype(">f4"),
    "float64 array": lambda path: VALUES.astype(np.float64),
    "int8 array": lambda path: VALUES.astype(np.int8),
    "memmap": _memmap,
    "read-only memmap": lambda path: _memmap(path, "r"),
    "copy-on-write memmap": lambda path: _memmap(path, "c"),
    "memmap slice": _memmap_slice,
    "plain view of a memmap": lambda path: np.asarray(_memmap_slice(path)),
    "npy": _npy,
    "fortran npy": lambda path: _npy(path, np.asfortranarray(VALUES)),
    "big-endian npy": lambda path: _npy(path, VALUES.astype(">f8")),
    "npz": _npz,
    "compressed npz": lambda path: _npz(path, np.savez_compressed),
    "safetensors float32": lambda path: _safetensors(path, torch.float32),
    "safetensors float16": lambda path: _safetensors(path, torch.float16),
    "safetensors bfloat16": lambda path: _safetensors(path, torch.bfloat16),
    "safetensors uint8": lambda path: _safetensors(path, torch.uint8),
    "h5": _h5,
    "chunked h5": lambda path: _h5(path, chunks=(4, 3, 2, 5), compression="gzip"),
    "h5 dataset": lambda path: h5py.File(_h5(path), "r")["group/features"],
    "zarr": _zarr,
    "zarr group": _zarr_group,
    "zarr array": lambda path: zarr.open(_zarr(path), mode="r"),
    "dict": lambda path: {"features": VALUES, "labels": np.arange(NUM_SAMPLES)},
    "Dataset of pairs": lambda path: Pairs(VALUES),
    "list of arrays": lambda path: list(VALUES),
    "list of big-endian arrays": lambda path: list(VALUES.astype(">f4")),
    "list of bfloat16 tensors": lambda path: list(torch.from_numpy(VALUES).bfloat16()),
    "source": lambda path: open_features(VALUES),
}


@pytest.fixture(params=KINDS)
def kept(request, tmp_path):
    """The test features, kept in each kind of storage in turn."""
    return KINDS[request.param](tmp_path)


# ------------------------------------------------------------------ reading


def test_every_kind_of_storage_reads_the_rows_that_numpy_reads(kept):
    source = open_features(kept)
    expected = torch.from_numpy(VALUES).to(source.dtype)
    assert (len(source), source.shape) == (NUM_SAMPLES, SHAPE)
    assert source.nbytes == expected.nbytes
    for ids in (IDS, torch.arange(NUM_SAMPLES), torch.arange(5, 9), torch.tensor([3]), IDS[:0]):
        rows = source.read(ids)
        assert rows.dtype == source.dtype and rows.is_contiguous() and rows.device.type == "cpu"
        assert torch.equal(rows, expected[ids])


def test_stored_dtype_is_kept(tmp_path):
    assert open_features(_safetensors(tmp_path, torch.bfloat16)).dtype == torch.bfloat16
    assert open_features(VALUES.astype(">f8")).dtype == torch.float64
    assert open_features(VALUES.astype(np.int64)).dtype == torch.int64


def test_writing_to_what_was_read_leaves_the_features_alone(kept):
    source = open_features(kept)
    ids = torch.arange(NUM_SAMPLES)
    before = source.read(ids)
    source.read(ids).fill_(99)
    assert torch.equal(source.read(ids), before)
    if source.resident is not None:
        assert torch.equal(source.resident.cpu(), before)


def test_features_in_memory_are_shared_and_not_copied():
    array, tensor = VALUES.copy(), torch.from_numpy(VALUES.copy())
    assert open_features(array).resident.data_ptr() == array.ctypes.data
    assert open_features(tensor).resident.data_ptr() == tensor.data_ptr()
    assert not open_features(tensor.requires_grad_()).resident.requires_grad


@pytest.mark.parametrize(
    "kind", ["memmap", "plain view of a memmap", "npy", "compressed npz", "zarr", "list of arrays"]
)
def test_features_elsewhere_are_not_resident(kind, tmp_path):
    assert open_features(KINDS[kind](tmp_path)).resident is None


def test_read_only_arrays_raise_no_warning():
    array = VALUES.copy()
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(open_features(array).read(IDS), torch.from_numpy(VALUES)[IDS])


@pytest.mark.parametrize("shape", [(NUM_SAMPLES,), (NUM_SAMPLES, 6)])
@pytest.mark.parametrize("store", [torch.from_numpy, lambda values: values, list, lambda values: values.astype(">f4")])
def test_samples_may_be_vectors_or_single_numbers(shape, store):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    source = open_features(store(values))
    assert source.shape == shape[1:]
    assert torch.equal(source.read(IDS), torch.from_numpy(values)[IDS])


@pytest.mark.parametrize("options", [{}, {"chunks": (1, *SHAPE)}, {"chunks": (NUM_SAMPLES, 1, 4, 5)}])
def test_blocks_of_sliced_storage_stay_within_their_bound(options, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 4 * VALUES[0].nbytes)
    dataset = h5py.File(_h5(tmp_path, **options), "r")["group/features"]
    sizes = []

    class Watched:
        shape, dtype, chunks = dataset.shape, dataset.dtype, dataset.chunks

        def __getitem__(self, rows):
            sizes.append(rows.stop - rows.start)
            return dataset[rows]

    source = open_features(Watched())
    assert torch.equal(source.read(IDS), torch.from_numpy(VALUES)[IDS])
    assert max(sizes) <= 4
    assert sum(sizes) <= NUM_SAMPLES


def test_changes_in_a_copy_on_write_map_survive_reading(tmp_path):
    array = _memmap(tmp_path, "c")
    array[3] = 7
    source = open_features(array)
    source.read(IDS)
    assert (source.read(torch.tensor([3])) == 7).all()
    assert (array[3] == 7).all()


def test_unflushed_changes_in_a_shared_map_survive_reading(tmp_path):
    array = _memmap(tmp_path)
    array[3] = 7
    source = open_features(array)
    source.read(IDS)
    assert (array[3] == 7).all()
    assert (np.fromfile(tmp_path / "raw", np.float32).reshape(VALUES.shape)[3] == 7).all()


def test_unpacked_npz_leaves_no_file_behind(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    source = open_features(_npz(tmp_path, np.savez_compressed))
    assert list(scratch.iterdir()) == []
    assert torch.equal(source.read(IDS), torch.from_numpy(VALUES)[IDS])


@pytest.mark.slow
def test_memory_stays_bounded_while_a_large_file_is_scanned_and_sampled(tmp_path):
    # Sparse on disk, but every page that is read counts as resident until it is handed back.
    array = np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.float32, (6400, 16, 32, 32))
    array[::500] = 1
    del array
    script = """
        import resource, sys, torch
        from krnet.features.source import open_features
        from krnet.features.stats import scan
        torch.set_num_threads(1)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        baseline = peak()
        source = open_features(sys.argv[1])
        stats = scan(source)
        assert stats.zero_ratio == 1 - 13 / 6400
        for seed in range(20):
            source.read(torch.randperm(6400, generator=torch.Generator().manual_seed(seed))[:256])
        print(source.nbytes / 2**20, peak() - baseline)
    """
    done = _python(textwrap.dedent(script), str(tmp_path / "large.npy"))
    assert done.returncode == 0, done.stderr
    size_mib, growth_mib = map(float, done.stdout.split())
    assert size_mib == 400
    assert growth_mib < 200  # about 115 in fact; without handing pages back, more than the file


# ------------------------------------------------------------------ refusals


def test_array_is_chosen_by_key_or_by_its_name(tmp_path):
    np.savez(tmp_path / "two.npz", features=VALUES, other=VALUES + 1)
    ids = torch.tensor([2])
    assert torch.equal(open_features(tmp_path / "two.npz").read(ids), torch.from_numpy(VALUES[[2]]))
    assert torch.equal(open_features(tmp_path / "two.npz", key="other").read(ids), torch.from_numpy(VALUES[[2]] + 1))


def _two_arrays(path, suffix):
    if suffix == ".npz":
        np.savez(path / "two.npz", one=VALUES, two=VALUES)
    elif suffix == ".safetensors":
        save_file({name: torch.from_numpy(VALUES.copy()) for name in ("one", "two")}, path / "two.safetensors")
    elif suffix == ".h5":
        with h5py.File(path / "two.h5", "w") as file:
            file["one"] = file["two"] = VALUES
    else:
        group = zarr.open_group(path / "two.zarr", mode="w")
        group.create_array("one", data=VALUES)
        group.create_array("two", data=VALUES)
    return path / f"two{suffix}"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".h5", ".zarr"])
def test_several_arrays_without_a_key_are_refused_by_name(suffix, tmp_path):
    path = _two_arrays(tmp_path, suffix)
    with pytest.raises(FeatureError, match=r"'one', 'two'.*key="):
        open_features(path)
    with pytest.raises(FeatureError, match=r"'three'.*'one', 'two'"):
        open_features(path, key="three")
    assert len(open_features(path, key="two")) == NUM_SAMPLES


def test_key_for_a_single_array_is_refused(tmp_path):
    for single in (VALUES, _npy(tmp_path), _zarr(tmp_path), open_features(VALUES)):
        with pytest.raises(FeatureError, match="single array"):
            open_features(single, key="features")


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.zeros((4, 3), bool), "type bool"),
        (np.zeros((4, 3), complex), "type complex128"),
        (np.zeros((4, 3), np.uint16), "type uint16"),
        (np.array([None, "a"]), "type object"),
        (np.array(["a", "b"]), "type str"),
        (torch.zeros(4, 3, dtype=torch.bool), "type bool"),
        (torch.zeros(4, 3, dtype=torch.complex64), "type complex64"),
        (torch.eye(3).to_sparse(), "sparse"),
        (np.ma.masked_array(VALUES, VALUES > 0), "masked"),
        (np.zeros((0, 3)), r"\(0, 3\) holds no samples"),
        (np.zeros((4, 0, 3)), r"\(4, 0, 3\) holds no samples"),
        (torch.zeros(0, 3), r"\(0, 3\) holds no samples"),
        (np.array(1.0), r"\(\) holds no samples"),
        (torch.tensor(1.0), r"\(\) holds no samples"),
        ([], "holds no samples"),
        ([[1.0, 2.0]], "sample 0 is of type list"),
        ([np.array([True])], "type bool"),
        ({}, "none at all"),
        (3, "type int"),
        ((x for x in "ab"), "type generator"),
    ],
)
def test_unusable_features_are_refused(features, message):
    with pytest.raises(FeatureError, match=message):
        open_features(features)


def test_sample_of_another_shape_is_refused_with_its_index():
    source = open_features([np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((3, 2))])
    assert source.read(torch.tensor([1, 0])).shape == (2, 2, 3)
    with pytest.raises(FeatureError, match=r"sample 2 has shape \(3, 2\).*expected \(2, 3\)"):
        source.read(torch.tensor([1, 2]))


def test_sample_of_another_dtype_is_refused_with_its_index():
    source = open_features([np.zeros(3, np.float32), np.zeros(3, np.float64)])
    with pytest.raises(FeatureError, match=r"sample 1 .*float64.*expected .*float32"):
        source.read(torch.tensor([1]))


@pytest.mark.parametrize("sample_id", [-1, NUM_SAMPLES])
def test_sample_ids_outside_the_features_are_refused(kept, sample_id):
    with pytest.raises(FeatureError, match=rf"no sample ID {sample_id}; .* 0..22"):
        open_features(kept).read(torch.tensor([0, sample_id]))


def test_missing_and_unknown_files_are_refused(tmp_path):
    with pytest.raises(FeatureError, match=r"nowhere\.npy: no such file"):
        open_features(tmp_path / "nowhere.npy")
    (tmp_path / "features.csv").write_text("1,2")
    with pytest.raises(FeatureError, match=r"unknown kind of file '\.csv'.*npy"):
        open_features(str(tmp_path / "features.csv"))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".h5", ".zarr"])
@pytest.mark.parametrize("content", [b"", b"not what the name says" * 9])
def test_foreign_and_empty_files_are_refused(suffix, content, tmp_path):
    path = tmp_path / f"features{suffix}"
    path.write_bytes(content)
    with pytest.raises(FeatureError, match=f"features{suffix}: "):
        open_features(path)


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed npz", "safetensors float32", "h5"])
def test_truncated_files_are_refused(kind, tmp_path):
    path = Path(KINDS[kind](tmp_path))
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(FeatureError, match="cannot be read"):
        open_features(path)


def test_empty_zarr_folder_is_refused(tmp_path):
    (tmp_path / "empty.zarr").mkdir()
    with pytest.raises(FeatureError, match=r"empty\.zarr"):
        open_features(tmp_path / "empty.zarr")


def test_pickled_objects_in_files_are_refused_unread(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    trapped = np.array([Trap()], dtype=object)
    np.save(tmp_path / "trap.npy", trapped, allow_pickle=True)
    np.savez(tmp_path / "trap.npz", trapped, allow_pickle=True)
    for name in ("trap.npy", "trap.npz"):
        with pytest.raises(FeatureError, match="pickled objects"):
            open_features(tmp_path / name, key="arr_0" if name.endswith("z") else None)


def test_zip_under_the_name_of_an_npy_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "zip.npy", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(FeatureError, match=r"zip\.npy: cannot be read"):
        open_features(tmp_path / "zip.npy")


def test_types_that_cannot_be_recorded_are_refused_in_files_too(tmp_path):
    for dtype in (torch.bool, torch.float8_e5m2):
        with pytest.raises(FeatureError, match="values are of type"):
            open_features(_safetensors(tmp_path, dtype), key="features")
    np.save(tmp_path / "empty.npy", np.zeros((0, 3)))
    save_file({"x": torch.zeros(0, 3)}, tmp_path / "empty.safetensors")
    for name in ("empty.npy", "empty.safetensors"):
        with pytest.raises(FeatureError, match=name):
            open_features(tmp_path / name)


@pytest.mark.parametrize(("package", "make"), [("h5py", _h5), ("zarr", _zarr)])
def test_missing_optional_package_is_named_with_its_install(package, make, tmp_path, monkeypatch):
    path = make(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"{package} is not installed, .* pip install 'krnet\[stores\]'"):
        open_features(path)


def test_optional_packages_are_not_imported_with_the_module():
    script = "import sys, krnet.features.source; sys.exit('h5py' in sys.modules or 'zarr' in sys.modules)"
    assert _python(script).returncode == 0


# ------------------------------------------------------------------ scanning


def _reference(values):
    """Slow and obvious: per-channel statistics of float64 copies."""
    channels = np.asarray(values, np.float32).astype(np.float64)
    channels = channels.reshape(len(values), values.shape[1] if values.ndim > 1 else 1, -1)
    low, high = channels.min((0, 2), keepdims=True), channels.max((0, 2), keepdims=True)
    span = np.where(high > low, high - low, np.inf)
    return channels, low.ravel(), high.ravel(), (channels - low) / span


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint8, np.int64])
@pytest.mark.parametrize("shape", [(101,), (101, 7), (101, 5, 3, 2)])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 64 << 20])
def test_scan_equals_the_float64_reference(dtype, shape, chunk_bytes):
    values = (np.random.default_rng(1).gamma(1.0, 20.0, shape) - 5).clip(0, 250).astype(dtype)
    if len(shape) > 1:
        values[:, 1] = 3  # a constant channel
    stats = scan(open_features(values), chunk_bytes=chunk_bytes)
    channels, low, high, normalised = _reference(values)
    assert stats.low.dtype == stats.high.dtype == torch.float32
    np.testing.assert_array_equal(stats.low, low)
    np.testing.assert_array_equal(stats.high, high)
    np.testing.assert_allclose(stats.mean, channels.mean((0, 2)), rtol=1e-13)
    np.testing.assert_allclose(stats.std, channels.std((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(stats.normalised_mean, normalised.mean((0, 2)), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(stats.normalised_std, normalised.std((0, 2)), rtol=1e-12)
    assert stats.variance == pytest.approx(normalised.var(), rel=1e-12)
    assert stats.zero_ratio == (values == 0).mean()
    assert stats.count == values.size


def test_scan_in_many_chunks_equals_scan_in_one():
    source = open_features(VALUES)
    whole, chunked = scan(source), scan(source, chunk_bytes=3 * 8 * VALUES[0].size)
    for exact in ("digest", "zero_ratio", "count"):
        assert getattr(whole, exact) == getattr(chunked, exact)
    assert torch.equal(whole.low, chunked.low) and torch.equal(whole.high, chunked.high)
    torch.testing.assert_close(whole.mean, chunked.mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(whole.std, chunked.std, rtol=1e-13, atol=0)


def test_scan_keeps_a_small_deviation_around_a_large_mean():
    values = 1e6 + np.random.default_rng(2).normal(size=(5000, 1)).astype(np.float32)
    stats = scan(open_features(values), chunk_bytes=800)
    assert stats.std.item() == pytest.approx(values.astype(np.float64).std(), rel=1e-9)


def test_sums_of_float16_do_not_overflow():
    stats = scan(open_features(np.full((100, 2, 50), 60000, np.float16)))
    assert stats.mean.tolist() == [60000, 60000]
    assert stats.std.tolist() == [0, 0]
    assert stats.variance == 0


def test_digest_is_the_same_wherever_the_features_are_kept(kept):
    source = open_features(kept)
    assert scan(source).digest == scan(open_features(torch.from_numpy(VALUES).to(source.dtype))).digest


def test_digest_tells_apart_values_shapes_and_dtypes():
    changed = VALUES.copy()
    changed[-1, -1, -1, -1] += 1
    variants = [VALUES, changed, VALUES.reshape(NUM_SAMPLES, -1), VALUES.view(np.int32), VALUES[:-1]]
    assert len({scan(open_features(values)).digest for values in variants}) == len(variants)


@pytest.mark.parametrize(
    ("value", "kind"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (1e300, "beyond float32")]
)
@pytest.mark.parametrize("chunk_bytes", [1, 64 << 20])
def test_first_bad_sample_is_named_with_what_is_wrong(value, kind, chunk_bytes):
    values = VALUES.astype(np.float64)
    values[17, 2, 0, 1] = value
    values[20] = np.nan
    with pytest.raises(FeatureError, match=f"sample 17 holds .*{kind}"):
        scan(open_features(values), chunk_bytes=chunk_bytes)


def test_range_beyond_float32_is_refused():
    with pytest.raises(FeatureError, match="run from -3e"):
        scan(open_features(np.array([[3e38], [-3e38]], np.float32)))


# ------------------------------------------------------------------ normalising


@pytest.mark.parametrize("shape", [(50,), (50, 7), (50, 4, 3, 3)])
def test_denormalise_undoes_normalise(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 30 + 5
    stats = scan(open_features(values))
    scaled = normalise(values, stats.low, stats.high)
    assert scaled.dtype == torch.float32 and scaled.shape == values.shape
    assert scaled.min() == 0 and scaled.max() == 1
    torch.testing.assert_close(denormalise(scaled, stats.low, stats.high), values, rtol=1e-6, atol=1e-5)


def test_constant_channels_become_zero_and_return_exactly():
    values = torch.full((6, 2, 3), 0.1)
    values[:, 1] = torch.arange(3)
    stats = scan(open_features(values))
    scaled = normalise(values, stats.low, stats.high)
    assert (scaled[:, 0] == 0).all()
    noisy = scaled + torch.randn(scaled.shape)
    assert torch.equal(denormalise(noisy, stats.low, stats.high)[:, 0], values[:, 0])


def test_normalise_takes_integers_and_leaves_its_input_alone():
    values = torch.tensor([[0, 10], [4, 30]], dtype=torch.uint8)
    scaled = normalise(values, torch.tensor([0.0, 10.0]), torch.tensor([4.0, 30.0]))
    assert scaled.tolist() == [[0, 0], [1, 1]]
    assert values.tolist() == [[0, 10], [4, 30]]


# ------------------------------------------------------------------ labels


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.array, torch.tensor, lambda x: np.array(x, ">i2"), lambda x: torch.tensor(x).byte()],
)
def test_labels_of_any_kind_become_an_int64_tensor(kind):
    labels = check_labels(kind([3, 1, 2]), 3)
    assert labels.dtype == torch.int64 and labels.tolist() == [3, 1, 2]


def test_labels_are_optional_and_may_lie_in_a_file(tmp_path):
    assert check_labels(None, 3) is None
    np.save(tmp_path / "labels.npy", [3, 1, 2])
    assert check_labels(tmp_path / "labels.npy", 3).tolist() == [3, 1, 2]


def test_changing_checked_labels_leaves_the_originals_alone():
    for labels in (np.array([3, 1, 2]), torch.tensor([3, 1, 2])):
        check_labels(labels, 3).zero_()
        assert labels.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 2], r"shape \(2,\); expected 3 integers"),
        ([[1], [2], [3]], r"shape \(3, 1\)"),
        (5, r"shape \(\)"),
        ([[1], [2, 3], [4]], "cannot be read"),
        ([1.0, 2.0, 3.0], r"float64.*astype\(int\)"),
        (torch.tensor([1.5, 2, 3]).bfloat16(), "float64"),
        ([True, False, True], "type bool"),
        (["a", "b", "c"], "type <U1"),
        (np.array([1, 2, 2**63], np.uint64), "beyond int64"),
        ("nowhere.npy", "nowhere.npy"),
    ],
)
def test_unusable_labels_are_refused(labels, message):
    with pytest.raises(LabelError, match=message):
        check_labels(labels, 3)


def test_labels_in_a_file_of_another_kind_are_refused_with_the_kind_that_is_read(tmp_path):
    save_file({"labels": torch.tensor([3, 1, 2])}, tmp_path / "labels.safetensors")
    np.savez(tmp_path / "labels.npz", labels=[3, 1, 2])
    for path in (tmp_path / "labels.safetensors", tmp_path / "labels.npz"):
        with pytest.raises(LabelError, match=r"is no \.npy file; expected 3 integers") as caught:
            check_labels(path, 3)
        assert path.name in str(caught.value) and "leave out --labels" in str(caught.value)
        assert "pickle" not in str(caught.value)
