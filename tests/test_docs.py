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
from krnet.cli import output
from krnet.learners.scores import summarize

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
# `tools/fill_docs.py`, `src/krnet/io/`: paths in the repository, as pages write them.
REPOSITORY_PATH = re.compile(r"`((?:src|tests|tools|docs|notes|benchmarks|results)/[\w./-]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
EXECUTED = {"quickstart", "incremental-learning", "extending"}


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


@pytest.fixture(scope="module")
def fill_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fill_docs", ROOT / "tools" / "fill_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_blocks_are_up_to_date(fill_docs):
    stale = [path.name for path in fill_docs.stale_pages(ROOT)]
    assert not stale, "run: python tools/fill_docs.py"


def test_tables_leave_out_rows_judged_on_held_out_images(fill_docs, tmp_path, monkeypatch):
    """A copy of every row, with other numbers, as `krnet learn --validation 50` might append it."""
    before = fill_docs.learn_table(), fill_docs.bytes_table(), fill_docs.curves_table()
    rows = [json.loads(line) for line in fill_docs.LEDGER.read_text().splitlines()]
    learned = [row for row in rows if "last" in row["metrics"]]
    copies = [{**row, "metrics": {**row["metrics"], "last": 0.99, "validation": 50}} for row in learned]
    assert len(copies) > 10
    monkeypatch.setattr(fill_docs, "LEDGER", tmp_path / "ledger.jsonl")
    fill_docs.LEDGER.write_text("".join(json.dumps(row) + "\n" for row in [*copies, *rows]))
    assert (fill_docs.learn_table(), fill_docs.bytes_table(), fill_docs.curves_table()) == before
    real = [{**row, "metrics": {**row["metrics"], "validation": 0}} for row in copies]
    fill_docs.LEDGER.write_text("".join(json.dumps(row) + "\n" for row in [*real, *rows]))
    with pytest.raises(AssertionError, match="2 rows"):
        fill_docs.learn_table()


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
    names = [name for name, _ in output.info_rows({"path": "maps.krn", **recording.info()})]
    (sample,) = re.findall(r"^```\n(recording   .*?)^```$", page("quickstart"), re.DOTALL | re.MULTILINE)
    assert [line.split("  ")[0] for line in sample.splitlines()] == names


def test_the_sample_of_learn_has_the_columns_that_the_command_prints(capsys):
    scores = {"accuracy": [0.5] * 3, "average": 0.5, "average_without_base": 0.5, "forgetting": 0.0}
    facts = {"tasks": [6, 2, 2], "data": "digits", "order": "lucir1993", "order_hash": "0", "seed": 0, "seconds": 1.0}
    storage = {"total": 0, "equivalent_exemplars": 0}
    output.show_runs([{"method": "kril", "row": "cnn", "storage_bytes": storage, **facts, **scores}])
    columns = capsys.readouterr().out.splitlines()[1]
    (sample,) = re.findall(r"<!-- sample: krnet learn -->\n\n```\n(.*?)```", page("incremental-learning"), re.DOTALL)
    assert re.split(r"  +", sample.splitlines()[1]) == re.split(r"  +", columns)


def test_the_sample_of_learn_with_several_seeds_has_the_lines_that_the_command_prints(capsys):
    scores = {"last": 0.5, "average": 0.5, "average_without_base": 0.5, "forgetting": 0.0}
    facts = {"tasks": [6, 2, 2], "data": "digits", "order": "lucir1993", "order_hash": "0", "seconds": 1.0}
    storage = {"images": 8, "labels": 1, "total": 9, "equivalent_exemplars": 1}
    run = {"method": "joint", "row": "cnn", "storage_bytes": storage, "network_bytes": 9, **facts, **scores}
    runs = [{**run, "seed": seed} for seed in (0, 1)]
    output.show_summary(runs, summarize(runs))
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
