"""A prompt that lower layers read in chunks, which are rows of the batch and join between layers: what a
:class:`mmaccel.method.ChunkMethod` is shown of it, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.chunks import Chunks, Join, Span
from ..kv import chunks as cached
from ..kv.cache import CacheState
from ..method import ChunkMethod, TokenBatch
from . import tokens
from .forward import Chunked, Prompt, StageResult, sent
from .plan import record


# --- cutting ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Middle:
    """All between the first visual token of a row and its last.

    begin, end : of it, among the row's tokens.
    visual : how many of these are visual.
    low, high : ``[n]``, the lowest and highest position of each over axes.
    behind : that of the first token behind; None where there is none.
    furthest : the highest position of the row.
    """

    begin: int
    end: int
    visual: int
    low: Tensor
    high: Tensor
    behind: float | None
    furthest: float

    @staticmethod
    def of(visual: Tensor, axes: Tensor) -> _Middle:
        """Of a row whose tokens are ``visual [n]`` bool and stand at ``axes [a, n]``."""
        at, low, high = visual.nonzero()[:, 0], axes.amin(0), axes.amax(0)
        begin, end = (int(at[0]), int(at[-1]) + 1) if len(at) else (len(visual), len(visual))
        behind = low[end].item() if end < len(low) else None
        return _Middle(begin, end, len(at), low[begin:end], high[begin:end], behind, high.max().item())

    def span(self, levels: int) -> Span:
        """How it is cut for a tree of so many levels."""
        return Span(self.begin, self.end, max(1, -(-(self.end - self.begin) // 2**levels)))

    def levels(self, method: ChunkMethod, kept: int, depth: int, limit: int | None) -> int:
        """How many levels join, of a tree in which ``kept`` visual tokens are left, in a model of ``depth`` layers with
        ``limit`` positions."""
        if not self.visual:
            return 0
        chunks = max(-(-self.visual // kept), -(-(self.end - self.begin) // (method.length or self.end)))
        levels, highest = (chunks - 1).bit_length(), method.highest(depth)
        if limit is not None and self.furthest >= limit:
            while levels < highest and float(self.extents(self.span(levels))[1].max()) > limit // 2:
                levels += 1
        return min(levels, highest)

    def extents(self, span: Span) -> tuple[Tensor, Tensor]:
        """The lowest position of every chunk, and how many positions it reaches over, ``[chunks]``."""
        lowest = torch.stack([x.min() for x in self.low.split(span.length)])
        return lowest, torch.stack([x.max() for x in self.high.split(span.length)]) + 1 - lowest

    def moves(self, span: Span) -> tuple[Tensor, Tensor, Tensor]:
        """By how many positions each chunk comes forward, ``[chunks]``, by how many what is behind all of them, and how many
        the middle as a whole reaches over less than before, ``[]``.

        Every chunk begins where the middle did. What is behind comes so far forward as the middle is shorter; where frames of
        a slow clip stood later than the question, no further than behind the longest chunk.
        """
        if not self.visual:
            none = self.low.new_zeros(())
            return none[None], none, none
        lowest, extent = self.extents(span)
        first, longest = self.low.min(), extent.max()
        whole = self.high.max() + 1 - first
        before = whole if self.behind is None else (self.behind - first).clamp(max=whole)
        return lowest - first, (before - longest).clamp(min=0), whole - longest


def cut(prompt: Prompt, chosen: Tensor, planes: list[Tensor], kwargs: dict[str, Any]) -> Tensor:
    """Cut what is left of a prompt into chunks, and put them into the arguments of the text model.

    Parameters
    ----------
    chosen : ``[B, q]`` long on the CPU, the places of the tokens that the arguments hold; -1 for padding.
    planes : DeepStack features ``[B, S, D]`` at all places.

    Returns
    -------
    ``[R, q]`` long, the places of the tokens that the arguments hold now; those of ``chosen`` where nothing is cut.
    """
    stage, depth = prompt.plan.chunks, prompt.plan.family.depth
    assert stage is not None
    whole = prompt.layout.units(stage.method.unit)
    present = whole.only(prompt.total.kept).valid.sum(1)
    count = tokens.budget(prompt, stage, whole, present)
    record(prompt.stats, stage, int(present.sum()), int(count.sum()), int(present.sum()))
    given, visual = kwargs["position_ids"], prompt.layout.visual
    axes = given.cpu() if given.dim() == 2 else given[-3:].cpu()
    limit = getattr(prompt.plan.family.text.config, "max_position_embeddings", None)
    rows, middles, spans = [], [], []
    for row, places in enumerate(chosen):
        rows.append(places[places >= 0])
        middles.append(_Middle.of(visual[row, rows[-1]], axes.view(-1, *chosen.shape)[:, row, places >= 0]))
        kept = int(count[whole.row == row].sum())
        spans.append(middles[-1].span(middles[-1].levels(stage.method, kept, depth, limit)))
    if all(span.chunks == 1 for span in spans):
        return chosen
    now = Chunks.cut(rows, spans)
    joins = [stage.method.joins((span.chunks - 1).bit_length(), depth) for span in spans]
    moves = [middle.moves(span) for middle, span in zip(middles, spans, strict=True)]
    parts, behind, shorter = zip(*moves, strict=True)
    _place(prompt, now, chosen, torch.cat(parts), torch.stack(behind), planes, kwargs)
    if prompt.state is not None:
        _follow(prompt.state, now, joins, torch.stack(behind), torch.stack(shorter))
    where = kwargs["position_ids"]
    prompt.chunked = Chunked(stage, now, joins, where if where.dim() == 2 else where[-3], count)
    prompt.stats.notes.append(_told(stage.method, now, spans, joins))
    return now.places


def _place(
    prompt: Prompt,
    now: Chunks,
    chosen: Tensor,
    moves: Tensor,
    behind: Tensor,
    planes: list[Tensor],
    kwargs: dict[str, Any],
) -> None:
    """Write chunks into the arguments of the text model, moved by ``moves [R]`` and ``behind [B]`` (:meth:`_Middle.moves`)."""
    embeds, given = kwargs["inputs_embeds"], kwargs["position_ids"]
    there, places = now.places >= 0, now.places.clamp(min=0)
    middle = there & ~now.shared
    # text behind stands later than all that is between
    last = torch.where(middle, now.places, -1).amax(1)
    last = torch.full((len(chosen),), -1).scatter_reduce(0, now.row, last, "amax")
    moved = torch.where(middle, moves[:, None], 0)
    moved = torch.where(there & (now.places > last[now.row, None]), behind[now.row, None], moved)
    visual = prompt.layout.visual[now.row[:, None], places] & there
    at = prompt.slots(chosen)[now.row].gather(1, places)
    spots = visual.flatten().nonzero()[:, 0]
    row, at, places, seen, spots = sent(embeds.device, now.row[:, None], at, places, visual, spots)
    kwargs["inputs_embeds"] = embeds[row, at]
    kwargs["position_ids"] = given[..., row, at] - moved.to(given.device)
    if planes:
        features = [plane[row, places].flatten(0, 1)[spots] for plane in planes]
        kwargs |= prompt.plan.family.deep_arguments(seen.bool(), features)


def _follow(state: CacheState, now: Chunks, joins: list[list[int]], behind: Tensor, shorter: Tensor) -> None:
    """Let a cache go on where positions have come forward, ``behind`` and ``shorter [B]`` (see :meth:`_Middle.moves`), and have
    the rows of chunks."""
    assert state.offset is not None
    behind, shorter = behind.to(state.offset.device), shorter.to(state.offset.device)
    state.offset = state.offset + behind
    if state.ahead is not None:
        state.ahead = (state.ahead - shorter + behind).clamp(min=0)
    for layer in {layer for each in joins for layer in each}:
        # from there on other tokens are stored
        state.shared.split(layer)
    cached.spread(state, now.row)


def _told(method: ChunkMethod, now: Chunks, spans: list[Span], joins: list[list[int]]) -> str:
    """What the notes of the statistics say of a prompt."""
    layers = sorted({layer for each in joins for layer in each})
    return (
        f"{method.name} has layers read {len(now.row)} chunks of at most {max(span.length for span in spans)} tokens between "
        f"copies of the text, which join before layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    )


# --- joining ----------------------------------------------------------------------------------------------------------
def join(prompt: Prompt, layer: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Drop tokens of the chunks that join at the input of ``layer``, and join them: ``hidden [R, q, D] -> [r, w, D]``. The rows
    of its other ``arguments`` and of the cache follow."""
    chunked, state = prompt.chunked, prompt.state
    assert chunked is not None
    now = chunked.now
    into = now.pairs(chunked.joining(layer))
    _reduce(prompt, chunked, into, layer, hidden)
    stays = prompt.total.kept[now.row[:, None], now.places.clamp(min=0)]
    chunked.now, how = now.join(stays, into)
    prompt.begin(layer, chunked.now.places, chunked.now.padded, hidden.device, **_arguments(how, arguments))
    if state is not None:
        cached.join(state, layer, how, prompt.incoming.phase(layer))
    chunked.positions = how.to(chunked.positions.device).pick(chunked.positions)
    counted = prompt.stats.layer_tokens
    counted[layer:] = [int((prompt.total.kept & prompt.layout.visual).sum())] * (len(counted) - layer)
    return how.to(hidden.device).apply(hidden)


