"""Files behind URLs: read by ranges, from a web server on this machine and from a store in memory."""

import json
import pickle

import pytest
import torch
from typer.testing import CliRunner

import krnet
from krnet.cli.app import app
from krnet.errors import ChecksumError, InputError, MissingPackageError, NotARecordingError, StoreError
from krnet.io import archive, remote, remote_rows
from krnet.io.places import Url, is_url, place
from krnet.io.remote import RemoteFile
from range_server import RangeServer, serving

pytest.importorskip("aiohttp", reason="pip install 'krnet[urls]'")
fsspec = pytest.importorskip("fsspec")

ROWS = torch.randn(1000, 64, 20, generator=torch.Generator().manual_seed(0))  # 5 MB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    archive.write(folder / "a.krn", {"x": ROWS, "y": torch.arange(5)}, {"kind": "test"}, blocks={"x": 10_000})
    krnet.record(ROWS[:200], torch.arange(200) % 3, recorder="pca", components=8, out=folder / "pca.krn")
    return folder


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr(remote, "DELAYS_S", (0.0, 0.0))


@pytest.fixture(params=["http", "memory"])
def url(request, folder, server: RangeServer):
    """The address of a file of the folder."""
    if request.param == "http":
        return server.url
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.pipe_file(f"/served/{path.name}", path.read_bytes())
    return lambda name: f"memory://served/{name}"


# ------------------------------------------------------------------ names


def test_a_url_shows_no_keys_and_has_the_name_of_its_path():
    url = Url("https://me:secret@host:80/runs/a%20b.krn?sig=KEY#part")
    assert str(url) == "https://host:80/runs/a%20b.krn" and (url.name, url.suffix) == ("a b.krn", ".krn")
    assert (Url("s3://bucket/dir/?k=1") / "x.json").text == "s3://bucket/dir/x.json?k=1"
    assert is_url("memory://a") and not is_url("runs/a.krn") and not is_url("C:\\a") and not is_url(b"a://b")
    assert str(place("file:///tmp/a%20b")) == "/tmp/a b"


# ------------------------------------------------------------------ recordings


def test_a_recording_by_url_is_that_of_the_file(url, folder):
    local, far = krnet.open(folder / "pca.krn"), krnet.open(url("pca.krn"))
    assert torch.equal(far[[7, 3]], local[[7, 3]]) and torch.equal(far.labels, local.labels)
    assert far.info() == local.info() and far.path.name == "pca.krn" and far.fingerprint == local.fingerprint
    assert krnet.verify(url("pca.krn"))["ok"]
    assert torch.equal(pickle.loads(pickle.dumps(far))[5], local[5])


def test_a_recording_by_url_can_be_saved_and_appended_to_elsewhere(url, folder, tmp_path):
    far = krnet.open(url("pca.krn"))
    assert far.save(tmp_path / "a.krn").read_bytes() == (folder / "pca.krn").read_bytes()
    grown = far.append(ROWS[200:240], [1] * 40, out=tmp_path / "b.krn")
    assert len(grown) == 240 and torch.equal(grown[:200], far[:])


@pytest.mark.parametrize("block", [10_000, 5120, 7])
def test_rows_are_fetched_by_blocks_and_are_those_of_the_file(block, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_rows, "REQUEST_BYTES", 60_000)
    monkeypatch.setattr(remote_rows, "FETCH_BYTES", 100_000)
    rows = ROWS[: 40 if block == 7 else 300]
    archive.write(tmp_path / "a.krn", {"x": rows}, {}, blocks={"x": block})
    fsspec.filesystem("memory").pipe_file("/rows.krn", (tmp_path / "a.krn").read_bytes())
    stored = archive.open_archive("memory://rows.krn").stored_rows("x")
    assert torch.equal(stored.read(3, len(rows)), rows[3:])
    for ids in ([], [5], [7, 7, 0], torch.randperm(len(rows)).tolist()):
        assert torch.equal(stored.take(torch.tensor(ids).long()), rows[ids])


def test_only_what_is_needed_is_fetched(server, folder):
    opened = archive.open_archive(server.url("a.krn"))
    before = server.sent
    opened.stored_rows("x").take(torch.tensor([900, 5, 6]))
    assert server.sent - before <= 4 * 10_000
    assert server.sent < 0.05 * (folder / "a.krn").stat().st_size


def test_damage_is_found(server, folder, tmp_path):
    content = bytearray((folder / "a.krn").read_bytes())
    content[-100_000] ^= 1
    (folder / "damaged.krn").write_bytes(content)
    opened = archive.open_archive(server.url("damaged.krn"))
    with pytest.raises(ChecksumError, match="open it again"):
        opened.stored_rows("x").read(0, 1000)
    with pytest.raises(ChecksumError):
        opened.verify()


def test_workers_of_a_loader_read_by_url_too(server, folder):
    far = krnet.open(server.url("pca.krn"))
    far[0]  # the connection of this process must not reach the others
    for (features, labels), (expected, _) in zip(
        far.loader(64, num_workers=2), krnet.open(folder / "pca.krn").loader(64)
    ):
        assert torch.equal(features, expected) and len(labels) == len(features)


def test_the_commands_take_urls_and_show_no_keys(server, tmp_path):
    def run(*arguments):
        found = CliRunner().invoke(app, [*map(str, arguments), "--json"])
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)

    url = server.url("pca.krn?key=SECRET")
    assert run("info", url)["path"] == run("verify", url)["path"] == server.url("pca.krn")
    assert run("replay", url, "--ids", "3:9", "-o", tmp_path / "a.npy")["num_samples"] == 6


# ------------------------------------------------------------------ faults


def test_a_passing_fault_of_the_server_is_tried_again(server):
    server.failures = 2
    assert len(krnet.open(server.url("pca.krn"))) == 200
    server.failures = 100
    with pytest.raises(StoreError, match="503"):
        krnet.open(server.url("pca.krn"))[0]


def test_a_server_without_ranges_is_refused_and_no_whole_file_is_read(server, folder):
    server.has_ranges = False
    with pytest.raises(StoreError, match="sends whole files only"):
        krnet.open(server.url("a.krn"))


def test_other_bytes_than_were_asked_for_are_refused(server):
    found = RemoteFile(Url(server.url("a.krn")))
    assert found.size
    server.extra = b"more"
    with pytest.raises(StoreError, match=r"bytes came for .*expected"):
        found.read(0, 10)


def test_what_is_not_there_is_named_without_its_key(server):
    with pytest.raises(StoreError, match=r"none\.krn: no such file") as info:
        krnet.open(server.url("none.krn?key=SECRET"))
    assert "SECRET" not in str(info.value)
    server.failures = 100
    with pytest.raises(StoreError) as info:
        krnet.open(server.url("pca.krn?key=SECRET"))
    assert "SECRET" not in str(info.value)


def test_a_file_that_is_no_recording_is_refused(server, folder):
    (folder / "text.krn").write_text("hello, this is no recording at all, whatever its name is")
    with pytest.raises(NotARecordingError, match="no recording"):
        krnet.open(server.url("text.krn"))


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("nosuch://a/b.krn", StoreError, "no URL that fsspec knows"),
        ("s3://bucket/a.krn", MissingPackageError, "s3:// is not installed"),
        ("http://127.0.0.1:1/a.krn", StoreError, "Check the URL and the connection"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_by_name(url, error, message):
    if url.startswith("s3") and krnet.config.is_installed("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(error, match=message):
        krnet.open(url)


def test_a_recording_is_not_written_to_a_url():
    with pytest.raises(InputError, match="write it here, and copy it"):
        krnet.record(ROWS[:9], out="memory://a.krn")
