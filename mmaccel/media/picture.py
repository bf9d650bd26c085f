"""Load pictures from files, addresses, bytes, arrays and PIL as upright RGB, without importing torch."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Image as PILImage
from PIL.Image import Transpose

from ..errors import MmaccelError, first_line

#: the EXIF tag of the orientation, and what makes each of its values upright
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
#: pixels of PNG files that PIL scales to 8 bits, but not their transparent colour
_KEYS = {"L;2": lambda key: key * 85, "L;4": lambda key: key * 17, "RGB;16B": lambda key: tuple(k >> 8 for k in key)}
#: seconds without an answer after which an address is given up
_PATIENCE = 60.0
#: text in base64 is longer than any path
_PATH = 1024


@dataclass(frozen=True)
class PictureLimits:
    """Limits that are checked before a picture is decoded.

    side : pixels of the longer side.
    pixels : width times height.
    ratio : the longer side over the shorter one. Processors enlarge a thin picture until its shorter side fits the model.
    formats : formats of PIL that are read; None for all that it knows.
    """

    side: int
    pixels: int
    ratio: int
    formats: tuple[str, ...] | None = None


#: of the user's own pictures
LIMITS = PictureLimits(65_536, 150_000_000, 1000)


def load_picture(source: Any, limits: PictureLimits = LIMITS) -> PILImage:
    """Load a picture as models see it: 8-bit RGB, upright by its EXIF orientation, on white where it is transparent.

    Parameters
    ----------
    source : a path, an ``http(s):`` or ``data:`` address, text in base64, the bytes of a file, a PIL picture in any mode, or
        an array ``[H, W]`` or ``[H, W, C]`` with 1, 3 or 4 channels. Of an animation or of several pages the first is taken,
        and of a PIL picture the one that it stands at.
    limits : checked before the picture is decoded.

    16 bits are scaled by 1 / 257. Integers of 32 bits are taken from 0 to 255, or if they are larger, from 0 to 65,535;
    floating point numbers from 0 to 1, or if they are larger, from 0 to 255. Colour profiles are not applied.

    Raises
    ------
    MmaccelError
        If the file does not exist or is not a readable picture, it exceeds the limits, or numbers are out of range or NaN.
    """
    if isinstance(source, PILImage):
        return _decoded(source, "The picture", limits)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decoded(BytesIO(source), "The picture", limits)
    if isinstance(source, np.ndarray):
        return _from_array(source, limits)
    if not isinstance(source, (str, os.PathLike)):
        raise MmaccelError(
            f"A picture is a path, an address, bytes, a PIL picture or an array, not {type(source).__name__}."
        )
    text = os.fspath(source)
    if not isinstance(text, str):
        text = os.fsdecode(text)
    name = f"The picture {text[:80]!r}"
    if text.startswith(("http://", "https://")):
        return _decoded(_downloaded(text, name), name, limits)
    if text.startswith("data:") or (len(text) > _PATH and not os.path.exists(text)):
        return _decoded(_unpacked(text, name), name, limits)
    name = f"The picture {text!r}"
    if not os.path.isfile(text):
        what = "is a folder" if os.path.isdir(text) else "does not exist"
        raise MmaccelError(f"{name} {what}; give the path of an image file.")
    return _decoded(text, name, limits)


def _decoded(source: str | BytesIO | PILImage, name: str, limits: PictureLimits) -> PILImage:
    try:
        if isinstance(source, PILImage):
            return _plain(source, name, limits)
        with Image.open(source, formats=limits.formats) as opened:
            return _plain(opened, name, limits)
    except MmaccelError:
        raise
    except UnidentifiedImageError as error:
        known = f"another format than {', '.join(limits.formats)}" if limits.formats else "no known format"
        raise MmaccelError(f"{name} cannot be read: it is of {known}, or broken; convert it to PNG or JPEG.") from error
    except Image.DecompressionBombError as error:
        raise MmaccelError(
            f"{name} has far too many pixels; at most {limits.pixels / 1e6:.0f} megapixels are taken."
        ) from error
    except Exception as error:
        # on broken files PIL raises whatever its readers run into, such as struct.error, zlib.error and MemoryError
        raise MmaccelError(f"{name} cannot be read: {first_line(error)}") from error


def _plain(image: PILImage, name: str, limits: PictureLimits) -> PILImage:
    check_size(image.size, name, limits)
    # what is still to be decoded of a file
    tile: Any = getattr(image, "tile", None)
    if image.mode == "RGB" and not image.info and not tile:
        return image
    rawmode = tile[0][3] if tile and image.format == "PNG" else None
    key = image.info.get("transparency")
    if rawmode in _KEYS and key is not None:
        image.info["transparency"] = _KEYS[rawmode](key)
    image.load()
    # formats such as ICO tell the size only now
    check_size(image.size, name, limits)
    turn = _UPRIGHT.get(_orientation(image))
    upright = image if turn is None else image.transpose(turn)
    rgb = _on_white(_eight_bits(upright, name))
    # the orientation must not be applied again
    rgb.info = {}
    return rgb


def check_size(size: tuple[int, int], name: str, limits: PictureLimits) -> None:
    """Validate that a picture of ``size`` (width, height) is within its limits."""
    width, height = size
    shown = f"{name} has {width:,} x {height:,} pixels"
    if min(size) < 1:
        raise MmaccelError(f"{shown}; a picture needs at least one.")
    if width * height > limits.pixels:
        raise MmaccelError(
            f"{shown}, that is {width * height / 1e6:.0f} megapixels; at most {limits.pixels / 1e6:.0f} are taken, so make it "
            "smaller."
        )
    if max(size) > limits.side:
        raise MmaccelError(f"{shown}; a side has at most {limits.side:,}, so make it smaller or cut it.")
    if max(size) > limits.ratio * min(size):
        raise MmaccelError(f"{shown}; one side is at most {limits.ratio:,} times the other, so cut it.")


def _orientation(image: PILImage) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        # a block that cannot be read says nothing of the orientation
        return 1


def _eight_bits(image: PILImage, name: str) -> PILImage:
    """Grey levels of 16 and 32 bits as ``L``, with ``LA`` where one of them is transparent; others as they are."""
    if image.mode[0] not in "IF":
        return image
    values = np.asarray(image)
    # PIL reads 16 bits of PGM files, and older ones of PNG files, into 32
    wide = image.mode == "I" and image.format in ("PPM", "PNG")
    grey = Image.fromarray(to_bytes(values.clip(0, 65535).astype(np.uint16) if wide else values, name)[0])
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _on_white(image: PILImage) -> PILImage:
    """Convert to RGB on a white background."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    clear = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", clear.size, "white")
    white.paste(clear, mask=clear)
    return white


