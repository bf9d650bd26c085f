"""Prompts that lower layers read in chunks: as the bare model's layers by hand, chunk by chunk; turns, batches, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from laws.helpers import close, follow, generate, inputs, logits, text_model
from torch import Tensor
from transformers import DynamicCache

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.core.budget import resolve

pytestmark = [pytest.mark.usefixtures("no_gradients")]

#: where the layers of a tiny model make two levels that join
DEEP = {"layer": 1}


# ------------------------------------------------------------------------------------------------------------- by hand
@dataclass
class Node:
    """A chunk, or several that have joined: hidden states ``[s, D]``, positions ``[axes, s]`` and places ``[s]`` of its tokens,
    and keys and values ``[s, heads, d]`` of the layers that have read it."""

    hidden: Tensor
    positions: Tensor
    places: Tensor
    paid: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def of(self, kept: Tensor) -> Node:
        """Only these slots."""
        cached = ([x[kept] for x in part] for part in (self.keys, self.values))
        return Node(self.hidden[kept], self.positions[:, kept], self.places[kept], self.paid, *cached)


class ByHand:
    """One prompt with one picture or clip, read by the layers of a bare model one chunk after the other, as a tree.

    Parameters
    ----------
    levels : that join. keep : how many visual tokens are to be left in the end.
    layer : those below it belong to the lowest level.
    past : keys and values ``[s, heads, d]`` of every layer that come before; start : the position of what comes behind them.
    """

    def __init__(
        self,
        family: str,
        feed: Any,
        levels: int,
        keep: int,
        layer: int,
        past: list[tuple[Tensor, Tensor]] | None = None,
        start: int = 0,
    ) -> None:
        self.model, self.past = zoo.model(family), past
        self.model.set_attn_implementation({"text_config": "eager"})
        self.text = text_model(self.model)
        self.keep = keep
        seen: list[dict[str, Any]] = []
        hook = self.text.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
        self.model(**feed)
        hook.remove()
        self.embeds, length = seen[0]["inputs_embeds"][0], feed["input_ids"].shape[1]
        positions = seen[0]["position_ids"]
        positions = torch.arange(length)[None] if positions is None else positions
        self.positions = (positions[-3:, 0] if positions.dim() == 3 else positions) + start
        self.visual = zoo.visual_mask(family, self.model, feed["input_ids"])[0]
        at = self.visual.nonzero()[:, 0]
        self.begin, self.end = int(at[0]), int(at[-1]) + 1
        depth = len(self.text.layers)
        each = (depth - layer) // (levels + 1)
        # which layers every level reads, the lowest first
        self.layers = [range(depth - each * levels)]
        self.layers += [range(depth - each * (n + 1), depth - each * n) for n in range(levels - 1, -1, -1)]
        self.size = -(-(self.end - self.begin) // 2**levels)
        self.chunks = [
            torch.arange(first, min(first + self.size, self.end)) for first in range(self.begin, self.end, self.size)
        ]
        # time begins anew in every chunk; rows and columns of the one picture go on
        starts = [int(self.positions[0, chunk].min()) for chunk in self.chunks]
        self.moves = [start - starts[0] for start in starts]
        reach = max(
            [int(self.positions[0, c].max()) - m for c, m in zip(self.chunks, self.moves, strict=True)]
            + self.positions[1:, self.begin : self.end].flatten().tolist()
        )
        # frames of a slow clip stand later than the question, which then stays where it is
        self.behind = max(0, int(self.positions[:, self.end :].min()) - reach - 1)
        self.deep = []
        for features in seen[0].get("deepstack_visual_embeds") or ():
            plane = torch.zeros_like(self.embeds)
            plane[self.visual] = features
            self.deep.append(plane)
        self.root = self.read(levels, 0, len(self.chunks))

    def leaf(self, number: int) -> Node:
        """A chunk before the first layer."""
        chunk = self.chunks[number]
        places = torch.cat([torch.arange(self.begin), chunk, torch.arange(self.end, len(self.embeds))])
        positions = self.positions[:, places].clone()
        positions[0, (places >= self.begin) & (places < self.end)] -= self.moves[number]
        positions[:, places >= self.end] -= self.behind
        return Node(self.embeds[places], positions, places)

    def read(self, level: int, first: int, last: int) -> Node:
        """Chunks ``first`` to ``last``, joined, behind the layers of a level."""
        if level == 0:
            node = self.leaf(first)
        else:
            middle = first + 2 ** (level - 1)
            left = self.read(level - 1, first, middle)
            node = self.join(left, self.read(level - 1, middle, last)) if middle < last else left
        for number in self.layers[level]:
            self.through(node, number)
        return node

    def through(self, node: Node, number: int) -> None:
        """One layer."""
        size, weights = len(node.hidden), list[Tensor]()
        cache, before = self.cache(number)
        layer = self.text.layers[number]
        hook = layer.self_attn.register_forward_hook(lambda _, args, output: weights.append(output[1]))
        hidden = node.hidden[None]
        mask = torch.full((size, before + size), torch.finfo(torch.float32).min).triu(before + 1)[None, None]
        node.hidden = layer(
            hidden,
            attention_mask=mask,
            position_embeddings=self.turns(hidden, node.positions),
            past_key_values=cache,
            use_cache=True,
        )[0]
        if number < len(self.deep):
            node.hidden = node.hidden + self.deep[number][node.places]
        hook.remove()
        node.paid = weights[0][0, :, -1, before:]
        node.keys.append(cache.layers[number].keys[0, :, before:].transpose(0, 1))
        node.values.append(cache.layers[number].values[0, :, before:].transpose(0, 1))

    def cache(self, number: int) -> tuple[DynamicCache, int]:
        """What a layer has stored before, and how many tokens that is."""
        cache = DynamicCache()
        if self.past is None:
            return cache, 0
        cache.update(*(x.transpose(0, 1)[None] for x in self.past[number]), number)
        return cache, len(self.past[number][0])

    def turns(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions ``[axes, s]``."""
        positions = positions[:, None]
        return self.text.rotary_emb(hidden, positions if len(positions) == 3 else positions[0])

    def join(self, left: Node, right: Node) -> Node:
        """Both without their weakest tokens, text once."""
        there = [int(self.visual[node.places].sum()) for node in (left, right)]
        mine = min(self.keep // 2, there[1])
        other = min(self.keep - mine, there[0])
        left, right = self.drop(left, other), self.drop(right, min(self.keep - other, there[1]))
        behind = len(self.embeds) - self.end

        def both(x: Tensor, y: Tensor) -> Tensor:
            """Text before, both parts of the middle, text behind."""
            before, after = (
                (x[: self.begin] + y[: self.begin]) / 2,
                (x[len(x) - behind :] + y[len(y) - behind :]) / 2,
            )
            return torch.cat([before, x[self.begin : len(x) - behind], y[self.begin : len(y) - behind], after])

        return Node(
            both(left.hidden, right.hidden),
            both(left.positions.T, right.positions.T).T.long(),
            both(left.places, right.places).long(),
            torch.empty(0),
            [both(*pair) for pair in zip(left.keys, right.keys, strict=True)],
            [both(*pair) for pair in zip(left.values, right.values, strict=True)],
        )

    def drop(self, node: Node, count: int) -> Node:
        """The visual tokens that the last token attends to most with one of its heads, and all text."""
        visual = self.visual[node.places]
        rank = node.paid.amax(0).masked_fill(~visual, -1).argsort(descending=True, stable=True)
        kept = ~visual
        kept[rank[:count]] = True
        return node.of(kept)

    def steps(self, forced: Tensor) -> Tensor:
        """Logits ``[steps, V]`` of the last token and of those that are ``forced [steps]`` behind it, but for the last."""
        cache, root = DynamicCache(), self.root
        for number, own in enumerate(zip(root.keys, root.values, strict=True)):
            parts = [own] if self.past is None else [self.past[number], own]
            keys, values = (torch.cat(x).transpose(0, 1)[None] for x in zip(*parts, strict=True))
            cache.update(keys, values, number)
        found, last = [self.head(root.hidden[-1:])], root.positions[:1, -1:]
        for step, token in enumerate(forced[:-1]):
            hidden = self.text.embed_tokens(token[None, None])
            turned = self.turns(hidden, (last + 1 + step).expand(len(root.positions), 1))
            for layer in self.text.layers:
                hidden = layer(
                    hidden, attention_mask=None, position_embeddings=turned, past_key_values=cache, use_cache=True
                )
            found.append(self.head(hidden[0]))
        return torch.cat(found)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(self.text.norm(hidden))


def long_clip(family: str, frames: int = 8) -> Any:
    """A clip of so many frames."""
    spec = zoo._family(family)
    return dict(zoo.encode(family, [([], [zoo.clip(frames, *spec.clip[1:], 5)], zoo.QUESTION)]))


@pytest.mark.parametrize(
    ("family", "kind", "retain", "options", "levels"),
    [
        ("llava", "image", 0.25, DEEP, 2),
        ("llava", "image", 0.3, {}, 1),
        ("llava", "image", 0.7, DEEP, 1),
        ("llava", "image", 0.9, DEEP | {"length": 9}, 2),
        ("qwen2_vl", "image", 0.25, DEEP, 2),
        ("qwen2_vl", "clip", 0.25, DEEP, 2),
        ("qwen2_vl", "clip", 0.4, {}, 1),
        ("qwen2_5_vl", "clip", 0.25, DEEP, 2),
        ("llava_onevision", "video", 0.3, DEEP, 2),
        ("internvl", "video", 0.3, DEEP, 2),
        ("qwen3_vl", "image", 0.3, {}, 1),
    ],
)
def test_a_tree_of_the_bare_models_layers(
    family: str, kind: str, retain: float, options: dict[str, Any], levels: int
) -> None:
    feed = long_clip(family) if kind == "clip" else inputs(family, kind)
    forced = oracle.force(family, 1, 5)
    with accelerated(
        oracle.subject(family), "homer", processor=zoo.processor(family), retain=retain, **options
    ) as model:
        steps, cache = oracle.decode(model, feed, forced)
        handle = model.mmaccel
        layer, kept = handle.plan.chunks.method.layer, handle.reduction.kept[0]
        visual = int(oracle.visual(family, feed).sum())
        wanted = ByHand(family, feed, levels, resolve(retain, visual), layer)
        assert torch.equal(wanted.root.places, kept.nonzero()[:, 0])
        close(steps[0], wanted.steps(forced[0]), 1e-5)
        for stored, keys, values in zip(cache.layers, wanted.root.keys, wanted.root.values, strict=True):
            close(stored.keys[0, :, : len(keys)].transpose(0, 1), keys, 1e-5)
            close(stored.values[0, :, : len(keys)].transpose(0, 1), values, 1e-5)
        assert cache.get_seq_length() == feed["input_ids"].shape[1] + 4
        assert [stage["tokens_kept"] for stage in handle.stats()["stages"]] == [resolve(retain, visual)]


def test_chunks_of_whole_frames_stand_as_prompts_of_their_own() -> None:
    """With M-RoPE a group of frames has the positions that the model gives a clip of these alone."""
    feed, family = long_clip("qwen2_vl"), "qwen2_vl"
    tiny, seen = oracle.subject(family), list[Tensor]()
    with accelerated(tiny, "homer", retain=0.25, **DEEP), positions_of(tiny, seen):
        tiny(**feed)
    assert feed["video_grid_thw"].tolist() == [[4, 6, 8]] and seen[0].shape[1] == 4
    ids = feed["input_ids"]
    video = zoo.visual_mask(family, tiny, ids)[0].nonzero()[:, 0]
    # four frames of twelve tokens
    places = torch.cat([torch.arange(int(video[0]) + 12), torch.arange(int(video[-1]) + 1, ids.shape[1])])
    alone, _ = tiny.model.get_rope_index(
        ids[:, places], feed["mm_token_type_ids"][:, places], video_grid_thw=torch.tensor([[1, 6, 8]])
    )
    assert all(torch.equal(seen[0][-3:, chunk], alone[:, 0]) for chunk in range(4))


# ---------------------------------------------------------------------------------------------------------- positions
@contextmanager
def positions_of(tiny: Any, seen: list[Tensor]) -> Iterator[None]:
    """Notes what RoPE turns by in every forward, ``[axes, rows, q]`` each."""

    def note(module: Any, args: Any, kwargs: Any) -> None:
        given = args[1] if len(args) > 1 else kwargs["position_ids"]
        seen.append(given if given.dim() == 3 else given[None])

    hook = text_model(tiny).rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("retain", (0.25, 1.0))
@pytest.mark.parametrize(("family", "kind"), [("llava", "images"), ("llava_onevision", "video"), ("qwen2_vl", "clip")])
def test_a_prompt_beyond_the_models_positions(family: str, kind: str, retain: float) -> None:
    """No position is beyond them, in the prompt and behind it, and what follows goes on where the text ends."""
    # 48 times, so that they and not the text are what is long
    feed = long_clip(family, 96) if kind == "clip" else inputs(family, kind)
    bare, seen = zoo.model(family), list[Tensor]()
    with positions_of(bare, seen):
        generate(bare, feed)
    longest = 1 + max(int(x.max()) for x in seen)
    limit = longest - 10
    tiny, seen = zoo.model(family, max_position_embeddings=limit), []
    with accelerated(tiny, "homer", processor=zoo.processor(family), retain=retain, **DEEP), positions_of(tiny, seen):
        out = generate(tiny, feed)
        stats = tiny.mmaccel.stats()
    assert max(int(x.max()) for x in seen) < limit
    last = int(seen[0][-3:, :, -1].max())
    assert [int(x.max()) for x in seen[1:]] == [last + 1, last + 2, last + 3]
    assert out.past_key_values.get_seq_length() == feed["input_ids"].shape[1] + 3
    assert "chunks of at most" in stats["notes"][0] and not any("still go up" in note for note in stats["notes"])
    assert logits(out).isfinite().all()


def test_a_text_that_is_too_long_is_told() -> None:
    tiny = zoo.model("llava", max_position_embeddings=24)
    with accelerated(tiny, "homer", retain=0.5):
        tiny(**inputs("llava"))
        assert any(
            "positions still go up to" in note and "model has 24" in note for note in tiny.mmaccel.stats()["notes"]
        )


# -------------------------------------------------------------------------------------------------------------- turns
@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl", "internvl", "qwen3_vl"))
def test_a_picture_behind_a_turn_of_text_is_one_call(family: str) -> None:
    """All chunks of the one call read the first turn, each for itself."""
    first, second = inputs(family, "text"), inputs(family)
    tiny = oracle.subject(family)
    with accelerated(tiny, "homer", processor=zoo.processor(family), retain=0.3):
        answer = generate(tiny, first)
        kept, whole = follow(first, answer, second)
        turned = generate(tiny, kept, past_key_values=answer.past_key_values)
        close(logits(turned), logits(generate(tiny, whole)))
        again = turned.past_key_values.mmaccel
    assert again.layers[0].index.upto == again.seen and len({len(layer.index) for layer in again.layers}) == 1


def test_a_second_picture_by_hand() -> None:
    """What chunks of a new picture read of a first one that was joined, each of them all of it."""
    first, second = inputs("llava"), inputs("llava", seed=3)
    tiny = oracle.subject("llava")
    with accelerated(tiny, "homer", retain=0.25, **DEEP):
        answer = generate(tiny, first)
        state = answer.past_key_values.mmaccel
        past = [tuple(x[0].transpose(0, 1).clone() for x in layer.stored()) for layer in state.layers]
        start = int(state.seen - state.positions.offset[0])
        kept, _ = follow(first, answer, second)
        turned = generate(tiny, kept, past_key_values=answer.past_key_values)
        left = tiny.mmaccel.reduction.kept[0]
    new = dict(second, input_ids=torch.cat([answer.sequences[:, -1:], second["input_ids"]], dim=1))
    new["attention_mask"] = torch.ones_like(new["input_ids"])
    wanted = ByHand("llava", new, 2, 9, 1, past, start)
    assert torch.equal(wanted.root.places, left.nonzero()[:, 0])
    close(logits(turned)[0], wanted.steps(turned.sequences[0, -4:]), 1e-5)
    assert start < state.seen - 4


@pytest.mark.parametrize("family", ("llava", "qwen2_vl"))
def test_rows_of_a_second_turn_are_the_rows_alone(family: str) -> None:
    feed, second = inputs(family, "uneven"), inputs(family, "uneven", seed=3)
    with accelerated(oracle.subject(family), "homer", processor=zoo.processor(family), retain=0.3) as tiny:
        answer = generate(tiny, feed, min_new_tokens=4)
        kept, _ = follow(feed, answer, second)
        both = logits(generate(tiny, kept, past_key_values=answer.past_key_values, min_new_tokens=4))
        for row in range(2):
            alone, new = (zoo.single(family, x, row) for x in (feed, second))
            answer = generate(tiny, alone, min_new_tokens=4)
            kept, _ = follow(alone, answer, new)
            close(logits(generate(tiny, kept, past_key_values=answer.past_key_values, min_new_tokens=4))[0], both[row])


@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
def test_loops_beams_and_no_cache(family: str) -> None:
    """A loop of the caller's own, one token and several at a time; beams that change places; a forward that stores nothing."""
    feed, tiny = inputs(family, "uneven"), oracle.subject(family)
    forced = oracle.force(family, 2, 7)
    with accelerated(tiny, "homer", processor=zoo.processor(family), retain=0.3):
        steps, _ = oracle.decode(tiny, feed, forced)
        where = oracle.counted(family, feed)
        out = tiny(**feed, **where, use_cache=True)
        got, at = [out.logits[:, -1:]], 0
        close(tiny(**feed, **where, use_cache=False).logits[:, -1:], got[0])
        for size in (2, 1, 3):
            new = forced[:, at : at + size]
            out, at = tiny(input_ids=new, past_key_values=out.past_key_values, use_cache=True), at + size
            got.append(out.logits)
        close(torch.cat(got, dim=1), steps)
        beams = tiny.generate(
            **feed, max_new_tokens=4, num_beams=3, output_logits=True, return_dict_in_generate=True, do_sample=False
        )
        tokens, ways = beams.sequences[:, feed["input_ids"].shape[1] :], beams.beam_indices[:, : len(beams.logits)]
        shown = torch.stack(beams.logits, dim=1)[ways, torch.arange(len(beams.logits))]
        close(shown, oracle.decode(tiny, feed, tokens)[0])


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("family", "what", "says"),
    [
        ("qwen3_5", "homer", "recurrent state, and two states do not join"),
        ("gemma3", "homer", "attend to each other both ways"),
        ("paligemma", "homer", "attend to each other both ways"),
        ("aya_vision", "homer", "sliding windows, which count places"),
        ("llava", ("homer", "fastv"), "cannot combine 'homer' with 'fastv': .* needs a prompt in one piece there"),
        ("llava", ("homer", "snapkv"), "leave out one of them"),
        ("llava", ("homer", "fp8"), "leave out one of them"),
        ("qwen3_vl", Stage("homer", 0.3, {"layer": 1}), "takes 2 to 2; give layer=2"),
        ("llava", Stage("homer", 0.3, {"layer": 3}), "takes 0 to 2; give layer=2"),
        (
            "llava",
            Stage("homer", 0.3, {"layer": -1}),
            "`layer` of homer must be an int, at least 0, or a share .* got -1",
        ),
        ("llava", Stage("homer", 0.3, {"length": -1}), "`length` of homer must be at least 0, got -1"),
        ("llava", Stage("homer", 0.3, {"bias": ((0.0,), (0.0,))}), "rows for 2 layers, and this llava model has 4"),
        ("llava", Stage("homer", 0.3, {"bias": ((),)}), "a row of bias has no value"),
    ],
)
def test_what_cannot_be_is_refused(family: str, what: Any, says: str) -> None:
    stages = (
        (what,)
        if isinstance(what, Stage)
        else tuple(Stage(name, None if name == "fp8" else 0.3) for name in ((what,) if isinstance(what, str) else what))
    )
    with pytest.raises(MmaccelError, match=says):
        accelerate_vlm(oracle.subject(family), Recipe("mine", stages), processor=zoo.processor(family))


