"""Law 2 for merging and renumbering: values substituted by hand, an averaged full grid, a fresh short prompt."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import oracle
import pytest
import synthetic
import torch
import zoo
from laws.helpers import PACKED, has_block, on_axes
from torch import Tensor

from mmaccel import Recipe, Stage, accelerated, get_method, register
from mmaccel.core.reduction import Reduction
from mmaccel.families import family_of
from mmaccel.method import EncoderMethod, LayerMethod, ProjectorMethod, Tap, TokenBatch
from mmaccel.runtime.call.vision_output import VisionOutput
from mmaccel.runtime.tower.merged import Merged

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
        return oracle.with_planes(kwargs, length, lambda plane: averaged(plane, owner, kept))

    return change


@pytest.mark.square(("family", "kind"), cases(zoo.FAMILIES, KINDS), ids=str)
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
    layer = {"layer": oracle.first_layer(family)}
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


@dataclass
class Merge:
    """What one layer of an accelerated tower decided, `holder [S0]`: in whose place the group of every token stands."""

    run: int
    layer: int
    holder: Tensor


@contextmanager
def watched_merges():
    """Note every merge of every tower that runs, in order."""
    found: list[Merge] = []
    runs: dict[int, Merged] = {}
    original = Merged.merge

    def merge(self, *args):
        run = next((i for i, seen in runs.items() if seen is self), len(runs))
        runs[run] = self
        layer = self.layer
        hidden = original(self, *args)
        found.append(Merge(run, layer, self.place[self.owner]))
        return hidden

    Merged.merge = merge
    try:
        yield found
    finally:
        Merged.merge = original


def grouped(values: Tensor, holder: Tensor) -> Tensor:
    """`values [..., C]` with the mean of its group at every place."""
    flat = values.flatten(0, -2)
    total = torch.zeros_like(flat).index_add(0, holder, flat)
    count = torch.zeros(len(flat)).index_add(0, holder, torch.ones(len(flat)))
    return (total / count.clamp(min=1)[:, None])[holder].view(values.shape)


def averaging_tower(family: str, merges: list[Merge], handles: list) -> list[Merge]:
    """Hooks that put the mean of its group at every place of the bare tower's full grid, behind the attention of each
    merging layer and behind its MLP.

    Attention over n equal tokens is what proportional attention gives to one that stands for n: the same features must
    come out. In packed towers the members of a group move beside their holder, into its window, and take its rotation.
    """
    adapter, left = family_of(oracle.bare(family)), list(merges)
    at: dict = {"run": -1, "holder": None, "order": None}

    def enter(module, args, kwargs, number):
        if number == 0:
            # runs in which everything stays are not watched
            at.update(run=at["run"] + 1, holder=None)
        at["merges"], at["order"] = False, None
        if at["holder"] is None or (args[0].dim() == 3 and not adapter.one_call):
            return None
        holder = at["holder"]
        at["order"] = order = holder.argsort(stable=True)
        kwargs = dict(kwargs)
        if "position_embeddings" in kwargs:
            kwargs["position_embeddings"] = tuple(x[holder][order] for x in kwargs["position_embeddings"])
        if adapter.one_call:
            # members of a group are of one picture, so that the mask stays what it is
            return (args[0][:, order], *args[1:]), kwargs
        bounds = [int((holder < bound).sum()) for bound in kwargs["cu_seqlens"].tolist()]
        kwargs["cu_seqlens"] = torch.tensor(sorted(set(bounds)), dtype=torch.int32)
        return (args[0][order],), kwargs

    def between(module, args, number):
        if not left or (left[0].run, adapter.merging_layers()[left[0].layer]) != (at["run"], number):
            return None
        at["holder"], at["merges"] = left.pop(0).holder, True
        if at["order"] is None:
            return (grouped(args[0], at["holder"]),)
        hidden = torch.empty_like(args[0])
        hidden[..., at["order"], :] = args[0]
        return (grouped(hidden, at["holder"])[..., at["order"], :],)

    def leave(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if at["order"] is not None:
            hidden = torch.empty_like(hidden).index_copy(-2, at["order"], hidden)
        hidden = grouped(hidden, at["holder"]) if at["merges"] else hidden
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    for tower in adapter.towers():
        for number, layer in enumerate(adapter.tower_layers(tower)[: adapter.feature_layer + 1]):
            handles.append(layer.register_forward_pre_hook(partial(enter, number=number), with_kwargs=True))
            norm = adapter.second_half(layer)[0]
            handles.append(norm.register_forward_pre_hook(partial(between, number=number)))
            handles.append(layer.register_forward_hook(leave, prepend=True))
    return left


@pytest.mark.square(("family", "kind"), cases(oracle.MERGING, KINDS), ids=str)
@pytest.mark.square("name", [name for name, m in synthetic.offered(EncoderMethod).items() if m.proportional])
@pytest.mark.square("retain", (0.5, 0.35))
def test_merging_in_the_encoder_is_averaging_its_full_grid(family, kind, name, retain):
    feed, model, bare = zoo.inputs(family, kind), oracle.subject(family), oracle.bare(family)
    with accelerated(model, name, retain=retain, processor=zoo.processor(family)), watched_merges() as merges:
        got = oracle.at_the_door(model, feed)
    assert merges
    handles: list = []
    left = averaging_tower(family, merges, handles)
    try:
        wanted = oracle.at_the_door(bare, feed)
    finally:
        for handle in handles:
            handle.remove()
    assert not left
    valid, visual = feed["attention_mask"].bool(), oracle.visual(family, feed)
    oracle.close(got["inputs_embeds"][valid], wanted["inputs_embeds"][valid], what="embeddings")
    plain = oracle.at_the_door(bare, feed)
    oracle.apart(got["inputs_embeds"][visual], plain["inputs_embeds"][visual])
    if family.startswith(("qwen3_vl", "qwen3_omni", "cosmos3_omni", "cohere_compass")):
        for mine, theirs in zip(got["deepstack_visual_embeds"], wanted["deepstack_visual_embeds"], strict=True):
            oracle.close(mine, theirs, what="DeepStack features")
        oracle.apart(got["deepstack_visual_embeds"][-1], plain["deepstack_visual_embeds"][-1])


@pytest.mark.square(
    ("family", "kind", "name"),
    [
        (*case, name)
        for case in cases(zoo.FAMILIES, KINDS)
        for name in oracle.named(EncoderMethod)
        if oracle.fits(name, case[0])
    ],
)
def test_the_door_keeps_one_token_of_each_group(family, kind, name):
    """Where groups are more than the budget (tiles that were cropped, newlines) they merge once more at the door."""
    feed, model = zoo.inputs(family, kind), oracle.subject(family)
    forced = oracle.force(family, len(feed["input_ids"]))
    what = oracle.recipe(name, family, 0.5)
    got = oracle.record(family, feed, what, forced)
    with accelerated(model, what, processor=zoo.processor(family)):
        door = oracle.at_the_door(model, feed)
        stage = model.mmaccel.stats()["stages"][0]
        layout = model.mmaccel.layout
    merged, owner = door["inputs_embeds"], got.reduction.owner()
    length = merged.shape[1]
    # the members of a group hold one value, so the whole map, written out, gives what stands at the kept places
    links, settled = got.reduction.full_links(), torch.zeros_like(merged)
    parts = links.weight[:, None] * merged[links.batch, links.source]
    settled.index_put_((links.batch, links.slot), parts, accumulate=True)

    def change(kwargs):
        kwargs["inputs_embeds"] = torch.cat([settled, kwargs["inputs_embeds"][:, length:]], dim=1)
        if family.startswith(("qwen3_vl", "qwen3_omni", "cosmos3_omni", "cohere_compass")):
            # groups were smaller where DeepStack looked: what the door keeps is the mean of what they were
            kwargs["deepstack_visual_embeds"] = door["deepstack_visual_embeds"]
        return oracle.with_planes(kwargs, length, lambda plane: averaged(plane, owner, got.kept))

    prompt, steps = oracle.replay(family, feed, forced, got.seen, change)
    oracle.close(got.prompt[got.kept], prompt[got.kept])
    oracle.close(got.steps, steps)
    assert torch.equal(got.prompt.isnan().any(-1), feed["attention_mask"].bool() & ~got.kept)
    oracle.apart(got.steps, oracle.replay(family, feed, forced, got.seen)[1])
    visual = oracle.visual(family, feed)
    dropped = visual & ~got.kept
    assert dropped.any() and stage["resolved"] == stage["tokens_kept"] < stage["tokens_in"]
    assert stage["tokens_kept"] == int((got.kept & visual).sum())
    celled = torch.zeros_like(visual)
    for segment in layout.segments:
        celled[segment.row, segment.places] = segment.tile.cells[:, 0] >= 0
    # half of a tile is a whole number, and none is cropped
    grids = family in ("llava", "video_llava", "internvl", *PACKED, *oracle.ONE_CALL) and celled[visual].all()
    blends = kind in ("video", "mixed") and family in ("llava_onevision", "llava_next_video")
    for row, place in dropped.nonzero().tolist():
        # what was dropped is held, value by value, by the token it is said to flow into
        if (into := int(owner[row, place])) >= 0 and grids:
            oracle.close(merged[row, place], merged[row, into], what="a member and its group")
        else:
            assert into >= 0 or blends or not celled[row, place]


@register
@dataclass(frozen=True)
class Look(ProjectorMethod):
    """Keeps everything, and what the taps saw of an early layer with all tokens of a row in one piece."""

    name = "laws-look"
    seen: ClassVar[list[TokenBatch]] = []

    def taps(self):
        return (Tap("features", (1,)), Tap("keys", (2,)))

    def reduce(self, tokens, count):
        self.seen.append(tokens)
        return Reduction.identity(tokens.valid)


def looked(family, feed):
    """`[kept tokens, D]` features behind layer 1 and keys of layer 2, with what stayed at the door."""
    Look.seen.clear()
    model, what = oracle.subject(family), Recipe("look", (Stage("tome", 0.5), Stage("laws-look", 1.0)))
    with accelerated(model, what, processor=zoo.processor(family)), watched_merges() as merges:
        model(**feed)
        kept = model.mmaccel.reduction.kept
    (tokens,) = Look.seen
    celled = tokens.valid & (tokens.cells[..., 0] >= 0)
    return tokens.signals["features"][:, 0][celled], tokens.signals["keys"][:, 0][celled], kept, merges


TAPPED = ("llava", *(name for name in PACKED if name in oracle.MERGING), *oracle.ONE_CALL, "internvl", "smolvlm")


def asked(feed) -> VisionOutput:
    """What the tower of pictures was given of their sizes."""
    names = "image_grid_thw", "image_merge_sizes", "image_sizes"
    return VisionOutput({name: feed[name] for name in names if name in feed})


@pytest.mark.parametrize("family", TAPPED)
def test_taps_behind_a_merge_see_the_full_grid(family):
    """Features are those of the bare tower with averaged groups, place by place."""
    feed, bare = zoo.inputs(family, "images"), oracle.bare(family)
    adapter, caught, handles = family_of(bare, zoo.processor(family)), [], []
    got, _, kept, merges = looked(family, feed)
    averaging_tower(family, merges, handles)
    layer = adapter.tower_layers(adapter.towers()[0])[1]
    handles.append(layer.register_forward_hook(lambda module, args, out: caught.append(out)))
    try:
        bare(**feed)
    finally:
        for handle in handles:
            handle.remove()
    hidden = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    hidden = hidden[None] if hidden.dim() == 2 else hidden[:, int(adapter.has_cls) :]
    found = kept[oracle.visual(family, feed)][has_block(family, feed)]
    wanted = adapter.to_tokens("image", asked(feed), [hidden])[found]
    oracle.close(got, wanted, what="features")


@pytest.mark.parametrize("family", TAPPED)
def test_taps_behind_a_merge_of_two_pictures_are_those_of_each(family):
    """Packed towers deliver attention frame by frame, or window by window."""
    feed = zoo.inputs(family, "uneven")
    _, keys, _, _ = looked(family, feed)
    alone = [looked(family, zoo.single(family, feed, row))[1] for row in range(len(feed["input_ids"]))]
    oracle.close(keys, torch.cat(alone), what="keys")


@pytest.mark.parametrize("family", TAPPED)
def test_a_group_stands_where_its_merged_token_stood(family):
    """Cell and position of a merged token are those it had in the tower, not those of its first member."""
    feed, adapter = zoo.inputs(family, "images"), family_of(oracle.bare(family), zoo.processor(family))
    _, _, kept, merges = looked(family, feed)
    holder, cls = merges[-1].holder, int(adapter.has_cls)
    tile = len(holder) if family in (*PACKED, *oracle.ONE_CALL) else adapter.side**2 + cls
    stands = (holder == torch.arange(len(holder))).double().view(-1, tile)[:, cls:]
    wanted = adapter.to_tokens("image", asked(feed), [stands])
    assert set(wanted.tolist()) == {0.0, 1.0}, "blocks do not merge as one"
    found = kept[oracle.visual(family, feed)][has_block(family, feed)]
    assert not (found & (wanted == 0)).any()
    # half of nine tokens a tile is five, and what is over half of the picture merges at the door
    assert family == "smolvlm" or torch.equal(found, wanted > 0)


def test_a_merge_is_drawn_as_groups():
    """Not as drops: every cell of the picture belongs to a group that is there."""
    model = oracle.subject("llava")
    with accelerated(model, "tome", retain=0.5):
        model(**zoo.inputs("llava"))
        made, layout = model.mmaccel.reduction, model.mmaccel.layout
    owner = made.owner()[0, layout.segments[0].places]
    assert (owner >= 0).all() and owner.unique().numel() == 18
    assert float(made.mass()[0, layout.visual[0]].sum()) == 36.0


# -------------------------------------------------------------------------------------------------------- renumbering


@pytest.mark.square(
    ("family", "name", "kind"),
    oracle.in_turn(
        [(f, name) for f in zoo.FAMILIES for name in oracle.named(ProjectorMethod) if oracle.fits(name, f)],
        lambda family: [k for k in ("image", "images", "video", "mixed", "uneven") if k in zoo.kinds(family)],
    ),
)
def test_paper_positions_are_a_fresh_short_prompt(family, name, kind):
    feed, bare = zoo.inputs(family, kind), oracle.bare(family)
    forced = oracle.force(family, len(feed["input_ids"]))
    what = oracle.recipe(name, family).override(positions="paper")
    got = oracle.record(family, feed, what, forced)
    keep = oracle.record(family, feed, oracle.recipe(name, family), forced)
    assert torch.equal(got.kept, keep.kept)
    full = oracle.merged_inputs(oracle.at_the_door(bare, feed), got.reduction)
    table = bare.get_input_embeddings()
    visual, done, door = oracle.visual(family, feed), 0, oracle.adapter(family)
    for row, kept in enumerate(got.kept):
        embeds = torch.cat([full["inputs_embeds"][row, kept], table(forced[row, :-1])])[None]
        length = embeds.shape[1]
        after = torch.zeros(1, length - int(kept.sum()), dtype=torch.long)
        extra = door.of_tokens(feed, lambda x: torch.cat([x[row, kept][None], after], dim=1))  # noqa: B023
        if (deep := door.deep_features(full)) is not None:
            mine = slice(done, done + int(visual[row].sum()))
            stays = kept[visual[row]]
            there = torch.cat([visual[row, kept], torch.zeros(length - int(kept.sum())).bool()])[None]
            extra |= door.deep_arguments(there, [features[mine][stays] for features in deep[1]])
            done = mine.stop
        if door.masks_above:
            config, before = bare.config.get_text_config(), torch.ones(length, length, dtype=torch.bool).tril()
            ahead = before.clone()
            ahead[: int(kept.sum()), : int(kept.sum())] |= oracle.blocks(feed, config)[row][kept][:, kept]
            masks = {}
            for number, kind in enumerate(getattr(config, "layer_types", None) or ["full_attention"]):
                seen = ahead if oracle.both_ways(config, number) else before
                masks[kind] = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
            # where all layers are of one kind they share a mask
            extra["attention_mask"] = masks if hasattr(config, "layer_types") else masks["full_attention"]
        positions = on_axes(family, torch.arange(length)[None] + door.first_position)
        out = oracle.text_model(bare)(inputs_embeds=embeds, position_ids=positions, use_cache=False, **extra)
        # those of Granite are divided by a number of its own, those of Gemma 4 capped
        logits = family_of(bare).logits(out.last_hidden_state)[0]
        oracle.close(got.prompt[row, kept], logits[: int(kept.sum())])
        oracle.close(got.steps[row], logits[int(kept.sum()) - 1 :])
    # positions matter, or renumbering proves nothing
    if get_method(name).budget == "exact":
        oracle.apart(got.steps, keep.steps)


@pytest.mark.square(
    ("family", "name"),
    [
        (family, name)
        for family in ("llava", "qwen2_5_vl", "qwen3_vl")
        for name in (*oracle.named(LayerMethod), *oracle.policies_that_drop())
        if oracle.fits(name, family)
        and not get_method(name).renumbers_inside
        and get_method(name).budget in ("exact", "at_most")
    ],
)
def test_paper_positions_leave_a_whole_prompt_alone(family, name):
    """FastV and the cache policies keep the positions of the prompt: with everything kept nothing may change."""
    feed, forced = zoo.inputs(family), oracle.force(family, 1)
    got = oracle.record(family, feed, oracle.recipe(name, family, 1.0).override(positions="paper"), forced)
    oracle.close(got.steps, oracle.decode(oracle.bare(family), feed, forced)[0])
