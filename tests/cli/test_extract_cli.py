"""`krnet extract` as a user meets it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import krnet
from krnet.cli import app as cli
from krnet.features import extract as module

N = 12


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """images.npy, labels.npy, trunk.pt, and the features that the trunk makes: expected.npy."""
    folder = tmp_path_factory.mktemp("extract")
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()).eval()
    images = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8)
    np.save(folder / "images.npy", images.numpy())
    np.save(folder / "labels.npy", np.arange(N) % 3)
    torch.jit.script(trunk).save(folder / "trunk.pt")
    np.save(folder / "expected.npy", trunk((images.float() / 255 - 0.5) / 0.25).detach().numpy())
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these files, in the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = "extract images.npy --labels labels.npy --trunk trunk.pt --mean 0.5 --std 0.25,0.25,0.25 -o a.safetensors"


def test_extract_then_record_then_verify_needs_no_key_and_no_labels(folder: Path) -> None:
    found = run(*COMMAND.split(), "--batch-size", 5, "--device", "cpu", "--json")
    assert found.exit_code == 0, found.output
    assert found.stdout.count("\n") == 1
    result = json.loads(found.stdout)
    expected = {"path": "a.safetensors", "num_samples": N, "shape": [4, 3, 3], "dtype": "float32", "has_labels": True}
    assert result.items() >= expected.items()
    assert result["bytes"] == Path("a.safetensors").stat().st_size
    np.testing.assert_allclose(load_file("a.safetensors")["features"], np.load("expected.npy"), atol=1e-5)
    recorded = run("record", "a.safetensors", "-o", "a.krn", "--recorder", "raw", "--device", "cpu", "--json")
    assert json.loads(recorded.stdout)["num_classes"] == 3
    verified = run("verify", "a.krn", "--against", "a.safetensors", "--json")
    assert json.loads(verified.stdout)["same_features"]


def test_without_json_there_is_a_table_and_progress_goes_to_stderr(folder: Path) -> None:
    found = run(*COMMAND.split())
    assert found.exit_code == 0, found.output
    for text in ("a.safetensors: 12 samples of 4×3×3, float32", "in the same file", "MB ("):
        assert text in found.stdout
    assert "reading the images" in found.stderr
    assert run(*COMMAND.split(), "--quiet").stderr == ""


def test_images_of_a_data_set_come_with_its_labels_mean_and_std(folder: Path, few_digits: None) -> None:
    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1]

    digits = krnet.data.load("digits")
    torch.jit.script(First()).save("first.pt")
    found = run("extract", "--data", "digits", "--part", "test", "--trunk", "first.pt", "-o", "a.safetensors")
    assert found.exit_code == 0, found.output
    stored = load_file("a.safetensors")
    assert torch.equal(stored["labels"], digits.test.labels)
    expected = (digits.test.images.float() / 255 - digits.mean[0]) / digits.std[0]
    torch.testing.assert_close(stored["features"], expected)


@pytest.mark.parametrize(
    ("images", "options", "said"),
    [
        ("images.npy", "--mean 0.5 --std 0.25", "normalised: divided by 255, then minus mean 0.5, then divided by std"),
        ("images.npy", "", "not normalised, only divided by 255 (--mean and --std would normalise them)"),
        ("floats.npy", "", "not normalised (--mean and --std would normalise them)"),
        ("floats.npy", "--mean 0.5", "normalised: minus mean 0.5"),
        ("--data digits", "", "normalised: divided by 255, then minus mean 0."),
    ],
)
def test_the_output_says_whether_images_were_normalised(
    folder: Path, few_digits: None, images: str, options: str, said: str
) -> None:
    class Grey(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1]

    torch.jit.script(Grey()).save("grey.pt")
    np.save("floats.npy", np.load("images.npy").astype(np.float32))
    found = run("extract", *images.split(), *options.split(), "--trunk", "grey.pt", "-o", "a.safetensors")
    assert found.exit_code == 0, found.output
    (line,) = [line for line in found.stdout.splitlines() if line.strip().startswith("images")]
    assert said in line


def test_ctrl_c_says_how_to_go_on_and_resume_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.TrunkRunner.rows

    def stop(self: Any, first: int, *arguments: Any) -> Any:
        if first >= 6:
            raise KeyboardInterrupt
        return real(self, first, *arguments)

    monkeypatch.setattr(module.TrunkRunner, "rows", stop)
    stopped = run(*COMMAND.split(), "--batch-size", 2)
    assert stopped.exit_code == 130
    assert "a.safetensors.partial" in stopped.stderr and "--resume" in stopped.stderr
    monkeypatch.setattr(module.TrunkRunner, "rows", real)
    assert run(*COMMAND.split(), "--batch-size", 2, "--resume").exit_code == 0
    np.testing.assert_allclose(load_file("a.safetensors")["features"], np.load("expected.npy"), atol=1e-5)


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("extract --trunk trunk.pt -o a.safetensors", 2, "either IMAGES or --data"),
        ("extract images.npy --data digits --trunk trunk.pt -o a.safetensors", 2, "either IMAGES or --data"),
        ("extract images.npy -o a.safetensors", 2, "--trunk"),
        ("extract --data digits --part val --trunk trunk.pt -o a.safetensors", 2, "train or test"),
        ("extract images.npy --trunk trunk.pt -o a.safetensors --mean half", 2, "0.51,0.49,0.44"),
        ("extract images.npy --trunk trunk.pt -o a.npy", 1, ".safetensors"),
        ("extract images.npy --trunk none.pt -o a.safetensors", 1, "none.pt: no such file"),
        ("extract none.npy --trunk trunk.pt -o a.safetensors", 1, "none.npy: no such file"),
        ("extract images.npy --trunk trunk.pt -o a.safetensors --dtype int8", 1, "float16"),
        ("extract images.npy --labels images.npy --trunk trunk.pt -o a.safetensors", 1, "12 integers"),
    ],
)
def test_wrong_usage_is_refused_and_leaves_no_file(folder: Path, command: str, code: int, message: str) -> None:
    before = set(folder.iterdir())
    found = run(*command.split())
    assert found.exit_code == code, found.output
    assert message in found.stderr
    assert set(folder.iterdir()) == before


SHARDS = "extract images.npy --labels labels.npy --trunk trunk.pt --mean 0.5 --std 0.25 --batch-size 2 -o shards.v1/"


def test_a_folder_of_shards_is_written_in_shares_added_to_and_recorded(folder: Path) -> None:
    first = run(*SHARDS.split(), "--shard-size", 700, "--share", "1/2", "--json")
    assert first.exit_code == 0, first.output
    result = json.loads(first.stdout)
    assert (result["num_samples"], result["num_shards"], result["missing"]) == (8, 2, "0..3")
    assert "samples 0..3" in run(*SHARDS.split(), "--shard-size", 700, "--share", "1/2", "--resume").stdout
    assert "missing" not in run(*SHARDS.split(), "--shard-size", 700, "--share", "0/2").stdout
    again = run(*SHARDS.split())
    assert again.exit_code == 1 and "--first-id end" in again.stderr
    more = run(*SHARDS.split(), "--first-id", "end", "--dtype", "float32")
    assert more.exit_code == 0 and f"{2 * N} samples of 4×3×3" in more.stdout
    recorded = run("record", "shards.v1", "-o", "a.krn", "--recorder", "raw", "--device", "cpu", "--json")
    result = json.loads(recorded.stdout)
    assert (result["num_classes"], result["num_samples"]) == (3, 2 * N)
    np.testing.assert_allclose(krnet.open("a.krn")[N:], np.load("expected.npy"), atol=1e-5)
    rate = run("bench", "rate", "shards.v1", "--recorders", "raw", "--budgets", "1MB", "-o", "rate", "--json")
    assert rate.exit_code == 0, rate.output


def test_a_stopped_command_says_how_the_shards_are_taken_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "extract", stop)
    assert "kept in shards.v1/" in run(*SHARDS.split()).stderr
    assert "first ID of these samples" in run(*SHARDS.split(), "--first-id", "end").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--share 2/2", "K from 0 to N - 1"),
        ("--share half", "0/4"),
        ("--first-id -1", "50000"),
        ("--first-id x", "end"),
    ],
)
def test_a_wrong_share_or_id_is_a_usage_error(folder: Path, options: str, message: str) -> None:
    found = run(*SHARDS.split(), *options.split())
    assert found.exit_code == 2 and message in found.stderr
