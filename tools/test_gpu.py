"""Run the tests that need a GPU, in this one process, and append their outcome to the ledger as a row.

    python tools/test_gpu.py [arguments for pytest]    `make test-gpu` calls it

Its exit status is pytest's. Without a GPU every test is skipped, and no row is written: it would say nothing.
"""

from __future__ import annotations

import sys
import time

import pytest
import torch

from krnet.io import ledger


class Counts:
    """A pytest plugin: tests by how they ended. One whose set-up or clean-up fails counts as failed."""

    def __init__(self) -> None:
        self.of = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.of["failed"] += 1


def main(arguments: list[str]) -> int:
    commit = ledger.commit()  # of the code that is tested, whatever is committed meanwhile
    counts, started = Counts(), time.perf_counter()
    status = int(pytest.main(["-m", "gpu", "-p", "no:xdist", *arguments], plugins=[counts]))
    seconds = time.perf_counter() - started
    if not torch.cuda.is_available():
        print("tools/test_gpu.py: no GPU here; nothing was tested, and no row is written", file=sys.stderr)
        return status
    outcome = "ok" if status == 0 else f"failed: pytest ended with {status}"
    ledger.append("test-gpu", settings={}, metrics=counts.of, seconds=round(seconds, 1), outcome=outcome)
    print(f"tools/test_gpu.py: {counts.of} at {commit}, a row in {ledger.default_path()}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
