"""A recorder whose package is missing is refused with the command that installs it, and left out of bench rate."""

from __future__ import annotations

import re

import pytest
import torch
from typer.testing import CliRunner

import krnet
from krnet.bench import rate
from krnet.cli import app as cli
from krnet.errors import MissingPackageError
from krnet.recorders import base
from krnet.recorders.raw import RawRecorder

NEEDS = "needs no_such_package: pip install 'krnet[rivals]'"


@pytest.fixture
def raw_needs_a_package(monkeypatch) -> None:
    monkeypatch.setattr(RawRecorder, "package", "no_such_package")
    monkeypatch.setattr(RawRecorder, "extra", "rivals")


def test_recording_and_replaying_are_refused_with_the_command_that_installs_it(
    raw_needs_a_package, tmp_path, monkeypatch
):
    with pytest.raises(MissingPackageError, match=re.escape(f"recorder raw {NEEDS}")):
        krnet.record(torch.rand(5, 3), recorder="raw", out=tmp_path / "x.krn")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(RawRecorder, "package", None)
    krnet.record(torch.rand(5, 3), recorder="raw", out=tmp_path / "x.krn")
    monkeypatch.setattr(RawRecorder, "package", "no_such_package")
    recording = krnet.open(tmp_path / "x.krn")
    assert recording.info()["num_samples"] == 5
    with pytest.raises(MissingPackageError, match=re.escape(NEEDS)):
        recording[0]
    monkeypatch.setattr(RawRecorder, "replays_without_package", True)
    assert krnet.open(tmp_path / "x.krn")[0].shape == (3,)


def test_the_list_of_settings_names_what_is_needed(raw_needs_a_package):
    assert str(krnet.settings("raw")).startswith(f"raw ({NEEDS})")
    shown = CliRunner().invoke(cli.app, ["record", "--recorder", "raw", "--list-settings"])
    assert shown.exit_code == 0 and NEEDS in shown.stdout


def test_bench_rate_leaves_it_out_and_says_why_and_refuses_it_by_name(raw_needs_a_package, tmp_path, monkeypatch):
    assert "raw" not in [series.name for series in rate.default_series()]
    monkeypatch.setattr(base, "_REGISTRY", {name: base.get_recorder(name) for name in ("raw", "fp8")})
    said = []
    found = rate.bench(
        torch.rand(50, 8), out=tmp_path / "r", budgets=["10kB"], device="cpu", watch=lambda told: said.append(told.name)
    )
    assert found["recorders"] == ["fp8"] and f"raw is left out: {NEEDS}" in said
    with pytest.raises(MissingPackageError, match=re.escape(NEEDS)):
        rate.bench(torch.rand(50, 8), out=tmp_path / "q", budgets=["10kB"], recorders=["raw"], device="cpu")
    assert not (tmp_path / "q").exists()


def test_bench_rate_measures_a_slow_recorder_on_few_values_or_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(RawRecorder, "bench_values", 500)
    assert "raw" in [series.name for series in rate.default_series(num_values=500)]
    assert "raw" not in [series.name for series in rate.default_series(num_values=501)]
    assert rate.left_out(501) == {"raw": "slow above 500 values. Name it among the recorders to measure it"}
    found = rate.bench(torch.rand(100, 8), out=tmp_path / "r", budgets=["10kB"], recorders=["raw"], device="cpu")
    assert [point["recorder"] for point in found["points"]] == ["raw"]
