"""A run: it reads as its run.json, and its network answers as it did when the run was scored."""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import krnet
from golden import small
from krnet.data.spec import DataSpec
from krnet.errors import DataError, RecordingError, RunError, SettingError
from krnet.learners.base import learner_names
from krnet.nn.backbones import BACKBONES
from learning_tools import settings_for, small_digits, small_tasks

GOLDEN = Path(__file__).parent / "golden"
METHODS = learner_names()
QUICK = {"base_epochs": 2, "epochs": 1, "gan_epochs": 1, "recorder_iterations": 5}


@pytest.fixture(scope="module")
def digits() -> krnet.data.DataSet:
    return small_digits()


def quick(method: str) -> dict[str, object]:
    known = krnet.settings(method)
    return settings_for(method) | {name: value for name, value in QUICK.items() if name in known}


@pytest.fixture(scope="module")
def run_of(digits, tmp_path_factory) -> Callable[[str], krnet.Run]:
    """A run of each method, made once."""
    folder, runs = tmp_path_factory.mktemp("runs"), {}

    def get(method: str) -> krnet.Run:
        if method not in runs:
            out = folder / method
            runs[method] = krnet.learn(method, digits, small_tasks(), out=out, settings=quick(method), device="cpu")
        return runs[method]

    return get


@pytest.fixture
def own(run_of, tmp_path) -> Path:
    """A copy of a finished run's folder."""
    return Path(shutil.copytree(run_of("finetune").folder, tmp_path / "own"))


# ------------------------------------------------------------------ results


def test_a_run_reads_as_the_dict_of_its_run_json(run_of):
    run = run_of("icarl")
    written = json.loads((run.folder / "run.json").read_text())
    assert isinstance(run, dict) and run == written and {**run} == written
    assert json.loads(json.dumps(run)) == written
    assert run.accuracy == written["accuracy"] and len(run.accuracy) == 3
    assert run.storage_bytes == written["storage_bytes"]["total"] > 0


def test_a_run_shows_its_method_and_its_results_in_one_line(run_of):
    run = run_of("icarl")
    line, table = repr(run), run._repr_html_()
    assert "\n" not in line and len(line) < 300
    for part in ("icarl on digits8", "8 classes in 3 tasks", f"last {100 * run['last']:.1f} %", str(run.folder)):
        assert part in line
    assert table.count("<td>") == 3 and f"<td>{100 * run.accuracy[0]:.1f}</td>" in table


def test_plot_draws_the_accuracy_after_each_task(run_of, tmp_path):
    pytest.importorskip("matplotlib")
    run = run_of("finetune")
    figure = run.plot(tmp_path / "run.png")
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [4, 6, 8]
    assert list(line.get_ydata()) == [100 * value for value in run.accuracy]
    assert (tmp_path / "run.png").read_bytes()[:4] == figure._repr_png_()[:4] == b"\x89PNG"


def test_plot_leaves_out_tasks_without_an_accuracy(digits):
    pytest.importorskip("matplotlib")
    run = krnet.learn("joint", digits, small_tasks(), settings={**quick("joint"), "only_last": True}, device="cpu")
    assert run.accuracy[1] is None and "average" not in repr(run) and "–" in run._repr_html_()
    assert list(run.plot().axes[0].lines[0].get_xdata()) == [4, 8]
    assert right(run, digits) == run["last"]


# ------------------------------------------------------------------ the network


def right(run: krnet.Run, data: krnet.data.DataSet) -> float:
    """The share of right answers on the test images."""
    return int((run.predict(data.test.images) == data.test.labels).sum()) / data.test.num_samples


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_run_answers_as_it_did_when_it_was_scored(run_of, digits, method):
    run = run_of(method)
    loaded = krnet.load_run(run.folder, device="cpu")
    assert loaded == run
    assert right(loaded, digits) == run.accuracy[-1]
    assert torch.equal(run.predict(digits.test.images), loaded.predict(digits.test.images))


