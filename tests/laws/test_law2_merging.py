"""Law 2 for merging and renumbering: values substituted by hand, an averaged full grid, a fresh short prompt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import oracle
import pytest
import torch
import zoo
from torch import Tensor

from mmaccel import Recipe, Stage, accelerated, register
from mmaccel.merging.tome import ToMe

pytestmark = pytest.mark.usefixtures("no_gradients")

KINDS = ("image", "images", "video", "mixed", "uneven", "textrow")


def cases(families, kinds):
    return [(f, k) for f in families for k in kinds if k in zoo.kinds(f)]


def averaged(values: Tensor, owner: Tensor, kept: Tensor) -> Tensor:
    """`values [B, S, D]` with the mean of everything that flows into a kept place standing at that place."""
    out = values.clone()
    for row, place in kept.nonzero().tolist():
        out[row, place] = values[row, owner[row] == place].mean(0)
    return out


def substituted(owner: Tensor, kept: Tensor):
    """Exchange what the text model reads at the kept places of the prompt, DeepStack features included."""
    length = kept.shape[1]

    def change(kwargs):
        embeds = kwargs["inputs_embeds"].clone()
        embeds[:, :length] = averaged(embeds[:, :length], owner, kept)
        kwargs["inputs_embeds"] = embeds
        if kwargs.get("deepstack_visual_embeds") is not None:
            mask = kwargs["visual_pos_masks"][:, :length]
            new = []
            for features in kwargs["deepstack_visual_embeds"]:
                plane = features.new_zeros(*mask.shape, features.shape[-1])
                plane[mask] = features
                new.append(averaged(plane, owner, kept)[mask])
            kwargs["deepstack_visual_embeds"] = new
        return kwargs

    return change


@pytest.mark.parametrize(("family", "kind"), cases(zoo.FAMILIES, KINDS), ids=str)
def test_pooling_is_averaging_by_hand(family, kind):
    feed = zoo.inputs(family, kind)
    forced = oracle.force(family, len(feed["input_ids"]))
    got = oracle.record(family, feed, oracle.recipe("pool", family), forced)
    owner, kept = got.reduction.owner(), got.kept
    visual = oracle.visual(family, feed)
    rows, place = (visual & kept).nonzero(as_tuple=True)
    sizes = torch.stack([(owner[r] == p).sum() for r, p in zip(rows, place, strict=True)])
    assert (sizes > 1).any(), "nothing was merged"
    assert not (owner >= 0)[~visual & ~kept].any() and torch.equal(owner[kept], kept.nonzero()[:, 1])
    prompt, steps = oracle.replay(family, feed, forced, got.seen, substituted(owner, kept))
    oracle.close(got.prompt[kept], prompt[kept])
    assert torch.equal(got.prompt.isnan().any(-1), feed["attention_mask"].bool() & ~kept)
    oracle.close(got.steps, steps)
    oracle.apart(got.steps, oracle.replay(family, feed, forced, got.seen)[1])


def test_pooling_takes_windows_of_the_grid():
    """36 tokens in a 6 x 6 grid, 9 of them kept: 2 x 2 windows, each at its first place."""
    feed = zoo.inputs("llava")
    got = oracle.record("llava", feed, oracle.recipe("pool", "llava", 9), oracle.force("llava", 1))
    first = int(oracle.visual("llava", feed)[0].nonzero()[0])
    cell = torch.arange(36)
    wanted = first + (cell // 12) * 12 + (cell % 6) // 2 * 2
    assert torch.equal(got.reduction.owner()[0, first : first + 36], wanted)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_pooling_then_dropping(family):
    """A merge before a drop inside the language model and another in the cache: all three hold together."""
    layer = {"layer": oracle.DEEPSTACK.get(family, 2)}
    what = Recipe("three", (Stage("pool", 0.6), Stage("fastv", 0.3, layer), Stage("snapkv", 0.2, {"window": 8})))
    feed = zoo.inputs(family, "images")
    forced = oracle.force(family, 1)
    got = oracle.record(family, feed, what, forced)
    pooled = oracle.record(family, feed, Recipe("pool", what.stages[:1]), forced)
    change = substituted(pooled.reduction.owner(), pooled.kept)
    prompt, steps = oracle.replay(family, feed, forced, got.seen, change)
    assert int(got.kept.sum()) < int(pooled.kept.sum())
    oracle.close(got.prompt[got.kept], prompt[got.kept])
    oracle.close(got.steps, steps)


# ---------------------------------------------------------------------------------------------- merging in the encoder


@register
@dataclass(frozen=True)
class WatchedToMe(ToMe):
    """ToMe that notes what it merged into what, in the order of the tower's calls."""

    name = "laws-tome"
    targets: ClassVar[list[Tensor]] = []

    def match(self, metric: Tensor, remove: int, protected: int) -> Tensor:
        target = super().match(metric, remove, protected)
        self.targets.append(target)
        return target


