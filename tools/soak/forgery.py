"""Forge recordings with valid checksums: odd settings, other tensors, odd headers, and sizes that ask for memory.

    sample, chance -> forge(path) -> the file

What a reader can check by a checksum is right; all else is random. The manifest of a folder of parts lists a forged
file as it is. tests/forge.py writes headers, and tests/attacks/hungry.py files that ask for memory.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from corpus import Sample, is_member

from krnet.errors import InputError, KrnetError
from krnet.io import archive
from krnet.parts.manifest import MANIFEST, MODEL, parse_manifest
from krnet.parts.part import open_part
from krnet.parts.sequences import SEQUENCES, Listed

NUMBERS = (
    0, 1, 2, 3, 7, 8, 16, 255, 256, 4095, 4096, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63,
    2**64, 10**30, -1, -2, -(2**31), -(2**63), 0.5, -0.5, 1e-30, 1e-308, 1e30, 1e308, -1e308,
)  # fmt: skip
TEXTS = (
    "",
    "krnet",
    "paper",
    "compact",
    "images",
    "raw",
    "jpeg",
    "float64",
    "\x1b[2J",
    "\0",
    "\u202e",
    "é" * 300,
    "../x",
)
LISTS = (
    [],
    {},
    [0],
    [1, 2, 3],
    [2**40],
    [[0, 1]],
    [[0, 2**40]],
    {"a": 1},
    [None],
    ["x"],
    [[[]]],
    [0] * 5000,
    [1e308] * 3,
)
TOP = ("num_samples", "shape", "classes", "recorder", "settings", "metrics", "fit", "times")
HEADER_TEXTS = ("NaN", "Infinity", "-0", "1e999", "[" * 3000 + "]" * 3000, '"\\ud800"', "9" * 5000, "true", "{}")
LARGEST = {
    "quantized": 1200, "pca": 60, "transform": 400, "pq": 80, "compact": 100, "without_axes": 200, "paper": 150,
    "autoencoder": 150, "images": 100, "raw": 40, "residual": 1200, "rotation": 1200, "fp8": 40,
    "zfp": 1000, "zstd": 1000,
}  # fmt: skip
# Of the others, one each, of the recorder's name.
MAKERS_OF = {"krnet": ("compact", "without_axes"), "local-search": ("residual",)}
TRIES, UNCHANGED = 20, "unchanged"


def forge(sample: Sample, others: list[Sample], path: Path, chance: random.Random) -> str:
    """Write a forged file; returns the way that it was made, or UNCHANGED if none of TRIES made another file."""
    for _ in range(TRIES):
        way = chance.choices(list(WAYS), [weight for _, weight in WAYS.values()])[0]
        path.write_bytes(sample.content)
        try:
            WAYS[way][0](sample, others, path, chance)
            if chance.random() < 0.2:
                headers(sample, others, path, chance)
        except (InputError, ValueError, KeyError, IndexError, TypeError, OverflowError, RuntimeError, RecursionError):
            continue  # krnet's own writer refuses to write this, or torch to hold it, or no tensor is left: try another
        if path.read_bytes() != sample.content:
            if is_member(path):
                with suppress(KrnetError):  # it is refused before anybody compares it with the manifest
                    relist(path)
            return way
    path.write_bytes(sample.content)
    return UNCHANGED


def relist(path: Path) -> None:
    """Let the manifest beside a file of a folder of parts list it as it is now."""
    beside = path.with_name(MANIFEST)
    manifest, opened = parse_manifest(beside, beside.read_bytes()), archive.open_archive(path)
    if path.name == SEQUENCES:
        assert manifest.sequences is not None, f"{path}: a folder without sequences"
        listed = Listed(manifest.sequences.num_sequences, opened.nbytes, opened.checksum)
        manifest = replace(manifest, sequences=listed)
    elif path.name == MODEL:
        origin = replace(manifest.origin, model=opened.checksum)
        manifest = replace(manifest, model_bytes=opened.nbytes, origin=origin)
    else:
        entry = open_part(path.parent, path.name).entry
        manifest = replace(manifest, parts=tuple(entry if part.name == path.name else part for part in manifest.parts))
    beside.write_text(manifest.to_json())


def contents(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    opened = archive.open_archive(path)
    return copy.deepcopy(opened.metadata), {name: opened.tensor(name) for name in opened.names}


def settings(sample: Sample, others: list[Sample], path: Path, chance: random.Random) -> None:
    """Odd values in the metadata."""
    metadata, tensors = contents(path)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change_value(metadata, chance)
    archive.write(path, tensors, metadata)


def change_value(metadata: dict[str, Any], chance: random.Random) -> None:
    """Replace, remove or add a value anywhere in a tree."""
    place: Any = metadata
    key: Any = chance.choice(TOP) if chance.random() < 0.6 else chance.choice(list(metadata))
    while isinstance(place.get(key) if isinstance(place, dict) else place[key], (dict, list)) and chance.random() < 0.8:
        inner = place[key]
        if not inner:
            break
        place, key = inner, chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    draw = chance.random()
    if draw < 0.1:
        del place[key]
    elif draw < 0.15 and isinstance(place, dict):
        place[chance.choice(TEXTS)] = odd_value(chance)
    else:
        place[key] = near_value(place.get(key) if isinstance(place, dict) else place[key], chance)


def odd_value(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice((*NUMBERS, *NUMBERS, *TEXTS, *LISTS, None, True, False)))


def near_value(value: Any, chance: random.Random) -> Any:
    """A value like the old one, or any other."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and chance.random() < 0.6:
        changes: tuple[Callable[[Any], Any], ...] = (
            lambda v: v + 1, lambda v: v - 1, lambda v: 2 * v, lambda v: v // 2, lambda v: -v, lambda v: 1000 * v,
            lambda v: v / 3, float, lambda v: chance.choice(NUMBERS),
        )  # fmt: skip
        return chance.choice(changes)(value)
    if isinstance(value, list) and value and chance.random() < 0.6:
        return chance.choice((value[::-1], value[1:], [*value, value[0]], value * 3, sorted(value, key=repr)))
    return odd_value(chance)


