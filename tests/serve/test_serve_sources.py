"""Where pictures and clips may come from: files below a folder, hosts by name, and nothing else."""

from __future__ import annotations

import base64
import contextlib
import http.server
import os
import socket
import tempfile
import threading
import time
import urllib.parse

import numpy as np
import pytest
from clients import chat, clip, picture, text, user
from PIL import Image

pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")

from mmaccel import MmaccelError
from mmaccel.media import untrusted
from mmaccel.programs.model_lock import Stopped
from mmaccel.programs.serve import sources
from mmaccel.programs.serve.sources import Sources
from mmaccel.video import decode

NO = "is not a file in a folder that this server allows"


def fetch(allowed, url, into, seconds=20.0):
    return allowed.fetch(url, into, time.monotonic() + seconds)


@pytest.fixture
def tree(tmp_path):
    """Files inside and outside of what is allowed, and links between them."""
    inside = tmp_path / "allowed"
    (inside / "deep").mkdir(parents=True)
    for path in (inside / "one.png", inside / "deep" / "a b.png", tmp_path / "secret.png"):
        path.write_bytes(b"x")
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "two.png").write_bytes(b"x")
    (inside / "out.png").symlink_to(tmp_path / "secret.png")
    (inside / "up").symlink_to(tmp_path)
    (inside / "here.png").symlink_to(inside / "one.png")
    (inside / "loop").symlink_to(inside / "loop")
    os.mkfifo(inside / "pipe.png")
    return tmp_path


@pytest.mark.parametrize("name", ["one.png", "deep/a%20b.png", "deep/../one.png", "here.png", "./one.png"])
def test_files_below_a_folder(tree, name):
    found = fetch(Sources(folders=[tree / "allowed"]), f"file://{tree}/allowed/{name}", tree)
    assert found.is_file() and found.parent in (tree / "allowed", tree / "allowed" / "deep")
    assert fetch(Sources(folders=[tree / "allowed"]), f"file://localhost{tree}/allowed/{name}", tree) == found


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "%2e%2e/secret.png",
        "deep/../../secret.png",
        "out.png",
        "up/secret.png",
        "loop",
        "pipe.png",
        "deep",
        "none.png",
        "one.png%00.jpg",
        "../allowed-too/two.png",
        "%ff%fe.png",
        "x" * 5000,
    ],
)
def test_files_that_are_not_to_be_had(tree, name):
    """One sentence for all of them, so that it does not tell which files there are."""
    with pytest.raises(MmaccelError, match=NO):
        fetch(Sources(folders=[tree / "allowed"]), f"file://{tree}/allowed/{name}", tree)


def test_other_ways_to_name_files(tree):
    allowed = Sources(folders=[tree / "allowed"])
    for url in (f"file://otherhost{tree}/allowed/one.png", "file:", "file:///", "file:///etc/passwd"):
        with pytest.raises(MmaccelError, match=NO):
            fetch(allowed, url, tree)
    for url in (f"{tree}/allowed/one.png", "allowed/one.png", "", "gopher://x", "//x", "data"):
        with pytest.raises(MmaccelError, match="address of a picture or clip must be"):
            fetch(allowed, url, tree)


def test_what_is_allowed_is_checked_at_the_start(tmp_path):
    with pytest.raises(MmaccelError, match="--allow-files must be an existing folder"):
        Sources(folders=[tmp_path / "none"])
    for host in ("", "http://x", "x/y", "*", "a@b"):
        with pytest.raises(MmaccelError, match="--allow-urls must be a host"):
            Sources(hosts=[host])


class Web(http.server.BaseHTTPRequestHandler):
    """Answers what a host may answer."""

    def do_GET(self):
        self.server.asked.append(self.path)
        where = {"/hop": "/file.png", "/away": self.server.other, "/local": "file:///etc/passwd", "/round": "/round"}
        if self.path in where:
            self.send_response(302)
            self.send_header("location", where[self.path])
            self.end_headers()
        elif self.path == "/gone":
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("content-type", "video/mp4" if self.path == "/film" else "application/octet-stream")
            self.end_headers()
            self.server.send(self.wfile)

    def log_message(self, *about):
        pass


