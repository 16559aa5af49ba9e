"""A compact KRNet that grows: what it held stays as it is, and new samples are kept about as well."""

import pytest
import torch

import krnet
from krnet.errors import BudgetError, InputError, ResumeError, SettingError
from krnet.recorders.base import get_recorder
from maps import relu_maps
from watchers import of_fits, raise_at

BUDGET, ROOM = 40_000, 900
FIRST, SECOND = 500, 700


def record(features, path, **options):
    return krnet.record(features, out=path, **{"iterations": 60, "device": "cpu"} | options)


@pytest.fixture(scope="module")
def features():
    return relu_maps(ROOM, (8, 6, 6))[0]


@pytest.fixture(scope="module")
def grown(features, tmp_path_factory):
    """Files of FIRST, SECOND and ROOM samples, each from the one before."""
    folder = tmp_path_factory.mktemp("grown")
    paths = [folder / f"{number}.krn" for number in range(3)]
    record(features[:FIRST], paths[0], budget=BUDGET, room=ROOM)
    record(features[:SECOND], paths[1], budget=BUDGET, start=paths[0])
    record(features, paths[2], budget=BUDGET, start=paths[1])
    return paths


def replays(path, last):
    return krnet.open(path).replay(torch.arange(last))


def test_old_samples_come_back_bit_for_bit(grown):
    assert torch.equal(replays(grown[0], FIRST), replays(grown[2], FIRST))
    assert torch.equal(replays(grown[1], SECOND), replays(grown[2], SECOND))


def test_new_samples_are_kept_about_as_well_as_old_ones(features, grown):
    error = (replays(grown[2], ROOM) - features).square().mean((1, 2, 3))
    assert error[FIRST:].mean() < 2 * error[:FIRST].mean()  # few samples: the axes are theirs more than others'
    assert krnet.verify(grown[2], features)["same_features"]


def test_a_budget_with_room_is_kept_when_the_file_has_grown_and_mostly_used(grown):
    sizes = [path.stat().st_size for path in grown]
    assert sizes[0] < sizes[1] < sizes[2] <= BUDGET and sizes[2] > 0.85 * BUDGET


def test_room_without_a_budget_is_for_the_default_budget_of_so_many_samples(features, tmp_path):
    record(features[:FIRST], tmp_path / "a.krn", room=ROOM, iterations=20)
    assert krnet.open(tmp_path / "a.krn").info()["fit"]["budget"] == get_recorder("krnet").default_budget(
        features.numel(), {}
    )
    with pytest.raises(InputError, match="there is no budget"):  # the step decides the size
        record(features[:FIRST], tmp_path / "b.krn", room=ROOM, step=0.5)
    with pytest.raises(InputError, match="recorder paper does not"):
        record(features[:FIRST], tmp_path / "b.krn", room=ROOM, recorder="paper", budget=BUDGET)


def test_resume_refuses_a_finished_file_of_another_budget_than_the_default(features, grown, tmp_path):
    path, some = tmp_path / "a.krn", features[:FIRST]
    made = record(some, path, iterations=2)
    assert record(some, path, resume=True).fingerprint == made.fingerprint
    with pytest.raises(ResumeError, match=f"budget of {made.info()['fit']['budget']} bytes. No budget is given now"):
        record(some, path, room=ROOM, resume=True)
    record(some, path, budget=BUDGET, iterations=2)
    with pytest.raises(ResumeError, match=f"budget of {BUDGET} bytes. No budget is given now"):
        record(some, path, resume=True)
    assert len(record(features, grown[2], start=grown[1], resume=True)) == ROOM  # what grows has no default budget


def test_without_a_budget_new_samples_take_what_they_take(features, grown, tmp_path):
    found = record(features, tmp_path / "a.krn", start=grown[0])
    assert len(found) == ROOM and found.settings["most_bytes"] is None
    assert torch.equal(replays(tmp_path / "a.krn", FIRST), replays(grown[0], FIRST))


def test_a_small_budget_is_kept_by_new_samples_alone(features, grown, tmp_path):
    budget = grown[0].stat().st_size + 3000
    record(features[:SECOND], tmp_path / "a.krn", start=grown[0], budget=budget)
    assert (tmp_path / "a.krn").stat().st_size <= budget
    assert torch.equal(replays(tmp_path / "a.krn", FIRST), replays(grown[0], FIRST))


