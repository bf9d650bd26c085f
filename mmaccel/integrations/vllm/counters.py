"""Counters for Prometheus, on vLLM's own page ``/metrics``.

vLLM encodes pictures in another process than the one that answers ``/metrics``. Every process writes its counts into a file, in
the format of prometheus_client for several processes, and the page sums them up. With several API servers vLLM has a folder of
such files already; otherwise this makes one.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

#: the attribute of vLLM's ``ModelConfig`` that holds the folder, and goes to every process with it
FOLDER = "mmaccel_counters"
#: what is counted, by modality
HELP = {
    "visual_tokens": "Visual tokens of all prompts, unreduced.",
    "visual_tokens_kept": "Those of them that reached the language model.",
    "selection_seconds": "Seconds in which tokens of encoded pictures and clips were selected, on one rank.",
}


class Counters:
    """The counters of one process; without a ``folder`` that exists on this machine they count nothing."""

    def __init__(self, folder: str | None) -> None:
        self._lock = threading.Lock()
        self._file: Any = None
        if folder is not None and Path(folder).is_dir():
            from prometheus_client.mmap_dict import MmapedDict

            self._file = MmapedDict(str(Path(folder) / f"counter_mmaccel-{os.getpid()}-{uuid.uuid4().hex}.db"))

    def add(self, name: str, modality: str, value: float) -> None:
        """Add to the counter ``name``, one of :data:`HELP`."""
        if self._file is None:
            return
        from prometheus_client.mmap_dict import mmap_key

        full = f"mmaccel_{name}"
        key = mmap_key(full, f"{full}_total", ["modality"], [modality], HELP[name])
        with self._lock:
            self._file.write_value(key, self._file.read_value(key)[0] + value, 0.0)


@functools.cache
def counters_of(folder: str | None, process: int) -> Counters:
    """The counters of a process, all of whose writers share one file."""
    return Counters(folder)


def provide(model_config: Any) -> None:
    """Give all processes of an engine the folder of the counters."""
    object.__setattr__(model_config, FOLDER, os.environ.get("PROMETHEUS_MULTIPROC_DIR") or _folder().name)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that lives as long as this process, whose counters are on its page of metrics."""
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    made = tempfile.TemporaryDirectory(prefix="mmaccel-")
    MultiProcessCollector(REGISTRY, path=made.name)
    return made
