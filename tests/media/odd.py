"""Pictures as people have them: files in every mode, and what a model must be shown of each."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

W, H = 60, 44
rows, columns = np.mgrid[:H, :W]
#: ``[H, W]`` and ``[H, W, 3]`` uint8, neither of which looks like a mirror image of itself
GREY = ((3 * rows + 2 * columns) % 256).astype(np.uint8)
RGB = np.stack([4 * columns, 5 * rows, (columns * rows) // 11], -1).astype(np.uint8)
#: ``[H, W]`` uint8: all clear on the left, half in the middle
ALPHA = np.where(columns < 20, 0, np.where(columns < 40, 128, 255)).astype(np.uint8)
CLEAR = columns < 20
WHITE = np.uint8(255)


def three(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, -1)


def white(rgb: np.ndarray, alpha: np.ndarray = ALPHA) -> np.ndarray:
    share = alpha[..., None] / 255
    return np.round(rgb * share + 255 * (1 - share)).astype(np.uint8)


def png(kind: int, bits: int, samples: np.ndarray, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG file of colour type ``kind``, rows of ``samples`` as they are packed; ``chunks`` stand before the pixels."""
    packed = samples.reshape(H, -1)
    if bits == 16:
        lines = [line.astype(">u2").tobytes() for line in packed]
    elif bits == 8:
        lines = [line.astype(np.uint8).tobytes() for line in packed]
    else:
        each = [((line[:, None] >> np.arange(bits)[::-1]) & 1).reshape(-1) for line in packed]
        lines = [np.packbits(line.astype(np.uint8)).tobytes() for line in each]
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines))
    head = struct.pack(">IIBBBBB", W, H, bits, kind, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _key(*colour: int) -> tuple[bytes, bytes]:
    return b"tRNS", struct.pack(f">{len(colour)}H", *colour)


def _palette() -> tuple[np.ndarray, np.ndarray]:
    """Indices ``[H, W]`` and colours ``[256, 3]``; index 0 on the left."""
    indices = np.where(CLEAR, 0, 1 + GREY % 255).astype(np.uint8)
    colours = np.stack([np.arange(256), 255 - np.arange(256), np.arange(256) // 2], -1).astype(np.uint8)
    return indices, colours


def _paletted(**info: object) -> Image.Image:
    indices, colours = _palette()
    image = Image.frombytes("P", (W, H), indices.tobytes())
    image.putpalette(colours.tobytes())
    image.info.update(info)
    return image


def _indexed(alphas: np.ndarray) -> np.ndarray:
    indices, colours = _palette()
    return white(colours[indices], alphas[indices])


def _files() -> dict[str, tuple[bytes, np.ndarray]]:
    wide = GREY.astype(np.uint16) * 257
    small = (GREY // 64).astype(np.uint8)
    nibble = (GREY // 16).astype(np.uint8)
    bit = (GREY > 127).astype(np.uint8)
    rgba, la = np.dstack([RGB, ALPHA]), np.dstack([GREY, ALPHA])
    half = np.linspace(0, 255, 256).astype(np.uint8)
    first = (np.arange(256) != 0) * WHITE
    one_key = np.where(GREY == GREY[5, 5], WHITE, GREY)
    marked = RGB.copy()
    marked[CLEAR] = (1, 2, 3)
    indices, colours = _palette()
    cmyk = Image.fromarray(RGB).convert("CMYK")
    lab = Image.fromarray(RGB).convert("RGB").convert("LAB")
    frames = [Image.fromarray(RGB), Image.fromarray(255 - RGB)]
    quantised = [frame.quantize(64) for frame in frames]
    return {
        "grey.png": (saved(Image.fromarray(GREY), "PNG"), three(GREY)),
        "grey16.png": (png(0, 16, wide), three(GREY)),
        "grey16.tif": (saved(Image.fromarray(wide), "TIFF"), three(GREY)),
        "grey16be.tif": (_big_endian(wide), three(GREY)),
        "grey16.pgm": (b"P5 %d %d 65535\n" % (W, H) + wide.astype(">u2").tobytes(), three(GREY)),
        "dark16.png": (png(0, 16, GREY.astype(np.uint16)), three(np.round(GREY / 257).astype(np.uint8))),
        "dark16.pgm": (b"P5 %d %d 65535\n" % (W, H) + GREY.astype(">u2").tobytes(), three(np.round(GREY / 257))),
        "grey16.jp2": (saved(Image.fromarray(wide), "JPEG2000"), three(GREY)),
        "int32-8.tif": (saved(Image.fromarray(GREY.astype(np.int32)), "TIFF"), three(GREY)),
        "int32-16.tif": (saved(Image.fromarray(wide.astype(np.int32)), "TIFF"), three(GREY)),
        "float-unit.tif": (saved(Image.fromarray((GREY / 255).astype(np.float32)), "TIFF"), three(GREY)),
        "float-255.tif": (saved(Image.fromarray(GREY.astype(np.float32)), "TIFF"), three(GREY)),
        "rgb16.png": (png(2, 16, RGB.astype(np.uint16) * 257), RGB),
        "rgba16.png": (png(6, 16, rgba.astype(np.uint16) * 257), white(RGB)),
        "la16.png": (png(4, 16, la.astype(np.uint16) * 257), white(three(GREY))),
        "rgba.png": (saved(Image.fromarray(rgba), "PNG"), white(RGB)),
        "la.png": (png(4, 8, la), white(three(GREY))),
        "rgba.webp": (saved(Image.fromarray(rgba), "WEBP", lossless=True, exact=True), white(RGB)),
        "rgba.tif": (saved(Image.fromarray(rgba), "TIFF"), white(RGB)),
        "rgba.tga": (saved(Image.fromarray(rgba), "TGA"), white(RGB)),
        "rgba.ico": (saved(Image.fromarray(rgba), "ICO", sizes=[(W, H)]), white(RGB)),
        "bit.png": (png(0, 1, bit), three(bit * WHITE)),
        "bit-key.png": (png(0, 1, bit, _key(0)), three(np.full_like(bit, 255))),
        "l2-key.png": (png(0, 2, small, _key(1)), three(np.where(small == 1, WHITE, small * 85))),
        "l4-key.png": (png(0, 4, nibble, _key(3)), three(np.where(nibble == 3, WHITE, nibble * 17))),
        "l-key.png": (png(0, 8, GREY, _key(int(GREY[5, 5]))), three(one_key)),
        "l16-key.png": (png(0, 16, wide, _key(int(wide[5, 5]))), three(one_key)),
        "rgb-key.png": (png(2, 8, marked, _key(1, 2, 3)), np.where(CLEAR[..., None], WHITE, RGB)),
        "rgb16-key.png": (
            png(2, 16, marked.astype(np.uint16) * 257, _key(257, 514, 771)),
            np.where(CLEAR[..., None], WHITE, RGB),
        ),
        "p.png": (saved(_paletted(), "PNG"), colours[indices]),
        "p-one.png": (
            png(3, 8, indices, (b"PLTE", colours.tobytes()), (b"tRNS", b"\0")),
            _indexed(first),
        ),
        "p-many.png": (
            png(3, 8, indices, (b"PLTE", colours.tobytes()), (b"tRNS", half.tobytes())),
            _indexed(half),
        ),
        "p.gif": (saved(_paletted(), "GIF", transparency=0), _indexed(first)),
        "cmyk.tif": (saved(cmyk, "TIFF"), RGB),
        # Adobe's files hold the inverse of CMYK, and so do those of PIL
        "cmyk.jpg": (saved(cmyk, "JPEG", quality=95, subsampling=0), RGB),
        "lab.tif": (saved(lab, "TIFF"), RGB),
        "moving.gif": (
            saved(quantised[0], "GIF", save_all=True, append_images=quantised[1:], duration=100),
            np.asarray(quantised[0].convert("RGB")),
        ),
        "moving.png": (saved(frames[0], "PNG", save_all=True, append_images=frames[1:]), RGB),
        "moving.webp": (saved(frames[0], "WEBP", lossless=True, save_all=True, append_images=frames[1:]), RGB),
        "pages.tif": (saved(frames[0], "TIFF", save_all=True, append_images=frames[1:]), RGB),
        "two.mpo": (saved(frames[0], "MPO", save_all=True, append_images=frames[1:], quality=95, subsampling=0), RGB),
        "profile.png": (saved(Image.fromarray(RGB), "PNG", icc_profile=b"not applied" * 20), RGB),
        "plain.bmp": (saved(Image.fromarray(RGB), "BMP"), RGB),
    }


def _big_endian(values: np.ndarray) -> bytes:
    """A TIFF of 16 bits, the larger byte first."""
    pixels = values.astype(">u2").tobytes()
    tags = [
        (256, 4, W), (257, 4, H), (258, 3, 16 << 16), (259, 3, 1 << 16), (262, 3, 1 << 16),
        (273, 4, 8), (277, 3, 1 << 16), (278, 4, H), (279, 4, len(pixels)),
    ]  # fmt: skip
    entries = b"".join(struct.pack(">HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"MM\0*" + struct.pack(">I", 8 + len(pixels)) + pixels + struct.pack(">H", len(tags)) + entries + bytes(4)


#: files and modes that lose some of the colours
LOSSY = {"cmyk.jpg": 3.0, "two.mpo": 3.0, "lab.tif": 3.0, "LAB": 3.0, "YCbCr": 2.0, "HSV": 3.0, "RGBa": 1.0}
#: name of a file -> its bytes, and ``[H, W, 3]`` uint8 that a model must be shown
FILES = _files()


def _in_memory() -> dict[str, tuple[Image.Image, np.ndarray]]:
    indices, colours = _palette()
    rgba, la = Image.fromarray(np.dstack([RGB, ALPHA])), Image.fromarray(GREY)
    la.putalpha(Image.fromarray(ALPHA))
    with_alpha = _paletted()
    with_alpha.putalpha(Image.fromarray(ALPHA))
    clear = Image.frombytes("P", (W, H), indices.tobytes())
    clear.putpalette(np.column_stack([colours, 255 * (np.arange(256) != 0)]).astype(np.uint8).tobytes(), "RGBA")
    wide = GREY.astype(np.uint16) * 257
    bits = Image.fromarray(GREY > 127)
    return {
        "1": (bits, three((GREY > 127) * WHITE)),
        "L": (Image.fromarray(GREY), three(GREY)),
        "LA": (la, white(three(GREY))),
        "La": (la.convert("La"), white(three(GREY))),
        "P": (_paletted(), colours[indices]),
        "P, transparent": (_paletted(transparency=0), _indexed((np.arange(256) != 0) * WHITE)),
        "P, palette with alpha": (clear, _indexed((np.arange(256) != 0) * WHITE)),
        "PA": (with_alpha, white(colours[indices])),
        "RGBA": (rgba, white(RGB)),
        "RGBa": (rgba.convert("RGBa"), white(RGB)),
        "RGBX": (Image.fromarray(RGB).convert("RGBX"), RGB),
        "CMYK": (Image.fromarray(RGB).convert("CMYK"), RGB),
        "YCbCr": (Image.fromarray(RGB).convert("YCbCr"), RGB),
        "HSV": (Image.fromarray(RGB).convert("HSV"), RGB),
        "LAB": (Image.fromarray(RGB).convert("LAB"), RGB),
        "I;16": (Image.fromarray(wide), three(GREY)),
        "I;16B": (Image.frombytes("I;16B", (W, H), wide.astype(">u2").tobytes()), three(GREY)),
        "I;16L": (Image.frombytes("I;16L", (W, H), wide.astype("<u2").tobytes()), three(GREY)),
        "I": (Image.fromarray(wide.astype(np.int32)), three(GREY)),
        "F": (Image.fromarray((GREY / 255).astype(np.float32)), three(GREY)),
    }


#: mode of PIL -> a picture, and ``[H, W, 3]`` uint8 that a model must be shown
MODES = _in_memory()


__all__ = ["ALPHA", "FILES", "GREY", "LOSSY", "MODES", "RGB", "H", "W", "chunk", "png", "saved", "three", "white"]
