"""Pictures and clips that strangers sent: what is refused is refused in one sentence, which names no path of ours."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from PIL.Image import Image as PILImage

from ..errors import MmaccelError
from ..video import Clip, decode
from .prepare import load_picture

#: bytes of one file
UPLOAD = 64 << 20
PIXELS = 40_000_000
#: of the decoder: seconds, and bytes of the frames
SECONDS, MEMORY = 60.0, 1 << 30
PICTURES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "GIF": ".gif", "BMP": ".bmp"}
CLIPS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif")


def picture(path: str | Path) -> PILImage:
    """The picture, upright, RGB.

    Raises
    ------
    MmaccelError
        If it is no picture of a known kind, broken, or larger than is decoded here.
    """
    weigh(path)
    try:
        with Image.open(path, formats=tuple(PICTURES)) as opened:
            width, height = opened.size
    except Image.DecompressionBombError:
        raise MmaccelError(f"The picture is far too large; at most {PIXELS // 10**6} megapixels are taken.") from None
    except OSError:
        raise MmaccelError(
            f"This file is no picture that can be read; upload one of {', '.join(k.lower() for k in PICTURES)}."
        ) from None
    if width * height > PIXELS:
        raise MmaccelError(
            f"The picture has {width * height / 1e6:.0f} megapixels; at most {PIXELS // 10**6} are taken, so make it smaller."
        )
    try:
        return load_picture(path)
    except MmaccelError:
        # its sentence names the path, which is ours and nobody's business
        raise MmaccelError("The picture is broken and cannot be decoded; upload another.") from None


def clip(
    path: str | Path, frames: int, fps: float | None = None, *, seconds: float = SECONDS, memory: int = MEMORY
) -> Clip:
    """At most ``frames`` frames of the clip, decoded in a process that can be killed, in ``seconds`` and ``memory`` bytes.

    Raises
    ------
    MmaccelError
        If it is of an unknown kind, or cannot be decoded.
    """
    weigh(path)
    if Path(path).suffix.lower() not in CLIPS:
        raise MmaccelError(f"This file is no clip that can be read; upload one of {', '.join(s[1:] for s in CLIPS)}.")
    try:
        return decode(path, frames, fps=fps, isolated=True, timeout=seconds, memory=memory)
    except MmaccelError as error:
        said = str(error).replace(repr(str(path)), "").replace(str(path), "").strip()
        raise MmaccelError(f"The clip cannot be decoded; upload another. ({' '.join(said.split())})") from None


def weigh(path: str | Path) -> None:
    """Raise :class:`MmaccelError` if a file is larger than is taken."""
    size = Path(path).stat().st_size
    if size > UPLOAD:
        raise MmaccelError(f"The file has {size >> 20} MiB; at most {UPLOAD >> 20} are taken.")
