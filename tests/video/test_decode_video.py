"""Decoding: the right frames at the right times, whichever back end runs."""

from __future__ import annotations

import warnings

import av
import films
import numpy as np
import pytest
from films import KINDS, film, frame, numbers
from PIL import Image

from mmaccel import MmaccelError
from mmaccel.video import READERS, decode, decode_each
from mmaccel.video.choice import around_keyframes, shown, spaced, uniform
from mmaccel.video.container import container
from mmaccel.video.in_process import parts
from mmaccel.video.readers import usable
from mmaccel.video.readers.base import NotExactError, rate

BACKENDS = [name for name, reader in READERS.items() if usable(reader)]
#: those that know the times before they decode
EXACT = [name for name in BACKENDS if name != "torchcodec"]
needs_decord = pytest.mark.skipif("decord" not in BACKENDS, reason="there is no decord for this machine")
#: a back end must read these; what it refuses among the others, another reads
ITS_OWN = {
    "decord": {
        "h264.mp4",
        "faststart.mp4",
        "fragments.mp4",
        "h264.mov",
        "h264.mkv",
        "audio.mp4",
        "pyramid.mp4",
        "odd.mp4",
    }
    | {"hevc.mp4", "mpeg4.mp4", "vp9.webm", "vp8.webm", "ntsc.mp4", "prores.mov", "h264-10bit.mkv"},
    "torchcodec": set(KINDS)
    - {"mpeg4-b.avi", "mpeg2-b.mpg", "mpeg2-b.ts", "h264.ts", "camera.m2ts", "flv1.flv"}
    - {"disc.vob", "camera.mts", "studio.mxf", "raw.y4m", "vp8.ivf"},
    "pyav": set(KINDS),
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was read by")
        yield


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_frames_are_those_that_were_asked_for(kind, name, backend):
    """Forward jumps over keyframes and within groups, many times: a miscount after a seek shows."""
    path = kind(name)
    rng = np.random.default_rng(0)
    try:
        reader = READERS[backend](path, container(path))
    except Exception as error:
        assert name not in ITS_OWN[backend], error
        assert isinstance(error, NotExactError) or name in ("av1.mp4", "live.mkv"), error
        return
    assert len(reader.timestamps) == 60
    for _ in range(6):
        wanted = sorted(rng.choice(60, 5, replace=False).tolist())
        found = list(reader.twin().frames(wanted))
        assert numbers(np.stack([picture for _, picture in found])) == wanted
        assert np.allclose([time for time, _ in found], np.asarray(wanted) / reader.fps, atol=2e-3)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_decoded(kind, name):
    clip = decode(kind(name), 5)
    rate = float(KINDS[name].get("fps", 24))
    assert clip.indices == numbers(clip.frames) == spaced(60, 5)
    assert (clip.total, clip.fps) == (60, pytest.approx(rate, rel=1e-3))
    assert np.allclose(clip.timestamps, np.asarray(clip.indices) / rate, atol=2e-3)
    width, height = KINDS[name].get("size", (96, 64))
    assert clip.frames.shape == (5, height, width, 3) and clip.frames.dtype == np.uint8


@needs_decord
def test_the_first_back_end_that_can_is_used_and_named(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(kind("h264.mp4"), 2).backend == "decord"
    with pytest.warns(UserWarning, match=r"open\.mp4.* was read by \w+: decord is not exact in open groups") as caught:
        assert decode(kind("open.mp4"), 2).backend != "decord"
    assert len(caught) == 1
    assert decode(kind("h264.mp4"), 2, backend="pyav").backend == "pyav"
    with pytest.raises(MmaccelError, match="decord is not exact in avi files; use another"):
        decode(kind("mpeg4-b.avi"), 2, backend="decord")


def test_missing_and_failing_back_ends_fall_to_the_next(kind, monkeypatch):
    def failing(*args):
        raise RuntimeError("out of order\nat line 3")

    monkeypatch.setattr(READERS["torchcodec"], "__init__", failing)
    monkeypatch.setattr(READERS["torchcodec"], "modules", ())
    monkeypatch.setattr(READERS["decord"], "modules", ("av", "no_such_module"))
    words = r"decord is not installed or does not load; torchcodec failed \(out of order\)\.$"
    with pytest.warns(UserWarning, match=words):
        assert decode(kind("h264.mp4"), 2).backend == "pyav"
    for reader in READERS.values():
        monkeypatch.setattr(reader, "modules", ("no_such_module",))
    with pytest.raises(MmaccelError, match="pip install av"):
        decode(kind("h264.mp4"))
    with pytest.raises(MmaccelError, match="needs decord; run: pip install decord av"):
        decode(kind("h264.mp4"), backend="decord")
    for reader in READERS.values():
        monkeypatch.setattr(reader, "modules", ())
        monkeypatch.setattr(reader, "__init__", failing)
    with pytest.raises(MmaccelError, match=r"h264\.mp4.*is not a readable video \(out of order\)"):
        decode(kind("h264.mp4"))


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ((NotExactError("no"), RuntimeError("odd"), RuntimeError("odd")), r"not a readable video \(odd\)"),
        ((MmaccelError("It breaks off."), RuntimeError("odd"), NotExactError("no")), "It breaks off"),
        ((MmaccelError("first"), RuntimeError("odd"), MmaccelError("last")), "last"),
    ],
)
def test_the_error_that_tells_most_is_raised(kind, monkeypatch, errors, words):
    for reader, error in zip(READERS.values(), errors, strict=True):

        def failing(*args, error=error):
            raise error

        monkeypatch.setattr(reader, "modules", ())
        monkeypatch.setattr(reader, "__init__", failing)
    with pytest.raises(MmaccelError, match=words):
        decode(kind("h264.mp4"))


