"""Merging between the layers of a vision tower.

Tokens are merged on their way into a layer, by the keys of the layer before. Behind the layer whose output the language
model reads, the full grid is handed back (each place holds its merged token), so that projectors, newline packers and
pixel shuffles that expect a grid go on working; the door then keeps one token of each group. Papers merge between attention and
MLP of one block; here it is between blocks, so each MLP still sees the unmerged tokens of its own block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..budget import Retain, resolve
from ..errors import UnsupportedError
from ..layout import Layout, Modality
from ..method import EncoderMethod
from ..reduction import Reduction, compact
from ..scope import Encoded, current

if TYPE_CHECKING:
    from ..families import Family


class Merged:
    """The merging state of one run of the tower over ``N`` tiles.

    size : ``[N, T]`` float, patches each remaining token stands for.
    owner : ``[N, T0]`` long, the remaining token that each original token (CLS included) is part of.
    """

    def __init__(self, hidden: Tensor, cls: int) -> None:
        n, tokens = hidden.shape[:2]
        self.cls = cls
        self.size = torch.ones(n, tokens, device=hidden.device)
        self.owner = torch.arange(tokens, device=hidden.device).expand(n, -1)
        self.metric: Tensor | None = None
        self.open = True

    def step(self, method: EncoderMethod, hidden: Tensor, remove: int) -> Tensor:
        """Merge ``remove`` tokens of ``hidden [N, T, C]``."""
        assert self.metric is not None
        target = method.match(self.metric, remove, self.cls)
        made = Reduction.merge(target, torch.ones_like(target, dtype=torch.bool), self.size)
        rank = made.kept.cumsum(1) - 1
        self.owner = rank.gather(1, target).gather(1, self.owner)
        self.size = compact(made.mass(self.size), made.kept)
        return made.apply(hidden)

    def attention(self, number: int | None, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """Note the keys for the next merge; weigh merged tokens by the patches they stand for."""
        if not self.open:
            return mask
        self.metric = key.float().mean(1)
        if self.size.shape[1] == self.owner.shape[1]:
            return mask
        if mask is not None:
            raise UnsupportedError("Merging inside the encoder does not work with pictures that have padded patches.")
        return self.size.log()[:, None, None].to(key.dtype)

    def restore(self, values: Tensor) -> Tensor:
        """``[N, T - cls, ...]`` per remaining patch to ``[N, T0 - cls, ...]`` per original patch."""
        if not self.open:
            return values
        rows = torch.arange(len(values), device=values.device)[:, None]
        return values[rows, self.owner[:, self.cls :] - self.cls]

    def first(self) -> Tensor:
        """``[N, T0 - cls]`` bool: the first patch of every group."""
        patches = self.owner[:, self.cls :]
        order = patches.argsort(dim=1, stable=True)
        grouped = patches.gather(1, order)
        starts = torch.ones_like(grouped, dtype=torch.bool)
        starts[:, 1:] = grouped[:, 1:] != grouped[:, :-1]
        return torch.zeros_like(starts).scatter_(1, order, starts)


class EncoderMerging:
    """The hooks of an encoder-site method on the towers of one model; inert without one."""

    def __init__(self, family: Family, method: EncoderMethod | None, retain: Retain | None) -> None:
        self.family, self.method, self.retain = family, method, retain
        self.handles: list[Any] = []
        if method is None:
            return
        if not family.mergeable:
            raise UnsupportedError(
                f"Method {method.name!r} cannot merge inside the {family.name} tower, which packs pictures into one sequence; "
                "use a method at site 'projector', such as 'divprune' or 'pool'."
            )
        last = family.feature_layer
        for tower in family.towers():
            layers = family.tower_layers(tower)
            for number in range(1, last + 1):
                self.handles.append(layers[number].register_forward_pre_hook(self._enter(number, last)))
            self.handles.append(layers[0].register_forward_pre_hook(self._start))
            self.handles.append(layers[last].register_forward_hook(self._restore, prepend=True))

    def _start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        scope = current()
        if scope is not None and scope.encoding is not None:
            scope.encoding.merged = Merged(args[0], int(self.family.has_cls))

    def _enter(self, number: int, last: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            scope = current()
            if scope is None or scope.encoding is None or scope.encoding.merged is None:
                return None
            merged = scope.encoding.merged
            assert self.method is not None and self.retain is not None
            patches = merged.owner.shape[1] - merged.cls
            plan = self.method.schedule(patches, last, resolve(self.retain, patches))
            if plan[number - 1] == 0:
                return None
            return merged.step(self.method, args[0], plan[number - 1]), *args[1:]

        return hook

    def _restore(self, module: nn.Module, args: Any, output: Any) -> Any:
        scope = current()
        if scope is None or scope.encoding is None or scope.encoding.merged is None:
            return None
        merged = scope.encoding.merged
        hidden = output[0] if isinstance(output, tuple) else output
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        full = hidden[rows, merged.owner]
        merged.open = False
        return (full, *output[1:]) if isinstance(output, tuple) else full

    def survivors(self, layout: Layout, encoded: dict[Modality, Encoded]) -> Tensor | None:
        """``[B, S]`` bool: visual places that stay, those that hold the first patch of some group; None without merging."""
        if self.method is None:
            return None
        first: dict[Modality, Tensor] = {}
        for modality in dict.fromkeys(segment.modality for segment in layout.segments):
            merged = encoded[modality].merged
            assert merged is not None
            values = [merged.first().float()]
            first[modality] = (self.family.to_tokens(modality, encoded[modality], values) > 0).cpu()
        kept = torch.zeros_like(layout.valid)
        for segment in layout.segments:
            source = segment.tile.source
            kept[segment.row, segment.places] = first[segment.modality][source.clamp(min=0)] | (source < 0)
        return kept