def values(sample: Sample, others: list[Sample], path: Path, chance: random.Random) -> None:
    """Other numbers in the tensors."""
    metadata, tensors = contents(path)
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(list(tensors))
        tensors[name] = other_numbers(tensors[name], chance)
    archive.write(path, tensors, metadata)


def other_numbers(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    flat = tensor.clone().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0).byte()
    if not len(flat):
        return tensor
    size = tensor.element_size()
    start = chance.randrange(len(flat)) // size * size
    stop = min(len(flat), start + size * chance.choice((1, 1, 4, 100, len(flat))))
    fill = chance.choice((b"\0", b"\xff", b"\x7f", b"\x80", None, None))
    new = chance.randbytes(stop - start) if fill is None else fill * (stop - start)
    flat[start:stop] = torch.frombuffer(bytearray(new), dtype=torch.uint8)
    return flat.view(tensor.dtype).reshape(tensor.shape)


def shapes(sample: Sample, others: list[Sample], path: Path, chance: random.Random) -> None:
    """Tensors of another shape or type, too few, too many, or exchanged."""
    metadata, tensors = contents(path)
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(list(tensors))
        tensor = tensors[name]
        way = chance.randrange(9)
        if way == 0:
            del tensors[name]
        elif way == 1:
            tensors[chance.choice(list(tensors))] = tensor
        elif way == 2:
            tensors[name] = tensor.reshape(-1)[: chance.randrange(tensor.numel() + 1)]
        elif way == 3:
            tensors[name] = torch.cat([tensor.reshape(-1)] * 3)
        elif way == 4:
            tensors[name] = tensor.new_zeros(chance.choice([(), (0,), (1,), (0, 5), (7, 0), (1, 1, 1), (3, 4)]))
        elif way == 5:
            tensors[name] = tensor.reshape(-1).view(torch.uint8)
        elif way == 6:
            types = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool)
            tensors[name] = tensor.to(chance.choice(types))
        elif way == 7:
            tensors[name] = tensor.reshape(*tensor.shape, 1) if chance.random() < 0.5 else tensor.reshape(1, -1)
        else:
            tensors[f"{name}x"] = tensor
    blocks = {name: chance.choice((1, 3, 8, 1000)) for name in tensors if chance.random() < 0.1}
    archive.write(path, tensors, metadata, blocks=blocks)


