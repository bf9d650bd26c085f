"""Admission: requests that ask for the demo by its own address or name, and uploads that there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mmaccel.programs import allowed_hosts

from . import limits


class Entrance:
    """Middleware that answers for the demo what it must not.

    Parameters
    ----------
    app : the demo.
    folder : where uploads lie until Gradio removes them.
    allowed : names by which the demo may be asked for, such as ``*.example.com``.
    """

    def __init__(self, app: ASGIApp, folder: Path, allowed: Sequence[str]) -> None:
        self.app, self.folder, self.allowed = app, folder, allowed
        #: bytes that are on their way
        self.coming = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers, length = Headers(scope=scope), 0
        refused = None
        if not allowed_hosts.is_allowed(headers.get("host"), self.allowed):
            said = (
                "This demo is not to be reached by this name; whoever started it can allow it with --allow-host NAME."
            )
            refused = PlainTextResponse(said, 403)
        elif headers.get("content-type", "").startswith("multipart/"):
            length = int(headers.get("content-length", -1))
            if length < 0:
                refused = PlainTextResponse("An upload must say its length.", 411)
            elif not limits.room(self.folder, self.coming + length):
                said = (
                    f"Visitors have sent {limits.KEPT >> 20} MiB, which is all that is kept at once; try again later."
                )
                refused = PlainTextResponse(said, 507)
        if refused is not None:
            await refused(scope, receive, send)
            return
        self.coming += length
        try:
            await self.app(scope, receive, send)
        finally:
            self.coming -= length
