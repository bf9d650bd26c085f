"""What fails silently between a prompt and its layout: masks, positions, grids, sliding windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import zoo
from laws.helpers import (
    FAMILIES,
    SHORT,
    THREE_AXES,
    cache,
    close,
    follow,
    generate,
    hide,
    inputs,
    logits,
    model,
    recipe_of,
    stored,
)
from laws.oracle import WINDOWED
from tail import in_turn
from torch import Tensor
from traps import families, old_beams

from mmaccel import Stage, UnsupportedError, accelerated
from mmaccel.families import families as adapters
from mmaccel.kv.index import KeyIndex

pytestmark = pytest.mark.usefixtures("no_gradients")
#: by choice: families of which transformers, to 5.23, mixes up several pictures of a row when it copies the row for beams
MIXED = ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "granite4_vision")
#: families whose towers methods can look into
OPEN = tuple(name for name in FAMILIES if adapters()[name].closed is None)


# --- masks and positions ----------------------------------------------------------------------------------------------
@pytest.mark.square(("method", "family"), in_turn(["test-fixed", "test-fixed-layer"], FAMILIES, of=SHORT), of="kinds")
def test_packed_sequences_are_not_seen_in_gaps(family: str, method: str) -> None:
    """Gathered positions without a mask and a cache look like packed sequences, and would be masked apart."""
    tiny, feed = model(family), inputs(family)
    bare = {key: value for key, value in feed.items() if key != "attention_mask"}
    ways = feed, bare, {**feed, "attention_mask": None}
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        seen = [
            tiny(**given, use_cache=use).logits[:, -1]
            # without a mask the bare thinker of Qwen-Omni gives pictures the positions of words
            for given in ways[: 1 if "_omni" in family else None]
            for use in (True, False)
        ]
        positions = tiny.mmaccel.reduction.kept[0].nonzero()[:, 0].diff()
    assert int(positions.max()) > 1  # there are gaps
    for other in seen[1:]:
        close(other, seen[0])


def test_a_block_behind_a_cache_gets_a_mask() -> None:
    """With ``1 < q < kv`` and no mask, transformers' sdpa cuts keys and values to the first ``q``."""
    index = KeyIndex(torch.tensor([[0, 2, 5]]), False, 6)
    index.extend(torch.tensor([[6, 7]]), False, 8)
    mask = index.mask(torch.tensor([[6, 7]], dtype=torch.int32), None)
    assert mask is not None
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert KeyIndex(torch.tensor([[0, 2, 5]]), False, 6).mask(torch.tensor([[0, 2, 5]]), None) is None
    assert index.mask(torch.tensor([[8]]), None) is None


@pytest.mark.square(
    ("method", "family"),
    in_turn(["test-fixed", "test-fixed-layer", "test-fixed-cache"], FAMILIES, of=SHORT),
    of="kinds",
)
def test_padding_is_never_seen(family: str, method: str) -> None:
    """With an offset between logical and stored length, masks are read from the right: pads inside would show."""
    tiny, feed = model(family), inputs(family, "uneven")
    pads = feed["attention_mask"] == 0
    assert bool(pads.any())
    other = {**feed, "input_ids": feed["input_ids"].masked_fill(pads, int(feed["input_ids"][0, -1]))}
    words = inputs(family, "text", batch=2)
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        results = []
        for given in (feed, other):
            first = generate(tiny, given)
            second = generate(tiny, follow(given, first, words)[0], past_key_values=first.past_key_values)
            results.append(torch.cat([logits(first), logits(second)], dim=1))
            held = stored(first.past_key_values, given["input_ids"].shape[1])
            assert not any(bool((there & pads[:, None]).any()) for there in held) or method != "test-fixed-cache"
    # experts round by how many tokens are sent to them, the padding's too
    torch.testing.assert_close(*results, atol=2e-6, rtol=0, equal_nan=True)


@families
def test_layers_of_different_length_in_a_second_turn(family: str) -> None:
    """One mask for all layers is wrong when they store different numbers of keys."""
    tiny, feed = model(family), inputs(family)
    words = inputs(family, "text")["input_ids"]
    recipe = [Stage("test-fixed", 0.8), *recipe_of("test-fixed-layer", family).stages, Stage("test-fixed-cache", 0.2)]
    with accelerated(tiny, recipe, processor=zoo.processor(family)):
        mine, other = cache(), cache()
        for one in (mine, other):
            tiny(**feed, past_key_values=one, use_cache=True)
        block = tiny(input_ids=words, past_key_values=mine, use_cache=True).logits
        steps = [tiny(input_ids=one, past_key_values=other, use_cache=True).logits for one in words.split(1, 1)]
    close(block, torch.cat(steps, dim=1))


