"""Law 5: a second turn on the same cache feeds only the new tokens and pixels, at the right positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import zoo
from laws.helpers import (
    FAMILIES,
    THREE_AXES,
    cache,
    close,
    drops_at,
    follow,
    generate,
    hide,
    inputs,
    logits,
    model,
    on_axes,
    recipe_of,
    stored,
    text_model,
    widths,
)

import mmaccel
from mmaccel import UnsupportedError, accelerated
from mmaccel.method import LayerMethod, ProjectorMethod

#: every method that drops tokens, or keys at the end of a prompt
METHODS = (*oracle.methods_that_drop(ProjectorMethod, LayerMethod), *oracle.policies_that_drop())
#: a fixed choice at each site that the language model sees, so that two calls and one can be compared
FIXED = ("test-fixed", "test-fixed-layer")
LONGER = "and what else is there to see, and why?"

families = pytest.mark.square("family", FAMILIES, of="kinds")


def pictures(family: str) -> str:
    """LLaVA-OneVision lays out a lone picture in another way than one of several."""
    return "images" if family == "llava_onevision" else "image"


def uneven(family: str, seed: int, turn: int) -> dict[str, Any]:
    """Two rows with pictures of different sizes and questions of different length; each turn pads the other row."""
    sizes = zoo._TABLE[family].sizes

    def shot(size: int, number: int) -> Any:
        return zoo.image(*sizes[size], 100 * seed + number)

    first = [shot(0, 1), shot(1, 2)] if family == "llava_onevision" else [shot(turn, 1)]
    second = [shot(1, 3), shot(0, 4)]
    rows = [(first, [], zoo.QUESTION), (second, [], LONGER)]
    return dict(zoo.encode(family, rows if turn == 0 else rows[::-1]))


def spoken(family: str) -> dict[str, Any]:
    """A text turn of two rows of different length: there is padding behind what the cache holds."""
    return dict(zoo.encode(family, [([], [], LONGER), ([], [], "why?")]))


def after(
    reduced: Any,
    family: str,
    feed: dict[str, Any],
    out: Any,
    kept: dict[str, Any],
    method: str,
    left: Any,
    back: oracle.Seen | None = None,
) -> Any:
    """Bare logits for the whole conversation with everything hidden that the cache no longer holds, or that was not seen though
    it came ``back``; of the first turn's tokens those that are ``left [B, S]`` bool were not dropped before they came to it."""
    # a cache policy drops keys when the first turn's prompt has been read, not before
    delayed = mmaccel.get_method(method).site == "cache"
    prompt = feed["input_ids"].shape[1]
    held = stored(out.past_key_values, prompt)
    length = reduced.sequences.shape[1] - 1

    def visible(layer: int) -> torch.Tensor:
        there = torch.ones(*held[layer].shape[:2], length, length, dtype=torch.bool)
        there[..., prompt if delayed else 0 :, :prompt] = held[layer][:, :, None]
        if back is not None:
            # heads choose alike
            there[..., :prompt] = torch.cat([back.prompt[layer][:, None], back.later[layer][:, :1]], dim=2)
        return there

    whole = {**feed, "input_ids": reduced.sequences[:, :-1]}
    grown = length - kept["input_ids"].shape[1]
    for key, fill in (("attention_mask", 1), *zoo.typed(family)):
        if key in kept:
            whole[key] = torch.nn.functional.pad(kept[key], (0, grown), value=fill)
    if family not in THREE_AXES:  # without positions these models count padding
        first = oracle.adapter(family).first_position
        whole["position_ids"] = (whole["attention_mask"].cumsum(1) - 1).clamp(min=0) + first
    return hide(model(family), whole, visible, left, drops_at(method, family))[:, -(grown + 1) :]


@pytest.mark.square(
    ("family", "method"),
    [(family, name) for family in FAMILIES for name in METHODS if oracle.fits(name, family)],
    of="pairs",
)
@pytest.mark.square("kind", ["image", "uneven"])
def test_text_turn_sees_what_was_kept(family: str, method: str, kind: str) -> None:
    """Only the new tokens are fed, and the answer is that of a full run with the dropped tokens hidden."""
    tiny, feed = model(family), inputs(family, kind)
    second = spoken(family) if kind == "uneven" else inputs(family, "text")
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)), oracle.recalled() as chosen:
        first = generate(tiny, feed)
        left, behind = tiny.mmaccel.reduction.kept, oracle.held_behind(family, tiny, feed)
        held = [layer.index.index.clone() for layer in first.past_key_values.mmaccel.layers]
        kept, _ = follow(feed, first, second)
        with widths(text_model(tiny)) as seen:
            reduced = generate(tiny, kept, past_key_values=first.past_key_values)
        back = oracle.coming_back(family, tiny, feed, behind, chosen, [1, 1, 1, *seen]) if chosen else None
    # the cache has not seen the last token of the answer
    assert seen == [second["input_ids"].shape[1] + 1, 1, 1, 1]
    assert back or all(
        after.shape[-1] == before.shape[-1] + sum(seen)
        for after, before in zip(
            (layer.index.index for layer in first.past_key_values.mmaccel.layers), held, strict=True
        )
    )
    close(logits(reduced), after(reduced, family, feed, first, kept, method, left, back))


