"""Live streams of the server."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clients import loaded
from PIL import Image
from waiting import until

from mmaccel import VideoSession
from mmaccel.programs.model_lock import ModelSlot
from mmaccel.programs.serve import streams
from mmaccel.programs.serve.streams import StreamLimits
from mmaccel.suite import make_item, render_clip

MODEL, QUESTION = "mini-qwen-vl", "which object appears first ?"
LIMITS = StreamLimits(open=2, frames=40, cap=4096, idle=60.0)


def url(frame: np.ndarray) -> str:
    held = io.BytesIO()
    Image.fromarray(frame).save(held, "png")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"


@pytest.fixture(scope="module")
def film() -> np.ndarray:
    return render_clip(make_item("order", "test", 2, frames=16).clip, 112)


@pytest.fixture(scope="module")
def served(serve_module: Callable[..., SimpleNamespace]) -> Iterator[SimpleNamespace]:
    yield serve_module(MODEL, limits_of_streams=LIMITS, several=2)


def opened(served: SimpleNamespace, **options: Any) -> str:
    response = served.http.post("/v1/streams", json={"cap_tokens": 260, "fps": 4, **options})
    assert response.status_code == 201, response.text
    return f"/v1/streams/{response.json()['id']}"


@pytest.fixture
def stream(served: SimpleNamespace) -> Iterator[str]:
    path = opened(served)
    yield path
    served.http.delete(path)


def push(served: SimpleNamespace, path: str, frames: np.ndarray) -> Any:
    return served.http.post(f"{path}/frames", json={"frames": [url(frame) for frame in frames]})


def events(response: Any) -> list[Any]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_answers_as_a_session(served: SimpleNamespace, film: np.ndarray, stream: str) -> None:
    """Whole and as an event stream, at any time, and again."""
    model, processor = ModelSlot(*loaded(MODEL), 0).twin()
    wanted = VideoSession(model, processor=processor, cap_tokens=260, fps=4, recall="rekv")
    for half in (film[:10], film[10:]):
        wanted.push(half)
        told = push(served, stream, half)
        assert told.status_code == 200, told.text
        answer = wanted.ask(QUESTION, 8)
        asked = {"question": QUESTION, "max_tokens": 8}
        whole = served.http.post(f"{stream}/ask", json=asked).json()
        assert (whole["answer"], whole["recalled_frames"]) == (answer, wanted.recalled)
        *pieces, last = events(served.http.post(f"{stream}/ask", json={**asked, "stream": True}))
        assert len(pieces) > 1 and last == whole and "".join(piece["delta"] for piece in pieces).strip() == answer
    told = served.http.get(stream).json()
    assert told["frames"] == 16 and told["parked_frames"] == wanted.parked > 0
    assert told["kv_bytes"] == wanted.nbytes() and told["parked_bytes"] == wanted.parked_bytes()
    page = served.http.get("/metrics").text
    assert "mmaccel_streams 1.0" in page and "mmaccel_streams_answers_total 4.0" in page
    assert f"mmaccel_streams_parked_bytes {float(told['parked_bytes'])}" in page


def test_limits(served: SimpleNamespace, film: np.ndarray, stream: str) -> None:
    other = opened(served)
    full = served.http.post("/v1/streams", json={})
    assert full.status_code == 429 and "2 streams are open" in full.json()["error"]["message"]
    assert served.http.delete(other).json()["deleted"]
    assert served.http.get(other).status_code == 404
    for _ in range(2):
        assert push(served, stream, film).status_code == 200
    late = push(served, stream, film)
    assert late.status_code == 400 and "at most 40 frames" in late.json()["error"]["message"]
    assert served.http.get(stream).json()["frames"] == 32


def test_one_request_at_a_time(served: SimpleNamespace, stream: str) -> None:
    held = served.app.streams._open[stream.rpartition("/")[2]]
    held.busy = True
    response = served.http.get(stream)
    held.busy = False
    assert response.status_code == 409 and "Another request is at work" in response.json()["error"]["message"]


def test_a_stream_that_stalls_is_closed(
    served: SimpleNamespace, film: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = opened(served)
    push(served, path, film[:4])
    held = served.app.streams._open[path.rpartition("/")[2]]
    held.used -= LIMITS.idle + 1
    until(lambda: not served.app.streams._open, 3 * streams.LOOK + 20, every=0.1)
    # without a body: an answer before the body was read ends the connection, which the client might use again
    gone = served.http.get(path)
    assert gone.status_code == 404 and "closed after 60 seconds without a request" in gone.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("", {"recall": "knorm"}, "'knorm' recalls no frames"),
        ("", {"recall": 3}, "recall"),
        ("", {"cap_tokens": 0}, "cap_tokens must be a whole number of at least 1"),
        ("", {"cap_tokens": 5000}, "`cap_tokens` must be at most 4096"),
        ("", {"fps": 0}, "fps > 0"),
        ("", {"speed": 2}, "speed is not known here"),
        ("/frames", {"frames": []}, "frames"),
        ("/frames", {"frames": ["data:image/png;base64,AAAA"]}, "picture"),
        ("/frames", {"frames": ["file:///etc/passwd"]}, "reads no files"),
        ("/frames", {}, "frames is missing"),
        ("/ask", {"question": "what?"}, "push frames first"),
        ("/ask", {"question": "what?", "max_tokens": 0}, "`max_tokens` must be from 1"),
        ("/ask", {}, "question is missing"),
    ],
)
def test_bad_input(served: SimpleNamespace, stream: str, path: str, body: dict[str, Any], said: str) -> None:
    if not path:
        served.http.delete(stream)
    response = served.http.post(stream + path if path else "/v1/streams", json=body)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and said in message and "\n" not in message
    assert not path or served.http.get(stream).json()["frames"] == 0


def test_frames_of_two_sizes_change_nothing(served: SimpleNamespace, film: np.ndarray, stream: str) -> None:
    assert push(served, stream, film[:4]).status_code == 200
    before = served.http.get(stream).json()
    for frames in ([film[0], film[0, :56]], [film[0, :56]] * 2):
        bad = push(served, stream, frames)  # type: ignore[arg-type]
        assert bad.status_code == 400 and served.http.get(stream).json() == before
