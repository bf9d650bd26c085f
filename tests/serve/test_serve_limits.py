"""What hostile clients cannot do: stall the server, fill its memory or its log, or hold what others need."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import hostile
import pytest
from clients import chat, clip, data_url, picture, user
from gate import Gate
from tail import few
from test_serve_queue import figure, sockets
from waiting import until

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")

import httpx  # noqa: E402

from mmaccel.media import untrusted  # noqa: E402
from mmaccel.programs.serve import app, body, connections, scheduler, schema, server  # noqa: E402
from mmaccel.programs.serve.errors import Refused  # noqa: E402

pytestmark = pytest.mark.usefixtures("cheap_collections")

BODIES = hostile.bodies()
# by choice: those that are large come in the full run
SMALL = [name for name in BODIES if not name.startswith(("9", "zeros"))]


@pytest.fixture(scope="module")
def served(serve_module):
    return serve_module("mini-llava", "divprune", waiting=8)


def where(served):
    host, _, port = served.address.removeprefix("http://").partition(":")
    return host, int(port)


@pytest.mark.parametrize("name", few(BODIES, quick=SMALL))
def test_bodies_are_read_in_bounded_time(name):
    """Seconds of the processor, up to the tokens and pixels."""
    given = BODIES[name]()
    assert len(given) <= app.BODY
    begin = time.thread_time()
    try:
        schema.read(given)
    except Refused as refused:
        assert refused.status in (400, 413) and len(json.dumps(refused.body())) < 1000
    assert time.thread_time() - begin < 1.0


# by choice: one of each kind
KINDS = ["3 M numbers for messages", "500,000 unknown keys", "6 MB of words", "a thin picture"]


@pytest.mark.parametrize("name", few(BODIES, quick=KINDS))
def test_hostile_bodies_are_answered_in_one_sentence(served, name):
    begin = time.process_time()
    status, answer = hostile.post(where(served), BODIES[name]())
    assert status in (200, 400, 413), answer
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"} and len(answer["error"]["message"]) < 600
        # both ends, and whatever else this process does
        assert time.process_time() - begin < 4.0


def test_what_is_at_the_limits():
    """Commas in texts are no values, long texts and addresses come as they are, and one value more is refused."""
    url = "data:image/png;base64," + "A" * 9000
    given = {"model": "m", "messages": [user("a,[{" * 200_000, picture(url), 'say "data:' + "x" * 9000, url)]}
    found = schema.read(json.dumps(given).encode())
    parts = given["messages"][0]["content"]
    assert [part["text"] for part in found.chat[0]["content"] if part["type"] == "text"] == [
        part["text"] for part in parts if part["type"] == "text"
    ]
    assert [medium.url for medium in found.media] == [url]
    for escaped in ("\\/", "\\n"):
        sent = json.dumps(given).replace("AAAA", "AAAA" + escaped).encode()
        assert schema.read(sent).media[0].url == json.loads(f'"{url.replace("AAAA", "AAAA" + escaped)}"')
    for count, many in ((body.VALUES // 2 - 50, False), (body.VALUES // 2 + 50, True)):
        sent = hostile.with_field("metadata", b"[" + b"{}," * count + b"1]")
        if many:
            with pytest.raises(Refused, match="more than 200,000 values"):
                schema.read(sent)
        else:
            assert schema.read(sent)
    with pytest.raises(Refused, match="messages has 1025 items; at most 1024"):
        schema.read(json.dumps({"model": "m", "messages": [user("?")] * 1025}).encode())
    with pytest.raises(Refused, match="messages has 1026 parts; at most 1024"):
        schema.read(json.dumps({"model": "m", "messages": [user("?", "?")] * 513}).encode())


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (b'{"\\ud800": 1}', 400, "input should be a valid string"),
        (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "?"}]}', 404, "There is no model"),
        (hostile.with_field("model", b'"mini-llava"'), 200, None),
        (hostile.with_text("\ud800"), 400, "half a character"),
        (hostile.with_text("\ud800" * 9000), 400, "more than 4,096 tokens"),
        (hostile.with_text("a\x00b\x1b[31m"), 200, None),
        (b"\xef\xbb\xbf" + hostile.with_text("?"), 200, None),
        (hostile.with_text("?").decode().encode("utf-16"), 400, "no text in UTF-8"),
        (hostile.with_text("?")[:-9] + b'\xff"}]}', 400, "no text in UTF-8"),
        (hostile.with_field("temperature", b"1e400"), 400, "temperature: input should be"),
        (hostile.with_field("temperature", b"-Infinity"), 400, "temperature: input should be"),
        (hostile.with_field("max_tokens", b"1e5"), 400, "max_tokens: input should be"),
        (hostile.with_field("seed", b"1" + b"0" * 25), 400, "seed: input should be"),
        (hostile.with_field("seed", b"true"), 400, "seed: input should be"),
        (hostile.with_field("stop", b'["\\ud800"]'), 400, "stop.0: input should be"),
        (b"", 400, "no valid JSON"),
        (b"null", 400, "must be an object"),
        (b'"data:"', 400, "must be an object"),
    ],
)
def test_odd_texts(served, given, status, said):
    found, answer = hostile.post(where(served), given)
    assert found == status, answer
    if said:
        assert said in answer["error"]["message"]


def test_texts_that_are_too_long_are_not_tokenised(served):
    """Nor templated: what is refused was counted up to the model's positions."""
    (engine,) = served.scheduler.engines
    for given in ("one two " * 750_000, "x" * 6_000_000, "\n" * 6_000_000, "one two " * 10_000):
        request = schema.read(hostile.with_text(given))
        begin = time.thread_time()
        with pytest.raises(Exception, match="more than 4,096 tokens; this model takes 4096 in all"):
            engine._check_text(request, threading.Event())
        assert time.thread_time() - begin < 1.0
    almost = schema.read(hostile.with_text("one " * 4000))
    assert engine._check_text(almost, threading.Event()) is None
    from mmaccel.programs.model_lock import Stopped

    left = threading.Event()
    left.set()
    with pytest.raises(Stopped):
        engine._check_text(almost, left)


