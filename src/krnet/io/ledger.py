"""Append and read result rows: one JSON line per run in results/ledger.jsonl, never edited.

    recipe, settings, metrics, seconds --append--> one line of the ledger --read--> [row, row, ...]

A row also says where its numbers come from: command, commit, device, versions, peak memory, date, and the bytes that
are stored, by part; sizes of files are measured on disk. Crashes and bad numbers stay. A correction is a new row whose
`corrects` names the `date` of the old one. Any number of processes may append at the same time.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from krnet.errors import InputError, KrnetError
from krnet.io.lock import lock_file

# A URL, or a path inside an argument such as -o/a/b, --data=/a/b or train:/a/b,test:/a/c.
# The characters in [^...] end a path.
_PATH_OR_URL = re.compile(r"(?P<url>\w+://\S+)|(?P<option>(?<!\S)-\w(?=/))?[^\s'\",;:=()\[\]{}]*/[^\s'\",;:=()\[\]{}]*")


def append(
    recipe: str,
    *,
    settings: Mapping[str, Any],
    metrics: Mapping[str, Any],
    seconds: float,
    seed: int | None = None,
    class_order: str | None = None,
    command: str | None = None,
    outcome: str = "ok",
    corrects: str | None = None,
    files: Iterable[Path | str] | Mapping[str, Path | str] = (),
    parts: Mapping[str, int] | None = None,
    path: Path | str | None = None,
) -> dict[str, Any]:
    """Write one row to the ledger and return it as it was written.

    files  stored files: their sizes are measured here. A mapping gives each the name that the row lists it by
    parts  bytes of what is stored in no file of its own, by name

    An error names the value that is NaN or infinite. Paths outside the project are cut to their last component, in
    the command and in every string of the row, so that the ledger shows no folders of this machine.
    """
    if not seconds >= 0:
        raise InputError(f"seconds is {seconds}; expected the run's duration, a number from 0 up.")
    given = {
        "recipe": recipe,
        "command": command_line() if command is None else command,
        "settings": settings,
        "seed": seed,
        "class_order": class_order,
        "seconds": seconds,
        "metrics": metrics,
        "outcome": outcome,
        "corrects": corrects,
    }
    root = _project()
    row = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{name: _plain(value, name, root) for name, value in given.items()},
        "commit": commit(),
        "device": device_name(),
        "versions": versions(),
        "peak_memory_bytes": peak_memory_bytes(),
        "bytes": _sizes(files, parts or {}),
    }
    _append_line(_resolve(path), json.dumps(row, allow_nan=False).encode("ascii"))
    return row


def read(path: Path | str | None = None) -> list[dict[str, Any]]:
    """Return all rows, oldest first. Without a path, a ledger that does not exist yet has no rows."""
    file = _resolve(path)
    try:
        with open(file, "rb") as stream:
            lock_file(stream.fileno(), shared=True)
            lines = stream.read().split(b"\n")
    except FileNotFoundError:
        if path is None:
            return []
        raise InputError(f"{file}: no such ledger; a run appends its row and makes the file.") from None
    return [_parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def is_result(row: Mapping[str, Any]) -> bool:
    """Whether tables and figures may show a row: not if it was judged on held-out training images (`--validation`)."""
    return not row["metrics"].get("validation")


def default_path() -> Path:
    """Return $KRNET_LEDGER, or results/ledger.jsonl in the current git work tree, or else in the current folder."""
    named = os.environ.get("KRNET_LEDGER")
    return Path(named) if named else _project() / "results" / "ledger.jsonl"


def project_folder() -> Path:
    """Return the current git work tree, or else the current folder."""
    return _project()


def commit() -> str:
    """Return the commit of the running code, with "+dirty" if tracked files differ from it, or else "unknown".

    It is looked up once per process: a long run that calls this at its start gets the commit it started from, whatever
    is committed meanwhile. $KRNET_COMMIT takes precedence, for a copy of the tree without .git.
    """
    return os.environ.get("KRNET_COMMIT") or _commit_of(Path(__file__).resolve())


def command_line() -> str:
    """Return the command line of this process as one would type it, without the folders of this machine."""
    root = _project()
    program, *arguments = sys.argv or [""]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif program.endswith(".py"):
        words = ["python", program]
    elif program in ("", "-", "-c"):
        words = ["python", program] if program else ["python"]
    else:
        words = [Path(program).name]
    return shlex.join(_without_folders(word, root) for word in [*words, *arguments])


def device_name() -> str:
    """Return the name of the GPU if this process has used one, or else the CPU model and the number of threads."""
    import torch  # here, because reading the ledger should not wait for torch

    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def peak_memory_bytes() -> int:
    """Return the peak memory of this process: on the GPU if it has used one, or else its resident memory."""
    import torch

    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def versions() -> dict[str, str]:
    import numpy
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "krnet": package_version(),
    }


def package_version() -> str:
    try:
        return importlib.metadata.version("krnet")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# --- the file ---


def _resolve(path: Path | str | None) -> Path:
    return default_path() if path is None else Path(path)


def _append_line(path: Path, line: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock_file(fd)  # closing the file unlocks it
        size = os.fstat(fd).st_size
        # A crash may have cut the last line short: end that line, so that this row has its own.
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + line + b"\n"
        written = os.write(fd, data)
        if written != len(data):
            os.ftruncate(fd, size)
            raise KrnetError(f"{path}: only {written} of {len(data)} bytes went to disk. Is it full?")
        os.fsync(fd)
    finally:
        os.close(fd)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise InputError(
            f"{where}: not a ledger row ({error}). Expected one JSON object; a crash may have cut this line. "
            f"Restore it from version control, or remove that one line."
        ) from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: found a JSON {type(row).__name__}, expected a JSON object.")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _sizes(files: Iterable[Path | str] | Mapping[str, Path | str], parts: Mapping[str, int]) -> dict[str, int]:
    sizes = dict(parts)
    named = files.items() if isinstance(files, Mapping) else ((None, file) for file in files)
    for given, file in ((given, Path(file)) for given, file in named):
        # Two folders may hold files of the same name: the second is listed with its folder.
        own = file.name if file.name not in sizes else f"{file.absolute().parent.name}/{file.name}"
        name = own if given is None else given
        if name in sizes:
            raise InputError(f"{file}: the row already lists a file {name}. Was it named twice?")
        if not file.is_file():
            raise InputError(f"{file}: no such file; expected a stored file whose size goes into the row.")
        sizes[name] = file.stat().st_size
    return sizes


# --- the values ---


def _plain(value: Any, where: str, root: Path) -> Any:
    """Convert a value to types of JSON; `where` names it in errors."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(
                f"{where} is {value}; expected a finite number. For a run that diverged, store None here "
                f"and say so in outcome."
            )
        return value
    if isinstance(value, str | os.PathLike):
        return _without_folders(os.fspath(value), root)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        plain = {str(key): _plain(item, f"{where}.{key}", root) for key, item in value.items()}
        if len(plain) != len(value):
            raise InputError(f"{where}: two of its keys read the same as text: {list(value)}.")
        return plain
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]", root) for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # scalars and arrays of numpy and torch
        return _plain(value.tolist(), where, root)
    raise InputError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; expected numbers, text, None, lists, "
        f"mappings, arrays or dataclasses."
    )


