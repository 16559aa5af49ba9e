"""Recorder images: encoded images through the trunk again; what does not belong together; files that are wrong."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import krnet
from forge import rewrite_metadata
from krnet.cli import app as cli
from krnet.coding import image_codec as _encoded
from krnet.errors import InputError, NotARecordingError, RecordingError, TensorShapeError
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import scan
from krnet.io import archive
from krnet.nn.fingerprint import fingerprint
from krnet.recorders.base import Job, get_recorder
from krnet.recorders.images import budget as search
from krnet.recorders.images import codec as _recorded
from krnet.train.config import FitConfig

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def make_trunk(channels: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.AvgPool2d(2)
    ).eval()


def make_images(num: int = 60, channels: int = 3, size: int = 16) -> torch.Tensor:
    """Smooth images with some noise, uint8 (N, C, H, W)."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(num, channels, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    return ((smooth + 0.02 * torch.randn(smooth.shape, generator=generator)).clamp(0, 1) * 255).to(torch.uint8)


def features_of(images: torch.Tensor, trunk: nn.Module) -> torch.Tensor:
    mean, std = (torch.tensor(v[: images.shape[1]])[:, None, None] for v in (MEAN, STD))
    with torch.no_grad():
        return trunk((images.float() / 255 - mean) / std)


def given(**more) -> dict:
    images, trunk = make_images(), make_trunk()
    return {"features": features_of(images, trunk), "recorder": "images", "images": images, "trunk": trunk,
            "mean": MEAN, "std": STD} | more  # fmt: skip


