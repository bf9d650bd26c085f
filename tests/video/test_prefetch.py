"""Decoding ahead: in bounded memory, in order, stopped at once; no video is blamed for what killed a decoder otherwise."""

from __future__ import annotations

import gc
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from films import film, numbers
from tail import few
from waiting import until

from mmaccel import MmaccelError
from mmaccel.video import Clip, decode, decode_each, subprocess_decoder

pytestmark = pytest.mark.usefixtures("cheap_collections")

#: enough for a loaded machine, far below a hang
LIMIT = 60.0


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten clips of which four frames take 74 kB or 295 kB, and two that are none."""
    root = tmp_path_factory.mktemp("clips")
    made = [film(root / f"{i}.mp4", 8, size=(192, 128) if i % 4 == 1 else (96, 64), codec="mpeg4") for i in range(10)]
    (root / "text.mp4").write_text("no film")
    return [*made[:3], root / "text.mp4", *made[3:], root / "none.mp4"]


@pytest.mark.full
@pytest.mark.parametrize("alone", few((False, True), (True,)))
def test_what_waits_takes_no_more_than_it_may(clips: list[Path], live: list[int], alone: bool) -> None:
    """In their order, whatever there is room for."""
    memory = 300_000
    found = []
    for path, clip in zip(
        clips, decode_each(clips, 4, workers=3, memory=memory, isolated=alone, backend="pyav"), strict=True
    ):
        gc.collect()
        found.append(str(clip) if isinstance(clip, MmaccelError) else numbers(clip.frames))
        assert not isinstance(clip, MmaccelError) or str(path) in str(clip)
        # one is the caller's
        assert live[0] - (0 if isinstance(clip, MmaccelError) else clip.frames.nbytes) <= memory
        del clip
    assert [one for one in found if not isinstance(one, str)] == [[1, 3, 5, 7]] * 10


def test_a_clip_that_fits_never_is_refused_and_the_rest_goes_on(clips: list[Path]) -> None:
    found = list(decode_each(clips, 4, memory=100_000, backend="pyav"))
    refused = [str(one) for one in found if isinstance(one, MmaccelError)]
    assert len(refused) == 2 + 3 and sum("give a larger memory=" in one for one in refused) == 3


def test_a_decoder_holds_a_picture_at_a_time(tmp_path: Path) -> None:
    """The frames stand in memory once, in the process that wants them."""
    path = film(tmp_path / "long.mp4", 64, size=(640, 360), codec="mpeg4")
    subprocess_decoder._stop()
    held = []
    for frames in (2, 64):
        assert len(decode(path, frames, isolated=True, backend="pyav", threads=1).frames) == frames
        (child,) = subprocess_decoder._idle
        status = Path(f"/proc/{child.process.pid}/status").read_text()
        held.append(int(status.split("VmHWM:")[1].split()[0]) << 10)
    assert held[1] - held[0] < 16 << 20 < 62 * 640 * 360 * 3


# --- decoders that die ------------------------------------------------------------------------------------------------
FATAL = """
import json, os, types
from pathlib import Path
from mmaccel.video import subprocess_decoder
mark, moment = Path({mark!r}), {moment!r}
def die(what):
    left = int(mark.read_text())
    if left and (moment in what if moment else True):
        mark.write_text(str(left - 1))
        os.kill(os.getpid(), 9)
def loads(text):
    found = json.loads(text)
    if moment == "job": die({{"job": 1}})
    return found
def dumps(what):
    if moment != "job": die(what)
    return json.dumps(what)
subprocess_decoder.json = types.SimpleNamespace(loads=loads, dumps=dumps)
"""


@pytest.fixture
def fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Makes the next decoders die when they come to a moment, so many times; no other test gets them."""
    subprocess_decoder._stop()

    def arrange(moment: str, times: int) -> None:
        (tmp_path / "left").write_text(str(times))
        code = FATAL.format(mark=str(tmp_path / "left"), moment=moment)
        monkeypatch.setattr(
            subprocess_decoder, "_START", subprocess_decoder._START.replace("serve()", f"exec({code!r}); serve()")
        )

    yield arrange
    subprocess_decoder._stop()


#: when it gets a video, is about to begin, knows the size, has decoded a frame, has decoded all
MOMENTS = ("job", "trying", "shape", "at", "clip")


