"""Law 2 with proportional attention: dropping a token = hiding its key in the bare model, and adding to the logits of what is
left the logarithm of how many tokens it stands for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import oracle
import pytest
import torch
import zoo
from laws.helpers import generate
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated, get_method
from mmaccel.core.reduction import Reduction
from mmaccel.method import EncoderMethod, LayerMethod, ProjectorMethod, ReactivatingMethod
from mmaccel.runtime.call.readers import Attention
from mmaccel.runtime.prompt.proportional import represented_tokens

pytestmark = pytest.mark.usefixtures("no_gradients")

#: those whose tokens come back have tests of their own
NAMES = tuple(
    name for name in oracle.named(ProjectorMethod, LayerMethod) if not issubclass(get_method(name), ReactivatingMethod)
)
#: in turn with the families
SHORT = oracle.families_in_turn(NAMES)


def weighed(what, kind="all"):
    return what.override(proportional=kind)


def logarithms(family, feed, front, layout, kind, **overrides):
    """`[B, S]` by their definition, one token after the other, of what the reduction `front` left before the language model."""
    model, caught = oracle.bare(family, **overrides), []
    first = oracle.text_model(model).layers[0]
    hook = first.register_forward_pre_hook(
        lambda module, args, kwargs: caught.append((args or (kwargs["hidden_states"],))[0]), with_kwargs=True
    )
    try:
        model(**feed, **oracle.counted(family, feed))
    finally:
        hook.remove()
    read = front.substitute(caught[0])
    found = torch.zeros(feed["input_ids"].shape)
    for number in {segment.picture for segment in layout.segments}:
        parts = [segment for segment in layout.segments if segment.picture == number]
        if kind == "pictures" and len({int(t) for part in parts for t in part.tile.cells[:, 0].tolist() if t >= 0}) > 1:
            continue
        row, places = parts[0].row, [int(p) for part in parts for p in part.places]
        kept = [p for p in places if front.kept[row, p]]
        sizes = dict.fromkeys(kept, 1)
        for place in (p for p in places if not front.kept[row, p]):
            like = cosine_similarity(read[row, place][None].double(), read[row, kept].double(), dim=-1)
            sizes[kept[int(like.argmax())]] += 1
        assert sum(sizes.values()) == len(places), "what is left stands for everything"
        for place, size in sizes.items():
            found[row, place] = torch.tensor(float(size)).log()
    return found


def entered(model):
    """What of the prompt entered the language model."""
    before = [step.reduction for step in model.mmaccel.history if step.layer == 0]
    return before[-1] if before else Reduction.identity(model.mmaccel.layout.valid)


def holds(family, feed, what, **overrides):
    """The law; returns the logarithms."""
    model, kind = oracle.subject(family, **overrides), what.proportional
    forced = oracle.force(family, len(feed["input_ids"]))
    got = oracle.record(family, feed, what, forced, **overrides)
    with accelerated(model, what, processor=zoo.processor(family)):
        model(**feed, **oracle.counted(family, feed))
        front, layout = entered(model), model.mmaccel.layout
    merged = [] if got.reduction.links is None else [(what.stages[0].options.get("layer", 0), got.reduction)]
    weights = logarithms(family, feed, front, layout, kind, **overrides)
    prompt, steps = oracle.replay(family, feed, forced, got.seen, merged=merged, weights=weights, **overrides)
    oracle.close(got.prompt[got.kept], prompt[got.kept], what="prompt logits")
    oracle.close(got.steps, steps, what="decoded logits")
    plain = oracle.replay(family, feed, forced, got.seen, merged=merged, **overrides)[1]
    assert kind == "pictures" or not weights.any() or (got.steps - plain).abs().max() > oracle.POWER
    return weights


@pytest.mark.square(("family", "name"), SHORT)
def test_a_picture(family: str, name: str) -> None:
    holds(family, zoo.inputs(family, "image"), weighed(oracle.recipe(name, family)))


@pytest.mark.full
@pytest.mark.square("kind", ["image", "images", "uneven", "textrow", "video", "mixed"])
@pytest.mark.square("name", ["divprune", "aim-merge"])
@pytest.mark.square("family", zoo.FAMILIES)
def test_all_inputs(family: str, name: str, kind: str) -> None:
    if kind not in zoo.kinds(family):
        return
    holds(family, zoo.inputs(family, kind), weighed(oracle.recipe(name, family)))


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_rows_that_are_padded(family: str) -> None:
    assert holds(family, zoo.inputs(family, "uneven"), weighed(oracle.recipe("divprune", family))).any()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision", "internvl"])
def test_clips_stand_for_themselves_where_pictures_alone_have_weights(family: str) -> None:
    feed = zoo.inputs(family, "video")
    assert holds(family, feed, weighed(oracle.recipe("divprune", family))).any()
    assert not holds(family, feed, weighed(oracle.recipe("divprune", family), "pictures")).any()


@pytest.mark.parametrize("name", ["tome", "pitome"])
def test_merging_in_the_tower_counts_patches_that_became_one(name: str) -> None:
    """All that stand for one token hold its value."""
    assert issubclass(get_method(name), EncoderMethod)
    model, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    with accelerated(model, name, retain=0.3, proportional="all"):
        model(**feed)
        layout, total = model.mmaccel.layout, model.mmaccel.reduction
        cache = model(**feed, use_cache=True).past_key_values
    (segment,) = layout.segments
    owner = total.owner()[segment.row, segment.places]
    counted = torch.stack([(owner == place).sum() for place in segment.places])
    weights = cache.mmaccel.shared.places.weights[segment.row, segment.places]
    kept = total.kept[segment.row, segment.places]
    torch.testing.assert_close(weights[kept].exp(), counted[kept].float())


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_several_tokens_at_once_are_each_by_itself(family: str) -> None:
    model, feed = oracle.subject(family), zoo.inputs(family, "uneven")
    more = feed["input_ids"][:, -3:].clone()
    with accelerated(model, "divprune", retain=0.3, proportional="all", processor=zoo.processor(family)):
        forced = oracle.force(family, len(feed["input_ids"]))
        (_, one), (_, other) = (oracle.decode(model, feed, forced) for _ in range(2))
        seen = one.get_seq_length()
        mask = torch.cat([feed["attention_mask"], torch.ones(len(more), seen + 3 - feed["attention_mask"].shape[1])], 1)
        beside = {} if family != "gemma3" else {"token_type_ids": torch.zeros_like(more)}
        whole = model(input_ids=more, attention_mask=mask.long(), past_key_values=one, **beside).logits
        for at in range(3):
            beside = {} if family != "gemma3" else {"token_type_ids": torch.zeros_like(more[:, :1])}
            step = model(
                input_ids=more[:, at : at + 1],
                attention_mask=mask[:, : seen + at + 1].long(),
                past_key_values=other,
                **beside,
            ).logits
            oracle.close(step[:, 0], whole[:, at])


def test_a_second_picture_has_weights_behind_the_first() -> None:
    model, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    other = zoo.inputs("llava", "image", seed=1)
    with accelerated(model, "divprune", retain=0.3, proportional="pictures"):
        cache = model(**feed).past_key_values
        model(**{**other, "attention_mask": torch.ones(1, 2 * feed["input_ids"].shape[1])}, past_key_values=cache)
        weights = cache.mmaccel.shared.places.weights
        alone = model(**other).past_key_values.mmaccel.shared.places.weights
    length = feed["input_ids"].shape[1]
    assert weights.shape == (1, 2 * length)
    torch.testing.assert_close(weights[:, length:], alone)
    assert weights[:, :length].any()


def test_keeping_everything_adds_nothing() -> None:
    model, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    with accelerated(model, "divprune", retain=1.0):
        plain = model(**feed)
    with accelerated(model, "divprune", retain=1.0, proportional="all"):
        out = model(**feed)
    assert torch.equal(plain.logits, out.logits)
    assert out.past_key_values.mmaccel.shared.places.weights is None


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_backend(backend: str) -> None:
    feed = zoo.inputs("llava", "image")
    logits = []
    for name in ("sdpa", backend):
        model = zoo.model("llava")
        model.set_attn_implementation(name)
        with accelerated(model, "divprune", retain=0.3, proportional="all"):
            logits.append(generate(model, feed).logits)
    for one, other in zip(*logits, strict=True):
        oracle.close(one, other)


def test_beams_take_weights_along() -> None:
    model, feed = oracle.subject("llava"), zoo.inputs("llava", "uneven")
    with accelerated(model, "divprune", retain=0.3, proportional="all"):
        together = generate(model, feed, num_beams=2).sequences
        for row in range(len(together)):
            alone = generate(model, zoo.single("llava", feed, row), num_beams=2).sequences
            assert alone[0, -4:].tolist() == together[row, -4:].tolist()


def test_what_a_token_stands_for_by_hand() -> None:
    x = torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [0.0, 2.0], [5.0, 5.0]]])
    kept = torch.tensor([[True, False, True, False, False, False]])
    valid = torch.tensor([[True, True, True, True, True, False]])
    assert represented_tokens(x, valid, kept, 2).tolist() == [[2.0, 0.0, 3.0, 0.0, 0.0, 0.0]]
    # a copy of what is left joins the first of two that are the same
    x = torch.tensor([[[0.3, 0.7], [0.3, 0.7], [0.3, 0.7]]])
    everything = torch.ones(1, 3, dtype=torch.bool)
    assert represented_tokens(x, everything, torch.tensor([[True, True, False]]), 2).tolist() == [[2.0, 1.0, 0.0]]


def test_what_cannot_be_had() -> None:
    model, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    for other in ("snapkv", "kivi", "homer"):
        with pytest.raises(MmaccelError, match=f"'{other}' is not; leave one of them out"):
            accelerate_vlm(model, ["divprune", other], proportional="all")
    with pytest.raises(MmaccelError, match="proportional='yes' is unknown"):
        accelerate_vlm(model, "divprune", proportional="yes")  # type: ignore[arg-type]
    with accelerated(model, "divprune", retain=0.3, proportional="pictures"):
        cache = model(**feed).past_key_values
    more = {"input_ids": feed["input_ids"][:, -1:], "past_key_values": cache}
    with accelerated(model, "snapkv"), pytest.raises(UnsupportedError, match="which recipe 'snapkv' cannot compress"):
        model(**more)
    with pytest.raises(UnsupportedError, match="would misread now"):
        model(**more)


def test_for_one_call_and_as_data() -> None:
    model, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    what = Recipe("mine", (Stage("divprune", 0.3),), proportional="pictures")
    assert Recipe.from_json(what.to_json()) == what
    assert "proportional: pictures" in what.describe()
    with accelerated(model, what):
        weighed = model(**feed).logits
        plain = model(**feed, mmaccel={"proportional": "none"}).logits
    with accelerated(model, "divprune", retain=0.3):
        torch.testing.assert_close(model(**feed).logits, plain, equal_nan=True)
        torch.testing.assert_close(model(**feed, mmaccel={"proportional": "pictures"}).logits, weighed, equal_nan=True)
    assert not torch.allclose(plain, weighed, equal_nan=True)


# --- the calibration of RESTORE -----------------------------------------------------------------------------------------
@contextmanager
def masks_of(seen: list[tuple[int, Tensor]]) -> Iterator[None]:
    """The masks that layers add to their logits, ``[B, 1, q, K]``, layer after layer."""
    run = Attention.run

    def watched(self: Attention, base: str, mask: Tensor | None, scaling: float | None) -> Any:
        if mask is not None:
            seen.append((self.module.layer_idx, mask))
        return run(self, base, mask, scaling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "run", watched)
        yield


def factor(distance: int) -> float:
    """By the paper's definition."""
    turns = sum(math.cos(distance * 10000 ** (-2 * t / 128)) for t in range(64)) / 64
    return math.log(2 - turns)


