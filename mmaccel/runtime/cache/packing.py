"""Packing: the codecs of a recipe in one forward of the text model.

A layer is packed as soon as nothing is evicted from it any more, if the host knows how many tokens are due. Layers of which
only the device knows wait for the end of the forward, and their numbers of tokens are copied to the host together.

While tokens are decoded, packing interrupts captured steps. So the next step that packs is known beforehand
(:class:`PackTimes`), and heads of a row that fill their pages at different steps are packed together, once in as many tokens
as a page has. Every row has its own steps, whatever its neighbours are, and a row without pictures has none: nothing of it is
packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ...core.layout import Layout
from ...core.stats import Stage as StageStats
from ...kv.cache import CacheState
from ...kv.codecs import Codec, Eligible, TokenGroup
from ...kv.packed import QuantisedLayer, SharedPacking
from ...kv.shared import Shared
from ...method.results import check_tensor
from ..call.forward import Forward, Prompt, chosen_of
from ..call.runs import LayerAttended, Run, TextInputs
from .eviction import CachePolicy


@dataclass
class PackTimes:
    """Times at which codecs look at a cache again; a :class:`mmaccel.kv.shared.Memory`.

    at : of every row how many tokens will have been seen then; empty where that is not known.
    """

    at: list[int] = field(default_factory=list)

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        self.at = [self.at[row] for row in on_host.tolist()] if self.at else []

    def copy(self) -> PackTimes:
        """A copy to change independently."""
        return PackTimes(self.at)

    def crop(self, seen: int) -> None:
        """Forget the times: other tokens come."""
        self.at = []

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Forget the times: tokens are counted anew."""
        self.at = []

    def tensors(self) -> tuple[Tensor, ...]:
        """No tensors are held."""
        return ()


