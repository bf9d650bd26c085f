"""A server in a process of its own, under what hostile clients send; prints a table of times and memory."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import hostile
import pytest
from clients import data_url, direct, picture, user
from waiting import until

httpx = pytest.importorskip("httpx", reason="the server needs more: pip install 'mmaccel[serve]'")

pytestmark = [
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ, reason="its seconds need a quiet machine; run it with -n 0"
    ),
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="memory and descriptors are those of Linux"),
]

#: seconds to a refusal, seconds to an answer of /health meanwhile, bytes that 500 hostile requests may leave
REFUSAL, HEALTH, LEFT = 2.0, 0.5, 300 << 20


class Health:
    """The longest that ``/health`` took, asked again and again."""

    def __init__(self, address: str) -> None:
        self.address, self.worst = address, 0.0
        self.stop = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self.address, timeout=60) as client:
            while not self.stop.wait(0.02):
                begin = time.monotonic()
                assert client.get("/health").status_code == 200
                self.worst = max(self.worst, time.monotonic() - begin)

    def take(self) -> float:
        """The longest since the last look."""
        worst, self.worst = self.worst, 0.0
        return worst


@contextmanager
def watched(address: str) -> Iterator[Health]:
    health = Health(address)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(health.run)
        try:
            yield health
        finally:
            health.stop.set()
        running.result()


def test_hostile_bodies():
    """Each is answered in time, and so is ``/health`` meanwhile; 500 of them leave no memory behind."""
    bodies = hostile.bodies()
    with hostile.process("--recipe", "divprune") as served, watched(served.address) as health:
        hostile.post(served.where, hostile.with_text("?"))
        before, rows = served.memory(), []
        for name, make in bodies.items():
            body = make()
            health.take()
            begin = time.monotonic()
            status, _ = hostile.post(served.where, body)
            rows.append((name, len(body), status, time.monotonic() - begin, health.take(), served.memory() - before))
            print("{:32s} {:11,d} bytes  {}  {:6.2f} s  /health {:.2f} s  memory {:+,d}".format(*rows[-1]), flush=True)
        print(f"memory {before:,} -> {served.memory():,}")
        small = hostile.bodies(0.1)
        given = [small[name]() for name in small if name != "a text that just fits"]
        with ThreadPoolExecutor(16) as pool:
            list(
                pool.map(lambda number: hostile.post(served.where, given[number % len(given)], timeout=120), range(500))
            )
        # freed memory is given back a moment later
        until(lambda: served.memory() - before < LEFT)
        after = served.memory()
        print(f"500 more: memory {after:,}, /health {health.take():.2f} s")
    slow = [row for row in rows if row[2] != 200 and row[3] > REFUSAL]
    late = [row for row in rows if row[4] > HEALTH]
    assert not slow and not late
    assert after - before < LEFT
    assert not served.log


def test_clients_at_once_get_the_answers_of_the_command_line(things):
    """32 clients with 20 requests each, beside hostile ones."""
    shown = picture(data_url(things.png))
    asked = [things.item.turns[-1].question, "what is there ?", "how many circles are there ?", "which colour ?"]
    bodies = [
        json.dumps(
            {"model": hostile.NAME, "messages": [user(shown, text)], "temperature": 0, "max_tokens": 16}
        ).encode()
        for text in asked
    ]
    from mmaccel.media.files import Prompt

    expected = [direct(hostile.NAME, Prompt(text, things.prompt.pictures), "divprune").answer for text in asked]
    hostile_ones = [hostile.bodies(0.05)[name]() for name in ("15 MB of lists", "6 MB of words", "many parts")]
    with hostile.process("--recipe", "divprune", "--queue", "64") as served, watched(served.address) as health:

        def client(number):
            found = []
            with httpx.Client(base_url=served.address, timeout=300) as http:
                for turn in range(20):
                    which = (number + turn) % len(bodies)
                    answer = http.post(
                        "/v1/chat/completions", content=bodies[which], headers={"content-type": "application/json"}
                    ).json()
                    found.append(answer["choices"][0]["message"]["content"] == expected[which])
                    if turn % 5 == 0:
                        assert hostile.post(served.where, hostile_ones[number % 3])[0] == 400
            return found

        with ThreadPoolExecutor(32) as pool:
            found = [one for each in pool.map(client, range(32)) for one in each]
        print(f"{sum(found)} of {len(found)} answers are those of the command line, /health {health.take():.2f} s")
    assert len(found) == 640 and all(found) and not served.log


def test_idle_connections_at_few_descriptors():
    """400 of them where a process has 256 descriptors: others are served, and the log stays short."""
    with hostile.process("--recipe", "none", descriptors=256) as served, ExitStack() as stack:
        for number in range(400):
            stack.enter_context(socket.create_connection(served.where, 10))
            if number % 50 == 0:
                assert httpx.get(f"{served.address}/health", timeout=5).status_code == 200
        for _ in range(200):
            asked = time.monotonic()
            assert httpx.get(f"{served.address}/health", timeout=5).status_code == 200
            assert time.monotonic() - asked < HEALTH
        assert hostile.post(served.where, hostile.with_text("?"))[0] == 200
    assert served.log.count("\n") < 20, served.log[:2000]


def test_chunks_of_a_byte_each():
    """As many as a client can send, from several at once: others are answered meanwhile."""
    flood = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    flood += b"Transfer-Encoding: chunked\r\n\r\n"
    with hostile.process("--recipe", "none") as served, watched(served.address) as health:

        def client(_):
            hostile.raw(served.where, flood, *([b"1\r\n \r\n" * 20_000] * 20), timeout=120)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(client, range(8)))
        print(f"/health {health.take():.2f} s")
    assert not served.log
