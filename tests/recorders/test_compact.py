"""The compact KRNet: under a budget, better than principal components, and read back as it was trained."""

import math
import signal
from contextlib import contextmanager

import pytest
import torch

import krnet
from krnet import api
from krnet.errors import BudgetError, InputError, ResumeError, SettingError
from krnet.recorders.compact import axes_fit
from krnet.recorders.compact import values_fit as _compact_values
from krnet.recorders.compact.axes_fit import CompactFit
from krnet.recorders.compact.budget import LONG_FIT_LIMITS, affordable_widths, is_long
from krnet.recorders.compact.codes import laplace_bits
from krnet.recorders.compact.network import CompactConfig, CompactNet
from krnet.recorders.compact.recorder import CompactRecorder
from krnet.recorders.compact.values_fit import ValuesFit
from krnet.train.config import FitConfig
from maps import relu_maps, signed_maps
from watchers import of_fits

BUDGET = 16_000
SHAPES = [(8, 6, 6), (12,), (), (3, 7)]


@pytest.fixture(scope="module")
def maps():
    return relu_maps(600, (8, 6, 6))


@pytest.fixture(scope="module")
def few_maps():
    """Where a fit need not be good: a sixth of the values."""
    return relu_maps(300, (6, 4, 4))


def made(maps, path, **options):
    return api.record(*maps, out=path, **{"iterations": 60, "budget": BUDGET, "device": "cpu"} | options)


def test_a_budget_is_kept_and_used_and_its_replays_beat_principal_components(maps, tmp_path):
    found = made(maps, tmp_path / "a.krn", iterations=150)
    rival = made(maps, tmp_path / "b.krn", iterations=None, recorder="pca")
    for path in (tmp_path / "a.krn", tmp_path / "b.krn"):
        assert 0.8 * BUDGET <= path.stat().st_size <= BUDGET
    assert found.settings["network"] == "compact"
    assert 1 - found.info()["r2"] < 0.99 * (1 - rival.info()["r2"])


def few(name):
    torch.manual_seed(0)
    return relu_maps(120, (8, 8, 8))[0] if name == "maps" else torch.randn(100, 64).mul(0.5).exp()


@pytest.mark.parametrize(("name", "share"), [("maps", 10), ("vectors", 3)])
def test_few_samples_go_without_axes_and_are_kept_about_as_well_as_rounded_values(tmp_path, name, share):
    features = few(name)
    budget = 4 * features.numel() // share
    found = made([features], tmp_path / "a.krn", budget=budget)
    rival = made([features], tmp_path / "b.krn", budget=budget, iterations=None, recorder="quantized")
    assert found.settings["components"] == 0 and 0.9 * budget <= found.nbytes <= budget
    assert 1 - found.info()["r2"] < 1.7 * (1 - rival.info()["r2"])
    assert krnet.verify(tmp_path / "a.krn", features)["r2"] == pytest.approx(found.info()["r2"], abs=1e-6)


def test_a_network_repairs_rounded_values(tmp_path):
    features, options = few("maps"), {"components": 0, "step": 0.3, "budget": None}
    plain, repaired = (made([features], tmp_path / f"{c1}.krn", c1=c1, **options).info()["r2"] for c1 in (0, 8))
    assert 1 - repaired < 0.9 * (1 - plain)


