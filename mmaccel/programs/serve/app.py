"""The server as an ASGI application: ``/v1/chat/completions``, ``/v1/streams``, ``/v1/models``, ``/health``, ``/metrics``."""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import MmaccelError
from .. import allowed_hosts
from ..model_lock import Stopped
from .engine import Answer
from .errors import Refused, refusal
from .metrics import Metrics
from .scheduler import Job, Reservation, Scheduler
from .schema import ChatRequest, read
from .streams import StreamLimits, Streams

#: bytes of the body of a request, and seconds in which it must be sent
BODY, SENDING = 96 << 20, 60.0
#: a body must come at so many bytes a second, but for the first seconds
SPEED, START = 16 << 10, 5.0
#: bytes of a body that is read before its request has a reservation
SMALL = 64 << 10
#: bytes of a body behind which, as behind pictures, freed memory is given back to the system, and how many seconds later
_LARGE, _TRIM = 1 << 20, 1.0
CHAT = "/v1/chat/completions"

logger = logging.getLogger(__name__)


def make_app(
    scheduler: Scheduler,
    name: str,
    key: str | None = None,
    allowed: Sequence[str] | None = None,
    limits: StreamLimits | None = None,
) -> Starlette:
    """The application.

    name : of the model in requests and answers.
    key : the API key that requests must have; None for none.
    allowed : host names, or patterns of them, that ``Host`` headers may have beside ``localhost`` and addresses; None for all.
    limits : of live streams.
    """
    recipe = scheduler.engines[0].recipe
    metrics = Metrics(name, recipe.name)
    held = [one for one in (scheduler.engines[0].kept, scheduler.engines[0].prompts) if one is not None]
    metrics.watch(lambda: scheduler.waiting, lambda: scheduler.running, lambda: sum(one.nbytes for one in held))
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "mmaccel",
        "mmaccel": {"recipe": recipe.name, "retain": recipe.retain},
    }

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        _check_model(request.path_params["name"], name)
        return JSONResponse(card)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def figures(request: Request) -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    chat, streams = _Chat(scheduler, name, metrics), Streams(scheduler, metrics, limits or StreamLimits(), _body)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with streams.watched():
            yield
        await asyncio.to_thread(scheduler.close)
        chat.close()

    app = Starlette(
        routes=[
            Route(CHAT, chat, methods=["POST"]),
            *streams.routes(),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", figures),
        ],
        middleware=[Middleware(_AccessControl, metrics=metrics, key=key, allowed=allowed)],
        exception_handlers={Refused: _refuse, HTTPException: _refuse, MmaccelError: _refuse},
        lifespan=lifespan,
    )
    app.state.streams = streams
    return app


def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        sentence = f"{request.method} {request.scope['path'][:200]}: {error.detail}."
        error = Refused(error.status_code, sentence, headers=dict(error.headers or {}))
    error = refusal(error) or error
    assert isinstance(error, Refused)
    return JSONResponse(error.body(), error.status, error.headers)


def _check_model(asked: str, name: str) -> None:
    if asked != name:
        raise Refused(
            404, f"There is no model {asked[:80]!r} on this server; ask for {name!r}.", "model_not_found", "model"
        )