@pytest.mark.parametrize("method", METHODS)
def test_the_model_gives_logits_by_label(run_of, digits, method):
    run = krnet.load_run(run_of(method).folder, device="cpu")
    with torch.no_grad():
        logits = run.model(digits.test.images)
    assert logits.shape == (64, 8) and not run.model.training
    right_share = int((logits.argmax(1) == digits.test.labels).sum()) / 64
    assert right_share == run.get("rows", {"cnn": run})["cnn"]["last"]


def test_a_new_process_needs_nothing_but_the_folder_and_the_images(run_of, digits, tmp_path):
    run = run_of("lucir")
    np.save(tmp_path / "images.npy", digits.test.images.numpy())
    code = (
        f"import krnet, numpy, json; run = krnet.load_run({str(run.folder)!r}, device='cpu'); "
        f"print(json.dumps(run.predict(numpy.load('images.npy')).tolist()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == run.predict(digits.test.images).tolist()


def test_floats_are_taken_as_normalised_images(run_of, digits):
    run = run_of("finetune")
    mean, std = (torch.tensor(values)[:, None, None] for values in (digits.mean, digits.std))
    normalised = (digits.test.images.float() / 255 - mean) / std
    assert torch.equal(run.model(normalised), run.model(digits.test.images))


def test_training_the_model_does_not_change_what_predict_answers(run_of, digits):
    run = krnet.load_run(run_of("finetune").folder, device="cpu")
    before = run.predict(digits.test.images)
    assert all(value.requires_grad for value in run.model.parameters())
    with torch.no_grad():
        for value in run.model.parameters():
            value.zero_()
    assert torch.equal(run.predict(digits.test.images), before)


def test_images_of_any_layout_are_predicted_alike(run_of, digits):
    run, images = run_of("finetune"), digits.test.images
    expected = run.predict(images)
    assert expected.dtype == torch.int64 and expected.shape == (64,)
    for same in (images.numpy(), images.permute(0, 2, 3, 1), images[:, 0], images.permute(0, 2, 3, 1).numpy()):
        assert torch.equal(run.predict(same), expected)
    assert torch.equal(run.predict(digits.test), expected)
    fixed = images.numpy().copy()
    fixed.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run.predict(fixed), expected)
    assert run.predict(images[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: images.float(), "images are torch.float32; expected uint8"),
        (lambda images: images[0, 0], r"shape \(8, 8\).* Give a single image as images\[None\]"),
        (lambda images: images[..., :7], r"or \(N, 8, 8, 1\), or \(N, 8, 8\) as they are grey"),
        (lambda images: images.float().numpy(), "images are float32; expected uint8"),
        (lambda images: None, "images are of type NoneType; expected an array"),
        (lambda images: "x.npy", "images are of type str; expected an array"),
        (lambda images: small_digits(), "images are of type DataSet; .* part of a data set"),
        (lambda images: [images[0].numpy(), images[0, :, 1:].numpy()], "images are no array"),
        (lambda images: images[..., :7], r"shape \(64, 1, 8, 7\); expected \(N, 1, 8, 8\)"),
    ],
)
def test_images_that_were_not_learned_are_refused(run_of, digits, change, message):
    with pytest.raises(DataError, match=message):
        run_of("finetune").predict(change(digits.test.images))


def test_loading_a_run_leaves_the_random_numbers_of_the_caller_alone(run_of, digits):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    krnet.load_run(run_of("icarl").folder, device="cpu").predict(digits.test.images[:2])
    assert torch.equal(torch.rand(3), expected)


def test_images_with_a_crop_and_three_channels_are_seen_as_in_training(tmp_path):
    images = small.pictures(24, size=12)
    labels = torch.arange(24) % 4
    data = krnet.data.from_arrays(images, labels, images, labels, crop=8, flip=True, class_names=list("abcd"))
    split = krnet.protocol.split([2, 0, 3, 1], num_classes=4, base_classes=2, tasks=1)
    settings = {"backbone": "resnet8", "base_epochs": 2, "epochs": 2, "batch_size": 8, "exemplars_per_class": 3}
    run = krnet.learn("icarl", data, split, out=tmp_path / "run", settings=settings, device="cpu")
    loaded = krnet.load_run(tmp_path / "run", device="cpu")
    assert right(loaded, data) == run["last"]
    assert loaded.class_names == ("a", "b", "c", "d")
    assert run.model(images).shape == (24, 4)


