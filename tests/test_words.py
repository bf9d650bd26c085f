"""Docstrings and messages say what they mean in ordinary words."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("mmaccel", "kernels/mmaccel_kernels", "demo/mmaccel_demo")
#: phrases that a reader has to decode, and what to write
BANNED = {
    r"makes? no\b": "say what is not allowed, or that nothing changes",
    r"of no use": "is invalid; or name the limit",
    r"what becomes|becomes of": "name the result: how ... changes, the keys that are left",
    r"what is asked|is asked of": "name the question, the request or the protocol",
    r"\bst(?:and|ands|ood) for\b": "represents, replaces, is short for",
    r"come by\b": "are obtained",
    r"gone on with|broken off and": "resumed, interrupted",
    r"by dice|of its own accord": "with its own random generator",
    r"answers nothing|leads elsewhere": "say the value and what is allowed",
}
#: a first line begins with a noun phrase or a verb, not with a clause that has to be resolved
CLAUSE = re.compile(r"(?:What|Who|Whose|Where|When|How|Why|Those|Of|By|That|Which)\b(?!ever)")


#: file, line, and a string
Text = tuple[str, int, str]


@functools.cache
def texts() -> tuple[list[Text], list[Text]]:
    """Every string of our code (docstrings, messages, help), and the first line of the docstring of every module and of every
    public class, function and method."""
    strings, first_lines = [], []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                strings.append((file, node.lineno, " ".join(node.value.split())))
            elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name, told = getattr(node, "name", ""), ast.get_docstring(node)
                if told and not name.startswith("_"):
                    first_lines.append((file, getattr(node, "lineno", 1), told.splitlines()[0]))
    return strings, first_lines


@pytest.mark.parametrize("phrase", BANNED)
def test_no_text_has_to_be_decoded(phrase: str) -> None:
    found = [f"{path}:{line}: {text[:160]}" for path, line, text in texts()[0] if re.search(phrase, text)]
    assert not found, f"write instead: {BANNED[phrase]}\n" + "\n".join(found)


def test_first_lines_say_what_a_thing_is_or_does() -> None:
    found = [f"{path}:{line}: {text}" for path, line, text in texts()[1] if CLAUSE.match(text)]
    assert not found, "begin with a noun phrase or a verb\n" + "\n".join(found)


def test_a_phrase_that_is_banned_is_found() -> None:
    assert re.search(next(iter(BANNED)), "limit=0 makes no clip") and not re.search(next(iter(BANNED)), "makes nothing")
    assert (
        CLAUSE.match("What becomes of keys") and not CLAUSE.match("Whatever stays") and not CLAUSE.match("Evict keys")
    )
