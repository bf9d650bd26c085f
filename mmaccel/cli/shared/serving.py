"""Options of the demo, which the command ``mmaccel demo`` and the demo by itself share."""

from __future__ import annotations

import argparse

from ..ask import add_model_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mmaccel demo``."""
    add_model_arguments(parser)
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=int, help="port to listen on (default: the first free one from 7860)")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers may ask for the demo, such as that of a proxy; *.example.com and * are patterns "
        "(default: localhost, addresses, and --host)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="that the model works for one question (default: 120)",
    )
    parser.add_argument("--share", action="store_true", help="also make a public address, over Gradio's servers")