def record(**more) -> krnet.Recording:
    return krnet.record(**given(**more))


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A file: copy before changing."""
    path = tmp_path_factory.mktemp("images") / "x.krn"
    record(out=path, labels=torch.arange(60) % 5)
    return path


@pytest.fixture
def own(kept, tmp_path) -> Path:
    path = tmp_path / "x.krn"
    path.write_bytes(kept.read_bytes())
    return path


def rewrite(path: Path, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = archive.open_archive(path)
    tensors = {name: found.tensor(name) for name in found.names}
    for name, change in changes.items():
        tensors[name] = change(tensors[name].clone())
    archive.write(path, tensors, found.metadata)


def job_for(**more) -> Job:
    settings = given(**more)
    source = open_features(settings.pop("features"))
    settings.pop("recorder")
    images, trunk = settings.pop("images"), settings.pop("trunk")
    return Job(
        source=source, samples=Samples(len(source), source.shape, None), stats=scan(source), fit=FitConfig(),
        device=torch.device("cpu"), settings=settings, images=images, trunk=trunk,
    )  # fmt: skip


# ------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("codec", _encoded.LOSSLESS)
def test_lossless_codecs_give_back_the_very_features(codec):
    features = given()["features"]
    recording = record(codec=codec)
    assert torch.allclose(recording[:], features, atol=1e-5)
    assert recording.info()["r2"] > 0.99999


@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_features_are_those_of_images_decoded_by_pillow(codec):
    recording = record(codec=codec, quality=60)
    expected = through_pillow(codec, quality=60, **({"method": 6} if codec == "webp" else {}))
    assert torch.allclose(recording[:], expected, atol=1e-5)


@pytest.mark.parametrize("subsampling", [420, 444])
def test_colours_of_a_jpeg_are_subsampled_as_asked(subsampling):
    recording = record(quality=60, subsampling=subsampling)
    expected = through_pillow("jpeg", quality=60, subsampling=":".join(str(subsampling)))
    assert torch.allclose(recording[:], expected, atol=1e-5)


def through_pillow(codec: str, **options) -> torch.Tensor:
    """The slow, obvious way: every image saved and loaded on its own."""
    decoded = []
    for image in make_images().permute(0, 2, 3, 1).numpy():
        target = io.BytesIO()
        Image.fromarray(image).save(target, codec, **options)
        decoded.append(torch.from_numpy(np.array(Image.open(target).convert("RGB"))).permute(2, 0, 1))
    return features_of(torch.stack(decoded), make_trunk())


@pytest.mark.parametrize("codec", _encoded.CODECS)
def test_grey_images_come_back_in_every_codec_and_have_no_colours_to_subsample(codec):
    images = make_images(5, channels=1)
    coarse, fine = (_recorded.ImagesConfig(codec=codec, quality=95, subsampling=s) for s in (420, 444))
    for image in images:
        content = _encoded.encode_image(image.permute(1, 2, 0).contiguous().numpy(), coarse)
        assert content == _encoded.encode_image(image.permute(1, 2, 0).contiguous().numpy(), fine)
        decoded = _encoded.decode_image(content, codec, (1, 16, 16))
        assert (decoded.int() - image.int()).abs().max() <= (0 if codec in _encoded.LOSSLESS else 30)


def test_a_recording_moved_to_a_device_takes_its_trunk_along(kept):
    recording = krnet.open(kept, trunk=make_trunk())
    assert torch.allclose(recording.to("cpu")[0], recording[0], atol=1e-5)


def test_a_trunk_in_training_mode_replays_as_in_evaluation_and_is_left_alone(kept):
    expected = krnet.open(kept, trunk=make_trunk())[:]
    trunk = make_trunk().train()
    before = fingerprint(trunk)
    assert torch.allclose(krnet.open(kept, trunk=trunk)[:], expected, atol=1e-5)
    assert trunk.training and fingerprint(trunk) == before
    assert all(p.requires_grad for p in trunk.parameters())


def test_images_come_in_either_layout_from_memory_or_a_file(kept, tmp_path):
    expected = krnet.open(kept, trunk=make_trunk())[:]
    last = make_images().permute(0, 2, 3, 1).contiguous().numpy()
    np.save(tmp_path / "images.npy", last)
    for images in (last, tmp_path / "images.npy"):
        assert torch.allclose(record(images=images)[:], expected, atol=1e-5)


def test_grey_images_are_recorded():
    images, trunk = make_images(channels=1), make_trunk(channels=1)
    recording = record(
        features=features_of(images, trunk), images=images, trunk=trunk, mean=MEAN[0], std=STD[:1], quality=95
    )
    assert recording.info()["r2"] > 0.95


def test_vectors_are_replayed_from_images_too():
    images = make_images()
    trunk = nn.Sequential(make_trunk(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    recording = record(features=features_of(images, trunk), trunk=trunk)
    assert recording.shape == (8,) and recording.info()["r2"] > 0.9


# ------------------------------------------------------------------ rate and error


@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_more_quality_takes_more_bytes_and_gives_a_better_replay(codec):
    points = [record(codec=codec, quality=quality).info() for quality in (5, 40, 95)]
    for worse, better in pairwise(points):
        assert worse["bytes"] < better["bytes"] and worse["r2"] < better["r2"]


def test_what_all_images_begin_with_is_stored_once(kept):
    """The tables of a JPEG take more than a small image."""
    found = archive.open_archive(kept)
    start, stream = found.spec("start")[1][0], found.spec("stream")[1][0]
    assert start > 500 and stream / 60 < start
    assert _encoded.common_prefix([b"abcd", b"abxd", b"aby"]) == b"ab"
    assert _encoded.common_prefix([b"same"]) == b"same"


@pytest.mark.parametrize("quality", [1, 30, 100])
def test_webp_images_leave_their_container_and_come_back_as_they_were(quality):
    for image in make_images(12).permute(0, 2, 3, 1).contiguous().numpy():
        target = io.BytesIO()
        Image.fromarray(image).save(target, "webp", quality=quality, method=6)
        packed = _encoded.pack_webp(target.getvalue())
        assert _encoded.unpack_webp(packed) == target.getvalue() and len(packed) <= len(target.getvalue()) - 20
    found = record(codec="webp", quality=quality)
    assert found.tensor("start").numel() >= 7


def test_lossless_webp_images_leave_their_container_and_come_back_as_they_were():
    for size in (15, 16):
        for image in make_images(12, size=size).permute(0, 2, 3, 1).contiguous().numpy():
            target = io.BytesIO()
            Image.fromarray(image).save(target, "webp", lossless=True)
            packed = _encoded.pack_webp(target.getvalue(), "webp-lossless")
            assert _encoded.unpack_webp(packed, "webp-lossless") == target.getvalue()
            assert len(packed) <= len(target.getvalue()) - 20
    assert record(codec="webp-lossless").tensor("start").numel() >= 5  # signature and size


def photos(num: int = 30, size: int = 32) -> torch.Tensor:
    """Images whose channels have their noise in common, as those of photos nearly do."""
    noise = torch.randn(num, 1, size, size, generator=torch.Generator().manual_seed(1))
    return (make_images(num, size=4 * size)[:, :, ::4, ::4] * 0.7 + 30 + 10 * noise).clamp(0, 255).to(torch.uint8)


def record_these(images: torch.Tensor, **more) -> krnet.Recording:
    return record(features=features_of(images, make_trunk()), images=images, **more)


def test_lossless_webp_takes_less_than_png_of_photos():
    webp, png = (record_these(photos(), codec=codec).nbytes for codec in ("webp-lossless", "png"))
    assert webp < 0.95 * png


def test_colours_of_every_pixel_take_more_bytes_and_give_a_better_replay():
    coarse, fine = (record(quality=95, subsampling=subsampling).info() for subsampling in (420, 444))
    assert coarse["bytes"] < fine["bytes"] and coarse["r2"] < fine["r2"]


def colourful(num: int = 60, size: int = 16) -> torch.Tensor:
    """Images whose colours change from pixel to pixel: 4:2:0 loses nearly all of that."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(40, 216, (num, 3, size, size), generator=generator, dtype=torch.uint8)


