"""What is answered over HTTP is what the command line answers, streamed or not."""

from __future__ import annotations

import pytest
from clients import chat, direct, streamed, text
from tail import few

# by choice: of every kind of recipe one, before the model, in the cache, a codec, and nothing
RECIPES = ("balanced", "snapkv", "kivi", "none")
CASES = {"mini-llava": ["picture"], "mini-qwen-vl": ["picture", "two pictures", "turns", "clip"]}
PAIRS = [(name, named) for name in CASES for named in RECIPES]


@pytest.mark.parametrize(("name", "named"), few(PAIRS, quick=[*PAIRS[: len(RECIPES)], ("mini-qwen-vl", "balanced")]))
def test_answers_are_those_of_the_command_line(serve, things, name, named):
    served = serve(name, named)
    for case in CASES[name]:
        messages, prompt = things.cases[case]
        expected = direct(name, prompt, named)
        found = chat(served, *messages)
        assert text(found) == expected.answer == streamed(served, *messages), case
        assert (found.choices[0].finish_reason, found.usage.prompt_tokens) == ("stop", expected.prompt_tokens)
        assert found.usage.completion_tokens == expected.new_tokens
        for figure in ("visual_tokens", "visual_tokens_kept", "kv_bytes"):
            assert found.mmaccel[figure] == getattr(expected, figure), (case, figure)
