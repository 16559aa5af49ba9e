"""Compare two folders that tools/compare_run.py wrote, exactly; names of folders, times and versions aside.

    A/CASE, B/CASE -> a table: case, equal or what differs; exit code 1 if anything does

Of every .krn file: the names, types, shapes and bytes of all tensors in their order, the metadata, and, of recordings,
the size. Of JSON files: all values but times, versions and the name of a recorder. Files are read here, without krnet:
what is wrong with its reader cannot hide a difference.

    python tools/compare_results.py A B
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTAINER = {"format", "checksum", "checksums"}  # checksums of tensors are compared by what they are of
TIMES = {"times", "versions", "commits"}  # metadata, and keys of run.json, that no two runs have in common
POINT = ("budget", "over_budget", "bytes", "bytes_per_sample", "bits_per_value", "mse", "r2", "replay_accuracy")
RATE = ("num_samples", "shape", "feature_bytes", "digest", "real_accuracy", "budgets", "iterations", "seed", "errors")
SHOWN = 3  # differences of a case that the table names


def read_krn(path: Path) -> tuple[dict[str, tuple[Any, bytes]], dict[str, Any]]:
    """Tensors in the order of their bytes, as (type and shape, bytes), and the metadata."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    table = json.loads(content[8:begin])
    fields = {name: text for name, text in table.pop("__metadata__").items() if name not in CONTAINER}
    entries = sorted(table.items(), key=lambda item: item[1]["data_offsets"])
    tensors = {}
    for name, entry in entries:
        first, last = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"]), content[begin + first : begin + last]
    return tensors, {name: json.loads(text) for name, text in fields.items()}


def values(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Where two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(name for name in b if name not in a)]:
            place = f"{where}.{name}" if where else name
            if name not in a or name not in b:
                yield f"{place} only in {'A' if name in a else 'B'}"
            else:
                yield from values(a[name], b[name], place)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b)):
            yield from values(*pair, f"{where}[{index}]")
    elif type(a) is not type(b) or a != b:
        yield f"{where}: {a!s:.60} and {b!s:.60}"


def archives(a: Path, b: Path) -> Iterator[str]:
    (tensors_a, meta_a), (tensors_b, meta_b) = read_krn(a), read_krn(b)
    if list(tensors_a) != list(tensors_b):
        missing = sorted(tensors_a.keys() ^ tensors_b.keys())
        yield f"{a.name}: tensors {', '.join(missing)} in one only" if missing else f"{a.name}: order of tensors"
    for name in (name for name in tensors_a if name in tensors_b):
        (kind_a, bytes_a), (kind_b, bytes_b) = tensors_a[name], tensors_b[name]
        if kind_a != kind_b:
            yield f"{a.name}: tensor {name} {kind_a} and {kind_b}"
        elif bytes_a != bytes_b:
            count = sum(x != y for x, y in zip(bytes_a, bytes_b))
            yield f"{a.name}: tensor {name}, {count} of {len(bytes_a)} bytes"
    yield from (f"{a.name}: {text}" for text in values(comparable(meta_a), comparable(meta_b)))
    # Other files hold times as text, which is now longer and now shorter.
    if meta_a.get("kind") == "recording" and a.stat().st_size != b.stat().st_size:
        yield f"{a.name}: {a.stat().st_size} and {b.stat().st_size} bytes"


def comparable(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata without what differs between any two runs."""
    kept = {name: value for name, value in metadata.items() if name not in TIMES and "seconds" not in name}
    if isinstance(kept.get("fit"), dict) and kept["fit"].get("start") is not None:
        kept["fit"] = {**kept["fit"], "start": "(a checksum, of times too)"}
    return kept


def runs(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """Two run.json files; the recorder's name, and whether its settings are text or a dict, may differ."""
    pair = [comparable(run) for run in (a, b)]
    for run in pair:
        run["settings"] = {name: value for name, value in run["settings"].items() if name != "recorder"}
        own = run["settings"].get("recorder_settings")
        if isinstance(own, dict):
            run["settings"]["recorder_settings"] = ",".join(f"{name}={value}" for name, value in own.items())
    yield from values(*pair)


def rates(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """Two rate.json files, point by point in their order."""
    yield from values({name: a.get(name) for name in RATE}, {name: b.get(name) for name in RATE})
    points = [[{name: p[name] for name in POINT} | {"settings": p["settings"]} for p in x["points"]] for x in (a, b)]
    yield from values(*points, "points") if len(points[0]) == len(points[1]) else ["number of points"]
    if not points[0]:
        yield "there are no points"


def files_of(folder: Path) -> dict[str, Path]:
    """What is to be compared, by its path; points of a bench are named after their recorders, and come by number."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in (".krn", ".safetensors", ".json", ".npy")]
    return {
        path.relative_to(folder).as_posix(): path
        for path in found
        if path.parent.name != "points" and path.name not in ("settings.json", "features.json")
    }


def compare_case(a: Path, b: Path) -> Iterator[str]:
    for side, folder in (("A", a), ("B", b)):
        if not folder.is_dir():
            yield f"missing in {side}"
            return
        if (folder / "error.txt").exists():
            yield f"failed in {side}: {(folder / 'error.txt').read_text().strip().splitlines()[-1]:.300}"
    files_a, files_b = files_of(a), files_of(b)
    if not files_a:
        yield "nothing to compare"
    for name in sorted(files_a.keys() | files_b.keys()):
        if name not in files_a or name not in files_b:
            yield f"{name} only in {'A' if name in files_a else 'B'}"
        elif name.endswith(".krn"):
            yield from archives(files_a[name], files_b[name])
        elif name.endswith(".json"):
            compare = {"run.json": runs, "rate.json": rates}.get(name, values)
            loaded = (json.loads(path.read_text()) for path in (files_a[name], files_b[name]))
            yield from (f"{name}: {text}" for text in compare(*loaded))
        elif files_a[name].read_bytes() != files_b[name].read_bytes():
            yield f"{name}: other bytes"
    yield from compare_points(a / "points", b / "points")


def compare_points(a: Path, b: Path) -> Iterator[str]:
    """Recordings of a bench, in the order of its points, whatever they are called."""
    if not (a.is_dir() and b.is_dir()):
        return
    orders = [[point["file"] for point in json.loads((x.parent / "rate.json").read_text())["points"]] for x in (a, b)]
    for file_a, file_b in zip(*orders):
        yield from archives(a.parent / file_a, b.parent / file_b)


def main() -> int:
    a, b = map(Path, sys.argv[1:3])
    names = sorted({path.name for folder in (a, b) for path in folder.iterdir() if path.is_dir()} - {"shared"})
    width, different = max(map(len, names), default=0), 0
    for name in names:
        found = list(compare_case(a / name, b / name))
        different += bool(found)
        more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        print(f"{name:{width}}  {'; '.join(found[:SHOWN] + more) if found else 'equal'}")
    print(f"{len(names)} cases: {len(names) - different} equal, {different} not" if names else "no cases")
    return int(different > 0 or not names)


if __name__ == "__main__":
    sys.exit(main())