def averaging_tower(family: str, retain: float, targets: list[Tensor], handles: list):
    """Hooks that put the mean of its group at every place of the bare tower's full grid, before each merging layer.

    Attention over n equal tokens is what proportional attention gives to one that stands for n: the same features must
    come out. The groups are followed here, in places of the full grid; `targets` speak of the tokens that were left.
    """
    towers, last = oracle.layers_of_tower(oracle.bare(family))
    queue = iter(targets)
    for layers in towers:
        group: dict[str, Tensor] = {}

        def start(module, args, group=group):
            tokens = args[0].shape[1]
            group["of"] = torch.arange(tokens).expand(len(args[0]), -1)
            patches = tokens - int(family in oracle.CLS)
            group["plan"] = ToMe().schedule(patches, last, int(retain * patches + 0.5))

        def enter(module, args, number, group=group):
            if group["plan"][number - 1] == 0:
                return None
            target = next(queue)
            into = target.gather(1, group["of"])
            left = target == torch.arange(target.shape[1])
            group["of"] = (left.cumsum(1) - 1).gather(1, into)
            same = (group["of"][:, :, None] == group["of"][:, None, :]).to(args[0])
            return (same @ args[0] / same.sum(-1, keepdim=True), *args[1:])

        handles.append(layers[0].register_forward_pre_hook(start))
        for number in range(1, last + 1):
            handles.append(layers[number].register_forward_pre_hook(partial(enter, number=number)))
    return queue


@pytest.mark.parametrize(("family", "kind"), cases(oracle.MERGEABLE, KINDS), ids=str)
@pytest.mark.parametrize("retain", (0.5, 0.3))
def test_merging_in_the_encoder_is_averaging_its_full_grid(family, kind, retain):
    feed, model, bare = zoo.inputs(family, kind), oracle.subject(family), oracle.bare(family)
    WatchedToMe.targets.clear()
    with accelerated(model, Recipe("tome", (Stage("laws-tome", retain),)), processor=zoo.processor(family)):
        got = oracle.at_the_door(model, feed)
    handles: list = []
    queue = averaging_tower(family, retain, list(WatchedToMe.targets), handles)
    try:
        wanted = oracle.at_the_door(bare, feed)
    finally:
        for handle in handles:
            handle.remove()
    assert next(queue, None) is None and WatchedToMe.targets
    valid = feed["attention_mask"].bool()
    oracle.close(got["inputs_embeds"][valid], wanted["inputs_embeds"][valid], what="embeddings")
    plain = oracle.at_the_door(bare, feed)["inputs_embeds"]
    oracle.apart(got["inputs_embeds"][oracle.visual(family, feed)], plain[oracle.visual(family, feed)])


