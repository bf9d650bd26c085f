"""Servers of shipped models on free ports, and clients for them."""

from __future__ import annotations

import base64
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mmaccel
from mmaccel.cli import ask
from mmaccel.families.load import load
from mmaccel.media.files import Prompt, encode
from mmaccel.media.prepare import prepare
from mmaccel.programs.model_lock import ModelSlot
from mmaccel.recipe import get_recipe

MODELS = Path(mmaccel.__file__).parent / "models"
LONGEST = 16


@functools.cache
def loaded(name: str) -> tuple[Any, Any]:
    """A shipped model, which stays bare: servers have twins of it."""
    return load(MODELS / name, device="cpu")


def data_url(path: Path) -> str:
    kind = {".png": "image/png", ".mp4": "video/mp4"}[path.suffix]
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def clip(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def direct(name: str, prompt: Prompt, named: str, **changes: Any) -> ask.Answer:
    """What ``mmaccel ask`` answers."""
    model, processor = loaded(name)
    chosen = get_recipe(named).override(**changes)
    prepared = prepare(processor, chosen)
    return ask.answer(model, prepared, encode(prepared, [prompt]), chosen, LONGEST)


@contextmanager
def serving(name: str, named: str = "balanced", **options: Any) -> Iterator[SimpleNamespace]:
    """A server of a shipped model, with a client of OpenAI's. ``options`` are those of ``make_scheduler`` and ``make_app``."""
    import httpx
    import openai

    from mmaccel.programs.serve import server

    model, processor = ModelSlot(*loaded(name), 0).twin()
    door = {key: options.pop(key) for key in ("key", "allowed") if key in options}
    if (limits := options.pop("limits_of_streams", None)) is not None:
        door["limits"] = limits
    scheduler = server.make_scheduler(model, processor, get_recipe(named), **options)
    running = server.make_server(scheduler, name, **door)
    with server.bind("127.0.0.1", 0) as bound:
        bound.listen()
        address = server.address_of(bound)
        thread = threading.Thread(target=server.run, args=(running, bound))
        thread.start()
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=door.get("key", "none"), max_retries=0, timeout=60)
        with client, httpx.Client(base_url=address, timeout=60) as http:
            try:
                yield SimpleNamespace(
                    name=name,
                    scheduler=scheduler,
                    app=running.config.app.state,
                    server=running,
                    client=client,
                    http=http,
                    address=address,
                    thread=thread,
                )
            finally:
                running.should_exit = True
                thread.join(60)
                assert not thread.is_alive()


def chat(served: SimpleNamespace, *messages: dict[str, Any], **options: Any) -> Any:
    """The completion of a chat by the client of OpenAI."""
    options = {"max_tokens": LONGEST, **options}
    return served.client.chat.completions.create(model=served.name, messages=list(messages), **options)


def text(completion: Any) -> str:
    return completion.choices[0].message.content


def streamed(served: SimpleNamespace, *messages: dict[str, Any], **options: Any) -> str:
    pieces = chat(served, *messages, stream=True, **options)
    return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
