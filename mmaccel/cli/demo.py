"""Show the demo in a browser: what a model looks at, what a recipe drops, and what that changes.

Open the printed address, choose an example and press Ask: a question about a picture or a clip is answered in full and
accelerated, side by side. Ctrl-C ends the demo. Without --model the small models that come with mmaccel are shown, offline.
Visitors can send files and recipes, but cannot name files or models of this machine; uploads are in a temporary folder that is
removed in the end, and a question may take no longer than --time-limit. On a remote machine, forward the port with ssh -L
7860:127.0.0.1:7860 MACHINE and open the address locally.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Annotated

import typer

from .shared.options import AllowHost, Json, ModelOptions, Several

PLACE = 7
EXTRA = "demo"
HELP = "show what a recipe does in a browser"
EXAMPLES = """\
examples:
  mmaccel demo
  mmaccel demo --model Qwen/Qwen2.5-VL-3B-Instruct --device cuda
  mmaccel demo --model ./my-llava --host 0.0.0.0 --port 8080
  mmaccel demo --several 4
"""


@dataclass(frozen=True)
class Serving(ModelOptions):
    """The model, and access to the demo."""

    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1, this machine alone]"),
    ] = None
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port to listen on.  [default: the first free one from 7860]")
    ] = None
    allow_host: AllowHost = None
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of the model for one question.")] = 120.0
    several: Several = 1
    share: Annotated[bool, typer.Option("--share", help="Also make a public address, over Gradio's servers.")] = False


def run(serving: Serving, output: Json = None) -> int:
    """Serve until interrupted."""
    # the one import that points up: the demo is optional, and begins here
    from mmaccel_demo import serve

    options = vars(serving) | {"allow_host": serving.allow_host or [], "json": output}
    return serve.run(argparse.Namespace(**options))