def test_a_target_gives_new_samples_the_fewest_bytes_that_reach_it(features, grown, tmp_path):
    fits = set()
    found = record(
        features, tmp_path / "a.krn", start=grown[0], target_r2=0.9, iterations=20,
        watch=of_fits(lambda progress: fits.add(progress.name)),
    )  # fmt: skip
    assert len(fits) > 1 and found.info()["r2"] >= 0.9 and found.info()["fit"]["target_r2"] == 0.9
    assert torch.equal(replays(tmp_path / "a.krn", FIRST), replays(grown[0], FIRST))
    less = round(0.94 * found.settings["most_bytes"])
    assert record(features, tmp_path / "b.krn", start=grown[0], budget=less, iterations=20).info()["r2"] < 0.9


@pytest.mark.parametrize("c1", [0, 8])
def test_values_without_axes_grow_and_those_from_before_stay_bit_for_bit(features, tmp_path, c1):
    options = {"budget": 30_000, "components": 0, "c1": c1, "iterations": 10}
    old = record(features[:100], tmp_path / "a.krn", room=140, **options).replay(torch.arange(100))
    found = record(features[:140], tmp_path / "b.krn", start=tmp_path / "a.krn", budget=30_000)
    assert torch.equal(replays(tmp_path / "b.krn", 100), old) and found.nbytes <= 30_000
    error = (replays(tmp_path / "b.krn", 140) - features[:140]).square().mean((1, 2, 3))
    assert error[100:].median() < 2 * error[:100].median()  # a few lie outside the range of the first


def test_a_budget_without_room_for_new_samples_leaves_the_file_as_it_was(features, grown, tmp_path):
    before = grown[0].read_bytes()
    with pytest.raises(BudgetError, match="--room"):
        record(features, tmp_path / "a.krn", start=grown[0], budget=len(before) + 100, iterations=2)
    assert grown[0].read_bytes() == before and not (tmp_path / "a.krn").exists()


def test_samples_of_classes_grow_as_well(tmp_path):
    features, labels = relu_maps(300, (8, 6, 6))
    order = labels.argsort(stable=True)
    features, labels = features[order], labels[order] + 5
    krnet.record(features[:200], labels[:200], out=tmp_path / "a.krn", budget=30_000, iterations=3, device="cpu")
    found = krnet.record(features, labels, start=tmp_path / "a.krn", iterations=3, device="cpu")
    assert torch.equal(found.labels, labels)
    with pytest.raises(InputError, match="labels are not those of the first 200"):
        krnet.record(features, labels.flip(0), start=tmp_path / "a.krn", iterations=3, device="cpu")


