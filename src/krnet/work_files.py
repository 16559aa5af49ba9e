"""The files of a run's work: a piece that is finished is read from its file, not run again.

    Work -> run_or_load -> DIR/task-T-N.done, and a copy that runs with the same base task share
         <- its result, from whichever file is there

Processes that want the same shared work wait for the one that does it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from krnet.errors import RecordingError
from krnet.io import archive, ledger
from krnet.io.atomic import make_folder
from krnet.io.lock import making
from krnet.learners import base
from krnet.progress import Progress, Watch
from krnet.train.classifier import Saving

UNKNOWN_COMMIT = "unknown"  # of files that an earlier version of krnet wrote


def run_or_load(
    work: base.Work, saving: Saving, done: Path, shared_file: Path | None, watch: Watch | None
) -> tuple[float, str]:
    """Run the work, or load its result if a file has it.

    Returns the seconds that it took before this process, less those of waiting for another one, and the commit of the
    code that finished it.
    """
    asked = time.perf_counter()
    is_done = saving.resume and done.exists()
    must_make = shared_file is not None and not is_done and not shared_file.exists()
    # Another process may be training the same base task: wait for its file.
    with making(shared_file) if must_make and shared_file else nullcontext():
        waited_s = time.perf_counter() - asked
        earlier_s, commit = _run_or_load_now(work, saving, done, shared_file, watch)
    return earlier_s - waited_s, commit


def _run_or_load_now(
    work: base.Work, saving: Saving, done: Path, shared_file: Path | None, watch: Watch | None
) -> tuple[float, str]:
    sources = ([done] if saving.resume else []) + ([shared_file] if shared_file is not None else [])
    source = next((path for path in sources if path.exists()), None)
    if source is not None:
        saved = archive.open_archive(source)
        work.take(saved.tensors())
        earlier_s = seconds = float(saved.metadata.get("seconds", 0.0))  # old files lack it
        commit = str(saved.metadata.get("commit", UNKNOWN_COMMIT))
    else:
        earlier_s = _saved_time_s(work, saving.path) if saving.resume else 0.0
        run_started = time.perf_counter()
        work.run(saving, watch)
        seconds, commit = time.perf_counter() - run_started + earlier_s, ledger.commit()
    targets = [] if shared_file is None or shared_file.exists() else [shared_file]
    # Also keep a copy in this run's folder: another process may train the same base task and replace the shared file.
    targets += [done] if source != done else []
    for target in targets:
        make_folder(target.parent)
        metadata = {"kind": "work", "settings": work.shared or {}, "seconds": seconds, "commit": commit}
        archive.write(target, work.result(), metadata)
    return earlier_s, commit


def shared_path(work: base.Work, shared: Path | None) -> Path | None:
    """The file in the folder of base tasks where runs look for this work; None if they do not share it."""
    return None if shared is None or work.shared is None else shared / f"base-{digest_of(work.shared)}.krn"


def digest_of(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=list).encode()).hexdigest()[:16]


def watch_work(watch: Watch | None, name: str, epochs: int | None) -> Watch | None:
    """Tell that a piece of work begins, and return the watcher of its results."""
    if watch is None:
        return None
    watch(Progress(name))

    def tell(progress: Progress) -> None:
        epoch = {} if epochs is None else {"epoch": round((progress.share or 0.0) * epochs, 1)}
        full_name = name if progress.share is not None else f"{name}, {progress.name}"  # an announcement
        watch(replace(progress, name=full_name, values={**epoch, **progress.values}))

    return tell


def _saved_time_s(work: base.Work, partial: Path) -> float:
    """Seconds that interrupted work has taken, as its checkpoint or its finished recording says; 0 if there is none."""
    recording: Path | None = getattr(work, "path", None)
    paths = [partial] if recording is None else [recording, recording.with_name(f"{recording.name}.ckpt")]
    for path in paths:
        if path.exists():
            try:
                metadata = archive.open_archive(path).metadata
            except RecordingError:
                return 0.0  # the code that needs the file will report the error
            return float(metadata.get("seconds") or metadata.get("times", {}).get("fit_seconds", 0.0))
    return 0.0
