"""Frames are shown as a player shows them: turned, mirrored or both, by every back end, and on white."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import av
import numpy as np
import pytest
from films import film

from mmaccel import MmaccelError
from mmaccel.media import untrusted
from mmaccel.media.picture import PictureLimits
from mmaccel.video import READERS, decode
from mmaccel.video.container import container
from mmaccel.video.readers import packets, usable
from mmaccel.video.readers.base import NotExactError

#: what FFmpeg does with a display matrix (a, b, c, d), in the names of its filters (`ffmpeg_filter.c`, autorotate)
MATRICES = {
    (1, 0, 0, 1): (),
    (-1, 0, 0, 1): ("hflip",),
    (1, 0, 0, -1): ("vflip",),
    (-1, 0, 0, -1): ("hflip", "vflip"),
    (0, 1, -1, 0): ("transpose=clock",),
    (0, -1, 1, 0): ("transpose=cclock",),
    (0, 1, 1, 0): ("transpose=cclock_flip",),
    (0, -1, -1, 0): ("transpose=clock_flip",),
}
FILTERS = {
    "hflip": lambda frame: frame[:, ::-1],
    "vflip": lambda frame: frame[::-1],
    "transpose=clock": lambda frame: np.rot90(frame, -1),
    "transpose=cclock": lambda frame: np.rot90(frame),
    # a quarter turn, and then top and bottom change places
    "transpose=clock_flip": lambda frame: np.rot90(frame, -1)[::-1],
    "transpose=cclock_flip": lambda frame: np.rot90(frame)[::-1],
}
BACKENDS = [name for name, reader in READERS.items() if usable(reader)]
pytestmark = pytest.mark.filterwarnings("ignore:.*was read by")


def corners(at: int, width: int, height: int) -> np.ndarray:
    """A colour in every corner, none of them alike."""
    picture = np.full((height, width, 3), 120, np.uint8)
    picture[: height // 2, : width // 2] = (230, 30, 30)
    picture[height // 2 :, : width // 2] = (30, 200, 30)
    picture[: height // 2, width // 2 :] = (30, 30, 220)
    return picture


def with_matrix(data: bytes, matrix: tuple[float, ...], box: bytes = b"tkhd") -> bytes:
    """An mp4 or mov file whose track (or whose movie, ``mvhd``) has that display matrix."""
    start = data.index(box) + 4
    # times of 32 bits; then reserved fields, layer and volume, or rate and volume
    at = start + (40 if box == b"tkhd" else 36)
    assert data[at : at + 36] == struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    a, b, c, d = (round(value * 65536) for value in matrix)
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return film(tmp_path_factory.mktemp("plain") / "plain.mp4", 12, picture=corners)


def shown(frame: np.ndarray, filters: tuple[str, ...]) -> np.ndarray:
    for name in filters:
        frame = FILTERS[name](frame)
    return frame


def frames(path: Path, backend: str) -> np.ndarray:
    return decode(path, 3, backend=backend).frames


def same(found: np.ndarray, expected: np.ndarray) -> None:
    # back ends convert colours with other rounding
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected.astype(int)).mean() < 3


@pytest.mark.parametrize("box", (b"tkhd", b"mvhd"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_turns_and_mirrors(plain, tmp_path, matrix, backend, box):
    path = tmp_path / "held.mp4"
    path.write_bytes(with_matrix(plain.read_bytes(), matrix, box))
    expected = [shown(frame, MATRICES[matrix]) for frame in frames(plain, backend)]
    same(frames(path, backend), np.stack(expected))
    isolated = decode(path, 3, backend=backend, isolated=True)
    assert np.array_equal(isolated.frames, frames(path, backend))


@pytest.mark.parametrize("matrix", MATRICES)
def test_filters_of_ffmpeg_are_those_of_the_table(matrix, plain):
    """The names above mean what FFmpeg does by them."""
    with av.open(str(plain)) as film:
        frame = next(film.decode(film.streams.video[0]))
    graph = av.filter.Graph()
    last = graph.add_buffer(width=frame.width, height=frame.height, format="rgb24", time_base=frame.time_base)
    for name in MATRICES[matrix]:
        step = graph.add(*name.split("="))
        last.link_to(step)
        last = step
    end = graph.add("buffersink")
    last.link_to(end)
    graph.configure()
    rgb = frame.reformat(format="rgb24")
    graph.push(rgb)
    assert np.array_equal(graph.pull().to_ndarray(), shown(rgb.to_ndarray(), MATRICES[matrix]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_angles_and_sizes_become_the_nearest_quarter(plain, tmp_path, backend):
    path, whole = tmp_path / "held.mp4", frames(plain, backend)
    for degrees, turns in {10: 0, 30: 0, 60: -1, 89.5: -1, 100: -1, 170: 2, 200: 2, 260: 1, 350: 0}.items():
        turn = np.deg2rad(degrees)
        path.write_bytes(with_matrix(plain.read_bytes(), (np.cos(turn), np.sin(turn), -np.sin(turn), np.cos(turn))))
        same(frames(path, backend), np.rot90(whole, turns, (1, 2)))
    for matrix, filters in {(-2, 0, 0, 0.5): ("hflip",), (0, 3, -2, 0): ("transpose=clock",), (0, 0, 0, 0): ()}.items():
        path.write_bytes(with_matrix(plain.read_bytes(), matrix))
        same(frames(path, backend), np.stack([shown(frame, filters) for frame in whole]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("degrees", (0, 90, 180, 270))
@pytest.mark.parametrize("suffix", ("mp4", "mov", "mkv", "webm"))
def test_every_container_that_turns(tmp_path, suffix, degrees, backend):
    """decord by itself does not turn what Matroska holds."""
    vp8 = {"codec": "libvpx", "options": {"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "1"}}
    options = vp8 if suffix == "webm" else {}
    path = film(tmp_path / f"held.{suffix}", 12, picture=corners, rotation=degrees, **options)
    with av.open(str(path)) as opened:
        held = next(opened.decode(opened.streams.video[0])).rotation % 360
    assert held == degrees, "this FFmpeg does not write it"
    found = frames(path, backend)
    plain = film(tmp_path / f"plain.{suffix}", 12, picture=corners, **options)
    same(found, np.rot90(frames(plain, backend), degrees // 90, (1, 2)))


def test_torchcodec_turns_what_it_says(plain, tmp_path, monkeypatch):
    """As torchcodec 0.11 does by its documentation: the rotation of a mirrored clip is applied, and told; before, neither."""

    class Decoder:
        told = True

        def __init__(self, path: str, **options: object) -> None:
            with av.open(path) as opened:
                found = list(opened.decode(opened.streams.video[0]))
            turn = round(found[0].rotation / 90) if self.told else 0
            self.pictures = np.stack([np.rot90(frame.to_ndarray(format="rgb24"), turn) for frame in found])
            about = {"begin_stream_seconds": 0.0, "average_fps_from_header": 24.0, "duration_seconds": len(found) / 24}
            self.metadata = SimpleNamespace(**about, **({"rotation": found[0].rotation} if self.told else {}))

        def __len__(self) -> int:
            return len(self.pictures)

        def get_frames_at(self, indices: list[int]) -> SimpleNamespace:
            times = SimpleNamespace(numpy=lambda: np.asarray(indices) / 24)
            return SimpleNamespace(pts_seconds=times, data=SimpleNamespace(numpy=lambda: self.pictures[indices]))

    stand_in = ModuleType("torchcodec.decoders")
    stand_in.VideoDecoder = Decoder
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", stand_in)
    path = tmp_path / "held.mp4"
    for Decoder.told in (True, False):
        for matrix, filters in MATRICES.items():
            path.write_bytes(with_matrix(plain.read_bytes(), matrix))
            expected = [shown(frame, filters) for frame in frames(plain, "pyav")]
            same(frames(path, "torchcodec"), np.stack(expected))


@pytest.mark.parametrize(
    ("codec", "suffix", "pixels"), [("qtrle", "mov", "argb"), ("png", "mov", "rgba"), ("ffv1", "mkv", "bgra")]
)
def test_clear_places_are_white(tmp_path, codec, suffix, pixels):
    path = tmp_path / f"clear.{suffix}"
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, pixels
        for _ in range(4):
            rgba = np.dstack([corners(0, 96, 64), np.full((64, 96), 255, np.uint8)])
            rgba[:, 48:, 3], rgba[:, 48:, :3] = 0, 0
            out.mux(stream.encode(av.VideoFrame.from_ndarray(rgba, format="rgba").reformat(format=pixels)))
        out.mux(stream.encode())
    for options in ({}, {"backend": "pyav"}):
        found = decode(path, 2, **options).frames
        assert (found[:, :, 48:] == 255).all()
        assert np.abs(found[:, :, :48].astype(int) - corners(0, 96, 64)[:, :48]).max() <= 2
    if "decord" in BACKENDS:
        with pytest.raises(NotExactError, match="drops the alpha channel"):
            READERS["decord"](path, container(path))


def test_sides_of_frames_are_bounded_before_they_are_decoded(tmp_path, plain, monkeypatch):
    for size, match in {
        (17_000, 100): "17,000 x 100 pixels; a side has at most 16,384",
        (6_432, 32): "one side is at most 200 times the other",
    }.items():
        path = film(tmp_path / "wide.mov", 1, codec="png", size=size, pixels="rgb24")

        def none(*given: object) -> None:
            raise AssertionError("a frame was decoded")

        with monkeypatch.context() as patch:
            for reader in READERS.values():
                patch.setattr(reader, "frames", none)
            with pytest.raises(MmaccelError, match=match):
                decode(path, 1)
        with pytest.raises(MmaccelError, match=match):
            untrusted.clip(path, 1)
    monkeypatch.setattr(packets, "LIMITS", PictureLimits(1000, 6000, 10))
    with pytest.raises(MmaccelError, match="96 x 64 pixels, that is"):
        decode(plain, 1)