@pytest.mark.parametrize("threads", (1, 2, 3, 8))
@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_change_nothing(tmp_path, threads, backend):
    path = film(tmp_path / "long.mp4", 300)
    clip = decode(path, 40, threads=threads, backend=backend)
    assert numbers(clip.frames) == clip.indices == spaced(300, 40)


def test_threads_meet_at_keyframes_only():
    keys = np.arange(0, 1000, 50)
    indices = spaced(1000, 100)
    made = parts(indices, keys, 4)
    assert [i for part in made for i in part] == list(range(100))
    assert len(made) == 4
    group = [{indices[i] // 50 for i in part} for part in made]
    assert all(not a & b for a, b in zip(group, group[1:], strict=False))
    assert [len(part) for part in made] == [25, 25, 25, 25]
    assert len(parts(indices, np.zeros(1, int), 4)) == 1
    assert len(parts([3, 60], keys, 4)) == 1


def test_variable_frame_rate(tmp_path):
    """Frames pile up in the first second; choosing is by time, and processors are told times, not numbers."""
    times = [*range(0, 1000, 20), *range(1000, 6000, 500)]
    for name in ("vfr.mkv", "vfr.mp4"):
        path = film(tmp_path / name, len(times), times=times)
        for backend in EXACT:
            clip = decode(path, 6, backend=backend)
            assert numbers(clip.frames) == clip.indices
            assert np.allclose(clip.timestamps, [times[i] / 1000 for i in clip.indices], atol=2e-3)
            # by number, five of six would be in the first second
            assert sum(clip.timestamps < 1) == 1
            told = clip.metadata()
            assert np.allclose(np.asarray(told.frames_indices) / told.fps, clip.timestamps, atol=0.5 / told.fps)
            assert numbers(decode(path, None, fps=1, backend=backend).frames) == [0, 50, 52, 54, 56, 58]


def test_the_model_is_told_the_true_times(tmp_path):
    """Qwen3-VL writes the mean time of every two frames into the prompt; by number, the last would be at 1.1 seconds."""
    import zoo

    times = [*range(0, 1000, 20), *range(1000, 6000, 500)]
    clip = decode(film(tmp_path / "vfr.mkv", len(times), times=times), 4)
    video = {"do_sample_frames": False, "video_metadata": [clip.metadata()]}
    worker = zoo.processor("qwen3_vl")
    out = worker(text="<|video_pad|>", videos=[clip.frames], videos_kwargs=video)
    told = [
        float(part.split(" seconds>")[0])
        for part in worker.tokenizer.decode(out["input_ids"][0]).split("<")[1:]
        if " sec" in part
    ]
    assert told == pytest.approx(clip.timestamps.reshape(2, 2).mean(1).tolist(), abs=0.1)
    assert told[-1] > 3


def test_phones_and_their_rotation(tmp_path):
    """A picture whose left half is light, turned: where the light half must be, for every back end."""

    def half(_, width, height):
        picture = np.full((height, width, 3), 16, np.uint8)
        picture[:, : width // 2] = 235
        return picture

    light = {0: (slice(None), slice(0, 20)), 90: (slice(-20, None), slice(None))}
    light |= {180: (slice(None), slice(-20, None)), 270: (slice(0, 20), slice(None))}
    for turn, (rows, columns) in light.items():
        path = film(tmp_path / f"{turn}.mp4", 4, rotation=turn, picture=half)
        for backend in BACKENDS:
            frames = decode(path, 1, backend=backend).frames
            assert frames.shape[1:3] == ((96, 64) if turn % 180 else (64, 96)), (turn, backend)
            assert frames[0][rows, columns].mean() > 200, (turn, backend)
            assert frames[0].mean() < 150


def test_one_frame_and_more_frames_than_there_are(tmp_path):
    path = film(tmp_path / "one.mp4", 1)
    for backend in EXACT:
        clip = decode(path, 16, backend=backend)
        assert (clip.indices, clip.total, clip.fps) == ([0], 1, 24.0)
        assert clip.metadata().frames_indices == [0]


def test_an_hour(tmp_path):
    """A frame every four seconds, in the last second too."""
    path = film(tmp_path / "hour.mkv", 900, times=list(range(0, 3_600_000, 4000)), key=50)
    clip = decode(path, 8)
    assert numbers(clip.frames) == clip.indices == spaced(900, 8)
    assert clip.duration == pytest.approx(3600, abs=8)
    assert decode(path, 2, start=3590).indices == [898, 899]
    assert decode(path, 3, start=3590).indices == [897, 898, 899]


def test_a_stretch_and_frames_a_second(kind):
    path = kind("h264.mp4")
    assert decode(path, None, fps=4).indices == [0, 6, 12, 18, 24, 30, 36, 42, 48, 54]
    assert decode(path, None, fps=4, start=1.0, end=1.5).indices == [24, 30]
    assert decode(path, 3, fps=4).indices == spaced(60, 3)
    assert decode(path, None, fps=100).indices == list(range(60))
    assert decode(path, 2, start=1.0, end=2.0).indices == [30, 42]
    assert decode(path, 100, start=1.0, end=1.25).indices == list(range(24, 30))
    assert decode(path, 1, start=2.45).indices == [59]
    with pytest.raises(MmaccelError, match=r"2\.5 seconds, got"):
        decode(path, start=2.5)


def test_keyframes_first(kind):
    path = kind("h264.mp4")
    for backend in EXACT:
        assert decode(path, 5, select="keyframes", backend=backend).indices == [0, 12, 24, 36, 48]
    assert decode(path, 2, select="keyframes").indices == [12, 36]
    # the widest gaps are halved when there are too few
    assert decode(path, 7, select="keyframes").indices == [0, 6, 12, 18, 24, 36, 48]
    assert decode(path, 1, select="keyframes", start=1.1, end=1.4).indices == [26]
    assert around_keyframes(np.asarray([0]), np.arange(10), 4).tolist() == [0, 2, 5, 7]
    assert around_keyframes(np.asarray([0]), np.arange(3), 9).tolist() == [0, 1, 2]


def test_choice_by_time():
    regular = np.arange(10) / 10
    assert uniform(regular, 10.0, 5, 0.0, 1.0).tolist() == [1, 3, 5, 7, 9]
    rounded = np.round(np.arange(240) / 24, 3)
    assert uniform(rounded, 24.0, 40, 0.0, 10.0).tolist() == spaced(240, 40)
    assert shown(np.asarray([0.0, 5.0, 5.1]), 0.4, np.asarray([0.0, 4.9, 5.0, 9.0])).tolist() == [0, 0, 1, 2]
    assert rate(rounded, 24.0) == 24.0
    assert rate(np.asarray([0.0, 1.0, 3.0]), 24.0) == pytest.approx(2 / 3)
    assert rate(np.zeros(1), 0.0) == 1.0


def test_a_folder_of_pictures(tmp_path):
    for at in range(12):
        Image.fromarray(frame(at)).save(tmp_path / f"f{at}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    clip = decode(tmp_path, 4, folder_fps=2.0)
    assert clip.indices == numbers(clip.frames) == [1, 4, 7, 10]
    assert (clip.fps, clip.backend, clip.timestamps.tolist()) == (2.0, "pictures", [0.5, 2.0, 3.5, 5.0])
    assert decode(tmp_path, 3, isolated=True).indices == [2, 6, 10]
    Image.fromarray(frame(1, 48, 64)).save(tmp_path / "f7.png")
    with pytest.raises(MmaccelError, match=r"differ in size \(\(96, 64\), \(48, 64\)\)"):
        decode(tmp_path, 4)


def test_several_at_once_come_in_order(kind, tmp_path):
    (tmp_path / "no.mp4").write_text("no video")
    names = ["h264.mp4", "vp9.webm", "no.mp4", "anim.gif", "odd.mp4"]
    paths = [tmp_path / name if name == "no.mp4" else kind(name) for name in names]
    for isolated in (False, True):
        found = list(decode_each(paths, 4, workers=2, isolated=isolated))
        assert [isinstance(one, MmaccelError) for one in found] == [False, False, True, False, False]
        assert all(numbers(one.frames) == spaced(60, 4) for one in found if not isinstance(one, MmaccelError))
        assert "no.mp4" in str(found[2])


def test_decoding_goes_ahead_of_who_asks_but_not_far(kind):
    taken = []

    def paths():
        for at in range(50):
            taken.append(at)
            yield kind("h264.mp4")

    for at, _ in enumerate(decode_each(paths(), 2, workers=2, isolated=False)):
        assert len(taken) <= at + 5
        if at == 3:
            break


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frames": None}, "how many frames"),
        ({"frames": 0}, "`frames` must be .*got 0"),
        ({"frames": 2.5}, r"`frames` must be .*got 2\.5"),
        ({"frames": "8"}, "`frames` must be .*got '8'"),
        ({"fps": True}, "`fps` must be .*got True"),
        ({"start": float("nan")}, "`start` must be .*got nan"),
        ({"fps": -1.0}, r"`fps` must be .*got -1\.0"),
        ({"fps": float("nan")}, "`fps` must be .*got nan"),
        ({"start": 2.0, "end": 1.0}, "0 <= start < end, got 2.0 and 1.0"),
        ({"select": "scenes"}, "uniform"),
        ({"select": "keyframes", "fps": 1.0}, "needs frames="),
        ({"backend": "opencv"}, "decord, torchcodec, pyav"),
        ({"isolated": True, "timeout": 0}, "`timeout` must be more than 0 .*got 0"),
    ],
)
def test_options_of_no_use_are_refused(kind, options, words):
    with pytest.raises(MmaccelError, match=words):
        decode(kind("h264.mp4"), **options)


def test_numbers_are_read_back():
    assert [films.number(frame(at)) for at in (0, 1, 513, 1023)] == [0, 1, 513, 1023]


@pytest.mark.parametrize("backend", EXACT)
def test_only_what_lies_between_keyframe_and_frame_is_decoded(tmp_path, monkeypatch, backend):
    from mmaccel.video.readers.pyav import PyAVReader

    seen = []
    numbered = PyAVReader._numbered

    def counted(self, frames):
        for one in numbered(self, frames):
            seen.append(one[0])
            yield one

    monkeypatch.setattr(PyAVReader, "_numbered", counted)
    path = film(tmp_path / "long.mp4", 300, options={"x264-params": "scenecut=0"})
    reader = READERS[backend](path, container(path))
    assert numbers(np.stack([p for _, p in reader.frames([5, 200, 203, 290])])) == [5, 200, 203, 290]
    if backend == "pyav":
        assert seen == [*range(6), *range(192, 204), *range(288, 291)]


@pytest.mark.parametrize("suffix", (".ts", ".mkv", ".mp4"))
def test_recordings_that_begin_in_the_middle(kind, tmp_path, suffix):
    """What comes before the first keyframe cannot be shown, and counts for nothing."""
    path = tmp_path / f"middle{suffix}"
    with av.open(str(kind("h264.mp4"))) as whole, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(whole.streams.video[0])
        for at, packet in enumerate(p for p in whole.demux(video=0) if p.size):
            if at >= 5:
                packet.stream = stream
                out.mux(packet)
    clip = decode(path, 100)
    assert numbers(clip.frames) == list(range(12, 60))
    assert (clip.total, clip.indices[0], clip.timestamps[0]) == (48, 0, 0.0)


def test_frames_that_an_edit_list_cuts_off(tmp_path):
    """Editors on phones trim without coding again: the first frames are in the file and are not to be seen."""
    path = tmp_path / "trimmed.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=24, options={"bf": "0"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 96, 64, "yuv420p", 12
        for at in range(30):
            shown_at = av.VideoFrame.from_ndarray(frame(at), format="rgb24")
            shown_at.pts = at - 5
            out.mux(stream.encode(shown_at))
        out.mux(stream.encode())
    # decord does not know of edit lists, which shows in its number of frames
    for backend in {None, *BACKENDS} - {"decord"}:
        clip = decode(path, 100, backend=backend)
        assert (clip.total, numbers(clip.frames)) == (25, list(range(5, 30))), backend
        assert clip.timestamps[0] == 0


@pytest.mark.parametrize("first", (True, False))
def test_a_cover_is_not_the_video(tmp_path, first):
    """Music videos and lectures carry a picture as a stream of its own, which may come before the video."""
    path = tmp_path / "cover.mkv"
    with av.open(str(path), "w") as out:
        codecs = ("mjpeg", "libx264") if first else ("libx264", "mjpeg")
        streams = {codec: out.add_stream(codec, rate=24) for codec in codecs}
        for codec, stream in streams.items():
            stream.width, stream.height = (32, 32) if codec == "mjpeg" else (96, 64)
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        cover = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 200, np.uint8), format="rgb24")
        out.mux([*streams["mjpeg"].encode(cover), *streams["mjpeg"].encode()])
        for at in range(30):
            out.mux(streams["libx264"].encode(av.VideoFrame.from_ndarray(frame(at), format="rgb24")))
        out.mux(streams["libx264"].encode())
    for backend in {None, *BACKENDS}:
        clip = decode(path, 5, backend=backend)
        assert (clip.total, numbers(clip.frames)) == (30, spaced(30, 5)), backend