class PackKeys(Run):
    """The codecs of a recipe in one forward.

    salient : ``[B, S]`` bool on the CPU, the visual tokens of a prompt that a codec stores better than the others.
    query_energy : per layer and token group ``[B, Hkv, D]``, what its codec makes of the last queries, if it looks at them.
    waiting : layers that are packed when the forward is over.
    """

    def __init__(self, forward: Forward, state: CacheState, policy: CachePolicy | None) -> None:
        self.forward, self.state, self.policy = forward, state, policy
        self.groups = [group for group in forward.plan.token_groups if group.of != "rest"]
        self.now = forward.seen + forward.length
        self.times = state.shared.memory(PackTimes) or state.shared.keep(PackTimes())
        #: the rows that had something to pack, while decoding
        self.packed: set[int] = set()
        windows = [group.codec.window for group in self.groups]
        self.last_queries = max((window or 0 for window in windows), default=0) if None not in windows else None
        self.salient: Tensor | None = None
        self.query_energy: dict[tuple[int, int], Tensor] = {}
        self.waiting: list[QuantisedLayer] = []
        self._shared = SharedPacking()
        #: layers that were packed, or wait for the end of the forward
        self._done: set[int] = set()
        self._counted: dict[tuple[int, int], Tensor] = {}
        for number, bias in forward.plan.key_biases.items():
            state.layers[number].key_bias = bias

    def before_text(self, text: TextInputs) -> None:
        """Note the facts about a prompt that codecs need."""
        prompt, embeds = self.forward, text.embeds
        if not isinstance(prompt, Prompt):
            return
        kept, visual = prompt.total.kept, prompt.layout.visual
        if any(group.of == "text" for group in self.groups):
            self.state.shared.places.note_visual(visual.to(embeds.device, non_blocking=True), prompt.seen)
        for group in self.groups:
            if group.of == "salient":
                of = (mask.to(embeds.device, non_blocking=True) for mask in (kept & visual, kept & ~visual))
                salient = group.source.salient(embeds, *of)
                self.salient = check_tensor(group.source, "salient()", salient, "bool", embeds.shape[:2], embeds).cpu()

    def after_attention(self, layer: LayerAttended) -> None:
        """Pack the layers from which nothing is evicted any more."""
        number, query = layer.number, layer.query
        self.state.note_rotations(self.forward.incoming)
        if self.last_queries != 0 and self.looks:
            places = self.forward.phase(number).places.to(query.device, non_blocking=True)
            for group in self.groups:
                asked = group.codec.query_energy(query, places, layer.key.shape[1])
                if asked is not None:
                    self.query_energy[number, group.number] = asked
        self._pack_timed([number] if self.policy is None else self.policy.released(number), query.device)

    def finish(self) -> None:
        """Pack the layers that waited for the end of the forward, and add them to the statistics."""
        device = self.forward.phase(0).places.device
        self._pack_timed([number for number in range(len(self.state.layers)) if number not in self._done], device)
        if self.waiting:
            with self.forward.measured("packing", device):
                self._pack_waiting()
        if isinstance(self.forward, Prompt):
            for group in self.groups:
                if group.of != "salient":
                    self._record(group)

    def _pack_timed(self, layers: list[int], device: torch.device) -> None:
        if not layers:
            return
        with self.forward.measured("packing", device, layers):
            for number in layers:
                self.pack(number)
        self._done.update(layers)

    def _record(self, group: TokenGroup) -> None:
        """Add a codec to the statistics; it drops nothing, so that all tokens it finds stay."""
        stats, codec = self.forward.stats, group.codec
        figures = stats.stages.setdefault(group.stage, StageStats("codec", codec.name, resolved=None))
        if group.of != "text":
            before = [s.tokens_kept for s in stats.stages.values() if s.site == "cache"]
            figures.tokens_in = figures.tokens_kept = before[0] if before else stats.layer_tokens[-1]
        own = {other.number for other in self.groups if other.stage == group.stage}
        if not any(width for layer in self.state.layers for n, width in enumerate(layer.packed.widths) if n in own):
            what = f"{group.of} tokens" if group.of in ("text", "visual") else "tokens"
            stats.notes.append(
                f"{codec.name} has packed nothing: it packs {codec.page} {what} at a time, beyond the newest {codec.residual}."
            )

    @cached_property
    def rows(self) -> list[bool]:
        """The rows that are looked at in this forward, the same in every layer."""
        forward, phase = self.forward, self.forward.phase(0)
        before = self.times.at or [0] * len(phase.places)
        if isinstance(forward, Prompt) or phase.padded:
            # padding fills no pages
            before = [at + pad for at, pad in zip(before, (forward.length - phase.lengths).tolist(), strict=True)]
        looks = [self.now >= at for at in before]
        if isinstance(forward, Prompt):
            looks = [one or new for one, new in zip(looks, forward.layout.visual.any(1).tolist(), strict=True)]
        if (text := self.state.shared.places.text_rows) is not None:
            looks = [one and not bare for one, bare in zip(looks, text.tolist(), strict=True)]
        later = self.now + max((group.codec.residual + group.codec.page for group in self.groups), default=0)
        self.times.at = [later if one else at for one, at in zip(looks, before, strict=True)]
        return looks

    @property
    def looks(self) -> bool:
        """Whether anything may be packed in this forward."""
        return True in self.rows

    @cached_property
    def due(self) -> list[tuple[TokenGroup, Eligible]]:
        """Token groups that may be packed in this forward, the same in every layer."""
        forward, shared = self.forward, self.state.shared
        if not self.looks:
            return []
        layout = forward.layout if isinstance(forward, Prompt) else None
        rows = None if all(self.rows) else torch.tensor(self.rows)
        each = ((group, eligible_of(group, shared, layout, forward.seen, self.salient)) for group in self.groups)
        return [(group, replace(eligible, rows=rows)) for group, eligible in each if eligible is not None]

    def pack(self, number: int) -> None:
        """Pack the due tokens of a layer, now or when the forward is over."""
        layer, due = self.state.layers[number], self.due
        counts = [self._count(layer, group, eligible) for group, eligible in due]
        if any(count is None and not layer.too_few(*one) for count, one in zip(counts, due, strict=True)):
            self.waiting.append(layer)
        else:
            self._pack(layer, counts)

    def _pack_waiting(self) -> None:
        """Pack the layers that waited for the end of the forward, of which only the device knows the tokens to pack."""
        waiting, self.waiting = self.waiting, []
        home, due = waiting[0].keys.device, self.due
        # [B, Hkv] long: the tokens of each head that may be packed
        asked = [
            layer.eligible_slots(eligible).sum(-1).expand(-1, layer.keys.shape[1]).to(home)
            for layer in waiting
            for _, eligible in due
        ]
        # layers may have different numbers of heads
        known = torch.cat([x.flatten() for x in asked]).cpu().split([x.numel() for x in asked])
        each = iter(mine.view(like.shape) for mine, like in zip(known, asked, strict=True))
        for layer in waiting:
            heads = 1 if not layer.empty and not layer.index.of_heads else layer.keys.shape[1]
            self._pack(layer, [next(each)[:, :heads] for _ in due])

    def _pack(self, layer: QuantisedLayer, counts: list[Tensor | None] | list[Tensor]) -> None:
        for (group, eligible), count in zip(self.due, counts, strict=True):
            asked = self.query_energy.get((layer.number, group.number))
            layer.pack(group, eligible, self._shared, asked, count)
            if eligible.others and not layer.empty:
                rows, loose = len(self.rows), len(layer.index) - layer.width
                self._look_again(group.codec, torch.full((rows, 1), loose) if count is None else count)

    def _look_again(self, codec: Codec, count: Tensor) -> None:
        """Settle when to look at each row of the cache again, of which a layer had ``count [B, 1 or Hkv]`` tokens to pack."""
        due = codec.due(count)
        new = self.forward.layout.visual.any(1) if isinstance(self.forward, Prompt) else torch.zeros(len(count)).bool()
        packs, left = (due.any(1) & ~new).tolist(), (count - due).amax(1).tolist()
        page, at = min(group.codec.page for group in self.groups), list(self.times.at)
        for row in (row for row, looks in enumerate(self.rows) if looks):
            if packs[row]:
                self.packed.add(row)
                at[row] = self.now + page
            elif row not in self.packed:
                # as soon as one head has a page
                at[row] = min(at[row], self.now + codec.residual + codec.page - left[row])
        self.times.at = at

    def _count(self, layer: QuantisedLayer, group: TokenGroup, eligible: Eligible) -> Tensor | None:
        """Number of tokens of a layer that are of a group and in full precision, ``[B, 1 or Hkv]`` long on the CPU; 0 in rows
        that are not looked at; None where only the device knows."""
        count = self._count_of_all(layer, group, eligible)
        return count if count is None or eligible.rows is None else count * eligible.rows[:, None]

    def _count_of_all(self, layer: QuantisedLayer, group: TokenGroup, eligible: Eligible) -> Tensor | None:
        if eligible.mask is None:
            return layer.loose
        forward = self.forward
        if not isinstance(forward, Prompt):
            return None
        if self.policy is not None:
            return self.policy.pictured.get(layer.number) if eligible.mask is forward.layout.visual else None
        if not eligible.others:
            # tokens of this prompt are in full precision
            return self._of_phase(layer.number, group, eligible.mask, True)
        if group.of == "all":
            apart = self._of_phase(layer.number, group, eligible.mask, False)
            return None if layer.loose is None else layer.loose - apart
        return self._of_phase(layer.number, group, ~forward.layout.visual, True) if forward.seen == 0 else None

    def _of_phase(self, number: int, group: TokenGroup, mask: Tensor, wanted: bool) -> Tensor:
        """``[B, 1]`` long: of the prompt's tokens that layer ``number`` sees those at which ``mask [B, S]`` is ``wanted``."""
        phase = self.forward.phase(number)
        if (id(phase), group.number) not in self._counted:
            at = chosen_of(phase)
            count = ((mask.gather(1, at.clamp(min=0)) == wanted) & (at >= 0)).sum(1, keepdim=True)
            self._counted[id(phase), group.number] = count
        return self._counted[id(phase), group.number]