@pytest.mark.square(("method", "family"), in_turn(["random", "fastv", "snapkv"], FAMILIES, of=SHORT), of="kinds")
def test_text_only_rows_run_bare(family: str, method: str) -> None:
    """Left-padded text through the registered functions is the unaccelerated model to the bit: the mask is made too."""
    tiny = model(family)
    feed = dict(zoo.encode(family, [([], [], "why?"), ([], [], "what is there to see in it, and where?")]))
    assert bool((feed["attention_mask"] == 0).any())
    bare = generate(tiny, feed)
    with accelerated(tiny, recipe_of(method, family)):
        reduced = generate(tiny, feed)
        assert tiny.mmaccel.stats()["visual_tokens"] == 0 and tiny.mmaccel.stats()["stages"] == []
    assert torch.equal(logits(bare), logits(reduced))
    assert type(reduced.past_key_values.layers[0]) is type(bare.past_key_values.layers[0])


@families
def test_an_all_ones_mask_is_no_mask(family: str) -> None:
    """5.23 drops it before the model sees it, 5.17 hands it on."""
    tiny, feed = model(family), inputs(family)
    bare = {key: value for key, value in feed.items() if key != "attention_mask"}
    with accelerated(tiny, recipe_of("fastv", family)):
        close(logits(generate(tiny, feed)), logits(generate(tiny, bare)), 1e-6)


@families
def test_positions_in_all_their_forms(family: str) -> None:
    """None, ``[B, S]``, ``[1, S]``; for Qwen ``[3, B, S]`` and ``[4, B, S]``."""
    tiny, feed = model(family), inputs(family, batch=2)
    rows, length = feed["input_ids"].shape
    plain = torch.arange(length)
    if family in THREE_AXES:
        names = (*adapters()[family].sized_by, "attention_mask", "mm_token_type_ids")
        three, _ = tiny.model.get_rope_index(feed["input_ids"], **{name: feed[name] for name in names if name in feed})
        # HunyuanVL takes no axis beside those of RoPE
        forms = [three, *([torch.cat([plain.expand(1, rows, -1), three])] if len(three) == 3 else [])]
    else:
        forms = [plain[None], plain.expand(rows, -1)]
    for method in ("test-fixed", "test-fixed-layer"):
        with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
            expected = tiny(**feed).logits[:, -1]
            for form in forms:
                close(tiny(**feed, position_ids=form).logits[:, -1], expected)


@families
def test_positional_arguments(family: str) -> None:
    """``input_ids`` comes by position in some families' own code, and may come so from a caller."""
    tiny, feed = model(family), inputs(family)
    ids = feed.pop("input_ids")
    with accelerated(tiny, recipe_of("random")):
        expected = tiny(input_ids=ids, **feed).logits
        assert torch.equal(tiny(ids, **feed).logits.nan_to_num(), expected.nan_to_num())
        hidden = tiny.model(ids, **feed).last_hidden_state
        assert tiny.mmaccel.stats()["visual_tokens_kept"] < tiny.mmaccel.stats()["visual_tokens"]
        close(tiny.mmaccel.family.logits(hidden[:, -1]), expected[:, -1])
        close(generate(tiny, {"inputs": ids, **feed}).logits[0], expected[:, -1])
        close(
            tiny.generate(ids, **feed, max_new_tokens=1, output_logits=True, return_dict_in_generate=True).logits[0],
            expected[:, -1],
        )


