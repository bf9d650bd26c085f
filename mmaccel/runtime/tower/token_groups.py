"""Groups of merged tokens, as the towers hand them to the language model, whose budget counts its own tokens.

The budget is met exactly, per picture or clip. A tower knows tiles and frames only: it merges each down to the same ratio.
Cropped padding, newlines and blends of patches make of that some tokens more or fewer than the budget.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.budget import counts, kept_whole
from ...core.layout import Layout, Modality, Units
from ...core.precision import without_autocast
from ...core.reduction import Reduction, top_mask
from ...core.stats import Stats
from ...families.tower import Towers
from ...merging.aim import AimMerge
from ...method import EncoderMethod, TokenBatch
from ..call.compact_tokens import CompactTokens
from ..call.forward import gathered
from ..call.plan import Plan, PlannedStage, record
from ..call.vision_output import VisionOutput


def settle(
    plan: Plan, stats: Stats, layout: Layout, encoded: Mapping[Modality, VisionOutput], embeds: Tensor
) -> tuple[Reduction, Reduction | None] | None:
    """Meet the budget in tokens of the language model; None if every visual token of ``embeds [B, S, D]`` stays.

    The first reduction, in places ``[B, S]`` on the CPU, is that of the towers: its tokens hold their merged values
    already. Of each group one token stays; where groups are fewer than the budget, further tokens stay, first those that
    blend patches of several groups, then one more of the group that has most tokens for each of its places. Where they are
    more, the second reduction merges as :class:`AimMerge` does: newlines go first, then the most similar tokens of a tile
    or frame merge.
    """
    if (stage := plan.encoder) is None:
        return None
    units = layout.units("picture")
    size = units.valid.sum(1).tolist()
    count = merged_count(stage, units, stats)
    target = targets(plan.towers, layout, encoded)
    for row, places, valid, wanted in zip(units.row.tolist(), units.places, units.valid, count.tolist(), strict=True):
        at = places[valid]
        more = at[_further(target[row, at], at, wanted)]
        target[row, more] = more
    stays = (target == torch.arange(target.shape[1])) & layout.visual
    record(stats, stage, sum(size), int(count.sum()), int(count.sum()))
    if torch.equal(stays, layout.visual) and count.tolist() == size:
        return None
    merged = Reduction.merge(target, layout.visual)
    left = units.only(stays)
    if bool((left.valid.sum(1) <= count).all()):
        return merged, None
    fields, _, _, (budget,) = gathered(left, embeds, left.row, left.places.clamp(min=0), count)
    with without_autocast(embeds.device):
        rest = AimMerge().reduce(TokenBatch(**fields), budget).cpu()
    return merged, rest.relabel(left.places, left.row, target.shape)


def merged_count(stage: PlannedStage[EncoderMethod], units: Units, stats: Stats) -> Tensor:
    """``[N]`` long: number of tokens of each picture that stay."""
    size = units.valid.sum(1).tolist()
    stats.notes += kept_whole(stage.method.name, stage.budget, size)
    return counts(stage.budget, size, size, units.picture)


def targets(towers: Towers, layout: Layout, encoded: Mapping[Modality, VisionOutput]) -> Tensor:
    """Target of every place in the towers, ``[B, S]`` long on the CPU: the place it merged into, -1 if dropped.

    A group stays at the place its merged token has in the tower, or at its first place if that one was cropped. Where a
    token is a blend of patches that do not merge as one (pooled clips), it stays if any of them represents its group.
    """
    held = {m: held_groups(towers, m, seen, seen.merged) for m, seen in encoded.items() if seen.merged}
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


def held_groups(
    towers: Towers, modality: Modality, encoded: VisionOutput, merged: CompactTokens
) -> tuple[Tensor, Tensor]:
    """The group of every token that the tower delivers features for, ``[tokens]`` on the CPU, and whether it represents its
    group. Blends have groups of their own, negative."""
    own = torch.arange(len(merged.owner), device=merged.owner.device)
    # a block is known by its first patch
    units = towers.blocks(encoded, merged.patches(own).shape[1])
    own, group = merged.patches(own).clone(), merged.patches(merged.place[merged.owner]).clone()
    for ids in (own, group):
        ids[:, units] = ids[:, units[:, :1]].expand(-1, -1, units.shape[1]).clone()
    values = torch.stack([own.double(), group.double(), (own == group).double()], dim=-1)
    own, group, stands = towers.to_tokens(modality, encoded, [values]).cpu().unbind(-1)
    if len(own) < merged.tiles * len(units):
        return -1 - torch.arange(len(own)), stands > 0
    return group.long(), own == group


def _further(into: Tensor, at: Tensor, wanted: int) -> Tensor:
    """Mask ``[n]`` bool of further tokens at the places ``at [n]``, which flow ``into [n]``, so that ``wanted`` stay."""
    alone = into == at
    _, group, sizes = into.unique(return_inverse=True, return_counts=True)
    order = (2 * group + (~alone).long()).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(at)) - (sizes.cumsum(0) - sizes)[group[order]]
    merit = (sizes[group] / (rank + 1)).masked_fill(into < 0, torch.inf)
    return top_mask(merit[None], ~alone[None], torch.tensor([max(0, wanted - int(alone.sum()))]))[0]
