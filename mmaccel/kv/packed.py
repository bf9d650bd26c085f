"""A cache layer that stores what codecs pack in pages, and the rest in full precision behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from mmaccel_kernels.compact import Compacted, compact
from mmaccel_kernels.pages import Pages
from torch import Tensor

from ..method.results import check_type
from .codecs import Cuts, Eligible, TokenGroup
from .index import KeyIndex, on_host, to_device
from .key_bias import KeyBias, Rotations
from .layer import CompressedLayer, KeptKeys
from .packed_keys import Held, PackedGroup, PackedKeys
from .selection import Selection
from .shared_prefix import SharedPrefix


@dataclass(frozen=True)
class Moves:
    """Places of the tokens in full precision of a layer, some of which are packed (``taken``) and the others ``left``."""

    taken: Selection
    left: Selection

    @staticmethod
    def of(layer: QuantisedLayer, due: Tensor, count: Tensor) -> Moves:
        """Pack what is ``due [B, 1 or Hkv, R]`` bool, ``count [B, 1 or Hkv]`` long on the CPU of every head."""
        heads, live = layer.keys.shape[1], layer.packed.live
        rest = layer.index.by_head[..., layer.width :].expand(-1, due.shape[1], -1)
        lengths = (rest >= 0).sum(-1).cpu() if live is None else layer.index.lengths - live
        lengths = lengths - count
        return Moves(Selection.of(rest, due, heads, count), Selection.of(rest, (rest >= 0) & ~due, heads, lengths))


@dataclass
class SharedPacking:
    """Indices and cuts of pages, which layers share that pack the same tokens in one forward.

    indices : old and new ones by the id of the old one, so that layers which shared one go on sharing one.
    moves : of layers with that old index and as many heads, where the tokens of a group go, of which so many are packed. Its
        id stays its own: :meth:`QuantisedLayer.pack` has ``indices`` hold every index that ``moves`` knows.
    """

    indices: dict[int, tuple[KeyIndex, KeyIndex]] = field(default_factory=dict)
    moves: dict[tuple[int, int, int, tuple[int, ...]], Moves] = field(default_factory=dict)
    cuts: Cuts = field(default_factory=Cuts)

    def behind(self, old: KeyIndex) -> KeyIndex | None:
        """The index of layers that had an ``old`` one, once one of them was packed; None before."""
        known = self.indices.get(id(old))
        return None if known is None else known[1]

    def moves_of(
        self, layer: QuantisedLayer, group: TokenGroup, eligible: Eligible, packable: Tensor, valid: Tensor | None
    ) -> Moves:
        """Places of the tokens of a layer, of which the first ``packable [B, 1 or Hkv]`` long on the CPU are packed; ``valid``
        is :meth:`QuantisedLayer.eligible_slots`, where it is known."""
        index = layer.index
        at = id(index), group.number, layer.keys.shape[1], tuple(packable.flatten().tolist())
        moves = self.moves.get(at)
        if moves is None:
            valid = layer.eligible_slots(eligible) if valid is None else valid
            due = valid & (valid.cumsum(-1) <= to_device(packable, valid.device)[..., None])
            moves = Moves.of(layer, due, packable)
            if not index.of_heads and layer.packed.dequantised is None:
                # layers that share an index store the same
                self.moves[at] = moves
        return moves


class QuantisedLayer(CompressedLayer):
    """A layer whose slots are the places of the packed tokens of every head, group after group, then those in full precision.

    A token is packed once. It can be dropped; its place is then treated as described at
    :meth:`mmaccel_kernels.pages.Pages.compacted`. The last few tokens that share scales go back to full precision, as what
    their codes represent, when they take less memory so; they are not packed again.
    """

    #: bias of its keys, which is not packed, ``[Hkv, D]`` float32 on its device; None without one
    key_bias: Tensor | None = None

    @property
    def bias(self) -> KeyBias | None:
        """Bias that packed keys lack, and what it is rotated by; None without one."""
        rotations = self.shared.memory(Rotations)
        return None if self.key_bias is None or rotations is None else KeyBias(self.key_bias, rotations)

    def bias_products(self, query: Tensor) -> Tensor | None:
        """Products of ``query [B, Hq, q, D]`` with the bias that packed keys lack, ``[B, Hq, q, width]`` float32; None without
        one."""
        return None if self.bias is None else self.bias.products(query, self.index.by_head[..., : self.width])

    @property
    def pages(self) -> Pages | None:
        """Packed keys of the first token group."""
        return self.packed.pages[0] if self.packed.pages else None

    @property
    def width(self) -> int:
        """Slots of all packed keys."""
        return self.packed.width

    def stored(self) -> tuple[Tensor, Tensor]:
        """All keys and values as ``[B, Hkv, K, D]``, packed ones decoded; short heads are padded (see ``index``)."""
        if not self.packed.any_pages:
            return super().stored()
        pages = self.packed.only
        if pages is not None and self.ragged is None and pages.even:
            keys, values = (_behind(x, self.width) for x in (self.keys, self.values))
            pages.decoded_into(keys[:, :, : self.width], values[:, :, : self.width])
        else:
            rest = super().stored()
            parts = [*self.packed.decoded(rest[0].dtype), rest]
            keys, values = torch.cat([k for k, _ in parts], dim=2), torch.cat([v for _, v in parts], dim=2)
        if (bias := self.bias) is not None:
            keys[:, :, : self.width] += bias.keys(self.index.by_head[..., : self.width]).to(keys.dtype)
        return keys, values

    def pack(
        self,
        group: TokenGroup,
        eligible: Eligible,
        shared: SharedPacking,
        query_energy: Tensor | None = None,
        count: Tensor | None = None,
    ) -> None:
        """Pack the tokens of one group that are due.

        Parameters
        ----------
        eligible : the places that its tokens may have.
        shared : with other layers.
        query_energy : see :class:`~mmaccel.kv.codecs.base.Cut`.
        count : ``[B, 1 or Hkv]`` long on the CPU, how many tokens of the group are in full precision, where it is known; else
            the host waits for it.
        """
        if self.empty or self.too_few(group, eligible):
            return
        valid = None
        if count is None:
            valid = self.eligible_slots(eligible)
            count = valid.sum(-1).cpu()
        packable = group.codec.due(count.expand(-1, self.index.by_head.shape[1]))
        if not bool(packable.any()):
            return
        old = self.index
        if _fill_slots(self, group, count) and len(packable.unique()) == 1:
            _pack_first(self, group, int(packable[0, 0]), query_energy, shared.cuts)
            # whoever remembers the old one is told that slots mean something else
            self.index = old.clone()
        else:
            self.pack_due(group, shared.moves_of(self, group, eligible, packable, valid), query_energy, shared)
        if (known := shared.behind(old)) is not None:
            self.index = known
        elif not old.of_heads:
            shared.indices[id(old)] = (old, self.index)

    def pack_due(self, group: TokenGroup, moves: Moves, energy: Tensor | None, shared: SharedPacking) -> None:
        """Pack the tokens of a group that are due."""
        index, groups, taken, left = shared.behind(self.index), self._take_packed(), moves.taken, moves.left
        rest, every = self.index.by_head, taken.lengths.expand(-1, self.keys.shape[1])
        keys, values = super().stored()
        coded = keys if (bias := self.bias) is None else (keys.float() - bias.keys(rest)).to(keys.dtype)
        flat = compact(coded, values, taken.plan)
        received = self.schedule.received
        groups = _at_least(groups, group, rest[..., :0], None if received is None else received[..., :0])
        own = groups[group.number].of_heads(taken.index.shape[1])
        peak = None
        if group.codec.sees_all_values and bool(left.lengths.any()):
            peak = values.float().abs().masked_fill((rest < 0)[..., None], 0.0).amax(2)
        pages = _packed(group, groups, own, flat._replace(lengths=every), energy, peak, shared.cuts)
        groups[group.number] = own.extended(pages, taken, received)
        self.take(KeptKeys.selected(keys, values, left, self.schedule.figures(keys.shape[2])))
        self._join(groups, self.packed.dequantised, index)

    def too_few(self, group: TokenGroup, eligible: Eligible) -> bool:
        """Whether the host knows that too few tokens are in full precision for any of a group to be packed."""
        if self.empty:
            return True
        return eligible.others and len(self.index) - self.width < group.codec.residual + group.codec.page

    def eligible_slots(self, eligible: Eligible) -> Tensor:
        """Mask of the tokens in full precision that may be packed, ``[B, 1 or Hkv, R]`` bool."""
        rest = self.index.by_head[..., self.width :]
        there = rest >= 0
        if self.packed.dequantised is not None:
            there = there & ~self.packed.packed_before(there)
        return eligible.among(rest, there)

    @property
    def loose(self) -> Tensor | None:
        """Number of tokens in full precision that may be packed, ``[B, 1 or Hkv]`` long on the CPU; None where only the device
        knows."""
        live = self.packed.live
        if live is None or self.packed.dequantised is not None or self.empty or not self.index.known:
            return None
        return self.index.lengths - live

    def needed_on_host(self, kept: Tensor) -> list[Tensor]:
        """Tensors that the host must know to evict all but ``kept`` from packed keys; none where none are packed."""
        if self.packed.untouched:
            return []
        there = self.index.by_head >= 0
        return [there, kept & there, *self.packed.needed_on_host()]

    def evict(
        self,
        kept: Tensor,
        merged: tuple[Tensor, Tensor] | None = None,
        lengths: Tensor | None = None,
        known: Sequence[Tensor] | None = None,
    ) -> None:
        """Free everything but ``kept``. Packed tokens are dropped or stay as they are; ``merged`` does not reach them.
        ``known``: see :meth:`needed_on_host`, on the CPU; by default the host waits for it."""
        if self.packed.untouched:
            super().evict(kept, merged, lengths)
            return
        there, stays, *others = on_host(self.needed_on_host(kept)) if known is None else known
        packed, width = self.packed.on_host(others), self.width
        token = (self.keys.shape[-1] + self.values.shape[-1]) * self.keys.element_size()
        index, received, unpacked = (
            self.index,
            self.schedule.received,
            packed.cheaper_unpacked(stays[..., :width], token),
        )
        dequantised = unpacked.sum(-1) + (stays[..., width:] & packed.packed_before(there[..., width:])).sum(-1)
        count, alive = stays[..., width:].sum(-1), stays[..., :width] & ~unpacked
        kept, device, dequantises = kept & (index.by_head >= 0), index.index.device, bool(unpacked.any())
        left, rest = kept[..., :width], kept[..., width:]
        if dequantises:
            merged = self.stored() if merged is None else merged
            moved = to_device(unpacked, device)
            left, rest, count = left & ~moved, torch.cat([moved, rest], dim=-1), count + unpacked.sum(-1)
        elif merged is not None:
            merged = merged[0][:, :, width:], merged[1][:, :, width:]
        parts = left.split(packed.widths, dim=-1), alive.split(packed.widths, dim=-1), packed.pages
        groups = [group.kept(*part) for group, *part in zip(self._take_packed(), *parts, strict=True)]
        if dequantises:
            self.index, self.schedule.received = index, received
        dequantises |= self.packed.dequantised is not None
        super().evict(rest, merged, count)
        self._join(groups, to_device(dequantised, device) if dequantises else None)

    def _crop_stored(self) -> None:
        """Drop tokens from ``seen`` on; packed ones are cut off their pages."""
        if self.packed.untouched:
            super()._crop_stored()
            return
        groups = [group.cropped(self.seen) for group in self._take_packed()]
        rest, dequantised = self.index.by_head, self.packed.dequantised
        stays = (rest >= 0) & (rest < self.seen)
        if dequantised is not None:
            dequantised = (stays & self.packed.packed_before(rest >= 0)).sum(-1)
        super().evict(stays)
        self._join(groups, dequantised)

    def move(self, moved: Callable[[Tensor, int], Tensor]) -> None:
        """Replace every tensor of keys and values, codes and scales by what ``moved(x, dim)`` returns."""
        super().move(moved)
        if self.packed.any_pages:
            self.packed = self.packed.moved(moved)

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor this layer holds."""
        own = () if self.key_bias is None else (self.key_bias,)
        yield from (*super().tensors(), *self.packed.tensors(), *own)

    def _select(self, rows: Tensor) -> None:
        super()._select(rows)
        self.packed = self.packed.select(rows)
        self._park()

    def share(self, rows: Tensor) -> None:
        """Select ``rows [n]`` long, of which each may come several times; what they store stays stored once, in front of what
        each of them adds. Packed keys are copied for every row."""
        if not self.is_initialized or not self.packed.untouched or self.prefix is not None:
            self._select(rows)
            return
        full = not self.index.padded
        if self.number == 0:
            self.shared.select(rows)
        self.prefix, self.ragged = SharedPrefix(self.keys, self.values, self.ragged, rows.cpu(), full), None
        self.keys, self.values = (x.new_empty(len(rows), x.shape[1], 0, x.shape[3]) for x in (self.keys, self.values))
        self.schedule.select(rows)

    def packed_once(self) -> Tensor:
        """``[B, 1 or Hkv, K]`` bool: which slots hold what is packed, or was once."""
        there = self.index.by_head >= 0
        return torch.cat([there[..., : self.width], self.packed.packed_before(there[..., self.width :])], dim=-1)

    # --- the two parts ----------------------------------------------------------------------------------------
    def _take_packed(self) -> list[PackedGroup]:
        """Take the packed keys away: a layer without pages is left, until :meth:`_join`."""
        index, packed, width = self.index.by_head, self.packed, self.width
        received = self.schedule.figures(index.shape[-1])
        if received is not None:
            self.schedule.received = received[..., width:]
        rest = index[..., width:]
        lengths = self.index.lengths - packed.live if self.index.known and packed.live is not None else None
        self.packed = PackedKeys(dequantised=packed.dequantised)
        self.index = KeyIndex(rest if rest.shape[1] > 1 else rest[:, 0], True, self.seen, lengths)
        return packed.split(index, received)

    def _join(self, groups: list[PackedGroup], dequantised: Tensor | None, known: KeyIndex | None = None) -> None:
        """Put packed keys before what is stored; the index of all may be ``known``. For ``dequantised`` see
        :class:`.packed_keys.PackedKeys`."""
        self.packed = PackedKeys.of(groups, dequantised)
        indices = [*(group.index for group in groups), self.index.by_head]
        heads, live = max(index.shape[1] for index in indices), self.packed.live
        assert live is not None
        if known is None:
            index = torch.cat([part.expand(-1, heads, -1) for part in indices], dim=-1)
            lengths = (self.index.lengths + live).expand(-1, heads)
            padded = bool((lengths < index.shape[-1]).any())
            known = KeyIndex(index if heads > 1 else index[:, 0], padded, self.seen, lengths)
        self.index = known
        if self.schedule.received is not None:
            figures = [group.received for group in groups if group.received is not None]
            self.schedule.received = torch.cat([*figures, self.schedule.received], dim=-1)
        self._park()


