"""Which files are pictures and which are clips: by their first bytes, whatever they are called."""

from __future__ import annotations

import json

import numpy as np
import pytest
import zoo
from odd import FILES, RGB, saved
from PIL import Image, features

from mmaccel import MmaccelError
from mmaccel.cli import main
from mmaccel.media import untrusted
from mmaccel.media.files import is_media, load_media, moves
from mmaccel.programs.evaluate import ask_folder
from mmaccel.video.container import SUFFIXES

pytest.importorskip("av", reason="PyAV is not installed: pip install 'mmaccel[video]'")

from films import KINDS, film

pytestmark = pytest.mark.filterwarnings("ignore:.*was read by")
#: what a file must be named to be taken by its name where its first bytes say nothing
NAMED = "mp4 m4v mov mkv webm avi 3gp 3g2 flv wmv asf mpg mpeg ts m2ts mts ogv vob f4v mxf y4m ivf MP4 Mov 3GP MTS WEBM".split()
NAMED += "mpe m1v divx rm rmvb dv wtv".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return {name: film(folder / name, 6, **options) for name, options in KINDS.items() if name != "live.mkv"}


@pytest.mark.parametrize("called", ("as it is", "clip.JPG", "clip", "clip.Mp4", "clip.gif"))
def test_clips_by_any_name(made, tmp_path, called):
    for name, path in made.items():
        copy = tmp_path / name / (name.upper() if called == "as it is" else called)
        copy.parent.mkdir()
        copy.write_bytes(path.read_bytes())
        assert moves(copy) and is_media(copy), name
        pictures, clip = load_media([copy], 2, 1.0)
        assert pictures == [] and clip is not None and clip.total == 6, name
        if called == "clip":
            assert untrusted.clip(copy, 2).total == 6, name


@pytest.mark.parametrize("called", ("", ".MP4", ".3gp", ".ts", ".PNG"))
def test_pictures_by_any_name(tmp_path, called):
    known = {name: data for name, (data, _) in FILES.items()}
    if features.check("avif"):
        known["small.avif"] = saved(Image.fromarray(RGB), "AVIF")
    for name, data in known.items():
        # what PIL knows and we do not is taken by its name
        unknown = name.endswith((".tga", ".ico", ".pgm"))
        path = tmp_path / (name if unknown else f"{name.replace('.', '-')}{called}")
        path.write_bytes(data)
        assert is_media(path), name
        if name == "moving.gif":
            assert moves(path)
            continue
        assert not moves(path), name
        pictures, clip = load_media([path], 2, 1.0)
        assert len(pictures) == 1 and clip is None, name


def test_names_count_where_the_first_bytes_say_nothing(tmp_path):
    assert {f".{suffix.lower()}" for suffix in NAMED} <= set(SUFFIXES)
    for suffix in NAMED:
        path = tmp_path / f"broken.{suffix}"
        path.write_bytes(b"\1\2\3\4" * 50)
        assert moves(path) and is_media(path)
        with pytest.raises(MmaccelError, match=f"The video .*broken.{suffix}"):
            load_media([path], 2, 1.0)
    for name in ("gone.mp4", "gone.3GP"):
        assert moves(tmp_path / name)
    assert not moves(tmp_path / "gone.png")


def test_what_is_neither_is_named(tmp_path):
    for name, data in {
        "notes.txt": b"some words",
        "data": b"\0\1\2" * 99,
        "empty": b"",
        "sound.wav": b"RIFF\0\0\0\0WAVEfmt ",
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        assert not is_media(path)
        with pytest.raises(MmaccelError, match=f"{name}' is neither a picture nor a video of a known format"):
            load_media([path], 2, 1.0)
    phone = tmp_path / "IMG_0001.HEIC"
    phone.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(400))
    with pytest.raises(MmaccelError, match=r"The picture .*HEIC' cannot be read: .*convert it to PNG or JPEG"):
        load_media([phone], 2, 1.0)
    with pytest.raises(MmaccelError, match=r"The picture .*gone.png' does not exist"):
        load_media([tmp_path / "gone.png"], 2, 1.0)


def test_a_folder_of_media_is_read_by_content(made, tmp_path):
    (tmp_path / "a.dat").write_bytes(made["phone.3gp"].read_bytes())
    (tmp_path / "b").write_bytes(FILES["grey.png"][0])
    (tmp_path / "c.3GP").write_bytes(made["phone.3gp"].read_bytes())
    (tmp_path / "notes.txt").write_text("none of them")
    found = {question.name: question.load() for question in ask_folder(tmp_path, "what?", frames=2)}
    assert list(found) == ["b", "a.dat", "c.3GP"]
    assert [prompt.clip is not None for prompt in found.values()] == [False, True, True]


def test_ask_about_a_clip_of_an_old_phone(tmp_path, capsys):
    """H.263 in 3gp, as phones of 2005 wrote it."""
    path = film(tmp_path / "old.3gp", 8, codec="h263", size=(128, 96), fps=15)
    for name in ("qwen2_5_vl",):
        zoo.model(name).save_pretrained(tmp_path / name)
        zoo.processor(name).save_pretrained(tmp_path / name)
    argv = ["ask", "--model", tmp_path / "qwen2_5_vl", "--max-new-tokens", 1, "--frames", 4, "--json", path, "what?"]
    assert main([str(word) for word in argv]) == 0
    assert json.loads(capsys.readouterr().out)["full"]["visual_tokens"] > 0


def test_what_an_animated_picture_shows(tmp_path):
    """A GIF is a clip; PNG, WebP, TIFF and MPO with several pictures are the first of them."""
    for name in ("moving.gif", "moving.png", "moving.webp", "pages.tif", "two.mpo"):
        path = tmp_path / name
        path.write_bytes(FILES[name][0])
        pictures, clip = load_media([path], 8, 1.0)
        if name == "moving.gif":
            assert clip is not None and clip.total == 2
            assert np.abs(clip.frames[0].astype(int) - FILES[name][1]).mean() < 6
        else:
            assert len(pictures) == 1


def test_clear_places_of_an_animated_gif_are_white(tmp_path):
    ink = Image.new("P", (40, 30), 0)
    ink.putpalette([0, 0, 0, 200, 0, 0] + [0] * 762)
    frames = [ink.copy() for _ in range(3)]
    for at, one in enumerate(frames):
        one.paste(1, (10 * at, 5, 10 * at + 8, 20))
    path = tmp_path / "clear.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], transparency=0, disposal=2, duration=100)
    _, clip = load_media([path], 3, 1.0)
    assert clip is not None
    for at, frame in enumerate(clip.frames):
        assert frame[25, 35].tolist() == [255, 255, 255]
        assert frame[10, 10 * at + 4].tolist() == [200, 0, 0]
