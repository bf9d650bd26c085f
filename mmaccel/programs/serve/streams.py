"""Live streams: a client opens one, pushes frames, asks at any time, and closes it."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...errors import MmaccelError
from ...media import untrusted
from ..model_lock import Stopped
from ..streaming import VideoSession
from .detokenizer import Detokenizer
from .engine import Engine
from .errors import Refused
from .metrics import Metrics
from .scheduler import Done, Job, Reservation, Scheduler, StreamWork
from .schema import AskStream, OpenStream, PushFrames, read_as

PATH = "/v1/streams"
#: seconds between two looks for streams that are idle
LOOK = 2.0

#: reads the body of a request, with a function that makes its reservation
ReadBody = Callable[[Request, Callable[[], Reservation]], Any]


@dataclass(frozen=True)
class StreamLimits:
    """Limits of live streams: how many are ``open`` at once, the ``frames`` of each, the keys ``cap`` that one may hold a head,
    the bytes ``parked`` that all may hold in host memory, and the seconds after which an ``idle`` one is closed."""

    open: int = 4
    frames: int = 200_000
    cap: int = 65_536
    parked: int = 4 << 30
    idle: float = 300.0


@dataclass(eq=False)
class Stream:
    """An open stream. Only one request is at work on it."""

    session: VideoSession
    name: str = field(default_factory=lambda: f"stream-{secrets.token_hex(12)}")
    used: float = field(default_factory=time.monotonic)
    pushed: int = 0
    busy: bool = False

    def figures(self) -> dict[str, Any]:
        """Figures of the stream for clients."""
        one = self.session
        return {
            "id": self.name,
            "object": "stream",
            "frames": self.pushed,
            "tokens": one.tokens(),
            "kv_bytes": one.nbytes(),
            "parked_frames": one.parked,
            "parked_bytes": one.parked_bytes(),
        }


class Streams:
    """The routes of live streams, and the streams that are open."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics, limits: StreamLimits, body: ReadBody) -> None:
        self.scheduler, self.limits, self._body = scheduler, limits, body
        self._open: dict[str, Stream] = {}
        self._asked = metrics.watch_streams(lambda: len(self._open), self._parked)

    def routes(self) -> list[Route]:
        """The routes."""
        one = PATH + "/{id}"
        return [
            Route(PATH, self._opened, methods=["POST"]),
            Route(one, self._told, methods=["GET"]),
            Route(one, self._closed, methods=["DELETE"]),
            Route(f"{one}/frames", self._pushed, methods=["POST"]),
            Route(f"{one}/ask", self._questioned, methods=["POST"]),
        ]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Close idle streams during the block, and all at its end."""

        async def look() -> None:
            while True:
                await asyncio.sleep(min(LOOK, self.limits.idle))
                self._expire()

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            self._open.clear()

    def _expire(self) -> None:
        oldest = time.monotonic() - self.limits.idle
        for name, stream in list(self._open.items()):
            if not stream.busy and stream.used < oldest:
                del self._open[name]

    def _parked(self) -> int:
        return sum(stream.session.parked_bytes() for stream in list(self._open.values()))

    @contextmanager
    def _held(self, request: Request) -> Any:
        """The stream of a request, which no other request has meanwhile."""
        self._expire()
        name = request.path_params["id"]
        stream = self._open.get(name)
        if stream is None:
            raise Refused(
                404,
                f"There is no stream {name[:80]!r}; open one with POST {PATH}. A stream is closed after "
                f"{self.limits.idle:g} seconds without a request.",
                "stream_not_found",
            )
        if stream.busy:
            raise Refused(409, "Another request is at work on this stream; wait for its response.", "stream_busy")
        stream.busy = True
        try:
            yield stream
        finally:
            stream.busy, stream.used = False, time.monotonic()

    # --- routes -----------------------------------------------------------------------------------------------
    async def _opened(self, request: Request) -> Response:
        with self.scheduler.reserve() as place:
            given = read_as(await self._body(request, lambda: place), OpenStream)
        self._expire()
        if len(self._open) >= self.limits.open:
            raise Refused(
                429,
                f"{len(self._open)} streams are open, as many as this server allows; close one, or try again later.",
                "too_many_streams",
                headers={"retry-after": "10"},
            )
        if given.cap_tokens > self.limits.cap:
            raise Refused(400, f"`cap_tokens` must be at most {self.limits.cap}, got {given.cap_tokens}.")
        engine = self.scheduler.engines[0]
        stream = Stream(VideoSession(engine.model, processor=engine.processor, **given.model_dump()))
        self._open[stream.name] = stream
        return JSONResponse(stream.figures(), 201)

    async def _told(self, request: Request) -> Response:
        with self._held(request) as stream:
            return JSONResponse(stream.figures())

    async def _closed(self, request: Request) -> Response:
        with self._held(request) as stream:
            del self._open[stream.name]
            return JSONResponse({"id": stream.name, "object": "stream", "deleted": True})

    async def _pushed(self, request: Request) -> Response:
        with self._held(request) as stream, self.scheduler.reserve() as place:
            given = read_as(await self._body(request, lambda: place), PushFrames)
            if stream.pushed + len(given.frames) > self.limits.frames:
                raise Refused(
                    400, f"A stream has at most {self.limits.frames} frames on this server; open another one."
                )
            if self._parked() > self.limits.parked:
                raise Refused(
                    507,
                    f"The streams of this server have parked more than {self.limits.parked >> 20} MiB; close one, and push "
                    "the same frames again.",
                    "streams_full",
                )

            def push(engine: Engine, send: Callable[[str], None], stop: threading.Event) -> None:
                frames = _decoded(engine, given.frames, stop)
                with engine.turn(stop):
                    stream.session.model = engine.model
                    stream.session.push(frames)

            await self._done(request, push)
            stream.pushed += len(given.frames)
            return JSONResponse(stream.figures())

    async def _questioned(self, request: Request) -> Response:
        with ExitStack() as stack:
            stream: Stream = stack.enter_context(self._held(request))
            place = stack.enter_context(self.scheduler.reserve())
            given = read_as(await self._body(request, lambda: place), AskStream)
            most = self.scheduler.engines[0].limits.longest
            longest = most if given.max_tokens is None else given.max_tokens
            if not 1 <= longest <= most:
                raise Refused(400, f"`max_tokens` must be from 1 to {most} on this server, got {longest}.")

            def ask(engine: Engine, send: Callable[[str], None], stop: threading.Event) -> str:
                text = Detokenizer(engine.processor.tokenizer, ())
                with engine.turn(stop) as check:

                    def token(number: int) -> None:
                        check()
                        send(text.add([number]))

                    stream.session.model = engine.model
                    answer = stream.session.ask(given.question, longest, token)
                send(text.end())
                return answer

            if not given.stream:
                answer = await self._done(request, ask)
                self._asked.inc()
                return JSONResponse(self._answer(stream, answer))
            job = stack.enter_context(self.scheduler.queued(StreamWork(ask)))
            # what went wrong before the first piece has a status of its own
            first = await _event(job)
            held = stack.pop_all()

        async def events() -> AsyncIterator[str]:
            with held:
                event: Any = first
                while isinstance(event, str):
                    if event:
                        yield _sent({"id": stream.name, "object": "stream.answer.chunk", "delta": event})
                    try:
                        event = await _event(job)
                    except Refused as refused:
                        yield _sent(refused.body())
                        return
                self._asked.inc()
                yield _sent(self._answer(stream, event.result))
                yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    @staticmethod
    def _answer(stream: Stream, answer: str) -> dict[str, Any]:
        return {
            "id": stream.name,
            "object": "stream.answer",
            "answer": answer,
            "recalled_frames": stream.session.recalled,
        }

    async def _done(self, request: Request, run: Callable[..., Any]) -> Any:
        """What a model's work returns; it stops when the client leaves."""
        with self.scheduler.queued(StreamWork(run)) as job:

            async def leaving() -> None:
                while not await request.is_disconnected():
                    await asyncio.sleep(0.1)
                job.cancel()

            watching = asyncio.create_task(leaving())
            try:
                while isinstance(event := await _event(job), str):
                    pass
                return event.result
            finally:
                watching.cancel()


