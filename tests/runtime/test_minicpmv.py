"""MiniCPM-V: thumbnails with slices, and frames of a clip, told apart by the marks between them."""

from __future__ import annotations

import pytest
import zoo
from laws.helpers import model

from mmaccel import accelerated
from mmaccel.families import family_of
from mmaccel.families.tower import EncoderCall

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("between", ("", "and"))
def test_slices_belong_to_their_thumbnail(between: str) -> None:
    narrow, wide = (zoo.image(*size, seed) for seed, size in enumerate(zoo._family("minicpmv4_6").sizes))
    feed = zoo.processor("minicpmv4_6")(
        text=[f"<|image_pad|>{between}<|image_pad|>?", "<|image_pad|>"], images=[[wide, narrow], [wide]]
    )
    ids, valid, tiny = feed["input_ids"], feed["attention_mask"].bool(), model("minicpmv4_6")
    tokens = int((ids == tiny.config.image_token_id).sum())
    call = EncoderCall({"target_sizes": feed["target_sizes"], "downsample_mode": None}, tokens)
    layout = family_of(tiny, zoo.processor("minicpmv4_6")).layout(ids, valid, {"image": call})
    # a thumbnail and two slices, then a picture that has none
    assert [(part.row, part.picture) for part in layout.segments] == [(0, 0)] * 3 + [(0, 1)] + [(1, 2)] * 3
    grids = [part.tile.grid[1:] for part in layout.segments]
    assert grids == [(3, 6), (4, 4), (4, 4), (4, 4), (3, 6), (4, 4), (4, 4)]
    alone = family_of(tiny).layout(ids, valid, {"image": call})
    assert [part.picture for part in alone.segments] == list(range(7))


def test_frames_are_one_clip_and_slices_stay_in_their_frame() -> None:
    """Frames that are cut have a thumbnail and two slices each; a picture in the same prompt is none of them."""
    tiny, processor = model("minicpmv4_6"), zoo.processor("minicpmv4_6")
    feed = zoo.encode("minicpmv4_6", [([zoo.image(60, 48, 0)], [zoo.clip(3, 96, 64, 0)], "what?")])
    with accelerated(tiny, "uniform", retain=0.5, processor=processor):
        tiny(**feed)
        segments = tiny.mmaccel.layout.segments
    clip = [part for part in segments if part.modality == "video"]
    assert len(clip) == 9 and len({part.picture for part in clip}) == 1
    assert [sorted({*part.tile.cells[:, 0].tolist()}) for part in clip] == [[t] for t in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert [part.modality for part in segments].count("image") == 1


def test_a_call_may_leave_the_windows_of_the_tower_out() -> None:
    """About four times as many tokens, which the model's configuration or an argument asks for."""
    tiny = model("minicpmv4_6")
    picture, texts = zoo.image(60, 48, 0), ["<|image_pad|>?"]
    processor = zoo.processor("minicpmv4_6")
    few, many = (processor(text=texts, images=[[picture]], downsample_mode=mode) for mode in ("16x", "4x"))
    counts = []
    for feed, mode in ((few, "16x"), (many, "4x")):
        with accelerated(tiny, "uniform", retain=0.5, processor=processor):
            tiny(**feed, downsample_mode=mode)
            counts.append(tiny.mmaccel.stats().visual_tokens)
    # 16 x 16 patches by four, 14 x 18 by two
    assert counts == [4 * 4, 7 * 9]


def test_frames_that_are_cut_are_averaged_whole() -> None:
    """Each has a thumbnail and four slices, whose cells are those of other tiles too."""
    tiny, processor = model("minicpmv4_6"), zoo.processor("minicpmv4_6")
    feed = zoo.encode("minicpmv4_6", [([], [zoo.clip(8, 128, 128, 0)], "what?")])
    with accelerated(tiny, "moviechat", retain=0.25, processor=processor):
        tiny(**feed)
        stats, kept = tiny.mmaccel.stats(), tiny.mmaccel.reduction.kept
        frames = [
            int(part.tile.cells[0, 0]) for part in tiny.mmaccel.layout.segments if bool(kept[0, part.places].any())
        ]
    assert (stats.visual_tokens, stats.visual_tokens_kept) == (8 * 5 * 16, 2 * 5 * 16)
    # two frames stay, with all their tiles
    assert len(frames) == 10 and len(set(frames)) == 2
