"""Where pictures and clips may come from: files below a folder, hosts by name, and nothing else."""

from __future__ import annotations

import http.server
import os
import tempfile
import threading
import time

import pytest
from clients import chat, picture, text, user

pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")

from mmaccel import MmaccelError
from mmaccel.media import untrusted
from mmaccel.programs.serve import sources
from mmaccel.programs.serve.sources import Sources

NO = "no file in a folder that this server allows"


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
        with pytest.raises(MmaccelError, match="no address of a picture or clip"):
            fetch(allowed, url, tree)


def test_what_is_allowed_is_checked_at_the_start(tmp_path):
    with pytest.raises(MmaccelError, match="--allow-files .* is no folder"):
        Sources(folders=[tmp_path / "none"])
    for host in ("", "http://x", "x/y", "*", "a@b"):
        with pytest.raises(MmaccelError, match="--allow-urls .* is no host"):
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
    for path, suffix in (("/file.png", ".png"), ("/hop", ".png"), ("/film", ".mp4"), ("/x.jpg?a=b#c", ".jpg")):
        found = fetch(allowed, f"http://{one.name}{path}", tmp_path)
        assert found.read_bytes() == b"x" * 100 and found.suffix == suffix and found.parent == tmp_path
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
        with pytest.raises(MmaccelError, match="not on a host that this server loads from|is no address"):
            fetch(allowed, url, tmp_path)
    assert not other.asked


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/away", "not on a host that this server loads from"),
        ("/local", "not on a host that this server loads from"),
        ("/round", "leads elsewhere again and again"),
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


def test_a_request_may_name_what_is_allowed(serve, things, webs, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, _ = webs
    one.send = lambda out: out.write(things.png.read_bytes())
    served = serve("mini-llava", sources=Sources([one.name], [things.folder]))
    sent = text(chat(served, things.message))
    for url in (f"file://{things.png}", f"http://{one.name}/one.png"):
        assert text(chat(served, user(picture(url), things.question))) == sent
    assert not list(tmp_path.iterdir()), "what was sent is gone"
