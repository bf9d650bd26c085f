"""Starting the demo: the models load while the page is shown already, and everything written is below one folder that goes."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import routes
from starlette.middleware import Middleware

from mmaccel import MmaccelError
from mmaccel.cli.shared.options import STDOUT
from mmaccel.cli.shared.text import json_file, write_json
from mmaccel.media import untrusted

from . import examples
from .engine import House
from .entrance import Entrance
from .page import build

_HERE = Path(__file__).parent
#: questions that may wait
_WAITING = 16
#: seconds that a model which is being loaded may take at the end
_LAST = 15.0


@contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder for uploads and whatever else is written, which is removed in the end."""
    before, named, routed = tempfile.tempdir, os.environ.get("GRADIO_TEMP_DIR"), routes.DEFAULT_TEMP_DIR
    with tempfile.TemporaryDirectory(prefix="mmaccel-demo-", ignore_cleanup_errors=True) as folder:
        # Gradio is told where to put uploads by this variable alone, and its routes had read it when they were imported
        tempfile.tempdir = os.environ["GRADIO_TEMP_DIR"] = routes.DEFAULT_TEMP_DIR = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir, routes.DEFAULT_TEMP_DIR = before, routed
            if named is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = named


@contextmanager
def terminable() -> Iterator[None]:
    """Being terminated, which is how services end a program, is taken for an interrupt, so that the folder goes then too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def launch(house: House, folder: Path, allowed: Sequence[str] = (), **options: Any) -> tuple[gr.Blocks, str]:
    """Show the page; returns it, and its address.

    Parameters
    ----------
    folder : of :func:`workplace`.
    allowed : names, or patterns of names, by which the page may be asked for beside ``localhost`` and addresses.
    **options : those of ``gr.Blocks.launch``.
    """
    found = examples.make(folder)
    blocks = build(house, found)
    blocks.queue(max_size=_WAITING, default_concurrency_limit=house.several)
    _, address, _ = blocks.launch(
        prevent_thread_lock=True,
        quiet=True,
        max_file_size=untrusted.UPLOAD,
        ssr_mode=False,
        # else Gradio asks for its own page, and where that takes more than 3 seconds, as on a busy machine, it gives up
        _frontend=False,
        footer_links=["api"],
        app_kwargs={"middleware": [Middleware(Entrance, folder=folder, allowed=allowed)]},
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css_paths=[_HERE / "style.css"],
        head=f"<script>{_script(found)}</script>",
        **options,
    )
    return blocks, address


def _script(found: Sequence[examples.Example]) -> str:
    """The script of the page, which knows the questions of the examples by their files."""
    known = json.dumps({one.path.name: one.question for one in found}).replace("<", "\\u003c")
    return (_HERE / "page.js").read_text(encoding="utf-8").replace("EXAMPLES", known)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted.

    Raises
    ------
    MmaccelError
        If the model does not load, or the port is taken.
    """
    if options.port is not None and not 0 < options.port < 1 << 16:
        raise MmaccelError(f"--port must be from 1 to 65535, not {options.port}.")
    if not (math.isfinite(options.time_limit) and options.time_limit > 0):
        raise MmaccelError(f"--time-limit must be seconds above 0, not {options.time_limit:g}.")
    allowed = [
        *options.allow_host,
        *([options.host] if options.host else []),
        *(["*.gradio.live"] if options.share else []),
    ]
    house = House(options, options.time_limit, options.several)
    with terminable(), workplace() as folder:
        try:
            blocks, address = launch(
                house, folder, allowed, server_name=options.host, server_port=options.port, share=options.share
            )
        except OSError as error:
            raise MmaccelError(
                f"The demo cannot listen there ({str(error).split('. ')[0]}); give another --port or --host."
            ) from None
        loading = threading.Thread(target=house.load, daemon=True)
        loading.start()
        try:
            told = {"address": address}
            if (path := json_file(options.json)) is not None:
                write_json(path, told)
            # in one line, for a program that waits for it
            print(json.dumps(told) if options.json == STDOUT else f"The demo is at {address}", flush=True)
            house.wait()
            # without any model there is nothing to show
            house.engine("picture")
            if options.json != STDOUT:
                print(house.sentence(), flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            blocks.close(verbose=False)
            # an interpreter that ends while a thread loads weights is aborted; a large model is not waited for
            loading.join(_LAST)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``mmaccel demo``, where ``mmaccel`` is not on the path."""
    from mmaccel.cli import main as mmaccel

    return mmaccel(["demo", *(sys.argv[1:] if argv is None else argv)])