def budget_for(images: torch.Tensor, budget: int, **more) -> dict:
    trunk = make_trunk()
    return get_recorder("images").for_budget(
        job_for(features=features_of(images, trunk), images=images, trunk=trunk, **more), budget
    )


def test_a_budget_is_spent_on_the_colours_of_every_pixel_where_these_matter():
    images = colourful()
    settings = budget_for(images, 45_000)
    assert (settings["codec"], settings["subsampling"]) == ("jpeg", 444)
    coarse = budget_for(images, 45_000, subsampling=420)
    assert coarse["subsampling"] == 420
    fine, coarse = (record_these(images, **chosen).info() for chosen in (settings, coarse))
    assert fine["bytes"] <= 45_000 and fine["r2"] > coarse["r2"] + 0.1


def test_a_budget_is_spent_on_the_smaller_lossless_form_where_it_fits_and_no_quality_is_searched(monkeypatch):
    tried, right = set(), _encoded.encode_image
    monkeypatch.setattr(_encoded, "encode_image", lambda image, config: tried.add(config.codec) or right(image, config))
    for images, smaller in ((photos(), "webp-lossless"), (make_images(), "png")):  # tiny ones favour png
        whole = record_these(images, codec=smaller).nbytes
        tried.clear()
        assert budget_for(images, whole + 2000)["codec"] == smaller and tried == set(_encoded.LOSSLESS)
        assert budget_for(images, whole - 2000)["codec"] not in _encoded.LOSSLESS


def test_settings_that_are_given_are_not_searched():
    for chosen in ({"codec": "png"}, {"codec": "webp-lossless"}, {"codec": "jpeg", "quality": 33},
                   {"codec": "jpeg", "subsampling": 444}, {"codec": "webp"}):  # fmt: skip
        for budget in (100, 10**7):
            assert chosen.items() <= get_recorder("images").for_budget(job_for(**chosen), budget).items()


@pytest.mark.parametrize("budget", [14_000, 18_000])
def test_a_budget_is_met_and_nearly_used(budget, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "SEARCH_SAMPLES", 30)
    settings = get_recorder("images").for_budget(job_for(), budget)
    path = tmp_path / "x.krn"
    info = record(out=path, **settings).info()
    assert 0.8 * budget < os.stat(path).st_size <= budget
    for codec in ("jpeg", "webp"):
        alone = get_recorder("images").for_budget(job_for(codec=codec), budget)
        assert alone["codec"] == codec
        assert info["r2"] > record(**alone).info()["r2"] - 0.01


def test_a_budget_too_small_for_any_quality_gives_the_smallest_and_lossless_is_taken_where_it_fits():
    assert get_recorder("images").for_budget(job_for(), 100)["quality"] == 1
    assert get_recorder("images").for_budget(job_for(), 10**7)["codec"] in _encoded.LOSSLESS


# ------------------------------------------------------------------ from an earlier recording to more images


def grow(start: Path, **more) -> krnet.Recording:
    """60 images that were recorded, and 20 more."""
    images, trunk = make_images(80)[60:], make_trunk()
    before = krnet.open(start, trunk=trunk)[:]
    return record(features=torch.cat([before, features_of(images, trunk)]), images=images, start=start, **more)


def test_images_of_an_earlier_recording_are_kept_byte_for_byte_in_the_same_quality(kept, tmp_path):
    path = tmp_path / "more.krn"
    more = grow(kept, out=path)
    old = krnet.open(kept, trunk=make_trunk())
    assert len(more) == 80 and torch.allclose(more[:60], old[:], atol=1e-5)
    held, earlier = (_recorded.RecordedImages.read(r.settings, r, len(r)) for r in (more, old))
    assert [held.content(i) for i in range(60)] == [earlier.content(i) for i in range(60)]
    alone = krnet.open(path, trunk=make_trunk())
    assert torch.allclose(alone[60:], more[60:], atol=1e-5) and alone.info()["r2"] > 0.97