def test_windows_of_other_language_models_are_refused() -> None:
    for family, given in oracle.WINDOWED:
        with pytest.raises(UnsupportedError, match="sliding windows"):
            accelerate_vlm(oracle.subject(family, **given), "homer", processor=zoo.processor(family))


def test_drafts_by_lookup_are_refused() -> None:
    with (
        accelerated(oracle.subject("llava"), "homer") as tiny,
        pytest.raises(UnsupportedError, match="Assisted decoding"),
    ):
        tiny.generate(**inputs("llava"), max_new_tokens=4, prompt_lookup_num_tokens=2)


# ------------------------------------------------------------------------------------------------------ what it is told
def test_figures_of_a_call() -> None:
    feed = inputs("llava", "images")
    with accelerated(oracle.subject("llava"), "homer", retain=0.25, **DEEP) as tiny:
        tiny(**feed)
        stats, history = tiny.mmaccel.stats(), tiny.mmaccel.history
        assert [passage.layer for passage in history] == [2, 3]
        counts = [int((passage.reduction.kept & tiny.mmaccel.layout.visual).sum()) for passage in history]
        # two pictures of 36 tokens in four chunks of 18 or 19 with the text between: each chunk keeps at most half of 9
        assert counts[1] == 18 == stats["stages"][0]["tokens_kept"] and stats["stages"][0]["tokens_in"] == 72
        assert stats["visual_tokens_per_layer"] == (2 * 72 + sum(counts)) / 4
        assert stats["notes"] == [
            "homer read 1 prompt as 4 chunks of at most 19 tokens between copies of the text, which join before layers 2, 3"
        ]
        assert set(history[0].scores()) == {"significance"}


def test_other_stages_come_before() -> None:
    """What is left of pictures in front of the language model is cut; a share is one of all tokens."""
    stages = (Stage("tome", 0.75), Stage("divprune", 0.5), Stage("homer", 0.25, DEEP))
    with accelerated(oracle.subject("llava"), Recipe("three", stages)) as tiny:
        generate(tiny, inputs("llava", "uneven"))
        assert [stage["tokens_kept"] for stage in tiny.mmaccel.stats()["stages"]] == [81, 54, 27]