def test_a_data_set_without_its_images_has_the_same_form(digits):
    spec = DataSpec.from_json(json.loads(json.dumps(DataSpec.of(digits).to_json())))
    assert spec == DataSpec.of(digits)
    blank = spec.blank(torch.device("cpu"))
    assert blank.train.labels.bincount().tolist() == digits.train.labels.bincount().tolist()
    for name in ("name", "class_names", "image_shape", "input_shape", "mean", "std", "pad", "flip", "crop", "shift"):
        assert getattr(blank, name) == getattr(digits, name)
    assert blank.train.images.untyped_storage().nbytes() == 64


def make_net(in_channels: int, width: int = 0) -> torch.nn.Module:
    return BACKBONES["resnet8"](in_channels=in_channels)


def test_a_network_made_by_a_function_needs_that_function(digits, tmp_path):
    settings = {**quick("finetune"), "backbone": partial(make_net, width=3)}
    run = krnet.learn("finetune", digits, small_tasks(), out=tmp_path / "run", settings=settings, device="cpu")
    assert right(run, digits) == run["last"]
    loaded = krnet.load_run(tmp_path / "run", backbone=partial(make_net, width=3), device="cpu")
    assert right(loaded, digits) == run["last"]
    with pytest.raises(RunError, match=r"made by the function .*make_net\(width=3\).*backbone="):
        krnet.load_run(tmp_path / "run").predict(digits.test.images)
    with pytest.raises(RunError, match="is given"):
        _ = krnet.load_run(tmp_path / "run", backbone=make_net).model


# ------------------------------------------------------------------ folders


@pytest.mark.parametrize("name", ["kril-compact", "kril-paper"])
def test_a_run_of_an_earlier_version_is_loaded_and_answers_if_given_its_data(name):
    manifest = json.loads((GOLDEN / "manifest.json").read_text())["runs"][name]
    run = krnet.load_run(GOLDEN / name, device="cpu")
    assert run["accuracy_matrix"] == manifest["accuracy_matrix"] and "kril" in repr(run)
    data = small.digits(*manifest["per_class"])
    with pytest.raises(RunError, match=r"does not say how images are normalised.*data="):
        run.predict(data.test.images)
    assert right(krnet.load_run(GOLDEN / name, data=data, device="cpu"), data) == run["last"]
    with pytest.raises(RunError, match="learned from digits8"):
        krnet.load_run(GOLDEN / name, data=small_digits(5, 5))


def test_resuming_a_finished_run_returns_a_run_with_its_network(own, digits):
    run = krnet.learn("finetune", digits, small_tasks(), out=own, settings=quick("finetune"), device="cpu", resume=True)
    assert isinstance(run, krnet.Run) and right(run, digits) == run["last"]


def test_a_folder_that_holds_a_run_names_both_ways_to_go_on(own, digits):
    with pytest.raises(SettingError, match=r"Give --resume \(in Python, resume=True\)"):
        krnet.learn("finetune", digits, small_tasks(), out=own, settings=quick("finetune"), device="cpu")


def test_an_unfinished_run_is_refused_with_the_tasks_that_are_done(own, monkeypatch):
    (own / "run.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("krnet.run.archive.open_archive", lambda path: SimpleNamespace(metadata={"task_seconds": [1.0]}))
        with pytest.raises(RunError, match="unfinished: 1 task is done"):
            krnet.load_run(own)
    with pytest.raises(RunError, match=r"unfinished: 3 tasks are done.*resume=True"):
        krnet.load_run(own)
    (own / "state.krn").unlink()
    with pytest.raises(RunError, match="unfinished: 0 tasks are done"):
        krnet.load_run(own)


def test_a_folder_without_a_run_is_refused(own, tmp_path):
    with pytest.raises(RunError, match="no such folder"):
        krnet.load_run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"holds no run\.json"):
        krnet.load_run(tmp_path / "empty")
    with pytest.raises(RunError, match="holds the runs own; give the folder of one of them"):
        krnet.load_run(tmp_path)
    for text in ("{", "[1]", '{"method": "finetune"}'):
        (own / "run.json").write_text(text)
        with pytest.raises(RunError, match=r"run\.json: (cannot be read|lacks row)"):
            krnet.load_run(own)