def _fill_slots(layer: QuantisedLayer, group: TokenGroup, count: Tensor) -> bool:
    """Whether the host knows that the ``count`` tokens of a group in full precision fill all slots of every head, and that
    these come right behind those that the group has packed."""
    behind, held = layer.packed.widths[group.number :], layer.packed.held[group.number : group.number + 1]
    if layer.ragged is not None or layer.prefix is not None or any(behind[1:]):
        return False
    ends = not any(behind) or (held[0] is not None and bool((held[0].places == behind[0]).all()))
    return ends and bool((count == len(layer.index) - layer.width).all())


def _pack_first(layer: QuantisedLayer, group: TokenGroup, count: int, query_energy: Tensor | None, cuts: Cuts) -> None:
    """Pack the first ``count`` slots in full precision, for which see :func:`_fill_slots`: no slot gets another place."""
    index, end, packed = layer.index.by_head, layer.width + count, layer.packed
    keys, values = layer.keys[:, :, :count], layer.values[:, :, :count]
    if (bias := layer.bias) is not None:
        keys = (keys.float() - bias.keys(index[..., layer.width : end])).to(keys.dtype)
    every = torch.full(keys.shape[:2], count)
    groups = _at_least(packed.split(index, None), group, index[..., :0], None)
    own = groups[group.number].of_heads(index.shape[1])
    flat = Compacted(keys.flatten(0, 2), values.flatten(0, 2), every)
    peak = None
    if group.codec.sees_all_values and count < layer.values.shape[2]:
        peak = layer.values.float().abs().amax(2)
    pages = _packed(group, groups, own, flat, query_energy, peak, cuts)
    held = Held(*(x + count for x in own.known()))
    groups[group.number] = PackedGroup(pages, index[..., layer.width - own.index.shape[-1] : end], None, held)
    layer.packed = PackedKeys.of(groups, packed.dequantised)
    # what is packed is not held by a view of all
    layer.keys, layer.values = (
        x[:, :, count:].clone(memory_format=torch.contiguous_format) for x in (layer.keys, layer.values)
    )
    layer._park()