@families
@pytest.mark.square("method", FIXED)
def test_new_picture_equals_one_call(family: str, method: str) -> None:
    """The new picture is reduced, and stands where one call on the whole conversation puts it."""
    tiny, kind = model(family), pictures(family)
    feed, second = inputs(family, kind), inputs(family, kind, seed=3)
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        first = generate(tiny, feed)
        kept, whole = follow(feed, first, second)
        with widths(text_model(tiny)) as seen:
            turned = generate(tiny, kept, past_key_values=first.past_key_values)
        stats = tiny.mmaccel.stats()
        once = generate(tiny, whole)
    assert seen == [second["input_ids"].shape[1] + 1, 1, 1, 1]
    assert stats["visual_tokens"] == int(zoo.visual_mask(family, tiny, second["input_ids"]).sum())
    assert stats["visual_tokens_kept"] < 0.5 * stats["visual_tokens"]
    assert torch.equal(turned.sequences, once.sequences)
    close(logits(turned), logits(once))


@pytest.mark.parametrize("family", zoo.VIDEO_FAMILIES)
def test_new_clip_equals_one_call(family: str) -> None:
    """The same for a clip behind a clip."""
    tiny = model(family)
    feed, second = inputs(family, "video"), inputs(family, "video", seed=3)
    with accelerated(tiny, recipe_of("test-fixed", family), processor=zoo.processor(family)):
        first = generate(tiny, feed)
        kept, whole = follow(feed, first, second)
        turned = generate(tiny, kept, past_key_values=first.past_key_values)
        once = generate(tiny, whole)
    close(logits(turned), logits(once))


@families
@pytest.mark.square("method", FIXED)
def test_padded_batch_equals_each_conversation_alone(family: str, method: str) -> None:
    """Rows with other pictures, other lengths, and padding before and within the conversation."""
    tiny = model(family)
    feed, second = uneven(family, 1, 0), uneven(family, 2, 1)
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        first = generate(tiny, feed)
        kept, _ = follow(feed, first, second)
        turned = generate(tiny, kept, past_key_values=first.past_key_values)
        for row in range(2):
            mine, next_one = (zoo.single(family, turn, row) for turn in (feed, second))
            answer = first.sequences[row : row + 1, feed["input_ids"].shape[1] :]
            said = SimpleNamespace(sequences=torch.cat([mine["input_ids"], answer], dim=1))
            once = generate(tiny, follow(mine, said, next_one)[1])
            close(logits(turned)[row], logits(once)[0])


@families
def test_third_turn_and_a_picture_behind_text(family: str) -> None:
    """Picture, text, picture: three turns are one call."""
    tiny, kind = model(family), pictures(family)
    feed, words, second = inputs(family, kind), inputs(family, "text"), inputs(family, kind, seed=3)
    with accelerated(tiny, recipe_of("test-fixed", family), processor=zoo.processor(family)):
        first = generate(tiny, feed)
        kept, whole = follow(feed, first, words)
        middle = generate(tiny, kept, past_key_values=first.past_key_values)
        kept, whole = follow(whole, middle, second)
        for key in set(kept) & set(second) - {"input_ids", "attention_mask", *dict(zoo.typed(family))}:
            kept[key] = second[key]
        last = generate(tiny, kept, past_key_values=middle.past_key_values)
        once = generate(tiny, whole)
    close(logits(last), logits(once))


@families
def test_first_picture_behind_a_text_turn(family: str) -> None:
    """The first turn had no picture, so its cache is an ordinary one; the second turn takes it over."""
    tiny, kind = model(family), pictures(family)
    words, second = inputs(family, "text"), inputs(family, kind)
    with accelerated(tiny, recipe_of("test-fixed", family), processor=zoo.processor(family)):
        first = generate(tiny, words)
        kept, whole = follow(words, first, second)
        with widths(text_model(tiny)) as seen:
            turned = generate(tiny, kept, past_key_values=first.past_key_values)
        once = generate(tiny, whole)
    assert seen[0] == second["input_ids"].shape[1] + 1
    close(logits(turned), logits(once))


