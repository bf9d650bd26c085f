"""Tables of results in the documentation: shares with their intervals, and long tables that are folded after a few rows."""

from __future__ import annotations

from collections.abc import Sequence

from mmaccel.cli.shared.measure import percent
from mmaccel.cli.shared.text import markdown
from mmaccel.programs.tune.confidence import interval

#: rows that are always shown
SHOWN = 10


def share(right: int, asked: int) -> str:
    """``98.0% of 200 (95.0 to 99.5)``: a share, of how many, and its exact interval of 95 %."""
    low, high = interval(right, asked)
    return f"{percent(right / asked)} of {asked} ({100 * low:.1f} to {100 * high:.1f})"


def fold(title: str, text: str) -> str:
    """Markdown that a reader opens by a click on its title."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text}\n\n</details>'


def folded(rows: Sequence[Sequence[str]], about: str) -> str:
    """A table, the head first, and what is to be known about it: command, machine and versions.

    The first rows are shown. The others and ``about`` are folded.
    """
    head, *body = rows
    rest = body[SHOWN:]
    if not rest:
        return f"{markdown(rows)}\n\n{fold('Command, machine and versions', about)}"
    title = f"{len(rest)} more rows; command, machine and versions"
    return f"{markdown(rows[: SHOWN + 1])}\n\n{fold(title, markdown([head, *rest]) + f'{chr(10) * 2}{about}')}"
