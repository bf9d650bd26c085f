"""Pages of results: figures come from the files of results, and every question has an answer, its evidence and its gaps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tables
from test_documents import FENCE

from mmaccel.errors import MmaccelError
from mmaccel.recipe import Recipe, get_recipe

FOLDER = tables.ROOT / "docs" / "results"
MARKED = sorted(page for page in FOLDER.glob("*.md") if "<!-- /" in page.read_text(encoding="utf-8"))
MADE = re.compile(r"<!-- ([\w-]+) .*?<!-- /\1 -->|<!-- ([\w-]+) -->.*?<!-- /\2 -->", re.S)


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.stem)
def test_tables_say_what_the_files_say(page: Path) -> None:
    """``python docs/making/tables.py`` would change nothing."""
    text = page.read_text(encoding="utf-8")
    assert tables.with_rows(page) == text
    for name in re.findall(r"<!-- ([\w-]+) -->", text):
        if tables.maker(name):
            assert f"<!-- {name} -->\n{tables.result_table(name)}\n<!-- /{name} -->" in text, name


def test_the_overview_leads_to_every_question() -> None:
    assert f"<!-- questions -->\n{tables.question_table()}\n<!-- /questions -->" in text_of("index")
    assert len(tables.QUESTIONS) == 9


@pytest.mark.parametrize("name", tables.QUESTIONS)
def test_a_question_is_answered_at_once(name: str) -> None:
    """By a recipe that exists, then come evidence of both kinds of models, what is not known, and a command."""
    text = text_of(name)
    answer = text.split("\n\n")[1]
    calls = re.findall(r"`(accelerate_vlm\([^`]*\))`", answer)
    for call in calls:
        made = eval(
            call, {"model": None, "accelerate_vlm": lambda _, name="balanced", **more: get_recipe(name, **more)}
        )
        assert isinstance(made, Recipe)
    assert calls or "`divprune`" in answer
    for title in ("The shipped models", "The real language model", "What no one has measured"):
        assert f"\n## {title}\n" in text
    assert re.search("<!-- rows of (answers-|towers|cache-speed)", text)
    assert "<!-- rows of pages: " in text or name in ("many-pictures", "many-users")
    assert "```bash\nmmaccel " in text.split("## What no one has measured")[1]


@pytest.mark.parametrize("name", tables.QUESTIONS)
def test_no_figure_is_typed(name: str) -> None:
    """Figures stand in tables that are made; outside of them only code has digits."""
    text = MADE.sub("", FENCE.sub("", text_of(name)))
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    assert not re.search(r"\d", text), re.findall(r".*\d.*", text)


def test_rows_are_found_in_folded_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the table, also behind the fold, with the columns of a second table of the same rows."""
    folded = "| a | n |\n|---|---|\n| `b:1` | 2 |\n| `b` 2 | 3 |\n\n| a | z |\n|---|---|\n| `b:1` | 9 |"
    monkeypatch.setattr(
        tables, "result_table", lambda name: f"| a | n |\n|---|---|\n| `c` | 1 |\n\n<details>\n\n{folded}\n\n</details>"
    )
    made = tables.excerpt("x", ["b:1", "c"], ["a", "z", "n"])
    assert made.splitlines()[2:] == ["| `c` |  | 1 |", "| `b:1` | 9 | 2 |"]
    assert tables.excerpt("x", ["b"], ["n"]).splitlines()[2:] == ["| 3 |"]
    with pytest.raises(MmaccelError, match="no rows that begin with d"):
        tables.excerpt("x", ["c", "d"], ["n"])
    with pytest.raises(MmaccelError, match="no columns m"):
        tables.excerpt("x", ["c"], ["m"])


def test_a_long_table_is_folded_best_first() -> None:
    import folding

    rows = [["recipe", "n"], *([f"r{at}", str(at)] for at in range(12))]
    text = folding.folded(rows, "`a command`")
    shown, folded = text.split("<details")
    assert "| r9 |" in shown and "| r10 |" not in shown and "<summary>2 more rows; command" in folded
    assert "| recipe | n |" in folded and "| r11 |" in folded and folded.endswith("`a command`\n\n</details>")
    assert folding.share(1, 2).startswith("50.0% of 2 (1.3 to 98.7)")
    for name, column in (("answers-clips", "answers kept (95 %)"), ("pages", "right answers (95 %)")):
        table = tables.result_table(name).split("Right answers of each kind")[0]
        first = next(line for line in table.splitlines() if line.startswith("| recipe"))
        at = first.split(" | ").index(column)
        shares = [float(line.split(" | ")[at].split("%")[0]) for line in re.findall(r"^\| `.*", table, re.M)]
        assert shares == sorted(shares, reverse=True) and len(shares) > 40
