"""Video files for tests, made with PyAV; every frame says which one it is."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

#: bits of a frame's number, as black and white blocks that survive compression
_BITS = 10
_QUIET = {"x265-params": "log-level=none"}


def frame(number: int, width: int = 96, height: int = 64) -> np.ndarray:
    """``[H, W, 3]`` uint8: the number in binary along the top, below it grey."""
    picture = np.full((height, width, 3), 120, dtype=np.uint8)
    for bit in range(_BITS):
        left, right = bit * width // _BITS, (bit + 1) * width // _BITS
        picture[: height // 2, left:right] = 235 if number >> bit & 1 else 16
    return picture


def number(picture: np.ndarray) -> int:
    """The number that a decoded frame says."""
    height, width = picture.shape[:2]
    middle = [(2 * bit + 1) * width // (2 * _BITS) for bit in range(_BITS)]
    rows = picture[height // 8 : height * 3 // 8]
    return sum(int(rows[:, x - 1 : x + 2].mean() > 128) << bit for bit, x in enumerate(middle))


def numbers(frames: np.ndarray) -> list[int]:
    return [number(picture) for picture in frames]


def film(
    path: Path,
    frames: int = 60,
    *,
    codec: str = "libx264",
    fps: int | Fraction = 24,
    size: tuple[int, int] = (96, 64),
    key: int = 12,
    times: list[int] | None = None,
    rotation: int = 0,
    audio: bool = False,
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    picture: Callable[[int, int, int], np.ndarray] = frame,
) -> Path:
    """A clip of numbered frames, a keyframe every ``key``.

    times : when every frame is shown, in milliseconds, for a variable frame rate.
    rotation : degrees counterclockwise by which a player has to turn it, as phones write them.
    """
    with av.open(str(path), "w", options=container or {}) as out:
        stream = out.add_stream(codec, rate=fps, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.gop_size = key
        if times is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        sound = out.add_stream("aac", rate=16000, layout="mono") if audio else None
        for at in range(frames):
            shown = av.VideoFrame.from_ndarray(picture(at, *size), format="rgb24")
            if times is not None:
                shown.pts, shown.time_base = times[at], Fraction(1, 1000)
            out.mux(stream.encode(shown))
        out.mux(stream.encode())
        if sound is not None:
            quiet = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
            quiet.sample_rate, quiet.pts = 16000, 0
            out.mux(sound.encode(quiet))
            out.mux(sound.encode())
    return path


_B = {"options": {"bf": "2"}}
#: file name -> how to make it: containers and codecs, and the ways in which they are hard to seek in
KINDS: dict[str, dict] = {
    "h264.mp4": {},
    "faststart.mp4": {"container": {"movflags": "faststart"}},
    "fragments.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}},
    "h264.mov": {"key": 1},
    "h264.mkv": {},
    "audio.mp4": {"audio": True},
    "open.mp4": {"options": {"x264-params": "open-gop=1:bframes=3:scenecut=0"}},
    "pyramid.mp4": {"options": {"x264-params": "b-pyramid=normal:bframes=5:scenecut=0"}},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none:open-gop=0"}},
    "hevc-open.mp4": {"codec": "libx265", "options": _QUIET},
    "hevc-10bit.mp4": {"codec": "libx265", "pixels": "yuv420p10le", "options": _QUIET},
    "h264-10bit.mkv": {"pixels": "yuv420p10le"},
    "prores.mov": {"codec": "prores_ks", "pixels": "yuv422p10le"},
    "mpeg4.mp4": {"codec": "mpeg4"},
    "mpeg4-b.mp4": {"codec": "mpeg4", **_B},
    "mpeg4-b.avi": {"codec": "mpeg4", **_B},
    "mpeg2-b.mkv": {"codec": "mpeg2video", **_B},
    "mpeg2-b.mpg": {"codec": "mpeg2video", **_B},
    "mpeg2-b.ts": {"codec": "mpeg2video", **_B},
    "h264.ts": {},
    "camera.m2ts": {"container": {"mpegts_m2ts_mode": "1"}},
    "live.mkv": {"container": {"live": "1"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "16"}},
    "vp8.webm": {"codec": "libvpx", "options": {"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "1"}},
    "vp8.ogv": {"codec": "libvpx", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "flv1.flv": {"codec": "flv1"},
    "wmv2.wmv": {"codec": "wmv2"},
    "anim.gif": {"codec": "gif", "pixels": "rgb8", "fps": 10},
    "phone.3gp": {"codec": "mpeg4"},
    "phone.3g2": {},
    "flash.f4v": {},
    "disc.vob": {"codec": "mpeg2video", **_B},
    "camera.mts": {},
    "studio.mxf": {"codec": "mpeg2video", **_B},
    "raw.y4m": {"codec": "wrapped_avframe"},
    "vp8.ivf": {"codec": "libvpx", "options": {"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "1"}},
    "wmv2.asf": {"codec": "wmv2"},
    "odd.mp4": {"size": (97, 63), "pixels": "yuv444p"},
    "ntsc.mp4": {"fps": Fraction(30000, 1001)},
}
