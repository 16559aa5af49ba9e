"""The README's snippet runs and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_readme_snippet_prints_what_the_readme_shows(tmp_path):
    code, shown = re.search(r"```python\n(.*?)```\n```\n(.*?)```", README.read_text(), re.DOTALL).groups()
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown
    assert (tmp_path / "digits.krn").exists()
