"""Whatever a file holds: one clear sentence, and neither a crash nor a hang of the process that asked."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings

import films
import numpy as np
import pytest
from films import film, numbers
from PIL import Image
from waiting import until

from mmaccel import MmaccelError
from mmaccel.video import READERS, Clip, decode, decode_each, subprocess_decoder
from mmaccel.video.container import container, local
from mmaccel.video.decode_spec import DecodeSpec
from mmaccel.video.in_process import decode_in_process
from mmaccel.video.readers import usable

#: enough for a loaded machine, far below a hang
TIMEOUT = 60.0
CONTAINERS = (
    "faststart.mp4",
    "h264.mp4",
    "fragments.mp4",
    "h264.mkv",
    "vp9.webm",
    "mpeg4-b.avi",
    "h264.ts",
    "anim.gif",
)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was read by")
        warnings.filterwarnings("ignore", message=".*crashed")
        yield


def attempt(path, **options) -> Clip | str:
    """The clip, or the sentence, which must name the file and be one line with a remedy."""
    try:
        return decode(path, 6, isolated=True, timeout=TIMEOUT, **options)
    except MmaccelError as error:
        said = str(error)
        assert str(path) in said, said
        assert "\n" not in said and "Traceback" not in said
        assert re.search(r"[;,] (copy|play|convert|give|ask|download|the video is broken)", said), said
        return said


@pytest.mark.parametrize("name", CONTAINERS)
def test_cut_at_every_twentieth(kind, tmp_path, name):
    """Formats that say how long they are are refused; of the others, what is there is decoded and right."""
    data = kind(name).read_bytes()
    for share in range(20):
        path = tmp_path / f"cut{share}{kind(name).suffix}"
        path.write_bytes(data[: len(data) * share // 20])
        found = attempt(path)
        if isinstance(found, Clip):
            assert name in ("fragments.mp4", "h264.ts", "anim.gif"), (name, share)
            assert found.total < 60
            off = np.abs(np.asarray(numbers(found.frames)) - found.indices)
            assert off.max() <= 2 if name == "h264.ts" else not off.any()
        else:
            assert share == 0 or "break" in found or "broken" in found or "no frames" in found or "begins" in found, (
                found
            )


@pytest.mark.parametrize("name", CONTAINERS)
def test_flipped_bits(kind, tmp_path, name):
    """A clip of the right shape, or a sentence."""
    data = np.frombuffer(kind(name).read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    for attempt_number, flips in enumerate((1, 3, 10, 30, 100, 300)):
        broken = data.copy()
        broken[rng.integers(0, len(data), flips)] ^= (1 << rng.integers(0, 8, flips)).astype(np.uint8)
        path = tmp_path / f"flipped{attempt_number}{kind(name).suffix}"
        path.write_bytes(broken.tobytes())
        found = attempt(path)
        if isinstance(found, Clip):
            assert found.frames.ndim == 4 and found.frames.shape[-1] == 3 and len(found.frames) == len(found.timestamps)
            assert np.isfinite(found.timestamps).all()


@pytest.mark.parametrize("name", ("faststart.mp4", "h264.mkv"))
def test_stretches_of_zeros(kind, tmp_path, name):
    data = kind(name).read_bytes()
    for share in range(0, 20, 3):
        start = len(data) * share // 20
        path = tmp_path / f"zeros{share}{kind(name).suffix}"
        path.write_bytes(data[:start] + bytes(len(data) // 10) + data[start + len(data) // 10 :])
        attempt(path)


def test_what_is_no_video(kind, tmp_path):
    (tmp_path / "text.mp4").write_text("no video at all, but a long text. " * 50)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "one.mp4").write_bytes(b"\0")
    (tmp_path / "zeros.mp4").write_bytes(bytes(10_000))
    (tmp_path / "picture.mp4").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (tmp_path / "folder.mp4").mkdir()
    os.mkfifo(tmp_path / "pipe.mp4")
    os.symlink(tmp_path / "gone", tmp_path / "dangling.mp4")
    sound = tmp_path / "sound.mp4"
    sound.write_bytes(_only_sound(tmp_path))
    for name, words in {
        "text.mp4": "unknown header",
        "empty.mp4": "is empty",
        "one.mp4": "unknown header",
        "zeros.mp4": "unknown header",
        "picture.mp4": "is a picture",
        "folder.mp4": "holds no frames",
        "pipe.mp4": "not a regular file",
        "dangling.mp4": "does not exist",
        "sound.mp4": "no video stream",
    }.items():
        for options in ({}, {"isolated": True}):
            with pytest.raises(MmaccelError, match=words):
                decode(tmp_path / name, **options)
    for path in ("", "a\0b.mp4", "/dev/zero"):
        with pytest.raises(MmaccelError, match="must be a path|is not a regular file"):
            decode(path)


def _only_sound(folder) -> bytes:
    import av

    with av.open(str(folder / "made.mp4"), "w") as out:
        stream = out.add_stream("aac", rate=16000, layout="mono")
        quiet = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        quiet.sample_rate, quiet.pts = 16000, 0
        out.mux(stream.encode(quiet))
        out.mux(stream.encode())
    return (folder / "made.mp4").read_bytes()


def test_nothing_but_local_files(kind, tmp_path):
    target = kind("h264.mp4")
    for address in (
        "http://127.0.0.1:9/a.mp4",
        "HTTPS://x/a.m3u8",
        "rtsp://x",
        "concat:a.mp4|b.mp4",
        "data:video/mp4,x",
    ):
        with pytest.raises(MmaccelError, match="only local files"):
            decode(address)
    for address in (f"file:{target}", f"crypto:{target}", f"subfile,,start,0,end,0,,:{target}", f"cache:{target}"):
        with pytest.raises(MmaccelError, match="only local files"):
            decode(address)
    lists = {
        "a.m3u8": f"#EXTM3U\n#EXTINF:2,\n{target}\n#EXT-X-ENDLIST\n",
        "b.mp4": f"#EXTM3U\n#EXTINF:2,\n{target}\n#EXT-X-ENDLIST\n",
        "c.ffconcat": f"ffconcat version 1.0\nfile '{target}'\n",
        "d.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
        "e.mpd": "<?xml version='1.0'?>\n<MPD></MPD>",
    }
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(MmaccelError, match="is a playlist"):
            decode(tmp_path / name)


def test_names_are_never_patterns_or_protocols(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("concat:a%03d.mp4", "-i.mp4", "pipe:0", "ein Film – ü.mp4"):
        (tmp_path / name).write_bytes(kind("h264.mp4").read_bytes())
        assert decode(name, 3).indices == [10, 30, 50]
    assert local("pipe:0").is_absolute()
    (tmp_path / "a%03d.png").write_bytes(kind("h264.mp4").read_bytes())
    assert decode("a%03d.png", 3, backend="pyav").indices == [10, 30, 50]


def test_how_long_files_say_they_are(tmp_path):
    """Boxes of 64 bits, and what reaches to the end of the file or does not say."""
    path = tmp_path / "any"
    start = (16).to_bytes(4, "big") + b"ftypisom" + bytes(4)
    large = (1).to_bytes(4, "big") + b"mdat" + (5_000_000_000).to_bytes(8, "big")
    for data, breaks in {
        start + (24).to_bytes(4, "big") + b"mdat" + bytes(16): False,
        start + (25).to_bytes(4, "big") + b"mdat" + bytes(16): True,
        start + large + bytes(100): True,
        start + (0).to_bytes(4, "big") + b"mdat" + bytes(99): False,
        start + bytes(3): False,
        # an EBML header of two bytes, a segment of four bytes, then of unknown length, then of a length in two bytes
        b"\x1a\x45\xdf\xa3\x82xx\x18\x53\x80\x67\x84xxxx": False,
        b"\x1a\x45\xdf\xa3\x82xx\x18\x53\x80\x67\x84xxx": True,
        b"\x1a\x45\xdf\xa3\x82xx\x18\x53\x80\x67\xffxxx": False,
        b"\x1a\x45\xdf\xa3\x82xx\x18\x53\x80\x67\x40\x05xxxx": True,
        b"\x1a\x45\xdf\xa3\x82xx\x18\x53": False,
        b"\x1a\x45\xdf\xa3": False,
        b"RIFF\x08\0\0\0AVI xxxx": False,
        b"RIFF\x09\0\0\0AVI xxxx": True,
        b"RIFF\0\0\0\0AVI xxxx": False,
    }.items():
        path.write_bytes(data)
        if breaks:
            with pytest.raises(MmaccelError, match=rf"breaks off after {len(data)} of"):
                container(path)
        else:
            assert container(path) in ("mov", "matroska", "avi")


def test_kinds_go_by_content(kind, tmp_path):
    """A wrong suffix does not matter."""
    for name, what in {
        "vp9.webm": "matroska",
        "mpeg2-b.ts": "mpegts",
        "mpeg2-b.mpg": "mpeg",
        "wmv2.wmv": "asf",
    }.items():
        path = tmp_path / f"{name}.mp4"
        path.write_bytes(kind(name).read_bytes())
        assert container(path) == what
        assert numbers(decode(path, 3).frames) == [10, 30, 50]


# ------------------------------------------------------------------------------------------------------- child process


@pytest.fixture
def badly(monkeypatch):
    """Makes the children of this test begin with a line of Python of its own, and lets no other test have them."""
    subprocess_decoder._stop()

    def behave(line: str) -> None:
        monkeypatch.setattr(
            subprocess_decoder, "_START", subprocess_decoder._START.replace("serve()", f"{line}; serve()")
        )

    yield behave
    subprocess_decoder._stop()


needs_decord = pytest.mark.skipif(not usable(READERS["decord"]), reason="there is no decord for this machine")
DECORD = "from mmaccel.video.readers import READERS; READERS['decord'].__init__ = lambda *a: "


def test_a_decoder_that_hangs_is_stopped(kind, badly):
    badly(DECORD + "__import__('time').sleep(1000)")
    began = time.monotonic()
    with pytest.raises(MmaccelError, match=r"h264\.mp4.* longer than 3 seconds"):
        decode(kind("h264.mp4"), isolated=True, timeout=3)
    assert time.monotonic() - began < 20


ORPHAN = """
import sys
from mmaccel.video import decode, subprocess_decoder
subprocess_decoder._START = subprocess_decoder._START.replace("serve()", sys.argv[2] + "; serve()")
made = subprocess_decoder._Child.__init__
def tell(self):
    made(self)
    print(self.process.pid, flush=True)
