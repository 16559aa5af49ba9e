"""tools/compare_results.py: equal results pass, and a difference in any of what it reads is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import krnet
from golden import small

TOOL = Path(__file__).parents[2] / "tools" / "compare_results.py"


@pytest.fixture
def results(tmp_path) -> Path:
    """Two folders with the same case, a recording and a run, made twice."""
    for side in "AB":
        folder = tmp_path / side / "case"
        folder.mkdir(parents=True)
        krnet.record(*small.maps(20), recorder="quantized", out=folder / "recording.krn")
        run = {"accuracy_matrix": [[0.5]], "seconds": float(ord(side)), "settings": {"lr": 0.1, "recorder": side}}
        (folder / "run.json").write_text(json.dumps(run))
    return tmp_path


def compare(results: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, TOOL, results / "A", results / "B"], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_same_made_twice_is_equal_whatever_the_time_it_took(results):
    code, table = compare(results)
    assert code == 0 and "case  equal" in table and "1 equal, 0 not" in table


def test_one_bit_of_a_tensor_is_noticed_and_the_tensor_is_named(results):
    path = results / "B" / "case" / "recording.krn"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the last tensor's last byte
    path.write_bytes(content)
    code, table = compare(results)
    assert code == 1 and "recording.krn: tensor" in table and "1 of" in table


def test_another_setting_in_the_header_is_noticed(results):
    krnet.record(*small.maps(20), recorder="quantized", seed=1, out=results / "B" / "case" / "recording.krn")
    assert compare(results) == (1, "case  recording.krn: fit.seed: 0 and 1\n1 cases: 0 equal, 1 not\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accuracy_matrix": [[0.25]]}, "run.json: accuracy_matrix[0][0]: 0.5 and 0.25"),
        ({"more": 1}, "run.json: more only in B"),
        ({"settings": {"lr": 0.2, "recorder": "B"}}, "run.json: settings.lr: 0.1 and 0.2"),
    ],
)
def test_another_value_in_a_run_is_noticed(results, change, message):
    path = results / "B" / "case" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, table = compare(results)
    assert code == 1 and message in table


def test_a_case_that_failed_or_is_missing_is_not_equal(results):
    for side in "AB":
        (results / side / "case" / "error.txt").write_text("ValueError: no\n")
    assert compare(results)[0] == 1
    (results / "A" / "other").mkdir()
    assert "missing in B" in compare(results)[1]
