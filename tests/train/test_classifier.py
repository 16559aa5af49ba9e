"""Descent does what a loop written out by hand does, bit for bit, and goes on from where it was stopped."""

from __future__ import annotations

import copy
import signal
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet import data
from krnet.errors import ResumeError
from krnet.features.sampler import BatchOrder
from krnet.io import archive
from krnet.train.classifier import Descent, Group, ImageBatches, Images, Saving, Schedule

CPU = torch.device("cpu")
SCHEDULE = Schedule(epochs=5, lr=0.2, drops=(0.5, 0.75), decay=0.1, momentum=0.9, weight_decay=0.01)


class Points:
    """Points in a plane with labels, shuffled: 30 of them in batches of 8, so 19 iterations of SCHEDULE."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(4)
        self.values = torch.randn(30, 2, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = (self.values.sum(1) > 0).long()
        self.order = BatchOrder(30, 8, seed=1)
        self.batch_size, self.num_samples = 8, 30

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        return (self.order.ids(iteration),)

    def tensors(self, ids: Tensor) -> tuple[Tensor, ...]:
        return self.values[ids], self.labels[ids]


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def descent(net: nn.Module, schedule: Schedule = SCHEDULE, batches: Points | None = None, **options) -> Descent:
    loss = options.pop("loss", lambda values, labels: F.cross_entropy(net(values), labels))
    return Descent("classifier", net, batches or Points(), loss, schedule, CPU, **options)


def trained(schedule: Schedule = SCHEDULE) -> dict[str, Tensor]:
    """What a run without interruption ends in, momenta included."""
    work = descent(network(), schedule)
    work.run(None, None)
    return {name: value.clone() for name, value in work.state().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def run_by_hand(net: nn.Module, rates: list[list[float]], update, batches: Points) -> None:
    """update(param, gradient, its state, rate) for each parameter; rates[iteration][number of the parameter]."""
    states: list[dict] = [{} for _ in net.parameters()]
    net.train()
    for iteration, row in enumerate(rates):
        values, labels = batches.tensors(*batches.inputs(iteration))
        params = list(net.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(net(values), labels), params)
        with torch.no_grad():
            for param, gradient, state, rate in zip(params, gradients, states, row, strict=True):
                update(param, gradient, state, rate)


def sgd(param: Tensor, gradient: Tensor, state: dict, rate: float, momentum=0.9, weight_decay=0.01) -> None:
    gradient = gradient.add(param, alpha=weight_decay)
    state["buffer"] = state["buffer"].mul_(momentum).add_(gradient) if "buffer" in state else gradient.clone()
    param.add_(state["buffer"], alpha=-rate)


# ------------------------------------------------------------------ the updates


def test_sgd_equals_a_loop_by_hand_bit_for_bit_with_drops_at_half_and_three_quarters():
    net, by_hand = network(), network()
    work = descent(net)
    work.run(None, None)
    # 5 epochs of 30 samples in batches of 8. Half of 19 is 9.5, three quarters 14.25.
    assert work.iterations == 19
    rates = [0.2 * 1.0 * 0.1 ** ((i >= 10) + (i >= 15)) for i in range(19)]
    run_by_hand(by_hand, [[rate] * 6 for rate in rates], sgd, Points())
    assert same(net.state_dict(), by_hand.state_dict())
    assert net[1].num_batches_tracked == 19 and not net.training


@pytest.mark.parametrize(("iterations", "drop"), [(20, 10), (19, 10)])
def test_a_drop_at_half_comes_at_the_first_iteration_past_half(iterations, drop):
    plan = replace(SCHEDULE, drops=(0.5,), decay=0.3)
    shares = [plan.share(i / iterations) for i in range(iterations)]
    assert shares == [1.0] * drop + [0.3] * (iterations - drop)


def test_groups_have_rates_and_decays_of_their_own_and_what_is_in_none_stays():
    net, by_hand = network(), network()
    start = copy.deepcopy(net[1].weight)
    groups = [
        Group(list(net[3].parameters())),
        Group(list(net[0].parameters()), lr_scale=0.25, weight_decay=0.0),
        Group([]),
    ]
    descent(net, groups=groups).run(None, None)
    rates = [0.1 ** ((i >= 10) + (i >= 15)) for i in range(19)]
    first, last = set(by_hand[0].parameters()), set(by_hand[3].parameters())

    def update(param, gradient, state, rate):
        if param in last:
            sgd(param, gradient, state, 0.2 * 1.0 * rate)
        elif param in first:
            sgd(param, gradient, state, 0.2 * 0.25 * rate, weight_decay=0.0)

    run_by_hand(by_hand, [[rate] * 6 for rate in rates], update, Points())
    assert same(net.state_dict(), by_hand.state_dict())
    assert torch.equal(net[1].weight, start)


def test_without_groups_every_parameter_that_wants_a_gradient_is_trained():
    net = network()
    net[0].requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    descent(net).run(None, None)
    moved = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert "3.weight" in moved and "1.weight" in moved and not moved & {"0.weight", "0.bias"}


def test_adam_equals_its_formula_and_torchs_own_loop_bit_for_bit():
    plan = replace(SCHEDULE, optimizer="adam", lr=0.01)
    net, by_hand, with_torch = (network().double() for _ in range(3))
    batches = Points(torch.float64)
    descent(net, plan, batches).run(None, None)
    rates = [0.01 * 1.0 * 0.1 ** ((i >= 10) + (i >= 15)) for i in range(19)]

    def adam(param, gradient, state, rate):
        gradient = gradient + 0.01 * param
        state["step"] = step = state.get("step", 0) + 1
        state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * gradient
        state["square"] = 0.999 * state.get("square", 0.0) + 0.001 * gradient**2
        mean, square = state["mean"] / (1 - 0.9**step), state["square"] / (1 - 0.999**step)
        param -= rate * mean / (square.sqrt() + 1e-8)

    run_by_hand(by_hand, [[rate] * 6 for rate in rates], adam, batches)
    for found, expected in zip(net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)

    optimizer = torch.optim.Adam(with_torch.parameters(), lr=0.01, weight_decay=0.01, foreach=True)
    for iteration, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        values, labels = batches.tensors(*batches.inputs(iteration))
        optimizer.zero_grad()
        F.cross_entropy(with_torch(values), labels).backward()
        optimizer.step()
    assert same(net.state_dict(), with_torch.state_dict())


@pytest.mark.parametrize(("epochs", "iterations"), [(1, 4), (5, 19), (8, 30)])
def test_epochs_count_samples_however_they_fall_into_batches(epochs, iterations):
    assert descent(network(), replace(SCHEDULE, epochs=epochs)).iterations == iterations


# ------------------------------------------------------------------ going on


@pytest.mark.parametrize(("optimizer", "at"), [("sgd", 9), ("adam", 12)])
def test_a_state_loaded_into_a_new_descent_goes_on_to_the_same_weights(optimizer, at):
    plan = replace(SCHEDULE, optimizer=optimizer)
    first, second = descent(network(), plan), descent(network().apply(_spoil), plan)
    first.modules.train()
    for iteration in range(at):
        first.step(iteration, iteration / 19)
    second.load_state({name: value.clone() for name, value in first.state().items()})
    second.modules.train()
    for iteration in range(at, 19):
        second.step(iteration, iteration / 19)
    assert same(second.state(), trained(plan))


def _spoil(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 7.0)


def test_a_loaded_state_is_a_copy():
    first, second = descent(network()), descent(network())
    first.step(0, 0.0)
    state = first.state()
    before = {name: value.clone() for name, value in state.items()}
    second.load_state(state)
    second.step(1, 0.1)
    assert same(state, before)


@pytest.mark.parametrize(("optimizer", "at"), [("sgd", 0), ("adam", 7), ("sgd", 18)], ids=["first", "middle", "last"])
def test_after_ctrl_c_the_checkpoint_file_leads_to_the_same_weights(tmp_path, optimizer, at):
    plan = replace(SCHEDULE, optimizer=optimizer)
    net, calls = network(), []

    def loss(values: Tensor, labels: Tensor) -> Tensor:
        calls.append(len(values))
        if len(calls) == at + 1:
            signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(net(values), labels)

    with pytest.raises(KeyboardInterrupt):
        descent(net, plan, loss=loss).run(Saving(tmp_path / "x.partial"), None)
    assert len(calls) == at + 1  # the step is finished, and no other begun
    resumed = descent(network().apply(_spoil), plan)
    resumed.run(Saving(tmp_path / "x.partial", resume=True), None)
    assert same(resumed.state(), trained(plan))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_network_laid_out_as_gpus_convolve_goes_on_with_momenta_laid_out_alike(tmp_path, device):
    where, points, stopped = torch.device(device), Points(), []
    points.order = BatchOrder(30, 8, seed=1, device=where)
    points.values, points.labels = points.values.to(where), points.labels.to(where)

    def work() -> Descent:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Unflatten(1, (2, 1, 1)), nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, 2))
        net.to(where, memory_format=torch.channels_last)
        loss = lambda values, labels: F.cross_entropy(net(values), labels)  # noqa: E731
        return Descent("classifier", net, points, loss, SCHEDULE, where)

    def stop(*told) -> None:
        stopped.append(told)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work().run(Saving(tmp_path / "x.partial"), stop)
    again, whole = work(), work()
    again.run(Saving(tmp_path / "x.partial", resume=True), None)
    whole.run(None, None)
    for name, value in whole.state().items():
        torch.testing.assert_close(again.state()[name], value, rtol=1e-3, atol=1e-3)
    conv = again.modules.get_submodule("1").weight
    assert stopped and again.optimizer.state[conv]["momentum_buffer"].stride() == conv.stride() != (18, 9, 3, 1)


def test_without_resume_a_checkpoint_is_not_looked_at(tmp_path):
    archive.write(tmp_path / "x.partial", {}, {"kind": "checkpoint", "fingerprint": "of some other run"})
    work = descent(network())
    work.run(Saving(tmp_path / "x.partial"), None)
    assert same(work.state(), trained())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.3}, "made with schedule .*lr=0.2.*; this run has .*lr=0.3"),
        ({"drops": (0.5,)}, "made with schedule"),
        ({"optimizer": "adam"}, "made with schedule"),
        ({"epochs": 6}, "made with iterations 19; this run has 22"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_schedule_is_refused(stopped, change, message):
    with pytest.raises(ResumeError, match=message):
        descent(network(), replace(SCHEDULE, **change)).run(Saving(stopped, resume=True), None)


def test_a_checkpoint_of_another_work_network_or_batch_size_is_refused(stopped):
    wider = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    larger = Points()
    larger.batch_size = 10
    other = descent(network())
    other.name = "generator"
    cases = [(descent(wider), "parameters"), (descent(network(), batches=larger), "batch_size"), (other, "name")]
    for work, what in cases:
        with pytest.raises(ResumeError, match=rf"made with ({what}|iterations) "):
            work.run(Saving(stopped, resume=True), None)


@pytest.fixture
def stopped(tmp_path):
    """The checkpoint of a run that was stopped."""
    net = network()

    def loss(values: Tensor, labels: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(net(values), labels)

    with pytest.raises(KeyboardInterrupt):
        descent(net, loss=loss).run(Saving(tmp_path / "x.partial"), None)
    return tmp_path / "x.partial"


def test_the_result_is_the_network_alone_and_another_takes_it_over():
    work = descent(network())
    work.run(None, None)
    result = work.result()
    assert {name.removeprefix("modules.") for name in result} == set(network().state_dict())
    other = descent(network().apply(_spoil).train())
    other.take({name: value.clone() for name, value in result.items()})
    assert same(other.modules.state_dict(), work.modules.state_dict())
    assert not other.modules.training


# ------------------------------------------------------------------ images


def pictures(pad: int = 2, flip: bool = True) -> data.DataSet:
    """12 images of 3 channels, 5 x 4 pixels, all of them different."""
    pixels = torch.randint(1, 256, (12, 3, 5, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = torch.arange(12) % 3
    return data.from_arrays(
        pixels, labels, pixels[:3], labels[:3], pad=pad, flip=flip, layout="NCHW",
        mean=(0.1, 0.5, 0.3), std=(0.2, 0.25, 0.5),
    )  # fmt: skip


def normalised(pixels: Tensor) -> Tensor:
    mean, std = torch.tensor([0.1, 0.5, 0.3]), torch.tensor([0.2, 0.25, 0.5])
    return ((pixels.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)).float()


def cropped(image: Tensor, dy: int, dx: int, flip: bool, pad: int = 2) -> Tensor:
    """Pixel by pixel."""
    result = torch.zeros_like(image)
    for row in range(image.shape[1]):
        for column in range(image.shape[2]):
            source_row, source = row + dy - pad, column + dx - pad
            if 0 <= source_row < image.shape[1] and 0 <= source < image.shape[2]:
                result[:, row, column] = image[:, source_row, source]
    return result.flip(-1) if flip else result


def test_taken_images_are_normalised_by_channel():
    made = pictures()
    images = Images(made, made.train.images, CPU)
    assert len(images) == 12 and images.pixels.dtype == torch.uint8
    found = images.take(torch.tensor([3, 0, 3]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, normalised(made.train.images[[3, 0, 3]]), rtol=1e-5, atol=1e-6)


def test_where_nothing_may_be_cropped_or_mirrored_draws_change_nothing():
    made = pictures(pad=0, flip=False)
    images = Images(made, made.train.images, CPU)
    batches = ImageBatches(images, made.train.labels, torch.arange(12), 5, seed=0)
    ids, *draws = batches.inputs(0)
    assert torch.equal(batches.tensors(ids, *draws)[0], images.take(ids))


def test_batches_are_crops_and_mirrorings_of_the_right_images_with_the_right_labels():
    made = pictures()
    ids = torch.tensor([1, 4, 5, 8, 10, 11])
    batches = ImageBatches(Images(made, made.train.images, CPU), made.train.labels, ids, 4, seed=3)
    assert (batches.batch_size, batches.num_samples) == (4, 6)
    seen, drawn = [], set()
    for iteration in range(30):
        chosen, draws = batches.inputs(iteration)
        found, labels = batches.tensors(chosen, draws)
        expected = [cropped(made.train.images[i], dy, dx, f) for i, (dy, dx, f) in zip(chosen, draws.tolist())]
        torch.testing.assert_close(found, normalised(torch.stack(expected)), rtol=1e-5, atol=1e-6)
        assert torch.equal(labels, made.train.labels[chosen])
        seen += chosen.tolist()
        drawn |= {tuple(draw) for draw in draws.tolist()}
    assert all(sorted(seen[i : i + 6]) == ids.tolist() for i in range(0, 120, 6))
    # Shifts of -2 to 2 pixels both ways, mirrored or not: 50 ways, and 120 draws.
    assert len(drawn) > 35 and {value for draw in drawn for value in draw[:2]} == set(range(5))


def test_of_images_with_a_crop_batches_are_random_windows_and_all_else_the_centre():
    pixels = torch.randint(1, 256, (12, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = torch.arange(12) % 3
    made = data.from_arrays(
        pixels, labels, pixels[:3], labels[:3], crop=4, flip=True, mean=(0.1, 0.5, 0.3), std=(0.2, 0.25, 0.5)
    )
    images = Images(made, made.train.images, CPU)
    middle = normalised(pixels[:, :, 2:6, 2:6])
    torch.testing.assert_close(images.take(torch.arange(12)), middle, rtol=1e-5, atol=1e-6)
    plain = ImageBatches(images, labels, torch.arange(12), 5, seed=3, augmented=False)
    (chosen,) = plain.inputs(0)
    torch.testing.assert_close(plain.tensors(chosen)[0], middle[chosen], rtol=1e-5, atol=1e-6)
    batches = ImageBatches(images, labels, torch.arange(12), 6, seed=3)
    drawn = set()
    for iteration in range(30):
        chosen, draws = batches.inputs(iteration)
        found, _ = batches.tensors(chosen, draws)
        assert found.shape == (6, *made.input_shape) == (6, 3, 4, 4) and draws.shape == (6, 3)
        for image, number, (dy, dx, flip) in zip(found, chosen, draws.tolist()):
            window = pixels[number, :, dy : dy + 4, dx : dx + 4]
            expected = normalised(window.flip(-1) if flip else window)
            torch.testing.assert_close(image, expected, rtol=1e-5, atol=1e-6)
        drawn |= {tuple(draw) for draw in draws.tolist()}
    # 5 x 5 windows, mirrored or not: 50 ways, and 180 draws.
    assert len(drawn) > 40 and {value for draw in drawn for value in draw[:2]} == set(range(5))


def test_without_augmentation_the_images_come_as_they_are():
    made = pictures()
    images = Images(made, made.train.images, CPU)
    batches = ImageBatches(images, made.train.labels, torch.arange(12), 5, seed=3, augmented=False)
    (chosen,) = batches.inputs(7)
    found, labels = batches.tensors(chosen)
    assert torch.equal(found, images.take(chosen)) and torch.equal(labels, made.train.labels[chosen])


def test_batches_follow_from_seed_and_iteration_alone():
    made = pictures()

    def batch(seed: int, before: tuple[int, ...] = ()) -> Tensor:
        batches = ImageBatches(Images(made, made.train.images, CPU), made.train.labels, torch.arange(12), 5, seed=seed)
        for iteration in before:
            batches.inputs(iteration)
        return batches.tensors(*batches.inputs(300))[0]

    assert torch.equal(batch(1), batch(1, before=(299, 0, 301)))
    assert not torch.equal(batch(1), batch(2))