@pytest.fixture
def webs():
    """Two hosts: one is allowed, the other is not."""
    found = []
    for _ in range(2):
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
        web.asked, web.name = [], f"127.0.0.1:{web.server_port}"
        web.send = lambda out: out.write(b"x" * 100)
        threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}).start()
        found.append(web)
    found[0].other = f"http://{found[1].name}/file.png"
    yield found
    for web in found:
        web.shutdown()
        web.server_close()


def test_hosts_by_name(webs, tmp_path):
    one, other = webs
    allowed = Sources(hosts=[one.name, "Images.example.com"])
    for path in ("/file.png", "/hop", "/film", "/x.jpg?a=b#c"):
        found = fetch(allowed, f"http://{one.name}{path}", tmp_path)
        assert found.read_bytes() == b"x" * 100 and found.parent == tmp_path
    for url in (
        f"http://{other.name}/file.png",
        f"http://{one.name}@{other.name}/file.png",
        f"http://{other.name}\\@{one.name}/",
        f"http://localhost:{one.server_port}/",
        f"http://{one.name.partition(':')[0]}/",
        "http://images.example.com:8080/",
        "http://images.example.com.evil.com/",
        "http://[::1",
        "http://",
        "https:///x",
        "http://x:99999/",
    ):
        with pytest.raises(MmaccelError, match="not on a host that this server loads from|is not a valid address"):
            fetch(allowed, url, tmp_path)
    assert not other.asked


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/away", "not on a host that this server loads from"),
        ("/local", "not on a host that this server loads from"),
        ("/round", "has too many redirects"),
        ("/gone", "status 404"),
    ],
)
def test_ways_that_lead_elsewhere(webs, tmp_path, path, said):
    one, other = webs
    with pytest.raises(MmaccelError, match=said):
        fetch(Sources(hosts=[one.name]), f"http://{one.name}{path}", tmp_path)
    assert not other.asked and len(one.asked) <= sources.HOPS + 1


def test_hosts_that_send_too_much_or_too_slowly(webs, tmp_path, monkeypatch):
    one, _ = webs
    allowed, url = Sources(hosts=[one.name]), f"http://{one.name}/file.png"
    monkeypatch.setattr(untrusted, "UPLOAD", 99)
    with pytest.raises(MmaccelError, match="too large"):
        fetch(allowed, url, tmp_path)
    monkeypatch.undo()
    with pytest.raises(MmaccelError, match="too long"):
        fetch(allowed, url, tmp_path, seconds=-1)
    monkeypatch.setattr(sources, "PAUSE", 0.05)
    ended = threading.Event()
    one.send = lambda out: ended.wait(30)
    with pytest.raises(MmaccelError, match="Timeout"):
        fetch(allowed, url, tmp_path)
    ended.set()
    one.server_close()
    with pytest.raises(MmaccelError, match="cannot be loaded"):
        fetch(Sources(hosts=["127.0.0.1:1"]), "http://127.0.0.1:1/x", tmp_path)


@pytest.fixture
def trickle():
    """A host that sends the headers of its answer a byte at a time, without end."""
    ended = threading.Event()

    def serve(bound):
        while not ended.is_set():
            try:
                connection, _ = bound.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
                while not ended.wait(0.02):
                    connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=serve, args=(bound,))
        thread.start()
        yield f"127.0.0.1:{bound.getsockname()[1]}"
        ended.set()
        bound.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_slow_headers_of_a_host(trickle, tmp_path):
    """All that an address takes has an end, and an earlier one when nobody wants it any more."""
    begin = time.monotonic()
    with pytest.raises(MmaccelError, match="takes too long to load"):
        fetch(Sources(hosts=[trickle]), f"http://{trickle}/one.png", tmp_path, seconds=0.5)
    assert time.monotonic() - begin < 5
    left = threading.Event()
    threading.Timer(0.3, left.set).start()
    with pytest.raises(Stopped):
        Sources(hosts=[trickle]).fetch(f"http://{trickle}/one.png", tmp_path, time.monotonic() + 60, left)
    assert time.monotonic() - begin < 10


def test_who_leaves_while_a_host_is_slow(serve, trickle):
    import httpx
    from waiting import until

    served = serve("mini-llava", sources=Sources([trickle]))
    with httpx.Client(base_url=served.address, timeout=0.5) as other, pytest.raises(httpx.TimeoutException):
        messages = [user(picture(f"http://{trickle}/one.png"), "?")]
        other.post("/v1/chat/completions", json={"model": served.name, "messages": messages})
    begin = time.monotonic()
    until(lambda: served.scheduler.present == served.scheduler.running == 0)
    assert time.monotonic() - begin < 5
    assert text(chat(served, user("?"), max_tokens=1)) is not None


