"""Video question answering on a Ray cluster: Ray Data streams the questions to workers, each with a model of its own.

>>> from mmaccel.programs.video_qa.cluster import ClusterAnswerer
>>> answerer = ClusterAnswerer(settings, "auto")
>>> for record in answerer.run(questions):
...     print(record["id"], record.get("answer", record.get("error")))

A model and videos are sent by name, not by content: every machine must see them, and have the same mmaccel. The questions that
are answered together are those of a run on one machine, so that the answers are the same. What a lost worker had not finished
is answered by the one in its place.
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

from ...errors import MmaccelError
from .qa import Figures, QASettings, VideoAnswerer
from .questions import VideoQuestion

Record = dict[str, Any]
#: questions, and the names of those among them that are answered already
Job = tuple[list[VideoQuestion], set[str]]

#: CPUs of a worker: without a GPU those that its model computes on, with one those that feed it
_CPUS = 4
#: windows of questions that a worker is given at a time, so that it decodes ahead; a lost worker costs no more
_WINDOWS = 4
#: jobs for every worker, at least, so that none waits long for the last
_JOBS = 4
#: seconds for an address to answer
_PATIENCE = 10.0
#: how often a start of Ray is tried, for not all of its parts can be told to wait
_TRIES = 3
#: what Ray is told where nobody told it otherwise: the run has a progress bar and errors of its own, so that Ray's words stay
#: in its log files and those of its core unsaid; and on a busy machine its parts wait for each other, minutes if need be
_RAY = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
#: how gRPC begins: the words of HTTP/2 and a frame of settings, which is answered by another
_HELLO, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"\4"


class _Worker:
    """A model in a process of its own. Whatever it tells comes out packed; Ray Data sees no more of it."""

    def __init__(self, settings: QASettings) -> None:
        self.told: list[Any] = []
        self.answerer: VideoAnswerer | None = None
        begin = time.perf_counter()
        try:
            self.answerer = VideoAnswerer(settings, say=self.told.append)
        except MmaccelError as error:
            # raised here, Ray would start another worker, and another
            self.told.append(error)
            return
        self.answerer.figures.seconds["loading"] += time.perf_counter() - begin

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        """Records as they are finished, then the figures of the job."""
        ((questions, done),) = map(_unpack, batch["job"])
        if self.answerer is not None:
            try:
                for record in self.answerer.run(questions, done):
                    yield self._all(record)
            except MmaccelError as error:
                self.told.append(error)
            self.told.append(self.answerer.figures)
            self.answerer.figures = Figures()
        yield self._all()

    def _all(self, *record: Record) -> dict[str, list[str]]:
        rows = [_pack(one) for one in (*self.told, *record)]
        self.told.clear()
        return {"told": rows}


def _pack(thing: Any) -> str:
    """As text: Ray Data makes C strings of bytes, and those end at the first zero."""
    return base64.b64encode(pickle.dumps(thing)).decode()


def _unpack(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


class ClusterAnswerer:
    """Workers of a Ray cluster that answer questions about videos; used like :class:`.qa.VideoAnswerer`.

    There is a worker for every GPU, or for every four CPUs where no machine has a GPU or ``settings.device`` is ``cpu``. This
    machine is connected to the cluster while :meth:`run` is at work.

    Parameters
    ----------
    settings : see :class:`mmaccel.programs.video_qa.qa.QASettings`; of several GPUs Ray chooses, so ``device`` names none.
    address : ``HOST:PORT`` of a cluster that this machine belongs to; ``auto``: the one that runs here, or else one of this
        machine alone, for as long as the run lasts. A connection that the program has already is used instead.
    say : told one sentence when something had to be changed, such as the size of batches.

    Attributes
    ----------
    figures : sums over all workers.
    workers : how many the last run had.

    Raises
    ------
    MmaccelError
        If there is no Ray, or an argument is of no use.
    """

    def __init__(
        self, settings: QASettings, address: str = "auto", say: Callable[[str], None] = lambda sentence: None
    ) -> None:
        device = settings.device or ""
        if device not in ("", "cpu", "cuda"):
            raise MmaccelError(f"device={device!r} is not for a cluster; give cpu or cuda, or leave it to the workers.")
        # a worker has a working directory of its own
        folder = Path(settings.model).expanduser()
        model = str(folder.resolve()) if folder.is_dir() else settings.model
        self.settings, self.figures, self._say = dataclasses.replace(settings, model=model), Figures(), say
        self.address, self.workers = address, 0
        if importlib.util.find_spec("ray") is None:
            raise MmaccelError("A cluster needs Ray; run: pip install 'mmaccel[ray]'.")

    def run(self, questions: Iterable[VideoQuestion], done: Collection[str] = ()) -> Generator[Record, None, None]:
        """The records of all questions that are not ``done``, as they are finished, each once. Raises MmaccelError if there
        is no such cluster, the model cannot be loaded or honour the recipe, or workers were lost again and again."""
        questions, done = list(questions), set(done)
        with _connected(self.address, self._say):
            most, cpus, gpus = _places(self.settings.device)
            # one pass, unless a job that was begun anew came out in another order
            while jobs := self._jobs(questions, done, most):
                self.workers = min(most, len(jobs))
                for told in _stream(self.settings, jobs, self.workers, cpus, gpus):
                    if isinstance(told, Figures):
                        self.figures += told
                    elif isinstance(told, MmaccelError):
                        raise told
                    elif isinstance(told, str):
                        self._say(told)
                    elif told["id"] not in done:
                        done.add(told["id"])
                        yield told

    def _jobs(self, questions: Iterable[VideoQuestion], done: set[str], workers: int) -> list[Job]:
        """Whole windows, without those of which nothing is left to answer."""
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
    """What workers tell about jobs, as they tell it.

    Ray Data starts a lost worker and its job anew, as often as it takes, and gives up after half an hour without progress.
    """
    from ray.data import ActorPoolStrategy, from_items

    data = from_items([{"job": _pack(job)} for job in jobs], override_num_blocks=len(jobs))
    data.context.enable_progress_bars = False
    # a block for everything that is told: nothing waits until there is more
    data.context.target_max_block_size = 1
    blocks = data.map_batches(
        _Worker,
        fn_constructor_args=(settings,),
        batch_size=1,
        batch_format="numpy",
        compute=ActorPoolStrategy(size=workers),
        num_cpus=cpus,
        num_gpus=gpus,
    ).iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)
    try:
        for block in blocks:
            yield from map(_unpack, block["told"])
    except Exception as error:
        raise MmaccelError(
            f"Ray gave up ({_fault(error)}); what is answered is kept, and the same command goes on."
        ) from error


@contextmanager
def _connected(address: str, say: Callable[[str], None]) -> Iterator[None]:
    """Connected to a cluster for the length of the block; ``say`` is told what takes long."""
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
    """Connect to a cluster, or start one; what is too slow to start is tried again."""
    import ray

    for left in reversed(range(_TRIES if address == "auto" else 1)):
        try:
            with _silent():
                ray.init(
                    # None: the one that runs here, or else a new one
                    address=None if address == "auto" else address,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                )
            return
        except Exception as error:
            if not left:
                raise MmaccelError(
                    f"Cannot use the Ray cluster {address!r} ({_first(error)}); see 'ray status' on this machine."
                ) from error
            say(f"Ray did not start ({_first(error)}); trying again.")
            ray.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing comes through standard error, from C++ neither."""
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
    """See that somebody answers, and in Ray's protocol: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit() or int(port) > 65535:
        raise MmaccelError(
            f"{address!r} is no address of a Ray cluster; give auto, or HOST:PORT such as 10.0.0.1:6379."
        )
    try:
        with socket.create_connection((host, int(port)), timeout=_PATIENCE) as peer:
            if os.environ.get("RAY_USE_TLS") == "1":
                return
            peer.sendall(_HELLO)
            # the fourth byte of a frame is its kind
            if peer.recv(9)[3:4] != _SETTINGS:
                raise OSError("it speaks no gRPC")
    except OSError as error:
        raise MmaccelError(
            f"No Ray cluster answers at {address!r} ({error.strerror or _first(error)}); see 'ray status' on its machines."
        ) from error


def _places(device: str | None) -> tuple[int, int, int]:
    """Workers that fit on the cluster, and CPUs and GPUs of each."""
    import ray

    have = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [int(node.get("CPU", 0)) for node in have]
    gpus = [int(node.get("GPU", 0)) for node in have]
    if any(gpus) and device != "cpu":
        # as many CPUs as there are for a GPU where they are scarcest
        return sum(gpus), min(_CPUS, *(c // g for c, g in zip(cpus, gpus, strict=True) if g)), 1
    if device == "cuda":
        raise MmaccelError("The cluster has no GPU; leave out the device cuda, or add a machine that has one.")
    each = max(1, min(_CPUS, max(cpus, default=0)))
    return max(1, sum(c // each for c in cpus)), each, 0


def _fault(error: BaseException) -> str:
    """What went wrong in a worker, by the line below the traceback that Ray carries along; else the first line."""
    below = re.search(r"^[A-Za-z_][\w.]*(: .+)?$", str(error), re.MULTILINE)
    return below[0].rstrip(".") if below else f"{type(error).__name__}: {_first(error)}"


def _first(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
