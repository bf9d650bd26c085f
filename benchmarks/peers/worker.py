"""One side of a comparison: a process that holds a model and a prompt and measures what it is told to.

It reads requests from its standard input and answers on its standard output, one JSON object a line, so that two sides with
environments of their own can be measured in turn. It needs torch and transformers only.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from live import Allocations


class Answers(Protocol):
    """What a process serves."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...


class Side(ABC):
    """A library with its model. ``text`` is the text model, of which alone time and memory are taken."""

    #: packages whose versions stand in the report
    packages: tuple[str, ...] = ("torch", "transformers")
    model: Any
    text: Any
    inputs: dict[str, Tensor]
    #: what the last prefill thought of every key, ``[layer][head][place]``, where a side can tell
    scores: list[list[list[float]]] = []

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Set ``model``, ``text`` and ``inputs`` from a folder that :mod:`compare` made."""

    @abstractmethod
    def policy(self, name: str, kept: int, tokens: int, noting: bool) -> AbstractContextManager[Any]:
        """The model compressed by a policy that keeps ``kept`` of ``tokens`` keys in the mean over layers; ``noting``:
        set ``scores``."""

    @abstractmethod
    def positions(self, name: str, cache: Any) -> list[list[list[int]]]:
        """Per layer and KV head the places of the prompt that are stored, ascending, after a prefill under policy ``name``."""

    @abstractmethod
    def held(self, cache: Any) -> int:
        """Bytes of the cache, counted on unique storages."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        if request["do"] == "load":
            self.load(Path(request["folder"]))
            return {"versions": {"python": platform.python_version(), **{p: version(p) for p in self.packages}}}
        name, kept, tokens, steps = (request[key] for key in ("policy", "kept", "tokens", "steps"))
        context = nullcontext() if name == "bare" else self.policy(name, kept, tokens, request["do"] == "keys")
        if request["do"] == "time":
            with context:
                return self.time(steps)
        if request["do"] == "memory":
            with context:
                return self.memory(steps)
        found: dict[str, Any] = {}
        with context:
            # the cache as the prompt leaves it
            self.generate(1, lambda cache: found.update(bytes=self.held(cache), cache=cache))
        places = self.positions(name, found["cache"])
        return {"bytes": found["bytes"], "scores": self.scores, "positions": places}

    def generate(self, steps: int, prefilled: Callable[[Any], Any] | None = None) -> Tensor:
        """Greedy tokens; ``prefilled`` is called with the cache as soon as the prompt has been read."""
        calls: list[Callable[[Any], Any]] = [prefilled] if prefilled else []

        def end(module: Any, args: Any, output: Any) -> None:
            while calls:
                calls.pop()(output.past_key_values)

        hook = self.text.register_forward_hook(end)
        try:
            with torch.inference_mode():
                out: Tensor = self.model.generate(
                    **self.inputs,
                    max_new_tokens=steps,
                    min_new_tokens=steps,
                    do_sample=False,
                    pad_token_id=0,
                    return_dict_in_generate=False,
                )
        finally:
            hook.remove()
        return out[0, -steps:]

    def time(self, steps: int) -> dict[str, Any]:
        """Seconds of the process in the text model, all threads together: of the prompt, and of the steps behind it."""
        taken: list[float] = []
        start = [0.0]

        def begin(*_: Any) -> None:
            start[0] = time.process_time()

        def end(*_: Any) -> None:
            taken.append(time.process_time() - start[0])

        hooks = [self.text.register_forward_pre_hook(begin, prepend=True), self.text.register_forward_hook(end)]
        tokens = self.generate(steps + 1)
        for hook in hooks:
            hook.remove()
        return {"prefill_s": taken[0], "decode_s": sum(taken[1:]), "tokens": tokens.tolist()}

    def memory(self, steps: int) -> dict[str, Any]:
        """The most bytes alive: in the text model's prefill, beyond those alive before it; and from its third pass on (in the
        second the outputs of the first live on), beyond the weights and what the folder holds."""
        marks = iter(("before", "prefill", "between"))
        with Allocations() as seen:

            def begin(*_: Any) -> None:
                if (name := next(marks, None)) is not None:
                    seen.mark(name)

            hook = self.text.register_forward_pre_hook(begin, prepend=True)
            self.generate(steps + 1)
            hook.remove()
            seen.mark("decode")
        return {
            "prefill_peak": seen.spans["prefill"].peak - seen.spans["before"].held,
            "decode_peak": seen.spans["decode"].peak,
        }


def serve(side: Answers) -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    # what libraries print must not stand between the answers
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(side.answer(json.loads(line))), file=out, flush=True)
