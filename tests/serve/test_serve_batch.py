"""Requests that wait and are answered as rows of a batch: each gets the answer that it would get alone."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clients import chat, data_url, direct, loaded, picture, streamed, text, user
from gate import Gate
from PIL import Image
from tail import few
from test_serve_answers import RECIPES
from test_serve_queue import figure
from waiting import until

from mmaccel.errors import MmaccelError
from mmaccel.media.files import Prompt
from mmaccel.recipe import get_recipe
from mmaccel.suite import make_item

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")

from mmaccel.programs.serve import server  # noqa: E402

#: a request that is never answered with others, at which the model is held while they arrive
FIRST = {"messages": [user("?")], "options": {"max_tokens": 4, "extra_body": {"mmaccel": False}}}


@contextmanager
def held(served: SimpleNamespace, *asked: Any):
    """Requests ``(function, messages, options)`` that wait together while the model answers another; the futures of their
    answers, and the gate of the model."""
    with ThreadPoolExecutor(len(asked) + 1) as pool, Gate(served.scheduler.engines[0].model, 1) as gate:
        pool.submit(chat, served, *FIRST["messages"], **FIRST["options"])
        assert gate.reached.wait(30)
        found: list[Future[Any]] = []
        for function, messages, options in asked:
            found.append(pool.submit(function, served, *messages, **options))
            # they wait in this order
            until(lambda: len(served.scheduler._queue) == len(found))
        yield found, gate
        gate.open()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Prompt]]:
    """Questions about one picture each, as messages and as prompts of different lengths."""
    folder, found = tmp_path_factory.mktemp("asked"), []
    for number, task in enumerate(("colour", "count", "existence", "relation")):
        item = make_item(task, "test", number + 3)
        pixels = Image.fromarray(item.pictures(112)[0])
        pixels.save(folder / f"{number}.png")
        question = item.turns[-1].question
        shown = picture(data_url(folder / f"{number}.png"))
        found.append((user(shown, question), Prompt(question, (pixels,))))
    return found


@pytest.mark.parametrize("named", few(RECIPES, quick=RECIPES[:2]))
def test_rows_are_answered_as_alone(serve, things, asked, named):
    served = serve("mini-qwen-vl", named, batch=8)
    two, prompt = things.cases["two pictures"]
    requests = [(chat, [asked[0][0]]), (streamed, [asked[1][0]]), (chat, two), (chat, [asked[2][0]])]
    with held(served, *((*request, {}) for request in requests)) as (answers, gate):
        gate.open()
        found = [one.result() for one in answers]
    prompts = [asked[0][1], asked[1][1], prompt, asked[2][1]]
    expected = [direct("mini-qwen-vl", one, named) for one in prompts]
    assert [one if isinstance(one, str) else text(one) for one in found] == [one.answer for one in expected]
    assert figure(served, "mmaccel_batched_total") == 3, "two pictures are answered alone"
    for one, alone in zip(found, expected, strict=True):
        if not isinstance(one, str):
            assert one.usage.prompt_tokens == alone.prompt_tokens
            assert one.usage.completion_tokens == alone.new_tokens
            assert one.mmaccel["visual_tokens"] == alone.visual_tokens
            assert one.mmaccel["visual_tokens_kept"] == alone.visual_tokens_kept
    total = sum(one.visual_tokens for one in expected)
    assert figure(served, "mmaccel_visual_tokens_total") == total
    assert served.scheduler.present == served.scheduler.running == 0


def test_every_row_has_its_own_end_and_sampling(serve, asked):
    served = serve("mini-llava", "divprune", batch=8)
    message = user("what is there ?")
    options = [
        {"max_tokens": 3},
        {"max_tokens": 12},
        {"max_tokens": 12, "temperature": 1.5, "seed": 7},
        {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 8},
    ]
    alone = [chat(served, message, **one) for one in options]
    stop = text(alone[1])[3:5]
    options.append({"max_tokens": 12, "stop": stop})
    alone.append(chat(served, message, **options[-1]))
    with held(served, *((chat, [message], one) for one in options)) as (answers, gate):
        gate.open()
        found = [one.result() for one in answers]
    assert [text(one) for one in found] == [text(one) for one in alone]
    assert [one.choices[0].finish_reason for one in found] == [one.choices[0].finish_reason for one in alone]
    assert [one.usage.completion_tokens for one in found] == [one.usage.completion_tokens for one in alone]
    assert figure(served, "mmaccel_batched_total") == len(options)
    assert {one.choices[0].finish_reason for one in found} == {"length", "stop"}


def test_what_is_asked_otherwise_is_answered_apart(serve, asked):
    served = serve("mini-llava", "divprune", batch=2)
    budgets: list[Any] = [
        None,
        {"retain": 0.5},
        None,
        {"retain": 0.5},
        None,
        False,
        {"fallback": 0.5},
        {"fallback": 0.5},
    ]
    bodies = [{} if one is None else {"extra_body": {"mmaccel": one}} for one in budgets]
    with held(served, *((chat, [asked[0][0]], body) for body in bodies)) as (answers, gate):
        gate.open()
        found = [one.result() for one in answers]
    kept = [one.mmaccel["visual_tokens_kept"] for one in found]
    assert kept[0] == kept[2] == kept[4] < kept[1] == kept[3] < kept[5] == found[5].mmaccel["visual_tokens"]
    # two of the three without a budget, and the two with one
    assert figure(served, "mmaccel_batched_total") == 4
    assert [bool(one.mmaccel["fallback"]) for one in found] == [False] * 6 + [True] * 2


def test_one_that_fails_fails_alone(serve, asked, tmp_path):
    served = serve("mini-llava", "divprune", batch=8)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    broken = user(picture(data_url(tmp_path / "broken.png")), "what is it ?")
    messages = [asked[0][0], broken, asked[1][0]]
    with held(served, *((chat, [one], {}) for one in messages)) as (answers, gate):
        gate.open()
        with pytest.raises(openai.BadRequestError, match="picture"):
            answers[1].result()
        found = [text(answers[number].result()) for number in (0, 2)]
    assert found == [direct("mini-llava", asked[number][1], "divprune").answer for number in (0, 1)]
    assert figure(served, "mmaccel_batched_total") == 2


def test_a_batch_that_does_not_fit_is_answered_one_by_one(serve, asked, monkeypatch):
    served = serve("mini-llava", "divprune", batch=8)
    model = served.scheduler.engines[0].model
    real = model.generate

    def small(**given: Any) -> Any:
        if len(given["input_ids"]) > 1:
            raise torch.OutOfMemoryError("no room")
        return real(**given)

    monkeypatch.setattr(model, "generate", small)
    with held(served, *((chat, [one], {}) for one, _ in asked[:2])) as (answers, gate):
        gate.open()
        found = [text(one.result()) for one in answers]
    assert found == [direct("mini-llava", prompt, "divprune").answer for _, prompt in asked[:2]]
    assert figure(served, "mmaccel_batched_total") == 0


def test_who_leaves_a_batch_ends_only_a_row(serve, asked):
    import httpx

    served = serve("mini-llava", "divprune", batch=8)
    # hot enough not to end by itself
    body = {"model": served.name, "messages": [user("what is there ?")], "max_tokens": 64, "temperature": 2, "seed": 1}
    gates = []

    with httpx.Client(base_url=served.address, timeout=1.0) as leaving:

        def leave(served: Any, *messages: Any, **options: Any) -> None:
            with pytest.raises(httpx.TimeoutException):
                leaving.post("/v1/chat/completions", json=body)

        options = {"max_tokens": 8}
        with held(served, (leave, [], {}), (chat, [body["messages"][0]], options)) as (answers, gate):
            # held in a step of the batch until one has left
            with Gate(served.scheduler.engines[0].model, 7) as inside:
                gates.append(inside)
                gate.open()
                assert inside.reached.wait(30)
                answers[0].result()
                until(lambda: figure(served, "mmaccel_disconnected_total") == 1)
                inside.open()
                assert text(answers[1].result()) == text(chat(served, *body["messages"], **options))
                # the row of who left does not make the batch longer
                assert inside.passes < 13
    assert figure(served, "mmaccel_batched_total") >= 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"drafts": {"lookup": True}},
            "--lookup works for one request at a time; leave out one of --batch-size and --lookup",
        ),
        ({"drafts": {"fallback": 0.9}}, "--fallback works for one request at a time"),
        ({"prompt_cache": 1 << 20}, "--prompt-cache works for one request at a time"),
    ],
)
def test_what_is_for_one_request_is_refused(options, said):
    model, processor = loaded("mini-llava")
    with pytest.raises(MmaccelError, match=said):
        server.make_scheduler(model, processor, get_recipe("divprune"), batch=2, **options)


def test_models_whose_rows_depend_on_each_other_are_refused(monkeypatch):
    model, processor = loaded("mini-llava")
    monkeypatch.setattr("mmaccel.families.llava.Llava.numbers_pictures", True)
    with pytest.raises(MmaccelError, match="llava counts the pictures of all rows of a batch, so answers would depend"):
        server.make_scheduler(model, processor, get_recipe("divprune"), batch=2)
