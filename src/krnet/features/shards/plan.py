"""Decide which samples a call writes to a folder of shards: its share, without those that are there.

    Plan (what the caller wants), Finished (what is there), images -> make_task -> Task: rows to do, shards done

Rows count from the first image; sample IDs from the first sample of the folder: ID = first_id + row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from krnet.config import check_int
from krnet.errors import InputError, ResumeError, SettingError
from krnet.features.shards.folder import Finished
from krnet.features.shards.index import make_index
from krnet.features.shards.ranges import Range, missing, text
from krnet.features.shards.shard import MAX_SAMPLES, Entry
from krnet.io.places import Place

OTHERWISE = "choose another folder, or remove its shards to start anew"


@dataclass(frozen=True)
class Plan:
    """What the caller asks for."""

    folder: Place
    shard_bytes: int
    """Size of a shard, at most; a single sample may take more."""
    first_id: int | str = 0
    """Sample ID of the first image; "end" for the first one that the folder does not hold."""
    share: tuple[int, int] = (0, 1)
    """(k, n): this call makes part k of n, counted from 0."""
    resume: bool = False

    def __post_init__(self) -> None:
        check_int("shard_size", self.shard_bytes, 1)
        if self.first_id != "end":
            check_int("first_id", self.first_id, 0)
        if not isinstance(self.share, tuple) or len(self.share) != 2:
            raise SettingError(f"share is {self.share!r:.99}; expected (k, n): part k of n, counted from 0")
        number, count = self.share
        check_int("share", number, 0)
        check_int("share", count, 1)
        if number >= count:
            raise SettingError(f"share is {number}/{count}; expected a part 0 .. {count - 1} of {count}")


@dataclass(frozen=True)
class Task:
    """What the call has to do."""

    first_id: int
    todo: list[Range]
    """Rows that no shard holds."""
    done: list[Entry]
    """Shards that hold others of its rows."""
    num_rows: int
    """Rows that are its own."""

    def rows(self, entry: Entry) -> Range:
        start, stop = entry.range
        return start - self.first_id, stop - self.first_id

    def until(self, stop: int) -> Task:
        """The task with the number of rows, which may have been unknown before."""
        todo = [(a, min(b, stop)) for a, b in self.todo if a < stop]
        return replace(self, todo=todo, num_rows=min(stop, self.num_rows))

    def done_in(self, first: int, stop: int) -> list[Entry]:
        """The shards that hold some of rows first .. stop - 1."""
        return [entry for entry in self.done if overlap(self.rows(entry), (first, stop))]


def overlap(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def first_id_of(plan: Plan, there: Finished) -> int:
    """Sample ID of the first image."""
    if isinstance(plan.first_id, int):
        return plan.first_id
    begins = ", ".join(str(first) for first, _ in sorted(there.runs, key=lambda run: run[0]))
    if plan.resume:
        raise InputError(
            f"{plan.folder}: first_id is end, and resume is given: it may be that some of these samples are there "
            f"already. Give the sample ID that the stopped call began with (in this folder, calls began with "
            f"{begins or 'none'})"
        )
    if there.origin is None:
        return 0
    return make_index(plan.folder, there.origin, there.runs, there.shards).check_complete(plan.folder)


def share_of(share: tuple[int, int], num_samples: int, shard_rows: int) -> Range:
    """The rows of part k of n: whole shards, so that these are the same for any number of parts."""
    number, count = share
    num_shards = ceil(num_samples / shard_rows)
    start, stop = (num_shards * part // count * shard_rows for part in (number, number + 1))
    return min(start, num_samples), min(stop, num_samples)


def make_task(plan: Plan, there: Finished, num_samples: int | None, own: Range | None) -> Task:
    """own: the rows of the call's share; None if it has all."""
    first_id = first_id_of(plan, there)
    end = MAX_SAMPLES - first_id if num_samples is None else num_samples
    if end > MAX_SAMPLES - first_id:
        raise InputError(f"{plan.folder}: {end} samples from {first_id} on; IDs end at {MAX_SAMPLES - 1}")
    _check_runs(plan, there, first_id, num_samples)
    start, stop = (0, end) if own is None else own
    ids = first_id + start, first_id + stop
    done = [entry for entry in there.shards if overlap(entry.range, ids)]
    if done and not plan.resume:
        raise InputError(
            f"{plan.folder}: holds samples {text(entry.range for entry in done)} already. To go on where an earlier "
            f"call stopped, give --resume (in Python, resume=True); to add more samples, --first-id end "
            f'(first_id="end"); or choose another folder'
        )
    todo = [(a - first_id, b - first_id) for a, b in missing(*ids, [entry.range for entry in done])]
    return Task(first_id, todo, done, stop - start)


def _check_runs(plan: Plan, there: Finished, first_id: int, num_samples: int | None) -> None:
    """Refuse images that are others than those of the call that is taken up, or whose IDs belong to another call."""
    stop = MAX_SAMPLES if num_samples is None else first_id + num_samples
    for first, number in sorted(there.runs, key=lambda run: run[0]):
        if first == first_id:
            if number is not None and num_samples is not None and number != num_samples:
                raise ResumeError(
                    f"{plan.folder}: samples {first}..{first + number - 1} are those of {number} images; there are "
                    f"{num_samples} images. Give the images of the first call, or {OTHERWISE}"
                )
        elif overlap((first, MAX_SAMPLES if number is None else first + number), (first_id, stop)):
            raise InputError(
                f"{plan.folder}: sample {max(first, first_id)} belongs to the call that began with sample {first}, and "
                f"would belong to this one, which begins with {first_id}. Give the first_id that follows on, or finish "
                f"that call with resume"
            )
