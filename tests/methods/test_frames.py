"""Methods that choose frames: what they pick, and that time stamps follow."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import synthetic
import zoo

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, prepare
from mmaccel.frames.clip import FrameEncoder
from mmaccel.frames.clip_crop import ClipCrop, windows
from mmaccel.frames.distinct import DistinctFrames
from mmaccel.frames.query import QueryFrames
from mmaccel.frames.resize import shrunk
from mmaccel.frames.scenes import SceneFrames, between, over_scenes
from mmaccel.frames.scenetilling import SceneTilling, boundaries, depths
from mmaccel.frames.uniform import UniformFrames, middles
from mmaccel.method import FrameChoice
from mmaccel.suite import Rng
from mmaccel.suite.scene import Ground, Scene, Thing, render, repaint, sample_ground

CLIP = Path(mmaccel.__file__).parent / "models" / "mini-clip"
#: those that look at the frames alone
OWN = [
    kind()
    for kind in synthetic.offered(FrameChoice).values()
    if "clip_model" not in {option.name for option in fields(kind)}
]
needs_clip = pytest.mark.skipif(not CLIP.is_dir(), reason="mini-clip does not come with this mmaccel")


def shots(*lengths: int, noise: float = 2.0) -> np.ndarray:
    """``[T, 48, 64, 3]``: shots of one colour each, with the noise of a camera."""
    rng = np.random.default_rng(0)
    colours = [(200, 40, 40), (40, 60, 200), (40, 180, 60), (220, 200, 40), (20, 20, 20), (230, 230, 230)]
    frames = np.concatenate([np.full((n, 48, 64, 3), c, float) for n, c in zip(lengths, colours, strict=False)])
    return (frames + rng.normal(0, noise, frames.shape)).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.name)
@pytest.mark.parametrize("total", (0, 1, 2, 7, 40))
@pytest.mark.parametrize("retain", (0.01, 0.25, 0.5, 1.0))
def test_budgets_hold_on_clips_of_any_length(method, total, retain):
    frames = np.random.default_rng(total).integers(0, 256, (total, 48, 64, 3), dtype=np.uint8)
    stay = method.choose(frames, retain)
    wanted = max(1, int(total * retain + 0.5)) if total else 0
    # frames of noise all differ
    assert len(stay) == wanted
    assert (np.diff(stay) > 0).all() and (stay >= 0).all() and (stay < max(1, total)).all()
    assert np.array_equal(method.clip(frames, retain), frames[stay])
    assert np.array_equal(method.choose(frames, retain), stay)
    picture = zoo.image(64, 48, 0)
    assert method.picture(picture, retain) is picture


def test_uniform_frames_are_the_middles_of_their_stretches():
    assert UniformFrames().choose(shots(16), 0.25).tolist() == [2, 6, 10, 14]
    assert middles(10, 3).tolist() == [1, 5, 8]


def test_every_scene_is_shown():
    frames = shots(20, 2, 14, 4)
    assert SceneFrames().choose(frames, 0.1).tolist() == [10, 21, 29, 38]
    # with room for more, long scenes show more, and never one frame twice
    more = SceneFrames().choose(frames, 0.25).tolist()
    assert more == [2, 6, 10, 14, 18, 21, 24, 29, 33, 38]
    assert UniformFrames().choose(frames, 0.1).tolist() == [5, 15, 25, 35], "which misses the second scene"


def test_a_clip_without_scenes_is_spaced_evenly():
    still = shots(24)
    assert SceneFrames().choose(still, 0.25).tolist() == UniformFrames().choose(still, 0.25).tolist()


def test_the_strongest_cuts_count_when_there_are_too_many():
    frames = np.full((9, 32, 32, 3), 100, np.uint8)
    frames[3:] = 190
    frames[6:] = 20
    frames[6:, ..., 0] = 255
    assert SceneFrames().choose(frames, 2 / 9).tolist() == [3, 7]
    assert SceneFrames(threshold=200.0).choose(frames, 2 / 9).tolist() == middles(9, 2).tolist()


def test_hues_go_round():
    """Reds on both sides of hue zero are alike."""
    frames = np.full((8, 32, 32, 3), (200, 0, 8), np.uint8)
    frames[4:] = (200, 8, 0)
    assert SceneFrames(threshold=5.0).choose(frames, 0.25).tolist() == middles(8, 2).tolist()
    frames[2:] = (0, 200, 200)
    assert SceneFrames(threshold=5.0).choose(frames, 0.25).tolist() == [1, 5]


def test_frames_over_scenes():
    assert over_scenes([(0, 3), (4, 4), (5, 9)], 3).tolist() == [2, 4, 7]
    assert over_scenes([(0, 3), (4, 4), (5, 9)], 5).tolist() == [1, 3, 4, 6, 8]
    assert over_scenes([(0, 1), (2, 2)], 3).tolist() == [0, 1, 2]
    assert between(np.asarray([5, 2]), 10) == [(0, 2), (3, 5), (6, 9)]
    assert between(np.asarray([], int), 3) == [(0, 2)]


def test_what_does_not_change_is_shown_once():
    frames = shots(10, 5, 10)
    assert DistinctFrames().choose(frames, 1.0).tolist() == [0, 10, 15]
    assert DistinctFrames().choose(frames, 0.08).tolist() == [0, 15]
    assert DistinctFrames(threshold=255.0).choose(frames, 1.0).tolist() == [0]
    # what changes slowly differs in the end from what was shown, not from the frame before
    slow = np.stack([np.full((32, 32, 3), 100 + at, np.uint8) for at in range(10)])
    assert DistinctFrames(threshold=3.0).choose(slow, 1.0).tolist() == [0, 4, 8]


def test_valleys():
    similarity = np.asarray([0.9, 0.8, 0.2, 0.7, 0.9, 0.85])
    # climbing stops at 0.9 on both sides
    assert depths(similarity) == pytest.approx([0.0, 0.2 - 0.1 + 0.0, 1.4, 0.2, 0.0, 0.05])
    assert boundaries(depths(similarity)).tolist() == [2]
    assert boundaries(depths(similarity), alpha=-1.0, most=2).tolist() == [2, 3]
    assert boundaries(np.asarray([1.0, 5.0, 5.0, 1.0, 1.0]), most=1).tolist() == [1]
    assert boundaries(np.zeros(6)).tolist() == []
    assert boundaries(np.asarray([0.3])).tolist() == []


def _drawn(*names: tuple[str, str]) -> np.ndarray:
    """A frame for each colour and shape, all on one ground."""
    ground: Ground = sample_ground(Rng(3))
    rng = Rng(1)
    box = (0.3, 0.3, 0.7, 0.7)
    scenes = [Scene((repaint(Thing(shape, colour, box), colour, rng),), None, ground) for colour, shape in names]
    return np.stack([render(scene, 112) for scene in scenes])


@needs_clip
def test_the_question_chooses_the_frames():
    pytest.importorskip("open_clip")
    frames = _drawn(*[("blue", "star")] * 4, *[("red", "circle")] * 2, *[("green", "square")] * 4)
    for query, expected in {"a red circle": [4, 5], "red circle": [4, 5]}.items():
        assert QueryFrames(query, str(CLIP)).choose(frames, 0.2).tolist() == expected
    assert set(QueryFrames("a blue star", str(CLIP)).choose(frames, 0.4).tolist()) == {0, 1, 2, 3}


@needs_clip
def test_scenes_as_an_encoder_sees_them():
    pytest.importorskip("open_clip")
    frames = _drawn(*[("blue", "star")] * 7, *[("red", "circle")] * 2, *[("green", "square")] * 7)
    method = SceneTilling(str(CLIP))
    assert method.choose(frames, 3 / 16).tolist() == [3, 8, 12]
    assert len(method.choose(frames, 0.5)) == 8


def test_windows_all_over_a_picture():
    """By hand: three places a side at a quarter of the area; of a strip as long as two windows, three."""
    assert windows((50, 20), (100, 40)) == [(x, y, x + 50, y + 20) for y in (0, 10, 20) for x in (0, 25, 50)]
    assert windows((40, 16), (80, 16)) == [(0, 0, 40, 16), (20, 0, 60, 16), (40, 0, 80, 16)]
    assert windows((8, 8), (8, 8)) == [(0, 0, 8, 8)]
    for retain in (0.01, 0.1, 0.3, 0.7):
        found = windows(shrunk((640, 480), retain), (640, 480))
        assert all(0 <= a < c <= 640 and 0 <= b < d <= 480 for a, b, c, d in found)
        assert max(c for _, _, c, _ in found) == 640 and max(d for *_, d in found) == 480
        lefts = sorted({a for a, *_ in found})
        assert max(np.diff(lefts)) <= (found[0][2] - found[0][0]) / 2 + 1


def test_regions_as_the_paper_cuts_them(monkeypatch):
    """A stand-in that likes red, on a picture that grows redder to the right and more so downwards: the cuts by hand."""
    monkeypatch.setattr(FrameEncoder, "load", lambda name: synthetic.StandIn())
    rows, columns = np.mgrid[0:100, 0:100]
    frame = np.stack([rows + columns * 9 // 20, np.full_like(rows, 90), np.full_like(rows, 90)], -1).astype(np.uint8)
    method = ClipCrop("red", "stand-in", cut=0.1)
    # a cut above of t rows makes the mean redder by t / 2, one of as many columns by .225: 10, 9, 8, 7, 7, 6 rows and 3
    assert method.region(frame[None], 0.81) == (0, 19, 100, 100)
    assert method.region(frame[None], 0.5) == (0, 50, 100, 100)
    # 5 and 5 rows more, and 10 columns are more than the 4 rows that would come
    assert method.region(frame[None], 0.387) == (10, 57, 100, 100)
    left, top, right, bottom = method.region(frame[None], 0.1)
    assert (right, bottom) == (100, 100) and (right - left) * (bottom - top) / 10000 == pytest.approx(0.1, rel=0.05)
    assert ClipCrop("red", "stand-in").region(frame[None], 0.25) == (50, 50, 100, 100)
    # no side is cut below the shortest
    assert method.region(frame[None, :17], 1e-6) == (84, 0, 100, 17)


def test_a_region_of_a_picture_and_of_a_clip(monkeypatch):
    monkeypatch.setattr(FrameEncoder, "load", lambda name: synthetic.StandIn())
    picture, method = zoo.image(64, 48, 0), ClipCrop("red", "stand-in")
    assert method.picture(picture, 1.0) is picture
    box = method.region(np.asarray(picture)[None], 0.25)
    assert np.array_equal(np.asarray(method.picture(picture, 0.25)), np.asarray(picture.crop(box)))
    assert method.picture(picture.convert("P"), 0.25).mode == "P" and method.picture(picture, 0.25).size == (32, 24)
    clip = zoo.clip(7, 64, 48, 1)
    left, top, right, bottom = method.region(clip[[0, 2, 4, 6]], 0.25)
    assert np.array_equal(method.clip(clip, 0.25), clip[:, top:bottom, left:right])
    assert method.choose(clip, 0.25).tolist() == list(range(7))
    with pytest.raises(MmaccelError, match="`cut` of clip-crop must be at least 0 and at most 0.5, got 0.7"):
        ClipCrop(cut=0.7)


@needs_clip
def test_the_question_chooses_the_region():
    pytest.importorskip("open_clip")
    rng, at = Rng(1), {"red circle": (0.1, 0.1), "blue star": (0.6, 0.1), "green square": (0.1, 0.6)}
    boxes = {name: (x, y, x + 0.3, y + 0.3) for name, (x, y) in at.items()}
    things = [
        repaint(Thing(name.split()[1], name.split()[0], box), name.split()[0], rng) for name, box in boxes.items()
    ]
    frame = render(Scene(tuple(things), None, sample_ground(Rng(3))), 112)
    for name, (x, y, right, bottom) in boxes.items():
        box = ClipCrop(f"a {name}", str(CLIP)).region(frame[None], 0.25)
        assert box[0] <= 112 * x and box[1] <= 112 * y and box[2] >= 112 * right and box[3] >= 112 * bottom, name


@pytest.mark.parametrize("method", (ClipCrop(), ClipCrop("what?"), ClipCrop(" ", str(CLIP))))
def test_what_a_region_needs_is_said(method):
    with pytest.raises(UnsupportedError, match="needs a question and a CLIP model"):
        method.picture(zoo.image(64, 48, 0), 0.5)


@pytest.mark.parametrize("method", (QueryFrames(), QueryFrames("what?"), QueryFrames("", str(CLIP)), SceneTilling()))
def test_what_is_missing_is_said(method):
    with pytest.raises(UnsupportedError, match="clip_model='FOLDER'"):
        method.choose(shots(8), 0.5)


def test_models_that_cannot_be_had_are_named(tmp_path):
    pytest.importorskip("open_clip")
    for name, words in {
        "ViT-B-32": "no folder",
        str(tmp_path): "no folder",
        "NoSuch-32:openai": "cannot be loaded",
    }.items():
        with pytest.raises(MmaccelError, match=words):
            QueryFrames("what?", name).choose(shots(8), 0.5)
    for cls, threshold in ((SceneFrames, 0.0), (SceneFrames, 300.0), (DistinctFrames, -1.0)):
        with pytest.raises(MmaccelError, match="threshold"):
            cls(threshold=threshold)


def test_frames_are_chosen_once():
    """Choosing may cost a run of CLIP over all frames."""
    calls = []

    class Counted(UniformFrames):
        name = "test-counted"

        def pick(self, frames, count):
            calls.append(count)
            return super().pick(frames, count)

    mmaccel.register(Counted)
    prepared = prepare(zoo.processor("qwen2_5_vl"), "test-counted", retain=0.5)
    out = prepared(text=zoo.QWEN_VIDEO, videos=[zoo.clip(8, 64, 48, 0)], return_tensors="pt")
    assert out["video_grid_thw"][0, 0] == 2 and calls == [4]
    assert isinstance(Counted(), FrameChoice)


def test_time_stamps_follow_the_scenes():
    """Qwen3-VL writes the time of every frame pair into the prompt."""
    from transformers.video_utils import VideoMetadata

    worker, clip = zoo.processor("qwen3_vl"), shots(10, 2, 2, 2)
    about = VideoMetadata(total_num_frames=160, fps=10.0, frames_indices=list(range(0, 160, 10)))
    video = {"do_sample_frames": False, "video_metadata": [about]}
    out = prepare(worker, "scene-frames", retain=0.25)(text="<|video_pad|>", videos=[clip], videos_kwargs=video)
    assert SceneFrames().choose(clip, 0.25).tolist() == [5, 11, 13, 15]
    text = worker.tokenizer.decode(out["input_ids"][0])
    # frames 5 and 11, 13 and 15, a second apart
    assert "<8.0 seconds>" in text and "<14.0 seconds>" in text
