"""The paper's rival: the same decoder, a code for every sample; as floats, and in few bits."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import krnet
from forge import rewrite_metadata
from krnet.bench.plan import plan
from krnet.coding.entropy import Tables
from krnet.coding.weights import coded_bits, step_for
from krnet.config import from_dict
from krnet.errors import InputError, NotARecordingError, RecordingError, ResumeError, SettingError
from krnet.features.metrics import fidelity
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import normalise, scan
from krnet.io import archive
from krnet.nn.paper_config import DecoderConfig, NetworkConfig
from krnet.nn.paper_net import Decoder
from krnet.nn.sizing import preset_config
from krnet.recorders.autoencoder import budget as budgets
from krnet.recorders.autoencoder.network import CODE_NAMES, AutoencoderConfig, Encoder, unit_power
from krnet.recorders.autoencoder.recorder import AutoencoderFit, AutoencoderRecorder
from krnet.recorders.base import Job
from krnet.train.config import FitConfig
from maps import relu_maps, signed_maps
from watchers import of_fits, raise_at

TINY: dict[str, Any] = {"recorder": "autoencoder", "d0": 32, "c0": 8, "c1": 8, "iterations": 30}
KINDS: dict[str, dict[str, Any]] = {
    "floats": {"code_width": 24},
    "coded": {"code_width": 24, "code_bits": 3, "weight_bits": 16, "block_size": 8},
    "few": {"code_width": 24, "code_bits": 2.5, "weight_bits": 4, "block_size": 8},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def maps() -> tuple[Tensor, Tensor]:
    features, labels = relu_maps(90, (6, 7, 5))
    return features, labels + 10


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """One file of each kind, all of the same features: copy before changing."""
    folder = tmp_path_factory.mktemp("autoencoder")
    for kind, settings in KINDS.items():
        krnet.record(*maps(), out=folder / f"{kind}.krn", **TINY | settings)
    return {kind: folder / f"{kind}.krn" for kind in KINDS}


@pytest.fixture
def own(files, tmp_path):
    """A copy of a file."""

    def copied(kind: str) -> Path:
        path = tmp_path / files[kind].name
        path.write_bytes(files[kind].read_bytes())
        return path

    return copied


def job_for(features: Any, labels: Tensor | None = None, fit: FitConfig | None = None, **more: Any) -> Job:
    source = open_features(features)
    samples = Samples(len(source), source.shape, labels)
    return Job(source, samples, scan(source), fit or FitConfig(), torch.device("cpu"), **more)


def fit_of(features: Tensor, head: nn.Module | None = None, fit: FitConfig | None = None, **settings: Any):
    """A fit that is not yet begun."""
    job = job_for(features, fit=fit, head=head, settings={"d0": 16, "c0": 8, "c1": 8, **settings})
    return AutoencoderFit(job, AutoencoderRecorder().config(job))


def tensors_of(path: Path) -> dict[str, Tensor]:
    kept = archive.open_archive(path)
    return {name: kept.tensor(name) for name in kept.names}


def assert_same_content(a: Path, b: Path) -> None:
    one, other = tensors_of(a), tensors_of(b)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


# ------------------------------------------------------------------ the paper's


def test_the_papers_setting_has_a_decoder_of_325_8_mib_and_1024_floats_a_sample():
    job = job_for(torch.rand(2, 256, 14, 14), preset="imagenet-published")
    config = AutoencoderRecorder().config(job)
    assert (config.code_width, config.code_bits, config.weight_bits) == (1024, 32, 32)
    with torch.device("meta"):
        decoder = Decoder(config, config.code_width)
    num_bytes = 4 * sum(p.numel() for p in decoder.parameters())
    assert f"{num_bytes / 2**20:.1f}" == "325.8"
    assert num_bytes == plan((256, 14, 14), 2, preset="imagenet-published")["autoencoder_network_bytes"]
    assert budgets.size_bytes(job, config) == pytest.approx(num_bytes + 2 * 4096, abs=20_000)


@pytest.mark.parametrize("preset", ["cifar100", "imagenet"])
def test_presets_give_the_decoder_of_krnet(preset):
    config, whole = (
        AutoencoderRecorder().config(job_for(torch.rand(2, 64, 8, 8), preset=preset)),
        preset_config((64, 8, 8), preset),
    )
    decoder = {field.name: getattr(whole, field.name) for field in fields(DecoderConfig)}
    assert decoder.items() <= asdict(config).items() and config.code_width == 2 * whole.group_size


def test_the_encoder_mirrors_the_decoder():
    """The same layers the other way round: the same matrices, turned over, and as many filters."""
    sizes = {"d0": 32, "c0": 16, "c1": 8, "stride": 2, "code_width": 24}
    job = job_for(torch.rand(2, 6, 14, 14), preset="cifar100", settings=sizes)
    config = AutoencoderRecorder().config(job)
    decoder, encoder = Decoder(config, 24), Encoder(config, torch.zeros(6), torch.ones(6))
    sizes = [sorted(p.numel() for p in net.parameters() if p.dim() > 1) for net in (decoder, encoder)]
    assert sizes[0] == sizes[1]
    x = torch.rand(3, 6, 14, 14)
    shapes = []
    for module in (encoder.input, encoder.conv, encoder.fc1):
        module.register_forward_hook(lambda module, given, out: shapes.append(tuple(out.shape)))
    assert encoder(x).shape == (3, 24)
    assert shapes == [(3, 8, 14, 14), (3, 16, 7, 7), (3, 32)]
    assert decoder(encoder(x)).shape == x.shape


def test_the_file_holds_codes_and_decoder_and_nothing_of_the_encoder(files):
    tensors = tensors_of(files["floats"])
    config = NetworkConfig(channels=6, height=7, width=5, d0=32, c0=8, c1=8)
    decoder = Decoder(config, 24)
    expected = {"codes", "low", "high", "labels", "probe.ids", "probe.values"}
    assert set(tensors) == expected | {f"net.{name}" for name, _ in decoder.named_parameters()}
    assert tensors["codes"].shape == (90, 24) and tensors["codes"].dtype == torch.float32


@pytest.mark.slow
def test_a_short_fit_learns():
    features, labels = relu_maps(90, (8, 6, 6))
    settings = TINY | {"iterations": 60, "code_width": 64}
    for kind in ({}, {"code_bits": 3, "weight_bits": 4}, {"schedule": "paper"}):
        assert krnet.record(features, labels, **settings | kind).info()["r2"] > 0.15


def test_what_is_replayed_is_the_decoded_code_of_the_encoder():
    features = relu_maps(40, (3, 4, 5))[0]
    fit = fit_of(features, code_width=7)
    content = fit.content(outcome())
    replayed = AutoencoderRecorder().replay(fit.job.samples, content.settings, content, torch.device("cpu"))
    x = normalise(features, fit.low, fit.high)
    with torch.no_grad():
        assert torch.allclose(content.tensors["codes"], fit.net.encoder(x), atol=1e-6)
        expected = fit.net.decoder(fit.net.encoder(x))
    span = (fit.high - fit.low).view(3, 1, 1)
    assert_near(replayed.decode(torch.arange(40)), expected * span + fit.low.view(3, 1, 1))


def test_the_loss_is_measured_on_what_the_file_will_hold():
    """Codes and weights are rounded in training as in the file: no step down from one to the other."""
    features = relu_maps(40, (3, 4, 5))[0]
    fit = fit_of(features, code_width=9, code_bits=2, weight_bits=3)
    for iteration in range(10):
        fit.step(iteration, 0.3)
    with torch.no_grad():
        first, _ = fit._losses(torch.arange(40), features)
    content = fit.content(outcome())
    replayer = AutoencoderRecorder().replay(fit.job.samples, content.settings, content, torch.device("cpu"))
    x, found = (normalise(v, fit.low, fit.high, clamp=False) for v in (features, replayer.decode(torch.arange(40))))
    assert (found - x).square().sum().item() / 40 == pytest.approx(first.item(), rel=1e-4)


def outcome():
    from krnet.train.loop import Outcome

    return Outcome(1, 0.0, "iterations")


# ------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("kind", ["coded", "few"])
def test_one_code_is_read_from_its_own_block(files, kind, monkeypatch):
    recording = krnet.open(files[kind])
    expected = recording[:]
    recording = krnet.open(files[kind])
    calls = []
    decode = Tables.decode
    monkeypatch.setattr(Tables, "decode", lambda self, *given: calls.append(1) or decode(self, *given))
    assert_near(recording[50][None], expected[50:51])
    assert len(calls) == 1


SHAPES = [(), (1,), (7,), (4, 5), (3, 9, 4), (2, 3, 4, 5), (1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_code_is_by_default_as_wide_as_a_sample_and_at_least_four(shape):
    code = AutoencoderRecorder().config(job_for(torch.randn(5, *shape)))
    assert code.code_width == max(4, np.prod(shape))


def test_numbers_are_told_apart_by_more_than_their_sign():
    features = torch.linspace(-2, 3, 60)
    found = krnet.record(features, **TINY | {"iterations": 100, "code_width": 8})[:].cpu()
    assert torch.corrcoef(torch.stack([found, features]))[0, 1] > 0.95


@pytest.mark.slow
def test_signed_maps_keep_their_own_amplitude():
    features, amplitude = signed_maps(60, (2, 6, 6))
    replayed = krnet.record(features, **TINY | {"iterations": 150, "code_width": 16})[:].cpu()
    spread = replayed.std((1, 2, 3))
    assert torch.corrcoef(torch.stack([spread, amplitude]))[0, 1] > 0.9


def test_a_head_is_seen_through():
    features = torch.randn(20, 3, 4, 5)
    head = nn.Sequential(nn.Flatten(), nn.Linear(60, 7))
    fit = fit_of(features, head, FitConfig(gamma=0.3), code_width=5)
    ids = torch.tensor([3, 19, 4])
    with torch.no_grad():
        first, total = fit._losses(ids, features[ids])
        x = normalise(features[ids], fit.low, fit.high)
        output = fit.net.decoder(fit.net.encoder(x))
        span, low = (fit.high - fit.low).view(3, 1, 1), fit.low.view(3, 1, 1)
        second = sum(((head(o[None] * span + low) - head(v[None])) ** 2).sum() for o, v in zip(output, features[ids]))
    torch.testing.assert_close(first, (output - x).square().sum() / 3)
    torch.testing.assert_close(total, first + 0.3 * second / 3)


# ------------------------------------------------------------------ bits


@pytest.mark.parametrize("bits", [1.5, 2, 3, 5, 8])
def test_no_code_of_unit_power_takes_more_bits_than_its_setting(bits):
    """Counted from symbols: normal numbers come near the bound, all others stay below."""
    step = step_for(bits)
    generator = torch.Generator().manual_seed(0)
    kinds = {
        "normal": torch.randn(4000, 64, generator=generator),
        "uneven": torch.randn(4000, 64, generator=generator) * torch.logspace(-2, 1, 64),
        "uniform": torch.rand(4000, 64, generator=generator) - 0.5,
        "sparse": torch.randn(4000, 64, generator=generator) ** 5,
    }
    found = {}
    for kind, codes in kinds.items():
        symbols = (unit_power(codes) / step).round()
        counts = symbols.unique(return_counts=True)[1].double() / symbols.numel()
        found[kind] = -(counts * counts.log2()).sum().item()
        assert found[kind] <= coded_bits(step) + 0.01
    assert found["normal"] == pytest.approx(bits, abs=0.15)


def test_fewer_bits_take_fewer_bytes():
    features, labels = relu_maps(200, (6, 7, 5))
    settings = TINY | {"code_width": 64, "iterations": 5}
    kinds = [{}, {"code_bits": 8}, {"code_bits": 8, "weight_bits": 16}, {"code_bits": 4, "weight_bits": 16}]
    kinds += [{"code_bits": 2, "weight_bits": 8}, {"code_bits": 2, "weight_bits": 3}]
    sizes = [krnet.record(features, labels, **settings | kind).nbytes for kind in kinds]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


def test_rounding_lets_gradients_pass():
    fit = fit_of(torch.randn(30, 3, 4, 5), code_width=6, code_bits=2, weight_bits=2)
    before = {name: p.detach().clone() for name, p in fit.net.named_parameters()}
    fit.step(0, 0.3)
    fit.step(1, 0.3)
    moved = [name for name, p in fit.net.named_parameters() if not torch.equal(p, before[name])]
    assert moved == list(before)


# ------------------------------------------------------------------ a budget


@pytest.mark.parametrize("budget", [60_000, 150_000, 400_000])
def test_a_budget_is_kept_even_by_the_dearest_codes_and_about_half_of_it_is_theirs(budget, tmp_path, monkeypatch):
    features, labels = relu_maps(1500, (8, 8, 8))

    def dearest(fit: AutoencoderFit) -> Tensor:
        codes = torch.randn(1500, fit.config.code_width, generator=torch.Generator().manual_seed(0))
        return (unit_power(codes) / fit.config.step).round().short()

    settings = AutoencoderRecorder().for_budget(job_for(features, labels), budget)
    monkeypatch.setattr(AutoencoderFit, "codes", dearest)
    path = tmp_path / "x.krn"
    krnet.record(features, labels, recorder="autoencoder", iterations=1, batch_size=32, out=path, **settings)
    size = path.stat().st_size
    assert 0.85 * budget <= size <= budget
    codes = sum(tensor.nbytes for name, tensor in tensors_of(path).items() if name.startswith("codes"))
    assert 0.3 * size <= codes <= 0.6 * size


def test_settings_that_the_caller_gave_stay_under_a_budget():
    job = job_for(relu_maps(500, (8, 8, 8))[0], settings={"code_width": 40, "c0": 16, "weight_bits": 16})
    found = AutoencoderRecorder().for_budget(job, 100_000)
    assert (found["code_width"], found["c0"], found["weight_bits"]) == (40, 16, 16)


def size_of(job: Job, settings: dict[str, Any]) -> int:
    """Most that a file takes."""
    sizes = {name: value for name, value in settings.items() if name not in CODE_NAMES}
    decoder = budgets.decoder_sizes(job.source.shape, 0, sizes)
    return budgets.size_bytes(job, from_dict(AutoencoderConfig, {**asdict(decoder), **settings}))


def test_bits_of_weights_and_then_of_codes_give_way_before_a_budget_is_missed():
    job = job_for(relu_maps(500, (8, 8, 8))[0])
    least = AutoencoderRecorder().for_budget(job, 1)
    smallest = size_of(job, least)
    usual = size_of(job, least | {"code_bits": 3, "weight_bits": 4})
    found = []
    for share in (0.0, 0.6, 1.0):
        budget = int(smallest + share * (usual - smallest)) + 10
        settings = AutoencoderRecorder().for_budget(job, budget)
        assert size_of(job, settings) <= budget
        found.append((settings["code_bits"], settings["weight_bits"]))
    assert found == sorted(found) and found[0] == (2, 2) and found[-1] == (3, 4)
    assert found[1][0] == 3 and 2 < found[1][1] < 4
    given = AutoencoderRecorder().for_budget(replace(job, settings={"weight_bits": 8}), 1)
    assert (given["code_bits"], given["weight_bits"]) == (2, 8)


def test_what_is_too_little_gives_the_smallest_and_much_gives_whole_maps():
    job = job_for(relu_maps(50, (8, 8, 8))[0])
    smallest = AutoencoderRecorder().for_budget(job, 10)
    assert smallest["code_width"] == 4 and smallest == AutoencoderRecorder().for_budget(job, 1000)
    many = job_for(relu_maps(2000, (8, 8, 8))[0])
    assert AutoencoderRecorder().for_budget(many, 10**8)["code_width"] == 8 * 8 * 8


def test_a_code_is_hardly_wider_than_the_layer_that_reads_it():
    job = job_for(relu_maps(2000, (8, 8, 8))[0])
    for budget in (10**6, 2 * 10**6):
        found = AutoencoderRecorder().for_budget(job, budget)
        assert found["code_width"] <= 1.2 * found["d0"]


def test_no_budget_makes_a_file_larger_than_the_features():
    job = job_for(relu_maps(200, (8, 8, 8))[0])
    much, more = (AutoencoderRecorder().for_budget(job, budget) for budget in (10**6, 10**12))
    assert much == more and 200_000 < size_of(job, more) <= 4 * 200 * 512 + 10_000


def test_bits_grow_only_where_the_decoder_cannot(monkeypatch):
    job = job_for(relu_maps(2000, (8, 8, 8))[0])
    assert AutoencoderRecorder().for_budget(job, 10**6)["weight_bits"] == 4
    monkeypatch.setattr(budgets, "MAX_PARAMETERS", 100_000)
    found = [AutoencoderRecorder().for_budget(job, budget) for budget in (5 * 10**4, 10**5, 10**6)]
    bits = [(settings["code_bits"], settings["weight_bits"]) for settings in found]
    assert bits[0] == (3, 4) < bits[1] < bits[2] == (8, 16)
    widest = budgets.decoder_sizes((8, 8, 8), 0, {name: found[-1][name] for name in ("c0", "c1", "d0")})
    assert budgets.num_weights(widest, 512) <= 100_000


def test_a_wide_code_in_one_number_is_still_coded():
    """Rounded to 8 bits it would have more values than a table takes."""
    fit = fit_of(relu_maps(20, (3, 4, 5))[0], code_width=5000, code_bits=8)

    class Spike(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.eye(5000)[: len(x)] - torch.eye(5000)[-len(x) :]

    fit.net.encoder = Spike()
    content = fit.content(outcome())
    replayer = AutoencoderRecorder().replay(fit.job.samples, content.settings, content, torch.device("cpu"))
    assert replayer.inputs(torch.arange(20)).diagonal().min() > 30


def test_wide_codes_and_decoders_have_sizes_that_a_gpu_multiplies_quickly():
    job = job_for(relu_maps(2000, (8, 8, 8))[0])
    for budget in (700_000, 1_000_000):
        found = AutoencoderRecorder().for_budget(job, budget)
        assert found["code_width"] % 8 == 0 or found["code_width"] < 256
        assert found["c0"] % 16 == 0 or found["c0"] < 64


def test_sizes_grow_with_the_budget():
    job = job_for(relu_maps(2000, (8, 8, 8))[0])
    found = [AutoencoderRecorder().for_budget(job, budget) for budget in (50_000, 200_000, 800_000)]
    for name in ("code_width", "c0", "d0"):
        sizes = [settings[name] for settings in found]
        assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_features_of_any_shape_have_settings_for_a_budget(shape):
    features = torch.randn(60, *shape)
    settings = AutoencoderRecorder().for_budget(job_for(features), 40_000)
    assert krnet.record(features, recorder="autoencoder", iterations=1, **settings)[:].shape == features.shape


# ------------------------------------------------------------------ when it stops, and goes on


def test_it_stops_at_the_target_and_what_is_stored_keeps_the_promise():
    fit = FitConfig(stop_at_r2=0.3, iterations=300)
    settings = {name: TINY[name] for name in ("d0", "c0", "c1")} | KINDS["few"]
    job = job_for(*maps(), fit=fit, settings=settings)
    content = AutoencoderRecorder().fit(job)
    replayer = AutoencoderRecorder().replay(job.samples, content.settings, content, job.device)
    assert content.stopped_by == "target" and content.iterations < 300
    assert fidelity(replayer.decode, job.source, job.stats).r2 >= 0.3


def test_a_time_budget_ends_the_fit():
    info = krnet.record(*maps(), time_budget=0.3, **TINY | {"iterations": None}).info()
    assert info["stopped_by"] == "time_budget"


class Stop(Exception):
    pass


def interrupt(path: Path, **settings: Any) -> None:
    with pytest.raises(Stop):
        krnet.record(*maps(), out=path, watch=raise_at(20, Stop()), checkpoint_s=0, **TINY | settings)
    assert path.with_name(path.name + ".ckpt").exists() and not path.exists()


def test_a_fit_that_was_stopped_ends_in_the_same_file(files, tmp_path):
    path, kind = tmp_path / "x.krn", "few"
    interrupt(path, **KINDS[kind])
    seen: list[int] = []
    watch = of_fits(lambda progress: seen.append(progress.done))
    krnet.record(*maps(), out=path, resume=True, watch=watch, checkpoint_s=0, **TINY | KINDS[kind])
    assert seen[0] >= 20 and not path.with_name("x.krn.ckpt").exists()
    assert_same_content(path, files[kind])


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    interrupt(tmp_path / "x.krn", **KINDS["coded"])
    for name, value in {"code_width": 25, "code_bits": 4, "weight_bits": 32, "d0": 16, "seed": 3, "lr": 1e-3}.items():
        with pytest.raises(ResumeError, match=f"made with {name}"):
            krnet.record(*maps(), out=tmp_path / "x.krn", resume=True, **TINY | KINDS["coded"] | {name: value})


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"code_width": 0}, "code_width is 0"), ({"code_width": 2.5}, "code_width is 2.5"),
        ({"code_bits": 9}, "code_bits is 9; expected 1 to 8"), ({"code_bits": "a"}, "code_bits is 'a'"),
        ({"weight_bits": 0}, "weight_bits is 0"), ({"weight_bits": 24}, "weight_bits is 24"),
        ({"block_size": 257}, "block_size is 257"), ({"d0": 7}, "d0 is 7"), ({"group_size": 64}, "group_size"),
        ({"bits": 4}, "bits"), ({"vector": True}, "vector"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings, why):
    with pytest.raises(SettingError, match=why):
        krnet.record(maps()[0], **TINY | settings)


def test_a_recording_to_start_from_is_refused(files):
    with pytest.raises(InputError, match="start is given, and recorder autoencoder has no use for it"):
        krnet.record(*maps(), start=files["floats"], **TINY)


@every_kind
@pytest.mark.parametrize(
    "change",
    [
        {"code_width": 0}, {"code_width": None}, {"code_bits": 0}, {"weight_bits": [16]},
        {"more": 1}, {"groups": [90]}, {"group_size": 8}, {"d0": 2**40}, {"height": 70}, {"vector": True},
        {"conv_after": "none"}, {"block_size": 10**9},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_no_recorder_writes_are_refused(own, kind, change):
    path = own(kind)
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(change))
    with pytest.raises(NotARecordingError, match="settings of recorder autoencoder refused"):
        krnet.open(path)[0]


@every_kind
@pytest.mark.parametrize(
    "change",
    [
        {"code_width": 25}, {"code_width": 2**16}, {"code_bits": 32}, {"code_bits": 7}, {"weight_bits": 32},
        {"weight_bits": 16}, {"d0": 2**24}, {"d0": 2**24, "c0": 2**24}, {"c1": 10},
        {"conv_before": "full"}, {"block_size": 1},
    ],
    ids=str,
)  # fmt: skip
def test_other_settings_than_the_files_own_are_noticed(own, kind, change):
    path = own(kind)
    kept = archive.open_archive(path).metadata["settings"]
    if all(kept[name] == value for name, value in change.items()) or (kind == "floats" and "block_size" in change):
        return  # the file's own, or of no use to it
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(change))
    with pytest.raises(RecordingError):
        krnet.verify(path)
