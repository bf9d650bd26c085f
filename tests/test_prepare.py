"""Site ``frames``: pictures and clips are reduced before the processor, whatever form they come in."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import synthetic
import torch
import zoo
from PIL import Image
from transformers.video_utils import VideoMetadata

import mmaccel
from mmaccel import MmaccelError, prepare
from mmaccel.frames.clip import FrameEncoder
from mmaccel.method import FramesMethod
from mmaccel.recipe import Stage

HALF_FRAMES = mmaccel.get_recipe(Stage("resize", 1.0, {"frames": 0.5}))
QWEN = zoo.processor("qwen2_5_vl")
PROMPT = zoo.QWEN_IMAGE + "what?"


def tokens(out) -> int:
    return int(out["image_grid_thw"].prod(-1).sum()) // 4


@pytest.mark.square("name", ("resize", "clip-crop"))  # by choice: both that make pictures smaller
@pytest.mark.square("family", zoo.FAMILIES)
def test_every_family_takes_a_prepared_processor(family, name, monkeypatch):
    """The prepared processor makes of a picture what the bare one makes of the smaller picture."""
    monkeypatch.setattr(FrameEncoder, "load", lambda name: synthetic.StandIn())
    bare, spec, kind = zoo.processor(family), zoo._TABLE[family], mmaccel.get_method(name)
    options = synthetic.given(kind)
    picture, small = (
        zoo.image(*spec.sizes[0], 0),
        kind(**options).picture(zoo.image(*spec.sizes[0], 0), 0.25),
    )
    text = spec.image + "what?"
    by_row = spec.options is None
    given = {"text": [text], "return_tensors": "pt", **(spec.options or {})}
    out = prepare(bare, name, retain=0.25, **options)(images=[[picture]] if by_row else [picture], **given)
    expected = bare(images=[[small]] if by_row else [small], **given)
    assert set(out) == set(expected)
    for key in expected:
        assert torch.equal(torch.as_tensor(out[key]), torch.as_tensor(expected[key])), key


@pytest.mark.parametrize("family", zoo.VIDEO_FAMILIES)
def test_every_video_family_shows_one_region(family, monkeypatch):
    """All frames of a clip are cut alike, and grids are those of the region."""
    monkeypatch.setattr(FrameEncoder, "load", lambda name: synthetic.StandIn())
    bare, spec, kind = zoo.processor(family), zoo._TABLE[family], mmaccel.get_method("clip-crop")
    clip, options = zoo.clip(*spec.clip, seed=0), synthetic.given(kind)
    video = {"do_sample_frames": False, "video_metadata": [zoo._metadata(clip)]}
    given = {"text": [spec.video + "what?"], "return_tensors": "pt", "videos_kwargs": video}
    out = prepare(bare, "clip-crop", retain=0.25, **options)(videos=[[clip]], **given)
    expected = bare(videos=[[kind(**options).clip(clip, 0.25)]], **given)
    assert set(out) == set(expected)
    for key in expected:
        assert torch.equal(torch.as_tensor(out[key]), torch.as_tensor(expected[key])), key


@pytest.mark.parametrize("family", zoo.VIDEO_FAMILIES)
def test_every_video_family_shows_half_of_the_frames(family):
    bare, spec = zoo.processor(family), zoo._TABLE[family]
    clip = zoo.clip(*spec.clip, seed=0)
    stay = mmaccel.get_method("resize")(frames=0.5).choose(clip, 1.0)
    whole, kept = zoo._metadata(clip), zoo._metadata(clip)
    kept.frames_indices = stay.tolist()
    video = {"do_sample_frames": False, "video_metadata": [whole]}
    text = [spec.video + "what?"]
    out = prepare(bare, HALF_FRAMES)(text=text, videos=[[clip]], return_tensors="pt", videos_kwargs=video)
    expected = bare(
        text=text, videos=[[clip[stay]]], return_tensors="pt", videos_kwargs={**video, "video_metadata": [kept]}
    )
    for key in expected:
        assert torch.equal(torch.as_tensor(out[key]), torch.as_tensor(expected[key])), key
    assert whole.frames_indices == list(range(len(clip))), "the caller's metadata was changed"


def test_time_stamps_follow_the_frames_that_stay():
    """Qwen3-VL writes the time of every frame pair into the prompt."""
    worker = zoo.processor("qwen3_vl")
    clip = zoo.clip(8, 64, 48, 0)
    about = VideoMetadata(total_num_frames=80, fps=10.0, frames_indices=list(range(0, 80, 10)))
    video = {"do_sample_frames": False, "video_metadata": [about]}
    out = prepare(worker, HALF_FRAMES)(text="<|video_pad|>", videos=[clip], videos_kwargs=video)
    text = worker.tokenizer.decode(out["input_ids"][0])
    # frames 1, 3, 5 and 7 of 8, a second apart
    assert "<2.0 seconds>" in text
    assert "<6.0 seconds>" in text


def test_frames_are_sampled_first():
    worker = zoo.processor("qwen2_5_vl")
    clip = zoo.clip(16, 64, 48, 0)
    about = VideoMetadata(total_num_frames=16, fps=8.0, frames_indices=list(range(16)), duration=2.0)
    options = {"do_sample_frames": True, "num_frames": 8, "video_metadata": [about]}
    text = zoo.QWEN_VIDEO
    out = prepare(worker, HALF_FRAMES)(text=text, videos=[clip], videos_kwargs=options, return_metadata=True)
    assert out["video_grid_thw"][0][0] == 2
    assert out["video_metadata"][0].frames_indices == [2, 6, 10, 14]


def test_recipes_without_frames_change_nothing():
    assert prepare(QWEN, "divprune") is QWEN
    prepared = prepare(QWEN, "resize")
    assert prepare(prepared, "none") is QWEN
    assert type(prepare(prepared, "resize")).__mro__[1] is type(QWEN), "prepared twice"


def test_it_behaves_as_the_processor(tmp_path):
    prepared = prepare(QWEN, "resize", retain=0.25)
    assert isinstance(prepared, type(QWEN))
    assert type(prepared).__name__ == type(QWEN).__name__
    assert prepared.tokenizer is QWEN.tokenizer
    assert prepared.image_processor is QWEN.image_processor
    assert prepared.mmaccel_recipe.retain == 0.25
    assert prepared.batch_decode([[5, 6]]) == QWEN.batch_decode([[5, 6]])
    assert prepared.to_dict() == QWEN.to_dict()
    prepared.save_pretrained(tmp_path)
    again = pickle.loads(pickle.dumps(prepared))
    picture = zoo.image(112, 80, 0)
    assert tokens(again(text=PROMPT, images=picture, return_tensors="pt")) < 20
    assert tokens(QWEN(text=PROMPT, images=picture, return_tensors="pt")) == 35


def test_chat_templates_reduce_the_pictures_in_messages(tmp_path):
    prepared = prepare(QWEN, "resize", retain=0.25)
    picture = zoo.image(112, 80, 0)
    picture.save(tmp_path / "one.png")
    for shown in ({"image": picture}, {"path": str(tmp_path / "one.png")}):
        talk = [{"role": "user", "content": [{"type": "image", **shown}, {"type": "text", "text": "what?"}]}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        out = prepared.apply_chat_template([dict(m) for m in talk], **options)
        assert tokens(out) < tokens(QWEN.apply_chat_template([dict(m) for m in talk], **options))
    assert "what?" in prepared.apply_chat_template(talk, tokenize=False)


def test_pictures_of_any_form_are_reduced_alike(tmp_path):
    prepared = prepare(QWEN, "resize", retain=0.25)
    picture = zoo.image(112, 80, 0)
    array = np.asarray(picture)
    picture.save(tmp_path / "one.png")
    buffer = io.BytesIO()
    picture.save(buffer, "png")

    def pixels(images, text=PROMPT):
        return prepared(text=text, images=images, return_tensors="pt")["pixel_values"]

    expected = pixels(picture)
    first = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms = [
        [picture],
        [[picture]],
        array,
        [array],
        array[None],
        array.transpose(2, 0, 1),
        first,
        first[None],
        str(tmp_path / "one.png"),
        tmp_path / "one.png",
        [tmp_path / "one.png"],
    ]
    for form in forms:
        assert torch.equal(pixels(form), expected), type(form)
    # floating point pixels come back in their own range
    unit = first.float() / 255
    scaled = prepared(text=PROMPT, images=unit, do_rescale=False, return_tensors="pt")["pixel_values"]
    assert torch.allclose(scaled, expected, atol=0.03)
    two = pixels([[picture], [array]], text=[PROMPT, PROMPT])
    assert torch.equal(two, torch.cat([expected, expected]))


def test_clips_of_any_form_are_reduced_alike():
    prepared = prepare(QWEN, mmaccel.get_recipe(Stage("resize", 0.25, {"frames": 0.5})))
    clip = zoo.clip(8, 96, 64, 0)
    first = torch.from_numpy(clip).permute(0, 3, 1, 2)

    def pixels(videos):
        out = prepared(text=zoo.QWEN_VIDEO, videos=videos, return_tensors="pt")
        assert out["video_grid_thw"].tolist() == [[2, 6, 8]]
        return out["pixel_values_videos"]

    expected = pixels([clip])
    forms = [clip, [[clip]], [first], list(clip), [Image.fromarray(frame) for frame in clip]]
    for form in forms:
        assert torch.equal(pixels(form), expected), type(form)


def test_video_files_are_read(tmp_path):
    av = pytest.importorskip("av")
    assert av
    from mmaccel.suite import write_video

    clip = zoo.clip(8, 64, 48, 0)
    write_video(clip, tmp_path / "clip.mp4", 4)
    prepared = prepare(QWEN, HALF_FRAMES)
    for path in (str(tmp_path / "clip.mp4"), tmp_path / "clip.mp4"):
        assert prepared(text=zoo.QWEN_VIDEO, videos=[path], return_tensors="pt")["video_grid_thw"][0, 0] == 2
    (tmp_path / "broken.mp4").write_bytes((tmp_path / "clip.mp4").read_bytes()[:200])
    with pytest.raises(MmaccelError, match=r"broken\.mp4"):
        prepared(text=zoo.QWEN_VIDEO, videos=[tmp_path / "broken.mp4"])
    with pytest.raises(MmaccelError, match=r"gone\.mp4.*does not exist"):
        prepared(text=zoo.QWEN_VIDEO, videos=["gone.mp4"])


def test_the_frames_of_a_file_are_those_that_were_sampled(tmp_path):
    """HEVC with open groups of pictures, in which decord gives other frames; and a file with few frames."""
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx265", rate=8, options={"x265-params": "log-level=none:keyint=6"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for at in range(40):
            grey = np.full((48, 64, 3), 16 + 5 * at, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        out.mux(stream.encode())
    hooks = type(prepare(QWEN, HALF_FRAMES).video_processor)
    for wanted in ([2, 9, 17, 26, 33, 39], [5, 5, 6]):
        frames, about = hooks.fetch_videos(None, str(path), lambda metadata, wanted=wanted: wanted)
        assert np.allclose(frames.mean((1, 2, 3)), 16 + 5 * np.asarray(wanted), atol=2)
        assert (about.frames_indices, about.total_num_frames, about.fps) == (wanted, 40, 8.0)
    with pytest.warns(UserWarning, match="decord is not exact"):
        out = prepare(QWEN, HALF_FRAMES)(text=zoo.QWEN_VIDEO, videos=[path], return_tensors="pt")
    assert out["video_grid_thw"][0, 0] > 0


def test_missing_and_broken_pictures_are_named(tmp_path):
    prepared = prepare(QWEN, "resize")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (tmp_path / "cut.jpg").write_bytes(_jpeg()[:300])
    for name, words in {
        "gone.png": "does not exist",
        "broken.png": "cannot be read",
        "cut.jpg": "cannot be read",
    }.items():
        with pytest.raises(MmaccelError, match=rf"{name}.*{words}"):
            prepared(text=PROMPT, images=[str(tmp_path / name)])
    with pytest.raises(MmaccelError, match="is a folder"):
        prepared(text=PROMPT, images=tmp_path)


def _jpeg() -> bytes:
    buffer = io.BytesIO()
    zoo.image(112, 80, 0).save(buffer, "jpeg")
    return buffer.getvalue()


def test_normalised_pixels_and_counts_are_refused():
    prepared = prepare(QWEN, "resize")
    with pytest.raises(MmaccelError, match="normalised"):
        prepared(text=PROMPT, images=torch.randn(3, 64, 64))
    with pytest.raises(MmaccelError, match="ratio"):
        prepare(QWEN, "resize", retain=64)
    with pytest.raises(MmaccelError, match="processor"):
        prepare(object(), "resize")
    with pytest.raises(MmaccelError, match="did you mean 'resize'"):
        prepare(QWEN, "resise")


@dataclass(frozen=True)
class FirstFrame(FramesMethod):
    """Test: drops frames and does not say which."""

    name = "test-first-frame"

    def picture(self, image, retain):
        return image

    def clip(self, frames, retain):
        return frames[:1]


def test_a_method_must_say_which_frames_stay():
    mmaccel.register(FirstFrame)
    with pytest.raises(MmaccelError, match=r"choose\(\)"):
        prepare(QWEN, "test-first-frame")(text=zoo.QWEN_VIDEO, videos=[zoo.clip(4, 64, 48, 0)])


def test_parts_of_a_processor_can_be_prepared():
    picture = zoo.image(112, 80, 0)
    alone = prepare(QWEN.image_processor, "resize", retain=0.25)
    whole = prepare(QWEN, "resize", retain=0.25)(text=PROMPT, images=picture, return_tensors="pt")
    assert torch.equal(alone(picture, return_tensors="pt")["pixel_values"], whole["pixel_values"])
    clips = prepare(QWEN.video_processor, HALF_FRAMES)
    assert clips(zoo.clip(8, 64, 48, 0), return_tensors="pt")["video_grid_thw"][0, 0] == 2


def test_a_prepared_model_answers():
    tiny = zoo.model("qwen2_5_vl")
    prepared = prepare(QWEN, "resize", retain=0.25)
    feed = prepared(text=PROMPT, images=zoo.image(112, 80, 0), return_tensors="pt")
    # without the prepared processor the model would quietly run in full
    with pytest.raises(MmaccelError, match="prepare"), mmaccel.accelerated(tiny, "resize", retain=0.25, processor=QWEN):
        pass
    assert not mmaccel.is_accelerated(tiny)
    with mmaccel.accelerated(tiny, "resize", retain=0.25, processor=prepared) as model:
        out = model.generate(**feed, max_new_tokens=2, do_sample=False)
        assert out.shape[1] == feed["input_ids"].shape[1] + 2
        assert model.mmaccel.stats()["visual_tokens"] == tokens(feed)


def test_paths_are_not_confused_with_base64():
    import base64

    text = base64.b64encode(_jpeg()).decode()
    out = prepare(QWEN, "resize", retain=0.25)(text=PROMPT, images=text, return_tensors="pt")
    assert tokens(out) < 20
    with pytest.raises(MmaccelError, match="does not exist"):
        prepare(QWEN, "resize")(text=PROMPT, images=str(Path("a") / "b.png"))


@pytest.mark.parametrize("given", [{"do_resize": False}, {"images_kwargs": {"do_resize": False}}])
def test_pictures_that_must_keep_their_size_are_not_resized(given):
    feed = {"text": PROMPT, "images": zoo.image(112, 96, 0), "return_tensors": "pt"}
    with pytest.raises(MmaccelError, match="resize changes the size of pictures.*do_resize=False"):
        prepare(QWEN, "resize", retain=0.25)(**feed, **given)
    whole = prepare(QWEN, "uniform-frames", retain=0.5)(**feed, **given)
    assert tokens(whole) == 7 * 6
