"""HTTP connections with limits: their number, the seconds until a request begins, the seconds in which an answer is read."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

#: connections at a time, and file descriptors that are left for everything else
CONNECTIONS, SPARE = 512, 128
#: connections that are accepted at once; each has a descriptor before it is counted
BACKLOG = 16
#: seconds from a connection, or from the last answer, to the end of the next headers
HEADERS = 10.0
#: seconds in which a client must read a part of its answer
TAKING = 30.0
#: bytes that are read at once, and of a chunked body, whose chunks may be of a byte each and are parsed one by one
_READ, _CHUNKED = 128 << 10, 8 << 10


def limit() -> int:
    """Number of connections that this process may have."""
    if sys.platform == "win32":
        return CONNECTIONS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if soft == resource.RLIM_INFINITY else min(CONNECTIONS, max(8, soft - SPARE))


class _Draining:
    """A transport whose ``close`` does nothing if ``drain`` returns True: an unread request would reset the connection."""

    def __init__(self, transport: asyncio.Transport, drain: Callable[[], bool]) -> None:
        self._transport, self._drain = transport, drain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Close the transport, unless it drains."""
        if not self._drain():
            self._transport.close()


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's protocol with limits. Of too many connections the one that is idle for longest is closed.

    A request may be answered before its body was read. The answer then has ``Connection: close``; the server closes its half
    of the connection, and reads and ignores the rest of the body, so that the client reads the answer.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._inner, self.app = self.config.loaded_app, self._announced
        self._buffer: memoryview | None = None
        self._since = time.monotonic()
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        #: whether further bytes are ignored
        self._done = False

    @property
    def idle(self) -> bool:
        """Whether there is no request with complete headers."""
        return self.cycle is None or self.cycle.response_complete

    async def _announced(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application; an answer that begins before the body was read says that the connection will close."""

        async def announcing(message: Message) -> None:
            if message["type"] == "http.response.start" and self.conn.their_state is h11.SEND_BODY:
                message = {**message, "headers": [*message.get("headers", ()), CLOSE_HEADER]}
            await send(message)

        await self._inner(scope, receive, announcing)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the oldest idle connection if there are too many."""
        super().connection_made(_Draining(transport, self._drain))  # type: ignore[arg-type]
        if len(self.connections) > limit():
            others = (one for one in self.connections if isinstance(one, Connection) and one.idle and one is not self)
            oldest = min(others, key=lambda one: one._since, default=self)
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for timer in (self._late, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """A buffer for the next bytes."""
        known = not self.idle and not any(name == b"transfer-encoding" for name, _ in self.headers)
        self._buffer = memoryview(bytearray(_READ if known else _CHUNKED))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on the bytes in the buffer."""
        assert self._buffer is not None
        data, self._buffer = bytes(self._buffer[:nbytes]), None
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Pass on bytes of a request, unless it was answered before it was read."""
        if not self._done:
            super().data_received(data)
            self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._wait()

    def _drain(self) -> bool:
        """Whether a connection that would be closed stays half open, since an answered request is still being sent."""
        if self._done or self.conn.their_state is not h11.SEND_BODY or not self.cycle.response_complete:
            return False
        self._done = True
        with suppress(OSError):
            self.transport.write_eof()
        return True

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, unless an answer has begun."""
        with suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read: start the timer."""
        super().pause_writing()
        self._stalled = self.loop.call_later(TAKING, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again: stop the timer."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _wait(self) -> None:
        """Start the timer for the headers of a request, or stop it."""
        if not self.idle:
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None and not self.transport.is_closing():
            self._since = time.monotonic()
            self._late = self.loop.call_later(HEADERS, self.transport.abort)
