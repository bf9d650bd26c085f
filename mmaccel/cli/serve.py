"""Serve a model with any recipe through OpenAI's chat completions API, with pictures and clips.

Point a client at the printed address with /v1 appended. Every recipe can be served, those of the KV cache too. A request can
set its own budget with the field "mmaccel": {"retain": 0.1}, or run bare with "mmaccel": false. With --fallback, or the field
"mmaccel": {"fallback": 0.9}, an unsure answer is read again with all tokens; nothing is sent before an answer is accepted.
Pictures and clips come as data: addresses; files and other hosts only where --allow-files and --allow-urls allow them. Requests
are answered one by one (see --batch-size and --several) while others wait; when the queue is full, clients are told when to try
again. /metrics is for Prometheus. Ctrl-C ends the server after the current answers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MmaccelError
from .ask import load_model, shipped
from .shared.options import (
    STDOUT,
    AllowHost,
    DecodeOptions,
    Frames,
    Json,
    Longest,
    ModelOptions,
    RecipeOptions,
    Several,
)
from .shared.text import json_file, working, write_json

PLACE = 7
EXTRA = "serve"
HELP = "serve a model with a recipe to OpenAI's clients"
EXAMPLES = """\
examples:
  mmaccel serve
  mmaccel serve --model Qwen/Qwen2.5-VL-7B-Instruct --recipe snapkv --retain 0.25
  mmaccel serve --model ./my-llava --recipe divprune --retain 0.1 --fallback 0.9
  mmaccel serve --model ./my-llava --recipe kivi --port 8080 --several 2 --allow-files ./pictures
  mmaccel serve --model ./my-llava --host 0.0.0.0 --api-key SECRET --allow-urls images.example.com
"""


@dataclass(frozen=True)
class Serving:
    """Access and limits."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen on; 0 for a free one.")
    ] = 8000
    allow_host: AllowHost = None
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The API key that clients must send.  [default: none]"),
    ] = None
    allow_urls: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="A host, or HOST:PORT, that media may be loaded from. Can be repeated.  [default: none]",
        ),
    ] = None
    allow_files: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder with files that requests may name, as file:///.... Can be repeated.  [default: none]",
        ),
    ] = None
    several: Several = 1
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Requests that wait are answered together, at most so many, where their budgets and numbers of pictures and "
            "clips are equal. Each answer is complete when its row ends.",
        ),
    ] = 1
    queue: Annotated[int, typer.Option(min=0, metavar="N", help="Requests that may wait.")] = 16
    prefix_cache: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MIB",
            help="Memory for KV caches of earlier requests: a prompt that begins like one of them, such as the next turn of a "
            "chat, reads only what is new. 0 keeps none.",
        ),
    ] = 512
    prompt_cache: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MIB",
            help="Memory for keys of single pictures: each is read apart from its prompt, once, and serves wherever it stands "
            "(Prompt Cache). It does not see what is in front of it, so answers may differ. 0 reads prompts as a whole.",
        ),
    ] = 0
    time_limit: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Limit of the model for one request.")
    ] = 300.0


def run(
    which: ModelOptions,
    how: RecipeOptions,
    drafts: DecodeOptions,
    serving: Serving,
    frames: Frames = 16,
    max_new_tokens: Longest = 1024,
    output: Json = None,
) -> int:
    """Serve until interrupted."""
    if serving.api_key == "":
        raise MmaccelError("--api-key is empty; give a key, or leave it out.")
    if drafts.draft is not None and serving.several > 1:
        raise MmaccelError(
            f"--draft drafts for one request at a time, and --several is {serving.several}; give --several 1."
        )
    path = json_file(output)
    from ..programs.serve import server
    from ..programs.serve.engine import Limits
    from ..programs.serve.sources import Sources

    sources = Sources(serving.allow_urls or (), serving.allow_files or ())
    recipe = how.chosen()
    # the address is checked before a model is loaded
    with server.bind(serving.host, serving.port) as bound:
        here = server.is_here(bound)
        if not here and serving.api_key is None:
            print(
                f"warning: whoever reaches {serving.host} can ask this server, and reads what --allow-files and --allow-urls "
                "allow; --api-key KEY keeps others out.",
                file=sys.stderr,
            )
        model, processor = load_model(which)
        # requests name the model by its hub id, or by the last part of its folder
        path_or_id = which.model or str(shipped())
        name = Path(path_or_id).resolve().name if Path(path_or_id).is_dir() else path_or_id
        with working("accelerating the model"):
            scheduler = server.make_scheduler(
                model,
                processor,
                recipe,
                several=serving.several,
                batch=serving.batch_size,
                waiting=serving.queue,
                sources=sources,
                limits=Limits(serving.time_limit, frames, max_new_tokens),
                drafts=drafts.arguments(),
                prefix_cache=serving.prefix_cache << 20,
                prompt_cache=serving.prompt_cache << 20,
            )
        # pages in a browser on this machine must not reach a local server under their own names
        allowed = [serving.host, *(serving.allow_host or ())] if here or serving.allow_host else None
        running = server.make_server(scheduler, name, key=serving.api_key, allowed=allowed)
        bound.listen()
        served = {"address": f"{server.address_of(bound)}/v1", "model": name, "recipe": recipe.name}
        if path is not None:
            write_json(path, served)
        # one line, which programs wait for
        line = "{model} with recipe {recipe} is served at {address}".format(**served)
        print(json.dumps(served) if output == STDOUT else line, flush=True)
        server.run(running, bound)
    return 0
