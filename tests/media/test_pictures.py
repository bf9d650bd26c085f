"""A picture is the same for a model by every door, whatever its file or its mode; what is no picture is one sentence."""

from __future__ import annotations

import base64
import struct
import time
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import odd
import pytest
import torch
import zoo
from odd import FILES, GREY, LOSSY, MODES, RGB, chunk, saved, three
from PIL import Image, ImageOps, features

from mmaccel import MmaccelError, prepare
from mmaccel.media import untrusted
from mmaccel.media.files import Prompt, encode, load_media
from mmaccel.media.picture import LIMITS, load_picture
from mmaccel.video import decode

QWEN, LLAVA = zoo.processor("qwen2_5_vl"), zoo.processor("llava")


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def near(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    off = np.abs(found.astype(int) - expected.astype(int))
    assert off.mean() <= LOSSY[name] if name in LOSSY else not off.any(), (name, off.max(), off.mean())


# ------------------------------------------------------------------------------------------------------ files and modes


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path, name):
    data, expected = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    found = load_picture(path)
    near(name, np.asarray(found), expected)
    text = base64.b64encode(data).decode()
    urlsafe = base64.urlsafe_b64encode(data).decode().rstrip("=")
    forms = [
        str(path),
        data,
        bytearray(data),
        f"data:image/x;base64,{text}",
        f"data:;base64,{urlsafe}",
        Image.open(path),
    ]
    lines = base64.encodebytes(data).decode()
    forms += [lines] * (len(lines) > 1024)
    for form in forms:
        assert np.array_equal(load_picture(form), found), type(form)


@pytest.mark.parametrize("name", MODES)
def test_modes_of_pil(name):
    image, expected = MODES[name]
    before = image.tobytes(), dict(image.info)
    near(name, np.asarray(load_picture(image)), expected)
    assert (image.tobytes(), image.info) == before, "the caller's picture was changed"


@pytest.mark.parametrize("name", FILES)
def test_every_door_shows_the_same(tmp_path, name):
    """By `ask` and `eval`, by hand, through a prepared processor, by the server and the demo, as a folder of frames."""
    from mmaccel_demo import limits

    data, _ = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    clean = Image.fromarray(np.asarray(load_picture(path)))
    expected = QWEN(text=[zoo.QWEN_IMAGE + "what?"], images=[[clean]], return_tensors="pt")["pixel_values"]

    def asked(picture: object) -> torch.Tensor:
        return encode(QWEN, [Prompt("what?", (picture,))])["pixel_values"]

    def prepared(picture: object) -> torch.Tensor:
        small = prepare(QWEN, "resize", retain=1.0)
        return small(text=zoo.QWEN_IMAGE + "what?", images=picture, return_tensors="pt")["pixel_values"]

    assert not path.suffix == ".gif" or "moving" not in name or load_media([path], 8, 1.0)[1] is not None
    if name != "moving.gif":
        assert torch.equal(asked(load_media([path], 8, 1.0)[0][0]), expected)
    for picture in (path, str(path), Image.open(path), data, f"data:image/x;base64,{base64.b64encode(data).decode()}"):
        assert torch.equal(asked(picture), expected), type(picture)
        assert torch.equal(prepared(picture), expected), type(picture)
    if Image.open(path).format in untrusted.PICTURES:
        assert torch.equal(asked(untrusted.picture(path)), expected)
        assert torch.equal(asked(limits.picture(str(path))), expected)
    if path.suffix in (".png", ".webp", ".tif"):
        (tmp_path / "frames").mkdir()
        (tmp_path / "frames" / name).write_bytes(data)
        assert np.array_equal(decode(tmp_path / "frames", 1).frames[0], np.asarray(clean))


def test_arrays_are_shown_as_pictures_are():
    """What numpy and PIL hold is one picture, of 8, 16 and 32 bits, floating point, and with an alpha channel."""
    small = prepare(QWEN, "resize", retain=1.0)

    def prepared(picture: object) -> torch.Tensor:
        return small(text=zoo.QWEN_IMAGE + "what?", images=picture, return_tensors="pt")["pixel_values"]

    rgba = np.dstack([RGB, odd.ALPHA])
    for array, expected in (
        (GREY, three(GREY)),
        (GREY[..., None], three(GREY)),
        (RGB, RGB),
        (rgba, odd.white(RGB)),
        (GREY.astype(np.uint16) * 257, three(GREY)),
        (GREY.astype(np.int32) * 257, three(GREY)),
        (RGB.astype(np.int64), RGB),
        (RGB / 255, RGB),
        (RGB.astype(np.float32), RGB),
        (GREY > 127, three((GREY > 127) * np.uint8(255))),
    ):
        assert np.array_equal(load_picture(array), expected), (array.dtype, array.shape)
        if np.issubdtype(array.dtype, np.integer):
            assert torch.equal(prepared(array), prepared(Image.fromarray(expected))), (array.dtype, array.shape)
            tensor = torch.from_numpy(array.astype(np.int64))
            assert torch.equal(prepared(tensor), prepared(Image.fromarray(expected))), (array.dtype, array.shape)


