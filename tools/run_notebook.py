"""Run the notebooks of examples/ and store their outputs.

python tools/run_notebook.py        run examples/*.ipynb in fresh kernels, store what they print and draw

A notebook runs in a temporary folder, with the krnet of this tree. Its metadata are those of no particular machine.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
TIMEOUT_S = 300  # for a cell
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run_notebook(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook with the outputs of a run in a fresh kernel; a cell that fails raises CellExecutionError."""
    made = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures appear below their cells
            "IPYTHONDIR": folder,  # no settings of the user
            # The networks are small: more threads only wait for each other, for minutes if the machine has other work.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        work_in = {"metadata": {"path": folder}}
        client = NotebookClient(made, timeout=TIMEOUT_S, kernel_name="python3", record_timing=False, resources=work_in)
        client.execute(env=environment)
    made.metadata = nbformat.from_dict(METADATA)
    return made


def main() -> None:
    for path in NOTEBOOKS:
        made = run_notebook(nbformat.read(path, as_version=4))
        nbformat.write(made, path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