def test_frames_that_share_a_time_are_counted(tmp_path):
    path = tmp_path / "same.mkv"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuvj420p"
        for at in range(20):
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame(at), format="rgb24")):
                packet.pts = packet.dts = packet.pts // 2
                out.mux(packet)
    clip = decode(path, 5, backend="pyav")
    assert clip.indices == numbers(clip.frames) == [2, 6, 10, 14, 18]


def _said(shown) -> int:
    return films.number(shown.to_ndarray(format="rgb24"))


def test_packets_without_a_picture_show_the_one_before():
    """As the hidden frames of VP8 and the fillers at the end of some AVI files."""
    from mmaccel.video.readers.pyav import Cursor

    def cursor(*places, total=20):
        return Cursor(iter([(at, av.VideoFrame.from_ndarray(frame(at), format="rgb24")) for at in places]), total)

    some = cursor(0, 1, 4, 5)
    assert [_said(some.shown(at)) for at in (1, 3, 4, 5, 7)] == [1, 1, 4, 5, 5]
    assert _said(cursor(3, 4).shown(2)) == 3
    for broken in (cursor(), cursor(0, 1, 2)):
        with pytest.raises(EOFError):
            broken.shown(9)


def test_animated_gifs_are_clips_and_others_pictures(kind, tmp_path):
    from mmaccel.media.files import load_media

    pictures, clip = load_media([kind("anim.gif")], 3, 1.0)
    assert not pictures and clip is not None and numbers(clip.frames) == [10, 30, 50]
    Image.fromarray(frame(5)).save(tmp_path / "still.gif")
    pictures, clip = load_media([tmp_path / "still.gif"], 3, 1.0)
    assert clip is None and pictures[0].size == (96, 64)
