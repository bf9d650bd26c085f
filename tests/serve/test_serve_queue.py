"""Several clients at once, those who wait, those who leave, the end of the server, and what Prometheus is told of it."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from clients import chat, direct, streamed, text, user
from gate import Gate
from tail import few
from waiting import until

from mmaccel.programs import model_lock

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")

from mmaccel.programs.serve.engine import Limits  # noqa: E402
from mmaccel.programs.serve.errors import Refused  # noqa: E402
from mmaccel.programs.serve.scheduler import StreamWork  # noqa: E402

#: characters that the model writes where nothing is shown, at least
ASKED = {"max_tokens": 12}


def figure(served, name):
    """One number of ``/metrics``."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", served.http.get("/metrics").text, re.M)
    return 0.0 if found is None else float(found[1])


def raw(served, stream=False):
    return {"model": served.name, "messages": [user("what is there ?")], "stream": stream, **ASKED}


@pytest.mark.parametrize("several", few([1, 2], quick=[2]))
def test_clients_at_once_get_answers_of_their_own(serve, things, several):
    served = serve("mini-qwen-vl", "balanced", several=several)
    names = ["picture", "two pictures", "turns"] * 2
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: streamed(served, *things.cases[name][0]), names))
    assert found == [direct("mini-qwen-vl", things.cases[name][1], "balanced").answer for name in names]
    assert figure(served, "mmaccel_queue_length") == figure(served, "mmaccel_running") == 0
    assert figure(served, 'mmaccel_requests_total{status="200"}') == len(names)


def test_twins_answer_while_one_is_held(serve, things):
    served = serve("mini-llava", several=2)
    held, free = served.scheduler.engines
    with ThreadPoolExecutor(2) as pool, Gate(held.model, 1) as first, Gate(free.model, 1) as second:
        answers = [pool.submit(chat, served, things.message) for _ in range(2)]
        assert first.reached.wait(30) and second.reached.wait(30), "both at work"
        assert figure(served, "mmaccel_running") == 2
        second.open()
        until(lambda: any(one.done() for one in answers))
        first.open()
        assert len({text(one.result()) for one in answers}) == 1


def test_a_full_queue(serve):
    """One is answered, one waits, and the third is told when to come again."""
    served = serve("mini-llava", waiting=1)
    with ThreadPoolExecutor(2) as pool, Gate(served.scheduler.engines[0].model, 1) as gate:
        first = pool.submit(chat, served, user("?"), **ASKED)
        assert gate.reached.wait(30)
        second = pool.submit(chat, served, user("?"), **ASKED)
        until(lambda: figure(served, "mmaccel_queue_length") == 1)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="The queue is full with 2 requests") as caught:
                chat(served, user("?"), stream=stream)
            assert int(caught.value.response.headers["retry-after"]) >= 1 and caught.value.code == "queue_full"
        gate.open()
        assert text(first.result()) == text(second.result())
    assert text(chat(served, user("?"), **ASKED)) == text(first.result()), "there is room again"
    assert figure(served, 'mmaccel_requests_total{status="429"}') == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [1, 4])
def test_who_leaves_frees_the_model(serve, stream, at):
    """In the prefill or while tokens come: no further pass of the model, and the next one is answered."""
    import httpx

    served = serve("mini-llava", waiting=0)
    with Gate(served.scheduler.engines[0].model, at) as gate, httpx.Client(base_url=served.address) as other:

        def ask():
            with other.stream("POST", "/v1/chat/completions", json=raw(served, stream)) as answer:
                for _ in answer.iter_lines():
                    pass

        asking = threading.Thread(target=lambda: pytest.raises(httpx.TransportError, ask))
        asking.start()
        assert gate.reached.wait(30)
        sockets(other)
        until(lambda: figure(served, "mmaccel_disconnected_total") == 1)
        gate.open()
        asking.join(30)
        until(lambda: served.scheduler.present == served.scheduler.running == 0)
        assert gate.passes == at
    assert text(chat(served, user("what is there ?"), **ASKED)) is not None


def sockets(client):
    """Close the connections of a client under it, as a program that ends does."""
    import socket

    for connection in client._transport._pool.connections:
        connection._connection._network_stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def test_who_leaves_the_queue_is_never_answered(serve):
    import httpx

    served = serve("mini-llava", waiting=1)
    with ThreadPoolExecutor(2) as pool, Gate(served.scheduler.engines[0].model, 1) as gate:
        first = pool.submit(chat, served, user("?"), **ASKED)
        assert gate.reached.wait(30)
        with httpx.Client(base_url=served.address) as other:
            second = pool.submit(other.post, "/v1/chat/completions", json=raw(served))
            until(lambda: served.scheduler.present == 2)
            sockets(other)
            until(lambda: served.scheduler.present == 1)
        gate.open()
        passes = first.result().usage.completion_tokens
        assert second.exception() is not None
        until(lambda: served.scheduler.running == 0)
        assert gate.passes == passes, "of the first alone"