def _at_least(
    groups: Sequence[PackedGroup], group: TokenGroup, index: Tensor, received: Tensor | None
) -> list[PackedGroup]:
    """Groups up to ``group`` and the one it is like, and what is held of them; those that have packed nothing yet have this
    ``index`` of no slots, and ``received``."""
    none = torch.zeros(index.shape[:2], dtype=torch.long)
    empty = PackedGroup(None, index, received, Held(none, none))
    missing = max(group.number, group.like) + 1 - len(groups)
    return [replace(one, held=one.known()) for one in (*groups, *[empty] * missing)]


def _packed(
    group: TokenGroup,
    groups: Sequence[PackedGroup],
    own: PackedGroup,
    flat: Compacted,
    query_energy: Tensor | None,
    peak: Tensor | None,
    cuts: Cuts | None,
) -> Pages:
    """Pages of ``own``, with the tokens ``flat`` behind those it has, whose ``lengths [B, Hkv]`` are on the CPU."""
    before, unused = own.choices(groups[group.like])
    empty = unused.expand_as(flat.lengths) if before is not None and bool(unused.any()) else None
    if query_energy is not None and (width := flat.keys.shape[-1]) < query_energy.shape[-1]:
        # of absorbed queries the first channels meet latents, which are packed as keys
        query_energy = query_energy[..., :width]
    packed = group.codec.pack(*flat, before, query_energy, empty, peak, cuts)
    new = check_type(group.codec, "pack()", packed, Pages)
    return new if own.pages is None else own.pages.appended(new)


