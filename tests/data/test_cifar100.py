"""CIFAR-100's files: every way they are pickled, none of the ways they could do harm, and the archive."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from krnet import data
from krnet.data import cifar100 as cifar
from krnet.data import folder as image_folder
from krnet.errors import DataError, LabelError, UnsafePickleError

NAMES = [f"class_{number}" for number in range(100)]
LABELS = [(7 * row) % 100 for row in range(200)]
PIXELS = np.random.RandomState(0).randint(0, 256, (200, 3072), dtype=np.uint8)


def write_cifar100(folder, dump):
    """A small CIFAR-100: two images a class."""
    folder = folder / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        (folder / part).write_bytes(dump({b"data": PIXELS, b"fine_labels": LABELS, b"filenames": [b"a.png"]}))
    (folder / "meta").write_bytes(dump({b"fine_label_names": [name.encode() for name in NAMES]}))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_cifar100(tmp_path, partial(pickle.dumps, protocol=2))


def load(folder):
    return data.load("cifar100", folder.parent, download=False)


def pickle_as_python_2(value):
    """Protocol 2 as Python 2 and numpy 1 wrote it, opcode by opcode: strings of bytes, numpy.core."""
    if isinstance(value, bytes):
        short = len(value) < 256
        return (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))) + value
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(pickle_as_python_2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(pickle_as_python_2(part) for pair in value.items() for part in pair) + b"u"
    rows, columns = (pickle_as_python_2(size) for size in value.shape)
    empty = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R" + b"(K\x03U\x01|NNN" + 2 * pickle_as_python_2(-1) + b"K\x00tb"
    return empty + b"(K\x01" + rows + columns + b"\x86" + dtype + b"\x89" + pickle_as_python_2(value.tobytes()) + b"tb"


DUMPS = {f"protocol {number}": partial(pickle.dumps, protocol=number) for number in range(2, 6)}
DUMPS["numpy 1"] = lambda value: pickle.dumps(value, protocol=2).replace(b"numpy._core.", b"numpy.core.")
DUMPS["Python 2"] = lambda value: b"\x80\x02" + pickle_as_python_2(value) + b"."
DUMPS["Fortran order"] = lambda value: pickle.dumps(
    {key: np.asfortranarray(part) if key == b"data" else part for key, part in value.items()}, protocol=2
)
DUMPS["text keys"] = lambda value: pickle.dumps({key.decode(): part for key, part in value.items()}, protocol=4)


@pytest.mark.parametrize("written", DUMPS)
def test_images_labels_and_names_are_read_however_they_were_pickled(tmp_path, written):
    found = load(write_cifar100(tmp_path, DUMPS[written]))
    for split in (found.train, found.test):
        assert torch.equal(split.images.flatten(1), torch.from_numpy(PIXELS))
        assert split.labels.tolist() == LABELS and split.num_samples == 200
    assert found.class_names == tuple(NAMES) and found.num_classes == 100
    assert found.image_shape == (3, 32, 32) and found.train.images.dtype == torch.uint8
    assert (found.mean, found.std) == ((0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023))
    assert (found.pad, found.flip) == (4, True)


def test_the_publishers_files_hold_500_and_100_images_of_each_class(cifar100_dir):
    found = load(cifar100_dir)
    assert found.train.images.shape == (50000, 3, 32, 32) and found.test.images.shape == (10000, 3, 32, 32)
    assert torch.bincount(found.train.labels).tolist() == [500] * 100
    assert torch.bincount(found.test.labels).tolist() == [100] * 100
    assert found.class_names[:3] == ("apple", "aquarium_fish", "baby") and found.class_names[99] == "worm"
    mean, _ = data.channel_stats(found.train.images)
    assert mean == pytest.approx(found.mean, abs=1e-4)


# ------------------------------------------------------------------ what a pickle may not do


class Call:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def hostile(marker):
    touch = f"open({str(marker)!r}, 'w')"
    system = f"touch {marker}".encode()
    return {
        "os.system": pickle.dumps(Call(os.system, f"touch {marker}")),
        "eval": pickle.dumps(Call(eval, touch)),
        "exec, Python 2": b"c__builtin__\neval\n(S" + repr(touch).encode() + b"\ntR.",
        "getattr": pickle.dumps(Call(getattr, "text", "format")),
        "INST": b"(S'" + system + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + system + b"'\no.",
        "numpy.load": pickle.dumps(Call(np.load, str(marker))),
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93.",
        "object dtype": pickle.dumps({b"data": np.array([Call(os.system, f"touch {marker}")])}),
        "after good data": pickle.dumps({b"data": PIXELS, b"fine_labels": LABELS, b"x": Call(eval, touch)}),
        "protocol 0": pickle.dumps({b"data": Call(eval, touch)}, protocol=0),
    }


@pytest.mark.parametrize("way", hostile("x"))
@pytest.mark.parametrize("name", ["train", "meta"])
def test_a_hostile_pickle_is_refused_and_runs_nothing(folder, tmp_path, way, name):
    marker = tmp_path / "marker"
    (folder / name).write_bytes(hostile(marker)[way])
    with pytest.raises(UnsafePickleError, match=r"asks for .*Delete it") as caught:
        load(folder)
    assert str(folder / name) in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (b"c_codecs\nencode\n(Vtext\nVzlib\ntR.", "bytes in the encoding 'zlib'"),
        (b"c_codecs\nencode\n(I7\nVlatin1\ntR.", "TypeError"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(L99999999999999L\ntVb\ntR.", "a PickledArray"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(tRI7\nb.", "TypeError"),
        (b"cnumpy\nndarray\n.", "holds a str"),
        (b"cnumpy\nndarray\n(tR.", "TypeError"),
        (b"\x80\x02cnumpy\ndtype\n)\x81.", "UnpicklingError"),
        (b"Pname\n.", "UnpicklingError"),
    ],
    ids=["other codec", "no text", "huge array", "wrong state", "bare type", "called type", "new object", "persistent"],
)
def test_admitted_names_do_nothing_but_hold_values(folder, call, said):
    """_codecs.encode and numpy's own functions could be called with anything: the stand-ins refuse or ignore it."""
    (folder / "test").write_bytes(call)
    with pytest.raises(DataError, match=f"{said}.*official archive") as caught:
        load(folder)
    assert str(folder / "test") in str(caught.value)


