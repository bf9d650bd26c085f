"""The process around the application: its address, its models, and how it ends."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Any

import uvicorn

from ...errors import MmaccelError
from ...recipe import Recipe
from ..turns import Seat
from .answering import Answering, Limits
from .app import make_app
from .desk import Desk
from .sources import Sources

#: seconds in which answers may end when the server does
GRACE = 30


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet.

    Raises
    ------
    MmaccelError
        If there is no such address, or the port is taken.
    """
    found: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        # else the port of a server that has just ended is taken for a while
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, UnicodeError) as error:
        if found is not None:
            found.close()
        raise MmaccelError(
            f"The server cannot listen at {host}, port {port} ({error}); give another --port or --host."
        ) from None
    return found


def address_of(bound: socket.socket) -> str:
    """Of a socket, as clients write it."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_here(bound: socket.socket) -> bool:
    """Whether only this machine reaches a socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def make_desk(
    model: Any,
    processor: Any,
    recipe: Recipe,
    *,
    several: int = 1,
    waiting: int = 16,
    sources: Sources | None = None,
    limits: Limits | None = None,
) -> Desk:
    """A model with a recipe, and twins of it that share its weights, as a desk.

    Parameters
    ----------
    several : requests that are answered at once.
    waiting : requests that may wait.

    Raises
    ------
    MmaccelError
        If the model cannot honour the recipe.
    """
    # a model is copied while it is bare
    first = Seat(model, processor, 0)
    pairs = [*(first.twin() for _ in range(several - 1)), (model, processor)]
    seats = [Answering(*pair, recipe, sources or Sources(), limits or Limits()) for pair in pairs]
    return Desk(seats, waiting)


def make_server(desk: Desk, name: str, **options: Any) -> uvicorn.Server:
    """The server, for ``run(sockets=[...])``; ``options`` are those of :func:`mmaccel.programs.serve.app.make_app`."""
    config = uvicorn.Config(
        make_app(desk, name, **options),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=GRACE,
    )
    return uvicorn.Server(config)


def run(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until interrupted or terminated."""
    with suppress(KeyboardInterrupt):
        server.run(sockets=[bound])
