"""Fit a recorder and make the contents of its file: the best within a budget, or the smallest that reach an R2.

Job, budget    -> contents_within   -> tensors and metadata of the file
Job, target R2 -> smallest_reaching -> likewise, of the last of a few whole fits
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from krnet.coding.search import smallest_file_reaching
from krnet.config import format_size
from krnet.errors import BudgetError
from krnet.io import archive
from krnet.progress import Watch, announcing
from krnet.recorders.base import Job, Recorder
from krnet.recording_file import FileContents, check_size, file_contents, fit
from krnet.team import team

FIT_NOISE = 0.01  # relative difference between the errors of two trained networks of almost the same size


def contents_within(
    job: Job, recorder: Recorder, path: Path, budget: int | None, max_bytes: int | None
) -> FileContents | None:
    """What the file at `path` will hold; None in a process of a team that does not write it.

    budget     bytes that settings are chosen for; None: the job's settings decide the size
    max_bytes  the largest size that the file may have; None for any. A default budget is an aim, and no limit
    """
    if budget is not None:
        announcing(job.watch)("choosing settings for the budget")
        job = with_budget(job, recorder, budget)
    if max_bytes is not None:
        _check_least_size(path, recorder, job, max_bytes)
    content = fit(recorder, job)
    if not team().is_first:
        return None
    tensors, metadata = file_contents(job, recorder, content)
    if budget is not None:
        metadata["fit"]["budget"] = budget
    if max_bytes is not None:
        check_size(path, metadata, archive.file_bytes(tensors, metadata), max_bytes, recorder)
    return tensors, metadata


def smallest_reaching(job: Job, recorder: Recorder, target: float) -> FileContents:
    """Return tensors and metadata of the smallest file that reaches an R2, or of the best where none does."""
    announcing(job.watch)("choosing settings for the first fit")
    # The latest result, by its settings: two budgets may lead to the same settings, which are then fitted once.
    latest: dict[str, tuple[int, float, FileContents]] = {}
    results: list[str] = []  # "R2 ... in ..." of each fit, for the progress display

    def make(budget: int) -> tuple[int, float, FileContents]:
        planned = with_budget(job, recorder, budget)
        key = repr(sorted(planned.settings.items()))
        if key not in latest:
            latest.clear()
            label = " after ".join([f"fit {len(results) + 1}: {format_size(budget)}", *results[-1:]])
            watch = _rename(job.watch, label) if job.watch else None
            fit_job = replace(planned, checkpoint=None, resume=False, watch=watch)
            tensors, metadata = file_contents(fit_job, recorder, fit(recorder, fit_job))
            num_bytes, r2 = archive.file_bytes(tensors, metadata), metadata["metrics"]["r2"]
            results.append(f"R2 {r2:.4f} in {format_size(num_bytes)}")
            latest[key] = num_bytes, r2, (tensors, metadata)
        return latest[key]

    return smallest_file_reaching(
        target,
        make,
        feature_bytes=4 * job.stats.count,
        guess=recorder.likely_bytes(job, target),
        noise=FIT_NOISE if recorder.trains else 0.0,
    )


def with_budget(job: Job, recorder: Recorder, budget: int) -> Job:
    """The job with the settings that the recorder chooses for a budget; those that are given stay."""
    found = recorder.for_budget(job, budget)
    return replace(job, settings={**found, **job.settings}, chosen=frozenset(found) - frozenset(job.settings))


def _rename(watch: Watch, name: str) -> Watch:
    return lambda progress: watch(replace(progress, name=name) if progress.unit == "iterations" else progress)


def _check_least_size(path: Path, recorder: Recorder, job: Job, budget: int) -> None:
    """Refuse a budget that no file with these settings can meet, before the fit."""
    least, enough = recorder.smallest_bytes(job)
    if least > budget:
        error = BudgetError(
            f"{path}: needs a budget of more than {enough} bytes with recorder {recorder.name}, whatever the features "
            f"are; the budget is {budget}. Nothing was fitted or written. Raise the budget, leave out settings of your "
            f"own if there are any, or take another recorder"
        )
        error.needed = enough
        raise error