# ------------------------------------------------------------------ damaged files


@pytest.mark.parametrize("num_bytes", [0, 1, 100, -1])
def test_a_truncated_file_is_refused_by_name(folder, num_bytes):
    whole = (folder / "train").read_bytes()
    (folder / "train").write_bytes(whole[:num_bytes])
    with pytest.raises(DataError, match=r"cannot be read .*official archive") as caught:
        load(folder)
    assert str(folder / "train") in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({b"data": None}, "data is no uint8 array"),
        ({b"data": PIXELS[:, :-1]}, r"shape \(200, 3071\)"),
        ({b"data": PIXELS.reshape(200, 3, 32, 32)}, r"shape \(200, 3, 32, 32\)"),
        ({b"data": PIXELS.astype(np.int16)}, "data is no uint8 array"),
        ({b"data": PIXELS.tolist()[0]}, "data is no uint8 array"),
        ({b"fine_labels": LABELS[1:]}, "199 of them; expected a list of 200"),
        ({b"fine_labels": np.array(LABELS)}, "fine_labels are a PickledArray"),
        ({b"fine_labels": [*LABELS[1:], 100]}, "fine label 100"),
        ({b"fine_labels": [*LABELS[1:], -1]}, "fine label -1"),
        ({b"fine_labels": [*LABELS[1:], 2.0]}, "fine label 2.0"),
        ({b"fine_labels": [*LABELS[1:], 1 << 80]}, "fine label 12"),
        ({b"fine_labels": [1] * 200}, "no image of class 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_contents_are_refused_by_name(folder, changed, said):
    (folder / "train").write_bytes(pickle.dumps({b"data": PIXELS, b"fine_labels": LABELS} | changed))
    with pytest.raises((DataError, LabelError), match=said) as caught:
        load(folder)
    assert str(folder / "train") in str(caught.value)


def test_an_array_whose_bytes_do_not_fill_its_shape_is_refused(folder):
    whole = pickle_as_python_2({b"data": PIXELS, b"fine_labels": LABELS})
    rows = b"J" + struct.pack("<i", 200)
    assert whole.count(rows) == 1
    (folder / "train").write_bytes(b"\x80\x02" + whole.replace(rows, b"J" + struct.pack("<i", 201)) + b".")
    with pytest.raises(DataError, match="data is no uint8 array"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "key"), [("train", b"data"), ("test", b"fine_labels"), ("meta", b"fine_label_names")], ids=str
)
def test_a_missing_entry_is_named_with_those_that_are_there(folder, name, key):
    record = {b"other": 1, b"data": PIXELS, b"fine_labels": LABELS, b"fine_label_names": NAMES}
    del record[key]
    (folder / name).write_bytes(pickle.dumps(record))
    with pytest.raises(DataError, match=f"{name}: no entry '{key.decode()}'; it has 'other'"):
        load(folder)


@pytest.mark.parametrize("names", [NAMES[1:], [*NAMES[1:], 7], None, dict.fromkeys(NAMES)], ids=str)
def test_wrong_class_names_are_refused(folder, names):
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}))
    with pytest.raises(DataError, match="meta: fine_label_names are not 100 names"):
        load(folder)


def test_a_pickle_of_something_else_is_refused(folder):
    (folder / "train").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match="train: holds a list; expected a dict"):
        load(folder)


# ------------------------------------------------------------------ the archive


def pack(path, folder, *more):
    """An archive such as the official one, with `more` members before the files."""
    with tarfile.open(path, "w:gz") as tar:
        for member, content in more:
            tar.addfile(member, None if content is None else io.BytesIO(content))
        for name in ("meta", "test", "train"):
            tar.add(folder / name, f"cifar-100-python/{name}")
    return path


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """An official archive, small, on a server of our own."""
    served = tmp_path / "served"
    folder = write_cifar100(tmp_path / "packed", partial(pickle.dumps, protocol=2))
    served.mkdir()
    path = pack(served / "cifar-100-python.tar.gz", folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=served)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(cifar, "URL", f"http://127.0.0.1:{server.server_port}/{path.name}")
        monkeypatch.setattr(cifar, "MD5", hashlib.md5(path.read_bytes()).hexdigest())
        yield path
        server.shutdown()