CONTENT = bytes(range(256)) * 9
BASE64 = base64.b64encode(CONTENT).decode()
URLSAFE = base64.urlsafe_b64encode(CONTENT).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"data:image/png;base64,{URLSAFE}",
        f"data:image/png;base64,{URLSAFE.rstrip('=')}",
        f"data:image/png;base64,{base64.encodebytes(CONTENT).decode()}",
        f"data:image/png;base64, {base64.encodebytes(CONTENT).decode().replace(chr(10), chr(13) + chr(10))}",
        f"data:image/png;base64,{urllib.parse.quote(BASE64, safe='')}",
        f"DATA:Image/PNG;charset=utf-8;BASE64,{BASE64}",
        f"data:;base64,{BASE64}",
    ],
)
@pytest.mark.parametrize("piece", [sources._PIECE, 5, 64])
def test_ways_to_write_base64(tmp_path, monkeypatch, url, piece):
    monkeypatch.setattr(sources, "_PIECE", piece)
    assert fetch(Sources(), url, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "content",
    ["A", "A===", "AAA=AAAA", "AA==AAAA", "====", "AAAA*", "A\u0100AA", "=AAA", "AAAA%41", "AA=A", "AAAA===="],
)
@pytest.mark.parametrize("piece", [sources._PIECE, 4])
def test_what_is_no_base64(tmp_path, monkeypatch, content, piece):
    monkeypatch.setattr(sources, "_PIECE", piece)
    with pytest.raises(MmaccelError, match="not valid base 64"):
        fetch(Sources(), f"data:image/png;base64,{content}", tmp_path)


def test_names_of_files_on_hosts(webs, tmp_path):
    one, _ = webs
    for path in ("/x.p%00ng", "/x.p%2Fng", "/x.%2E%2E", "/x.", "/x." + "g" * 500, "/x.p\u00f6g"):
        found = fetch(Sources(hosts=[one.name]), f"http://{one.name}{path}", tmp_path)
        assert found.parent == tmp_path and found.suffix == ""


def frames(*paths):
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(path.read_bytes()).decode() for path in paths)


def test_frames_in_an_address(serve, tmp_path):
    """How clients of vLLM send a clip: its frames as JPEGs. They are the clip that a folder of them is."""
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(12):
        shade = np.full((56, 80, 3), 20 * number, np.uint8)
        Image.fromarray(shade).save(folder / f"{number}.jpg")
    paths = [folder / f"{number}.jpg" for number in range(12)]
    found = untrusted.clip(fetch(Sources(), frames(*paths), tmp_path), 5)
    expected = decode(folder, 5)
    assert (found.frames == expected.frames).all() and found.indices == expected.indices and found.fps == 1.0
    served = serve("mini-qwen-vl", "none")
    shown = chat(served, user(clip(frames(*paths)), "what ?"), temperature=0)
    assert shown.mmaccel["visual_tokens"] > 0
    Image.new("RGB", (8, 8)).save(tmp_path / "small.jpg")
    (tmp_path / "none.jpg").write_bytes(b"GIF89a")
    for url, said in (
        (frames(*paths, tmp_path / "small.jpg"), "differ in size"),
        (frames(*paths, tmp_path / "none.jpg"), "Frame 12 of the clip is not a JPEG"),
        (frames(*paths) + ",", "Frame 12 of the clip is not a JPEG"),
        ("data:video/jpeg;base64,", "Frame 0 of the clip is not a JPEG"),
        ("data:video/jpeg;base64," + "," * 2000, "more than 1024 frames"),
    ):
        answer = served.http.post(
            "/v1/chat/completions", json={"model": "mini-qwen-vl", "messages": [user(clip(url), "what ?")]}
        )
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
        assert "mmaccel-serve-" not in answer.text


def test_a_request_may_name_what_is_allowed(serve, things, webs, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, _ = webs
    one.send = lambda out: out.write(things.png.read_bytes())
    served = serve("mini-llava", sources=Sources([one.name], [things.folder]))
    sent = text(chat(served, things.message))
    for url in (f"file://{things.png}", f"http://{one.name}/one.png"):
        assert text(chat(served, user(picture(url), things.question))) == sent
    assert not list(tmp_path.iterdir()), "what was sent is gone"