def test_the_time_of_one_request(serve, monkeypatch):
    """Before the first token it is a status, behind it an error in the stream; the model is free again."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        model_lock, "time", SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    )

    def late():
        clock.now += 61

    served = serve("mini-llava", limits=Limits(seconds=60.0))
    for at, stream in ((1, False), (1, True), (3, True)):
        with Gate(served.scheduler.engines[0].model, at, late) as gate:
            gate.open()
            with pytest.raises(openai.APIError, match="limit of 60 seconds") as caught:
                for _ in chat(served, user("what is there ?"), stream=stream, **ASKED):
                    pass
        assert isinstance(caught.value, openai.BadRequestError) == (at == 1) and caught.value.code == "time_limit"
        assert gate.passes == at
    assert text(chat(served, user("?"), **ASKED)) is not None


def test_faults_of_ours_are_logged_and_not_told(serve, monkeypatch, caplog):
    served = serve("mini-llava")
    (engine,) = served.scheduler.engines
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "generate", lambda **inputs: {}["secret"])
        with pytest.raises(openai.InternalServerError, match="The server failed \\(KeyError\\)") as caught:
            chat(served, user("?"))
    assert "secret" not in str(caught.value) and "secret" in caplog.text
    assert text(chat(served, user("?"), **ASKED)) is not None


def test_a_server_that_ends_answers_what_it_has_begun(serve):
    served = serve("mini-llava", waiting=1)
    with ThreadPoolExecutor(1) as pool, Gate(served.scheduler.engines[0].model, 2) as gate:
        first = pool.submit(streamed, served, user("what is there ?"), **ASKED)
        assert gate.reached.wait(30)
        served.server.should_exit = True
        until(lambda: refused(served))
        assert not first.done() and served.thread.is_alive()
        gate.open()
        assert first.result() is not None
    served.thread.join(30)
    assert not served.thread.is_alive()


def refused(served):
    import httpx

    try:
        httpx.get(f"{served.address}/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        # it ends while it is asked, or has not got round to it
        return False
    return False


def test_who_waits_when_the_server_ends_is_told(serve):
    """The grace is over while one is answered and one waits."""
    served = serve("mini-llava", waiting=1)
    with ThreadPoolExecutor(2) as pool, Gate(served.scheduler.engines[0].model, 1) as gate:
        asked = [pool.submit(chat, served, user("?"), **ASKED)]
        assert gate.reached.wait(30)
        asked.append(pool.submit(chat, served, user("?"), **ASKED))
        until(lambda: served.scheduler.present == 2)
        closing = threading.Thread(target=served.scheduler.close)
        closing.start()
        for one in asked:
            error = one.exception(30)
            assert isinstance(error, openai.InternalServerError) and error.status_code == 503
            assert int(error.response.headers["retry-after"]) > 0
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            chat(served, user("?"))
        gate.open()
        closing.join(30)
        assert not closing.is_alive()

    async def read_meanwhile():
        with served.scheduler.queued(StreamWork(lambda *_: None)):
            pass

    # a request that was being read when the server closed
    with pytest.raises(Refused, match="shutting down"):
        asyncio.run(read_meanwhile())


def test_figures(serve, things):
    served = serve("mini-llava", "divprune")
    found = [chat(served, things.message), chat(served, things.message, extra_body={"mmaccel": {"retain": 0.5}})]
    with pytest.raises(openai.BadRequestError):
        chat(served, user("?"), n=2)
    for name in ("visual_tokens", "visual_tokens_kept"):
        assert figure(served, f"mmaccel_{name}_total") == sum(one.mmaccel[name] for one in found)
    for name, key in (("prompt_tokens", "prompt_tokens"), ("generated_tokens", "completion_tokens")):
        assert figure(served, f"mmaccel_{name}_total") == sum(getattr(one.usage, key) for one in found)
    assert figure(served, "mmaccel_kv_bytes_sum") == sum(one.mmaccel["kv_bytes"] for one in found)
    assert figure(served, "mmaccel_kv_bytes_count") == figure(served, "mmaccel_time_to_first_token_seconds_count") == 2
    first = sum(one.mmaccel["time_to_first_token"] for one in found)
    assert figure(served, "mmaccel_time_to_first_token_seconds_sum") == pytest.approx(first)
    assert figure(served, 'mmaccel_requests_total{status="200"}') == 2
    assert figure(served, 'mmaccel_requests_total{status="400"}') == 1
    assert 'mmaccel_info{model="mini-llava",recipe="divprune",' in served.http.get("/metrics").text
    assert figure(served, "mmaccel_tokens_per_second_count") == 0, "answers of two tokens have no rate"
    long = [chat(served, user("what is there ?"), temperature=2, seed=seed, max_tokens=8) for seed in range(6)]
    long = [one for one in long if one.usage.completion_tokens > 4]
    assert 0 < len(long) == figure(served, "mmaccel_tokens_per_second_count")