def _saved(path, data):
    path.write_bytes(data)
    return path


def test_pictures_that_are_refused_before_they_are_decoded(served, tmp_path, monkeypatch):
    """By their sides, by the sum of their pixels, and whatever the library of pictures raises."""
    for shown, said in (
        ([hostile.as_url(hostile.png(1, 3_000_000))], "pixels"),
        ([hostile.as_url(hostile.png(3_000_000, 1))], "pixels"),
        ([hostile.as_url(hostile.png(5000, 7000, rows=1))] * 11, "1024 MiB to decode"),
        ([hostile.as_url(hostile.jpeg(2000, 5000), "image/jpeg")], "a JPEG of 5,005 scans; at most 32"),
    ):
        begin = time.process_time()
        status, answer = hostile.post(where(served), hostile.showing(*shown))
        assert status == 400 and said in answer["error"]["message"], answer
        assert time.process_time() - begin < 2.0
    assert untrusted.picture(_saved(tmp_path / "usual.jpg", hostile.jpeg(64, 1))).size == (64, 64)
    for error in (ValueError("x"), SyntaxError("x"), ZeroDivisionError(), MemoryError(), OSError(5, "x"), KeyError(1)):

        def broken(path, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(untrusted, "picture", broken)
            status, answer = hostile.post(where(served), hostile.showing(hostile.as_url(hostile.png(8, 8))))
        assert status == 400 and "is broken and cannot be decoded" in answer["error"]["message"]


# ------------------------------------------------------------------------------------------------------- connections


def head(*lines, path=b"/v1/chat/completions", method=b"POST"):
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Host: localhost", *lines, b"", b""])


JSON = b"Content-Type: application/json"
ASK = hostile.with_field("max_tokens", b"1")
LENGTH = b"Content-Length: " + str(len(ASK)).encode()

#: bytes that are no request, or an odd one, and how the answer begins; None: nothing is answered
ODD = {
    "nothing of HTTP": (b"\x16\x03\x01\x02\x00" * 100, b"HTTP/1.1 400"),
    "an endless line": (b"GET /" + b"a" * 100_000, None),
    "an endless header": (head(b"X: " + b"a" * 100_000), None),
    "a header without a name": (head(b": x"), b"HTTP/1.1 400"),
    "a zero in a header": (head(b"X: a\0b"), b"HTTP/1.1 400"),
    "a name that is no host": (
        head(b"Connection: close", method=b"GET", path=b"/nothing").replace(b"localhost", b"["),
        None,
    ),
    "two lengths": (head(JSON, LENGTH, b"Content-Length: 3") + ASK, b"HTTP/1.1 400"),
    "a length of words": (head(JSON, b"Content-Length: many") + ASK, b"HTTP/1.1 400"),
    "a length beyond all": (head(JSON, b"Content-Length: 99999999999999999999") + ASK, b"HTTP/1.1 413"),
    "a short length": (head(JSON, b"Content-Length: 9", b"Connection: close") + ASK, b"HTTP/1.1 400"),
    "chunks that are none": (head(JSON, b"Transfer-Encoding: chunked") + b"zz\r\n", b"HTTP/1.1 400"),
    "another encoding": (head(JSON, b"Transfer-Encoding: gzip") + b"x", b"HTTP/1.1 400"),
    "an old version": (
        b"POST /v1/chat/completions HTTP/1.0\r\n" + JSON + b"\r\n" + LENGTH + b"\r\n\r\n" + ASK,
        b"HTTP/1.1 200",
    ),
    "chunks": (
        head(JSON, b"Transfer-Encoding: chunked", b"Connection: close")
        + b"".join(b"1\r\n%c\r\n" % byte for byte in ASK)
        + b"0\r\n\r\n",
        b"HTTP/1.1 200",
    ),
    "an upgrade": (
        head(b"Upgrade: websocket", b"Connection: upgrade, close", method=b"GET", path=b"/health"),
        b"HTTP/1.1 200",
    ),
    "a body where none is read": (
        head(b"Content-Length: 100000000", method=b"POST", path=b"/nothing") + b"x" * 1000,
        b"HTTP/1.1 404",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests(served, name, caplog):
    """They are refused or answered, the connection ends, and nothing of it is an error of the server."""
    sent, begins = ODD[name]
    with caplog.at_level(logging.WARNING):
        found = hostile.raw(where(served), sent)
    if begins is not None:
        assert found.startswith(begins), found[:200]
    assert not found.startswith(b"HTTP/1.1 500"), found
    assert not [record for record in caplog.records if record.levelno > logging.WARNING], caplog.text
    assert served.http.get("/health").json() == {"status": "ok"}
    until(lambda: served.scheduler.present == 0)


@pytest.mark.parametrize("length", [b"Content-Length: 50000000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("more", [(), (b"Connection: close",)], ids=["", "close"])
@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        (b"/nothing", JSON, b"404"),
        (b"/v1/chat/completions", b"Content-Type: text/plain", b"415"),
        (b"/v1/streams", b"Content-Type: text/plain", b"415"),
    ],
)
def test_an_answer_before_the_body_says_that_the_connection_closes(served, length, more, path, kind, status):
    """Once. Clients that go on sending get the whole answer, and the end of the connection, which is not reset."""
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n" if b"chunked" in length else b"x" * 65536
    found = b""
    with socket.create_connection(where(served), 10) as connection:
        connection.sendall(head(kind, length, *more, path=path) + piece)
        while b"}}" not in found and (part := connection.recv(4096)):
            found += part
        for _ in range(20):
            connection.sendall(piece)
        assert connection.recv(4096) == b""
    assert found.startswith(b"HTTP/1.1 " + status) and found.endswith(b"}}"), found
    assert found.lower().count(b"connection: close") == 1, found


def test_an_answer_behind_the_body_keeps_the_connection(served):
    """Refusals too."""
    begun = head(LENGTH, b"Content-Type: text/plain") + ASK
    found = hostile.raw(where(served), begun, head(b"Connection: close", method=b"GET", path=b"/health"))
    assert found.startswith(b"HTTP/1.1 415") and found.count(b"HTTP/1.1 200") == 1
    assert found.lower().partition(b"http/1.1 200")[0].count(b"connection: close") == 0


def test_requests_one_behind_the_other(served):
    """Without waiting for answers (pipelining), each is answered in its turn."""
    ask, health = head(JSON, LENGTH) + ASK, head(method=b"GET", path=b"/health")
    last = head(b"Connection: close", method=b"GET", path=b"/health")
    found = hostile.raw(where(served), (ask + health) * 3 + last)
    assert found.count(b"HTTP/1.1 200") == 7 and found.count(b'"chat.completion"') == 3


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: loc",
        head(b"Connection: keep-alive", method=b"GET", path=b"/health") + b"GET /health HTT",
        head(b"Content-Length: 9999", path=b"/nothing") + b"x",
        head(b"Transfer-Encoding: chunked", path=b"/nothing") + b"5\r\nxx",
    ],
)
def test_slow_headers_do_not_hold_a_connection(served, monkeypatch, begun):
    """Nor do bodies that nobody waits for: a byte now and then, and the connection ends all the same."""
    monkeypatch.setattr(connections, "HEADERS", 0.4)
    begin = time.monotonic()
    with socket.create_connection(where(served), 10) as slow:
        slow.settimeout(0.05)
        slow.sendall(begun)
        with pytest.raises(ConnectionError):
            while time.monotonic() < begin + 8:
                slow.send(b"a")
                try:
                    if slow.recv(4096) == b"" and time.monotonic() > begin + 8:
                        break
                except TimeoutError:
                    pass
    assert 0.2 < time.monotonic() - begin < 7.9


@pytest.mark.parametrize("how", [b"Content-Length: 5000000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("large", [False, True])
def test_slow_bodies_do_not_hold_a_place(served, monkeypatch, how, large):
    monkeypatch.setattr(app, "START", 0.4)
    piece = b" " * (100_000 if large else 10)
    monkeypatch.setattr(app, "SPEED", 1 << 20)
    begin = time.monotonic()
    with socket.create_connection(where(served), 10) as slow:
        slow.sendall(head(JSON, how) + (b"%x\r\n%s\r\n" % (len(piece), piece) if b"chunked" in how else piece))
        if large:
            until(lambda: served.scheduler.present == 1)
        found = b""
        while b"}}" not in found and (more := slow.recv(4096)):
            found += more
    assert b"408" in found.split(b"\r\n")[0] and b"KiB a second" in found
    assert time.monotonic() - begin < 5
    until(lambda: served.scheduler.present == served.scheduler.held == 0)


def test_who_takes_no_answers_is_left(served, monkeypatch):
    """Requests without end from one who reads nothing."""
    monkeypatch.setattr(connections, "TAKING", 0.4)
    with socket.create_connection(where(served), 10) as deaf:
        begin = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() < begin + 20:
                deaf.sendall(head(method=b"GET", path=b"/metrics") * 100)
    until(lambda: len(served.server.server_state.connections) <= 1)


def test_idle_connections_give_way(served, monkeypatch):
    """The one that has waited longest ends when there are too many; those with a request stay."""
    monkeypatch.setattr(connections, "limit", lambda: 8)
    with Gate(served.scheduler.engines[0].model, 1) as gate, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(chat, served, user("?"), max_tokens=1)
        assert gate.reached.wait(30)
        idle = [socket.create_connection(where(served), 10) for _ in range(60)]
        for _ in range(5):
            assert httpx.get(f"{served.address}/health").status_code == 200
        until(lambda: len(served.server.server_state.connections) <= 9)
        gate.open()
        assert asking.result().choices
        for one in idle:
            one.close()


def test_how_many_connections_there_may_be():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = "from mmaccel.programs.serve.connections import limit; print(limit())"
    for descriptors, most in ((256, 128), (min(4096, hard), 512)):
        found = subprocess.run(
            [sys.executable, "-c", f"import resource; resource.setrlimit(7, ({descriptors}, {hard})); {code}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(found.stdout) <= most < descriptors


def test_a_log_is_not_flooded(served, caplog):
    """One line a minute of each kind, whatever clients send."""
    quiet = server._Quiet()
    logger = logging.getLogger("uvicorn.error")
    assert any(isinstance(one, server._Quiet) for one in logger.filters), "of the server that runs"
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            hostile.raw(where(served), b"nonsense\r\n\r\n")
    assert len([record for record in caplog.records if "Invalid HTTP" in record.getMessage()]) <= 1
    records = [logging.LogRecord("a", level, "", 0, f"{n}", (), None) for n in range(9) for level in (30, 40)]
    assert [quiet.filter(record) for record in records] == [True, True] + [False] * 16


# ----------------------------------------------------------------------------------------------------- who has left


def leaving(served, messages, reached):
    """A client that asks, and leaves when ``reached`` says so."""
    with httpx.Client(base_url=served.address, timeout=60) as other, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(other.post, "/v1/chat/completions", json={"model": served.name, "messages": messages})
        until(reached)
        sockets(other)
        assert asking.exception(30) is not None


def test_who_leaves_while_a_clip_is_decoded(served, things, monkeypatch):
    """The process that decodes is killed, however long it would take."""
    begun_ = []

    def slow(path, frames, *, begun, **options):
        while True:
            process = subprocess.Popen(["sleep", "60"])
            begun_.append(process)
            begun(process)
            process.wait()

    before = figure(served, "mmaccel_disconnected_total")
    with monkeypatch.context() as patch:
        patch.setattr(untrusted, "clip", slow)
        begin = time.monotonic()
        leaving(served, [user(clip(data_url(things.mp4)), "?")], lambda: begun_)
        until(lambda: served.scheduler.running == 0)
        assert time.monotonic() - begin < 20
    assert all(process.poll() is not None for process in begun_)
    assert figure(served, "mmaccel_disconnected_total") == before + 1


def test_who_leaves_while_pictures_are_decoded(served, things, monkeypatch):
    seen = []
    reached, go_on = threading.Event(), threading.Event()

    def slow(path):
        seen.append(path)
        reached.set()
        assert go_on.wait(30)
        return things.prompt.pictures[0]

    with monkeypatch.context() as patch:
        patch.setattr(untrusted, "picture", slow)
        leaving(served, [user(*[picture(data_url(things.png))] * 9, "?")], reached.is_set)
        until(lambda: served.scheduler.present == 0)
        go_on.set()
        until(lambda: served.scheduler.running == 0)
    assert len(seen) == 1


def test_nothing_is_kept_of_those_who_left_the_queue(served):
    """However long the model is busy."""
    jobs = []
    made = scheduler.Job.__init__

    def noted(self, given):
        made(self, given)
        jobs.append(weakref.ref(self))

    with (
        Gate(served.scheduler.engines[0].model, 1) as gate,
        ThreadPoolExecutor(1) as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        first = pool.submit(chat, served, user("?"), max_tokens=1)
        assert gate.reached.wait(30)
        patch.setattr(scheduler.Job, "__init__", noted)
        for _ in range(5):
            leaving(served, [user("?")], lambda: served.scheduler.present == 2)
            until(lambda: served.scheduler.present == 1)
        assert len(jobs) == 5
        import gc

        gc.collect()
        assert not [job for job in jobs if job() is not None]
        gate.open()
        assert first.result().choices


def test_what_all_bodies_have_together(served, monkeypatch):
    """More than the server holds is told to come again."""
    monkeypatch.setattr(scheduler, "HELD", 300_000)
    sent = hostile.with_text("?")[:-1] + b" " * 200_000 + b"}"
    with Gate(served.scheduler.engines[0].model, 1) as gate, ThreadPoolExecutor(1) as pool:
        first = pool.submit(hostile.post, where(served), sent)
        assert gate.reached.wait(30)
        status, answer = hostile.post(where(served), sent)
        assert status == 429 and "The bodies of all requests may have 0 MiB together" in answer["error"]["message"]
        gate.open()
        assert first.result()[0] == 200
    until(lambda: served.scheduler.held == 0)
    assert hostile.post(where(served), sent)[0] == 200


def test_memory_is_given_back(served, things, monkeypatch):
    """After large bodies, refused ones too, and after pictures, once for those that come together."""
    given_back = []
    monkeypatch.setattr(app, "_TRIM", 0.2)
    monkeypatch.setattr(app, "_release", lambda: given_back.append(True))
    large = b" " * (2 << 20)
    for sent in (large + hostile.with_text("?"), large + b"{", hostile.showing(data_url(things.png))):
        given_back.clear()
        for _ in range(3):
            hostile.post(where(served), sent)
        until(lambda: given_back)
    tidied = []
    monkeypatch.setattr(app._Chat, "_trim_soon", lambda self: tidied.append(True))
    # what is small is not worth it
    hostile.post(where(served), hostile.with_text("?"))
    hostile.post(where(served), large + b"{")
    until(lambda: tidied)
    assert len(tidied) == 1
