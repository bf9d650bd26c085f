"""Decoding in a process of its own, which can be killed.

A decoder works on what strangers wrote, in C. In a process of its own it may crash, hang or eat memory: the caller gets an
error about that one video. This is no sandbox against code that takes the process over.

The parent writes a line of JSON for every video; the child answers with lines of JSON, and behind the one that describes a
clip with the bytes of its frames. An idle child waits for the next video and ends when its parent does.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import MmaccelError
from .clip import Clip
from .decode import GIB, Path_, Wanted, decode_here
from .readers import READERS

#: the package without its top module, which would import torch: that takes seconds and hundreds of MB
_START = (
    "import sys, types; top = types.ModuleType('mmaccel'); top.__path__ = [sys.argv[1]]; sys.modules['mmaccel'] = top; "
    "from mmaccel.video.isolated import serve; serve()"
)
#: bytes that a decoder may have beside the frames it gives
_DECODER = 512 << 20
_HERE = str(Path(__file__).parent.parent)


class _Ended(Exception):
    """The child is gone."""


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

    def ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The child's last line, with its warnings and ``frames``; a dead child's ``ended`` says why.

        ``trying`` is the back end that was at work last.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        answer: dict[str, Any] = {"trying": None}
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            while not {"error", "clip"} & answer.keys():
                line = self.process.stdout.readline()
                if not line.endswith(b"\n"):
                    raise _Ended
                answer |= json.loads(line)
            if "clip" in answer:
                answer["frames"] = _received(self.process.stdout, answer["shape"])
        except (OSError, ValueError, _Ended):
            self.process.kill()
            code = self.process.wait()
            answer["ended"] = "late" if late.is_set() else signal.Signals(-code).name if code < 0 else f"status {code}"
        except BaseException:
            # the caller was interrupted: what the child still writes must not be taken for the next answer
            self.process.kill()
            raise
        finally:
            timer.cancel()
        return answer


def _received(pipe: IO[bytes], shape: list[int]) -> np.ndarray:
    frames = np.empty(shape, dtype=np.uint8)
    view, at = frames.reshape(-1).data, 0
    while at < len(view):
        read = pipe.readinto(view[at:])  # type: ignore[attr-defined]
        if not read:
            raise _Ended
        at += read
    return frames


#: children that wait for work
_idle: list[_Child] = []
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    # a forked process must not talk to its parent's children
    os.register_at_fork(after_in_child=_idle.clear)


@atexit.register
def _stop() -> None:
    while _idle:
        _idle.pop().process.kill()


def decode_isolated(path: Path_, wanted: Wanted, timeout: float) -> Clip:
    """As :func:`decode`, in a child process; a back end that crashes leaves the video to the next."""
    if timeout <= 0:
        raise MmaccelError(f"timeout={timeout} leaves no time to decode; give seconds above 0.")
    names = [wanted.backend] if wanted.backend else list(READERS)
    crashed: list[str] = []
    while True:
        with _lock:
            child = _idle.pop() if _idle else None
        child = child or _Child()
        text = os.fspath(path)
        job: dict[str, Any] = {
            "path": text,
            "folder": os.getcwd(),
            "wanted": dataclasses.asdict(wanted),
            "names": names,
        }
        job["alarm"] = math.ceil(timeout) + 1
        answer = child.ask(job, timeout)
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
        if culprit not in names or culprit == names[-1]:
            raise MmaccelError(
                f"The decoder of {text!r} crashed ({answer['ended']}) with {wanted.memory / GIB:.1f} GiB of memory; the video "
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
    """The child: answers until its standard input ends."""
    # whatever a library prints must not get between the answers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        answers.write(json.dumps(what).encode() + b"\n")
        answers.flush()

    for line in sys.stdin.buffer:
        job = json.loads(line)
        wanted = Wanted(**job["wanted"])
        os.chdir(job["folder"])
        _limit(wanted.memory)
        if hasattr(signal, "alarm"):
            # the parent may be killed while this decoder hangs: nobody else would stop it then
            signal.alarm(job["alarm"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            clip: Clip | None = None
            try:
                clip = decode_here(job["path"], wanted, job["names"], lambda name: say(trying=name))
                error = ""
            except MmaccelError as known:
                error = str(known)
            except Exception as unknown:
                error = (
                    f"The video {job['path']!r} cannot be read ({type(unknown).__name__}: {unknown}); convert it first."
                )
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        if caught:
            say(warnings=[str(one.message) for one in caught if one.category is UserWarning])
        if clip is None:
            say(error=error)
            continue
        about = {"indices": clip.indices, "total": clip.total, "fps": clip.fps, "backend": clip.backend}
        say(clip=about, shape=clip.frames.shape, timestamps=clip.timestamps.tolist())
        answers.write(clip.frames.data)
        answers.flush()


def _limit(memory: int) -> None:
    """Bounds what the process may have beside what it has now."""
    try:
        import resource
    except ImportError:  # there is none on Windows; the size of the frames is bounded all the same
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = memory + _DECODER + _held()
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _held() -> int:
    """Bytes of data that the process has mapped; none where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0
