"""A picture from wherever it is; nothing here needs torch, which decoding processes do without."""

from __future__ import annotations

import os

from PIL import Image, ImageOps
from PIL.Image import Image as PILImage

from ..errors import MmaccelError


def load_picture(source: str | os.PathLike[str]) -> PILImage:
    """The picture at a path (or URL, or in base 64), upright, RGB, fully read.

    Raises
    ------
    MmaccelError
        If there is no such file, or it is broken or no picture.
    """
    text = os.fspath(source)
    remote = text.startswith(("http://", "https://", "data:"))
    # a picture in base 64 is longer than any path
    if remote or (len(text) > 1024 and not os.path.exists(text)):
        from transformers.image_utils import load_image

        try:
            found: PILImage = load_image(text)
            return found
        except Exception as error:
            raise MmaccelError(f"Cannot load the picture {text[:80]!r}: {first_line(error)}") from error
    if not os.path.isfile(text):
        what = "is a folder" if os.path.isdir(text) else "does not exist"
        raise MmaccelError(f"The picture {text!r} {what}; give the path of an image file.")
    try:
        with Image.open(text) as opened:
            opened.load()
            return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:
        raise MmaccelError(f"The picture {text!r} cannot be read: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Of what an error says, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


__all__ = ["first_line", "load_picture"]