@pytest.mark.parametrize(("family", "kind"), cases(oracle.MERGEABLE, KINDS), ids=str)
def test_the_door_keeps_one_token_of_each_group(family, kind):
    feed, model = zoo.inputs(family, kind), oracle.subject(family)
    forced = oracle.force(family, len(feed["input_ids"]))
    what = oracle.recipe("tome", family, 0.5)
    got = oracle.record(family, feed, what, forced)
    with accelerated(model, what, processor=zoo.processor(family)):
        merged = oracle.at_the_door(model, feed)["inputs_embeds"]
    length = merged.shape[1]

    def change(kwargs):
        kwargs["inputs_embeds"] = torch.cat([merged, kwargs["inputs_embeds"][:, length:]], dim=1)
        return kwargs

    prompt, steps = oracle.replay(family, feed, forced, got.seen, change)
    oracle.close(got.prompt[got.kept], prompt[got.kept])
    oracle.close(got.steps, steps)
    assert torch.equal(got.prompt.isnan().any(-1), feed["attention_mask"].bool() & ~got.kept)
    oracle.apart(got.steps, oracle.replay(family, feed, forced, got.seen)[1])
    visual = oracle.visual(family, feed)
    dropped = visual & ~got.kept
    assert dropped.any()
    if family in ("llava", "video_llava") and kind in ("image", "images", "uneven"):
        # one token a patch: what was dropped is what an earlier kept place of the same picture holds
        side = 36 if family == "llava" else 16
        for row in range(len(visual)):
            for picture in visual[row].nonzero()[:, 0].split(side):
                held = merged[row, picture]
                alike = (held[:, None] - held[None]).abs().amax(-1) < 1e-5
                first = alike.long().argmax(1)
                assert torch.equal(got.kept[row, picture], first == torch.arange(side))
                assert int(got.kept[row, picture].sum()) == side // 2


# -------------------------------------------------------------------------------------------------------- renumbering


@pytest.mark.parametrize(("family", "kind"), cases(zoo.FAMILIES, ("image", "images", "video", "mixed", "uneven")))
@pytest.mark.parametrize("name", ("random", "pool"))
def test_paper_positions_are_a_fresh_short_prompt(family, kind, name):
    feed, bare = zoo.inputs(family, kind), oracle.bare(family)
    forced = oracle.force(family, len(feed["input_ids"]))
    what = oracle.recipe(name, family).override(positions="paper")
    got = oracle.record(family, feed, what, forced)
    keep = oracle.record(family, feed, oracle.recipe(name, family), forced)
    assert torch.equal(got.kept, keep.kept)
    full = oracle.at_the_door(bare, feed)
    change = substituted(got.reduction.owner(), got.kept)
    full = change(dict(full))
    table = bare.get_input_embeddings()
    visual, done = oracle.visual(family, feed), 0
    for row, kept in enumerate(got.kept):
        embeds = torch.cat([full["inputs_embeds"][row, kept], table(forced[row, :-1])])[None]
        length = embeds.shape[1]
        extra = {}
        if full.get("deepstack_visual_embeds") is not None:
            mine = slice(done, done + int(visual[row].sum()))
            stays = kept[visual[row]]
            extra["deepstack_visual_embeds"] = [f[mine][stays] for f in full["deepstack_visual_embeds"]]
            extra["visual_pos_masks"] = torch.cat([visual[row, kept], torch.zeros(length - int(kept.sum())).bool()])[
                None
            ]
            done = mine.stop
        positions = torch.arange(length)[None]
        if family.startswith("qwen"):
            positions = positions.expand(3, 1, -1)
        out = oracle.text_model(bare)(inputs_embeds=embeds, position_ids=positions, use_cache=False, **extra)
        logits = bare.lm_head(out.last_hidden_state)[0]
        oracle.close(got.prompt[row, kept], logits[: int(kept.sum())])
        oracle.close(got.steps[row], logits[int(kept.sum()) - 1 :])
    # positions matter, or renumbering proves nothing
    oracle.apart(got.steps, keep.steps)


@pytest.mark.parametrize("name", ("fastv", "snapkv", "streaming-llm"))
@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl", "qwen3_vl"))
def test_paper_positions_leave_a_whole_prompt_alone(family, name):
    """FastV and the cache policies keep the positions of the prompt: with everything kept nothing may change."""
    feed, forced = zoo.inputs(family), oracle.force(family, 1)
    got = oracle.record(family, feed, oracle.recipe(name, family, 1.0).override(positions="paper"), forced)
    oracle.close(got.steps, oracle.decode(oracle.bare(family), feed, forced)[0])