async def _event(job: Job) -> str | Done:
    """The next piece of text of a job, or its end; raises what ended it."""
    event: Any = await job.events.get()
    if isinstance(event, Stopped):
        raise ClientDisconnect
    if isinstance(event, BaseException):
        raise event
    assert isinstance(event, (str, Done))
    return event


def _decoded(engine: Engine, addresses: list[str], stop: threading.Event) -> np.ndarray:
    """Frames ``[T, H, W, 3]`` of the addresses of pictures, all of one size."""
    end, frames = time.monotonic() + untrusted.SECONDS, list[np.ndarray]()
    with tempfile.TemporaryDirectory(prefix="mmaccel-serve-", ignore_cleanup_errors=True) as folder:
        for number, url in enumerate(addresses):
            if stop.is_set():
                raise Stopped
            path = engine.sources.fetch(url, Path(folder), end, stop)
            if 3 * untrusted.pixels(path) * len(addresses) > untrusted.MEMORY:
                raise MmaccelError("The frames of one request are too large; push fewer, or smaller ones.")
            try:
                frame = np.asarray(untrusted.picture(path).convert("RGB"))
            except MmaccelError:
                raise
            except Exception as error:
                raise MmaccelError(
                    f"Frame {number} is broken and cannot be decoded ({type(error).__name__}); send another."
                ) from error
            if frames and frame.shape != frames[0].shape:
                raise MmaccelError("The frames of a stream must have one size; resize them before they are pushed.")
            frames.append(frame)
    return np.stack(frames)


def _sent(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