def exchange(sample: Sample, others: list[Sample], path: Path, chance: random.Random) -> None:
    """Metadata or tensors of another file."""
    metadata, tensors = contents(path)
    other_metadata, other_tensors = contents(chance.choice(others).path)
    for key in chance.sample(list(other_metadata), chance.choice((0, 1, 1, 2))):
        metadata[key] = other_metadata[key]
    for name in chance.sample(list(other_tensors), min(len(other_tensors), chance.choice((1, 2, 100)))):
        if chance.random() < 0.7:
            tensors[name] = other_tensors[name]
    archive.write(path, tensors, metadata)


def headers(sample: Sample, others: list[Sample], path: Path, chance: random.Random) -> None:
    """The header itself: places, types and checksums of tensors, or its text."""
    from forge import read_header, rewrite_header, rewrite_header_text

    if chance.random() < 0.4:
        text = read_header(path)[0].rstrip()
        numbers = [match.span() for match in re.finditer(r"\d+", text) if match.start() > 120]
        begin, end = chance.choice(numbers)
        new = chance.choice((*HEADER_TEXTS, *map(str, NUMBERS)))
        rewrite_header_text(path, text[:begin] + new + text[end:])
        return

    def edit(header: dict[str, Any]) -> None:
        name = chance.choice([name for name in header if name != "__metadata__"])
        entry, key = header[name], chance.choice(("dtype", "shape", "data_offsets", "data_offsets", "all", "fields"))
        if key == "all":
            header[name] = odd_value(chance)
        elif key == "fields":
            fields = header["__metadata__"]
            fields[chance.choice(list(fields)[3:])] = chance.choice((*HEADER_TEXTS, *TEXTS, "[]", "{}", "null", "1"))
        elif key == "dtype":
            entry[key] = chance.choice(
                ("F64", "F32", "F16", "BF16", "I64", "I8", "U64", "U8", "BOOL", "F8", "", 3, None)
            )
        else:
            entry[key] = near_value(entry[key], chance)
            if isinstance(entry[key], list) and entry[key] and chance.random() < 0.5:
                entry[key][chance.randrange(len(entry[key]))] = chance.choice(NUMBERS)

    rewrite_header(path, edit)


def hungry(sample: Sample, others: list[Sample], path: Path, chance: random.Random) -> None:
    """A file of a few kilobytes that asks for memory."""
    from hungry import MAKERS

    name = chance.choice(MAKERS_OF.get(sample.recorder, (sample.recorder,)))
    MAKERS[name](path, max(1, int(LARGEST[name] ** chance.random())))


WAYS = {
    "settings": (settings, 8), "values": (values, 5), "shapes": (shapes, 4), "exchange": (exchange, 2),
    "headers": (headers, 4), "hungry": (hungry, 1),
}  # fmt: skip


def judge(answers: dict[str, Any]) -> str:
    """What is wrong with the answers of a forged file: exceptions that krnet did not raise on purpose."""
    import traceback

    from krnet.errors import KrnetError

    for name, answer in answers.items():
        if isinstance(answer, Exception) and not isinstance(answer, KrnetError):
            where = traceback.extract_tb(answer.__traceback__)
            place = next((f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(where)
                          if "krnet" in frame.filename), "")  # fmt: skip
            return f"raw {type(answer).__name__} of {name} at {place}: {str(answer)[:300]}"
    return ""
