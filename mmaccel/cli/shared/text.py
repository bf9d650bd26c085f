"""Figures for readers: tables, bytes, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import MmaccelError


def table(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Columns as wide as they must be, the first row being the head; columns in ``numbers`` are set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(w) if i in numbers else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * w for w in widths), *map(line, rows[1:])])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def nbytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds(value: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def put_between(page: Path, name: str, text: str) -> None:
    """Replace what stands between the markers ``<!-- NAME -->`` and ``<!-- /NAME -->`` of a Markdown file.

    Raises
    ------
    MmaccelError
        If the file lacks them.
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, start, rest = page.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise MmaccelError(f"{page} has no markers {first} and {last}.")
    page.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")