@pytest.mark.parametrize("moment", few(MOMENTS, ("job", "clip")))
def test_a_decoder_that_dies_once_costs_nothing(moment: str, kind: Any, fatal: Any) -> None:
    fatal(moment, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip = decode(kind("h264.mp4"), 3, isolated=True, backend="pyav")
    assert numbers(clip.frames) == [10, 30, 50]


@pytest.mark.parametrize("moment", few(MOMENTS, ("job", "clip")))
def test_a_video_that_kills_its_decoder_twice_is_named(moment: str, kind: Any, fatal: Any) -> None:
    fatal(moment, 2)
    said = "ended before it began" if moment in ("job", "trying") else "crashed"
    found = list(decode_each([kind("h264.mp4"), kind("h264.mkv")], 3, workers=1, backend="pyav"))
    assert isinstance(found[0], MmaccelError) and said in str(found[0]) and "h264.mp4" in str(found[0])
    assert "SIGKILL" in str(found[0]) and isinstance(found[1], Clip)


@pytest.mark.parametrize("noticed", (True, False))
def test_an_idle_decoder_that_died_blames_no_video(noticed: bool, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess_decoder._stop()
    assert len(list(decode_each([kind("h264.mp4")] * 4, 2, workers=2))) == 4
    idle = list(subprocess_decoder._idle)
    for child in idle:
        child.process.kill()
        child.process.wait()
        if not noticed:
            monkeypatch.setattr(child.process, "poll", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for clip in decode_each([kind("h264.mp4")] * 3, 3, workers=2, backend="pyav"):
            assert isinstance(clip, Clip) and numbers(clip.frames) == [10, 30, 50]


def test_a_folder_of_pictures_is_decoded_without_torch(
    tmp_path: Path, fatal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    for i in range(4):
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(tmp_path / f"{i}.png")
    # a module that is None cannot be imported
    monkeypatch.setattr(
        subprocess_decoder,
        "_START",
        subprocess_decoder._START.replace("serve()", "sys.modules.update(torch=None, transformers=None); serve()"),
    )
    clip = decode(tmp_path, 2, isolated=True)
    assert clip.backend == "pictures" and clip.frames[:, 0, 0, 0].tolist() == [1, 3]


# --- stopped ----------------------------------------------------------------------------------------------------------
def test_nobody_waits_for_decoders_that_hang(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess_decoder._stop()
    hangs = subprocess_decoder._START.replace("serve()", "__import__('time').sleep(1000)")
    monkeypatch.setattr(subprocess_decoder, "_START", hangs)
    found = decode_each([kind("h264.mp4")] * 9, 3, workers=2, timeout=LIMIT)
    here = threading.main_thread().ident
    # a program that was started in the background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(1.0, lambda: signal.pthread_kill(here, signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(found)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 3
    monkeypatch.undo()


@pytest.mark.parametrize("moment", (0, 1, 3))
def test_a_caller_that_stops_leaves_nothing_behind(moment: int, clips: list[Path]) -> None:
    before = set(threading.enumerate())
    found = decode_each(clips, 4, workers=3, memory=300_000, backend="pyav")
    for _ in range(moment):
        next(found)
    found.close()  # type: ignore[attr-defined]
    # a timer that was called off is on its way out
    until(lambda: set(threading.enumerate()) <= before, 5)


# --- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given",
    [
        {"timeout": 1e10},
        {"timeout": float("inf")},
        {"timeout": float("nan")},
        {"timeout": "soon"},
        {"timeout": True},
        {"timeout": -1},
        {"memory": 1 << 80},
        {"memory": 10**5000},
        {"memory": 1.5},
        {"memory": None},
        {"frames": "all"},
        {"frames": 1 << 70},
        {"fps": "1"},
        {"fps": [1]},
        {"fps": float("nan")},
        {"fps": 1e300},
        {"start": None},
        {"start": "0"},
        {"end": {}},
        {"folder_fps": None},
        {"threads": 0.5},
        {"backend": ["pyav"]},
        {"select": ["uniform"]},
    ],
    ids=lambda given: "".join(given) + "=" + type(*given.values()).__name__,
)
def test_arguments_of_no_use_are_one_sentence(given: dict[str, Any], kind: Any) -> None:
    with pytest.raises(MmaccelError) as caught:
        decode(kind("h264.mp4"), isolated=True, **given)
    said = str(caught.value)
    assert f"`{next(iter(given))}`" in said and said.endswith(".") and "\n" not in said
    assert len(said) < 200 and "must be" in said and "got" in said


@pytest.mark.parametrize("path", (None, 3, b"a.mp4", ["a.mp4"], ""))
@pytest.mark.parametrize("alone", (False, True))
def test_what_is_no_path(path: Any, alone: bool) -> None:
    with pytest.raises(MmaccelError, match="A video must be a path, got"):
        decode(path, isolated=alone)


@pytest.mark.parametrize(
    ("paths", "more", "said"),
    [
        ("a.mp4", {}, "must be a list of videos"),
        (None, {}, "must be a list"),
        ([], {"workers": 0}, "`workers` must be .*, got 0"),
        ([], {"workers": "2"}, "`workers` must be .*, got '2'"),
    ],
)
def test_several_are_a_list(paths: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(MmaccelError, match=said):
        list(decode_each(paths, **more))
