"""One side of a comparison of selection functions: a process that is given tensors, chooses, and measures how long it takes.

Run by :mod:`compare_functions`; see :mod:`worker` for what it reads and writes. It needs torch only.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: what is timed: no arguments, and the tokens that stay, ``[B, K, D]``
Work = Callable[[], Tensor]
#: makes the work of a method from its tensors and options
Prepare = Callable[[Mapping[str, Tensor], Mapping[str, int]], Work]
#: seconds that one measurement lasts at least
ENOUGH = 0.05


class Functions:
    """Selection functions by the names of the methods.

    Parameters
    ----------
    methods : what each method does with ``tome``: ``keys [B, n, d]``, ``hidden [B, n, D]``, and the number ``remove``;
        ``visionzip``: with a class token in front, ``attention [B, heads, 1, n]``, ``keys [B, n, d]``, ``hidden [B, n, D]``,
        and the numbers ``dominant`` and ``contextual``; ``evs``: ``features [T P, D]``, and the numbers ``frames``,
        ``height``, ``width`` and ``kept``.
    versions : what stands in the report.
    """

    def __init__(self, methods: Mapping[str, Prepare], versions: Mapping[str, str]) -> None:
        self.methods, self.versions = methods, versions
        self.work: Work | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        if request["do"] == "versions":
            return {"python": platform.python_version(), "torch": torch.__version__, **self.versions}
        with torch.inference_mode():
            if request["do"] == "load":
                self.work = self.methods[request["method"]](load_file(request["inputs"]), request["options"])
                return {}
            assert self.work is not None
            if request["do"] == "tokens":
                save_file({"tokens": self.work().contiguous()}, Path(request["out"]))
                return {}
            return {"seconds": self.time(self.work)}

    def time(self, work: Work) -> float:
        """Seconds of the process that one call takes, all threads together."""
        calls, start = 0, time.process_time()
        while (taken := time.process_time() - start) < ENOUGH or not calls:
            work()
            calls += 1
        return taken / calls
