"""Samples are appended to a folder of parts: old files stay, and the folder opens as before until all is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import krnet
from krnet.cli.app import app
from krnet.errors import FeatureError, InputError, LabelError, LengthsError, ResumeError, SettingError
from krnet.parts import appending
from maps import relu_maps

FIRST, ALL, STEP = 300, 900, 256
pytestmark = pytest.mark.filterwarnings("ignore::krnet.errors.KrnetWarning")


@pytest.fixture(scope="module")
def maps() -> tuple[Tensor, Tensor]:
    features, labels = relu_maps(ALL, (4, 5, 5))
    return features, labels + 10


@pytest.fixture(scope="module")
def begun(maps, tmp_path_factory) -> Path:
    """A folder of two parts with labels. Do not change it: copy it."""
    folder = tmp_path_factory.mktemp("begun")
    features, labels = maps
    model = krnet.record(features[:200], recorder="pca", step=0.1, out=folder / "model.krn")
    krnet.encode(model, features[:FIRST], labels[:FIRST], out=folder / "out", part_samples=STEP)
    return folder / "out"


@pytest.fixture
def out(begun, tmp_path) -> Path:
    return shutil.copytree(begun, tmp_path / "out")


def more(maps: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return maps[0][FIRST:], maps[1][FIRST:] + 1


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stop(progress: krnet.Progress) -> None:
    """A watcher that presses Ctrl-C when one new part is there."""
    if progress.name == "encoding" and progress.done > STEP:
        raise KeyboardInterrupt


def test_appended_samples_follow_on_and_old_files_stay(out, begun, maps):
    before, (features, labels) = contents(out), more(maps)
    grown = krnet.open(out).append(features, labels, part_samples=STEP)
    assert len(grown) == ALL and grown.info()["num_parts"] == 2 + 3 and grown.fingerprint == krnet.open(out).fingerprint
    old = krnet.open(begun)
    assert torch.equal(grown[:FIRST], old[:]) and torch.equal(grown.labels, torch.cat([maps[1][:FIRST], labels]))
    assert grown.num_classes == len(grown.labels.unique()) > old.num_classes
    torch.testing.assert_close(grown[FIRST:], old.model.project(features))
    after = contents(out)
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    found = krnet.verify(out, maps[0])
    assert found["same_features"] and abs(found["r2"] - grown.r2) < 1e-3
    assert len(grown.append(features[:5], labels[:5])) == ALL + 5


def test_a_stopped_call_changes_nothing_until_it_is_resumed(out, begun, maps):
    expected = shutil.copytree(begun, out.with_name("expected"))
    krnet.open(expected).append(*more(maps), part_samples=STEP)
    with pytest.raises(KeyboardInterrupt):
        krnet.open(out).append(*more(maps), part_samples=STEP, watch=stop)
    assert len(list(out.glob("part-*"))) == 3
    stopped = krnet.open(out)
    assert len(stopped) == FIRST and krnet.verify(out)["ok"] and torch.equal(stopped[:], krnet.open(begun)[:])
    with pytest.raises(ResumeError, match=r"part-000000000300-000000000555\.krn of a stopped `krnet append`.*--resume"):
        stopped.append(*more(maps), part_samples=STEP)
    features, labels = more(maps)
    with pytest.raises(ResumeError, match="holds other samples than these"):
        stopped.append(features.flip(0), labels, part_samples=STEP, resume=True)
    with pytest.raises(ResumeError, match="is not among the parts of these samples"):
        stopped.append(features, labels, part_samples=2 * STEP, resume=True)
    assert len(stopped.append(features, labels, part_samples=STEP, resume=True)) == ALL
    assert contents(out) == contents(expected)


def test_a_finished_call_is_not_done_twice_when_it_is_resumed(out, maps):
    features, labels = more(maps)
    krnet.open(out).append(features, labels, part_samples=STEP)
    before = contents(out)
    assert len(krnet.open(out).append(features, labels, part_samples=STEP, resume=True)) == ALL
    assert contents(out) == before
    others = krnet.open(out).append(features.flip(0), labels, part_samples=STEP, resume=True)
    assert len(others) == ALL + len(features)
    with pytest.raises(KeyboardInterrupt):  # the same samples a second time
        others.append(features.flip(0), labels, part_samples=STEP, watch=stop)
    twice = others.append(features.flip(0), labels, part_samples=STEP, resume=True)
    assert len(twice) == ALL + 2 * len(features) and krnet.verify(out)["ok"]


def test_sequences_follow_on_and_a_kill_before_the_manifest_leaves_the_old_ones(begun, maps, tmp_path, monkeypatch):
    out, features = tmp_path / "out", maps[0]
    lengths = [100, 0, FIRST - 100]
    krnet.encode(begun / "model.krn", features[:FIRST], lengths=lengths, out=out)
    with pytest.raises(LengthsError, match="no lengths are given"):
        krnet.open(out).append(features[FIRST:])

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(appending, "write_manifest", die)
        with pytest.raises(KeyboardInterrupt):
            krnet.open(out).append(features[FIRST:], lengths=[ALL - FIRST])
    assert krnet.open(out).lengths.tolist() == lengths and krnet.verify(out)["ok"]
    grown = krnet.open(out).append(features[FIRST:], lengths=[ALL - FIRST], resume=True)
    assert grown.lengths.tolist() == [*lengths, ALL - FIRST] and len(grown.sequences[3]) == ALL - FIRST
    assert [path.name for path in out.glob("sequences*")] == ["sequences-000000000900.krn"]
    before = contents(out)
    krnet.open(out).append(features[FIRST:], lengths=[ALL - FIRST], resume=True)
    assert contents(out) == before == contents(grown.save(tmp_path / "copy"))


def test_samples_unlike_those_of_the_folder_are_refused(out, begun, maps, tmp_path):
    opened, (features, labels) = krnet.open(out), more(maps)
    with pytest.raises(FeatureError, match=r"samples of \(5, 5\)"):
        opened.append(features[:, 0], labels)
    with pytest.raises(FeatureError, match="values of type float16"):
        opened.append(features.half(), labels)
    with pytest.raises(LabelError, match="none are given"):
        opened.append(features)
    with pytest.raises(LengthsError, match="recorded without lengths"):
        opened.append(features, labels, lengths=[len(features)])
    with pytest.raises(SettingError, match=r"budget is given for .* a folder of parts"):
        opened.append(features, labels, budget=1000)
    with pytest.raises(InputError, match="grows in its place"):
        opened.append(features, labels, out=tmp_path / "other")
    assert contents(out) == contents(begun)
    krnet.open(out).append(features, labels, out=out)
    with pytest.raises(InputError, match="has changed since it was opened"):
        opened.append(features, labels)


def test_a_folder_in_a_store_grows(begun, maps):
    store, url = fsspec.filesystem("memory"), "memory://grown/maps"
    store.put(str(begun), "/grown/maps", recursive=True)
    grown = krnet.open(url).append(*more(maps))
    assert len(krnet.open(url)) == ALL and torch.equal(krnet.open(url)[:], grown[:])


def test_the_command_line_appends_to_a_folder(out, maps, tmp_path):
    features, labels = (values.numpy() for values in more(maps))
    np.savez(tmp_path / "more.npz", features=features, labels=labels)

    def run(*words: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["append", *map(str, words), "-q", "--json"])
        return done.exit_code, done.output

    code, text = run(out, tmp_path / "more.npz", "--part-samples", STEP)
    assert code == 0 and json.loads(text)["num_samples"] == ALL and json.loads(text)["path"] == str(out)
    code, text = run(out, tmp_path / "more.npz", "--part-samples", STEP, "--resume")
    assert code == 0 and json.loads(text)["num_samples"] == ALL
    code, text = run(out / "model.krn", tmp_path / "more.npz")
    assert code != 0 and "out is missing" in text
