"""Tiny recordings of every recorder, and what each gives back: what the damaged and the forged files are made from.

tests/golden (files of earlier versions), fresh recordings, each file of a folder of parts -> [Sample, ...]

A file's answers are its info, its labels, its lengths of sequences, one sample, all samples and the outcome of
`verify`. A file of a folder of parts is asked as a part of it: the folder is opened.
"""

from __future__ import annotations

import io
import shutil
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "attacks")]  # forge.py, hungry.py and golden/small.py

IN_PARTS = "in-parts"  # what names of folders of parts end in
MOST_VALUES = 1 << 20  # replayed of one file: a forged one may hold any number of samples
COMPACT = {"step": 0.25, "components": 6, "c1": 8, "blocks": 1, "iterations": 10}
FRESH: dict[str, dict[str, Any]] = {
    "krnet": COMPACT, "pca": {"step": 0.15}, "pq": {"parts": 2, "bits": 4}, "quantized": {"step": 0.1},
    "transform": {"step": 0.15}, "raw": {}, "rotation": {"levels": 5}, "fp8": {}, "residual": {"books": 3, "bits": 4},
    "local-search": {"books": 2, "bits": 4, "rounds": 1, "train_rounds": 2}, "zfp": {}, "zstd": {},
    "paper": {"d0": 8, "c0": 4, "c1": 4, "iterations": 10, "bits": 4},
    "autoencoder": {"d0": 8, "c0": 4, "c1": 4, "iterations": 10, "code_bits": 4, "weight_bits": 4},
}  # fmt: skip


@dataclass
class Sample:
    """A recording that is to be damaged or forged."""

    recorder: str
    path: Path
    content: bytes
    answers: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What its results are counted under: the recorder, or which file of a folder of parts it is."""
        return f"{IN_PARTS} {self.path.stem.partition('-')[0]}" if is_member(self.path) else self.recorder


def is_member(path: Path) -> bool:
    """Whether a file belongs to a folder of parts."""
    return path.parent.name.endswith(IN_PARTS)


def place(sample: Sample, folder: Path, kind: str) -> tuple[Path, list[str]]:
    """Where a hostile file is written, and what is kept of it; one of a folder of parts lies in a copy of that."""
    path = folder / f"{kind}.krn"
    if not is_member(sample.path):
        return path, [str(path), str(sample.path)]
    copied = folder / f"{kind}-{IN_PARTS}"
    shutil.copytree(sample.path.parent, copied, dirs_exist_ok=True)
    return copied / sample.path.name, [str(copied), str(sample.path.parent)]


def kept(case: Path, kind: str, name: str) -> tuple[Path, list[Path]]:
    """The hostile file of a kept case, and the files that it was made from."""
    if name.startswith(IN_PARTS):
        members = f"{name.split()[-1]}*.krn"
        return next((case / f"{kind}-{IN_PARTS}").glob(members)), list((case / IN_PARTS).glob(members))
    path = case / f"{kind}.krn"
    return path, [other for other in case.glob("*.krn") if other != path]


def paths(folder: Path) -> list[Path]:
    """The fresh recordings in a folder, the files of its folder of parts, and the golden files."""
    return [
        *sorted(folder.glob("*.krn")),
        *sorted(folder.glob(f"{IN_PARTS}/*.krn")),
        *sorted((TESTS / "golden").glob("*.krn")),
    ]


def make(folder: Path) -> None:
    """Write a fresh recording of every recorder, and a folder of parts with sequences."""
    import torch

    import krnet
    from golden import small
    from krnet.recorders.base import get_recorder

    folder.mkdir(parents=True)
    features, labels = small.maps(40)
    usable = [name for name in FRESH if get_recorder(name).is_usable]  # the others' packages are missing
    for name, settings in [(name, FRESH[name]) for name in usable]:
        krnet.record(features, labels, recorder=name, out=folder / f"{name}.krn", device="cpu", **settings)
    krnet.encode(folder / "pca.krn", features, labels, lengths=[5, 0, 30, 5], out=folder / IN_PARTS, device="cpu")
    images, trunk = small.pictures(40), small.make_trunk()
    with torch.inference_mode():
        made = trunk((images.float() / 255 - torch.tensor(small.MEAN)[:, None, None])
                     / torch.tensor(small.STD)[:, None, None])  # fmt: skip
    out = folder / "images.krn"
    krnet.record(made, labels, out=out, images=images, trunk=trunk, device="cpu", codec="webp", **small.IMAGES)


def load(chosen: list[Path]) -> list[Sample]:
    """Read the recordings and their answers."""
    samples = []
    for path in chosen:
        answers = ask(path)
        assert all(not isinstance(answer, Exception) for answer in answers.values()), (path, answers)
        samples.append(Sample(answers["info"]["recorder"], path, path.read_bytes(), answers))
    return samples


_trunks: list[Any] = []


def trunk() -> Any:
    """The network that the recordings of images were made with."""
    from golden import small

    if not _trunks:
        _trunks.append(small.make_trunk())
    return _trunks[0]


def _open(path: Path) -> Any:
    import krnet

    if path.is_dir():
        return krnet.open(path)
    try:
        return krnet.open(path, trunk=trunk())
    except krnet.errors.InputError:  # a recorder that needs no trunk
        return krnet.open(path)


def ask(path: Path) -> dict[str, Any]:
    """All answers of a file; instead of an answer, the exception that was raised for it."""
    import krnet

    answers: dict[str, Any] = {}
    path = path.parent if is_member(path) else path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            needs_trunk = _ask_recording(answers, path)
        except Exception as error:
            return {"open": error}
        # The recording is closed by now: the rule of memory is for each use of a file.
        _try(answers, "verify", lambda: krnet.verify(path, trunk=trunk() if needs_trunk else None)["ok"])
    return answers


def _ask_recording(answers: dict[str, Any], path: Path) -> bool:
    """Open the file and add its answers; returns whether its recorder needs a trunk."""
    recording = _open(path)
    _try(answers, "info", recording.info)
    _try(answers, "printed", lambda: _print_info(recording))
    _try(answers, "labels", lambda: recording.labels)
    _try(answers, "lengths", lambda: recording.lengths)
    _try(answers, "one", lambda: recording[len(recording) // 2])
    _try(answers, "all", lambda: recording.replay(_ids(recording)))
    return bool(recording.recorder == "images")


def _try(answers: dict[str, Any], name: str, action: Any) -> Any:
    try:
        answers[name] = action()
    except Exception as error:  # every kind: the caller tells named ones from others
        traceback.clear_frames(error.__traceback__)  # they hold what was decoded
        answers[name] = error
        return None
    return answers[name]


def _print_info(recording: Any) -> str:
    """What `krnet info` prints, as a table and as JSON."""
    from krnet.cli import output, recording_rows

    summary = {"path": "x.krn", **recording.info()}
    with redirect_stdout(io.StringIO()) as printed:
        output.show(summary, recording_rows.info_rows(summary), False)
        output.show(summary, [], True)
    return printed.getvalue()


def _ids(recording: Any) -> list[int]:
    """All samples, or as many of them as have MOST_VALUES values."""
    num_values = 1
    for size in recording.shape:
        num_values *= max(1, size)
    number = max(1, min(len(recording), MOST_VALUES // num_values))
    return [index * len(recording) // number for index in range(number)]
