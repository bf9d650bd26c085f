"""GAP's law: what stays keeps its order and its position ids, text its own, and decoding goes on behind the whole prompt."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import synthetic
import torch
import zoo
from laws.helpers import (
    THREE_AXES,
    close,
    ending_in_a_picture,
    follow,
    generate,
    inputs,
    logits,
    model,
    recipe_of,
)
from torch import Tensor, nn

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, accelerate_vlm, accelerated, is_accelerated
from mmaccel.kv.codecs import Codec
from mmaccel.method import ChunkMethod, EncoderMethod, LayerMethod, Policy, ProjectorMethod

pytestmark = pytest.mark.usefixtures("no_gradients")


def ids_of(model: Any, feed: Any, forced: Tensor) -> list[Tensor]:
    """The position ids that the text model runs with, of the prompt and of every decoded step, ``[axes, B, q]`` each."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["position_ids"]
        if kwargs.get("use_cache") is False:
            # a first pass, which stores nothing
            return
        # a fourth axis in front is that of the text, for masks
        seen.append(ids[-3:] if ids.dim() == 3 else ids[None])

    handle = oracle.text_model(model).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        oracle.decode(model, feed, forced)
    finally:
        handle.remove()
    return seen


#: methods that drop some of the tokens before the language model, whatever they are
TOKENS = [name for name in oracle.named(ProjectorMethod) if mmaccel.get_method(name).budget in ("exact", "at_most")]
CASES = [
    (family, kind)
    for family in ("llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "internvl")
    for kind in ("images", "uneven", "video")
    if kind in zoo.kinds(family)
]


@pytest.mark.square(
    ("family", "kind", "name"), [(*case, name) for case in CASES for name in TOKENS if oracle.fits(name, case[0])]
)
def test_gap_leaves_ids_alone(family: str, kind: str, name: str) -> None:
    feed, model = zoo.inputs(family, kind), oracle.subject(family)
    forced = oracle.force(family, len(feed["input_ids"]), 3)
    with accelerated(model, name, processor=zoo.processor(family), retain=0.3, positions="gap"):
        got = ids_of(model, feed, forced)
        kept = model.mmaccel.reduction.kept
    whole = ids_of(oracle.bare(family), feed, forced)
    valid = feed["attention_mask"].bool()
    assert (kept.sum(1) < valid.sum(1)).all()
    for row in range(len(kept)):
        mine = got[0][:, row, -int(kept[row].sum()) :]
        assert torch.equal(mine, whole[0][:, row, kept[row]])
        assert not torch.equal(mine[0], torch.arange(mine.shape[1]))
        for step, (ours, theirs) in enumerate(zip(got[1:], whole[1:], strict=True)):
            assert torch.equal(ours[:, row], theirs[:, row].expand_as(ours[:, row]))
            # in a row without padding text goes on at the number of tokens there were, where positions are counted
            if valid[row].all() and family not in THREE_AXES:
                assert int(ours[0, row]) == valid.shape[1] + step


@pytest.mark.square(
    ("family", "name"),
    [
        (family, name)
        for family in ("llava", "qwen2_5_vl")
        for name in oracle.named(EncoderMethod, ProjectorMethod, LayerMethod, ChunkMethod)
        if oracle.fits(name, family)
    ],
)
def test_gap_is_keep_by_name(family: str, name: str) -> None:
    feed, forced = zoo.inputs(family, "uneven"), oracle.force(family, 2, 3)
    runs = [
        oracle.record(family, feed, oracle.recipe(name, family).override(positions=positions), forced)
        for positions in ("keep", "gap")
    ]
    assert torch.equal(runs[0].kept, runs[1].kept) and torch.equal(runs[0].steps, runs[1].steps)


@pytest.mark.parametrize(
    ("what", "positions", "says"),
    [
        *((name, "gap", "drops none there") for name in ("none", *oracle.named(Policy, Codec))),
        *((name, "paper", "renumber between layers") for name, m in synthetic.offered().items() if m.renumbers_inside),
        ("mustdrop", "paper", "renumber between layers"),
        (Recipe("two", (Stage("random", 0.5), Stage("mustdrop-filter", 0.3))), "paper", "use 'keep'"),
    ],
)
def test_what_cannot_be_is_refused(what: Any, positions: str, says: str) -> None:
    model = oracle.subject("llava")
    with pytest.raises(MmaccelError, match=says):
        accelerate_vlm(model, what, positions=positions)
    assert not is_accelerated(model)


@pytest.mark.parametrize(
    ("family", "kind"),
    # positions of Qwen-Omni need the token behind a picture, and ERNIE does not generate without a cache
    [
        (f, kind)
        for f in THREE_AXES
        for kind in ("image", "video")
        if kind in zoo.kinds(f) and not (f.startswith("qwen") and "omni" in f) and f != "ernie4_5_vl_moe"
    ],
)
def test_a_prompt_may_end_in_a_picture(family: str, kind: str) -> None:
    """Every axis goes on from its own end while an answer is generated, and all from the furthest in the next turn."""
    tiny, feed, words = model(family), ending_in_a_picture(family, kind), inputs(family, "text")
    wanted, without = generate(tiny, feed, new=5), generate(tiny, feed, new=5, use_cache=False)
    close(logits(wanted), logits(without))
    kept, _ = follow(feed, wanted, words)
    later = generate(tiny, kept, past_key_values=wanted.past_key_values)
    for recipe in (recipe_of("divprune", family, 1.0), recipe_of("snapkv", family, 1.0)):
        with accelerated(tiny, recipe, processor=zoo.processor(family)):
            got = generate(tiny, feed, new=5)
            close(logits(got), logits(wanted))
            close(logits(generate(tiny, kept, past_key_values=got.past_key_values)), logits(later))
            if recipe.stages[0].method == "divprune":
                close(logits(generate(tiny, feed, new=5, use_cache=False)), logits(wanted))
    with accelerated(tiny, recipe_of("divprune", family, 0.3), processor=zoo.processor(family)):
        close(logits(generate(tiny, feed, new=5)), logits(generate(tiny, feed, new=5, use_cache=False)))
