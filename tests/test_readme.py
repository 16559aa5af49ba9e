"""The README's snippets run, one after the other, and print what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def test_it_is_short_and_has_no_commit_hash():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    assert not re.search(r"`[0-9a-f]{7}`|(?<!R)[¹²³⁴⁵⁶⁷⁸⁹]", text), "hashes and footnotes belong in docs/results.md"


@pytest.mark.slow
def test_the_readme_snippets_print_what_the_readme_shows(tmp_path):
    found = re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```)?", README.read_text(), re.DOTALL)
    assert len(found) == 3
    code, shown = "".join(part for part, _ in found), "".join(output for _, output in found)
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.krn", "features.safetensors", "maps.krn"]