def test_results_can_be_read_without_the_network(own, digits):
    (own / "state.krn").unlink()
    run = krnet.load_run(own)
    assert run.accuracy
    with pytest.raises(RunError, match=r"state\.krn: no such file"):
        run.predict(digits.test.images)


def test_a_network_of_another_run_or_a_damaged_one_is_refused(own, run_of, digits):
    shutil.copy(run_of("lucir").folder / "state.krn", own / "state.krn")
    with pytest.raises(RunError, match=r"not the network that run\.json"):
        krnet.load_run(own, device="cpu").predict(digits.test.images)
    whole = (own / "state.krn").read_bytes()
    (own / "state.krn").write_bytes(whole[:-9])
    with pytest.raises(RecordingError):
        _ = krnet.load_run(own, device="cpu").model


def test_without_out_the_folder_lives_as_long_as_the_run(digits):
    run = krnet.learn("finetune", digits, small_tasks(), settings=quick("finetune"), device="cpu")
    folder = run.folder
    assert (folder / "run.json").exists() and right(run, digits) == run["last"]
    del run
    gc.collect()
    assert not folder.exists()


def test_learn_takes_the_name_of_a_data_set_and_splits_its_classes_as_the_command_does(few_digits):
    run = krnet.learn("finetune", "digits", settings={"base_epochs": 1, "epochs": 1}, device="cpu")
    assert run["tasks"] == [5, 1, 1, 1, 1, 1] and run["order"] == "lucir1993" and run["data"] == "digits"
    with pytest.raises(SettingError, match="resume is given without out"):
        krnet.learn("finetune", "digits", device="cpu", resume=True)
    with pytest.raises(SettingError, match="did you mean 'finetune'"):
        krnet.learn("finetun", "no such data")


# ------------------------------------------------------------------ the front door


def test_dir_lists_exactly_the_public_names():
    public = [name for name in dir(krnet) if not name.startswith("__")]
    assert public == sorted(krnet.__all__)
    for name in dir(krnet):
        getattr(krnet, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = krnet.nothing


def test_version_is_that_of_the_package():
    from importlib.metadata import version

    assert krnet.__version__ == version("krnet") and "__version__" in dir(krnet)


def test_the_package_says_that_it_is_typed():
    assert (Path(krnet.__file__).parent / "py.typed").exists()


def test_lists_name_every_recorder_and_learner():
    assert {"krnet", "paper", "pca", "raw"} < set(krnet.list_recorders())
    assert krnet.list_learners() == list(METHODS)


@pytest.mark.parametrize("name", [*krnet.list_recorders(), *krnet.list_learners()])
def test_settings_have_a_default_a_help_and_a_type_and_print_as_a_list(name):
    found = krnet.settings(name)
    assert list(found) and len(found) == len(list(found))
    for setting, value in found.items():
        assert value.help and value.type and f"\n  {setting} " in str(found)
    assert re.match(rf"{name}( \(needs .*\))?\n", str(found))


def test_settings_of_a_recorder_that_trains_include_those_of_its_fit():
    assert "iterations" in krnet.settings("krnet") and "iterations" not in krnet.settings("pca")
    assert krnet.settings("kril")["recorder_settings"].default == {}


def test_unknown_names_of_settings_suggest_the_nearest():
    with pytest.raises(SettingError, match="unknown name 'pcaa'; did you mean 'pca'"):
        krnet.settings("pcaa")
    with pytest.raises(SettingError, match="name is None; expected that of a recorder or a learner"):
        krnet.settings(None)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="did you mean 'components'"):
        krnet.settings("pca")["component"]


def test_plan_is_what_the_command_prints(tmp_path):
    from typer.testing import CliRunner

    from krnet.cli.app import app

    printed = CliRunner().invoke(app, ["plan", "--shape", "8,6,6", "--class-counts", "500x4", "--json"])
    assert json.loads(printed.stdout) == krnet.plan((8, 6, 6), class_counts=np.full(4, 500))
    assert krnet.plan((8, 6, 6), 2000)["file_bytes"] == krnet.plan((8, 6, 6), class_counts=[2000])["file_bytes"]
