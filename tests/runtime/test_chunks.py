"""Prompts that lower layers read in chunks: as the bare model's layers by hand, chunk by chunk; turns, batches, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from laws.helpers import close, inputs, text_model
from torch import Tensor
from transformers import DynamicCache

from mmaccel import accelerated
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
    """

    def __init__(self, family: str, feed: Any, levels: int, keep: int, layer: int, **overrides: Any) -> None:
        self.model = zoo.model(family, **overrides)
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
        self.positions = positions[-3:, 0] if positions.dim() == 3 else positions
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
        starts = [int(self.positions[:, chunk].min()) for chunk in self.chunks]
        reach = max(int(self.positions[:, c].max()) + 1 - s for c, s in zip(self.chunks, starts, strict=True))
        self.moves = [start - starts[0] for start in starts]
        behind = int(self.positions[:, self.end :].min())
        # frames of a slow clip stand later than the question, which then stays where it is
        self.behind = max(0, behind - starts[0] - reach)
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
        positions[:, (places >= self.begin) & (places < self.end)] -= self.moves[number]
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
        size, cache, weights = len(node.hidden), DynamicCache(), []
        layer = self.text.layers[number]
        hook = layer.self_attn.register_forward_hook(lambda _, args, output: weights.append(output[1]))
        hidden = node.hidden[None]
        mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
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
        node.paid = weights[0][0, :, -1]
        node.keys.append(cache.layers[number].keys[0].transpose(0, 1))
        node.values.append(cache.layers[number].values[0].transpose(0, 1))

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
        for number, (keys, values) in enumerate(zip(root.keys, root.values, strict=True)):
            cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], number)
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
