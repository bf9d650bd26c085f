"""Checks before a video is opened: a regular local file with the header of a known container, and complete."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import MmaccelError

#: names as FFmpeg knows their demuxers
KINDS = (
    "mov", "matroska", "avi", "gif", "flv", "asf", "ogg", "mpegts", "mpeg", "mpegvideo", "mxf", "yuv4mpegpipe", "ivf",
)  # fmt: skip
#: suffixes of files of these kinds
SUFFIXES = tuple(
    ".mp4 .m4v .mov .qt .f4v .3gp .3g2 .mkv .webm .avi .flv .wmv .asf .ogv .ogm .ts .mts .m2ts .m2t .mpg .mpeg .m2v .mpv .vob "
    ".mxf .y4m .ivf .mpe .m1v .divx .rm .rmvb .dv .wtv".split()
)

_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp")
_STARTS = {
    b"\x1aE\xdf\xa3": "matroska",
    b"GIF8": "gif",
    b"FLV": "flv",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "asf",
    b"OggS": "ogg",
    b"\x00\x00\x01\xba": "mpeg",
    b"\x00\x00\x01\xb3": "mpegvideo",
    b"\x06\x0e\x2b\x34\x02\x05\x01\x01\x0d\x01\x02": "mxf",
    b"YUV4MPEG2 ": "yuv4mpegpipe",
    b"DKIF": "ivf",
    **dict.fromkeys((b"\xff\xd8\xff", b"\x89PNG", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ", b"8BPS"), "picture"),
}
#: brands of files in boxes that hold pictures, such as AVIF
_STILL = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"hevx", b"mif1", b"msf1")
#: number of bytes that identify a file
HEAD = 4096
_PLAYLISTS = (b"#EXTM3U", b"ffconcat", b"[playlist]", b"v=0", b"<MPD", b"<ASX", b"<asx", b"<SMIL", b"<smil")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.,-]+:")


def named(path: str | os.PathLike[str]) -> str:
    """The path as text; refuses everything else."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise MmaccelError(
            f"A video must be a path, got {str(path)[:80]!r}; give the path of a video file or a folder of pictures."
        )
    return text


def local(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a regular file or a folder; refuses network addresses, protocols of FFmpeg and special files."""
    text = named(path)
    try:
        mode = os.stat(text).st_mode
    except OSError as error:
        if _ADDRESS.match(text):
            raise MmaccelError(
                f"{text[:80]!r} is an address or protocol, and only local files are read; download the video first."
            ) from None
        if isinstance(error, FileNotFoundError):
            raise MmaccelError(f"The video {text!r} does not exist; give the path of a video file.") from None
        raise MmaccelError(f"The video {text!r} cannot be opened ({error.strerror}).") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise MmaccelError(f"{text!r} is not a regular file; give the path of a video file or a folder of pictures.")
    # an absolute path is never taken for a protocol
    return Path(os.path.abspath(text))


def container(path: Path) -> str:
    """Container of a file, one of :data:`KINDS`, by its first bytes; its name does not count.

    Refuses empty files, pictures, unknown kinds, and files shorter than their own header says; and playlists, whatever they
    are called: they could make a decoder open other files or addresses.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            head = file.read(HEAD)
            kind = _kind(path, head)
            expected = _ANNOUNCED[kind](file, head, size) if kind in _ANNOUNCED else None
    except OSError as error:
        raise MmaccelError(f"The video {str(path)!r} cannot be opened ({error.strerror}).") from None
    if expected is not None and size < expected:
        raise MmaccelError(
            f"The video {str(path)!r} breaks off after {size:,} of {expected:,} bytes; copy or convert it again."
        )
    return kind


def begins(head: bytes) -> str | None:
    """Kind of a file by its first :data:`HEAD` bytes: one of :data:`KINDS`, ``picture``, ``playlist``, or None."""
    for start, kind in _STARTS.items():
        if head.startswith(start):
            return kind
    if head[4:8] in _BOXES:
        return "picture" if head[4:8] == b"ftyp" and head[8:12] in _STILL else "mov"
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"WEBP"):
        return "avi" if head[8:12] == b"AVI " else "picture"
    # packets of 188 bytes, in .m2ts files with a time stamp of 4 bytes in front
    for first, step in ((0, 188), (4, 192)):
        if len(head) > first + 4 * step and all(head[first + i * step] == 0x47 for i in range(5)):
            return "mpegts"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if any(text.startswith(p) or (p.startswith(b"<") and p in text[:1024]) for p in _PLAYLISTS):
        return "playlist"
    return None


def _kind(path: Path, head: bytes) -> str:
    if not head:
        raise MmaccelError(f"The video {str(path)!r} is empty; copy it again.")
    kind = begins(head)
    if kind in KINDS:
        return kind
    if kind == "playlist":
        raise MmaccelError(f"{str(path)!r} is a playlist, and those are not followed; give the video file itself.")
    if kind == "picture":
        raise MmaccelError(f"{str(path)!r} is a picture; give it as one, or a folder of pictures as a video.")
    raise MmaccelError(f"The video {str(path)!r} is not a readable video (unknown header); convert it to mp4.")


def _boxes_end(file: BinaryIO, head: bytes, size: int) -> int | None:
    """End of the last box of an mp4 or mov file, by its header."""
    at = 0
    while at + 8 <= size:
        file.seek(at)
        header = file.read(16)
        length = int.from_bytes(header[:4], "big")
        if length == 1:
            length = int.from_bytes(header[8:16], "big")
        if length < 8:
            # 0: up to the end of the file; anything else is for the demuxer to complain about
            return None
        at += length
    return at


def _segment_end(file: BinaryIO, head: bytes, size: int) -> int | None:
    """End of the segment of a Matroska or WebM file; None for live recordings."""

    def length(at: int) -> tuple[int | None, int]:
        """An EBML number of variable length, None for unknown, and where it ends."""
        if at >= len(head) or not head[at]:
            return None, at
        width = 9 - head[at].bit_length()
        value = int.from_bytes(head[at : at + width], "big") & ((1 << 7 * width) - 1)
        return (None if value == (1 << 7 * width) - 1 else value), at + width

    header, at = length(4)
    if header is None or head[at + header : at + header + 4] != b"\x18\x53\x80\x67":
        return None
    segment, start = length(at + header + 4)
    return None if segment is None else start + segment


def _riff_end(file: BinaryIO, head: bytes, size: int) -> int | None:
    """End of the first RIFF chunk of an AVI file; 0 if it was never finished."""
    return int.from_bytes(head[4:8], "little") + 8


_ANNOUNCED = {"mov": _boxes_end, "matroska": _segment_end, "avi": _riff_end}
