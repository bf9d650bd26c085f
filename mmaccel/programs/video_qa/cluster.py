"""Video question answering on a Ray cluster: Ray Data streams questions to workers, each with its own model.

>>> from mmaccel.programs.video_qa.cluster import ClusterAnswerer
>>> answerer = ClusterAnswerer(settings, "auto")
>>> for record in answerer.run(questions):
...     print(record["id"], record.get("answer", record.get("error")))

Model and videos are sent by path: every machine must see them, and have the same mmaccel. Questions are batched as in a run on
one machine, so that the answers are the same. Another worker repeats what a lost worker had not finished.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import logging
import os
import pickle
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import MmaccelError, first_line
from ...method import imported
from .generator import Figures
from .qa import QASettings, VideoAnswerer
from .questions import VideoQuestion

Record = dict[str, Any]
#: questions, and the names of those among them that are answered already
Job = tuple[list[VideoQuestion], set[str]]

#: CPUs of a worker, for its model or, with a GPU, for decoding
_CPUS = 4
#: windows of questions of a job, so that a worker can decode ahead; a lost worker costs no more than a job
_WINDOWS = 4
#: jobs for every worker at least, so that none waits long for the last
_JOBS = 4
#: seconds for an address to answer
_PATIENCE = 10.0
#: attempts to start Ray, some of whose parts have fixed timeouts
_TRIES = 3
#: environment variables of Ray, unless they are set: no messages on the terminal, and long timeouts for busy machines
_RAY = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
#: the preface of HTTP/2 with a SETTINGS frame, as gRPC sends it, and the type of the frame that answers it
_HELLO, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"\4"


class _Worker:
    """A model in its own process. Its output is pickled text for Ray Data."""

    def __init__(self, settings: QASettings, imports: Sequence[str]) -> None:
        #: records, figures, sentences and errors that are not sent yet
        self.output: list[Any] = []
        self.answerer: VideoAnswerer | None = None
        begin = time.perf_counter()
        try:
            for file in imports:
                imported.import_methods(file)
            self.answerer = VideoAnswerer(settings, say=self.output.append)
        except MmaccelError as error:
            # an exception here would make Ray start more workers
            self.output.append(error)
            return
        self.answerer.figures.seconds["loading"] += time.perf_counter() - begin

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        """Yield records as they are finished, then the figures of the job."""
        ((questions, done),) = map(_unpack, batch["job"])
        if self.answerer is not None:
            try:
                for record in self.answerer.run(questions, done):
                    yield self._send(record)
            except MmaccelError as error:
                self.output.append(error)
            self.output.append(self.answerer.figures)
            self.answerer.generator.figures = Figures()
        yield self._send()

    def _send(self, *record: Record) -> dict[str, list[str]]:
        rows = [_pack(one) for one in (*self.output, *record)]
        self.output.clear()
        return {"output": rows}


def _pack(thing: Any) -> str:
    """Pickle as text: Ray Data cuts bytes at the first zero."""
    return base64.b64encode(pickle.dumps(thing)).decode()


def _unpack(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


class ClusterAnswerer:
    """Answers questions about videos with workers of a Ray cluster; used like :class:`.qa.VideoAnswerer`.

    There is a worker for every GPU, or for every four CPUs if no machine has a GPU or ``settings.device`` is ``cpu``. This
    machine is connected to the cluster during :meth:`run`.

    settings : see :class:`mmaccel.programs.video_qa.qa.QASettings`; Ray chooses among several GPUs, so ``device`` names none.
    address : ``HOST:PORT`` of a cluster that this machine belongs to, or ``auto``: the one that runs here, or else a new one of
        this machine alone. An existing connection of the program is used instead.
    say : called with one sentence when something had to change, such as the size of batches.
    figures, workers : sums over all workers, and the number of workers of the last run.

    Raises MmaccelError if Ray is not installed, or an argument is not allowed.
    """

    def __init__(
        self, settings: QASettings, address: str = "auto", say: Callable[[str], None] = lambda sentence: None
    ) -> None:
        device = settings.device or ""
        if device not in ("", "cpu", "cuda"):
            raise MmaccelError(f"device must be cpu or cuda on a cluster, or left out, got {device!r}.")
        # workers have other working directories
        folder = Path(settings.model).expanduser()
        model = str(folder.resolve()) if folder.is_dir() else settings.model
        self.settings, self.figures, self._say = dataclasses.replace(settings, model=model), Figures(), say
        self.address, self.workers = address, 0
        if importlib.util.find_spec("ray") is None:
            raise MmaccelError("A cluster needs Ray; run: pip install 'mmaccel[ray]'.")

    def run(self, questions: Iterable[VideoQuestion], done: Collection[str] = ()) -> Generator[Record, None, None]:
        """Yield the records of all questions that are not ``done``, each once, as they are finished.

        Raises MmaccelError if the cluster cannot be reached, the model cannot be loaded or does not support the recipe, or
        workers were lost again and again.
        """
        questions, done = list(questions), set(done)
        with _connected(self.address, self._say):
            most, cpus, gpus = _places(self.settings.device)
            # usually one pass; a repeated job may yield in another order
            while jobs := self._jobs(questions, done, most):
                self.workers = min(most, len(jobs))
                for one in _stream(self.settings, jobs, self.workers, cpus, gpus):
                    if isinstance(one, Figures):
                        self.figures += one
                    elif isinstance(one, MmaccelError):
                        raise one
                    elif isinstance(one, str):
                        self._say(one)
                    elif one["id"] not in done:
                        done.add(one["id"])
                        yield one

    def _jobs(self, questions: Iterable[VideoQuestion], done: set[str], workers: int) -> list[Job]:
        """Jobs of whole windows, without windows that are done."""
        here = os.getcwd()
        windows = []
        for window in self.settings.windows(questions):
            asked = [
                one if "://" in one.path else dataclasses.replace(one, path=os.path.join(here, one.path))
                for group in window
                for one in group
            ]
            if any(one.name not in done for one in asked):
                windows.append(asked)
        several = max(1, min(_WINDOWS, len(windows) // (_JOBS * workers)))
        left = iter(windows)
        jobs: list[Job] = []
        while some := list(islice(left, several)):
            asked = [one for window in some for one in window]
            jobs.append((asked, {one.name for one in asked} & done))
        return jobs


def _stream(settings: QASettings, jobs: Sequence[Job], workers: int, cpus: int, gpus: int) -> Iterator[Any]:
    """Yield the output of workers. Ray Data restarts lost workers and their jobs, and gives up after half an hour without
    progress."""
    from ray.data import ActorPoolStrategy, from_items

    data = from_items([{"job": _pack(job)} for job in jobs], override_num_blocks=len(jobs))
    data.context.enable_progress_bars = False
    # every output is a block of its own, so that none waits for others
    data.context.target_max_block_size = 1
    blocks = data.map_batches(
        _Worker,
        fn_constructor_args=(settings, tuple(imported.files)),
        batch_size=1,
        batch_format="numpy",
        compute=ActorPoolStrategy(size=workers),
        num_cpus=cpus,
        num_gpus=gpus,
    ).iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)
    try:
        for block in blocks:
            yield from map(_unpack, block["output"])
    except Exception as error:
        raise MmaccelError(
            f"Ray gave up ({_fault(error)}); finished answers are kept, and the same command resumes."
        ) from error


@contextmanager
def _connected(address: str, say: Callable[[str], None]) -> Iterator[None]:
    """Connect to a cluster while the block runs; ``say`` is called with what takes long."""
    import ray
    import ray.data

    for name, value in _RAY.items():
        os.environ.setdefault(name, value)
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)
    if ray.is_initialized():
        yield
        return
    if address != "auto":
        _reach(address)
    try:
        say("Connecting to Ray; where it has to be started first, a busy machine takes a minute or two.")
        _join(address, say)
        yield
    finally:
        ray.shutdown()


def _join(address: str, say: Callable[[str], None]) -> None:
    """Connect to a cluster, or start one in several attempts."""
    import ray

    for left in reversed(range(_TRIES if address == "auto" else 1)):
        try:
            with _silent():
                ray.init(
                    address=None if address == "auto" else address,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                )
            return
        except Exception as error:
            why = first_line(error).rstrip(".")
            if not left:
                raise MmaccelError(
                    f"Cannot use the Ray cluster {address!r} ({why}); see 'ray status' on this machine."
                ) from error
            say(f"Ray did not start ({why}); trying again.")
            ray.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Silence standard error, also of C++ code."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _reach(address: str) -> None:
    """Raise MmaccelError if no gRPC server answers; Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit() or int(port) > 65535:
        raise MmaccelError(
            f"The address of a Ray cluster must be auto, or HOST:PORT such as 10.0.0.1:6379, got {address!r}."
        )
    try:
        with socket.create_connection((host, int(port)), timeout=_PATIENCE) as peer:
            if os.environ.get("RAY_USE_TLS") == "1":
                return
            peer.sendall(_HELLO)
            # the fourth byte of a frame is its kind
            if peer.recv(9)[3:4] != _SETTINGS:
                raise OSError("not a gRPC server")
    except OSError as error:
        why = error.strerror or first_line(error).rstrip(".")
        raise MmaccelError(
            f"No Ray cluster answers at {address!r} ({why}); see 'ray status' on its machines."
        ) from error


def _places(device: str | None) -> tuple[int, int, int]:
    """The number of workers that fit on the cluster, and CPUs and GPUs of each."""
    import ray

    have = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [int(node.get("CPU", 0)) for node in have]
    gpus = [int(node.get("GPU", 0)) for node in have]
    if any(gpus) and device != "cpu":
        # the CPUs per GPU of the machine that has fewest
        return sum(gpus), min(_CPUS, *(c // g for c, g in zip(cpus, gpus, strict=True) if g)), 1
    if device == "cuda":
        raise MmaccelError("The cluster has no GPU; leave out the device cuda, or add a machine that has one.")
    each = max(1, min(_CPUS, max(cpus, default=0)))
    return max(1, sum(c // each for c in cpus)), each, 0


def _fault(error: BaseException) -> str:
    """The error in a worker: the line below the traceback that Ray reports, or else the first line."""
    below = re.search(r"^[A-Za-z_][\w.]*(: .+)?$", str(error), re.MULTILINE)
    return below[0].rstrip(".") if below else f"{type(error).__name__}: {first_line(error).rstrip('.')}"