@families
def test_a_callers_own_cache(family: str) -> None:
    """An empty ``DynamicCache`` given from the first turn on is the one that comes back, and works the same."""
    tiny, feed, mine = model(family), inputs(family), cache()
    with accelerated(tiny, recipe_of("test-fixed", family)):
        first = generate(tiny, feed, past_key_values=mine)
        assert first.past_key_values is mine
        close(logits(first), logits(generate(tiny, feed)), 1e-6)
        kept, whole = follow(feed, first, inputs(family, "text"))
        # a state is summed up otherwise over two turns than over one
        tolerance = oracle.TOLERANCE * (4 if oracle.adapter(family).stateful else 1)
        close(logits(generate(tiny, kept, past_key_values=mine)), logits(generate(tiny, whole)), tolerance)


# --------------------------------------------------------------------------------------------------- loops by hand


@families
@pytest.mark.square("method", ["test-fixed", "test-fixed-layer", "test-fixed-cache"])
@pytest.mark.square("given", ["nothing", "mask", "positions"])
@pytest.mark.square("kind", ["image", "uneven"])
@torch.no_grad()
def test_forward_loop_equals_generate(family: str, method: str, given: str, kind: str) -> None:
    """``model(...)`` token by token on a kept cache, whatever of mask and positions the caller passes on."""
    tiny, feed = model(family), inputs(family, kind)
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        expected = generate(tiny, feed, new=3)
        mine = cache()
        out = tiny(**feed, past_key_values=mine, use_cache=True)
        mask, steps = feed["attention_mask"], [out.logits[:, -1]]
        follows = _next_position(family, tiny, feed)
        for step in range(2):
            token = expected.sequences[:, feed["input_ids"].shape[1] + step, None]
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            extra: dict[str, Any] = {"attention_mask": mask} if given != "nothing" else {}
            if given == "positions":
                at = (follows + step)[:, None]
                extra["position_ids"] = on_axes(family, at)
            out = tiny(input_ids=token, past_key_values=mine, use_cache=True, **extra)
            steps.append(out.logits[:, -1])
    close(torch.stack(steps, dim=1), logits(expected))


def _next_position(family: str, tiny: Any, feed: dict[str, Any]) -> torch.Tensor:
    """The position that follows each row's prompt."""
    if family not in THREE_AXES:
        return feed["attention_mask"].sum(1)
    names = (*oracle.adapter(family).sized_by, "second_per_grid_ts", "attention_mask", "mm_token_type_ids")
    positions, _ = tiny.model.get_rope_index(feed["input_ids"], **{k: feed[k] for k in names if k in feed})
    return positions.amax((0, 2)) + 1


@families
@torch.no_grad()
def test_forward_with_several_tokens_at_once(family: str) -> None:
    """A second turn by hand: its tokens in one forward equal the same tokens one by one."""
    tiny, feed = model(family), inputs(family)
    words = inputs(family, "text")["input_ids"]
    for method in ("test-fixed", "test-fixed-layer", "test-fixed-cache"):
        with accelerated(tiny, recipe_of(method, family)):
            together, apart = cache(), cache()
            tiny(**feed, past_key_values=together, use_cache=True)
            tiny(**feed, past_key_values=apart, use_cache=True)
            block = tiny(input_ids=words, past_key_values=together, use_cache=True).logits
            steps = [tiny(input_ids=one, past_key_values=apart, use_cache=True).logits for one in words.split(1, 1)]
            close(block, torch.cat(steps, dim=1))


@families
@pytest.mark.square("masked", [False, True])
@pytest.mark.square("method", FIXED)
@torch.no_grad()
def test_forward_with_a_new_picture(family: str, masked: bool, method: str) -> None:
    """A second picture by hand, with the mask of the whole conversation or none."""
    tiny, kind = model(family), pictures(family)
    feed, second = inputs(family, kind), inputs(family, kind, seed=3)
    silent = SimpleNamespace(sequences=feed["input_ids"])
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        whole, mine = follow(feed, silent, second)[1], cache()
        tiny(**feed, past_key_values=mine, use_cache=True)
        second["attention_mask"] = whole["attention_mask"] if masked else None
        for name in set(dict(zoo.typed(family))) & set(second):
            second[name] = whole[name][:, -second["input_ids"].shape[1] :]
        if tiny.mmaccel.family.numbers_pictures:
            with pytest.raises(UnsupportedError, match="call generate with the ids of the whole conversation"):
                tiny(**second, past_key_values=mine, use_cache=True)
            return
        turned = tiny(**second, past_key_values=mine, use_cache=True).logits
        once = tiny(**whole).logits[:, -turned.shape[1] :]
    assert torch.equal(turned.isnan(), once.isnan())
    close(turned.nan_to_num(), once.nan_to_num())


