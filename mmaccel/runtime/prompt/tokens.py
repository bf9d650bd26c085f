"""Token reduction: shows a method the visual tokens of a prompt, and applies the reduction that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.budget import counts, kept_whole
from ...core.layout import Units
from ...core.masks import question
from ...core.precision import without_autocast
from ...core.reduction import Reduction, Residual
from ...errors import MmaccelError, UnsupportedError
from ...method import LayerMethod, TokenBatch, TokenMethod
from ...method.results import check_figures, check_numbers, check_reduction, check_type
from ..call.call import VisionState
from ..call.forward import Prompt, gathered, rows_at, to_device_packed
from ..call.plan import PlannedStage, record


class TokenReducer:
    """Runs methods that reduce visual tokens on one prompt, before and inside the language model.

    residuals : values that are added to the tokens that are left, behind all stages before the language model.
    """

    def __init__(self, prompt: Prompt, vision: VisionState) -> None:
        self.prompt, self.vision = prompt, vision
        self.residuals: list[Residual] = []
        #: by stage its budget per unit, and how many tokens these had before it and behind every layer, ``[N]`` long on the CPU
        self._passes: dict[int, tuple[Tensor, list[Tensor]]] = {}
        #: figures that stages noted, by name and place, ``[B, S]`` float32; NaN without one
        self._marks: dict[str, Tensor] = {}

    def reduce(
        self,
        stage: PlannedStage[TokenMethod],
        hidden: Tensor,
        slots: Tensor | None,
        looked: Mapping[str, Tensor] | None = None,
        layer: int = 0,
        earlier: tuple[Tensor, Tensor] | None = None,
    ) -> Reduction:
        """Run one method on the tokens that are left of the prompt, and note the result; returns its reduction in place
        coordinates ``[B, S]``.

        hidden : ``[B, q, D]``, the input of ``layer`` of the language model.
        slots : ``[B, S]`` long on the CPU, the slot of each place in ``hidden``; None where ``hidden`` is not compacted yet.
        looked : figures per token that the method made of an attention, ``[B, q]``.
        earlier : the input of an earlier layer ``[B, p, D]``, which the method compares with, and the slot of each place in it,
            ``[B, S]`` long on the CPU.
        """
        prompt, method, total = self.prompt, stage.method, self.prompt.total
        whole = prompt.layout.units(method.unit)
        units = whole.only(total.kept)
        present = units.seen.sum(1)
        count, left = self._passes.setdefault(stage.number, (budget(prompt, stage, whole, present), [present]))
        tokens, wanted = self._batch(stage, hidden, slots, whole, units, looked or {})
        if earlier is not None:
            rows, at = to_device_packed(
                hidden.device, units.row, earlier[1][units.row[:, None], units.places.clamp(min=0)]
            )
            before = earlier[0].to(hidden.device)[rows[:, None], at].float().masked_fill(~tokens.valid[..., None], 0.0)
            tokens = replace(tokens, signals={**tokens.signals, "before": before[:, None]})
        # a choice has no gradient; the values that are merged have theirs
        with torch.no_grad(), without_autocast(hidden.device):
            if marks := check_figures(method, "marks()", method.marks(tokens), tokens.valid.shape, tokens.valid):
                tokens = replace(tokens, signals={**tokens.signals, **marks})
                self._marks |= by_place(marks, units, total.kept.shape)
            reduction = checked(method, method.reduce(tokens, wanted), units.valid, count, tokens.features.shape[2])
        stays = (reduction.kept & units.seen).sum(1)
        _record(prompt, stage, int(present.sum()), int(count.sum()), int(stays.sum()), again=len(left) > 1)
        left.append(stays)
        reduction = reduction.relabel(units.places, units.row, total.kept.shape)
        reduction = reduction.keeping(total.kept & ~reduction.valid)
        if reduction.residual is not None:
            self.residuals.append(reduction.residual)
        # figures per token, not its keys and features: this outlives the call
        figures = {
            name: x if x.dim() == 2 else x.sum(1)
            for name, x in tokens.signals.items()
            if x.dim() == 2 or "attention" in name
        }
        prompt.reduced(stage.number, layer, total.then(reduction), units, figures)
        return reduction

    def is_done(self, stage: PlannedStage[LayerMethod]) -> bool:
        """Whether a method inside the language model drops no more of the prompt."""
        known = self._passes.get(stage.number)
        return known is not None and stage.method.is_done(torch.stack(known[1], 1), known[0])

    def _of_sounds(self, units: Units, device: torch.device) -> Tensor:
        """The attention that each token of a sound receives, ``[N, n]``; NaN for visual tokens."""
        known = torch.zeros(0) if self.vision.sounds is None else self.vision.sounds
        heard = sum(len(one.places) for one in self.prompt.layout.sounds)
        if len(known) != heard:
            raise UnsupportedError(
                f"{self.prompt.plan.family.name}: the prompt has {heard} tokens of sounds but those encoded in this call make "
                f"{len(known)}; pass the sounds that belong to exactly the new tokens of this call."
            )
        source, heard_ = to_device_packed(device, units.source.clamp(min=0), units.heard)
        values = known.to(device)[source * heard_] if len(known) else torch.zeros(source.shape, device=device)
        return values.masked_fill(~heard_.bool(), torch.nan)

    def _batch(
        self,
        stage: PlannedStage[TokenMethod],
        hidden: Tensor,
        slots: Tensor | None,
        whole: Units,
        units: Units,
        looked: Mapping[str, Tensor],
    ) -> tuple[TokenBatch, Tensor]:
        """The tokens of ``units``, which are left of ``whole``, as a method sees them, and its budget; on the device of
        ``hidden``."""
        prompt, method, (count, left) = self.prompt, stage.method, self._passes[stage.number]
        device, places = hidden.device, units.places.clamp(min=0)
        if method.last_norm:
            hidden = _normed(prompt, hidden)
        fields, rows, at, (entered, wanted) = gathered(
            units,
            hidden,
            units.row,
            places if slots is None else slots[units.row[:, None], places],
            prompt.entered(whole) if prompt.incoming.phases else units.valid.sum(1),
            count,
        )
        valid: Tensor = fields["valid"]
        with without_autocast(device):
            taps = self.vision.taps
            signals = taps.signals(method.taps(), self.vision.outputs, units) if method.taps() else {}
            if method.needs_sounds:
                signals["sound_attention"] = self._of_sounds(units, device)
        for name, figures in looked.items():
            figures = check_numbers(method, "observe()", figures.to(device)[rows[:, None], at], valid)
            signals[name] = figures.masked_fill(~valid, torch.nan)
        if known := [name for name in method.reads if name in self._marks]:
            (placed,) = to_device_packed(device, places)
            for name in known:
                signals[name] = self._marks[name].to(device)[rows[:, None], placed].masked_fill(~valid, torch.nan)
        words, words_valid = None, None
        of_words: dict[str, Tensor] = {}
        if method.needs_question:
            words, words_valid, of_words = _question(prompt, method, hidden, slots, rows, looked)
        if method.text_tower is not None:
            tower = prompt.plan.text_towers[method.text_tower]
            signals["patches"] = tower.project(signals["features"][:, 0].to(device))
        tokens = TokenBatch(
            **fields,
            question=words,
            question_valid=words_valid,
            question_signals=of_words,
            entered=entered,
            left=torch.stack(left, 1),
            clips=(units.grid[:, 0] > 1).tolist(),
            until=_until(prompt, whole, units).to(device) if method.needs_spans else None,  # type: ignore[arg-type]
            signals={name: x.to(device) for name, x in signals.items()},
        )
        if remark := check_type(method, "remark()", method.remark(tokens), str):
            prompt.stats.notes.append(remark)
        return tokens, wanted


def budget(prompt: Prompt, stage: PlannedStage[TokenMethod], whole: Units, present: Tensor) -> Tensor:
    """Number of visual tokens of each unit that stay, ``[N]`` long on the CPU, of those ``present [N]``."""
    if stage.method.unit != "row":
        return _shared_out(prompt, stage, whole, present)
    # what the pictures and clips of the row keep in all
    count = torch.zeros(len(prompt.layout.valid), dtype=torch.long)
    if prompt.layout.segments:
        pictures = prompt.layout.units("picture")
        left = pictures.only(prompt.total.kept).valid.sum(1)
        count.index_add_(0, pictures.row, _shared_out(prompt, stage, pictures, left))
    return count[whole.row]


def _shared_out(prompt: Prompt, stage: PlannedStage[TokenMethod], whole: Units, present: Tensor) -> Tensor:
    """The same where no unit has several pictures."""
    recipe, method = prompt.plan.recipe, stage.method
    official = method.official_count if method.official else None
    least = recipe.retain if recipe.primary is not None and stage.number < recipe.primary else None
    grids = [(t, h, w) for t, h, w in whole.grid.tolist()]
    sizes = whole.valid.sum(1).tolist()
    pictures = [
        sum(n for n, q in zip(sizes, whole.picture, strict=True) if q == p) for p in dict.fromkeys(whole.picture)
    ]
    prompt.stats.notes += kept_whole(method.name, stage.budget, pictures)
    return counts(stage.budget, sizes, present.tolist(), whole.picture, least, official, grids)


def by_place(marks: dict[str, Tensor], units: Units, shape: torch.Size) -> dict[str, Tensor]:
    """Figures ``[N, n]`` of units at the places of the prompt, ``[B, S]``."""
    # padding goes behind all places
    at = (units.row[:, None] * shape[1] + units.places).masked_fill(~units.valid, shape.numel()).flatten()
    placed = {}
    for name, figures in marks.items():
        flat = torch.full((shape.numel() + 1,), torch.nan, device=figures.device)
        (onto,) = to_device_packed(figures.device, at)
        placed[name] = flat.scatter_(0, onto, figures.flatten())[:-1].view(shape)
    return placed


def _until(prompt: Prompt, whole: Units, units: Units) -> Tensor:
    """``[N, n]`` long on the CPU: the last frame of the tokens merged into each token of ``units``, which are left of
    ``whole``; -1 where none has a cell."""
    owner = prompt.total.owner()
    valid, rows = whole.valid, whole.row[:, None].expand_as(whole.valid)[whole.valid]
    at = owner[rows, whole.places[valid]]
    flows = at >= 0
    last = torch.full_like(owner, -1).flatten()
    places = (rows * owner.shape[1] + at)[flows]
    last = last.scatter_reduce(0, places, whole.cells[..., 0][valid][flows], "amax").view(owner.shape)
    return last[units.row[:, None], units.places.clamp(min=0)].masked_fill(~units.valid, -1)


def _question(
    prompt: Prompt,
    method: TokenMethod,
    hidden: Tensor,
    slots: Tensor | None,
    rows: Tensor,
    looked: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The text behind the last picture of each unit's row, or all text if none is, ``[N, q, D]`` and ``[N, q]`` bool, and the
    ``looked`` figures of it."""
    visual, notes = prompt.layout.visual, prompt.stats.notes
    text = prompt.layout.valid & ~visual & ~prompt.layout.heard
    asked = question(text, visual)
    if method.text_tower is not None:
        notes.append(f"{method.name}: the question as the text tower of {method.text_tower!r} reads it")
        texts = [prompt.plan.family.words(ids[mine]) for ids, mine in zip(prompt.ids, asked, strict=True)]
        words, valid = prompt.plan.text_towers[method.text_tower].embed(texts, method.by_word)
        return words.to(hidden.device)[rows], valid.to(hidden.device)[rows], {}
    if method.site != "layers":
        notes.append(f"{method.name}: the question as the language model itself embeds it")
    chosen, _ = prompt.compacted(asked)
    at = chosen.clamp(min=0)
    at, real = to_device_packed(hidden.device, at if slots is None else slots.gather(1, at), chosen >= 0)
    of_words = {}
    if method.site == "layers":
        of_words = {name: figures.to(hidden.device).gather(1, at)[rows] for name, figures in looked.items()}
    return rows_at(hidden, at)[rows], real.bool()[rows], of_words