def _arguments(how: Join, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the layers above that have a row for every chunk: positions, and what RoPE turns by, of which one row
    may stand for all."""
    made: dict[str, Any] = {}
    if given.get("position_embeddings") is not None:
        made["position_embeddings"] = tuple(how.to(x.device).pick(x) for x in given["position_embeddings"])
    if isinstance(positions := given.get("position_ids"), Tensor):
        # GLM-4.5V shows its layers all three axes
        rows = positions.movedim((-2, -1), (0, 1))
        made["position_ids"] = how.to(positions.device).pick(rows).movedim((0, 1), (-2, -1))
    return made


def _reduce(prompt: Prompt, chunked: Chunked, into: Tensor, layer: int, hidden: Tensor) -> None:
    """Let the method drop tokens of the chunks that go ``into [R]`` others two by two."""
    method, total, shape = chunked.stage.method, prompt.total, prompt.total.kept.shape
    part, slot = chunked.now.tables(shape)
    joins = into.bincount()[into] == 2
    part = part.masked_fill(~total.kept | ~prompt.layout.visual | ~joins[part], -1)
    if not bool((part >= 0).any()):
        # text between pictures is all there is
        return
    units, picture, chunk = prompt.layout.units(method.unit).split(part)
    there = units.valid.sum(1)
    count = _shares(there, chunked.count[picture], picture, chunk, into)
    at = slot[units.row[:, None], units.places.clamp(min=0)].masked_fill(~units.valid, 0)
    found, rows, at, (wanted, entered) = tokens.gathered(units, hidden, chunk, at, count, there)
    signals = {
        name: x.to(hidden.device)[rows[:, None], at].masked_fill(~found["valid"], torch.nan)
        for name, x in chunked.looked.items()
    }
    clips = (units.grid[:, 0] > 1).tolist()
    batch = TokenBatch(**found, entered=entered, left=there[:, None], clips=clips, signals=signals)
    # a choice has no gradient
    with torch.no_grad():
        made = tokens.checked(method, method.reduce(batch, wanted), units.valid, count)
    prompt.stats.stages[chunked.stage.number].tokens_kept += int(made.kept.sum() - made.valid.sum())
    made = made.relabel(units.places, units.row, shape)
    prompt.total = total.then(made.beside(total.kept & ~made.valid))
    prompt.history.append(StageResult(chunked.stage.number, layer, prompt.total, units, signals))


def _shares(there: Tensor, budget: Tensor, picture: Tensor, chunk: Tensor, into: Tensor) -> Tensor:
    """How many tokens stay of those ``there [M]`` that chunk ``chunk [M]`` has of picture ``picture [M]``, so that the two
    that join have ``budget [M]`` together, or all they have: half each, unless the other one has fewer. All long."""
    has = torch.zeros(int(picture.max()) + 1, len(into) + 2, dtype=torch.long)
    has[picture, chunk + 1] = there
    right = into[chunk] == torch.cat([into.new_tensor([-1]), into])[chunk]
    other = torch.where(right, has[picture, chunk], has[picture, chunk + 2])
    half = torch.where(right, budget // 2, budget - budget // 2)
    return torch.maximum(half, budget - other).minimum(there)
