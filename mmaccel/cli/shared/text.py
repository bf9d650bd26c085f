"""Output of commands: tables, bytes, seconds, reports as text or JSON, progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.files import write_whole
from ...errors import MmaccelError
from .options import STDOUT

if TYPE_CHECKING:
    from rich.console import Console

#: columns off a terminal: more than any table has
_ENDLESS = 10_000
#: columns of a text that people read: off a terminal, and at most on one
_USUAL, _READABLE = 80, 120


def table(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table for standard output, whose first row is the head; columns in ``numbers`` are right-aligned. On a terminal its
    columns fold so that they fit; elsewhere every row is one line."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console()
    look: Any = {"box": SIMPLE_HEAD} if screen.is_terminal else {"box": None, "padding": (0, 2, 0, 0)}
    grid = Table(pad_edge=False, show_edge=False, header_style="bold", **look)
    for number, title in enumerate(rows[0]):
        grid.add_column(title, justify="right" if number in numbers else "left", overflow="fold")
    for row in rows[1:]:
        grid.add_row(*row)
    with screen.capture() as captured:
        screen.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def grouped(groups: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Rows of name, figure and text under the titles of their groups, for standard output: as wide as the terminal, up to 120
    columns, and 80 without one. Long texts fold."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    width = min(screen.width, _READABLE) if screen.is_terminal else _USUAL
    names = max(len(row[0]) for rows in groups.values() for row in rows)
    figures = max(len(row[1]) for rows in groups.values() for row in rows)
    with screen.capture() as captured:
        for number, (title, rows) in enumerate(groups.items()):
            grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
            grid.add_column(width=names, no_wrap=True)
            grid.add_column(width=figures, justify="right", no_wrap=True)
            grid.add_column(overflow="fold")
            for row in rows:
                grid.add_row(*row)
            screen.print(Text(f"{chr(10) * bool(number)}{title}", style="bold"), width=width)
            screen.print(grid, width=width)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def console(error: bool = False) -> Console:
    """A console for standard output or standard error, as wide as the terminal or endless without one."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() else _ENDLESS
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, the head first."""
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


# --- reports ----------------------------------------------------------------------------------------------------------
def json_file(wanted: str | None) -> Path | None:
    """The file that ``--json`` names, if any, checked before a long run. Raises MmaccelError if it cannot be written."""
    if wanted is None or wanted == STDOUT:
        return None
    path = Path(wanted)
    if not path.absolute().parent.is_dir():
        raise MmaccelError(f"The folder {str(path.absolute().parent)!r} does not exist; make it first.")
    if path.is_dir():
        raise MmaccelError(f"--json {wanted!r} is a folder; give the name of a file.")
    return path


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report, whole or not at all."""
    write_whole(path, json.dumps(report, indent=1, default=str).encode() + b"\n")


def tell(report: Mapping[str, Any], wanted: str | None, render: Callable[[], str]) -> None:
    """Print a report as text or, for ``--json`` alone, as JSON; write the file that ``--json`` names."""
    if (path := json_file(wanted)) is not None:
        write_json(path, report)
    show(report, wanted, render)


def show(report: Mapping[str, Any], wanted: str | None, render: Callable[[], str]) -> None:
    """Print a report as text or, for ``--json`` alone, as JSON."""
    print(json.dumps(report, indent=2, default=str) if wanted == STDOUT else render(), flush=True)


# --- long runs --------------------------------------------------------------------------------------------------------
class Bar:
    """A progress bar on a terminal; ``total`` may shrink while it runs."""

    def __init__(self, screen: Console, what: str, total: int | None, done: int) -> None:
        from rich import progress

        self.screen = screen
        columns = [progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False)]
        if total is not None:
            columns += [progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()]
        self.progress = progress.Progress(*columns, console=screen, transient=True)
        self._task, self.total = self.progress.add_task(what, total=total, completed=done), total
        self._part = ""

    def advance(self, count: int = 1) -> None:
        """Count further steps."""
        self.progress.update(self._task, advance=count, total=self.total)

    def part(self, what: str, done: int, of: int) -> None:
        """Show the progress of one part of the work; off a terminal, print a line when a part begins."""
        if self.screen.is_terminal:
            self.progress.update(self._task, description=what, completed=done, total=of)
        elif what != self._part:
            self.say(what)
        self._part = what

    def say(self, sentence: str) -> None:
        """Print a line on standard error, above the bar."""
        self.screen.print(sentence, soft_wrap=True)


@contextmanager
def working(what: str, total: int | None = None, done: int = 0) -> Iterator[Bar]:
    """A progress bar on standard error while the block runs, if that is a terminal."""
    bar = Bar(console(error=True), what, total, done)
    # off a terminal even a disabled bar may print a newline
    with bar.progress if bar.screen.is_terminal else nullcontext():
        yield bar


def put_between(page: Path, name: str, text: str) -> None:
    """Replace the text between the markers ``<!-- NAME -->`` and ``<!-- /NAME -->`` of a Markdown file. Raises
    MmaccelError if the file lacks them."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, start, rest = page.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise MmaccelError(f"{page} has no markers {first} and {last}.")
    page.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")