def _without_folders(text: str, root: Path) -> str:
    """Make paths inside the project relative to it, and cut other absolute or ../ paths to their last component."""

    def shorten(match: re.Match[str]) -> str:
        found, option = match.group(), match["option"] or ""
        if match["url"] and not found.startswith("file://"):
            return found
        path = found.removeprefix("file://").removeprefix(option)
        if not path.startswith(("/", "~")) and ".." not in path.split("/"):
            return found
        full = Path(os.path.realpath(os.path.expanduser(path)))
        inside = full.is_relative_to(root) and root != Path("/")
        return option + (str(full.relative_to(root)) if inside else Path(path).name or path)

    return _PATH_OR_URL.sub(shorten, text)


# --- where the numbers come from ---


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails: no git, no repository, no commit."""
    # Inside a git hook these variables name the hook's repository, and -C does not change that.
    env = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _project() -> Path:
    return Path(os.path.realpath(_git(Path.cwd(), "rev-parse", "--show-toplevel") or Path.cwd()))


@cache
def _commit_of(file: Path) -> str:
    # An installed copy may be in a .venv inside another project, whose commit says nothing about this code.
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return "unknown"
    head = _git(file.parent, "rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    # Runs write to results/: a new row of the ledger must not make the next row dirty.
    changed = _git(file.parent, "status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)results")
    return head if changed == "" else f"{head}+dirty"


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine() or "unknown CPU"
