"""The server of transformers serves an accelerated model, by the example that wraps it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from clients import LONGEST, MODELS, direct

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")
pytest.importorskip("fastapi", reason="the server of transformers needs FastAPI: pip install '.[test]'")


def test_the_example(things, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from transformers_serve import start

    from mmaccel import is_accelerated

    model = str(MODELS / "mini-llava")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start(model, "divprune", 0.1, host="127.0.0.1", port=port, device="cpu", non_blocking=True)
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20) as client:
            found = client.chat.completions.create(model=model, messages=[things.message], max_tokens=LONGEST)
        expected = direct("mini-llava", things.prompt, "divprune", retain=0.1)
        assert found.choices[0].message.content == expected.answer
        ((loaded,),) = [[one.model for one in server._model_manager.loaded_models.values()]]
        assert is_accelerated(loaded)
        stats = loaded.mmaccel.stats()
        assert (stats.visual_tokens, stats.visual_tokens_kept) == (196, expected.visual_tokens_kept)
    finally:
        server.kill_server()
