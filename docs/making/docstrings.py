"""Docstrings as Markdown: sections, lists of names and their meanings, examples, and roles, as the code of this project writes
them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

try:
    from griffe import Extension
except ImportError:  # tests and tables of methods do without the builder of the site
    Extension = object

#: ``name, other : meaning``, its continuation indented
ENTRY = re.compile(r"^((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*) : (.*)$")
SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}$", re.M)
#: a prompt of Python, and all lines up to the next empty one
EXAMPLE = re.compile(r"^(>>> .*(?:\n.+)*)", re.M)


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    parts = EXAMPLE.split(inspect.cleandoc(text))
    made = [f"```pycon\n{part}\n```" if at % 2 else prose(part) for at, part in enumerate(parts)]
    return "\n\n".join(part for part in made if part)


def prose(text: str) -> str:
    """What stands between the examples of a docstring, as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda found: f"`{found[1].rsplit('.', 1)[-1]}`", text.strip("\n"))
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    head, *sections = re.split(SECTION, text)
    parts = ["\n".join(listed(head.rstrip().splitlines()))]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        lines = body.strip("\n").splitlines()
        parts.append(f"**{title}**\n\n" + "\n".join(listed(lines, title in ("Raises", "Warns"))))
    return "\n\n".join(part.rstrip() for part in parts if part)


def listed(lines: list[str], alone: bool = False) -> Iterator[str]:
    """The lines with every entry as an item of a list; ``alone``: a name stands alone on its line."""
    inside = False
    for at, line in enumerate(lines):
        entry = ENTRY.match(line)
        named = alone and re.fullmatch(r"\w+", line) and lines[at + 1 : at + 2] and lines[at + 1].startswith(" ")
        if entry or named:
            if not inside and at and lines[at - 1].strip():
                yield ""
            names, meaning = (entry[1], entry[2]) if entry else (line, "")
            yield f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {meaning}"
            inside = True
        elif inside and line and not line.startswith(" "):
            inside = False
            if lines[at - 1].strip():
                yield ""
            yield line
        elif inside:
            yield re.sub(r"^ {4}", "  ", line)
        else:
            yield line


class Markdown(Extension):  # type: ignore[misc, valid-type]
    """Gives the builder of the API's pages docstrings as Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called for everything that is documented."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
