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


def endless(served: SimpleNamespace) -> None:
    """Let no answer of a server end before its limit."""
    (engine,) = served.scheduler.engines
    engine.ends, engine.model.generation_config.eos_token_id = set(), None


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


@pytest.mark.parametrize("function", [chat, streamed])
def test_a_short_answer_does_not_wait_for_a_long_one(serve, function):
    served = serve("mini-llava", "divprune", batch=8)
    endless(served)
    model, message = served.scheduler.engines[0].model, user("what is there ?")
    long, short = {"max_tokens": 60}, {"max_tokens": 2}
    with held(served, (chat, [message], long), (function, [message], short)) as (answers, gate):
        # behind the second step of the batch: at most 3 are of the request before it
        with Gate(model, 8) as inside:
            gate.open()
            assert inside.reached.wait(30)
            found = answers[1].result(30)
            assert not answers[0].done()
            # the place of the short one is free
            until(lambda: served.scheduler.present == 1)
            assert served.scheduler.running == figure(served, "mmaccel_running") == 1
            assert figure(served, "mmaccel_queue_length") == 0
            assert figure(served, "mmaccel_batched_total") == 1
            assert figure(served, "mmaccel_tokens_per_second_count") == 1, "of the one before: two tokens have no rate"
        whole = answers[0].result()
    assert whole.usage.completion_tokens == 60
    assert text(whole) == text(chat(served, message, **long))
    alone = chat(served, message, **short)
    assert found == text(alone) if function is streamed else text(found) == text(alone)
    assert figure(served, "mmaccel_tokens_per_second_count") == 3
    if function is chat:
        own = (found.mmaccel[name] / alone.mmaccel[name] for name in ("kv_bytes", "kv_bytes_bare"))
        assert all(0.5 < share < 2 for share in own), "an equal share of the bytes when it ended"


def test_one_that_fails_fails_alone(serve, asked, tmp_path):
    served = serve("mini-llava", "divprune", batch=8)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    broken = user(picture(data_url(tmp_path / "broken.png")), "what is it ?")
    messages = [asked[0][0], broken, asked[1][0]]
    with held(served, *((chat, [one], {}) for one in messages)) as (answers, gate):
        # the others are in the batch, or before it
        with Gate(served.scheduler.engines[0].model, 4) as inside:
            gate.open()
            assert inside.reached.wait(30)
            with pytest.raises(openai.BadRequestError, match="picture"):
                answers[1].result(30)
            assert not answers[0].done() and not answers[2].done()
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
    endless(served)
    body = {"model": served.name, "messages": [user("what is there ?")], "max_tokens": 64}
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
                with Gate(served.scheduler.engines[0].model, 2) as later:
                    inside.open()
                    assert later.reached.wait(30)
                    assert served.scheduler.present == served.scheduler.running == 1
                found = text(answers[1].result())
                # the row of who left does not make the batch longer
                assert inside.passes < 13
                assert found == text(chat(served, *body["messages"], **options))
    assert figure(served, "mmaccel_batched_total") >= 1


def test_a_batch_leaves_the_places_of_those_who_wait(serve):
    served = serve("mini-llava", batch=8, waiting=2)
    endless(served)
    message, options = user("what is there ?"), {"max_tokens": 8}
    with held(served, *[(chat, [message], options)] * 2) as (answers, gate), ThreadPoolExecutor(2) as pool:
        with pytest.raises(openai.RateLimitError):
            chat(served, message, **options)
        # the two are answered together, so two others may wait
        with Gate(served.scheduler.engines[0].model, 7) as inside:
            gate.open()
            assert inside.reached.wait(30)
            assert served.scheduler.running == 2
            more = [pool.submit(chat, served, message, **options) for _ in range(2)]
            until(lambda: served.scheduler.present == 4)
            with pytest.raises(openai.RateLimitError, match="full with 4 requests"):
                chat(served, message, **options)
        assert len({text(one.result()) for one in [*answers, *more]}) == 1


def test_who_leaves_before_the_batch_is_not_in_it(serve, asked, monkeypatch):
    served = serve("mini-llava", "divprune", batch=8)
    (engine,) = served.scheduler.engines
    sizes, jobs, read = sizes_of_batches(served, monkeypatch), [], engine.read

    def leave(request: Any, stop: Any) -> Any:
        jobs.append(stop)
        if len(jobs) == 4:
            # the second of the batch, while the third is read
            jobs[2].set()
        return read(request, stop)

    monkeypatch.setattr(engine, "read", leave)
    with held(served, *((chat, [one], {}) for one, _ in asked[:3])) as (answers, gate):
        gate.open()
        found = [text(answers[number].result()) for number in (0, 2)]
        with pytest.raises(openai.APIError):
            answers[1].result()
    assert found == [direct("mini-llava", asked[number][1], "divprune").answer for number in (0, 2)]
    assert sizes == [1, 2]


def sizes_of_batches(served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every call of the model from now on."""
    model, sizes = served.scheduler.engines[0].model, list[int]()
    real = model.generate

    def generate(**given: Any) -> Any:
        sizes.append(len(given["input_ids"]))
        return real(**given)

    monkeypatch.setattr(model, "generate", generate)
    return sizes


def test_what_continues_a_kept_cache_is_answered_alone(serve, asked, monkeypatch):
    served = serve("mini-llava", "balanced", batch=8, prefix_cache=64 << 20)
    shown, again = (dict(asked[number][0]["content"][0]) for number in (0, 3))
    # a beginning of a few words is no reason
    chat(served, user("what is there ?"))
    chat(served, asked[0][0])
    sizes = sizes_of_batches(served, monkeypatch)
    ask = {number: (chat, [asked[number][0]], {}) for number in range(4)}
    other = (chat, [user(shown, "what is there ?")], {})
    # first come, first served: it is answered before the batch where it came before, and behind it where not
    for requests, calls in (([other, ask[1], ask[2]], [1, 1, 2]), ([ask[1], other, ask[2]], [1, 2, 1])):
        sizes.clear()
        with held(served, *requests) as (answers, gate):
            gate.open()
            found = [one.result() for one in answers]
        assert sizes == calls
        reused = [one.usage.prompt_tokens_details.cached_tokens > 0 for one in found]
        assert reused == [one is other for one in requests]
        for number in (1, 2):
            at = requests.index(ask[number])
            assert text(found[at]) == direct("mini-llava", asked[number][1], "balanced").answer
    # two that ask about one new picture: the second continues the first
    sizes.clear()
    pair = [ask[3], (chat, [user(again, "what is there ?")], {})]
    with held(served, ask[1], pair[0], ask[2], pair[1]) as (answers, gate):
        gate.open()
        found = [one.result().usage.prompt_tokens_details.cached_tokens > 0 for one in answers]
    assert sizes == [1, 2, 1, 1] and found == [False, False, False, True]
    assert figure(served, "mmaccel_prefix_cache_hits_total") == 3
    # the bare model continues nothing
    sizes.clear()
    bare = {"extra_body": {"mmaccel": False}}
    with held(served, *((function, messages, bare) for function, messages, _ in pair)) as (answers, gate):
        gate.open()
        assert all(one.result() for one in answers)
    assert sizes == [1, 2]


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
