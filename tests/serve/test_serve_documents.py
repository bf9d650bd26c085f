"""The guide of the server: its blocks are clients of one that runs."""

from __future__ import annotations

import contextlib
import io
import shutil

import pytest
from test_documents import SERVED, blocks

pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")


def test_the_blocks_of_the_guide(serve, things, tmp_path, monkeypatch):
    shutil.copy(things.png, tmp_path / "photo.png")
    shutil.copy(things.mp4, tmp_path / "talk.mp4")
    monkeypatch.chdir(tmp_path)
    served = serve("mini-qwen-vl", "snapkv")
    code = [(language, text) for language, text in blocks(SERVED) if language in ("python", "text")]
    space: dict[str, object] = {}
    heard: list[str] = []
    for language, text in code:
        if language == "text":
            assert heard[-1] == text
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text.replace("http://127.0.0.1:8000", served.address), SERVED, "exec"), space)
        heard.append(out.getvalue())
    answer, figures = heard[0].splitlines()
    assert answer.strip() and figures.endswith(" True") and heard[-1].strip(), "two answers, and less memory"
