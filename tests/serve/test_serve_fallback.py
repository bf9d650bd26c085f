"""A server reads unsure answers again, for every request or for one, and sends nothing before an answer is accepted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from clients import chat, streamed, text, user

from mmaccel.programs.model_lock import Stopped
from mmaccel.programs.serve.engine import Engine
from mmaccel.programs.serve.schema import ChatRequest

FEW = {"retain": 0.01}


@pytest.fixture(scope="module")
def served(serve_module: Any) -> SimpleNamespace:
    return serve_module("mini-llava", "divprune", prefix_cache=64 << 20)


def asked(served: SimpleNamespace, message: Any, **options: Any) -> Any:
    return chat(served, message, temperature=0, extra_body={"mmaccel": options} if options else {})


def test_an_unsure_answer_is_that_of_the_bare_model(served: SimpleNamespace, things: SimpleNamespace) -> None:
    bare = chat(served, things.message, temperature=0, extra_body={"mmaccel": False})
    few = asked(served, things.message, **FEW)
    again = asked(served, things.message, **FEW, fallback=1.0)
    assert few.mmaccel["fallback"] == {} and few.mmaccel["visual_tokens_kept"] == 2
    assert again.mmaccel["fallback"]["reading"] == [1] and text(again) == text(bare)
    assert [one["visual_tokens_kept"] for one in again.mmaccel["fallback"]["readings"]] == [2, 196]
    assert again.usage == bare.usage
    sure = asked(served, things.message, **FEW, fallback=1e-9)
    assert sure.mmaccel["fallback"]["reading"] == [0] and text(sure) == text(few)
    for threshold, whole in ((1.0, bare), (1e-9, few)):
        options = {"temperature": 0, "extra_body": {"mmaccel": {**FEW, "fallback": threshold}}}
        assert streamed(served, things.message, **options) == text(whole)


def test_a_request_that_may_fall_back_takes_no_kept_cache(served: SimpleNamespace, things: SimpleNamespace) -> None:
    asked(served, things.message)
    assert asked(served, things.message).usage.prompt_tokens_details.cached_tokens > 0
    assert asked(served, things.message, fallback=0.5).usage.prompt_tokens_details.cached_tokens == 0
    assert asked(served, things.message, fallback=False).usage.prompt_tokens_details.cached_tokens > 0


def test_a_server_with_a_fallback(serve: Any, things: SimpleNamespace) -> None:
    """It holds for requests that do not say otherwise; its budgets too."""
    served = serve("mini-llava", "divprune", drafts={"fallback": {"threshold": 1.0, "budgets": (0.5,)}})
    bare = chat(served, things.message, temperature=0, extra_body={"mmaccel": False})
    found = asked(served, things.message, **FEW)
    kept = [one["visual_tokens_kept"] for one in found.mmaccel["fallback"]["readings"]]
    assert kept in ([2, 98], [2, 98, 196]) and bare.mmaccel["fallback"] == {}
    assert text(found) == text(bare)
    assert asked(served, things.message, fallback=False).mmaccel["fallback"] == {}
    # a prompt without a picture has nothing to read again
    assert asked(served, user("what is it ?")).mmaccel["fallback"] == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fallback": "sure"}, "mmaccel.fallback must be a threshold"),
        ({"fallback": {"threshold": 0.5}}, "mmaccel.fallback must be a threshold"),
        ({"fallback": True}, "mmaccel tune --fallback"),
        ({"fallback": 1.5}, "threshold must be greater than 0 and at most 1, got 1.5"),
        ({"fallback": 0}, "threshold must be greater than 0"),
        ({"retain": 2.5, "fallback": 0.5}, "retain=2.5 is outside"),
        ({}, "mmaccel takes the budget of this request and its fallback"),
    ],
)
def test_bad_values_are_refused(served: SimpleNamespace, given: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        chat(served, user("?"), extra_body={"mmaccel": given})


def test_drafts_cannot_fall_back(serve: Any, things: SimpleNamespace) -> None:
    served = serve("mini-llava", "divprune", drafts={"lookup": True})
    with pytest.raises(openai.BadRequestError, match="fallback= and drafts cannot be combined"):
        asked(served, things.message, fallback=0.9)
    assert asked(served, things.message, fallback=False).mmaccel["fallback"] == {}


def request(things: SimpleNamespace, **options: Any) -> ChatRequest:
    return ChatRequest.model_validate(
        {"model": "mini-llava", "messages": [things.message], "max_tokens": 32, **options}
    )


def test_a_reading_that_is_held_back_ends_at_a_stop_sequence(
    served: SimpleNamespace, things: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would follow the sequence makes no answer unsure, and is not written."""
    engine: Engine = served.scheduler.engines[0]
    whole = text(asked(served, things.message, **FEW))
    first, rest = whole[:1], whole[1:]
    assert rest
    steps: list[int] = []
    original = engine.model.generate

    def counted(**arguments: Any) -> Any:
        out = original(**arguments)
        steps.append(out.sequences.shape[1] - arguments["input_ids"].shape[1])
        return out

    monkeypatch.setattr(engine.model, "generate", counted)
    for options in ({}, {"fallback": 1e-9}):
        given = request(things, stop=[rest[:1]], temperature=0, mmaccel={**FEW, **options})
        answer = engine.answer(given, lambda piece: None, threading.Event())
        assert (answer.text, answer.finish) == (whole[: whole.index(rest[:1])].strip(), "stop"), first
    assert steps[0] == steps[1] < len(engine.processor.tokenizer(whole)["input_ids"]) + 2


def test_a_client_that_leaves_ends_a_reading_that_is_held_back(
    served: SimpleNamespace, things: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine = served.scheduler.engines[0]
    stop, sent = threading.Event(), list[str]()
    tokenizer = engine.processor.tokenizer

    class Leaving(type(tokenizer)):  # type: ignore[misc]
        def decode(self, *args: Any, **options: Any) -> Any:
            stop.set()
            return super().decode(*args, **options)

    monkeypatch.setattr(tokenizer, "__class__", Leaving)
    with pytest.raises(Stopped):
        engine.answer(request(things, stop=["zzz"], mmaccel={**FEW, "fallback": 1e-9}), sent.append, stop)
    assert sent == []
