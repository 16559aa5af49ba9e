"""The demo in its short form: all steps, few updates."""

import json
from pathlib import Path

from matplotlib.image import imread
from typer.testing import CliRunner

import krnet
from krnet import cli


def test_demo_leaves_a_recording_and_a_picture_and_prints_what_it_found(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "new"), "--short", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "fit" in result.stderr

    recording = krnet.open(tmp_path / "new" / "digits.krn")
    assert (len(recording), recording.shape) == (1797, (32, 8, 8))
    assert found["bytes"] == recording.nbytes
    assert found["feature_bytes"] == 1797 * 32 * 8 * 8 * 4
    assert found["compression_ratio"] > 4
    picture = imread(tmp_path / "new" / "demo.png")
    assert picture.shape[0] > 1000 and picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.1  # something was drawn
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["demo.png", "digits.krn"]
