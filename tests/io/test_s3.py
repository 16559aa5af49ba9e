"""An object store: features and recordings in a server that speaks the protocol of S3, on this machine."""

import pytest
import torch

import krnet
from krnet.errors import StoreError
from krnet.features.labels import stored_labels
from krnet.features.source import open_features
from krnet.io.folders import list_folder
from krnet.io.places import Url

pytest.importorskip("s3fs", reason="pip install s3fs")
moto = pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
pytestmark = pytest.mark.slow  # the server takes seconds to start

VALUES = torch.randn(100, 4, 5, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(100) % 3


@pytest.fixture(scope="module")
def bucket():
    import fsspec
    import s3fs

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        settings = {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}"}
        patch.setitem(fsspec.config.conf, "s3", settings)
        s3fs.S3FileSystem(**settings).mkdir("krnet")
        yield "s3://krnet"
    server.stop()


def extract(out, **options):
    trunk = torch.nn.Identity()
    return krnet.extract(trunk, VALUES, LABELS, out=out, batch_size=5, shard_size=20 * 488, device="cpu", **options)


def test_shards_go_to_a_bucket_in_shares_and_are_recorded_from_there(bucket, tmp_path):
    for part in (1, 0):
        extract(f"{bucket}/features/", share=(part, 2))
    assert len(list_folder(Url(f"{bucket}/features"))) == 6
    with pytest.raises(ValueError, match="--first-id end"):
        extract(f"{bucket}/features/")
    extract(f"{bucket}/features", resume=True)
    source = open_features(f"{bucket}/features")
    assert torch.equal(source.read(torch.tensor([99, 3, 40])), VALUES[[99, 3, 40]])
    assert torch.equal(stored_labels(f"{bucket}/features", None, 100), LABELS)
    recording = krnet.record(f"{bucket}/features/", recorder="raw", out=tmp_path / "a.krn")
    assert torch.equal(recording[:], VALUES)


def test_a_recording_in_a_bucket_opens_by_ranges(bucket, tmp_path):
    import fsspec

    local = krnet.record(VALUES, LABELS, recorder="pca", components=4, out=tmp_path / "a.krn")
    fsspec.filesystem("s3").put_file(str(tmp_path / "a.krn"), f"{bucket}/a.krn")
    far = krnet.open(f"{bucket}/a.krn")
    assert torch.equal(far[[7, 3]], local[[7, 3]]) and krnet.verify(f"{bucket}/a.krn")["ok"]
    with pytest.raises(StoreError, match=r"none\.krn: no such file"):
        krnet.open(f"{bucket}/none.krn")
