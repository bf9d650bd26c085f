"""Decode in a subprocess that can be killed.

Decoders are C code that reads untrusted files. In a subprocess a decoder may crash, hang or eat memory: the caller gets an
error about that one video. This is not a sandbox against code that takes the process over.

The parent writes a line of JSON for every video. The child answers with lines of JSON: the back end that it tries, the shape
of the frames, and when the parent has room for them and says so, each picture, its bytes behind its line, and its metadata.
So the child holds a picture at a time. An idle child waits for the next video and ends when its parent does.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import MmaccelError
from .clip import Clip
from .container import named
from .decode_spec import GIB, DecodeSpec, Path_, check_timeout
from .in_process import Make, decode_in_process, empty
from .readers import READERS
from .readers.decord import DecordReader

#: the package without its top module, whose imports a decoder does not need
_START = (
    "import sys, types; top = types.ModuleType('mmaccel'); top.__path__ = [sys.argv[1]]; sys.modules['mmaccel'] = top; "
    "from mmaccel.video.subprocess_decoder import serve; serve()"
)
#: bytes that a decoder may have beside the frames it gives
_DECODER = 512 << 20
_HERE = str(Path(__file__).parent.parent)
#: message of the parent when it has room
_GO = "go"


class _Ended(Exception):
    """The child process ended."""


class _Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            # -P: nothing is imported from a folder only because it is the current one
            [sys.executable, "-P", "-c", _START, _HERE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # an interrupt is for the parent, which ends its children
            start_new_session=True,
        )

    def ask(self, job: dict[str, Any], timeout: float, make: Make) -> dict[str, Any]:
        """The child's last line, with its warnings and ``frames``; ``ended`` says why a child died.

        ``trying`` is the back end that was at work last. The wait for ``make`` does not count.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        answer: dict[str, Any] = {"trying": None}
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.kill()

        clock = _Clock(timeout, stop)
        try:
            self._tell(json.dumps(job))
            while not {"error", "clip"} & answer.keys():
                line = self.process.stdout.readline()
                if not line.endswith(b"\n"):
                    raise _Ended
                message = json.loads(line)
                if "shape" in message:
                    clock.pause()
                    answer["frames"] = make(tuple(message["shape"]))
                    clock.resume()
                    self._tell(_GO)
                elif "at" in message:
                    _receive(self.process.stdout, answer["frames"][message["at"]])
                else:
                    answer |= message
        except (OSError, ValueError, KeyError, IndexError, _Ended):
            code = self.end()
            answer["ended"] = "late" if late.is_set() else signal.Signals(-code).name if code < 0 else f"status {code}"
        except BaseException:
            # the caller was interrupted: output that the child still writes must not be taken for the next answer
            self.end()
            raise
        finally:
            clock.pause()
        return answer

    def end(self) -> int:
        """Kill the child and return its exit status."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                # bytes that are not written yet are lost
                if pipe is not None:
                    pipe.close()
        return self.process.wait()

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()


class _Clock:
    """Timer that calls ``stop`` after ``seconds`` of running time; it can be paused."""

    def __init__(self, seconds: float, stop: Callable[[], None]) -> None:
        self._left, self._stop = seconds, stop
        self.resume()

    def resume(self) -> None:
        self._since, self._timer = time.monotonic(), threading.Timer(max(0.0, self._left), self._stop)
        self._timer.daemon = True
        self._timer.start()

    def pause(self) -> None:
        self._timer.cancel()
        self._left -= time.monotonic() - self._since


def _receive(pipe: IO[bytes], picture: np.ndarray) -> None:
    # a buffered pipe fills all of it, unless it ends
    if pipe.readinto(picture.reshape(-1).data) < picture.size:  # type: ignore[attr-defined]
        raise _Ended


#: children that wait for work
_idle: list[_Child] = []
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    # a forked process must not talk to its parent's children
    os.register_at_fork(after_in_child=_idle.clear)


@atexit.register
def _stop() -> None:
    while _idle:
        _idle.pop().end()


def _child(fresh: bool) -> _Child:
    """An idle child that is alive, or a new one."""
    while not fresh:
        with _lock:
            child = _idle.pop() if _idle else None
        if child is None:
            break
        if child.process.poll() is None:
            return child
        child.end()
    return _Child()


def decode_in_subprocess(
    path: Path_,
    spec: DecodeSpec,
    timeout: float,
    make: Make = empty,
    begun: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Clip:
    """Decode as :func:`~mmaccel.video.decode` does, in a child process; after a back end crashes twice the next one is
    tried.

    A child that ended for another reason is replaced by a fresh one, which decodes this video. ``begun`` is called with every
    process that decodes it; ``make`` gives the array for its frames.
    """
    check_timeout(timeout)
    text = named(path)
    names = [spec.backend] if spec.backend else list(READERS)
    crashed: list[str] = []
    deaths: Counter[str | None] = Counter()
    while True:
        job = {"path": text, "spec": dataclasses.asdict(spec), "names": names, "alarm": math.ceil(timeout) + 1}
        try:
            job["folder"] = os.getcwd()
            child = _child(fresh=bool(deaths))
        except OSError as error:
            raise MmaccelError(
                f"No process to decode {text!r} could be started ({error.strerror}); close other programs, or start again "
                "from a folder that exists."
            ) from error
        begun(child.process)
        answer = child.ask(job, timeout, make)
        if "ended" not in answer:
            with _lock:
                _idle.append(child)
            break
        if answer["ended"] == "late":
            raise MmaccelError(
                f"Decoding {text!r} took longer than {timeout:g} seconds and was stopped; ask for fewer frames, give a larger "
                "timeout, or convert it."
            )
        culprit = answer["trying"]
        deaths[culprit] += 1
        if deaths[culprit] < 2:
            continue
        if culprit is None:
            raise MmaccelError(
                f"The process that was to decode {text!r} ended before it began ({answer['ended']}), twice; see whether this "
                "machine has memory left, and ask again."
            )
        if culprit not in names or culprit == names[-1]:
            raise MmaccelError(
                f"The decoder of {text!r} crashed ({answer['ended']}) with {spec.memory / GIB:.1f} GiB of memory; the video "
                "is broken or needs more memory=."
            )
        crashed.append(f"{culprit}: crashed, {answer['ended']}")
        names = names[names.index(culprit) + 1 :]
    for message in [*answer.get("warnings", ()), *([f"{text!r}: {'; '.join(crashed)}."] if crashed else [])]:
        warnings.warn(message, stacklevel=3)
    if "error" in answer:
        raise MmaccelError(answer["error"])
    times = np.asarray(answer["timestamps"], dtype=np.float64)
    return Clip(frames=answer["frames"], timestamps=times, **answer["clip"])


# --------------------------------------------------------------------------------------------------------------- child


def serve() -> None:
    """Run the child: answer jobs until standard input ends."""
    DecordReader.alone = True
    # whatever a library prints must not get between the answers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        answers.write(json.dumps(what).encode() + b"\n")
        answers.flush()

    def make(shape: tuple[int, ...]) -> _Sender:
        # for room the parent may wait as long as it likes
        left = _alarm(0)
        say(shape=shape)
        if sys.stdin.buffer.readline() != _GO.encode() + b"\n":
            os._exit(0)
        _alarm(left)
        return _Sender(shape, answers)

    for line in sys.stdin.buffer:
        job = json.loads(line)
        spec = DecodeSpec(**job["spec"])
        os.chdir(job["folder"])
        _limit(spec.memory)
        # the parent may be killed while this decoder hangs: nobody else would stop it then
        _alarm(job["alarm"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            clip: Clip | None = None
            try:
                clip = decode_in_process(job["path"], spec, job["names"], lambda name: say(trying=name), make=make)
                error = ""
            except MmaccelError as known:
                error = str(known)
            except Exception as unknown:
                error = (
                    f"The video {job['path']!r} cannot be read ({type(unknown).__name__}: {unknown}); convert it first."
                )
        _alarm(0)
        if caught:
            say(warnings=[str(one.message) for one in caught if one.category is UserWarning])
        if clip is None:
            say(error=error)
            continue
        about = {"indices": clip.indices, "total": clip.total, "fps": clip.fps, "backend": clip.backend}
        say(clip=about, timestamps=clip.timestamps.tolist())


class _Sender(np.ndarray):
    """Frames ``[T, H, W, 3]`` of the child without their memory: a frame that is assigned is sent to the parent."""

    _answers: IO[bytes]
    _lock: threading.Lock

    def __new__(cls, shape: tuple[int, ...], answers: IO[bytes]) -> _Sender:
        made = np.broadcast_to(np.uint8(0), shape).view(cls)
        made._answers, made._lock = answers, threading.Lock()
        return made

    def __setitem__(self, at: int, picture: np.ndarray) -> None:  # type: ignore[override]
        if picture.shape != self.shape[1:]:
            raise ValueError(f"a frame of shape {picture.shape} among those of shape {self.shape[1:]}")
        with self._lock:
            self._answers.write(json.dumps({"at": at}).encode() + b"\n")
            self._answers.write(np.ascontiguousarray(picture, dtype=np.uint8).data)
            self._answers.flush()


def _alarm(seconds: int) -> int:
    """End this process after ``seconds`` (0: never); returns the seconds that were left. Windows has no alarm."""
    return signal.alarm(seconds) if hasattr(signal, "alarm") else 0


def _limit(memory: int) -> None:
    """Limit the memory that this process may allocate from now on."""
    try:
        import resource
    except ImportError:  # there is none on Windows; the size of the frames is bounded all the same
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    needed = memory + _DECODER + _held()
    resource.setrlimit(resource.RLIMIT_DATA, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))


def _held() -> int:
    """Bytes of data that this process has mapped; 0 if the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0
