"""Merging inside a vision tower, between attention and MLP, where the papers merge.

The keys that a layer's attention holds decide what is merged behind it; merged tokens weigh as many patches as they stand
for in later attention. Behind the layer whose output is read, the full grid is handed back (each place holds its merged
token), so that projectors, poolers, newline packers and pixel shuffles that expect a grid go on working; in front of a
language model the door then keeps one token of each group.

There the budget is one of tokens that the language model reads, per picture or clip, and is met exactly. A tower knows tiles
and frames only: it merges each down to the same ratio. Cropped padding, newlines and blends of patches make of that some
tokens more or fewer than the budget, and the door settles it (:meth:`EncoderMerging.at_the_door`).

A layer's forward is not replaced. The norm before the MLP is given the merged tokens, what the MLP makes of one goes to all
its members, and the layer's output is merged in the same way: merging is linear and all members of a group got the same,
so this is the merged sum behind the attention plus its own MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.budget import Retain, counts, resolve, split
from ..core.layout import Layout, Modality
from ..core.reduction import Reduction, segment_sum, top_mask
from ..core.stats import Stage
from ..errors import MmaccelError, UnsupportedError
from ..families.tower import Towers
from ..merging.aim import AimMerge
from ..method import EncoderMethod, EncoderTokens, TokenBatch
from .scope import Encoded, Scope, current


class Flow:
    """One merge of ``S`` tokens into ``K``: ``out[k] = sum of weight * in`` over the tokens of group ``k``.

    group : ``[S]`` long. weight : ``[S]`` float32.
    """

    def __init__(self, group: Tensor, weight: Tensor, kept: int) -> None:
        self.group, self.weight = group, weight
        self.order = group.argsort(stable=True)
        self.lengths = group.new_zeros(kept).scatter_add_(0, group, torch.ones_like(group))
        self.total = segment_sum(weight[self.order, None], self.lengths)

    def apply(self, x: Tensor) -> Tensor:
        """``[S, C] -> [K, C]``."""
        parts = x[self.order].float() * self.weight[self.order, None]
        return segment_sum(parts, self.lengths).to(x.dtype)

    def spread(self, y: Tensor) -> Tensor:
        """``[K, C] -> [S, C]``: what becomes ``y`` again by :meth:`apply`, the same for all tokens of a group."""
        # a token fused of what got no attention at all is nothing, not undefined
        return (y.float() / self.total.clamp(min=1e-6)).to(y.dtype)[self.group]


class Run:
    """Tiles or frames of one size and one budget, matched together.

    slots : ``[R, E, u]`` long, the tokens of every entry (CLS, or ``u`` patches that merge as one) in the tower's sequence.
    plan : how many entries each merging layer removes.
    """

    def __init__(self, slots: Tensor, plan: list[int]) -> None:
        self.slots, self.plan = slots, plan


class Merged:
    """The merging state of one run of a tower; its tokens are counted in one flat sequence, tile after tile.

    size : ``[S]`` float, patches (or blocks of patches) that each remaining token stands for.
    owner : ``[S0]`` long, the remaining token that each original token (CLS included) is part of.
    place : ``[S]`` long, the original token in whose place each remaining one stands; ascending.
    """

    def __init__(self, method: EncoderMethod, cls: int, tiles: int, tokens: int, device: torch.device) -> None:
        self.method, self.cls, self.tiles = method, cls, tiles
        self.size = torch.ones(tokens, device=device)
        self.owner = torch.arange(tokens, device=device)
        self.place = torch.arange(tokens, device=device)
        self.runs: list[Run] = []
        #: which of the merging layers runs, if it removes anything; the merge it decides on
        self.layer: int | None = None
        self.flow: Flow | None = None
        self.open = True
        self.seen = 0
        self._keys: list[Tensor] = []
        self._attention: list[Tensor] = []
        self._parts: dict[tuple[str, int], list[Tensor]] = {}

    def enter(self, layer: int | None) -> None:
        """A layer begins; ``layer`` is its number among the merging layers."""
        self.layer = layer if layer is not None and any(run.plan[layer] for run in self.runs) else None
        self.seen = 0
        self._keys, self._attention = [], []

    def attention(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor | None:
        """Note what decides the merge behind this attention; weigh merged tokens by the patches they stand for.

        ``query [N, H, 1 or T, d]`` and ``key [N, H, T, d]`` are those of the next ``N T`` tokens.
        """
        if not self.open:
            return mask
        first, self.seen = self.seen, self.seen + key.shape[0] * key.shape[2]
        if self.method.proportional and len(self.place) < len(self.owner):
            if mask is not None:
                raise UnsupportedError(
                    "Merging inside the encoder does not work with pictures that have padded patches."
                )
            mask = self.size[first : self.seen].log().view(len(key), 1, 1, -1).to(key.dtype)
        if self.layer is not None:
            self._keys.append(key.float().mean(1).flatten(0, 1))
            if self.method.needs_cls:
                logits = (query[:, :, :1].float() @ key.float().transpose(-1, -2)) * scaling
                logits = logits if mask is None else logits + mask.float()
                self._attention.append(logits.softmax(-1).mean(1).flatten())
        return mask

    def merge(self, hidden: Tensor, depth: float) -> Tensor:
        """Decide what is merged in this layer, and merge the sums behind its attention, ``[tiles, T, C]`` or ``[S, C]``."""
        assert self.layer is not None
        keys, tokens = torch.cat(self._keys), len(self.place)
        attention = torch.cat(self._attention) if self._attention else None
        target, weight = torch.arange(tokens, device=hidden.device), torch.ones(tokens, device=hidden.device)
        stays, kept = [], tokens
        for run in self.runs:
            remove, slots = run.plan[self.layer], run.slots
            seen = EncoderTokens(
                keys=keys[slots].flatten(2),
                size=self.size[slots[..., 0]],
                protected=self.cls,
                depth=depth,
                cls_attention=None if attention is None else attention[slots].sum(-1),
            )
            entry = torch.arange(slots.shape[1], device=slots.device).expand(slots.shape[:2])
            into = self.method.match(seen, remove) if remove else entry
            if remove:
                target[slots] = slots.gather(1, into[..., None].expand_as(slots))
                weight[slots] = self.method.weigh(seen, into)[..., None].expand_as(slots)
            stays.append(_first(into == entry, slots.shape[1] - remove))
            kept -= slots.shape[0] * remove * slots.shape[2]
        left = target == torch.arange(tokens, device=target.device)
        if (found := int(left.sum())) != kept:
            raise MmaccelError(
                f"Method {self.method.name!r} left {found} tokens in the tower where {kept} were to stay."
            )
        rank = left.cumsum(0) - 1
        self.flow = Flow(rank[target], weight, kept)
        self.owner = self.flow.group[self.owner]
        # whole numbers, which any order of additions sums alike
        self.size = self.size.new_zeros(kept).scatter_add_(0, self.flow.group, self.size)
        self.place = self.place[_first(left[None], kept)[0]]
        for run, stay in zip(self.runs, stays, strict=True):
            run.slots = rank[run.slots.gather(1, stay[..., None].expand(-1, -1, run.slots.shape[2]))]
        return self.pack(self.flow.apply(hidden.flatten(0, -2)), hidden)

    def pack(self, flat: Tensor, like: Tensor) -> Tensor:
        """``[S, C]`` in the shape the tower works in."""
        return flat if like.dim() == 2 else flat.view(self.tiles, -1, flat.shape[-1])

    def restore(self, key: tuple[str, int], values: Tensor) -> Tensor | None:
        """Tapped values ``[N, T - cls, ...]`` on the full grid, ``[N, T0 - cls, ...]``, once all calls of a layer delivered
        theirs; None before."""
        if not self.open:
            return values
        parts = self._parts.setdefault(key, [])
        parts.append(values)
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        if len(flat) < len(self.place) - self.cls * self.tiles:
            return None
        del self._parts[key]
        owner = self.patches(self.owner)
        width = len(self.place) // self.tiles
        return flat[owner - self.cls * (owner // width + 1)]

    def reduction(self) -> Reduction:
        """The same as data, over the patches of each tile: ``[tiles, T0 - cls]``."""
        first = torch.arange(self.tiles, device=self.owner.device)[:, None] * (len(self.owner) // self.tiles) + self.cls
        target = self.patches(self.place[self.owner]) - first
        return Reduction.merge(target, torch.ones_like(target, dtype=torch.bool))

    def patches(self, values: Tensor) -> Tensor:
        """``[S0] -> [tiles, T0 - cls]``."""
        return values.view(self.tiles, -1)[:, self.cls :]


class EncoderMerging:
    """The hooks of an encoder-site method on the towers of one model; inert without one.

    Parameters
    ----------
    towers : the model's family, or the adapter of an encoder that stands alone.
    retain : in front of a language model of the tokens of each picture or clip; else of the patches of each tile.
    hook : takes the handle of every hook as soon as it is registered, so that all can be removed whatever fails.
    stage : the stage's number in the recipe, for the statistics, which are in the same unit.
    language : whether a language model reads what comes out.
    """

    def __init__(
        self,
        towers: Towers,
        method: EncoderMethod | None,
        retain: Retain | None,
        hook: Callable[..., None],
        stage: int = 0,
        language: bool = False,
    ) -> None:
        self.towers, self.method, self.retain, self.stage = towers, method, retain, stage
        self.language = language
        if method is None:
            return
        self.layers = towers.merging_layers()
        self.last = towers.feature_layer
        for tower in towers.towers():
            blocks = towers.tower_layers(tower)
            for number in range(self.last + 1):
                block, depth = blocks[number], number / len(blocks)
                hook(block.register_forward_pre_hook(self._enter(number), with_kwargs=True))
                hook(block.register_forward_hook(self._leave(number), prepend=True))
                if number in self.layers:
                    norm, mlp = towers.second_half(block)
                    hook(norm.register_forward_pre_hook(self._between(depth)))
                    hook(mlp.register_forward_hook(self._spread))
            hook(*(reader.register_forward_pre_hook(self._full) for reader in towers.readers(tower)))

    # --- while the tower runs ---------------------------------------------------------------------------------
    def _enter(self, number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            scope = current()
            if scope is None or scope.encoding is None:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            if number == 0:
                scope.encoding.merged = self._start(scope, scope.encoding, hidden)
            merged = scope.encoding.merged
            if merged is None:
                return None
            merged.enter(self.layers.index(number) if number in self.layers else None)
            if hidden.dim() == 3 or len(merged.place) == len(merged.owner):
                return None
            # a packed sequence: its boundaries and rotary positions follow the tokens that are left
            bounds = kwargs["cu_seqlens"]
            bounds = torch.searchsorted(merged.place, bounds.to(merged.place)).to(bounds.dtype)
            rotary = tuple(x[merged.place] for x in kwargs["position_embeddings"])
            return args, {**kwargs, "cu_seqlens": bounds.unique_consecutive(), "position_embeddings": rotary}

        return hook

    def _start(self, scope: Scope, encoded: Encoded, hidden: Tensor) -> Merged | None:
        """The state of a new run of the tower; None if everything stays."""
        assert self.method is not None and self.retain is not None
        cls = int(self.towers.has_cls)
        pictures = self.towers.frames(encoded)
        tiles = 1 if pictures is not None else len(hidden)
        pictures = pictures if pictures is not None else [[hidden.shape[1] - cls]] * tiles
        starts: dict[tuple[int, int], list[int]] = {}
        start = 0
        for frames in pictures:
            sizes = [len(self.towers.units(encoded, patches)) for patches in frames]
            budget = self._budget(sizes)
            for patches, kept in zip(frames, budget, strict=True):
                starts.setdefault((patches, kept), []).append(start)
                start += cls + patches
            if not self.language:
                self._record(scope, sum(sizes), sum(budget), sum(budget))
        merged = Merged(self.method, cls, tiles, start, hidden.device)
        for (patches, kept), at in starts.items():
            units = self.towers.units(encoded, patches)
            entries = torch.cat([torch.zeros(cls, units.shape[1], dtype=torch.long), units + cls])
            slots = (torch.tensor(at)[:, None, None] + entries).to(hidden.device)
            plan = self.method.schedule(len(units), len(self.layers), kept)
            merged.runs.append(Run(slots, plan))
        return merged if any(sum(run.plan) for run in merged.runs) else None

    def _budget(self, sizes: list[int]) -> list[int]:
        """How many patches (or blocks that merge as one) of each frame or tile stay in the tower, of ``sizes``."""
        assert self.method is not None and self.retain is not None
        total = sum(sizes)
        if not self.language:
            return split(resolve(self.retain, total), sizes)
        # a count is one of the whole picture, of which this may be a part
        asked = min(self.retain, total) if isinstance(self.retain, int) else self.retain
        budget = zip(split(resolve(asked, total), sizes), sizes, strict=True)
        return [max(kept, self.method.fewest(size, len(self.layers))) for kept, size in budget]

    def _record(self, scope: Scope, there: int, resolved: int, kept: int) -> None:
        assert self.method is not None
        record = scope.stats.stages.setdefault(self.stage, Stage("encoder", self.method.name))
        record.tokens_in += there
        record.resolved = (record.resolved or 0) + resolved
        record.tokens_kept += kept

    def _merged(self) -> Merged | None:
        scope = current()
        return None if scope is None or scope.encoding is None else scope.encoding.merged

    def _between(self, depth: float) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            merged = self._merged()
            if merged is None or merged.layer is None:
                return None
            return merged.merge(args[0], depth), *args[1:]

        return hook

    def _spread(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        merged = self._merged()
        if merged is None or merged.flow is None:
            return None
        return merged.pack(merged.flow.spread(output.flatten(0, -2)), output)

    def _leave(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            merged = self._merged()
            if merged is None or (merged.flow is None and number < self.last):
                return None
            hidden = output[0] if isinstance(output, tuple) else output
            flat, flow = hidden.flatten(0, -2), merged.flow
            merged.flow = None
            flat = flat if flow is None else flow.apply(flat)
            if number == self.last:
                flat = flat[merged.owner]
                merged.enter(None)
                merged.open = False
            hidden = merged.pack(flat, hidden)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook

    def _full(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        merged = self._merged()
        if merged is None or not merged.open:
            return None
        return args[0][merged.owner], *args[1:]

    # --- at the door ------------------------------------------------------------------------------------------
    def at_the_door(self, layout: Layout, scope: Scope, embeds: Tensor) -> tuple[Reduction, Reduction | None] | None:
        """Meet the budget in tokens of the language model; None if every visual token of ``embeds [B, S, D]`` stays.

        The first reduction, in places ``[B, S]`` on the CPU, is that of the towers: its tokens hold their merged values
        already. Of each group one token stays; where groups are fewer than the budget, further tokens stay, first those that
        blend patches of several groups, then one more of the group that has most tokens for each of its places. Where they are
        more, the second reduction merges as :class:`AimMerge` does: newlines go first, then the most similar tokens of a tile
        or frame merge.
        """
        if self.method is None or self.retain is None:
            return None
        units = layout.units("picture")
        there, rows = units.valid, units.row
        size = there.sum(1).tolist()
        count = counts(self.retain, size, size, units.picture)
        target = self._targets(layout, scope.encoded)
        for row, places, valid, wanted in zip(rows.tolist(), units.places, there, count.tolist(), strict=True):
            at = places[valid]
            more = at[_further(target[row, at], at, wanted)]
            target[row, more] = more
        stays = (target == torch.arange(target.shape[1])) & layout.visual
        self._record(scope, sum(size), int(count.sum()), int(count.sum()))
        if torch.equal(stays, layout.visual) and count.tolist() == size:
            return None
        merged = Reduction.merge(target, layout.visual)
        left = units.only(stays)
        if bool((left.valid.sum(1) <= count).all()):
            return merged, None
        device = embeds.device
        places, rows, valid = left.places.clamp(min=0).to(device), rows.to(device), left.valid.to(device)
        tokens = TokenBatch(
            features=embeds[rows[:, None], places] * valid[..., None],
            valid=valid,
            cells=left.cells.to(device),
            grid=left.grid.to(device),
            segment=left.segment.to(device),
            tile=left.tile.to(device),
            tiles=left.tiles.to(device),
        )
        rest = AimMerge().reduce(tokens, count.to(device)).cpu()
        return merged, rest.relabel(left.places, left.row, target.shape)

    def _targets(self, layout: Layout, encoded: dict[Modality, Encoded]) -> Tensor:
        """What the merge in the towers makes of the places, ``[B, S]`` long on the CPU: where each token flows, -1 if dropped.

        A group stays at the place its merged token has in the tower, or at its first place if that one was cropped. Where a
        token is a blend of patches that do not merge as one (pooled clips), it stays if any of them stands for its group.
        """
        held = {modality: self._held(modality, seen) for modality, seen in encoded.items() if seen.merged}
        target = torch.arange(layout.valid.shape[1]).repeat(len(layout.valid), 1)
        for segment in layout.segments:
            if segment.modality not in held:
                continue
            places, source = segment.places, segment.tile.source
            group, stands = (x[source.clamp(min=0)] for x in held[segment.modality])
            # newlines are groups of their own
            fresh = -1 - len(held[segment.modality][0]) - torch.arange(len(source))
            group = torch.where(source < 0, fresh, group)
            order = (2 * group + (~stands).long()).argsort(stable=True)
            _, inverse, lengths = torch.unique_consecutive(group[order], return_inverse=True, return_counts=True)
            leader = order[(lengths.cumsum(0) - lengths)[inverse]]
            target[segment.row, places[order]] = places[leader]
            target[segment.row, places[(group < 0) & (source >= 0) & ~stands]] = -1
        return target

    def _held(self, modality: Modality, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Of every token the tower delivers for, ``[tokens]`` on the CPU: the number of its group, and whether it stands for
        it. Blends have groups of their own, negative."""
        merged = encoded.merged
        assert merged is not None
        own = torch.arange(len(merged.owner), device=merged.owner.device)
        # a block is known by its first patch
        units = self.towers.units(encoded, merged.patches(own).shape[1])
        own, group = merged.patches(own).clone(), merged.patches(merged.place[merged.owner]).clone()
        for ids in (own, group):
            ids[:, units] = ids[:, units[:, :1]].expand(-1, -1, units.shape[1]).clone()
        values = torch.stack([own.double(), group.double(), (own == group).double()], dim=-1)
        own, group, stands = self.towers.to_tokens(modality, encoded, [values]).cpu().unbind(-1)
        if len(own) < merged.tiles * len(units):
            return -1 - torch.arange(len(own)), stands > 0
        return group.long(), own == group


def _further(into: Tensor, at: Tensor, wanted: int) -> Tensor:
    """``[n]`` bool: which of the tokens at the places ``at [n]``, that flow ``into [n]``, stay too so that ``wanted`` do."""
    alone = into == at
    _, group, sizes = into.unique(return_inverse=True, return_counts=True)
    order = (2 * group + (~alone).long()).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(at)) - (sizes.cumsum(0) - sizes)[group[order]]
    merit = (sizes[group] / (rank + 1)).masked_fill(into < 0, torch.inf)
    return top_mask(merit[None], ~alone[None], torch.tensor([max(0, wanted - int(alone.sum()))]))[0]


def _first(mask: Tensor, count: int) -> Tensor:
    """``[R, count]`` long: where ``mask [R, E]`` is True, which it is ``count`` times a row."""
    return (~mask).long().argsort(dim=1, stable=True)[:, :count]