def coming_unpacked(groups: Sequence[TokenGroup], shared: Shared, seen: int) -> int | None:
    """Number of tokens that may follow those ``seen`` before one with which something may be packed; None if none ever does."""
    if not any(group.of in ("all", "text") for group in groups):
        return None
    text, times = shared.places.text_rows, shared.memory(PackTimes)
    at = [] if times is None else times.at
    rows = [row for row in range(len(at)) if text is None or not text[row]]
    if at and not rows:
        return None
    return max(0, min((at[row] for row in rows), default=0) - seen - 1)


def eligible_of(
    group: TokenGroup, shared: Shared, layout: Layout | None, seen: int, salient: Tensor | None
) -> Eligible | None:
    """The places whose tokens belong to a group; None without any in this forward.

    layout : of a prompt that follows ``seen`` tokens; None for a continuation.
    salient : ``[B, S]`` bool, the visual tokens of the prompt that a codec stores better than the others.
    """
    if group.of == "text":
        return Eligible(None if shared.places.visual is None else ~shared.places.visual, 0, True)
    if layout is None:
        return Eligible(None, 0, True) if group.of == "all" else None
    # visual tokens are packed with the prompt they came with
    apart = salient if group.codec.for_salient() is not None else None
    if group.of == "all":
        return Eligible(None if apart is None else ~apart, seen, True)
    mask = salient if group.of == "salient" else layout.visual
    return Eligible(mask if mask is None or apart is None else mask & ~apart, seen, False)
