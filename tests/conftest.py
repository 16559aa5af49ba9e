"""What every test starts from: a CPU that runs what it advertises, fixed seeds, a ledger of its own."""

import os

# Before torch is imported. Some virtual machines advertise AMX without running it: bf16 products then die
# with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# The networks here are small: more threads only wait for each other, for minutes if the machine has other work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Set inside git hooks; a test that makes a repository of its own must not reach the one being committed.
for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
    os.environ.pop(name, None)

import gc
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.testing
from hypothesis import settings

import krnet
from maps import relu_maps

# Processes that tests start import this krnet, whatever is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(krnet.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# A shell script starts what it puts in the background with Ctrl-C ignored. Tests press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared machine stalls now and then: time per example says nothing about the code. The suite tries the same examples
# each time, so that it passes or fails by the code alone; --hypothesis-profile=search tries many others.
settings.register_profile("krnet", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=500)
settings.load_profile("krnet")

# CliRunner makes all commands of krnet anew at each call, which takes longer than most of them.
typer.testing._get_command = cache(typer.testing._get_command)


# Files that take long. They come first: a file that one process begins when the others are at their end is waited for.
LONG = {
    "attacks/test_memory.py", "cli/test_signals.py", "learners/test_kril.py", "recorders/test_recorder_contract.py",
    "report/test_browser.py", "reproduce/test_imagenet_recipe.py", "reproduce/test_quick_recipes.py", "test_docs.py",
    "test_task_loop.py", "test_team.py", "tools/test_soak.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none; `-m gpu` selects them."""
    first = {Path(__file__).parent / name for name in LONG}
    assert all(path.exists() for path in first), "LONG names a file that is not there"
    items.sort(key=lambda item: item.path not in first)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Collections of garbage leave out what is there from here on: all of torch, and thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the same, without a stack trace kept for each kind of device
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs started by tests, also in other processes, never reach results/ledger.jsonl."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRNET_LEDGER", str(tmp_path_factory.mktemp("ledger") / "ledger.jsonl"))
        yield


@pytest.fixture(scope="session")
def cifar100_dir() -> Path:
    """The folder cifar-100-python with the publisher's files train, test and meta."""
    data = os.environ.get("KRNET_DATA")
    if not data:
        pytest.skip("set KRNET_DATA to the folder that holds cifar-100-python/{train,test,meta}")
    folder = Path(data) / "cifar-100-python"
    missing = [name for name in ("train", "test", "meta") if not (folder / name).is_file()]
    if missing:
        pytest.skip(
            f"KRNET_DATA={data}: cifar-100-python/{{{','.join(missing)}}} not found; "
            f"set KRNET_DATA to the folder that holds cifar-100-python/{{train,test,meta}}"
        )
    return folder


@dataclass(frozen=True)
class Recorded:
    features: torch.Tensor
    labels: torch.Tensor
    path: Path


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A small recording of mixed classes, fitted once for all tests: copy the file before changing it."""
    features, index = relu_maps(60, (6, 7, 5), num_classes=4)
    labels = torch.tensor([30, -2, 2**40, 7])[index]
    path = tmp_path_factory.mktemp("recorded") / "small.krn"
    krnet.record(features, labels, out=path, iterations=80, recorder="paper", d0=32, c0=8, c1=8)
    return Recorded(features, labels, path)


@pytest.fixture(scope="module")
def few_digits() -> Iterator[None]:
    """`--data digits` means 20 images of each to learn and 5 to test: seconds become fractions of one."""
    from krnet.data import registry
    from learning_tools import small_digits

    made = replace(small_digits(20, 5, num_classes=10), name="digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "load_digits", lambda: made)
        yield