# --- layouts ----------------------------------------------------------------------------------------------------------
@families
def test_grids_and_sizes_reach_the_layout(family: str) -> None:
    """``generate`` of 5.23 takes grids and sizes out before any hook sees them; the layout is the same as in a forward."""
    tiny, processor = model(family), zoo.processor(family)
    for kind in set(zoo.kinds(family)) - {"text"}:
        feed, layouts = inputs(family, kind), []
        with accelerated(tiny, recipe_of("random"), processor=processor):
            generate(tiny, feed, new=1)
            layouts.append(tiny.mmaccel.layout)
            tiny(**feed)
            layouts.append(tiny.mmaccel.layout)
        one, other = layouts
        assert len(one.segments) == len(other.segments) > 0
        for a, b in zip(one.segments, other.segments, strict=True):
            assert (a.row, a.modality, a.picture, a.tile.grid) == (b.row, b.modality, b.picture, b.tile.grid)
            assert torch.equal(a.places, b.places) and torch.equal(a.tile.cells, b.tile.cells)
            assert torch.equal(a.tile.source, b.tile.source)
        assert torch.equal(one.visual, zoo.visual_mask(family, tiny, feed["input_ids"]))


@pytest.mark.parametrize("family", zoo.VIDEO_FAMILIES)
def test_two_clips_are_two_pictures(family: str) -> None:
    """Also where the prompt spreads a clip over many runs of placeholders: each clip has its own budget and frames."""
    tiny, frames = model(family), zoo._TABLE[family].clip
    clips = [zoo.clip(*frames, 1), zoo.clip(*frames, 2)]
    if family == "molmo2":
        # its processor takes one clip a prompt
        rows: Any = [([], [clip], "what?") for clip in clips]
    else:
        rows = [([], clips, "what?")]
    feed = dict(zoo.encode(family, rows))
    with accelerated(tiny, recipe_of("random"), processor=zoo.processor(family)):
        generate(tiny, feed, new=1)
        segments = tiny.mmaccel.layout.segments
    if family == "minicpmv4_7":
        # nothing in its prompts says where a clip ends, and for the model one behind the other is one
        assert {segment.picture for segment in segments} == {0}
        return
    assert {segment.picture for segment in segments} == {0, 1}
    times = [
        [int(t) for segment in segments if segment.picture == number for t in segment.tile.cells[:, 0] if t >= 0]
        for number in (0, 1)
    ]
    assert times[0] == times[1] == sorted(times[0]) and times[0][0] == 0 and len(set(times[0])) > 1


def test_adjacent_pictures_are_not_one_run() -> None:
    """Two pictures without text between them make one run of placeholders, and are still two."""
    tiny, feed = model("llava"), inputs("llava", "images")
    ids = feed["input_ids"]
    image = zoo.visual_mask("llava", tiny, ids)
    first, last = int(image[0].nonzero()[0]), int(image[0].nonzero()[-1])
    text = [i for i in range(ids.shape[1]) if image[0, i] or not first < i < last]
    feed.update(input_ids=ids[:, text], attention_mask=feed["attention_mask"][:, text])
    with accelerated(tiny, recipe_of("random")):
        generate(tiny, feed, new=1)
        assert [len(segment.places) for segment in tiny.mmaccel.layout.segments] == [36, 36]


@old_beams
@pytest.mark.square(("method", "family"), in_turn(["attention-received", "divprune"], OPEN, of=SHORT), of="kinds")
def test_taps_are_repeated_for_beams(family: str, method: str) -> None:
    """The tower runs before beams are made; what it said belongs to all copies of a row."""
    tiny, feed = model(family), inputs(family, "image" if family in MIXED else "uneven")
    with accelerated(tiny, recipe_of(method), processor=zoo.processor(family)):
        generate(tiny, feed, new=1)
        alone = tiny.mmaccel.reduction.kept
        generate(tiny, feed, new=2, num_beams=3)
        assert torch.equal(tiny.mmaccel.reduction.kept, alone.repeat_interleave(3, dim=0))


