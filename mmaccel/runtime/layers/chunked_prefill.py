"""Chunked prefill: lower layers read a prompt in chunks, which are rows of the batch and join between layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.chunks import Chunks, Join, Span
from ...core.precision import without_autocast
from ...families.base import Family
from ...kv import chunked_prefill as cached
from ...kv.cache import CacheState
from ...kv.positions import NextPositions
from ...method import ChunkMethod, LayerAttention, TokenBatch
from ...method.refused import described, refuse
from ...method.results import check_figures, check_numbers
from ..call.forward import Prompt, gathered, to_device_packed
from ..call.plan import PlannedStage, record
from ..call.runs import LayerAttended, Run, TextInputs
from ..prompt import tokens


# --- cutting ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Row:
    """The tokens of one row of a prompt; its middle is the part from the first visual token to the last.

    begin, end : of the middle. visual : how many tokens are visual.
    axes : ``[a, n]``, positions on each axis.
    origin : ``[a, n]``, the same on the first axis; on others, for a visual token, the first position of its picture or frame.
    """

    begin: int
    end: int
    visual: int
    axes: Tensor
    origin: Tensor

    @staticmethod
    def of(prompt: Prompt, row: int, places: Tensor, axes: Tensor) -> _Row:
        """The row of the tokens at ``places [n]``, whose positions are ``axes [a, n]``."""
        at, origin = prompt.layout.visual[row, places].nonzero()[:, 0], axes.clone()
        for segment in prompt.layout.segments if len(axes) > 1 else ():
            mine = torch.isin(places, segment.places)
            if segment.row == row and bool(mine.any()):
                origin[1:, mine] = axes[1:, mine].amin(1, keepdim=True)
        begin, end = (int(at[0]), int(at[-1]) + 1) if len(at) else (len(places), len(places))
        return _Row(begin, end, len(at), axes, origin)

    @property
    def middle(self) -> Tensor:
        """``[a, m]``, the positions of its middle."""
        return self.axes[:, self.begin : self.end]

    def span(self, levels: int) -> Span:
        """Cut of the middle for a tree with this number of levels."""
        return Span(self.begin, self.end, max(1, -(-(self.end - self.begin) // 2**levels)))

    def levels(self, method: ChunkMethod, kept: int, depth: int, limit: int | None) -> int:
        """Number of levels that join, of a tree in which ``kept`` visual tokens are left, in a model of ``depth`` layers with
        ``limit`` positions."""
        if not self.visual:
            return 0
        chunks = max(-(-self.visual // kept), -(-(self.end - self.begin) // (method.length or self.end)))
        levels, highest = (chunks - 1).bit_length(), method.highest(depth)
        if limit is not None and float(self.axes.max()) >= limit:
            while levels < highest and self.reach(self.moves(self.span(levels))) > limit // 2:
                levels += 1
        return min(levels, highest)

    def moves(self, span: Span) -> Tensor:
        """Positions by which tokens of the middle move forward, ``[a, m]``.

        Every chunk begins at the time at which the middle did, and all in it is moved as much; but rows and columns of a
        picture or frame only so far as to where those of the middle begin.
        """
        first = self.middle.amin(1, keepdim=True)
        time = torch.cat([chunk.min().expand(len(chunk)) for chunk in self.middle[0].split(span.length)]) - first[0]
        return torch.minimum(time, self.origin[:, self.begin : self.end] - first)

    def reach(self, moves: Tensor | float) -> float:
        """Over how many positions the middle reaches, moved by so much."""
        return float((self.middle - moves).max() + 1 - self.middle.min())

    def settled(self, span: Span) -> tuple[Tensor, float, float]:
        """Positions by which all tokens move forward, ``[a, n]``, by which those behind the middle do, and by which the middle
        gets shorter.

        Tokens behind the middle move as far as it gets shorter; if frames of a slow clip were later than the question, no
        further than behind the longest chunk.
        """
        moved = torch.zeros_like(self.axes)
        if not self.visual:
            return moved, 0, 0
        moves = self.moves(span)
        before = whole = self.reach(0)
        if self.end < self.axes.shape[1]:
            before = min(whole, float(self.axes[:, self.end].min() - self.middle.min()))
        longest = self.reach(moves)
        behind = max(before - longest, 0)
        moved[:, self.begin : self.end], moved[:, self.end :] = moves, behind
        return moved, behind, whole - longest


def _budget(prompt: Prompt, stage: PlannedStage[ChunkMethod]) -> tuple[Tensor, list[int]]:
    """Budget in tokens of every picture, ``[N]`` long on the CPU, and of every row; begins the figures of the stage."""
    whole = prompt.layout.units(stage.method.unit)
    present = whole.only(prompt.total.kept).valid.sum(1)
    count = tokens.budget(prompt, stage, whole, present)
    record(prompt.stats, stage, int(present.sum()), int(count.sum()), int(present.sum()))
    return count, [int(count[whole.row == row].sum()) for row in range(len(prompt.layout.valid))]


def _place(prompt: Prompt, now: Chunks, chosen: Tensor, moves: Tensor, text: TextInputs) -> None:
    """Write chunks into the arguments of the text model, whose tokens come forward by ``moves [axes, B, q]``."""
    kwargs, planes = text.arguments, text.planes
    embeds, given, places = kwargs["inputs_embeds"], kwargs["position_ids"], now.places.clamp(min=0)
    visual = prompt.layout.visual[now.row[:, None], places] & (now.places >= 0)
    at = prompt.slots(chosen)[now.row].gather(1, places)
    row, at, places, seen, spots = to_device_packed(
        embeds.device, now.row[:, None], at, places, visual, visual.flatten().nonzero()[:, 0]
    )
    kwargs["inputs_embeds"] = embeds[row, at]
    kwargs["position_ids"] = (given - moves.view(given.shape).to(given.device))[..., row, at]
    kwargs |= prompt.plan.family.of_tokens(kwargs, lambda x: x[row.to(x.device), at.to(x.device)])
    if planes:
        features = [plane[row, places].flatten(0, 1)[spots] for plane in planes]
        kwargs |= prompt.plan.family.deep_arguments(seen.bool(), features)


def _follow(state: CacheState, now: Chunks, joins: list[list[int]], behind: Tensor, shorter: Tensor) -> None:
    """Let a cache go on where positions have come forward, ``behind`` and ``shorter [B]`` (see :meth:`_Row.settled`), and have
    the rows of chunks."""
    before = state.positions.next_turn()
    assert before.offset is not None
    behind, shorter = behind.to(before.offset.device), shorter.to(before.offset.device)
    ahead = None if before.ahead is None else (before.ahead - shorter + behind).clamp(min=0)
    state.positions = NextPositions(before.offset + behind, ahead)
    for layer in sorted({layer for each in joins for layer in each}):
        # from there on other tokens are stored
        state.shared.split(layer)
    cached.spread(state, now.row)


def _notes(
    method: ChunkMethod, spans: list[Span], joins: list[list[int]], furthest: int, limit: int | None
) -> list[str]:
    """Notes of the statistics about prompts that are cut into chunks, whose positions go up to ``furthest``."""
    layers = sorted({layer for each in joins for layer in each})
    notes = [
        f"{method.name} read {len(spans)} prompt{'s' * (len(spans) > 1)} as {sum(span.chunks for span in spans)} chunks of at "
        f"most {max(span.length for span in spans)} tokens between copies of the text, which join before "
        f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    ]
    if limit is not None and furthest >= limit:
        notes.append(
            f"{method.name}: positions still go up to {furthest}, and the model has {limit}; give a lower layer for more "
            "levels, or less text"
        )
    return notes


# --- running ----------------------------------------------------------------------------------------------------------
class ChunkedPrefill(Run):
    """The chunks of one prompt, as far as they have joined.

    stage : the method and its budget.
    """

    def __init__(self, prompt: Prompt, stage: PlannedStage[ChunkMethod]) -> None:
        self.prompt, self.stage = prompt, stage
        #: None where the prompt is not cut
        self._now: Chunks | None = None
        #: for every row of the prompt the layers at whose input its chunks join
        self._joins: list[list[int]] = []
        #: ``[R, q]``, positions of their tokens, on the first of several axes
        self._positions: Tensor = torch.empty(0)
        #: ``[N]`` long on the CPU, the budget of every picture in tokens
        self._count: Tensor = torch.empty(0)
        #: figures of their tokens by the method, from the attention before the next join, ``[R, q]``
        self._looked: dict[str, Tensor] = {}

    def cut(self, chosen: Tensor, text: TextInputs) -> Tensor:
        """Cut a reduced prompt into chunks, and put them into the arguments of the text model, which hold the tokens at the
        places ``chosen [B, q]`` (long on the CPU, -1 padding); returns the places that they hold now, ``[R, q]``."""
        prompt, method, family = self.prompt, self.stage.method, self.prompt.plan.family
        self._count, share = _budget(prompt, self.stage)
        given, valid = text.arguments["position_ids"], chosen >= 0
        # an axis before three is that of the text, which counts as time does
        axes = given.cpu()[None] if given.dim() == 2 else given.cpu()[-3:]
        limit = getattr(family.text.config, "max_position_embeddings", None)
        rows = [_Row.of(prompt, b, chosen[b, real], axes[:, b, real]) for b, real in enumerate(valid)]
        spans = [row.span(row.levels(method, kept, family.depth, limit)) for row, kept in zip(rows, share, strict=True)]
        if all(span.chunks == 1 for span in spans):
            return chosen
        now = Chunks.cut([places[real] for places, real in zip(chosen, valid, strict=True)], spans)
        joins = [_joins(method, (span.chunks - 1).bit_length(), family.depth) for span in spans]
        moved, behind, shorter = zip(*(row.settled(span) for row, span in zip(rows, spans, strict=True)), strict=True)
        moves = torch.zeros_like(axes)
        for b, real in enumerate(valid):
            moves[:, b, real] = moved[b]
        _place(prompt, now, chosen, moves if given.dim() < 3 or len(given) == 3 else moves[[0, 0, 1, 2]], text)
        if prompt.state is not None:
            _follow(prompt.state, now, joins, moves.new_tensor(behind), moves.new_tensor(shorter))
        where = text.arguments["position_ids"]
        self._now, self._joins, self._positions = now, joins, where if given.dim() == 2 else where[-3]
        prompt.stats.notes += _notes(method, spans, joins, int((axes - moves).max()), limit)
        return now.places

    def before_layer(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Join chunks that are due at the input of a layer: ``hidden [R, q, D] -> [r, w, D]``."""
        if not self._due(number):
            return hidden
        with self.prompt.measured("selection", hidden.device), without_autocast(hidden.device):
            return self._join(number, hidden, {**arguments, **self.prompt.arguments[-1].replaced})

    def after_attention(self, layer: LayerAttended) -> None:
        """Show the method the attention of a layer, if chunks join behind it."""
        if not self._due(layer.number + 1):
            return
        real, method, query = self.prompt.phase(layer.number).places >= 0, self.stage.method, layer.query
        with self.prompt.measured("selection", query.device):
            attention = LayerAttention(query, layer.key, layer.visible, layer.scaling, real)
            seen = method.observe(attention, self._positions, layer.number)
            self._looked = check_figures(method, "observe()", seen, (query.shape[0], query.shape[2]), query)

    def _due(self, layer: int) -> bool:
        """Whether chunks of any row join at the input of a layer."""
        return any(layer in layers for layers in self._joins)

    def _join(self, layer: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Drop tokens of the chunks that join at the input of ``layer``, and join them. The rows of its other ``arguments`` and
        of the cache follow."""
        prompt, state, now = self.prompt, self.prompt.state, self._now
        assert now is not None
        into = now.pairs(torch.tensor([layer in layers for layers in self._joins]))
        self._reduce(now, into, layer, hidden)
        stays = prompt.total.kept[now.row[:, None], now.places.clamp(min=0)]
        self._now, how = now.join(stays, into)
        prompt.begin(
            layer, self._now.places, self._now.padded, hidden.device, **_arguments(prompt.plan.family, how, arguments)
        )
        if state is not None:
            cached.join(state, layer, how, prompt.incoming.phase(layer))
        self._positions = how.to(self._positions.device).pick(self._positions)
        prompt.count_left(layer)
        return how.to(hidden.device).apply(hidden)

    def _reduce(self, now: Chunks, into: Tensor, layer: int, hidden: Tensor) -> None:
        """Let the method drop tokens of the chunks that go ``into [R]`` others two by two."""
        prompt, method = self.prompt, self.stage.method
        total, shape = prompt.total, prompt.total.kept.shape
        part, slot = now.tables(shape)
        joins = into.bincount()[into] == 2
        part = part.masked_fill(~total.kept | ~prompt.layout.visual | ~joins[part], -1)
        if not bool((part >= 0).any()):
            # they hold text only
            return
        units, picture, chunk = prompt.layout.units(method.unit).split(part)
        present = units.valid.sum(1)
        count = _shares(present, self._count[picture], picture, chunk, into)
        at = slot[units.row[:, None], units.places.clamp(min=0)].masked_fill(~units.valid, 0)
        fields, rows, at, (wanted, entered) = gathered(units, hidden, chunk, at, count, present)
        looked = {name: x.to(hidden.device)[rows[:, None], at] for name, x in self._looked.items()}
        signals = {
            name: check_numbers(method, "observe()", x, fields["valid"]).masked_fill(~fields["valid"], torch.nan)
            for name, x in looked.items()
        }
        clips = (units.grid[:, 0] > 1).tolist()
        batch = TokenBatch(**fields, entered=entered, left=present[:, None], clips=clips, signals=signals)
        # a choice has no gradient
        with torch.no_grad():
            reduction = tokens.checked(method, method.reduce(batch, wanted), units.valid, count, hidden.shape[2])
        prompt.stats.stages[self.stage.number].tokens_kept += int(reduction.kept.sum() - reduction.valid.sum())
        reduction = reduction.relabel(units.places, units.row, shape)
        total = total.then(reduction.keeping(total.kept & ~reduction.valid))
        prompt.reduced(self.stage.number, layer, total, units, signals)


def _arguments(family: Family, how: Join, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the layers above that have a row for every chunk: positions, and cosines and sines, of which one row may
    serve all."""
    arguments: dict[str, Any] = family.of_tokens(given, lambda x: how.to(x.device).pick(x))
    if given.get("position_embeddings") is not None:
        arguments["position_embeddings"] = tuple(how.to(x.device).pick(x) for x in given["position_embeddings"])
    if isinstance(positions := given.get("position_ids"), Tensor):
        # GLM-4.5V shows its layers all three axes
        rows = positions.movedim((-2, -1), (0, 1))
        arguments["position_ids"] = how.to(positions.device).pick(rows).movedim((0, 1), (-2, -1))
    return arguments


def _shares(present: Tensor, budget: Tensor, picture: Tensor, chunk: Tensor, into: Tensor) -> Tensor:
    """Number of tokens that stay of the ``present [M]`` that chunk ``chunk [M]`` has of picture ``picture [M]``: the two
    that join have ``budget [M]`` together, or all they have: half each, unless the other one has fewer. All long."""
    has = torch.zeros(int(picture.max()) + 1, len(into) + 2, dtype=torch.long)
    has[picture, chunk + 1] = present
    right = into[chunk] == torch.cat([into.new_tensor([-1]), into])[chunk]
    other = torch.where(right, has[picture, chunk], has[picture, chunk + 2])
    half = torch.where(right, budget // 2, budget - budget // 2)
    return torch.maximum(half, budget - other).minimum(present)


def _joins(method: ChunkMethod, levels: int, depth: int) -> list[int]:
    """The layers at which chunks of a tree with so many levels join, validated."""
    joins: Any = method.joins(levels, depth)
    first = int(method.layer) + 1
    numbers = isinstance(joins, list) and all(type(layer) is int and first <= layer < depth for layer in joins)
    if not numbers or len(joins) != levels or joins != sorted(set(joins)):
        returned = str(joins) if isinstance(joins, list) else described(joins)
        refuse(method, "joins()", returned, f"a list of {levels} rising layers from {first} to {depth - 1}")
    return list(joins)
