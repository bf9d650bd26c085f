"""The process around the application: its address, its models, and its end."""

from __future__ import annotations

import gc
import ipaddress
import logging
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import uvicorn

from ...errors import MmaccelError
from ...families import family_of
from ...recipe import Recipe
from ..model_lock import ModelSlot
from ..prefix_caches import PrefixCaches
from ..prompt_cache import PromptCache
from .app import make_app
from .connections import BACKLOG, Connection
from .engine import Engine, Limits, ages
from .scheduler import Scheduler
from .sources import Sources

#: seconds that answers may take when the server shuts down
GRACE = 30
#: connections that the system accepts while the server is busy
LISTEN = 128
#: seconds between two lines of one logger and level
_QUIET = 60.0


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet. Raises MmaccelError if there is no such address, or the port is
    taken."""
    bound: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        # the port of a server that has just ended is free at once
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        if bound is not None:
            bound.close()
        raise MmaccelError(
            f"The server cannot listen at {host}, port {port} ({error}); give another --port or --host."
        ) from None
    return bound


def address_of(bound: socket.socket) -> str:
    """The URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_here(bound: socket.socket) -> bool:
    """Whether a socket can be reached from this machine only."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def make_scheduler(
    model: Any,
    processor: Any,
    recipe: Recipe,
    *,
    several: int = 1,
    batch: int = 1,
    waiting: int = 16,
    sources: Sources | None = None,
    limits: Limits | None = None,
    drafts: Mapping[str, Any] | None = None,
    prefix_cache: int = 0,
    prompt_cache: int = 0,
) -> Scheduler:
    """A model with a recipe, and twins of it that share its weights, as a scheduler. Raises MmaccelError if the model
    cannot honour the recipe.

    several : requests that are answered at once.
    batch : requests that wait and are answered as rows of one batch, at most, where their budgets and numbers of pictures and
        clips are equal.
    waiting : requests that may wait.
    drafts : ``lossless``, ``draft``, ``lookup``, ``fallback`` and ``offload`` of ``accelerate_vlm``.
    prefix_cache : bytes of kept caches, with which a prompt that begins like an earlier one goes on; 0 keeps none.
    prompt_cache : bytes of kept keys of single pictures, which are read apart from prompts, see
        :class:`mmaccel.programs.prompt_cache.PromptCache`; with 0 they are not.
    """
    if batch > 1:
        _check_batches(model, processor, drafts, prompt_cache)
    # copied while the model is bare
    first = ModelSlot(model, processor, 0)
    pairs = [*(first.twin() for _ in range(several - 1)), (model, processor)]
    kept = PrefixCaches(prefix_cache, crops=not ages(recipe)) if prefix_cache else None
    engines = [Engine(*pair, recipe, sources or Sources(), limits or Limits(), drafts, kept) for pair in pairs]
    if prompt_cache:
        if any((drafts or {}).values()):
            raise MmaccelError(
                "--prompt-cache does not go with drafts, --fallback or --offload; leave out one of them."
            )
        prompts = PromptCache(model, processor, prompt_cache)
        for engine in engines:
            engine.prompts = prompts
    return Scheduler(engines, waiting, batch)


def _check_batches(model: Any, processor: Any, drafts: Mapping[str, Any] | None, prompt_cache: int) -> None:
    """Refuse batches where an answer would not be that of its request alone, or options work for one request at a time."""
    alone = {name: given for name, given in (drafts or {}).items() if name != "offload"} | {
        "prompt-cache": prompt_cache
    }
    if names := ", ".join(f"--{name}" for name, given in alone.items() if given):
        raise MmaccelError(f"{names} works for one request at a time; leave out one of --batch-size and {names}.")
    family = family_of(model)
    if family.numbers_pictures:
        raise MmaccelError(
            f"{family.name} counts the pictures of all rows of a batch, so answers would depend on other requests; leave out "
            "--batch-size."
        )
    if processor.tokenizer.pad_token is None:
        raise MmaccelError("The tokenizer has no padding token, which batches need; leave out --batch-size.")


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            # asyncio has listened with a small backlog
            bound.listen(LISTEN)


class _Quiet(logging.Filter):
    """One line a minute of each logger, level and kind of error: errors of clients must not fill a disk."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[Any, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.name, record.levelno, record.exc_info and record.exc_info[0]
        now = time.monotonic()
        if now - self._last.get(key, -_QUIET) < _QUIET:
            return False
        self._last[key] = now
        return True


def make_server(scheduler: Scheduler, name: str, **options: Any) -> uvicorn.Server:
    """The server, for ``run(sockets=[...])``; ``options`` are those of :func:`mmaccel.programs.serve.app.make_app`."""
    config = uvicorn.Config(
        make_app(scheduler, name, **options),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        loop="asyncio",
        http=Connection,
        backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE,
    )
    return _Server(config)


def run(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until interrupted or terminated."""
    loggers = [logging.getLogger(name) for name in ("asyncio", "uvicorn.error", f"{__package__}.app")]
    quiet = _Quiet()
    for logger in loggers:
        logger.addFilter(quiet)
    # a request with many values would make the garbage collector visit all objects of the model
    gc.freeze()
    try:
        with suppress(KeyboardInterrupt):
            server.run(sockets=[bound])
    finally:
        gc.unfreeze()
        for logger in loggers:
            logger.removeFilter(quiet)
