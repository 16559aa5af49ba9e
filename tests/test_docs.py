"""The documentation: its code runs, its paths and links exist, its generated blocks are up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import krnet
from krnet.cli import recording_rows, run_tables
from krnet.learners.scores import summarize

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
# `tools/fill_docs.py`, `src/krnet/io/`: paths in the repository, as pages write them.
REPOSITORY_PATH = re.compile(r"`((?:src|tests|tools|docs|notes|benchmarks|results)/[\w./-]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
EXECUTED = {"quickstart", "encoding", "sequences", "incremental-learning", "extending"}


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXECUTED))
def test_the_python_of_a_page_runs_and_prints_what_the_page_shows(name, tmp_path):
    blocks = PYTHON_BLOCK.findall(page(name))
    code, shown = "\n".join(block for block, _ in blocks), "".join(output for _, output in blocks)
    if "krnet.extract" in code and not hasattr(krnet, "extract"):
        pytest.skip("krnet.extract is not there yet")
    assert blocks and shown
    script = tmp_path / f"{name.replace('-', '_')}.py"  # a file: descriptions of settings are read from the source
    script.write_text(code)
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_paths_and_links_of_a_page_exist(path):
    text = path.read_text()
    missing = [found for found in REPOSITORY_PATH.findall(text) if not (ROOT / found).exists()]
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        linked = path if not target else path.parent / target
        headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE) if anchor and linked.exists() else []
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
        if not linked.exists() or (anchor and anchor not in slugs):
            missing.append(link)
    assert not missing


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fill_docs() -> ModuleType:
    return load_tool("fill_docs")


def test_generated_blocks_are_up_to_date(fill_docs):
    stale = [path.name for path in fill_docs.stale_pages(ROOT)]
    assert not stale, "run: python tools/fill_docs.py"


RESULT_BLOCKS = sorted(set(re.findall(r"<!-- generated: ([\w -]+?) -->", (ROOT / "docs" / "results.md").read_text())))


@pytest.fixture
def ledger_with(fill_docs, tmp_path, monkeypatch):
    """Gives the tables a ledger that has a copy of every row, with the highest accuracy, R2 and speed, and changed by
    the caller."""
    rows = [json.loads(line) for line in fill_docs.LEDGER.read_text().splitlines()]

    def write(date: str, **metrics: object) -> None:
        best = {"last": 0.99, "average": 0.99, "r2": 0.99, "replay_accuracy": 0.99}
        copies = []
        for row in rows:
            own = {name: value for name, value in best.items() if name in row["metrics"]}
            if "accuracy" in row["metrics"]:
                own["accuracy"] = [0.99] * len(row["metrics"]["accuracy"])
            copies.append({**row, "date": date, "metrics": {**row["metrics"], **own, **metrics}})
        path = tmp_path / f"{date}-{len(metrics)}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *copies]))
        monkeypatch.setattr(fill_docs, "LEDGER", path)

    return write


def test_tables_leave_out_rows_judged_on_held_out_images(fill_docs, ledger_with):
    """As `krnet learn --validation 50` might append them."""
    blocks = [name for name in RESULT_BLOCKS if name != "strength-table"]
    before = {name: fill_docs.block(name) for name in blocks}
    ledger_with("2999-01-01T00:00:00+00:00", validation=50)
    assert {name: fill_docs.block(name) for name in blocks} == before


@pytest.mark.parametrize(
    "name", [name for name in RESULT_BLOCKS if name.endswith(("summary", "curves", " rate")) or name == "record-table"]
)
def test_a_table_shows_the_newest_row_of_equal_settings(fill_docs, ledger_with, name):
    before = fill_docs.block(name)
    if "not run yet" in before:
        pytest.skip("this recipe has no rows")
    ledger_with("2000-01-01T00:00:00+00:00")
    assert fill_docs.block(name) == before, "an older row is shown"
    ledger_with("2999-01-01T00:00:00+00:00")
    newest = fill_docs.block(name)
    assert newest != before and ("99.0" in newest or "0.99" in newest)


@pytest.fixture
def draw_docs(fill_docs, monkeypatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "fill_docs", fill_docs)
    return load_tool("draw_docs")


def test_pictures_show_the_newest_rows(draw_docs):
    assert not draw_docs.stale_pictures(ROOT / "docs"), "run: python tools/draw_docs.py"


def test_a_picture_changes_with_a_newer_row_of_equal_settings_only(draw_docs, ledger_with):
    ledger_with("2000-01-01T00:00:00+00:00")
    assert not draw_docs.stale_pictures(ROOT / "docs")
    ledger_with("2999-01-01T00:00:00+00:00")
    assert set(draw_docs.stale_pictures(ROOT / "docs")) == set(draw_docs.PICTURES)


def test_the_readme_shows_the_newest_rows(fill_docs, ledger_with):
    ledger_with("2999-01-01T00:00:00+00:00")
    assert fill_docs.readme_table().count("99.0") >= 7


def test_a_stale_or_unknown_block_is_noticed(fill_docs, tmp_path):
    text = page("recorders")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(text)
    stale = tmp_path / "docs" / "stale.md"
    stale.write_text(text.replace("| `dtype` |", "| `kind` |"))
    assert fill_docs.stale_pages(tmp_path) == {stale: text}
    with pytest.raises(KeyError, match="no-such-block"):
        fill_docs.filled("<!-- generated: no-such-block -->\n<!-- end -->")


def test_the_tree_of_the_architecture_page_is_that_of_the_import_test():
    import test_architecture

    rows = re.findall(r"^\| `([\w]+)(?:\.py|/)` \|", page("architecture"), re.MULTILINE)
    assert rows == test_architecture.ORDER


def test_the_sample_of_info_has_the_rows_that_the_command_prints(tmp_path):
    recording = krnet.record(torch.rand(20, 2, 3, 3), recorder="pca", out=tmp_path / "x.krn")
    names = [name for name, _ in recording_rows.info_rows({"path": "maps.krn", **recording.info()})]
    (sample,) = re.findall(r"^```\n(recording   .*?)^```$", page("quickstart"), re.DOTALL | re.MULTILINE)
    assert [line.split("  ")[0] for line in sample.splitlines()] == names


def test_the_sample_of_learn_has_the_columns_that_the_command_prints(capsys):
    scores = {"accuracy": [0.5] * 3, "average": 0.5, "average_without_base": 0.5, "forgetting": 0.0}
    facts = {"tasks": [6, 2, 2], "data": "digits", "order": "lucir1993", "order_hash": "0", "seed": 0, "seconds": 1.0}
    storage = {"total": 0, "equivalent_exemplars": 0}
    run_tables.show_runs([{"method": "kril", "row": "cnn", "storage_bytes": storage, **facts, **scores}])
    columns = capsys.readouterr().out.splitlines()[1]
    (sample,) = re.findall(r"<!-- sample: krnet learn -->\n\n```\n(.*?)```", page("incremental-learning"), re.DOTALL)
    assert re.split(r"  +", sample.splitlines()[1]) == re.split(r"  +", columns)


def test_the_sample_of_learn_with_several_seeds_has_the_lines_that_the_command_prints(capsys):
    scores = {"last": 0.5, "average": 0.5, "average_without_base": 0.5, "forgetting": 0.0}
    facts = {"tasks": [6, 2, 2], "data": "digits", "order": "lucir1993", "order_hash": "0", "seconds": 1.0}
    storage = {"images": 8, "labels": 1, "total": 9, "equivalent_exemplars": 1}
    run = {"method": "joint", "row": "cnn", "storage_bytes": storage, "network_bytes": 9, **facts, **scores}
    runs = [{**run, "seed": seed} for seed in (0, 1)]
    run_tables.show_summary(runs, summarize(runs))
    _, note, columns, _, parts = capsys.readouterr().out.splitlines()
    pattern = r"<!-- sample: krnet learn, several seeds -->\n\n```\n(.*?)```"
    (sample,) = re.findall(pattern, page("incremental-learning"), re.DOTALL)
    lines = sample.splitlines()
    assert lines[1] == note and re.split(r"  +", lines[2]) == re.split(r"  +", columns)
    assert re.sub(r"[\d.]+ kB", "", lines[-1]) == re.sub(r"\d+ bytes", "", parts)


def test_the_files_of_a_run_are_explained(tmp_path):
    settings = {"base_epochs": 1, "epochs": 1, "head_epochs": 2, "budget": 100_000}
    digits = krnet.data.load("digits")
    few = digits.train.labels.argsort(stable=True)[::20]
    train, test = (digits.train.images[few], digits.train.labels[few]), (digits.test.images, digits.test.labels)
    data = krnet.data.from_arrays(*train, *test, layout="NCHW")
    tasks = krnet.protocol.split("natural", num_classes=10, sizes=[6, 2, 2])
    krnet.learn("kril", data, tasks, out=tmp_path, settings=settings, device="cpu")
    explained = set(re.findall(r"`([\w.-]+)`", page("incremental-learning").partition("## The files of a run")[2]))
    assert {path.name for path in tmp_path.iterdir()} <= explained


@pytest.mark.parametrize("word", ["trunk", "head", "F1, F2", "probe", "room", "task", "replay", "R2"])
def test_the_glossary_that_the_quickstart_links_to_has_the_word(word):
    assert f"\n| {word} | " in page("glossary") and "(glossary.md)" in page("quickstart")


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == [path.name for path in PAGES]


def test_every_public_name_is_on_the_api_page():
    text = page("api")
    missing = [name for name in krnet.__all__ if not re.search(rf"\bkrnet\.{name}\b", text)]
    assert not missing, "add them to docs/api.md: ::: krnet.NAME"


def test_the_diffs_of_extending_fit_the_files_that_they_change():
    diffs = re.findall(r"^```diff\n(.*?)^```$", page("extending"), re.DOTALL | re.MULTILINE)
    assert diffs
    for changed in re.split(r"^--- a/", "".join(diffs), flags=re.MULTILINE)[1:]:
        name, _, *lines = changed.splitlines()
        source = (ROOT / name).read_text().splitlines()
        missing = [line[1:] for line in lines if line[:1] in ("-", " ") and line[1:] not in source]
        assert not missing, name