def test_what_is_read_back_is_what_was_measured(maps, tmp_path):
    found = made(maps, tmp_path / "a.krn")
    again = krnet.open(tmp_path / "a.krn")
    ids = torch.randperm(600)
    assert torch.equal(found.replay(ids), again.replay(ids))
    torch.testing.assert_close(again[7], again.replay(torch.arange(600))[7], rtol=1e-4, atol=1e-4)
    assert api.verify(tmp_path / "a.krn", maps[0])["r2"] == pytest.approx(found.info()["r2"], abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_features_of_any_shape_are_recorded(tmp_path, shape):
    torch.manual_seed(0)
    features = torch.randn(200, *shape)
    found = api.record(features, out=tmp_path / "a.krn", recorder="krnet", step=0.05, iterations=20, device="cpu")
    assert found.replay(torch.arange(200)).shape == features.shape
    assert found.info()["r2"] > 0.5


def test_signed_maps_are_recorded_as_well(tmp_path):
    features, _ = signed_maps(300)
    found = api.record(features, out=tmp_path / "a.krn", budget=30_000, iterations=60, device="cpu")
    assert found.info()["r2"] > 0.5


def test_training_raises_what_principal_components_start_from(maps, tmp_path):
    before, after = (
        made(maps, tmp_path / f"{n}.krn", step=0.3, budget=None, iterations=n).info()["r2"] for n in (1, 20)
    )
    assert 1 - after < 0.95 * (1 - before)


def test_no_variable_of_that_mean_distance_from_zero_takes_more_bits():
    torch.manual_seed(0)
    for spread in (0.05, 0.3, 1.0, 5.0):
        laplace = torch.distributions.Laplace(0.0, spread).sample((400_000,))
        normal = torch.randn(400_000) * spread * math.sqrt(math.pi / 2)
        found = []
        for sample in (laplace, normal):
            counts = sample.round().unique(return_counts=True)[1].double()
            share = counts / counts.sum()
            found.append(-(share * share.log2()).sum().item())
        wanted = laplace_bits(torch.tensor(spread)).item()
        assert found[0] == pytest.approx(wanted, rel=0.02, abs=1e-3) and found[1] <= wanted * 1.01


@pytest.mark.parametrize(
    ("fit", "options"),
    [
        (CompactFit, {"components": 20, "budget": 9000}),
        (_compact_values.ValuesFit, {"components": 0, "c1": 8, "budget": 15_000}),
    ],
    ids=["axes", "values"],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_file(few_maps, tmp_path, fit, options):
    options = {"iterations": 30, "checkpoint_s": 0.0, **options}
    made(few_maps, tmp_path / "whole.krn", **options)
    with stop_at_step(fit, 20), pytest.raises(KeyboardInterrupt):
        made(few_maps, tmp_path / "half.krn", **options)
    assert (tmp_path / "half.krn.ckpt").exists()
    seen = []
    watch = of_fits(lambda progress: seen.append(progress.done))
    made(few_maps, tmp_path / "half.krn", resume=True, watch=watch, **options)
    whole, half = (krnet.open(tmp_path / f"{name}.krn").replay(torch.arange(300)) for name in ("whole", "half"))
    assert torch.equal(whole, half) and seen[0] >= 20


def test_a_stopped_fit_of_another_budget_is_refused_by_that_and_not_by_what_follows_from_it(few_maps, tmp_path):
    options = {"iterations": 4, "checkpoint_s": 0.0}
    with stop_at_step(_compact_values.ValuesFit, 3), pytest.raises(KeyboardInterrupt):
        made(few_maps, tmp_path / "a.krn", **options)
    with pytest.raises(ResumeError, match=f"made with budget {BUDGET}; this run has {BUDGET + 2000}"):
        made(few_maps, tmp_path / "a.krn", resume=True, **options, budget=BUDGET + 2000)


@contextmanager
def stop_at_step(fit, number):
    """Ctrl-C at the n-th step of all fits of a kind."""
    count, right = [0], fit.step

    def stop(self, iteration, progress):
        count[0] += 1
        if count[0] == number:
            raise KeyboardInterrupt
        return right(self, iteration, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "step", stop)
        yield


def smallest(maps, path, **options):
    return made(maps, path, **{"iterations": 20, "budget": None, "target_r2": 0.9} | options)


def test_a_target_gives_the_smallest_file_that_reaches_it_tells_each_fit_and_learns_the_features_once(
    few_maps, tmp_path, monkeypatch
):
    told, learned, right = [], [], axes_fit.principal_axes
    monkeypatch.setattr(axes_fit, "principal_axes", lambda *given: learned.append(1) or right(*given))
    info = smallest(few_maps, tmp_path / "a.krn", watch=of_fits(lambda progress: told.append(progress.name))).info()
    assert info["r2"] >= 0.9 and info["fit"]["target_r2"] == 0.9
    fits = list(dict.fromkeys(told))
    assert 1 <= len(fits) <= 5 and fits[0].startswith("fit 1: ")
    assert all(label.startswith(f"fit {n}: ") and " after R2 0." in label for n, label in enumerate(fits[1:], 2))
    assert len(learned) == 1
    less = round(0.94 * info["settings"]["most_bytes"])
    assert made(few_maps, tmp_path / "b.krn", iterations=20, budget=less).info()["r2"] < 0.9


@pytest.mark.slow
def test_a_search_that_was_stopped_leaves_nothing_and_starts_anew(few_maps, tmp_path):
    def stop_in_the_second_fit(progress):
        if progress.name.startswith("fit 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smallest(few_maps, tmp_path / "a.krn", checkpoint_s=0.0, watch=of_fits(stop_in_the_second_fit))
    assert list(tmp_path.iterdir()) == []
    again = smallest(few_maps, tmp_path / "a.krn", checkpoint_s=0.0, resume=True)
    assert again.info()["r2"] >= 0.9 and [path.name for path in tmp_path.iterdir()] == ["a.krn"]


def test_a_fit_stops_at_an_r2_and_keeps_its_budget(few_maps, tmp_path):
    budget = 60_000
    found = made(few_maps, tmp_path / "a.krn", budget=budget, stop_at_r2=0.5, iterations=200, c1=8)
    info = found.info()
    assert (info["stopped_by"], info["iterations"]) == ("target", 50)
    assert info["r2"] >= 0.5 and found.nbytes <= budget
    assert (info["fit"]["stop_at_r2"], info["fit"]["target_r2"]) == (0.5, None)


def test_the_papers_network_of_a_fixed_size_is_fitted_once_for_a_target(few_maps, tmp_path):
    fits = set()
    info = smallest(
        few_maps, tmp_path / "a.krn", preset="cifar100", d0=32, c0=8, group_size=32, target_r2=-10.0, iterations=10,
        watch=of_fits(lambda progress: fits.add(progress.name)),
    ).info()  # fmt: skip
    assert len(fits) == 1 and info["recorder"] == "paper"


def test_more_bytes_than_it_can_use_give_its_finest_step(few_maps, tmp_path):
    found = made(few_maps, tmp_path / "a.krn", budget="100MB", iterations=5)
    assert found.info()["r2"] > 0.999 and found.nbytes < few_maps[0].nbytes


def test_a_target_out_of_reach_gives_the_best_there_is(few_maps, tmp_path):
    info = smallest(few_maps, tmp_path / "a.krn", components=2, target_r2=0.99, iterations=5).info()
    assert info["r2"] < 0.99 and info["settings"]["components"] == 2


def test_through_a_head_it_keeps_what_the_head_sees(maps, tmp_path):
    features = maps[0]
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(features.shape[1:]), 4))

    def error(**options):
        replayed = made(maps, tmp_path / "a.krn", iterations=100, **options).replay(torch.arange(600))
        with torch.no_grad():
            return (head(replayed) - head(features)).square().mean()

    assert error(head=head, gamma=0.03) < 0.8 * error()


SLOW = pytest.param({"c1": 8, "room": 90}, marks=pytest.mark.slow)


@pytest.mark.parametrize("given", [{}, {"components": 3}, SLOW], ids=str)
def test_a_budget_too_small_for_any_code_is_refused_before_the_fit_with_one_that_works(given, tmp_path, monkeypatch):
    features = relu_maps(60, (4, 5, 3))[0]
    with monkeypatch.context() as patch:
        patch.setattr(CompactRecorder, "fit", lambda *given: pytest.fail("fitted"))
        with pytest.raises(BudgetError, match=r"needs a budget of more than \d+ bytes .*Nothing was fitted") as caught:
            made((features,), tmp_path / "a.krn", budget=1000, **given)
    assert not (tmp_path / "a.krn").exists()
    needed = caught.value.needed
    assert made((features,), tmp_path / "a.krn", budget=needed, iterations=5, **given).nbytes <= needed
    smallest = made((features,), tmp_path / "b.krn", budget=1000, iterations=5, over_budget=True, **given).nbytes
    assert 0.6 * needed < smallest < needed


@pytest.mark.parametrize("wish", [{"budget": 9000}, {"budget": None, "target_r2": 0.5}], ids=str)
def test_the_choice_of_settings_is_announced_before_the_fit(wish, tmp_path):
    seen = []
    made((relu_maps(60, (4, 5, 3))[0],), tmp_path / "a.krn", iterations=2, watch=seen.append, **wish)
    names = [progress.name for progress in seen]
    first_fit = next(n for n, name in enumerate(names) if name.startswith("fit"))
    assert any(name.startswith("choosing settings for the") for name in names[:first_fit])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"budget": 900}, BudgetError, "the budget is 900"),
        ({"network": "small"}, SettingError, "unknown setting 'network'"),
        ({"network": "compact"}, SettingError, "unknown setting 'network'"),  # the file has it; nobody sets it
        ({"components": 10_000, "budget": "1MB"}, SettingError, "components is 10000"),
        ({"budget": None, "components": 10_000}, SettingError, "components is 10000"),
        ({"budget": None, "components": 10_000, "step": 0.3}, SettingError, "components is 10000"),
        ({"budget": None, "step": 0.0}, SettingError, "step is 0"),
        (
            {"budget": None, "recorder": "krnet", "preset": "cifar100"},
            InputError,
            "preset is given, and .* krnet has no",
        ),
        ({"c0": 8}, SettingError, "c0 is given, a setting of recorder autoencoder or paper and not of krnet"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(few_maps, tmp_path, options, kind, message):
    with pytest.raises(kind, match=message):
        made(few_maps, tmp_path / "a.krn", iterations=2, **options)
    assert not (tmp_path / "a.krn").exists()


def test_few_samples_of_large_maps_are_recorded(tmp_path):
    features = relu_maps(24, (8, 33, 33))  # more values than principal axes are found from exactly
    for options in ({"budget": 60_000}, {"budget": None}, {"budget": None, "step": 0.25}):
        found = made(features, tmp_path / "a.krn", iterations=3, **options)
        assert found.info()["r2"] > 0 and krnet.verify(tmp_path / "a.krn")["ok"]
        (tmp_path / "a.krn").unlink()


def test_a_network_adds_nothing_before_it_is_trained():
    net = CompactNet((4, 5, 5), CompactConfig(step=0.1, components=3, c1=8))
    with torch.no_grad():
        net.axes.uniform_(0, 0.1)
        codes = torch.rand(6, 3)
        torch.testing.assert_close(net(codes).flatten(1), codes @ net.axes)


def test_the_papers_network_under_a_budget_keeps_settings_that_are_given_and_takes_few_bits(maps, tmp_path):
    found = made(maps, tmp_path / "a.krn", recorder="paper", c0=8, budget=40_000, iterations=3)
    assert found.settings["c0"] == 8 and found.settings["bits"] == 4.0 and found.nbytes <= 40_000


@pytest.mark.parametrize(("channels", "budget", "width"), [(64, 1.3, 64), (64, 3.3, 96), (64, 6.5, 128), (16, 6.5, 32)])
def test_a_network_is_as_wide_as_was_found_best(channels, budget, width):
    def network(c1):
        return CompactConfig(step=1.0, components=1, c1=c1)

    assert affordable_widths((channels, 8, 8), int(budget * 1e6), LONG_FIT_LIMITS, network)[0] == width


def test_a_fit_is_long_by_default_on_a_gpu_and_short_by_the_clock():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert is_long(FitConfig(), gpu) and is_long(FitConfig(iterations=6000), cpu)
    assert not is_long(FitConfig(), cpu)
    assert not is_long(FitConfig(iterations=200), gpu) and not is_long(FitConfig(time_budget=60), gpu)


@pytest.mark.parametrize("at", [10, 20])
@pytest.mark.parametrize("components", [0, 3])
def test_a_fit_that_is_stopped_at_any_iteration_resumes_to_the_same_file(tmp_path, at, components):
    """Every ten iterations the file is measured, before the step that the learning rate belongs to."""
    features = torch.rand(60, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    options = {"recorder": "krnet", "iterations": 40, "components": components, "budget": 7_500}

    def press(progress):
        if progress.unit == "iterations" and progress.done == at:
            signal.raise_signal(signal.SIGINT)

    straight = krnet.record(features, out=tmp_path / "a.krn", **options)
    with pytest.raises(KeyboardInterrupt):
        krnet.record(features, out=tmp_path / "b.krn", watch=press, **options)
    resumed = krnet.record(features, out=tmp_path / "b.krn", resume=True, **options)
    assert resumed.nbytes == straight.nbytes and torch.equal(resumed[:], straight[:])


@pytest.mark.parametrize("fit", [CompactFit, ValuesFit])
def test_codes_and_axes_that_grow_beyond_the_tables_of_the_coder_take_a_coarser_step(fit, monkeypatch):
    """With room for the finest step the largest code has the largest symbol, and training may move it further."""
    step = fit.step

    def growing(self, iteration, progress):
        with torch.no_grad():
            if iteration == 5:
                self.codes.mul_(1.2)
                if fit is CompactFit:
                    self.axes.mul_(1.2)
        return step(self, iteration, progress)

    monkeypatch.setattr(fit, "step", growing)
    features = torch.randn(50, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    found = krnet.record(features, budget=100_000, iterations=20, components=0 if fit is ValuesFit else 5, device="cpu")
    assert found.info()["iterations"] == 20 and len(found) == 50
