"""What the codecs of a recipe pack in one forward of the text model.

A layer is packed as soon as nothing is evicted from it any more, if the host knows how many tokens are due. Layers of which
only the device knows wait for the end of the forward, and what is due of them is copied to the host together.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kv.codecs import Among, Kind
from ..kv.index import KeyIndex

if TYPE_CHECKING:
    from ..kv.packed import QuantisedLayer
    from .hooks import Step


class Packing:
    """``asked`` : per layer ``[B, Hkv, D]``, the mean square of the last queries, if a codec looks at them."""

    def __init__(self, step: Step) -> None:
        # as in Eviction, what the step holds does not hold the step
        self.step: Step = weakref.proxy(step)
        self.asked: dict[int, Tensor] = {}
        #: indices that packing replaced, so that layers go on sharing one
        self.made: dict[int, tuple[KeyIndex, KeyIndex]] = {}
        self.waiting: list[QuantisedLayer] = []
        self._counted: dict[tuple[int, int], Tensor] = {}

    def pack(self, layer: QuantisedLayer) -> None:
        """Pack what is due of a layer, now or when the forward is over."""
        due = self.step.due
        counts = [self._count(layer, kind, among) for kind, among in due]
        if any(count is None and not layer.few(*one) for count, one in zip(counts, due, strict=True)):
            self.waiting.append(layer)
        else:
            self._pack(layer, counts)

    def settle(self) -> None:
        """The forward is over: pack the layers that waited for it."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        home, due = waiting[0].keys.device, self.step.due
        found = [self._ask(layer, among).to(home) for layer in waiting for _, among in due]
        known = torch.stack(found).cpu().unflatten(0, (len(waiting), len(due)))
        for layer, counts in zip(waiting, known, strict=True):
            heads = 1 if layer.index is not None and layer.index.index.dim() == 2 else counts.shape[-1]
            self._pack(layer, [count[:, :heads] for count in counts])

    def _pack(self, layer: QuantisedLayer, counts: list[Tensor | None] | list[Tensor]) -> None:
        for (kind, among), count in zip(self.step.due, counts, strict=True):
            layer.pack(kind, among, self.made, self.asked.get(layer.number), count)

    def _ask(self, layer: QuantisedLayer, among: Among) -> Tensor:
        """``[B, Hkv]`` long, the tokens of each head that may be packed."""
        return layer.eligible(among).sum(-1).expand(-1, layer.keys.shape[1])

    def _count(self, layer: QuantisedLayer, kind: Kind, among: Among) -> Tensor | None:
        """How many tokens of a layer are of a kind and in full precision, ``[B, 1 or Hkv]`` long on the CPU; None where only
        the device knows."""
        if among.mask is None:
            return layer.loose
        step, eviction = self.step, self.step.eviction
        if step.layout is None:
            return None
        if eviction is not None:
            return eviction.pictured.get(layer.number) if among.mask is step.layout.visual else None
        if not among.others:
            # what has come with this prompt is in full precision
            return self._of_phase(layer.number, kind, among.mask, True)
        if kind.of == "all":
            apart = self._of_phase(layer.number, kind, among.mask, False)
            return None if layer.loose is None else layer.loose - apart
        return self._of_phase(layer.number, kind, ~step.layout.visual, True) if step.seen == 0 else None

    def _of_phase(self, number: int, kind: Kind, mask: Tensor, wanted: bool) -> Tensor:
        """``[B, 1]`` long: of the prompt's tokens that layer ``number`` sees those at which ``mask [B, S]`` is ``wanted``."""
        phase = self.step.phase(number)
        if (id(phase), kind.number) not in self._counted:
            at = phase.chosen
            assert at is not None
            count = ((mask.gather(1, at.clamp(min=0)) == wanted) & (at >= 0)).sum(1, keepdim=True)
            self._counted[id(phase), kind.number] = count
        return self._counted[id(phase), kind.number]