# by choice: one position a token and three axes
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
# by choice: methods that drop, merge, and merge in the tower
@pytest.mark.parametrize("name", ["divprune", "restore-merge", "aim-merge", "tome"])
def test_restore_gives_a_picture_its_old_share(family: str, name: str) -> None:
    model, feed = oracle.subject(family), zoo.inputs(family, "images")
    seen: list[tuple[int, Tensor]] = []
    with masks_of(seen), accelerated(model, name, retain=0.3, proportional="restore", processor=zoo.processor(family)):
        generate(model, feed, 3)
        layout, total, depth = model.mmaccel.layout, model.mmaccel.reduction, len(oracle.text_model(model).layers)
    places = total.kept[0].nonzero()[:, 0]
    sizes, shares = torch.ones(len(layout.visual[0])), torch.ones(len(layout.visual[0]))
    owner = total.owner()[0]
    for number in {segment.picture for segment in layout.segments}:
        mine = torch.cat([segment.places for segment in layout.segments if segment.picture == number])
        kept = mine[total.kept[0, mine]]
        shares[kept] = len(mine) / len(kept)
    for place in (layout.visual[0] & ~total.kept[0] & (owner >= 0)).nonzero()[:, 0].tolist():
        sizes[owner[place]] += 1
    if name == "divprune":
        assert (owner[layout.visual[0] & ~total.kept[0]] == -1).all(), "nothing merges"
    else:
        assert (sizes > 1).any()
    far = torch.tensor([[factor(int(abs(a - b))) for b in places] for a in places])
    visible = torch.ones(len(places), len(places), dtype=torch.bool).tril()
    prompt = dict(seen[:depth])
    for layer, weights in ((0, shares), (1, sizes)):
        if layer and name == "divprune":
            # those that were dropped count for what is like them; all of them do
            assert (
                prompt[layer][0, 0, -1].sub(far[-1]).exp()[layout.visual[0, places]].sum()
                > 0.99 * layout.visual[0].sum()
            )
            continue
        wanted = (far + weights[places].log())[visible]
        oracle.close(prompt[layer][0, 0][visible], wanted, what="what is added")
    # while decoding there is no factor, and new tokens weigh one
    step = dict(seen[-depth:])
    at = torch.cat([places, places.new_zeros(step[1].shape[-1] - len(places))])
    for layer, weights in ((0, shares), (1, sizes)):
        if layer and name == "divprune":
            continue
        wanted = weights[at].log()
        wanted[len(places) :] = 0
        oracle.close(step[layer][0, 0, -1], wanted, what="what is added while decoding")


@pytest.mark.parametrize("chunk", [None, 16])
def test_restore_in_a_batch_and_in_a_later_turn(chunk: int | None) -> None:
    """Rows are those of each alone, whether the prompt is read at once or not; a kept cache goes on with its weights."""
    model, feed = oracle.subject("llava"), zoo.inputs("llava", "uneven", batch=2)
    how = {"retain": 0.3, "proportional": "restore"} | ({} if chunk is None else {"chunk": chunk})
    with accelerated(model, "restore-merge", **how):
        both = model(**feed).logits[:, -1]
        for row in range(2):
            alone = model(**zoo.single("llava", feed, row)).logits[0, -1]
            oracle.close(both[row], alone)
        plain = model(**feed, mmaccel={"proportional": "none"}).logits[:, -1]
    oracle.apart(both, plain)


def test_restore_is_refused_where_weights_are() -> None:
    with pytest.raises(MmaccelError, match="proportional='restore' is for tokens"):
        accelerate_vlm(oracle.subject("llava"), ["divprune", "snapkv"], proportional="restore")
    with pytest.raises(MmaccelError, match="use one of none, pictures, all, restore"):
        accelerate_vlm(oracle.subject("llava"), "divprune", proportional="sizes")