def on_white(frames: np.ndarray) -> np.ndarray:
    """``[..., 3 or 4]`` uint8, RGB or RGBA, as RGB on white."""
    if frames.shape[-1] == 3:
        return frames
    colour, alpha = frames[..., :3].astype(np.uint16), frames[..., 3:].astype(np.uint16)
    return ((colour * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def to_bytes(values: np.ndarray, name: str = "The picture") -> tuple[np.ndarray, float]:
    """Pixels as uint8 of the same shape, and the number that was white: 1, 255 or 65,535.

    uint8 stays. uint16 are 16 bits; larger integers are taken as 8 bits, or as 16 where they are above 255; floating point
    numbers from 0 to 1, or where they are above 1 from 0 to 255, and lose what is finer than 1 / 255. Refuses values that are
    NaN, infinite, below 0 or above their range.
    """
    floating = np.issubdtype(values.dtype, np.floating)
    if values.dtype == np.uint8:
        return values, 255.0
    if floating and not np.isfinite(values).all():
        raise MmaccelError(f"{name} has pixels that are NaN or infinite; replace them by numbers from 0 to 1.")
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if values.dtype == np.bool_ or (floating and high <= 1.0):
        white = 1.0
    elif values.dtype == np.uint16 or (not floating and high > 255):
        white = 65535.0
    else:
        white = 255.0
    if low < 0 or high > white:
        given = "from 0 to 1 or from 0 to 255" if floating else "from 0 to 255 or from 0 to 65,535"
        raise MmaccelError(
            f"{name} has pixels from {low:g} to {high:g}, as if they were normalised already or raw; give numbers {given}."
        )
    return (values.astype(np.float32) * (255.0 / white)).round().astype(np.uint8), white


def _from_array(array: np.ndarray, limits: PictureLimits) -> PILImage:
    if array.ndim not in (2, 3) or array.shape[2:] not in ((), (1,), (3,), (4,)) or array.dtype.kind not in "buif":
        raise MmaccelError(
            "A picture is an array [H, W] or [H, W, C] of numbers with 1, 3 or 4 channels, not "
            f"{array.dtype} {list(array.shape)}."
        )
    check_size((array.shape[1], array.shape[0]), "The picture", limits)
    pixels = to_bytes(array)[0]
    pixels = np.ascontiguousarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)
    return _decoded(Image.fromarray(pixels), "The picture", limits)


def _downloaded(url: str, name: str) -> BytesIO:
    import httpx

    try:
        answer = httpx.get(url, timeout=_PATIENCE, follow_redirects=True)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise MmaccelError(f"{name} cannot be loaded: {first_line(error)}") from error
    return BytesIO(answer.content)


def _unpacked(text: str, name: str) -> BytesIO:
    """Decode a data: address or base64 text, in either alphabet, with or without line breaks."""
    head, _, body = text.partition(",") if text.startswith("data:") else (";base64", "", text)
    data = unquote_to_bytes(body)
    if head.endswith(";base64"):
        data = data.translate(bytes.maketrans(b"-_", b"+/"), b" \t\r\n").rstrip(b"=")
        try:
            data = base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
        except ValueError as error:
            raise MmaccelError(f"{name} is not valid base64; encode the bytes of the file, or give a path.") from error
    return BytesIO(data)
