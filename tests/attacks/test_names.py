"""Names of files and classes that are not UTF-8, or that hold escape sequences: shown as escapes, never a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import forked
import krnet
from forge import rewrite_metadata
from krnet.cli import output
from krnet.config import plain_text, readable_name

NOT_UTF8, ESCAPE = os.fsdecode(b"caf\xe9"), "a\x1b[31mred"


def folder_of_images(root: Path, classes: tuple[str, ...]) -> Path:
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for file in ("0.png", f"{name}.png"):
                Image.fromarray(random.integers(0, 255, (12, 12, 3), np.uint8)).save(root / part / name / file)
    return root


@pytest.mark.parametrize("name", [NOT_UTF8, ESCAPE], ids=["bytes", "escape"])
def test_a_recording_of_any_name_is_written_shown_and_replayed(tmp_path, name):
    """In processes of their own: stdout refuses what it cannot encode."""
    np.save(tmp_path / f"{name}.npy", np.random.rand(40, 4).astype("f4"))
    record = ("record", f"{name}.npy", "-o", f"{name}.krn", "--recorder", "raw")
    for args in (record, ("verify", f"{name}.krn"), ("info", f"{name}.krn", "--json"), ("info", f"no {name}")):
        done = forked.run(forked.command(*args), cwd=tmp_path)
        assert done.returncode == (args[1] == f"no {name}"), done.stderr
        shown = done.stdout + done.stderr
        assert "Traceback" not in shown and "\x1b" not in shown
        assert (r"\udce9" if name == NOT_UTF8 else r"1b[31m") in shown


@pytest.mark.parametrize("list_file", [False, True])
def test_classes_and_data_sets_of_any_name_are_learned(tmp_path, monkeypatch, list_file):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = folder_of_images(tmp_path / NOT_UTF8, (NOT_UTF8, ESCAPE))
    if list_file:  # as Tiny-ImageNet has it
        files = [(path, path.parent.name) for path in sorted((root / "val").glob("*/0.png"))]
        (root / "val" / "images").mkdir()
        lines = []
        for number, (path, name) in enumerate(files):
            path.rename(root / "val" / "images" / f"{number}.png")
            lines.append(os.fsencode(f"{number}.png\t{name}\t0\n"))
        (root / "val" / "val_annotations.txt").write_bytes(b"".join(lines))
    data = krnet.data.load(str(root))
    assert data.name == r"caf\xe9" and data.class_names == (ESCAPE, r"caf\xe9")
    assert data.train.num_samples == 4 and data.test.num_samples == (2 if list_file else 4)
    json.dumps(data.class_names, ensure_ascii=False).encode()


def test_two_classes_that_would_have_one_name_are_refused(tmp_path):
    root = folder_of_images(tmp_path / "x", (NOT_UTF8, r"caf\xe9"))
    with pytest.raises(krnet.errors.DataError, match="two folders mean the class"):
        krnet.data.load(str(root))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain", "plain"), ("Ärger 日本", "Ärger 日本"), ("a\nb\tc", "a\nb\tc"), ("a\x1b]0;x\x07", r"a\x1b]0;x\x07"),
     ("\u202egnp.exe", r"\u202egnp.exe"), ("\x9b31m", r"\x9b31m"), (NOT_UTF8, r"caf\udce9"), ("a\rb", r"a\rb")],
)  # fmt: skip
def test_text_is_printed_without_what_moves_a_terminal(text, expected):
    assert plain_text(text) == expected


def test_a_readable_name_is_utf8():
    assert readable_name(NOT_UTF8) == r"caf\xe9"
    assert readable_name("日本") == "日本"


def test_json_has_no_infinity(tmp_path, capsys):
    output.show_json({"a": [float("inf"), float("nan"), 1.5], "b": {"c": -float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "b": {"c": None}}
    path = tmp_path / "x.krn"
    path.write_bytes((Path(__file__).parents[1] / "golden" / "raw-float32.krn").read_bytes())
    rewrite_metadata(path, lambda metadata: metadata["fit"].update(lr="huge"))
    content = path.read_bytes()
    from forge import read_header, rewrite_header_text

    rewrite_header_text(path, read_header(path)[0].replace('\\"huge\\"', "1e999"))
    assert path.read_bytes() != content
    with pytest.raises(krnet.errors.NotARecordingError, match="beyond all numbers"):
        krnet.open(path)


def test_a_zero_byte_in_a_name_is_refused_by_name():
    with pytest.raises(krnet.errors.InputError, match="zero byte"):
        krnet.record(np.random.rand(20, 4), recorder="raw", out="a\0b")
    with pytest.raises(krnet.errors.NotARecordingError, match="cannot be read"):
        krnet.open("a\0b")
