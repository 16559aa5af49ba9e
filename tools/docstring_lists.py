"""Prepare krnet's docstrings for the API page: an extension of griffe, which mkdocstrings reads docstrings with.

    name   text of an argument,
           over several lines       ->     | `name` | text of an argument, over several lines |

Lists of arguments become tables, and examples (>>>) become blocks of code. mkdocs.yml names this file.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"^(\S[^\n]*?) {2,}(\S.*)$")


def as_table(lines: list[str]) -> list[str] | None:
    """A paragraph as a table; None if it is not a list of "name  text"."""
    if not ITEM.match(lines[0]):
        return None
    items: list[tuple[str, list[str]]] = []
    for line in lines:
        found = ITEM.match(line)
        if found:
            names = ", ".join(f"`{name.strip()}`" for name in found[1].split(","))
            items.append((names, [found[2]]))
        elif line.startswith(" "):
            items[-1][1].append(line.strip())
        else:
            return None
    rows = [(names, " ".join(texts).replace("|", "\\|")) for names, texts in items]
    return ["| name | meaning |", "|---|---|", *(f"| {names} | {text} |" for names, text in rows), ""]


def prepare(text: str) -> str:
    """Rewrite a docstring paragraph by paragraph; drawings, which are indented, stay as they are."""
    result: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        if lines[0].startswith(">>>"):
            result += ["```pycon", *lines, "```", ""]
        else:
            result += as_table(lines) or [*lines, ""]
    return "\n".join(result).strip()


class DocstringLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = prepare(obj.docstring.value)