class _AccessControl:
    """Authentication, the check of ``Host`` headers, and the count of answers by status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, key: str | None, allowed: Sequence[str] | None) -> None:
        self.app, self.metrics, self.key, self.allowed = app, metrics, key, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["path"] == CHAT:
                self.metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        refused = self._refused(Headers(scope=scope), scope["path"])
        if refused is None:
            return await self.app(scope, receive, counted)
        await _refuse(Request(scope), refused)(scope, receive, counted)

    def _refused(self, headers: Headers, path: str) -> Refused | None:
        if self.allowed is not None and not allowed_hosts.is_allowed(headers.get("host"), self.allowed):
            return Refused(
                403,
                "The Host header names a host that is not allowed; start the server with --allow-host NAME to allow it.",
            )
        given = headers.get("authorization", "").encode()
        if self.key is not None and path != "/health" and not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            return Refused(401, "The API key is missing or wrong.", "invalid_api_key")
        return None


class _Chat:
    """The route of chat completions."""

    def __init__(self, scheduler: Scheduler, name: str, metrics: Metrics) -> None:
        self.scheduler, self.name, self.metrics = scheduler, name, metrics
        # one after the other: each holds the lock of the interpreter for a moment, which the event loop needs, too
        self.reader = ThreadPoolExecutor(1, "mmaccel-serve-reader")
        self._trimming: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        self.reader.shutdown(wait=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        with ExitStack() as stack:
            try:
                body = await _body(Request(scope, receive), lambda: stack.enter_context(self.scheduler.reserve()))
                request = await asyncio.get_running_loop().run_in_executor(self.reader, self._read, body)
                large = len(body) > _LARGE
                del body
                if large or (isinstance(request, ChatRequest) and request.media):
                    stack.callback(self._trim_soon)
                if isinstance(request, Refused):
                    raise request
                with self.scheduler.queued(request) as job:
                    leaving = asyncio.create_task(_until_left(receive, job))
                    try:
                        await self._respond(
                            job,
                            _ResponseWriter(self.name, request.stream, request.stream_options.include_usage, send),
                            arrived,
                        )
                    finally:
                        leaving.cancel()
            except (Stopped, ClientDisconnect):
                self.metrics.disconnected.inc()
            except Refused:
                raise
            except Exception as error:
                raise _as_refusal(error) from error

    def _trim_soon(self) -> None:
        """Return freed memory to the system soon, once for several requests."""

        def trim() -> None:
            self._trimming = None
            self.reader.submit(_release)

        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(_TRIM, trim)

    def _read(self, body: bytes) -> ChatRequest | Refused:
        """The checked request, or its refusal without a traceback, which would keep the body alive."""
        try:
            request = read(body)
            _check_model(request.model, self.name)
            self.scheduler.engines[0].check(request)
            return request
        except Exception as error:
            refused = _as_refusal(error)
            refused.__context__ = refused.__cause__ = None
            return refused.with_traceback(None)

    async def _respond(self, job: Job, writer: _ResponseWriter, arrived: float) -> None:
        try:
            await self._follow(job, writer, arrived)
        except Stopped:
            if writer.begun or not self.scheduler.closed:
                raise
            raise self.scheduler.ending() from None
        except Exception as error:
            if not writer.begun:
                raise
            # the status has been sent
            await writer.failed(_as_refusal(error))

    async def _follow(self, job: Job, writer: _ResponseWriter, arrived: float) -> None:
        first: float | None = None
        while True:
            event = await job.events.get()
            if isinstance(event, BaseException):
                try:
                    raise event
                finally:
                    # its traceback holds this frame
                    del event
            if first is None:
                first = time.perf_counter() - arrived
            if isinstance(event, Answer):
                self.metrics.answered(event, first)
                return await (writer.end if writer.stream else writer.whole)(event, first)
            if writer.stream:
                await writer.piece(event)


async def _until_left(receive: Receive, job: Job) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    job.cancel()


async def _body(request: Request, take: Callable[[], Reservation]) -> bytes:
    """The body of a request, for which ``take`` makes a reservation when it is complete or large."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # any page in a browser on this machine could send other types
        raise Refused(415, "Send the request as application/json.")
    too_large = Refused(413, f"The body of the request is too large; at most {BODY >> 20} MiB are taken.", "too_large")
    # h11 has seen that it is a number
    if int(request.headers.get("content-length", 0)) > BODY:
        raise too_large
    place: Reservation | None = None
    body = bytearray()
    begin = asyncio.get_running_loop().time()
    with suppress(TimeoutError):
        async with asyncio.timeout_at(begin + START) as limit:
            async for piece in request.stream():
                body += piece
                if len(body) > BODY:
                    body.clear()
                    raise too_large
                limit.reschedule(begin + min(SENDING, START + len(body) / SPEED))
                if len(body) > SMALL:
                    place = place or take()
                    place.hold(len(body))
            (place or take()).hold(len(body))
            return bytes(body)
    raise Refused(
        408,
        f"The request came too slowly; send it within {SENDING:g} seconds and at {SPEED >> 10} KiB a second or more.",
        headers={"x-should-retry": "false"},
    )


def _release() -> None:
    """Make glibc return freed memory to the system, of which it keeps blocks of several MiB."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _as_refusal(error: Exception) -> Refused:
    if (known := refusal(error)) is not None:
        return known
    logger.exception("a request failed", exc_info=error)
    return Refused(500, f"The server failed ({type(error).__name__}); see its log.", "internal_error")


class _ResponseWriter:
    """Writes one answer in OpenAI's format, whole or as an event stream."""

    def __init__(self, name: str, stream: bool, usage: bool, send: Send) -> None:
        self.about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self.stream, self.usage, self.send, self.begun = stream, usage, send, False

    async def whole(self, answer: Answer, first: float) -> None:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text},
            "finish_reason": answer.finish,
            "logprobs": None,
        }
        body = {**self.about, "object": "chat.completion", "choices": [choice]}
        text = json.dumps(body | {"usage": _usage(answer), "mmaccel": _figures(answer, first)})
        self.begun = True
        await self._start("application/json")
        await self._send(text)

    async def piece(self, text: str) -> None:
        if not self.begun:
            self.begun = True
            await self._start("text/event-stream")
            await self._chunk({"role": "assistant", "content": ""})
        if text:
            await self._chunk({"content": text})

    async def end(self, answer: Answer, first: float) -> None:
        await self.piece("")
        await self._chunk({}, answer.finish, mmaccel=_figures(answer, first))
        if self.usage:
            await self._event({**self.about, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answer)})
        await self._send("data: [DONE]\n\n")

    async def failed(self, error: Refused) -> None:
        await self._send(f"data: {json.dumps(error.body())}\n\n")

    async def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        await self._event({**self.about, "object": "chat.completion.chunk", "choices": [choice], **more})

    async def _event(self, data: dict[str, Any]) -> None:
        await self._send(f"data: {json.dumps(data)}\n\n", more=True)

    async def _send(self, text: str, more: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    async def _start(self, kind: str) -> None:
        headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.new_tokens,
        "total_tokens": answer.prompt_tokens + answer.new_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.reused},
    }


def _figures(answer: Answer, first: float) -> dict[str, Any]:
    names = ("recipe", "visual_tokens", "visual_tokens_kept", "kv_bytes", "kv_bytes_bare", "notes", "fallback")
    # not who drafted every single token
    drafting = {name: x for name, x in answer.stats["drafting"].items() if name != "drafted_by"}
    return {name: answer.stats[name] for name in names} | {"drafting": drafting, "time_to_first_token": first}