def _normed(prompt: Prompt, hidden: Tensor) -> Tensor:
    """``hidden`` behind the last norm of the language model; layers may be spread over devices."""
    norm = prompt.plan.family.last_norm
    normed: Tensor = norm(hidden.to(next(norm.parameters()).device))
    return normed.to(hidden.device)


def checked(method: TokenMethod, returned: Any, valid: Tensor, count: Tensor, width: int) -> Reduction:
    """Check that a method returned a reduction of tokens of ``width`` channels that meets the budget; on the CPU."""
    reduction = check_reduction(method, returned, valid, width)
    if reduction.residual is not None and method.site != "projector":
        raise MmaccelError(
            f"Method {method.name!r} has a residual, which is added before the language model; make it a ProjectorMethod."
        )
    kept = reduction.kept.sum(1)
    over = empty = (kept == 0) & (count > 0)
    if not method.spreads and method.budget in ("exact", "at_most"):
        over = kept != count if method.budget == "exact" else kept > count
    if bool((over | empty).any()):
        i = int((over | empty).nonzero()[0])
        raise MmaccelError(
            f"Method {method.name!r} has the budget class {method.budget!r} but kept {int(kept[i])} of "
            f"{int(valid[i].sum())} tokens where {int(count[i])} were resolved."
        )
    return reduction


def _record(
    prompt: Prompt, stage: PlannedStage[TokenMethod], present: int, resolved: int, left: int, again: bool
) -> None:
    """Add the budget of a stage, ``resolved`` of ``present`` visual tokens of which so many are ``left``, to its figures; it
    may work ``again`` on a prompt."""
    method, notes = stage.method, prompt.stats.notes
    if again:
        prompt.stats.stages[stage.number].tokens_kept += left - present
        return
    decided = method.spreads or method.budget in ("adaptive", "none")
    record(prompt.stats, stage, present, None if decided else resolved, left)
    if method.spreads:
        return
    if method.budget == "adaptive":
        notes.append(
            f"{method.name} lets the content decide: of {present} visual tokens {resolved} were asked for, and {left} stay"
        )
    if left == present and len(prompt.plan.stages) > 1:
        notes.append(f"stage {stage.number} ({method.name}) left all {left} tokens that reached it")
