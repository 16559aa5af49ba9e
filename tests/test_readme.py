"""The README's snippets run, one after the other, and print what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.mark.slow
def test_the_readme_snippets_print_what_the_readme_shows(tmp_path):
    found = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(found) == 2
    code, shown = "".join(part for part, _ in found), "".join(output for _, output in found)
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown
    assert (tmp_path / "digits.krn").exists() and (tmp_path / "runs" / "mine" / "run.json").exists()
