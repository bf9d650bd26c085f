"""Taps: attention and features of the vision tower, read off the queries and keys that its attention holds anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...core.layout import Modality, Units
from ...families.tower import Towers
from ...method import Tap
from ..call.vision_output import VisionOutput

#: query rows of the attention map that are looked at together; the whole map never exists
BLOCK = 512


class Taps:
    """The taps of one accelerated model, ``wanted`` by the recipe's methods. Inert (no module is touched) without any."""

    def __init__(self, towers: Towers, wanted: Sequence[Tap]) -> None:
        self.towers = towers
        self.layers: dict[int, set[str]] = {}
        for tap in wanted:
            for wish in tap.layers:
                self.layers.setdefault(towers.tap_layer(wish), set()).add(tap.kind)
        #: attention modules by identity: tower modules carry no layer index
        self.numbers: dict[int, int] = {}
        for tower in towers.towers() if wanted else ():
            for number, layer in enumerate(towers.tower_layers(tower)):
                self.numbers[id(towers.attention_of(layer))] = number

    def layers_of(self, kind: str) -> list[tuple[int, nn.Module]]:
        """The tower layers of which a kind of tap is asked for, with their numbers."""
        wanted = [number for number, kinds in self.layers.items() if kind in kinds]
        return [(n, self.towers.tower_layers(tower)[n]) for tower in self.towers.towers() for n in wanted]

    def see_features(self, encoded: VisionOutput, number: int, hidden: Tensor, kind: str = "features") -> None:
        """Called behind tower layer ``number`` with ``hidden [N, T, C]`` or, of one tile, ``[T, C]``."""
        hidden = hidden if hidden.dim() == 3 else hidden[None]
        self._put(encoded, kind, number, hidden[:, int(self.towers.has_cls) :])

    def see_shift(self, encoded: VisionOutput, number: int, added: Tensor) -> None:
        """Called with the output of the MLP of tower layer ``number``, ``added [N, T, C]`` or, of one tile, ``[T, C]``."""
        self.see_features(encoded, number, added.float().norm(dim=-1, keepdim=True), "shift")

    @property
    def need_attention(self) -> bool:
        """Whether the tower's attention function has to be ours."""
        return any(kinds - {"features", "shift"} for kinds in self.layers.values())

    def see(
        self, encoded: VisionOutput, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        """Called by the tower's attention with ``query``/``key [N, H, T, d]``; returns the mask to use.

        Merged tokens weigh as many patches as they represent (proportional attention).
        """
        number = self.numbers.get(id(module), -1)
        if encoded.merged is not None:
            mask = encoded.merged.attention(query, key, mask, scaling)
        real = None if encoded.merged is None else encoded.merged.real
        cls = int(self.towers.has_cls)
        for kind in sorted(self.layers.get(number, ())):
            if kind == "cls_attention":
                logits = (query[:, :, :1].float() @ key.float().transpose(-1, -2)) * scaling
                logits = logits if mask is None else logits + additive(mask)[:, :, :1]
                values = logits.softmax(-1).mean(1)[:, 0]
            elif kind == "cls_attention_unsplit":
                # one head as wide as the tower: products add up over heads
                logits = torch.einsum("nhd,nhtd->nt", query[:, :, 0].float(), key.float())
                logits = logits * (key.shape[1] * key.shape[3]) ** -0.5
                logits = logits if mask is None else logits + additive(mask)[:, 0, 0]
                values = logits.softmax(-1)
            elif kind == "received_attention":
                values = received_attention(query, key, mask, scaling, real=real)
            elif kind == "patch_attention":
                rows = None if real is None else real[:, cls:]
                values = received_attention(query[:, :, cls:], key, mask, scaling, first=cls, real=rows)
            elif kind == "keys_unsplit":
                values = key.transpose(1, 2).flatten(2)
            elif kind == "keys":
                values = key.mean(1)
            else:
                continue
            self._put(encoded, kind, number, values[:, cls:])
        return mask

    def _put(self, encoded: VisionOutput, kind: str, number: int, values: Tensor) -> None:
        tap = kind, number
        full = values if encoded.merged is None else encoded.merged.restore(tap, values)
        if full is not None:
            encoded.taps.setdefault(tap, []).append(full)

    def signals(
        self, wanted: Sequence[Tap], encoded: Mapping[Modality, VisionOutput], units: Units
    ) -> dict[str, Tensor]:
        """The taps of one method per unit, ``[N, layers, n, ...]`` float32; NaN without a source."""
        signals: dict[str, Tensor] = {}
        for tap in wanted:
            stack = []
            for layer in tap.layers:
                number = self.towers.tap_layer(layer)
                parts = {
                    m: self.towers.to_tokens(m, encoded[m], encoded[m].taps[tap.kind, number]).float()
                    for m in dict.fromkeys(units.modality)
                }
                # sources count within a modality; the modalities are concatenated
                starts, start = {}, 0
                for modality, part in parts.items():
                    starts[modality], start = start, start + len(part)
                flat = torch.cat(list(parts.values()))
                first = torch.tensor([starts[m] for m in units.modality])
                source = units.source
                at = (source.clamp(min=0) + first[:, None]).to(flat.device, non_blocking=True)
                values = flat[at]
                nothing = (source < 0).to(flat.device, non_blocking=True).view(*source.shape, *[1] * (values.dim() - 2))
                stack.append(values.masked_fill(nothing, torch.nan))
            signals[tap.kind] = torch.stack(stack, dim=1)
        return signals


def additive(mask: Tensor) -> Tensor:
    """A boolean mask as something to add to logits."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)


def received_attention(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    first: int | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """``[N, T]`` float32: attention each key receives, mean over heads and queries, in blocks of query rows.

    With ``first`` the queries are those from that place on, and attention of a token to itself does not count. ``real
    [N, rows]`` says which queries are no padding.
    """
    total, rows = torch.zeros(key.shape[0], key.shape[2], device=key.device), query.shape[2]
    for start in range(0, rows, BLOCK):
        logits = (query[:, :, start : start + BLOCK].float() @ key.float().transpose(-1, -2)) * scaling
        if mask is not None:
            at = start + (first or 0)
            logits = logits + additive(mask if mask.shape[2] == 1 else mask[:, :, at : at + logits.shape[2]])
        paid = logits.softmax(-1).mean(1)
        if first is not None:
            paid.diagonal(start + first, 1, 2).zero_()
        total += (paid if real is None else paid * real[:, start : start + BLOCK, None]).sum(1)
    if real is not None:
        return total / (real.sum(1, keepdim=True) - int(first is not None)).clamp(min=1)
    return total / max(1, rows if first is None else rows - 1)
