"""The recording file: what is written comes back, and everything else is refused by name."""

import json
import math
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from forge import read_header, rewrite_header, rewrite_header_text
from krnet import errors
from krnet.io import archive
from krnet.io import header as module
from krnet.io.archive import Archive, open_archive, write
from krnet.io.atomic import atomic_write
from krnet.io.header import DTYPES, MAGIC


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaNs included; 0 and 1 for booleans, which have no other."""
    size_bytes = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (size_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal type, shape and bits; comparing values would find NaN unequal to itself."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    assert torch.equal(*as_bytes)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    opened = open_archive(path)
    return {name: opened.tensor(name) for name in opened.names}


TENSORS = {
    "weights": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "ids": torch.arange(3, dtype=torch.int64),
    "rows": torch.arange(40, dtype=torch.uint8).reshape(10, 4),
}
METADATA = {"recorder": "raw", "settings": {"bits": 8, "rate": 0.5}, "seed": 3}
BLOCKS = {"rows": 8}  # two rows a block


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "small.krn"
    write(path, TENSORS, METADATA, blocks=BLOCKS)
    return path


# ---------------------------------------------------------------- what is written comes back


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("block", [None, 1, 7, 1000])
def test_every_type_and_shape_comes_back_bit_identical(tmp_path, dtype, shape, block):
    path, tensor = tmp_path / "a.krn", random_tensor(dtype, shape)
    write(path, {"x": tensor}, {}, blocks={"x": block} if block else None)
    opened = open_archive(path)
    assert opened.spec("x") == (dtype, shape)
    assert_same(opened.tensor("x", shape=shape, dtype=dtype), tensor)
    opened.verify()


def test_metadata_comes_back_and_reserved_keys_stay_inside(recording):
    opened = open_archive(recording)
    assert opened.metadata == METADATA
    assert opened.version == 1
    assert set(opened.names) == set(TENSORS)
    assert opened.path == recording


def test_the_returned_size_is_the_size_on_disk(tmp_path):
    path = tmp_path / "a.krn"
    size_bytes = write(str(path), TENSORS, METADATA)
    assert size_bytes == path.stat().st_size == open_archive(str(path)).nbytes


def test_an_archive_without_tensors_is_valid(tmp_path):
    path = tmp_path / "a.krn"
    write(path, {}, {"note": "é"})
    assert open_archive(path).names == ()
    assert open_archive(path).metadata == {"note": "é"}
    open_archive(path).verify()


def test_strided_negated_and_trainable_tensors_are_written_by_value(tmp_path):
    complex_tensor = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    tensors = {
        "strided": torch.arange(12.0).reshape(3, 4).T,
        "expanded": torch.tensor([1.5]).expand(4, 3),
        "sliced": torch.arange(12.0)[3:9],
        "one element, strided": torch.arange(12.0)[3::10],
        "empty, strided": torch.arange(12.0).reshape(3, 4)[:0, ::2],
        "negated": complex_tensor.conj().imag,  # a view whose sign torch keeps aside as a flag
        "negated and contiguous": complex_tensor[:1].conj().imag,
        "trainable": torch.nn.Parameter(torch.ones(2)),
    }
    assert tensors["negated"].is_neg()
    write(tmp_path / "a.krn", tensors, {})
    for name, tensor in read_all(tmp_path / "a.krn").items():
        assert torch.equal(tensor, tensors[name]), name


def test_safetensors_opens_a_recording(recording):
    with safe_open(recording, framework="pt") as file:
        assert set(file.keys()) == set(TENSORS)
        assert file.metadata()["format"] == "krnet-recording"
        assert json.loads(file.metadata()["settings"]) == METADATA["settings"]
    for name, tensor in load_file(recording).items():
        assert_same(tensor, TENSORS[name])


def test_safetensors_opens_every_type_empty_tensors_and_odd_names(tmp_path):
    tensors = {f"{name}/ü \"{shape}": random_tensor(dtype, shape)
               for name, dtype in DTYPES.items() for shape in [(), (0, 2), (3,)]}  # fmt: skip
    write(tmp_path / "a.krn", tensors, {'"\\': ["\u2028", None]})
    loaded = load_file(tmp_path / "a.krn")
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert_same(tensor, tensors[name])


def test_the_same_content_gives_the_same_bytes(tmp_path, recording):
    reordered = {"seed": 3, "settings": {"rate": 0.5, "bits": 8}, "recorder": "raw"}
    write(tmp_path / "b.krn", dict(reversed(TENSORS.items())), reordered, blocks=BLOCKS)
    assert (tmp_path / "b.krn").read_bytes() == recording.read_bytes()


def test_the_layout_is_the_documented_one(recording):
    content = recording.read_bytes()
    assert content[8:].startswith(b'{"__metadata__":{"format":"krnet-recording","version":"1",')
    assert content[8:].startswith(MAGIC)
    data = read_header(recording)[1]
    assert (len(content) - len(data)) % 8 == 0
    assert data == b"".join(TENSORS[name].numpy().tobytes() for name in ("ids", "weights", "rows"))
    assert open_archive(recording).names == ("ids", "weights", "rows")


def test_the_checksum_recipe_of_the_documentation_holds(recording):
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    recipe = text.split("```python\n")[1].split("```")[0]
    exec(recipe, {"path": recording})
    recording.write_bytes(recording.read_bytes().replace(b"recorder", b"recordex"))
    with pytest.raises(AssertionError):
        exec(recipe, {"path": recording})


def test_an_opened_archive_pickles_and_reads_on(recording):
    assert_same(pickle.loads(pickle.dumps(open_archive(recording))).tensor("ids"), TENSORS["ids"])


def test_reading_ignores_the_default_device(recording):
    opened = open_archive(recording)
    with torch.device("meta"):
        assert opened.tensor("ids").device.type == "cpu"


def test_tensors_larger_than_a_chunk_are_read_and_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "CHUNK_BYTES", 16)
    tensor = random_tensor(torch.int32, (101,))
    write(tmp_path / "a.krn", {"whole": tensor, "blocked": tensor}, {}, blocks={"blocked": 40})
    opened = open_archive(tmp_path / "a.krn")
    opened.verify()
    for name in opened.names:
        assert_same(opened.tensor(name), tensor)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.text().filter(lambda key: key not in (*module.RESERVED, "__metadata__"))
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
BLOCK_SIZES = st.none() | st.integers(1, 50)


@settings(max_examples=40, deadline=None)
@given(
    specs=st.dictionaries(KEYS, st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES, BLOCK_SIZES), max_size=4),
    metadata=st.dictionaries(KEYS, JSON, max_size=3),
    rows=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_any_tensors_and_metadata_come_back_whole_and_by_rows(specs, metadata, rows):
    tensors = {name: random_tensor(dtype, shape, seed=len(name)) for name, (dtype, shape, _) in specs.items()}
    blocks = {name: block for name, (_, _, block) in specs.items() if block}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.krn"
        assert write(path, tensors, metadata, blocks=blocks) == path.stat().st_size
        opened = open_archive(path)
        assert opened.metadata == metadata
        assert set(opened.names) == set(tensors)
        opened.verify()
        for name, tensor in tensors.items():
            assert_same(opened.tensor(name), tensor)
            if tensor.dim():
                start, stop = sorted(min(row, len(tensor)) for row in rows)
                assert_same(opened.read(name, start, stop), tensor[start:stop])
        assert load_file(path).keys() == tensors.keys()


# ---------------------------------------------------------------- reading in part


def test_rows_come_back_from_blocked_and_whole_tensors(recording):
    opened = open_archive(recording)
    for name in ("rows", "weights", "ids"):
        num_rows = len(TENSORS[name])
        for start in range(num_rows + 1):
            for stop in range(start, num_rows + 1):
                assert_same(opened.read(name, start, stop), TENSORS[name][start:stop])


def test_a_read_checks_the_blocks_it_needs_and_no_others(recording):
    content = bytearray(recording.read_bytes())
    content[-40 + 17] ^= 1  # row 4 of "rows", in the third block of two rows
    recording.write_bytes(content)
    opened = open_archive(recording)
    assert_same(opened.read("rows", 0, 4), TENSORS["rows"][0:4])
    assert_same(opened.read("rows", 6, 10), TENSORS["rows"][6:10])
    for start, stop in [(4, 5), (5, 6), (3, 7), (0, 10)]:  # row 5 is intact and shares the block
        with pytest.raises(errors.ChecksumError, match=r"bytes 16\.\.24 of tensor 'rows'"):
            opened.read("rows", start, stop)
    with pytest.raises(errors.ChecksumError):
        opened.tensor("rows")
    with pytest.raises(errors.ChecksumError):
        opened.verify()


def test_a_read_of_a_whole_tensor_checks_all_of_it(recording):
    content = bytearray(recording.read_bytes())
    content[-41] ^= 1  # the last byte of "weights"
    recording.write_bytes(content)
    with pytest.raises(errors.ChecksumError, match="'weights'"):
        open_archive(recording).read("weights", 0, 1)


@pytest.mark.parametrize("start, stop", [(-1, 2), (0, 11), (5, 4)])
def test_rows_outside_the_tensor_are_refused(recording, start, stop):
    with pytest.raises(errors.InputError, match=f"rows {start}:{stop}"):
        open_archive(recording).read("rows", start, stop)


def test_a_scalar_has_no_rows(tmp_path):
    write(tmp_path / "a.krn", {"x": torch.tensor(1.0)}, {})
    with pytest.raises(errors.InputError):
        open_archive(tmp_path / "a.krn").read("x", 0, 0)


# ---------------------------------------------------------------- asking for what is not there


def test_a_missing_tensor_is_named_with_those_present(recording):
    for ask in (Archive.tensor, Archive.spec, lambda opened, name: opened.read(name, 0, 1)):
        with pytest.raises(errors.MissingTensorError, match=r"no tensor 'bias'.*ids, weights, rows"):
            ask(open_archive(recording), "bias")


def test_a_wrong_shape_is_refused_with_both_shapes(recording):
    with pytest.raises(errors.TensorShapeError, match=r"\[3, 4\].*\[4, 3\]"):
        open_archive(recording).tensor("weights", shape=(4, 3))


def test_a_wrong_type_is_refused_with_both_types(recording):
    with pytest.raises(errors.TensorShapeError, match=r"float32.*float16"):
        open_archive(recording).tensor("weights", dtype=torch.float16)


# ---------------------------------------------------------------- damaged and foreign files


def test_a_missing_file_is_no_recording(tmp_path):
    with pytest.raises(errors.NotARecordingError, match=r"none\.krn") as caught:
        open_archive(tmp_path / "none.krn")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_folder_is_no_recording(tmp_path):
    with pytest.raises(errors.NotARecordingError, match="folder"):
        open_archive(tmp_path)


def test_a_named_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.NotARecordingError):
        open_archive(tmp_path / "pipe")


def test_a_recording_cut_at_any_length_is_refused_as_truncated(recording):
    for length in reversed(range(recording.stat().st_size)):  # down to 0, the empty file
        os.truncate(recording, length)
        with pytest.raises(errors.TruncatedRecordingError, match=r"small\.krn"):
            open_archive(recording)


def test_trailing_bytes_are_refused(recording):
    recording.write_bytes(recording.read_bytes() + b"\0")
    with pytest.raises(errors.TruncatedRecordingError):
        open_archive(recording)


def test_another_safetensors_file_is_no_recording(tmp_path):
    header = b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   '
    (tmp_path / "a.krn").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(errors.NotARecordingError, match=r"expected .*krnet-recording"):
        open_archive(tmp_path / "a.krn")


def test_a_short_foreign_file_is_no_recording(tmp_path):
    (tmp_path / "a.krn").write_bytes(bytes(8) + b"PK")
    with pytest.raises(errors.NotARecordingError):
        open_archive(tmp_path / "a.krn")


@pytest.mark.parametrize("size", range(9))
def test_a_few_foreign_bytes_are_refused_without_allocating_what_they_claim(tmp_path, size):
    path = tmp_path / "x.krn"
    path.write_bytes(b"\xff" * size)
    with pytest.raises(errors.RecordingError):
        open_archive(path)


def test_a_header_larger_than_allowed_is_refused_before_it_is_read(recording):
    content = recording.read_bytes()
    for length in (module.MAX_HEADER_BYTES + 1, 2**64 - 1):
        recording.write_bytes(length.to_bytes(8, "little") + content[8:])
        with pytest.raises(errors.HeaderTooLargeError, match=str(length)):
            open_archive(recording)


def test_a_header_shorter_than_the_magic_is_refused(recording):
    recording.write_bytes((4).to_bytes(8, "little") + recording.read_bytes()[8:])
    with pytest.raises(errors.NotARecordingError):
        open_archive(recording)


def test_any_flipped_bit_is_refused(tmp_path):
    """Every bit of a small file: length, magic, version, both checksums, table, padding and data."""
    path = tmp_path / "tiny.krn"
    write(path, {"x": torch.tensor([1.0, -2.0]), "y": torch.arange(3).byte()}, {"a": 1}, blocks={"y": 2})
    content = path.read_bytes()
    assert read_header(path)[0].endswith(" "), "choose metadata that leaves padding, to flip it too"
    with open(path, "r+b", buffering=0) as file:
        for position, byte in enumerate(content):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                with pytest.raises(errors.RecordingError):
                    read_all(path)
                    pytest.fail(f"bit {bit} of byte {position} was flipped and went unnoticed")
            os.pwrite(file.fileno(), bytes([byte]), position)
    read_all(path)  # whole again: each flip was the only one


def test_verify_finds_a_flipped_bit_in_any_tensor(recording):
    content, data_bytes = recording.read_bytes(), len(read_header(recording)[1])
    for position in range(len(content) - data_bytes, len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 4
        recording.write_bytes(flipped)
        with pytest.raises(errors.ChecksumError):
            open_archive(recording).verify()


def test_damage_after_opening_is_noticed(recording):
    opened, content = open_archive(recording), recording.read_bytes()
    opened.tensor("rows")
    recording.write_bytes(content[:-1])
    for read in (lambda: opened.tensor("rows"), lambda: opened.read("rows", 8, 10), opened.verify):
        with pytest.raises(errors.TruncatedRecordingError, match="now ends inside tensor 'rows'"):
            read()
    recording.write_bytes(content[:-1] + b"\0")
    with pytest.raises(errors.ChecksumError):
        opened.tensor("rows")
    recording.unlink()
    with pytest.raises(errors.NotARecordingError):
        opened.tensor("rows")


# ---------------------------------------------------------------- headers forged with correct checksums


def test_a_rewritten_header_without_changes_still_opens(recording):
    rewrite_header(recording, lambda header: None)
    assert read_all(recording).keys() == TENSORS.keys()


def test_the_table_may_be_in_any_order(recording):
    rewrite_header(recording, lambda header: header.update(ids=header.pop("ids")))
    assert list(json.loads(read_header(recording)[0]))[-1] == "ids"
    assert open_archive(recording).names == ("ids", "weights", "rows")


def test_a_newer_version_asks_for_an_upgrade(recording):
    rewrite_header(recording, lambda header: header["__metadata__"].update(version="2"))
    with pytest.raises(errors.NewerVersionError, match=r"version 2.*upgrade"):
        open_archive(recording)


@pytest.mark.parametrize("version", ["0", "01", "-1", " 1", "1.0", "x", "", "１", "２", "²", "9" * 20, 1, None, True])
def test_a_version_that_is_no_positive_number_is_refused(recording, version):
    rewrite_header(recording, lambda header: header["__metadata__"].update(version=version))
    with pytest.raises(errors.NotARecordingError):
        open_archive(recording)


def test_a_checksum_in_another_place_is_refused(recording):
    def move_to_the_end(header):
        header["__metadata__"]["checksum"] = header["__metadata__"].pop("checksum")

    rewrite_header(recording, move_to_the_end)
    with pytest.raises(errors.NotARecordingError):
        open_archive(recording)


@pytest.mark.parametrize(
    "shape",
    [[10**15], [2**32, 2**32], [2**63, 2], [3, 5], [0, 2**40, 2**40], [10**4000]],
    ids=lambda shape: repr(shape)[:20],
)
def test_a_shape_that_the_bytes_cannot_fill_is_refused_before_allocating(recording, shape):
    def edit(header):
        header["weights"]["shape"] = shape
        if 0 in shape:  # an empty tensor claims no bytes, and its strides overflow all the same
            header["weights"]["data_offsets"][1] = header["weights"]["data_offsets"][0]

    rewrite_header(recording, edit)
    with pytest.raises(errors.OversizedRecordingError, match="'weights'"):
        open_archive(recording)


@pytest.mark.parametrize("shape", [[3, 3], [0], [3, 0, 2**10], []], ids=repr)
def test_a_shape_smaller_than_its_bytes_is_refused(recording, shape):
    rewrite_header(recording, lambda header: header["weights"].update(shape=shape))
    with pytest.raises(errors.TensorShapeError, match="'weights'"):
        open_archive(recording)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-3, -4]}, {"shape": [3.0, 4]}, {"shape": [True, 12]}, {"shape": "3"}, {"shape": 12},
        {"shape": None}, {"shape": [12] + [1] * 64}, {"dtype": "F8"}, {"dtype": 4}, {"dtype": ["F32"]},
        {"data_offsets": [24]}, {"data_offsets": [72, 24]}, {"data_offsets": [-48, 0]}, {"extra": 1},
        {"data_offsets": [24.0, 72]}, {"data_offsets": "ab"}, {"data_offsets": [0, 48]},
        {"data_offsets": [28, 76]},
    ],
    ids=repr,
)  # fmt: skip
def test_a_malformed_tensor_entry_is_refused(recording, change):
    rewrite_header(recording, lambda header: header["weights"].update(change))
    with pytest.raises(errors.NotARecordingError, match=r"'weights'|'rows'|'ids'"):
        open_archive(recording)


@pytest.mark.parametrize("row", [None, [], "F32", {}, {"dtype": "F32", "shape": [3, 4]}], ids=repr)
def test_a_tensor_entry_of_another_kind_is_refused(recording, row):
    rewrite_header(recording, lambda header: header.update(weights=row))
    with pytest.raises(errors.NotARecordingError, match="'weights'"):
        open_archive(recording)


DIGEST = "0" * 32


@pytest.mark.parametrize(
    "checksum",
    [
        None, 1, [DIGEST], {"block": 8}, {"block": 8, "digests": [DIGEST] * 4},
        {"block": 8, "digests": [DIGEST] * 6}, {"block": 0, "digests": []},
        {"block": True, "digests": [DIGEST] * 40}, {"block": -8, "digests": [DIGEST] * 5},
        {"block": 8, "digests": DIGEST}, {"block": 8, "digests": [DIGEST] * 5, "extra": 1},
    ],
    ids=lambda value: repr(value).replace(DIGEST, "0"),
)  # fmt: skip
def test_checksums_that_do_not_cover_the_tensor_are_refused(recording, checksum):
    def edit(header):
        checksums = json.loads(header["__metadata__"]["checksums"])
        header["__metadata__"]["checksums"] = json.dumps(checksums | {"rows": checksum})

    rewrite_header(recording, edit)
    with pytest.raises(errors.ChecksumError, match="'rows'"):
        open_archive(recording)


@pytest.mark.parametrize("checksums", ["{}", "[]", "null", '{"ids":"0","weights":"0","rows":"0","other":"0"}'])
def test_checksums_for_other_tensors_are_refused(recording, checksums):
    rewrite_header(recording, lambda header: header["__metadata__"].update(checksums=checksums))
    with pytest.raises(errors.ChecksumError):
        open_archive(recording)


def test_digests_that_are_not_strings_never_match(recording):
    def edit(header):
        checksums = json.loads(header["__metadata__"]["checksums"])
        checksums["rows"]["digests"] = [None] * 5
        header["__metadata__"]["checksums"] = json.dumps(checksums)

    rewrite_header(recording, edit)
    with pytest.raises(errors.ChecksumError):
        open_archive(recording).tensor("rows")


def test_the_digest_of_an_empty_tensor_is_checked_too(tmp_path):
    write(tmp_path / "a.krn", {"x": torch.zeros(0)}, {})
    rewrite_header(tmp_path / "a.krn", lambda header: header["__metadata__"].update(checksums=f'{{"x":"{DIGEST}"}}'))
    with pytest.raises(errors.ChecksumError):
        open_archive(tmp_path / "a.krn").tensor("x")


def test_a_header_without_checksums_is_refused(recording):
    rewrite_header(recording, lambda header: header["__metadata__"].pop("checksums"))
    with pytest.raises(errors.NotARecordingError, match="checksums"):
        open_archive(recording)


@pytest.mark.parametrize(
    "value",
    [1, None, ["1"], {}, "", "{", "NaN", "Infinity", '{"a":1,"a":1}', "[" * 10**5],
    ids=lambda value: repr(value)[:20],
)
def test_metadata_that_is_not_json_is_refused(recording, value):
    rewrite_header(recording, lambda header: header["__metadata__"].update(seed=value))
    with pytest.raises(errors.NotARecordingError, match="'seed'"):
        open_archive(recording)


def test_a_deeply_nested_header_is_refused(recording):
    text = read_header(recording)[0].rstrip().removesuffix("}") + ',"deep":' + "[" * 10**6 + "]" * 10**6 + "}"
    rewrite_header_text(recording, text)
    with pytest.raises(errors.NotARecordingError, match="cannot be parsed"):
        open_archive(recording)


@pytest.mark.parametrize("addition", ['"ids":{}', '"__metadata__":{}', r'"\u0069ds":{}'])
def test_a_key_that_occurs_twice_is_refused(recording, addition):
    text = read_header(recording)[0].rstrip().removesuffix("}") + f",{addition}}}"
    rewrite_header_text(recording, text)
    with pytest.raises(errors.NotARecordingError, match="twice"):
        open_archive(recording)


def test_a_header_that_is_not_utf8_is_refused(recording):
    recording.write_bytes(recording.read_bytes().replace(b"recorder", b"record\xff\xfe"))
    with pytest.raises(errors.NotARecordingError, match="utf-8"):
        open_archive(recording)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(recording, monkeypatch, error):
    before, real_digest, calls = recording.read_bytes(), archive.digest, []

    def failing_digest(data):
        calls.append(len(data))
        if len(calls) == 4:  # the first header, two tensors, and midway through the third
            assert len(list(recording.parent.iterdir())) == 2, "the crash was to come while writing"
            raise error("crash")
        return real_digest(data)

    monkeypatch.setattr(archive, "digest", failing_digest)
    with pytest.raises(error, match="crash"):
        write(recording, TENSORS, {"other": 1}, blocks=BLOCKS)
    assert [path.name for path in recording.parent.iterdir()] == ["small.krn"]
    assert recording.read_bytes() == before


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_while_finishing_leaves_no_file(tmp_path, monkeypatch, step):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="disk full"), atomic_write(tmp_path / "a.krn") as file:
        file.write(b"half")
    assert list(tmp_path.iterdir()) == []


def test_the_file_and_then_its_folder_are_flushed_to_disk(tmp_path, monkeypatch):
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        events.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "fsync file")
        real_fsync(descriptor)

    def replace(source, target):
        events.append("replace")
        assert Path(source).read_bytes() == b"whole"
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with atomic_write(tmp_path / "a") as file:
        file.write(b"whole")
    assert events == ["fsync file", "replace", "fsync folder"]


def test_writing_into_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(errors.InputError, match=r"no folder .*missing"):
        write(tmp_path / "missing" / "a.krn", TENSORS, METADATA)


def test_writing_over_a_folder_is_refused(tmp_path):
    with pytest.raises(errors.InputError, match="is a folder"):
        write(tmp_path, TENSORS, METADATA)


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "x"}, {"version": 2}, {"checksum": "0"}, {"checksums": {}}, {1: "x"}, {"x": float("nan")},
        {"x": float("inf")}, {"x": {1, 2}}, {"x": torch.ones(1)}, {"x": "\ud800"}, {"\ud800": 1},
        {"x": {1: 0, "1": 0}},
    ],
    ids=ascii,
)  # fmt: skip
def test_metadata_that_would_not_come_back_is_refused(tmp_path, metadata):
    with pytest.raises(errors.InputError, match="metadata refused"):
        write(tmp_path / "a.krn", TENSORS, metadata)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "tensors", [{"__metadata__": torch.ones(1)}, {"x": torch.ones(1, dtype=torch.complex64)}], ids=list
)
def test_a_tensor_that_the_format_cannot_hold_is_refused(tmp_path, tensors):
    with pytest.raises(errors.InputError, match="expected one of F64"):
        write(tmp_path / "a.krn", tensors, {})


@pytest.mark.parametrize("blocks", [{"rows": 0}, {"rows": -1}, {"rows": 1.5}, {"rows": True}, {"other": 8}], ids=repr)
def test_blocks_of_no_size_or_of_no_tensor_are_refused(tmp_path, blocks):
    with pytest.raises(errors.InputError, match="blocks of"):
        write(tmp_path / "a.krn", TENSORS, {}, blocks=blocks)


def test_a_header_that_could_not_be_read_back_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", 500)
    with pytest.raises(errors.InputError, match="larger blocks"):
        write(tmp_path / "a.krn", {"x": torch.zeros(100)}, {}, blocks={"x": 1})
    assert list(tmp_path.iterdir()) == []