def test_a_file_from_before_there_was_subsampling_opens_and_is_grown_byte_for_byte(own, kept):
    rewrite_metadata(own, lambda metadata: metadata["settings"].pop("subsampling"))
    old = krnet.open(own, trunk=make_trunk())
    assert "subsampling" not in old.settings
    assert torch.allclose(old[:], krnet.open(kept, trunk=make_trunk())[:], atol=1e-5)
    more = grow(own)
    held, earlier = (_recorded.RecordedImages.read(r.settings, r, len(r)) for r in (more, old))
    assert [held.content(i) for i in range(60)] == [earlier.content(i) for i in range(60)]


def test_without_a_budget_nothing_but_what_was_the_default_is_made():
    config = _recorded.ImagesConfig()
    assert (config.codec, config.quality, config.subsampling) == ("jpeg", 90, 420)
    for image in make_images(3).permute(0, 2, 3, 1).contiguous().numpy():
        target = io.BytesIO()
        Image.fromarray(image).save(target, "jpeg", quality=90)
        assert _encoded.encode_image(image, config) == target.getvalue()


def test_other_colours_are_another_encoding_and_what_a_codec_does_not_use_is_not():
    def encoding(**settings) -> tuple:
        return _recorded.ImagesConfig(**settings).encoding

    assert encoding(subsampling=444) != encoding(subsampling=420) != encoding(quality=80)
    assert encoding(codec="webp", subsampling=444) == encoding(codec="webp")
    for codec in _encoded.LOSSLESS:
        assert encoding(codec=codec, subsampling=444, quality=3) == encoding(codec=codec)


def test_in_another_quality_decoded_images_are_encoded_again(kept):
    more = grow(kept, quality=50)
    decoded = _recorded.RecordedImages.read(krnet.open(kept).settings, krnet.open(kept), 60).images(torch.arange(60))
    config = _recorded.ImagesConfig(quality=50)
    again = [_encoded.encode_image(image, config) for image in decoded.permute(0, 2, 3, 1).contiguous().numpy()]
    held = _recorded.RecordedImages.read(more.settings, more, 80)
    assert [held.content(i) for i in range(60)] == again


@pytest.mark.parametrize("budget", [14_000, 20_000, 60_000])
def test_a_budget_holds_for_old_and_new_images_together(kept, tmp_path, budget, monkeypatch):
    monkeypatch.setattr(search, "SEARCH_SAMPLES", 30)
    info = grow(kept, out=tmp_path / "x.krn", budget=budget).info()
    assert (tmp_path / "x.krn").stat().st_size <= budget
    assert (info["settings"]["codec"] in _encoded.LOSSLESS) == (budget == 60_000)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"images": make_images(80)}, "80 images; expected one of each of the 20 features behind the 60 that start"),
        ({"std": (0.5,)}, r"has std \(0.2, 0.25, 0.3\), not \(0.5,\)"),
        ({"trunk": make_trunk(seed=1)}, "has trunk"),
        ({"features": features_of(make_images(80), make_trunk()).flip(0)}, "start holds: its replays"),
        ({"images": make_images(20, size=12)}, "has image_shape"),
    ],
)
def test_what_does_not_continue_an_earlier_recording_is_refused(kept, tmp_path, more, why):
    images, trunk = make_images(80)[60:], make_trunk()
    features = torch.cat([krnet.open(kept, trunk=trunk)[:], features_of(images, trunk)])
    with pytest.raises(InputError, match=why):
        record(**{"features": features, "images": images, "start": kept, "out": tmp_path / "x.krn", **more})
    krnet.record(features, recorder="raw", out=tmp_path / "raw.krn")
    with pytest.raises(InputError, match="by raw; these features are"):
        record(features=features, images=images, start=tmp_path / "raw.krn")


def test_a_finished_recording_is_taken_up_with_its_trunk(own):
    assert record(out=own, labels=torch.arange(60) % 5, resume=True)[0].shape == (8, 4, 4)


# ------------------------------------------------------------------ what does not belong together


def test_a_recording_without_its_trunk_says_what_to_give(kept):
    recording = krnet.open(kept)
    assert recording.info()["recorder"] == "images"
    with pytest.raises(InputError, match=r"no trunk to make features.*krnet.open\(path, trunk=MODULE\)"):
        recording[0]
    with pytest.raises(InputError, match="trunk is of type str"):
        krnet.open(kept, trunk="trunk.pt")[0]


