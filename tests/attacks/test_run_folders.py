"""Run folders that are not what a run wrote: any nonsense ends in a named error, and no file of another run is used."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import krnet
from krnet import protocol
from krnet.errors import InputError, RecordingError, ResumeError, RunError
from krnet.io import archive
from learning_tools import settings_for, small_digits

SPLIT = {"num_classes": 4, "sizes": [2, 2]}
OPTIONS = settings_for("kril") | {"base_epochs": 1, "epochs": 1, "recorder": "raw", "new_features": "plain"}


def learn(folder: Path, method: str = "kril", seed: int = 0, **options):
    chosen = OPTIONS if method == "kril" else settings_for(method) | {"base_epochs": 1, "epochs": 1}
    digits = small_digits(12, 4, num_classes=4)
    split = protocol.split("natural", **SPLIT)
    return krnet.learn(method, digits, split, out=folder, settings=chosen, seed=seed, device="cpu", **options)


class Stop:
    """A watcher that presses Ctrl-C when work of this name begins."""

    def __init__(self, text: str):
        self.text = text

    def __call__(self, progress):
        if self.text in progress.name:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A finished run, and two that stopped in their last task, of other seeds."""
    folder = tmp_path_factory.mktemp("runs")
    learn(folder / "finished", "finetune")
    for seed in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            learn(folder / str(seed), seed=seed, watch=Stop("task 1 of 1: F2"))
    return {path.name: path for path in folder.iterdir()}


def test_the_base_recording_of_another_run_is_refused_on_resume(runs, tmp_path):
    own = shutil.copytree(runs["0"], tmp_path / "own")
    shutil.copy(runs["1"] / "base.krn", own / "base.krn")
    with pytest.raises(ResumeError, match=r"base\.krn: is not the file that this run wrote"):
        learn(own, resume=True)
    shutil.copy(runs["0"] / "base.krn", own / "base.krn")
    assert learn(own, resume=True)["tasks"] == [2, 2]


def test_a_base_recording_that_is_missing_is_named(runs, tmp_path):
    own = shutil.copytree(runs["0"], tmp_path / "own")
    (own / "base.krn").unlink()
    with pytest.raises(ResumeError, match=r"base\.krn: no such file, and .*state\.krn needs it"):
        learn(own, resume=True)


def test_a_recording_in_the_place_of_one_that_a_kill_left_behind_is_refused(tmp_path, runs):
    """Between the recording of a task and the state after it, the note of the finished work binds the file."""
    own = shutil.copytree(runs["0"], tmp_path / "own")
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "new", watch=Stop("base task done"))
    assert (tmp_path / "new" / "task-0-1.done").exists() and not (tmp_path / "new" / "state.krn").exists()
    shutil.copy(runs["1"] / "base.krn", tmp_path / "new" / "base.krn")
    with pytest.raises(ResumeError, match="is not the file that this run wrote"):
        learn(tmp_path / "new", resume=True)
    assert own.exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=5), values, max_size=4),
    max_leaves=6,
)
FIXED = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def use(run) -> None:
    """All that a user may do with the results, without the network."""
    repr(run), run._repr_html_(), run.accuracy, run.storage_bytes


NAMES = (
    "tasks", "class_order", "settings", "accuracy", "last", "method", "storage_bytes", "row", "seed", "average",
    "validation",
)  # fmt: skip


@FIXED
@given(value=JSON, name=st.none() | st.sampled_from(NAMES))
def test_any_json_in_run_json_is_read_or_refused_by_name(runs, tmp_path, value, name):
    own = tmp_path / "own"
    if not own.exists():
        shutil.copytree(runs["finished"], own)
    good = json.loads((runs["finished"] / "run.json").read_text())
    content = value if name is None else good | {name: value}
    (own / "run.json").write_text(json.dumps(content))
    with suppress(RunError, ResumeError):
        run = krnet.load_run(own)
        use(run)
        run.predict(small_digits(2, 2, num_classes=4).test)


def test_a_row_that_the_method_does_not_have_is_named(runs, tmp_path):
    own = shutil.copytree(runs["finished"], tmp_path / "own")
    results = json.loads((own / "run.json").read_text())
    (own / "run.json").write_text(json.dumps(results | {"row": "nme"}))
    with pytest.raises(RunError, match="row is 'nme'; expected one of cnn"):
        krnet.load_run(own).predict(small_digits(2, 2, num_classes=4).test)


@FIXED
@given(value=JSON, file=st.sampled_from(["settings.json", "run.json"]),
       name=st.none() | st.sampled_from(["settings", "commits", "tasks", "accuracy", "class_order"]))  # fmt: skip
def test_any_json_in_the_files_of_a_run_is_refused_by_name_on_resume(runs, tmp_path, value, file, name):
    own = tmp_path / "own"
    if not own.exists():
        shutil.copytree(runs["finished"], own)
    for each in ("settings.json", "run.json"):
        shutil.copy(runs["finished"] / each, own / each)
    good = json.loads((own / file).read_text())
    (own / file).write_text(json.dumps(value if name is None else good | {name: value}))
    with suppress(RunError, ResumeError):
        use(learn(own, "finetune", resume=True))


@pytest.mark.parametrize("text", ["[]", "[1, 2]", "null", "3", '"x"', "", "{", "[" * 100_000, "\ud800"], ids=ascii)
@pytest.mark.parametrize("file", ["settings.json", "run.json"])
def test_settings_that_are_no_object_are_refused(runs, tmp_path, file, text):
    own = shutil.copytree(runs["finished"], tmp_path / "own")
    (own / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ResumeError, match=f"{file}: cannot be read"):
        learn(own, "finetune", resume=True)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"correct": [], "task_seconds": 3, "storage": None},
        {"correct": {"cnn": [[1]]}, "task_seconds": [1.0], "storage": [7]},
        {"correct": {"cnn": [[1]]}, "task_seconds": ["x"], "storage": [{}]},
        {"correct": {"cnn": [[1]] * 9}, "task_seconds": [1.0] * 9, "storage": [{}] * 9},
        {"correct": {"cnn": ["x"]}, "task_seconds": [1.0], "storage": [{}]},
    ],
    ids=repr,
)
def test_a_foreign_state_is_refused_by_name(runs, tmp_path, metadata):
    own = shutil.copytree(runs["0"], tmp_path / "own")
    archive.write(own / "state.krn", {}, metadata)
    with pytest.raises((ResumeError, RecordingError), match=r"state\.krn"):
        learn(own, resume=True)
    finished = shutil.copytree(runs["finished"], tmp_path / "finished")
    archive.write(finished / "state.krn", {}, metadata)
    with pytest.raises(InputError, match=r"state\.krn"):
        krnet.load_run(finished).model  # noqa: B018