def _behind(x: Tensor, width: int) -> Tensor:
    """``x [B, heads, n, D]`` behind room for so many more."""
    whole = x.new_empty(*x.shape[:2], width + x.shape[2], x.shape[3])
    whole[:, :, width:] = x
    return whole


def demote(
    layer: QuantisedLayer, group: TokenGroup, kept: Tensor, lengths: Tensor, query_energy: Tensor | None = None
) -> None:
    """Pack all tokens of a layer in full precision but those that are ``kept``; packed ones stay as they are.

    Parameters
    ----------
    group : of what is packed here; its codec packs whatever it is given, also less than a page.
    kept : ``[B, 1 or Hkv, K]`` bool, slots of :meth:`QuantisedLayer.stored`. lengths : ``[B, 1 or Hkv]`` long on the CPU, how
        many of the tokens in all are kept or packed already.
    query_energy : see :class:`~mmaccel.kv.codecs.base.Cut`.
    """
    there = layer.index.by_head[..., layer.width :] >= 0
    due = there & ~kept[..., layer.width :] & ~layer.packed.packed_before(there)
    count = layer.index.lengths - lengths
    if layer.packed.dequantised is not None:
        count = due.sum(-1).cpu()
    if bool(count.any()):
        layer.pack_due(group, Moves.of(layer, due, count.expand(due.shape[:2])), query_energy, SharedPacking())
