"""What the codecs of a recipe pack in one forward of the text model.

A layer is packed as soon as nothing is evicted from it any more, if the host knows how many tokens are due. Layers of which
only the device knows wait for the end of the forward, and what is due of them is copied to the host together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..core.layout import Layout
from ..kv.cache import CacheState
from ..kv.codecs import Eligible, TokenGroup
from ..kv.index import KeyIndex
from ..kv.packed import QuantisedLayer
from ..kv.scoring.importance import energy
from ..kv.shared import Shared
from .cache_stage import Forward


class Packing:
    """
    Parameters
    ----------
    groups : the token groups that the recipe's codecs tell apart.
    pictured : see :class:`.eviction.PromptEviction`; None where the recipe evicts nothing.
    """

    def __init__(
        self,
        groups: Sequence[TokenGroup],
        state: CacheState,
        forward: Forward,
        pictured: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.groups, self.state, self.forward, self.pictured = groups, state, forward, pictured
        #: ``[B, S]`` bool, the visual tokens that a codec stores better than the others
        self.salient: Tensor | None = None
        #: per layer ``[B, Hkv, D]``, the mean square of the last queries, if a codec looks at them
        self.query_energy: dict[int, Tensor] = {}
        #: indices that packing replaced, so that layers go on sharing one
        self.made: dict[int, tuple[KeyIndex, KeyIndex]] = {}
        self.waiting: list[QuantisedLayer] = []
        self._window = max((group.codec.window for group in groups), default=0)
        self._counted: dict[tuple[int, int], Tensor] = {}

    def note_prompt(self, embeds: Tensor, kept: Tensor, visual: Tensor) -> None:
        """Note what the codecs must know of a prompt before it is stored.

        Parameters
        ----------
        embeds : ``[B, S, D]``, what enters the language model.
        kept, visual : ``[B, S]`` bool on the CPU.
        """
        if any(group.of == "text" for group in self.groups):
            self.state.shared.note_visual(visual.to(embeds.device, non_blocking=True), self.forward.seen)
        for group in self.groups:
            if group.of == "salient":
                of = (mask.to(embeds.device, non_blocking=True) for mask in (kept & visual, kept & ~visual))
                self.salient = group.source.salient(embeds, *of).cpu()

    def after_attention(self, number: int, query: Tensor, heads: int) -> None:
        """Look at ``query [B, Hq, q, D]`` of layer ``number`` with ``heads`` key heads, if a codec does."""
        if self._window:
            places = self.forward.incoming.phase(number).places.to(query.device, non_blocking=True)
            there = places[:, -self._window :] >= 0
            self.query_energy[number] = energy(query[:, :, -self._window :], there, heads)

    def pack(self, number: int) -> None:
        """Pack what is due of layer ``number``, from which nothing is evicted any more, now or when the forward is over."""
        layer = self.state.layers[number]
        counts = [self._count(layer, group, eligible) for group, eligible in self.due]
        if any(count is None and not layer.few(*one) for count, one in zip(counts, self.due, strict=True)):
            self.waiting.append(layer)
        else:
            self._pack(layer, counts)

    def settle(self) -> None:
        """The forward is over: pack the layers that waited for it."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        home, due = waiting[0].keys.device, self.due
        found = [self._ask(layer, eligible).to(home) for layer in waiting for _, eligible in due]
        known = torch.stack(found).cpu().unflatten(0, (len(waiting), len(due)))
        for layer, counts in zip(waiting, known, strict=True):
            heads = 1 if not layer.empty and layer.index.index.dim() == 2 else counts.shape[-1]
            self._pack(layer, [count[:, :heads] for count in counts])

    @cached_property
    def due(self) -> list[tuple[TokenGroup, Eligible]]:
        """What may be packed in this forward, of every layer alike."""
        layout, seen = self.forward.layout, self.forward.seen
        each = ((group, eligible(group, self.state.shared, layout, seen, self.salient)) for group in self.groups)
        return [(group, places) for group, places in each if places is not None]

    def _pack(self, layer: QuantisedLayer, counts: list[Tensor | None] | list[Tensor]) -> None:
        for (group, places), count in zip(self.due, counts, strict=True):
            layer.pack(group, places, self.made, self.query_energy.get(layer.number), count)

    def _ask(self, layer: QuantisedLayer, places: Eligible) -> Tensor:
        """``[B, Hkv]`` long, the tokens of each head that may be packed."""
        return layer.eligible_slots(places).sum(-1).expand(-1, layer.keys.shape[1])

    def _count(self, layer: QuantisedLayer, group: TokenGroup, places: Eligible) -> Tensor | None:
        """How many tokens of a layer are of a group and in full precision, ``[B, 1 or Hkv]`` long on the CPU; None where only
        the device knows."""
        if places.mask is None:
            return layer.loose
        layout = self.forward.layout
        if layout is None:
            return None
        if self.pictured is not None:
            return self.pictured.get(layer.number) if places.mask is layout.visual else None
        if not places.others:
            # what has come with this prompt is in full precision
            return self._of_phase(layer.number, group, places.mask, True)
        if group.of == "all":
            apart = self._of_phase(layer.number, group, places.mask, False)
            return None if layer.loose is None else layer.loose - apart
        return self._of_phase(layer.number, group, ~layout.visual, True) if self.forward.seen == 0 else None

    def _of_phase(self, number: int, group: TokenGroup, mask: Tensor, wanted: bool) -> Tensor:
        """``[B, 1]`` long: of the prompt's tokens that layer ``number`` sees those at which ``mask [B, S]`` is ``wanted``."""
        phase = self.forward.incoming.phase(number)
        if (id(phase), group.number) not in self._counted:
            at = phase.at
            count = ((mask.gather(1, at.clamp(min=0)) == wanted) & (at >= 0)).sum(1, keepdim=True)
            self._counted[id(phase), group.number] = count
        return self._counted[id(phase), group.number]


def eligible(
    group: TokenGroup, shared: Shared, layout: Layout | None, seen: int, salient: Tensor | None
) -> Eligible | None:
    """The places that tokens of a group may be of; None where there are none in this forward.

    Parameters
    ----------
    layout : of a prompt that follows ``seen`` tokens; None for a continuation.
    salient : ``[B, S]`` bool, the visual tokens of the prompt that a codec stores better than the others.
    """
    if group.of == "text":
        return Eligible(None if shared.visual is None else ~shared.visual, 0, True)
    if layout is None:
        return Eligible(None, 0, True) if group.of == "all" else None
    # visual tokens are packed with the prompt they came with
    apart = salient if group.codec.for_salient() is not None else None
    if group.of == "all":
        return Eligible(None if apart is None else ~apart, seen, True)
    mask = salient if group.of == "salient" else layout.visual
    return Eligible(mask if mask is None or apart is None else mask & ~apart, seen, False)