@pytest.mark.parametrize("kind", ["image", "uneven", "video", "mixed"])
@pytest.mark.parametrize("method", ["test-fixed", "pool"])
def test_deepstack_features_are_gathered(kind: str, method: str) -> None:
    """Qwen3-VL adds visual features in its first layers: they follow the tokens that stay, in images and clips."""
    tiny, feed, seen = model("qwen3_vl"), inputs("qwen3_vl", kind), []
    text = tiny.model.language_model
    hook = text.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0].shape), with_kwargs=True
    )
    original = text._deepstack_process

    def process(hidden: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        assert mask.shape == hidden.shape[:2] and int(mask.sum()) == len(features)
        seen.append(features)
        return original(hidden, mask, features)

    text._deepstack_process = process
    try:
        with accelerated(tiny, recipe_of(method)):
            tiny(**feed)
            kept = tiny.mmaccel.reduction
            layout = tiny.mmaccel.layout
    finally:
        hook.remove()
        del text._deepstack_process
    assert len(seen) == 1 + 3
    count = int((kept.kept & layout.visual).sum())
    assert all(len(features) == count for features in seen[1:]) and count < int(layout.visual.sum())


@families
def test_old_pixels_again_are_refused(family: str) -> None:
    """A second turn takes the new pixels only; with all of them the error says so, instead of a shape from the depths."""
    tiny, kind = model(family), "images" if family == "llava_onevision" else "image"
    feed = inputs(family, kind)
    with accelerated(tiny, recipe_of("random"), processor=zoo.processor(family)):
        first = generate(tiny, feed)
        _, whole = follow(feed, first, inputs(family, kind, seed=3))
        with pytest.raises(ValueError, match="do not match|exactly the new tokens"):
            generate(tiny, whole, past_key_values=first.past_key_values)
        first = generate(tiny, feed)
        unseen = {key: value for key, value in whole.items() if key.endswith(("ids", "mask")) and value.ndim == 2}
        with pytest.raises(UnsupportedError, match="on a second turn only the new"):
            generate(tiny, unseen, past_key_values=first.past_key_values)
        # the failed calls leave nothing behind
        close(logits(generate(tiny, feed)), logits(first), 1e-6)


# --- sliding windows --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "method", "family", "overrides"),
    in_turn(["image", "uneven"], ["test-fixed", "test-fixed-layer"], WINDOWED),
)
def test_windows_count_original_places_over_turns(family: str, overrides: Any, method: str, kind: str) -> None:
    """Stored keys are fewer than places, and a window is one of places; in a second turn as in one call."""
    tiny, feed = model(family, **overrides), inputs(family, kind)
    words = inputs(family, "text", batch=len(feed["input_ids"]))
    with accelerated(tiny, recipe_of(method), processor=zoo.processor(family)):
        first = generate(tiny, feed)
        kept, whole = follow(feed, first, words)
        close(
            logits(generate(tiny, kept, past_key_values=first.past_key_values)),
            logits(generate(tiny, whole)),
        )


@pytest.mark.parametrize(
    ("method", "family", "overrides"), in_turn(["test-fixed", "test-fixed-layer", "test-fixed-cache"], WINDOWED)
)
def test_windows_count_original_places(family: str, overrides: Any, method: str) -> None:
    """Against the bare model with the dropped tokens hidden, and windows of places drawn by hand."""
    tiny, feed = model(family, **overrides), inputs(family)
    with accelerated(tiny, recipe_of(method), processor=zoo.processor(family)):
        out = generate(tiny, feed, new=12)
        held = stored(out.past_key_values, feed["input_ids"].shape[1])
    kinds = getattr(tiny.config.text_config, "layer_types", None) or ["sliding_attention"] * 4
    assert "sliding_attention" in kinds
    prompt, length = feed["input_ids"].shape[1], out.sequences.shape[1] - 1
    place = torch.arange(length)
    near = place[:, None] - place < overrides["sliding_window"]

    def visible(layer: int) -> Tensor:
        there = torch.ones(1, held[layer].shape[1], length, length, dtype=torch.bool)
        there[..., prompt if method == "test-fixed-cache" else 0 :, :prompt] = held[layer][:, :, None]
        return there & near if kinds[layer] == "sliding_attention" else there

    whole = {**feed, "input_ids": out.sequences[:, :-1], "attention_mask": torch.ones(1, length, dtype=torch.long)}
    close(hide(tiny, whole, visible)[:, prompt - 1 :], logits(out))


@pytest.mark.parametrize(("family", "overrides"), WINDOWED)
def test_a_cache_that_has_slid_is_refused(family: str, overrides: Any) -> None:
    """Stock layers forget what leaves the window, so a picture behind a long text turn comes too late."""
    tiny = model(family, **overrides)
    words = dict(zoo.encode(family, [([], [], "what is there to see in it, and where, and why?")]))
    second = inputs(family, "images" if family == "llava_onevision" else "image")
    with accelerated(tiny, recipe_of("random"), processor=zoo.processor(family)):
        first = generate(tiny, words, past_key_values=transformers.DynamicCache(config=tiny.config.text_config))
        with pytest.raises(UnsupportedError, match="sliding window"):
            generate(tiny, follow(words, first, second)[0], past_key_values=first.past_key_values)