def test_a_growth_that_was_stopped_goes_on(features, grown, tmp_path):
    stop = raise_at(20, KeyboardInterrupt())
    options = {"start": grown[0], "budget": BUDGET}
    with pytest.raises(KeyboardInterrupt):
        record(features, tmp_path / "a.krn", watch=stop, checkpoint_s=0.0, **options)
    assert not (tmp_path / "a.krn").exists()
    record(features, tmp_path / "a.krn", resume=True, **options)
    record(features, tmp_path / "b.krn", **options)
    assert torch.equal(replays(tmp_path / "a.krn", ROOM), replays(tmp_path / "b.krn", ROOM))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"recorder": "paper"}, InputError, "by krnet; .* by paper to start from"),
        ({"step": 0.5}, InputError, "has step"),
        ({"target_r2": 0.9, "budget": BUDGET}, InputError, "budget and target_r2\\) are both given"),
        ({"preset": "cifar100"}, InputError, "by krnet; .* by paper to start from"),
        ({"recorder": "krnet", "preset": "cifar100"}, InputError, "preset is given, and recorder krnet has no use"),
        ({"recorder": "pca", "iterations": None}, InputError, "by pca"),
        ({"room": ROOM}, InputError, "no budget"),
        ({"room": 0, "budget": BUDGET}, SettingError, "room"),
        ({"room": ROOM - 1, "budget": BUDGET}, InputError, f"room is {ROOM - 1}, fewer than the {ROOM} samples"),
        ({"budget": 900}, BudgetError, "the budget is 900"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(features, grown, tmp_path, options, kind, message):
    with pytest.raises(kind, match=message):
        record(features, tmp_path / "a.krn", **{"start": grown[0], "iterations": 2} | options)
    assert not (tmp_path / "a.krn").exists()


def test_features_that_the_earlier_recording_does_not_hold_are_refused(features, grown, tmp_path):
    inserted = torch.cat([features[:300], features[FIRST:], features[300:FIRST]])
    for others in (features.flip(0), inserted, features[:, torch.arange(len(features[0])).flip(0)]):
        with pytest.raises(InputError, match=r"0\.krn: holds other features than the first 500 .*in the same order"):
            record(others, tmp_path / "x.krn", start=grown[0], iterations=2)
    assert list(tmp_path.iterdir()) == []


def test_fewer_features_than_the_earlier_recording_has_are_refused(features, grown, tmp_path):
    with pytest.raises(InputError, match="holds 500 samples"):
        record(features[:400], tmp_path / "a.krn", start=grown[0])


def test_a_network_that_knows_only_its_own_samples_is_left_out_for_new_ones(tmp_path):
    """Few samples, fitted for long, and then others with their channels in another order."""
    features = relu_maps(90, (6, 8, 8))[0]
    first, others = features[:30], features[30:].flip(1)
    recording = record(first, tmp_path / "a.krn", components=0, c1=16, budget=20_000, iterations=100)
    grown = recording.append(others[:30])
    assert "refined" not in recording.settings and grown.settings["refined"] == 30
    assert torch.equal(grown[:30], recording[:])
    with_network = dict(grown.settings, refined=None)
    replayer = get_recorder("krnet").replay(grown._samples, with_network, grown, torch.device("cpu"))
    error = (grown[30:] - others[:30]).square().mean()
    assert error < 0.8 * (replayer.decode(torch.arange(30, 60)) - others[:30]).square().mean()
    again = grown.append(others[30:], out=tmp_path / "b.krn")
    assert again.settings["refined"] == 30 and torch.equal(again[:60], grown[:])
    assert krnet.verify(tmp_path / "b.krn", torch.cat([first, others]))["same_features"]


def test_a_network_that_helps_new_samples_is_kept_for_them(grown):
    assert all("refined" not in krnet.open(path).settings for path in grown)


def test_axes_of_whole_maps_are_not_chosen_for_samples_to_come_that_they_do_not_fit(tmp_path):
    """As many axes as samples leave no error of these samples, and all of the others' beside them."""
    features = torch.randn(300, 6, 5, 5, generator=torch.Generator().manual_seed(0))  # no two samples are alike
    first = record(features[:30], tmp_path / "a.krn", budget=80_000, room=300, iterations=5)
    assert first.settings["components"] == 0 or first.settings["block"] == [6, 1, 1]
    grown = first.append(features[30:])
    assert grown.nbytes <= 80_000
    assert 1 - (grown[30:] - features[30:]).square().mean() / features[30:].var() > 0.8


def test_a_growth_along_axes_stops_at_an_r2_of_the_new_samples(features, tmp_path):
    axes = {"components": 20, "c1": 8, "step": 0.1}
    first = record(features[:FIRST], tmp_path / "a.krn", **axes)
    grown = record(features[:SECOND], tmp_path / "b.krn", start=first, stop_at_r2=-5.0, iterations=200)
    assert (grown.info()["stopped_by"], grown.info()["iterations"]) == ("target", 50)


@pytest.mark.slow
def test_with_axes_too_the_network_is_left_out_where_it_makes_new_samples_worse(tmp_path):
    features = relu_maps(240, (6, 5, 5))[0]
    first = record(features[:40], tmp_path / "a.krn", components=10, c1=32, step=0.08, iterations=400)
    grown = first.append(features[40:].flip(1), iterations=20)
    assert grown.settings["refined"] == 40 and torch.equal(grown[:40], first[:])
    again = grown.append(features[40:].flip(1), iterations=20)
    # The same maps have the same codes, whenever they come.
    assert torch.equal(again[240:], grown[40:])
