"""Eviction of the keys of a prompt that were not chosen, with counts for the statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kv.layer_batch import Asking, InStep, LayerBatch
from ...kv.packed import QuantisedLayer
from ..call.forward import Prompt
from .prompt_tokens import PromptTokens
from .rules import CacheRules
from .schedule import Schedule


@dataclass(frozen=True)
class Uncounted:
    """Layers whose keys are chosen, while only the device knows how many stay.

    kept : ``[R, 1 or Hkv, q]`` bool, of their new keys. won : ``[R, Hkv]`` long, how many of the candidates stay.
    candidates, resolved : per layer the number of candidates, and their budget, summed over rows.
    spots : see :meth:`Evictor.evict`.
    """

    layers: list[QuantisedLayer]
    kept: Tensor
    won: Tensor
    candidates: int
    resolved: list[int]
    spots: Tensor | None = None


class Evictor:
    """Evicts the keys of a prompt that were not chosen.

    figures : per layer ``[3]`` float on the CPU: candidates, their budget, how many stay; summed over rows, mean over heads.
    pictured : per layer ``[B, 1]`` long on the CPU, how many visual keys of this forward stay in each head, where the host
        knows it.
    query_energy : per layer ``[B, Hkv, D]`` float32, what the codec of the rest makes of the queries, if it looks at them.
    done : layers that were evicted from since this list was last emptied.
    """

    def __init__(self, rules: CacheRules, prompt: Prompt, tokens: PromptTokens, schedule: Schedule) -> None:
        self.rules, self.prompt, self.tokens, self.schedule = rules, prompt, tokens, schedule
        self.figures: list[Tensor] = []
        self.pictured: dict[int, Tensor] = {}
        self.query_energy: dict[int, Tensor] = {}
        self.done: list[int] = []
        self.uncounted: list[Uncounted] = []
        self.cuts = InStep()

    def note(self, candidates: int, resolved: int, kept: Tensor | float) -> None:
        """Add the counts of one layer to the figures."""
        self.figures.append(torch.tensor([candidates, resolved, float(kept)]))

    def evict(self, layers: LayerBatch, kept: Tensor, lengths: Tensor, spots: Tensor | None = None) -> None:
        """Evict all but the keys ``kept [R, 1 or Hkv, q]`` from the new keys of ``layers``; keys of earlier turns stay.

        Parameters
        ----------
        lengths : ``[R, 1 or Hkv]`` long on the CPU, how many new keys stay.
        spots : ``[R, 1 or Hkv, q]`` bool, some that stay, in whose places all others are merged; None where they are not.
        """
        old = layers.width - kept.shape[2]
        if old:
            kept = torch.cat([kept.new_ones(*kept.shape[:2], old), kept], dim=-1)
            spots = None if spots is None else pad(spots, (old, 0))
            new = self.prompt.phase(layers.layers[0].number).lengths.repeat(len(layers.layers))
            lengths = lengths + layers.lengths - new[:, None]
        self.cuts.begin(self._evicting(layers, kept, lengths, old, spots))

    def finalize(self) -> None:
        """Evict from the layers whose counts only the device knew; they are copied to the host together."""
        uncounted, self.uncounted = self.uncounted, []
        if not uncounted:
            return
        home = uncounted[0].kept.device
        with self.prompt.measured("selection", home):
            counts = [torch.cat([one.kept.sum(-1), one.won], dim=1).to(home) for one in uncounted]
            # layers may have different numbers of heads
            on_host = torch.cat([x.flatten() for x in counts]).cpu().split([x.numel() for x in counts])
            for one, lengths, shape in zip(uncounted, on_host, counts, strict=True):
                layers = LayerBatch(one.layers)
                stay, won = lengths.view(shape.shape).split([one.kept.shape[1], one.won.shape[1]], dim=1)
                for resolved, mine in zip(one.resolved, won.split(layers.rows), strict=True):
                    self.note(one.candidates, resolved, mine.sum() / mine.shape[1])
                self.evict(layers, one.kept, stay.clone(), one.spots)
            self.cuts.finish()

    def _evicting(self, layers: LayerBatch, kept: Tensor, lengths: Tensor, old: int, spots: Tensor | None) -> Asking:
        """Evict from ``layers``; where keys are packed the host must know more first."""
        if self.rules.rest is not None:
            self.schedule.state.note_rotations(self.prompt.incoming)
            layers.demote(self.rules.rest, kept, lengths, self.query_energy)
        else:
            yield from self.rules.evicting(layers, kept, lengths, old, spots)
        for layer in layers.layers:
            self.done.append(layer.number)
            if self.rules.policy.scheduled:
                rows = None if self.tokens.text_rows is None else self.tokens.pictured_rows
                self.schedule.begin(layer, rows, self.prompt.length - self.prompt.phase(layer.number).lengths)
