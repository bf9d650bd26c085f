"""The command ``mmaccel serve``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from clients import MODELS, user

from mmaccel.cli import main

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")

from mmaccel.programs.serve import server  # noqa: E402

LLAVA = str(MODELS / "mini-llava")


@pytest.fixture
def started(monkeypatch):
    """Servers that were started, and end at once."""
    found = []

    def run(running, bound):
        found.append(running)
        bound.close()

    monkeypatch.setattr(server, "run", run)
    return found


def test_what_cannot_be_served_is_said_before_it_is(started, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for argv, said in (
            (["--port", str(taken.getsockname()[1])], "cannot listen at 127.0.0.1, port"),
            (["--host", "999.1.1.1", "--port", "0"], "cannot listen at 999.1.1.1"),
            (["--recipe", "fastvv"], "did you mean 'fastv'"),
            (["--allow-files", str(tmp_path / "none")], "--allow-files must be an existing folder"),
            (["--allow-urls", "http://x"], "--allow-urls must be a host"),
            (["--api-key", ""], "--api-key is empty"),
            (["--port", "0", "--model", str(tmp_path / "none")], "no folder"),
            (["--port", "0", "--model", LLAVA, "--recipe", "fastv", "--set", "layer=99"], "layer=99 is out of reach"),
        ):
            assert main(["serve", *argv]) == 2, argv
            error = capsys.readouterr().err
            assert said in error and error.count("\n") == 1, error
    assert not started


def test_others_are_let_in_only_on_purpose(started, capsys):
    """Beyond this machine without a key there is a warning; names are checked where only this machine is meant."""
    for argv, warned, name in (
        (["--host", "0.0.0.0"], True, None),
        (["--host", "0.0.0.0", "--api-key", "secret"], False, None),
        ([], False, ["127.0.0.1"]),
        (["--allow-host", "box"], False, ["127.0.0.1", "box"]),
    ):
        assert main(["serve", "--model", LLAVA, "--port", "0", "--json", *argv]) == 0
        out, error = capsys.readouterr()
        assert ("warning: whoever reaches 0.0.0.0" in error) == warned
        told = json.loads(out)
        assert told["address"].endswith("/v1") and (told["model"], told["recipe"]) == ("mini-llava", "balanced")
        (door,) = started.pop().config.app.user_middleware
        assert door.kwargs["allowed"] == name and door.kwargs["key"] == ("secret" if "--api-key" in argv else None)


def test_it_serves(monkeypatch, capsys, things, tmp_path):
    """All options at once, by a client."""
    at_work, servers, run = threading.Event(), [], server.run

    def watched(running, bound):
        servers.append(running)
        at_work.set()
        run(running, bound)

    monkeypatch.setattr(server, "run", watched)
    path = tmp_path / "address.json"
    options = "--recipe snapkv --retain 0.5 --set recent=8 --several 2 --queue 3 --frames 4 --max-new-tokens 9"
    argv = ["serve", "--model", LLAVA, "--port", "0", *options.split(), f"--json={path}"]
    serving = threading.Thread(target=main, args=(argv,))
    serving.start()
    try:
        assert at_work.wait(60)
        with openai.OpenAI(base_url=json.loads(path.read_text())["address"], api_key="none") as client:
            (card,) = client.models.list()
            assert card.mmaccel == {"recipe": "snapkv", "retain": 0.5}
            found = client.chat.completions.create(model=card.id, messages=[things.message])
            assert found.choices[0].message.content == things.item.turns[-1].answer
            with pytest.raises(openai.BadRequestError, match="at most 9 tokens"):
                client.chat.completions.create(model=card.id, messages=[things.message], max_tokens=10)
    finally:
        servers[0].should_exit = True
        serving.join(60)
    assert not serving.is_alive()
    assert "mini-llava with recipe snapkv is served at http://127.0.0.1:" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_it_is_told_to(by):
    argv = [sys.executable, "-m", "mmaccel", "serve", "--model", LLAVA, "--port", "0", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        told = json.loads(server.stdout.readline())
        with openai.OpenAI(base_url=told["address"], api_key="none") as client:
            assert client.chat.completions.create(model=told["model"], messages=[user("?")]).choices
        os.kill(server.pid, by)
        out, error = server.communicate(timeout=60)
    assert (server.returncode, out, error) == (0 if by == signal.SIGINT else -by, "", "")
