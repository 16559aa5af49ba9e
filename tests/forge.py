"""Forge recordings whose checksums are right and whose content is not, to test the checks behind them.

    rewrite_header(path, lambda header: header["weights"].update(shape=[10**9]))

Spelled out here rather than with krnet.archive's own functions, so that the tests also check docs/format.md.
"""

import json
import re
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any


def read_header(path: Path) -> tuple[str, bytes]:
    """The header as text, and the data section."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end].decode(), content[end:]


def rewrite_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Let `edit` change the parsed header in place, then write it back with a correct checksum."""
    header = json.loads(read_header(path)[0])
    edit(header)
    rewrite_header_text(path, json.dumps(header, separators=(",", ":")))


def rewrite_header_text(path: Path, text: str) -> None:
    """Put `text` in place of the header, as it is but for padding, length and checksum."""
    data = read_header(path)[1]
    zeroed = re.sub(r'"checksum":"[0-9a-f]{32}"', f'"checksum":"{"0" * 32}"', text, count=1).encode()
    zeroed += b" " * (-(8 + len(zeroed)) % 8)
    head = len(zeroed).to_bytes(8, "little") + zeroed
    checksum = blake2b(head, digest_size=16).hexdigest().encode()
    path.write_bytes(head.replace(b"0" * 32, checksum, 1) + data)


def rewrite_metadata(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Let `edit` change the writer's own metadata, decoded, in place; all else stays, the checksum is made right."""

    def edit_header(header: dict[str, Any]) -> None:
        fields = header["__metadata__"]
        fixed = {key: fields.pop(key) for key in ("format", "version", "checksum", "checksums")}
        own = {key: json.loads(value) for key, value in fields.items()}
        edit(own)
        header["__metadata__"] = fixed | {key: json.dumps(value) for key, value in own.items()}

    rewrite_header(path, edit_header)


def rewrite_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Let `edit` change the manifest in place; its digest is made right, as docs/format.md describes it."""
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    edit(table)
    table.pop("digest", None)
    digest = blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16).hexdigest()
    path.write_text(json.dumps({"digest": digest, **table}))