def test_a_missing_data_set_is_downloaded_once(archive, tmp_path):
    said = []
    (tmp_path / "new" / "data").mkdir(parents=True)
    found = data.load("cifar100", tmp_path / "new" / "data", say=said.append)
    assert torch.equal(found.train.images.flatten(1), torch.from_numpy(PIXELS))
    assert len(said) == 1 and cifar.URL in said[0] and str(tmp_path / "new" / "data") in said[0]
    archive.unlink()
    data.load("cifar100", tmp_path / "new" / "data", say=said.append)
    assert len(said) == 1


def test_it_goes_to_krnet_data_or_else_to_the_cache_folder(archive, tmp_path, monkeypatch):
    monkeypatch.delenv("KRNET_DATA", raising=False)
    monkeypatch.setattr(image_folder, "cache_folder", lambda: tmp_path / "cache")
    data.load("cifar100")
    assert (tmp_path / "cache" / "cifar-100-python" / "train").is_file()
    monkeypatch.setenv("KRNET_DATA", str(tmp_path / "named"))
    (tmp_path / "named").mkdir()
    data.load("cifar100")
    assert (tmp_path / "named" / "cifar-100-python" / "train").is_file()


@pytest.mark.parametrize("way", ["data_dir", "KRNET_DATA"])
def test_a_mistyped_data_folder_is_refused_and_not_made(archive, tmp_path, monkeypatch, way):
    monkeypatch.delenv("KRNET_DATA", raising=False)
    typo = tmp_path / "dtaa"
    if way == "KRNET_DATA":
        monkeypatch.setenv(way, str(typo))
    with pytest.raises(DataError, match=f"dtaa: no such folder, given as .*{way.split('_')[-1]}"):
        data.load("cifar100", typo if way == "data_dir" else None)
    assert not typo.exists()


def test_without_download_the_error_says_where_files_were_expected(archive, tmp_path):
    with pytest.raises(DataError, match=r"downloading is off(.|\n)*--data-dir, KRNET_DATA") as caught:
        data.load("cifar100", tmp_path / "none", download=False)
    assert str(tmp_path / "none" / "cifar-100-python") in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_an_archive_that_lies_there_already_is_used_without_download(archive, tmp_path):
    found = data.load("cifar100", archive.parent, download=False)
    assert found.train.num_samples == 200


def test_a_damaged_archive_is_refused_without_and_replaced_with_download(archive, tmp_path):
    (tmp_path / "data").mkdir()
    damaged = tmp_path / "data" / archive.name
    damaged.write_bytes(archive.read_bytes()[:-10])
    with pytest.raises(DataError, match="its MD5 is not") as caught:
        data.load("cifar100", tmp_path / "data", download=False)
    assert str(damaged) in str(caught.value)
    assert data.load("cifar100", tmp_path / "data").train.num_samples == 200


def test_a_download_of_other_bytes_is_refused(archive, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(cifar, "MD5", "0" * 32)
    with pytest.raises(DataError, match="cannot be downloaded or unpacked") as caught:
        data.load("cifar100", tmp_path / "data")
    assert str(tmp_path / "data" / archive.name) in str(caught.value)
    assert not (tmp_path / "data" / "cifar-100-python").exists()


def test_a_server_out_of_reach_is_an_error_that_names_the_way_out(archive, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(cifar, "URL", "http://127.0.0.1:9/cifar-100-python.tar.gz")
    with pytest.raises(DataError) as caught:
        data.load("cifar100", tmp_path / "data")
    first, *others = str(caught.value).splitlines()
    assert first == f"CIFAR-100 cannot be downloaded or unpacked: {tmp_path / 'data' / archive.name}"
    assert "--data-dir, KRNET_DATA" in others[-1] and cifar.URL in str(caught.value)
    assert all(len(line.replace(str(tmp_path), "")) <= 120 for line in others) and len(others) <= 7


def link(name, target):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member, None


def file(name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def test_members_with_other_paths_are_not_written(folder, tmp_path):
    evil = [file("../evil", b"x"), file(str(tmp_path / "evil"), b"x"), file("cifar-100-python/../../evil", b"x")]
    path = pack(tmp_path / "a.tar.gz", folder, *evil, file("cifar-100-python/other", b"x"))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    cifar.unpack(path, tmp_path / "deep" / "er" / "out")
    assert {found.name for found in (tmp_path / "deep").rglob("*")} == {"er", "out", "train", "test", "meta"}
    assert not (tmp_path / "evil").exists()


def test_links_in_an_archive_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name in ("train", "test", "meta"):
            tar.addfile(link(f"cifar-100-python/{name}", str(tmp_path / "secret"))[0])
    with pytest.raises(DataError, match="no file cifar-100-python/train in it"):
        cifar.unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
