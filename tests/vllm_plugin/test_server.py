"""``vllm serve`` with a recipe: server and engine in processes of their own, asked over HTTP."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from waiting import until

pytest.importorskip("vllm", reason="needs vLLM, see benchmarks/serving/environment.sh")

import httpx
import shipped

pytestmark = pytest.mark.vllm

MODEL = "mini-qwen-vl"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[httpx.Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = json.dumps({"mmaccel": {"recipe": "divprune", "retain": 0.25}})
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(shipped.MODELS / MODEL), *options]
    command += [
        "--trust-request-mm-kwargs",
        "--served-model-name",
        MODEL,
        "--port",
        str(port),
        "--hf-overrides",
        overrides,
    ]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    try:

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            with suppress(httpx.TransportError):
                return client.get("/health").status_code == 200
            return False

        until(healthy, 400, every=1)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(60)


def chat(server: httpx.Client, prompt: shipped.Prompt, **processing: object) -> httpx.Response:
    content = []
    for picture in prompt.pictures:
        file = io.BytesIO()
        picture.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": prompt.question}]}]
    body = {"model": MODEL, "messages": messages, "temperature": 0.0, "max_tokens": shipped.TOKENS}
    return server.post("/v1/chat/completions", json={**body, "mm_processor_kwargs": processing} if processing else body)


def answer(response: httpx.Response) -> tuple[str, int]:
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["message"]["content"].strip(), found["usage"]["prompt_tokens"]


def test_answers_and_budgets_over_http(server):
    asked = shipped.prompts("existence", "comparison", count=3)
    for retain in (None, 0.1):
        options = {} if retain is None else {"retain": retain}
        want = shipped.expected(MODEL, asked, "divprune", retain=retain or 0.25)
        assert [answer(chat(server, one, **options))[0] for one in asked] == want
    lengths = [answer(chat(server, asked[0], **({"retain": r} if r else {})))[1] for r in (0.1, None, 0.5)]
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize(
    "processing",
    [
        *({"retain": retain} for retain in (0, -1, 1.5, "much", [0.1], True)),
        *({"mmaccel": {"retain": retain}} for retain in (0, 2.5, "0.1", [0.1], False)),
        {"mmaccel": {"recipe": "uniform", "retain": 0.1}},
        {"mmaccel": {"retian": 0.1}},
        {"mmaccel": {"retain": 0.1, "positions": "paper"}},
        {"retain": {"images": 0.1}},
        {"mmaccel": {"retain": {"video": 1.5}}},
        {"mmaccel": "false"},
        {"mmaccel": 0.1},
        {"mmaccel": [0.1]},
        {"mmaccel": {"retain": 0.1}, "retain": 0.1},
        {"recipe": "uniform"},
        {"retian": 0.1},
        {"images_kwargs": {"retain": 0.1}},
    ],
    ids=str,
)
def test_what_a_request_cannot_have_is_an_http_400(server, processing):
    (asked,) = shipped.prompts("existence", count=1)
    refused = chat(server, asked, **processing)
    assert refused.status_code == 400, refused.text
    said = refused.json()["error"]["message"]
    assert "retain" in said or "mmaccel" in said
    assert answer(chat(server, asked))[0] == shipped.expected(MODEL, [asked], "divprune", retain=0.25)[0]


def test_both_spellings_of_a_budget_over_http(server):
    asked = shipped.prompts("existence", "comparison", count=3)
    for processing, options in (
        ({"mmaccel": {"retain": 0.1}}, ("divprune", 0.1)),
        ({"retain": 0.1}, ("divprune", 0.1)),
        ({"retain": {"image": 0.1, "video": 0.5}}, ("divprune", 0.1)),
        ({"mmaccel": {"retain": {"video": 0.1}}}, ("divprune", 0.25)),
        ({"mmaccel": None}, ("divprune", 0.25)),
        ({"retain": None}, ("divprune", 0.25)),
        ({"mmaccel": True}, ("divprune", 0.25)),
        ({"mmaccel": False}, ("none", 1.0)),
        ({"images_kwargs": {"do_resize": True}}, ("divprune", 0.25)),
    ):
        which, retain = options
        want = shipped.expected(MODEL, asked, which, **({} if which == "none" else {"retain": retain}))
        assert [answer(chat(server, one, **processing))[0] for one in asked] == want, processing


def figures(server: httpx.Client) -> dict[str, float]:
    found = re.findall(r'^mmaccel_(\w+)_total\{modality="image"\} (\S+)$', server.get("/metrics").text, re.M)
    return {name: float(value) for name, value in found}


def test_metrics_count_the_tokens_of_prompts_and_the_seconds_of_the_engine(server):
    """Of a picture in two prompts, which is encoded once."""
    first, second = shipped.prompts("count", count=2)
    answer(chat(server, first))
    before = figures(server)
    _, whole = answer(chat(server, second, mmaccel=False))
    _, reduced = answer(chat(server, second))
    middle = figures(server)
    answer(chat(server, second))
    after = figures(server)
    each = middle["visual_tokens"] - before["visual_tokens"]
    assert each == 2 * 49 and middle["visual_tokens_kept"] - before["visual_tokens_kept"] == 49 + 49 - (whole - reduced)
    assert before["selection_seconds"] < middle["selection_seconds"] == after["selection_seconds"]
    assert after["visual_tokens"] - middle["visual_tokens"] == 49


def test_a_wrong_override_is_one_sentence() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(shipped.MODELS / MODEL)]
    command += ["--dtype", "float32", "--hf-overrides", json.dumps({"mmaccel": {"recipe": "divprun"}})]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 1 and "Traceback" not in ran.stdout + ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("error: There is no recipe 'divprun'; did you mean 'divprune'")
