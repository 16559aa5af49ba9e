"""Weights of few bits: what is trained is what is stored, and the file is as small as it says."""

import pytest
import torch

import krnet
from krnet import api
from krnet.coding.weights import Rounding, pack, rounded, step_for, unpack
from krnet.config import from_dict
from krnet.errors import KrnetError, SettingError
from krnet.nn.paper_config import NetworkConfig
from krnet.recorders.base import Content
from krnet.recorders.paper.recorder import rounding
from maps import relu_maps

PLAN = {"rows": Rounding(0, step_for(4)), "columns": Rounding(1, step_for(3)), "all": Rounding(None, 1 / 32)}
SMALL = {"recorder": "paper", "c0": 8, "d0": 32, "c1": 8, "group_size": 32}


def weights(seed=0):
    torch.manual_seed(seed)
    spread = torch.logspace(-3, 1, 40)[:, None]
    return {
        "rows": torch.randn(40, 500) * spread,
        "few": torch.randn(7),
        "columns": torch.randn(300, 4) * torch.tensor([1.0, 10.0, 0.1, 3.0]),
        "all": 1 + 0.1 * torch.randn(3000),
        "zero": torch.zeros(3, 3),
    }


def stored(tensors):
    return Content({f"net.{name}": value for name, value in tensors.items()}, {})


def shapes(tensors):
    return {name: tuple(value.shape) for name, value in tensors.items()}


def test_what_is_read_back_is_what_was_trained():
    made = weights()
    found = unpack(stored(pack(made, PLAN)), "net.", shapes(made), PLAN)
    expected = rounded(made, PLAN)
    assert list(found) == list(made)
    for name in made:
        assert torch.equal(found[name], expected[name]), name


def test_a_value_is_at_most_half_a_step_away_whatever_the_size_of_its_row():
    made = weights()["rows"]
    found = rounded({"rows": made}, PLAN)["rows"]
    rms = made.square().mean(1, keepdim=True).sqrt()
    assert ((found - made).abs() <= 0.501 * step_for(4) * rms).all()


@pytest.mark.parametrize("bits", [2.0, 3.0, 4.0, 6.0])
def test_normal_weights_take_as_many_bits_as_asked_for(bits):
    torch.manual_seed(1)
    made = {"w": torch.randn(200, 1000)}
    kept = pack(made, {"w": Rounding(0, step_for(bits))})
    assert 8 * kept["stream"].numel() / 200_000 == pytest.approx(bits, abs=0.1)


def test_gradients_pass_as_if_nothing_had_been_rounded():
    made = {name: value.requires_grad_() for name, value in weights().items()}
    direction = {name: torch.randn_like(value) for name, value in made.items()}
    total = sum((value * direction[name]).sum() for name, value in rounded(made, PLAN).items())
    for found, wanted in zip(torch.autograd.grad(total, list(made.values())), direction.values(), strict=True):
        assert torch.equal(found, wanted)


def test_a_row_of_zeros_stays_one():
    made = {"rows": torch.zeros(3, 5)}
    assert not unpack(stored(pack(made, PLAN)), "net.", shapes(made), PLAN)["rows"].any()


DAMAGE = [
    (name, damage)
    for name in ("stream", "first", "sizes", "weights", "scales", "rest")
    for damage in ("cut", "longer", "other", "zeros", "dtype")
    if name in ("stream", "sizes", "weights") or damage not in ("other", "zeros")  # which only a checksum can tell
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_damage_has_a_name(name, damage):
    made = weights()
    kept = pack(made, PLAN)
    value = kept[name]
    kept[name] = {
        "cut": lambda: value[:-1],
        "longer": lambda: torch.cat([value, value[:1]]),
        "other": lambda: value.view(torch.uint8).flip(0).contiguous().view(value.dtype),
        "zeros": lambda: torch.zeros_like(value),
        "dtype": lambda: value.to(torch.int64),
    }[damage]()
    with pytest.raises(KrnetError):
        unpack(stored(kept), "net.", shapes(made), PLAN)


# ---------------------------------------------------------------- recordings


@pytest.fixture(scope="module")
def maps():
    return relu_maps(96, (4, 6, 6))


@pytest.mark.parametrize("code", [0, 6])
def test_a_recording_of_few_bits_replays_what_was_measured_when_it_was_made(maps, tmp_path, code):
    features, labels = maps
    made = api.record(
        features, labels, out=tmp_path / "a.krn", iterations=40, bits=3.5, code=code, device="cpu", **SMALL
    )
    again = krnet.open(tmp_path / "a.krn")
    ids = torch.arange(len(features))
    assert torch.equal(made.replay(ids), again.replay(ids))
    assert api.verify(tmp_path / "a.krn", features)["r2"] == pytest.approx(made.info()["r2"], abs=1e-6)
    torch.testing.assert_close(again[5], again.replay(ids)[5], rtol=1e-4, atol=1e-4)


LARGER = {"recorder": "paper", "iterations": 150, "device": "cpu", "c0": 16, "d0": 64, "c1": 16, "group_size": 32}


@pytest.fixture(scope="module")
def larger_maps():
    return relu_maps(96, (8, 6, 6))


@pytest.fixture(scope="module")
def whole(larger_maps, tmp_path_factory):
    """A recording in floats: open it anew before changing its network."""
    return api.record(*larger_maps, out=tmp_path_factory.mktemp("whole") / "a.krn", **LARGER)


@pytest.mark.slow
def test_few_bits_make_a_far_smaller_file_and_hardly_a_worse_one(larger_maps, whole):
    few = api.record(*larger_maps, bits=4.0, **LARGER)
    assert few.nbytes < whole.nbytes / 5
    assert few.info()["r2"] > whole.info()["r2"] - 0.05


@pytest.mark.slow
def test_training_for_few_bits_beats_rounding_afterwards(larger_maps, whole):
    trained, later = api.record(*larger_maps, bits=2.0, **LARGER), krnet.open(whole.path)
    net = later.load().net.net
    config = from_dict(NetworkConfig, {k: v for k, v in later.settings.items() if k != "groups"} | {"bits": 2.0})
    net.load_state_dict(rounded(dict(net.named_parameters()), rounding(net, config)))
    of_trained, of_later = (
        (replays.replay(torch.arange(96)) - larger_maps[0]).square().mean() for replays in (trained, later)
    )
    assert of_trained < 0.7 * of_later


@pytest.mark.parametrize("code", [0, 6])
def test_a_fit_starts_from_an_earlier_recording_of_few_bits(maps, tmp_path, code):
    features, labels = maps
    kept = {"bits": 4.0, "code": code, "device": "cpu", **SMALL}
    api.record(features[:80], labels[:80], out=tmp_path / "a.krn", iterations=60, **kept)
    earlier = krnet.open(tmp_path / "a.krn").replay(torch.arange(80))
    later = api.record(features, labels, start=tmp_path / "a.krn", iterations=1, device="cpu", lr=0.0, muon_lr=0.0)
    # Groups hold the samples of a class in order: the first of each are where they were.
    assert (later.replay(torch.arange(80)) - earlier).square().mean() < 0.02 * earlier.var()


@pytest.mark.parametrize("settings", [{"bits": 0.5}, {"bits": 9}, {"code": -1}, {"code": 1.5}, {"code_bits": 0}])
def test_settings_that_make_no_sense_are_refused(maps, settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        api.record(*maps, iterations=1, device="cpu", **SMALL, **settings)