# ---------------------------------------------------------------------------------------------- several conversations


@families
@pytest.mark.square("method", [*FIXED, "test-fixed-cache"])
def test_interleaved_conversations(family: str, method: str) -> None:
    """A1 B1 A2 B2 with different batch sizes on one model: each as if it were alone."""
    tiny = model(family)
    talks = [(inputs(family, "image"), inputs(family, "text")), (uneven(family, 1, 0), spoken(family))]
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):

        def open_with(feed: dict[str, Any]) -> Any:
            return generate(tiny, feed)

        def go_on(feed: dict[str, Any], out: Any, words: dict[str, Any]) -> Any:
            return generate(tiny, follow(feed, out, words)[0], past_key_values=out.past_key_values)

        alone = [go_on(feed, open_with(feed), words) for feed, words in talks]
        begun = [open_with(feed) for feed, _ in talks]
        mixed = [go_on(feed, out, words) for (feed, words), out in zip(talks, begun, strict=True)]
    for one, other in zip(alone, mixed, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert torch.equal(logits(one), logits(other))


@pytest.mark.parametrize("family", THREE_AXES)
def test_text_conversation_between_pictures(family: str) -> None:
    """A conversation without pictures takes nothing over from another one that has some."""
    tiny, words = model(family), inputs(family, "text")
    with accelerated(tiny, recipe_of("test-fixed")):

        def talk(between: str | None) -> torch.Tensor:
            first = generate(tiny, words)
            if between:
                generate(tiny, inputs(family, between))
            return logits(generate(tiny, follow(words, first, words)[0], past_key_values=first.past_key_values))

        @torch.no_grad()
        def loop(between: str | None) -> torch.Tensor:
            mine = cache(tiny)
            tiny(**words, past_key_values=mine, use_cache=True)
            if between:
                generate(tiny, inputs(family, between))
            return tiny(input_ids=words["input_ids"], past_key_values=mine, use_cache=True).logits

        tiny.model.rope_deltas = None
        for speak in (talk, loop):
            alone = speak(None)
            assert torch.equal(alone, speak("image")) and torch.equal(alone, speak("uneven"))


@families
@pytest.mark.square("method", [*FIXED, "test-fixed-cache"])
@torch.no_grad()
def test_interleaved_loops_by_hand(family: str, method: str) -> None:
    """The same with ``model(...)``, token by token in turns."""
    tiny = model(family)
    feeds = inputs(family, "image"), uneven(family, 1, 0)
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        outs = [generate(tiny, feed, new=3) for feed in feeds]
        mine = [cache(), cache()]
        steps = [[tiny(**feed, past_key_values=one).logits[:, -1]] for feed, one in zip(feeds, mine, strict=True)]
        for step in range(2):
            for number, out in enumerate(outs):
                token = out.sequences[:, feeds[number]["input_ids"].shape[1] + step, None]
                steps[number].append(tiny(input_ids=token, past_key_values=mine[number]).logits[:, -1])
    for out, mine_said in zip(outs, steps, strict=True):
        close(torch.stack(mine_said, dim=1), logits(out))


@pytest.mark.square(
    ("family", "method"),
    [
        (family, name)
        for family in FAMILIES
        for name in (*FIXED, "test-fixed-cache", *oracle.policies_that_drop())
        if oracle.fits(name, family)
    ],
)
@torch.no_grad()
def test_rows_of_a_kept_cache(family: str, method: str) -> None:
    """Rows can be reordered, dropped and repeated: places, positions and keys go with them."""
    tiny, feed = model(family), inputs(family, "uneven")
    token = feed["input_ids"][:, -1:]
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):

        def after(change: Any, rows: list[int]) -> torch.Tensor:
            mine = cache()
            tiny(**feed, past_key_values=mine)
            change(mine)
            assert mine.get_seq_length() == feed["input_ids"].shape[1]
            steps = [tiny(input_ids=token[rows], past_key_values=mine).logits for _ in range(2)]
            return torch.cat(steps, dim=1)

        plain = after(lambda mine: None, [0, 1])
        for rows in ([1, 0], [1, 1], [0, 0]):
            close(after(lambda mine, rows=rows: mine.reorder_cache(torch.tensor(rows)), rows), plain[rows])
        for rows in ([1], [0], [1, 0, 1]):
            close(after(lambda mine, rows=rows: mine.batch_select_indices(torch.tensor(rows)), rows), plain[rows])
        rows = [0, 0, 1, 1]
        close(after(lambda mine: mine.batch_repeat_interleave(2), rows), plain[rows])
