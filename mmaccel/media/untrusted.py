"""Decode pictures and clips that strangers sent; errors are one sentence and name no path of this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from PIL.Image import Image as PILImage

from ..errors import MmaccelError
from ..video import Clip
from ..video.container import HEAD, KINDS, begins
from ..video.decode_spec import DecodeSpec
from ..video.subprocess_decoder import decode_in_subprocess
from .picture import PictureLimits, load_picture

#: bytes of one file
UPLOAD = 64 << 20
#: of the decoder: seconds, and bytes of the frames
SECONDS, MEMORY = 60.0, 1 << 30
#: formats of pictures that are decoded
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
#: scans of a JPEG, each of which may go over all its pixels though it has few bytes; encoders write up to 16
SCANS = 32
#: how a JPEG begins, and each of its scans; neither can be in the data of one
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
LIMITS = PictureLimits(20_000, 40_000_000, 200, PICTURES)


def picture(path: str | Path) -> PILImage:
    """Load an untrusted picture as :func:`~mmaccel.media.picture.load_picture` does, within :data:`PICTURES`, :data:`LIMITS`
    and :data:`SCANS`."""
    weigh(path)
    # bytes have no name: a path is ours and nobody's business
    data = Path(path).read_bytes()
    if data.startswith(_JPEG) and (scans := data.count(_SCAN)) > SCANS:
        raise MmaccelError(f"The picture is a JPEG of {scans:,} scans; at most {SCANS} are decoded, so save it again.")
    return load_picture(data, LIMITS)


def pixels(path: str | Path) -> int:
    """Number of pixels in a picture's header; 0 if it is not a picture."""
    try:
        with Image.open(path, formats=PICTURES) as opened:
            return opened.width * opened.height
    except Exception:
        # decoding it says why
        return 0


def clip(
    path: str | Path,
    frames: int,
    fps: float | None = None,
    *,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    begun: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Clip:
    """Decode at most ``frames`` frames of a clip in a subprocess, within ``seconds`` and ``memory`` bytes.

    ``path`` may be a folder of frames. ``begun`` is called with every process that decodes.
    """
    weigh(path)
    if not Path(path).is_dir():
        with open(path, "rb") as file:
            kind = begins(file.read(HEAD))
        if kind not in KINDS:
            raise MmaccelError(
                "This file is not a readable clip; upload a video such as mp4, mov, mkv, webm, avi or gif."
            )
    try:
        return decode_in_subprocess(path, DecodeSpec(frames, fps, memory=memory), seconds, begun=begun)
    except MmaccelError as error:
        said = str(error).replace(repr(str(path)), "").replace(str(path), "").strip()
        raise MmaccelError(f"The clip cannot be decoded; upload another. ({' '.join(said.split())})") from None


def weigh(path: str | Path) -> None:
    """Raise :class:`MmaccelError` if a file is too large."""
    size = Path(path).stat().st_size
    if size > UPLOAD:
        raise MmaccelError(f"The file has {size >> 20} MiB; at most {UPLOAD >> 20} are taken.")