def test_clips_with_an_alpha_channel_are_on_white():
    small = prepare(QWEN, "uniform-frames", retain=0.5)
    rgba, flat = np.stack([np.dstack([RGB, odd.ALPHA])] * 4), np.stack([odd.white(RGB)] * 4)

    def shown(clip: object) -> torch.Tensor:
        return small(text=zoo.QWEN_VIDEO, videos=[clip], return_tensors="pt")["pixel_values_videos"]

    assert torch.equal(shown(rgba), shown(flat))
    pictures = [Image.fromarray(frame) for frame in rgba]
    assert torch.equal(shown(pictures), shown(flat))


# ------------------------------------------------------------------------------------------------------- orientation


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations(form, orientation):
    """A file that says how it was held, and the same picture held so by hand; never turned twice."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    held = {
        1: RGB,
        2: RGB[:, ::-1],
        3: RGB[::-1, ::-1],
        4: RGB[::-1],
        5: RGB.swapaxes(0, 1),
        6: np.rot90(RGB, 1),
        7: RGB[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(RGB, 3),
    }[orientation]
    options = (
        {"quality": 95, "subsampling": 0} if form in ("JPEG", "MPO") else {"lossless": True} if form == "WEBP" else {}
    )
    data = saved(Image.fromarray(np.ascontiguousarray(held)), form, exif=exif, **options)
    opened = Image.open(BytesIO(data))
    for source in (data, opened, load_picture(data), load_picture(load_picture(opened))):
        off = np.abs(pixels(load_picture(source)) - RGB)
        assert off.mean() < 2 if form in ("JPEG", "MPO") else not off.any()
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    assert np.array_equal(load_picture(upright), load_picture(data)), "what the caller made upright stays"


def test_an_orientation_that_cannot_be_read_is_none():
    data = saved(Image.fromarray(RGB), "PNG")
    end = data.index(b"IDAT") - 4
    for exif in (
        b"",
        b"Exif\0\0",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff" + bytes(20),
        bytes(5),
        b"\xff" * 40,
    ):
        assert np.array_equal(load_picture(data[:end] + chunk(b"eXIf", exif) + data[end:]), RGB), exif


# ---------------------------------------------------------------------------------------------------------- refusals


def sentence(source: object, match: str, **options: object) -> str:
    with pytest.raises(MmaccelError, match=match) as caught:
        load_picture(source, **options)
    said = str(caught.value)
    assert "\n" not in said and said[0].isupper() and len(said) < 400, said
    return said


def test_numbers_that_are_no_colours():
    level = GREY.astype(np.float32)
    for values, match in (
        (level - 1, "from -1 to .*from 0 to 1 or from 0 to 255"),
        (level * 257, "from 0 to .*from 0 to 1 or"),
        (level / 255 * 2 - 1, "from -1 to"),
        (np.where(GREY == 7, np.nan, level), "NaN or infinite"),
        (np.where(GREY == 7, np.inf, level), "NaN or infinite"),
        (GREY.astype(np.int32) * 65536, "from 0 to 1.*from 0 to 255 or from 0 to 65,535"),
        (GREY.astype(np.int32) - 5, "from -5 to"),
    ):
        sentence(values, match)
        kept = values.astype(np.float32) if values.dtype.kind == "f" else values
        sentence(saved(Image.fromarray(kept), "TIFF"), match)
        with pytest.raises(MmaccelError, match=match):
            prepare(QWEN, "resize")(text=zoo.QWEN_IMAGE, images=values)
    for array in (
        np.zeros((2, 3, 4, 3)),
        np.zeros((4, 4, 2)),
        np.zeros((4, 4), complex),
        np.zeros(4),
        np.zeros((4, 4), "U1"),
    ):
        sentence(array, "A picture is an array")
    sentence(np.zeros((0, 4), np.uint8), "at least one")
    for thing in (None, 3, object(), {"image": 1}):
        sentence(thing, "A picture is a path, an address")


def test_what_is_no_picture(tmp_path):
    (tmp_path / "notes.txt").write_text("no picture")
    sentence(tmp_path / "notes.txt", "notes.txt.*of no known format")
    sentence(tmp_path / "gone.png", "does not exist")
    sentence(tmp_path, "is a folder")
    sentence(b"", "of no known format")
    sentence("data:image/png;base64,****", "not valid base64")
    sentence("data:image/png;base64,", "of no known format")
    sentence("data:", "of no known format")
    sentence("https://127.0.0.1:9/a.png", "cannot be loaded")
    sentence("http://[", "cannot be loaded")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    sentence(base64.b64encode(saved(noise, "PNG")[:1200]).decode(), "cannot be read")


def blank(width: int, height: int) -> bytes:
    """A small PNG file of many grey pixels."""
    packer, row = zlib.compressobj(9), bytes(width + 1)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def header(width: int, height: int) -> bytes:
    """The beginning of such a file, without the pixels."""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", b"")
    )


@pytest.mark.parametrize(
    ("width", "height", "trusted", "strange"),
    [
        (1, 30_000_000, "a side has at most 65,536", "a side has at most 20,000"),
        (30_000_000, 1, "a side has at most 65,536", "a side has at most 20,000"),
        (65_537, 100, "a side has at most 65,536", "a side has at most 20,000"),
        (20_001, 1_000, "cannot be read", "a side has at most 20,000"),
        (20_000, 8_000, "160 megapixels; at most 150", "160 megapixels; at most 40"),
        (10_000, 10_000, "cannot be read", "100 megapixels; at most 40"),
        (60_000, 60_000, "far too many pixels; at most 150", "far too many pixels; at most 40"),
        (2**31 - 1, 2**31 - 1, "far too many pixels|megapixels", "far too many pixels|megapixels"),
        (1, 1_001, "at most 1,000 times", "at most 200 times"),
        (201, 1, "cannot be read", "at most 200 times"),
        (0, 5, "at least one|cannot be read", "at least one|cannot be read"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_sizes_are_checked_before_anything_is_decoded(tmp_path, width, height, trusted, strange):
    path = tmp_path / "large.png"
    path.write_bytes(header(width, height))
    sentence(path, trusted)
    with pytest.raises(MmaccelError, match=strange):
        untrusted.picture(path)


def test_a_small_file_of_many_pixels_costs_nothing(tmp_path):
    path = tmp_path / "thin.png"
    path.write_bytes(blank(1, 3_000_000))
    begun = time.monotonic()
    for read in (load_picture, untrusted.picture):
        with pytest.raises(MmaccelError, match="1 x 3,000,000 pixels; a side has at most"):
            read(path)
    inside = tmp_path / "thin.ico"
    inside.write_bytes(
        struct.pack("<HHHBBBBHHII", 0, 1, 1, 1, 1, 0, 0, 1, 8, path.stat().st_size, 22) + path.read_bytes()
    )
    sentence(inside, "a side has at most|at most 1,000 times|cannot be read")
    assert time.monotonic() - begun < 5


def test_the_thinnest_pictures_do_not_fill_the_memory():
    """Processors enlarge a picture until its shorter side fits."""
    thin = blank(LIMITS.ratio, 1)
    assert load_picture(thin).size == (LIMITS.ratio, 1)
    assert encode(LLAVA, [Prompt("what?", (thin,))])["pixel_values"].shape[0] == 1


def test_a_size_that_a_processor_refuses_is_its_sentence(tmp_path, capsys):
    path = tmp_path / "thin.png"
    path.write_bytes(blank(1, 224))
    with pytest.raises(MmaccelError, match=r"does not take what is shown \(1 x 224 pixels\): .*aspect ratio.*200"):
        encode(QWEN, [Prompt("what?", (load_picture(path),))])
    assert encode(LLAVA, [Prompt("what?", (path,))])["pixel_values"].shape[0] == 1


# -------------------------------------------------------------------------------------------------------------- fuzz


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """The file with a few bytes replaced, cut short, or with a piece twice."""
    kind = rng.integers(0, 4)
    if kind == 0:
        return data[: rng.integers(0, len(data))]
    found = bytearray(data)
    if kind == 3:
        start, stop = sorted(rng.integers(0, len(data), 2))
        return bytes(found[:stop] + found[start:])
    # headers say more than pixels do
    last = len(data) if kind == 1 else min(len(data), 200)
    for place in rng.integers(0, last, rng.integers(1, 6)):
        found[place] = rng.choice([0, 255, found[place] ^ (1 << rng.integers(0, 8)), rng.integers(0, 256)])
    return bytes(found)


def small_files() -> dict[str, bytes]:
    image = Image.fromarray(RGB[:20, :24])
    exif = Image.Exif()
    exif[0x0112] = 6
    forms = (
        "PNG",
        "JPEG",
        "GIF",
        "WEBP",
        "TIFF",
        "BMP",
        "ICO",
        "PPM",
        "TGA",
        "JPEG2000",
        "PCX",
        "DDS",
        "SGI",
        "ICNS",
        *(["AVIF"] if features.check("avif") else []),
    )
    found = {
        form: saved(image, form, **({"exif": exif} if form in ("PNG", "JPEG", "WEBP", "TIFF") else {}))
        for form in forms
    }
    found["GIF"] = saved(image.quantize(16), "GIF", save_all=True, append_images=[image.rotate(180).quantize(16)])
    found["APNG"] = saved(image, "PNG", save_all=True, append_images=[image.rotate(180)])
    found["P"] = saved(image.quantize(16), "PNG", transparency=3)
    found["packed"] = saved(image, "TIFF", compression="tiff_lzw")
    return found


def fuzz(rounds: int, seed: int, tmp_path: Path) -> int:
    """How many of the damaged pictures were refused; whatever is raised but a sentence fails."""
    rng, refused, path = np.random.default_rng(seed), 0, tmp_path / "any"
    for data in small_files().values():
        for _ in range(rounds):
            path.write_bytes(damaged(data, rng))
            for read in (load_picture, untrusted.picture):
                try:
                    found = read(path)
                except MmaccelError as error:
                    refused += 1
                    said = str(error)
                    assert "\n" not in said and said[0].isupper(), said
                    assert read is load_picture or str(path) not in said
                else:
                    assert found.mode == "RGB" and not found.info
    return refused


@pytest.mark.filterwarnings("ignore")
def test_damaged_pictures_are_refused_in_a_sentence(tmp_path):
    assert fuzz(50, 0, tmp_path) > 500


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_more_damaged_pictures(tmp_path, seed):
    assert fuzz(400, seed, tmp_path) > 5000


@pytest.mark.parametrize(
    "chunks",
    [
        [(b"zTXt", b"a\0\0" + zlib.compress(bytes(80 << 20)))],
        [(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(80 << 20)))],
        [(b"iCCP", b"a\0\0" + zlib.compress(bytes(80 << 20)))],
        [(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20)))] * 70,
        [(b"iCCP", b"a\0\7xx")],
        [(b"acTL", b"\0")],
        [(b"acTL", struct.pack(">II", 2, 0)), (b"fcTL", b"\0\0")],
        [(b"acTL", struct.pack(">II", 2, 0)), (b"fcTL", struct.pack(">IIIIIHHBB", 7, 9999, 9999, 5, 5, 1, 1, 0, 0))],
        [(b"tRNS", b"\0")],
        [(b"pHYs", b"\0")],
        [(b"cHRM", b"\0")],
        [(b"gAMA", b"")],
        [(b"sRGB", b"")],
        [(b"eXIf", b"\0")],
    ],
    ids=lambda chunks: chunks[0][0].decode() + str(len(chunks)),
)
def test_chunks_that_pil_answers_with_errors_of_all_kinds(tmp_path, chunks):
    """Shown, or refused in a sentence, by both doors."""
    path = tmp_path / "any.png"
    path.write_bytes(odd.png(2, 8, RGB, *chunks))
    for read in (load_picture, untrusted.picture):
        try:
            assert read(path).size == (odd.W, odd.H)
        except MmaccelError as error:
            assert "cannot be read" in str(error) and "\n" not in str(error)


def test_whatever_a_picture_library_raises(tmp_path, monkeypatch):
    path = tmp_path / "any.png"
    path.write_bytes(saved(Image.fromarray(RGB), "PNG"))
    for error in (
        MemoryError(),
        RecursionError("deep"),
        SyntaxError("x"),
        struct.error("y"),
        OverflowError(),
        zlib.error(),
        EOFError(),
    ):

        def raising(self: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", raising)
        sentence(path, "cannot be read: .")
        with pytest.raises(MmaccelError, match="cannot be read: ."):
            untrusted.picture(path)
