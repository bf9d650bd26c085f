"""A chat whose pictures age continues its cache with the next turn, and never a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from clients import chat, data_url, picture, text, user

from mmaccel import Recipe, Stage


def recipe(**options: Any) -> Recipe:
    return Recipe("aging", (Stage("keydiff", 1.0, options),))


@pytest.fixture
def served(serve: Any) -> Any:
    def make(prefix_cache: int, **options: Any) -> SimpleNamespace:
        found: SimpleNamespace = serve("mini-qwen-vl", recipe(**options), prefix_cache=prefix_cache)
        return found

    return make


def test_the_next_turn_continues_its_cache(served: Any, things: SimpleNamespace) -> None:
    first, second = (picture(data_url(things.folder / f"{name}.png")) for name in "ab")
    kept, whole = served(64 << 20, age=(1.0, 0.25, 0)), served(0)
    opening, asked = user(first, "what colour is the circle ?"), user(second, "how many shapes are there ?")
    answers = [chat(one, opening, temperature=0) for one in (kept, whole)]
    # nothing is older than the newest picture
    assert text(answers[0]) == text(answers[1])
    assert answers[0].mmaccel["kv_bytes"] >= answers[1].mmaccel["kv_bytes"]
    talk = [opening, {"role": "assistant", "content": text(answers[0])}]
    turns = [chat(one, *talk, asked, temperature=0, max_tokens=2) for one in (kept, whole)]
    cached = [one.usage.prompt_tokens_details.cached_tokens for one in turns]
    assert cached[0] > 0 and cached[1] == 0
    assert turns[0].mmaccel["kv_bytes"] < 0.9 * turns[1].mmaccel["kv_bytes"]
    # another question about the same pictures is behind the first turn, since the second evicted by its own question
    again = chat(kept, *talk, user(second, "what shapes are there ?"), temperature=0, max_tokens=2)
    assert again.usage.prompt_tokens_details.cached_tokens == cached[0]