subprocess_decoder._Child.__init__ = tell
decode(sys.argv[1], isolated=True, timeout=2)
"""


def ended(process: int) -> bool:
    """Whether a process is no more, but for its parent that has not asked yet."""
    try:
        os.kill(process, 0)
        return open(f"/proc/{process}/stat").read().split()[2] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="Windows has no alarm")
def test_a_decoder_that_hangs_does_not_outlive_a_killed_parent(kind, tmp_path):
    hangs = DECORD + f"(open({str(tmp_path / 'at work')!r}, 'w').close(), __import__('time').sleep(1000))"
    command = [sys.executable, "-c", ORPHAN, kind("h264.mp4"), hangs]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        until((tmp_path / "at work").exists)
        parent.kill()
    try:
        until(lambda: ended(child), 20)
    finally:
        kill(child)


@needs_decord
def test_a_decoder_that_crashes_leaves_the_video_to_the_next(kind, badly):
    badly(DECORD + "__import__('os').kill(__import__('os').getpid(), 11)")
    with pytest.warns(UserWarning, match="decord: crashed, SIGSEGV"):
        clip = decode(kind("h264.mp4"), 3, isolated=True)
    assert clip.backend in ("torchcodec", "pyav") and numbers(clip.frames) == [10, 30, 50]
    with pytest.raises(MmaccelError, match=r"h264\.mp4.*crashed \(SIGSEGV\)"):
        decode(kind("h264.mp4"), 3, isolated=True, backend="decord")
    # the next video gets a child of its own
    assert decode(kind("mpeg4-b.avi"), 3, isolated=True, backend="pyav").indices == [10, 30, 50]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux bounds mapped data")
def test_a_decoder_that_eats_memory_is_stopped(kind, badly):
    badly(DECORD + "bytearray(3 << 30)")
    began = decode(kind("h264.mp4"), 3, isolated=True, backend="pyav", memory=1 << 30)
    assert began.indices == [10, 30, 50]
    with pytest.raises(MmaccelError, match="more memory than it may have"):
        decode(kind("h264.mp4"), isolated=True, memory=1 << 30)


def test_frames_that_would_not_fit_are_not_begun(tmp_path):
    path = film(tmp_path / "large.mp4", 60, codec="mpeg4", size=(1280, 720), key=60)
    for alone in (False, True):
        with pytest.raises(MmaccelError, match=r"60 frames of .*large\.mp4' \(1280x720\) take 0\.2 GiB.*ask for fewer"):
            decode(path, 60, memory=128 << 20, isolated=alone)
        assert len(decode(path, 30, memory=128 << 20, isolated=alone).frames) == 30


def test_isolated_or_not_gives_the_same(kind):
    for name in ("h264.mp4", "anim.gif"):
        here, there = decode(kind(name), 7), decode(kind(name), 7, isolated=True)
        assert np.array_equal(here.frames, there.frames)
        assert here.frames.flags.writeable and there.frames.flags.writeable
        assert (here.indices, here.total, here.fps, here.backend) == (
            there.indices,
            there.total,
            there.fps,
            there.backend,
        )
        assert np.array_equal(here.timestamps, there.timestamps)


def test_relative_paths_follow_the_current_folder(kind, tmp_path, monkeypatch):
    (tmp_path / "there.mp4").write_bytes(kind("h264.mp4").read_bytes())
    decode(kind("h264.mp4"), 2, isolated=True)
    monkeypatch.chdir(tmp_path)
    # nothing that lies about is run
    (tmp_path / "numpy.py").write_text("raise SystemExit")
    assert decode("there.mp4", 3, isolated=True).indices == [10, 30, 50]


def test_warnings_come_through(kind):
    with pytest.warns(UserWarning, match="was read by pyav: decord is not"):
        decode(kind("mpeg4-b.avi"), 2, isolated=True)


@pytest.mark.full
def test_the_child_is_used_again_and_ends_with_its_parent(kind):
    decode(kind("h264.mp4"), 2, isolated=True)
    before = [child.process.pid for child in subprocess_decoder._idle]
    decode(kind("h264.mp4"), 2, isolated=True)
    assert [child.process.pid for child in subprocess_decoder._idle] == before
    code = (
        "import sys; from mmaccel.video import decode, subprocess_decoder\n"
        f"decode({str(kind('h264.mp4'))!r}, 2, isolated=True)\n"
        "print(subprocess_decoder._idle[0].process.pid, flush=True); import os; os._exit(1)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(out.stdout)
    try:
        until(lambda: ended(pid), 10)
    finally:
        kill(pid)


def test_the_child_does_without_torch():
    code = subprocess_decoder._START.replace("serve()", "print('torch' in sys.modules)")
    out = subprocess.run(
        [sys.executable, "-c", code, subprocess_decoder._HERE], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False"


@needs_decord
def test_what_a_decoder_prints_is_no_answer(kind, badly):
    badly(DECORD + "(print('noise', flush=True), 1 / 0)")
    with pytest.warns(UserWarning, match="decord failed"):
        assert decode(kind("h264.mp4"), 3, isolated=True).indices == [10, 30, 50]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_does_not_use_its_parents_children(kind):
    decode(kind("h264.mp4"), 2, isolated=True)
    pid = os.fork()
    if not pid:
        os._exit(len(subprocess_decoder._idle))
    assert subprocess_decoder._idle and os.waitpid(pid, 0)[1] == 0


@pytest.mark.full
@needs_decord
def test_png_files_can_still_be_read_by_torchvision(kind, tmp_path):
    """decord alone would put its zlib in front of the one that torchvision was built for."""
    Image.fromarray(films.frame(3)).save(tmp_path / "three.png")
    code = (
        "from mmaccel.video import decode\n"
        f"assert decode({str(kind('h264.mp4'))!r}, 2).backend == 'decord'\n"
        f"import torchvision; print(torchvision.io.decode_image({str(tmp_path / 'three.png')!r}).shape)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "[3, 64, 96]" in out.stdout, out.stderr


def test_what_no_other_back_end_would_do_better_is_tried_once(kind):
    tried: list[str] = []
    with pytest.raises(MmaccelError, match="`start` must be less than"):
        decode_in_process(kind("h264.mp4"), DecodeSpec(start=99.0), list(READERS), tried.append)
    assert len(tried) == 1 or not usable(READERS[tried[0]])


def test_threads_share_nothing(kind):
    """Many at once, good and bad, from many threads."""
    found: dict[int, list] = {}

    def work(at: int) -> None:
        paths = [kind("h264.mp4"), "/gone.mp4", kind("h264.mkv")] * 3
        found[at] = list(decode_each(paths, 3, workers=2))

    kind("h264.mp4"), kind("h264.mkv")
    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in found.values():
        assert [isinstance(one, MmaccelError) for one in results] == [False, True, False] * 3
        assert all(numbers(one.frames) == [10, 30, 50] for one in results if isinstance(one, Clip))


def test_a_size_that_changes_on_the_way(tmp_path):
    """Two streams of different size, one behind the other, as recorders of calls write them."""
    one, two = (film(tmp_path / f"{i}.ts", 24, size=size) for i, size in enumerate(((96, 64), (64, 48))))
    path = tmp_path / "both.ts"
    path.write_bytes(one.read_bytes() + two.read_bytes())
    found = attempt(path)
    assert isinstance(found, Clip) and found.frames.shape[1:] == (64, 96, 3)
    assert numbers(found.frames) == [i % 24 for i in found.indices] and found.indices[-1] > 24
