"""Damage the bytes of a file: bit flips, truncation, swapped, repeated and cleared blocks, appended bytes.

    content -> damage -> other content;  judge(answers, those of the whole file) -> a wrong value

A damaged file is refused with a named error, or gives exactly the values that it gave before.
"""

from __future__ import annotations

import random
from typing import Any

BLOCK_BYTES = (1, 8, 64, 512, 4096)


def damage(content: bytes, chance: random.Random) -> bytes:
    """Other bytes than the content."""
    while True:
        made = bytearray(content)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            chance.choice(WAYS)(made, chance)
        if made != content:
            return bytes(made)


def flip_bits(made: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        if made:
            made[_place(made, chance)] ^= 1 << chance.randrange(8)


def truncate(made: bytearray, chance: random.Random) -> None:
    del made[chance.choice((_place(made, chance), max(0, len(made) - 1 - chance.randrange(16)))) :]


def swap_blocks(made: bytearray, chance: random.Random) -> None:
    size = min(chance.choice(BLOCK_BYTES), len(made) // 2)
    first, second = sorted(chance.randrange(len(made) - size + 1) // max(1, size) * size for _ in range(2))
    made[first : first + size], made[second : second + size] = (
        made[second : second + size], made[first : first + size],
    )  # fmt: skip


def repeat_block(made: bytearray, chance: random.Random) -> None:
    start, size = _place(made, chance), chance.choice(BLOCK_BYTES)
    made[start:start] = made[start : start + size]


def cut_block(made: bytearray, chance: random.Random) -> None:
    start = _place(made, chance)
    del made[start : start + chance.choice(BLOCK_BYTES)]


def clear_block(made: bytearray, chance: random.Random) -> None:
    start = _place(made, chance)
    stop = min(len(made), start + chance.choice(BLOCK_BYTES))
    made[start:stop] = chance.choice((bytes(stop - start), b"\xff" * (stop - start), chance.randbytes(stop - start)))


def append_bytes(made: bytearray, chance: random.Random) -> None:
    made += chance.choice((chance.randbytes(chance.choice(BLOCK_BYTES)), bytes(8), bytes(made[:64])))


WAYS = (flip_bits, flip_bits, truncate, swap_blocks, repeat_block, cut_block, clear_block, append_bytes)


def _place(made: bytearray, chance: random.Random) -> int:
    """Often within the header, which says most."""
    end = max(1, len(made))
    return chance.randrange(min(end, 2048)) if chance.random() < 0.4 else chance.randrange(end)


def judge(answers: dict[str, Any], expected: dict[str, Any]) -> str:
    """The wrong value that a damaged file gives; empty if it gives none."""
    if answers.get("verify") is True:
        return "verify finds nothing wrong with it"
    for name, answer in answers.items():
        if not isinstance(answer, Exception) and name in expected and not same(answer, expected[name]):
            return f"a wrong value of {name}: {str(answer)[:300]}"
    return ""


def same(found: Any, expected: Any) -> bool:
    import torch

    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return found.shape == expected.shape and bool(torch.equal(found, expected))
    return bool(found == expected) or repr(found) == repr(expected)  # a number may be NaN