def test_without_its_trunk_a_file_is_verified_all_but_for_its_probe(own):
    report = krnet.verify(own)
    assert report["ok"] and report["probe_error"] is None
    shown = CliRunner().invoke(cli.app, ["verify", str(own)])
    assert shown.exit_code == 0 and "not checked: the file holds images" in shown.stdout
    with pytest.raises(InputError, match="no trunk to make features"):
        krnet.verify(own, given()["features"])
    damaged = bytearray(own.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    own.write_bytes(damaged)
    with pytest.raises(RecordingError):
        krnet.verify(own)


def test_another_trunk_than_the_recorded_one_is_refused(kept):
    with pytest.raises(InputError, match=r"images were recorded with .*features of another trunk would be others"):
        krnet.open(kept, trunk=make_trunk(seed=1))[0]


def test_a_trunk_for_a_recording_that_needs_none_is_refused(tmp_path):
    krnet.record(torch.rand(5, 3), recorder="raw", out=tmp_path / "x.krn")
    with pytest.raises(InputError, match="a trunk is given, and recorder raw needs none"):
        krnet.open(tmp_path / "x.krn", trunk=make_trunk())
    with pytest.raises(InputError, match="trunk is given, and recorder raw has no use for it"):
        krnet.record(torch.rand(5, 3), recorder="raw", trunk=make_trunk())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"images": None}, "needs images and trunk; images is missing"), ({"trunk": None}, "trunk is missing"),
        ({"trunk": "x.pt"}, "trunk is of type str"), ({"trunk": make_trunk(seed=1)}, "makes other features"),
        ({"mean": (0.0,)}, "makes other features"), ({"images": make_images().flip(0)}, "makes other features"),
        ({"images": make_images()[:59]}, "59 images; expected one of each of the 60"),
        ({"images": make_images().float()}, "images of type torch.float32"),
        ({"images": make_images()[:, 0]}, r"images of type torch.uint8 and shape \(60, 16, 16\)"),
        ({"images": torch.zeros(60, 5, 9, 9, dtype=torch.uint8)}, "expected 1 or 3 channels"),
        ({"trunk": make_trunk()[:3]}, r"makes features of \(8, 8, 8\); the recorded ones are \(8, 4, 4\)"),
        ({"mean": (1.0, 2.0)}, "mean is .*the images have 3 channels"), ({"std": (0.0,) * 3}, "std is 0.0"),
        ({"subsampling": 422}, "subsampling is 422"),
        ({"codec": "gif"}, "codec is 'gif'"), ({"quality": 0}, "quality is 0"), ({"quality": 101}, "quality is 101"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused(more, why, tmp_path):
    with pytest.raises(InputError, match=why):
        record(out=tmp_path / "x.krn", **more)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ files that are damaged or forged


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("lengths", lambda t: t[1:].clone(), TensorShapeError),
        ("lengths", lambda t: t.long(), NotARecordingError),
        ("lengths", lambda t: t.int().add(1).to(torch.uint16), NotARecordingError),
        ("stream", lambda t: t[1:].clone(), NotARecordingError),
        ("start", lambda t: t[1:].clone(), NotARecordingError),
        ("start", lambda t: t * 0, NotARecordingError),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_together_are_refused(own, name, change, error):
    rewrite(own, **{name: change})
    with pytest.raises(error):
        krnet.open(own, trunk=make_trunk())[:]


@pytest.mark.parametrize(
    "changes",
    [{"image_shape": None}, {"image_shape": [3, 16]}, {"image_shape": [2, 16, 16]}, {"image_shape": [3, 10**6, 16]},
     {"trunk": None}, {"codec": "gif"}, {"quality": "x"}, {"subsampling": "4:2:0"}, {"mean": [1, 2]}, {"std": [0]},
     {"more": 1}],
    ids=str,
)  # fmt: skip
def test_settings_that_no_recorder_writes_are_refused(own, changes):
    rewrite_metadata(own, lambda metadata: metadata["settings"].update(changes))
    with pytest.raises(NotARecordingError, match=r"x\.krn: settings of recorder images refused"):
        krnet.open(own, trunk=make_trunk())[0]


def test_images_of_another_size_or_codec_than_said_are_refused(own):
    original = own.read_bytes()
    for changes in ({"image_shape": [3, 8, 8]}, {"codec": "png"}, {"codec": "webp-lossless"}):
        own.write_bytes(original)
        rewrite_metadata(own, lambda metadata, changes=changes: metadata["settings"].update(changes))
        with pytest.raises(NotARecordingError, match="does not decode"):
            krnet.open(own, trunk=make_trunk())[0]
