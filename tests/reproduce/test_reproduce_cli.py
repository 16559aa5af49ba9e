"""`krnet reproduce` as a user meets it: tables on stdout, progress on stderr, exit codes, stop and go on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from krnet.cli import app as cli
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.reproduce import loop
from krnet.reproduce.recipe import read_recipe, recipe_names
from learning_tools import ctrl_c_at

pytestmark = pytest.mark.usefixtures("few_digits")


@pytest.fixture(autouse=True)
def own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    return tmp_path / "ledger.jsonl"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["reproduce", *(str(a) for a in arguments)])


def test_the_storage_table_stands_beside_the_papers_to_the_printed_digit(tmp_path):
    result = run("storage-table", "-o", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    lines = {" ".join(line.split()) for line in result.stdout.splitlines()}
    assert "raw features 50 12.12 GB 1 12.12 GB +0.00 computed" in lines
    assert "autoencoder, codes 250 1.22 GB 1 1.22 GB +0.00 computed" in lines
    assert "KRNet, codes 250 2.93 MB 1 2.93 MB +0.00 computed" in lines
    assert "KRNet, weights 327.80 MB 1 327.90 MB -0.10 computed" in lines
    assert "[1/6] storage-table, raw features, seed 0" in result.stderr
    assert len(ledger.read()) == 6
    again = run("storage-table", "-o", tmp_path / "runs", "--seeds", "0,1,2")
    assert again.stdout == result.stdout and again.stderr == ""  # nothing is drawn at random: every seed is done
    assert len(ledger.read()) == 6


def test_json_holds_every_number_and_quiet_says_nothing(tmp_path):
    result = run("storage-table", "-o", tmp_path / "runs", "--json", "--quiet")
    assert result.exit_code == 0 and result.stderr == "" and result.stdout.count("\n") == 1
    (recipe,) = json.loads(result.stdout)["recipes"]
    assert recipe["name"] == "storage-table" and json.loads(result.stdout)["errors"] == []
    (weights,) = (one for one in recipe["results"] if one["series"] == "KRNet, weights")
    assert weights["paper"] == 327.9 and weights["difference"] == pytest.approx(weights["ours"] - 327.9)
    assert weights["place"] == "Section IV-B1"


def test_the_list_shows_what_has_been_run_and_how_far_from_the_paper(tmp_path):
    before = {line.split()[0]: line for line in run("--list").stdout.splitlines()}
    assert list(before)[1:] == recipe_names()
    assert re.search(r" 0/6 +- +- +a second\.", before["storage-table"])
    run("storage-table", "-o", tmp_path / "runs")
    result = run("--list")
    after = {line.split()[0]: line for line in result.stdout.splitlines()}
    date = ledger.read()[0]["date"][:10]
    assert re.search(rf" 6/6 +{date} +[+-]\S+ \w+, .* +a second\.", after["storage-table"])
    assert result.exit_code == 0 and result.stderr == f"runs and dates are those of {ledger.default_path()}\n"
    found = {one["name"]: one for one in json.loads(run("--list", "--json").stdout)}
    assert found["storage-table"]["done"] == 6 and found["storage-table"]["farthest"]["paper"]


def test_a_stopped_call_says_how_to_go_on_and_the_same_command_does(tmp_path):
    command = ["kr2-loss", "--quick", "--seeds", "0", "-o", tmp_path / "runs", "--device", "cpu"]
    with ctrl_c_at(2):
        result = run(*command)
    assert result.exit_code == 130
    assert f"stopped; what was done is in {tmp_path / 'runs'}. To go on, give the same command again" in result.stderr
    result = run(*command)
    assert result.exit_code == 0, result.output
    rows = ledger.read(tmp_path / "runs" / "ledger.jsonl")
    assert [row["settings"]["kr2"] for row in rows] == [True, False] and ledger.read() == []
    assert "without L_kr2" in result.stdout and "72.40" not in result.stdout  # digits stand beside no number


def test_a_recipe_whose_run_fails_ends_with_1_and_shows_the_others(tmp_path, monkeypatch):
    from krnet.reproduce.works.learn import Learn

    original = Learn.perform

    def fail_once(self: Learn, recipe: str, settings: Any, *others: Any) -> Any:
        if not settings.get("kr2", True):
            raise MemoryError("no memory left")
        return original(self, recipe, settings, *others)

    monkeypatch.setattr(Learn, "perform", fail_once)
    result = run("kr2-loss", "--quick", "--seeds", "0", "-o", tmp_path / "runs", "--device", "cpu", "--quiet")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == ["error: kr2-loss, without L_kr2, seed 0: MemoryError: no memory left"]
    assert re.search(r"^with L_kr2 +\d+\.\d\d %", result.stdout, re.MULTILINE)
    assert re.search(r"^without L_kr2 +- ", result.stdout, re.MULTILINE)


def test_mistakes_name_what_there_is():
    unknown = run("storage")
    assert unknown.exit_code == 1
    assert "error: unknown recipe 'storage'; did you mean 'storage-table'?" in unknown.stderr
    missing = run()
    assert missing.exit_code == 2 and "storage-table" in missing.stderr and "--list" in missing.stderr
    assert run("storage-table", "--jobs", "0").exit_code == 1
    assert run("storage-table", "--seeds", "x").exit_code == 2


def test_help_stands_behind_bench_and_shows_an_example():
    commands = re.findall(r"^  (\w+)  ", CliRunner().invoke(cli.app, ["--help"]).stdout, re.MULTILINE)
    assert commands.index("reproduce") == commands.index("bench") + 1
    text = run("--help").stdout
    assert "krnet reproduce cifar100-10 --seeds 0,1,2 --jobs 3" in text and "results/ledger.jsonl" in text


def test_only_runs_the_series_that_it_names(tmp_path):
    result = run("storage-table", "--only", "KRNet, codes", "-o", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    assert len(ledger.read()) == 1 and "KRNet, codes, seed 0" in result.stderr
    result = run("storage-table", "--only", "KRNet, code")
    assert result.exit_code == 1 and "did you mean 'KRNet, codes'?" in result.stderr
    assert run("all", "--only", "KRNet").exit_code == 2


def test_only_takes_parts_of_names():
    recipe = loop.chosen_runs(read_recipe("zoo-cpu"), ["pca, 4", "krnet, zoo-small-lm-tokens"])
    names = {run.name for run in recipe.runs}
    assert {"pca, zoo-small-lm-tokens, 4", "krnet, zoo-small-lm-tokens, 0.25"} <= names
    assert all(name.endswith(", 4") or name.startswith("krnet, zoo-small-lm-tokens, ") for name in names)
    with pytest.raises(SettingError, match="did you mean 'krnet'"):
        loop.chosen_runs(recipe, ["krnte"])
