"""A recipe on one model, planned from configurations alone: how many tokens of every picture stay, and which.

Processor and model of vLLM run in different processes and hold equal plans. What stays is chosen by the methods that
:func:`mmaccel.accelerate_vlm` runs on transformers, by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...core.layout import Layout, Modality, Picture, Segment
from ...core.masks import even_in_groups
from ...core.reduction import Reduction
from ...core.stats import Stats
from ...errors import UnsupportedError
from ...families import described
from ...families.mrope import ThreeAxes
from ...families.pixtral import Mistral3
from ...kv.forward_info import ForwardInfo
from ...method import DraftMethod, EncoderMethod, PatchMethod, PreviewMethod, ProjectorMethod, RebuildingMethod, Tap
from ...runtime.build import plan_for_call, plan_model
from ...runtime.call.call import VisionState
from ...runtime.call.forward import Prompt, PromptResult, to_device_packed
from ...runtime.call.plan import ModelPlan
from ...runtime.call.vision_output import VisionOutput
from ...runtime.prompt.reduce import take_from_towers
from ...runtime.prompt.tokens import TokenReducer
from ...runtime.prompt.tokens import budget as token_budget
from ...runtime.tower.patch_pruning import leave_out, predicted, pruned
from ...runtime.tower.taps import Taps
from ...runtime.tower.token_groups import merged_count
from .architectures import Architecture
from .settings import Budget, Settings

#: why a recipe with a method of this site is refused
_ELSEWHERE = {
    "frames": "works on pixels before the processor; use mmaccel.prepare on transformers",
    "encoder": "merges or reuses frames of a clip inside the vision tower, which is not tested in vLLM",
    "layers": "works inside the language model, and vLLM has no hook there",
    "cache": "works on the KV cache, which vLLM manages in blocks of its own",
    "codec": "packs the KV cache, which vLLM manages in blocks of its own",
}


@dataclass(frozen=True)
class Kept:
    """The number of kept tokens of a picture, known before it is encoded.

    before : its visual tokens. total : those that stay. segments : the same of each; None where only their sum is known.
    notes : remarks on the budget of this picture.
    """

    before: int
    total: int
    segments: list[int] | None
    notes: tuple[str, ...] = ()


class ServingPlan:
    """A recipe on a model that vLLM serves, whose ``config`` is that of transformers. Refuses recipes with a method that cannot
    work here, or that needs something that the family lacks."""

    def __init__(self, settings: Settings, config: Any, architecture: Architecture) -> None:
        self.settings, self.architecture = settings, architecture
        self.family = described(config)
        if useless := [name for name in settings.retain if name not in architecture.pixels]:
            raise UnsupportedError(
                f"retain of {useless[0]} has no effect, since this model takes no {useless[0]} in vLLM; leave it out."
            )
        for _, method in settings.recipe.build():
            _check(method, settings.recipe.name, architecture)
        self.plan: ModelPlan = plan_model(settings.recipe, self.family, None, "auto")
        by_grid = [stage.method.name for stage in self.plan.projector if stage.method.foreseen == "grid"]
        if self.inside and by_grid:
            raise UnsupportedError(
                f"Recipe {settings.recipe.name!r} cannot be served by vLLM: {by_grid[0]} follows the grid of a picture, of "
                f"which {self.plan.stages[0].method.name} leaves a part, and vLLM must know how many tokens stay before a "
                "picture is encoded; leave one of them out."
            )
        self.wanted: list[Tap] = [tap for stage in self.plan.stages for tap in stage.method.taps()]
        # a LLaVA may have the tower of Pixtral
        looks = self.wanted and not architecture.tapped
        if looks or ((self.wanted or self.inside) and isinstance(self.family, Mistral3)):
            raise UnsupportedError(
                f"Recipe {settings.recipe.name!r} looks into the vision tower, which is not tested with this one in vLLM; use "
                "a recipe that reads the tokens alone, such as 'divprune'."
            )
        for number in (self.family.tap_layer(layer) for tap in self.wanted for layer in tap.layers):
            if number > self.family.feature_layer:
                raise UnsupportedError(
                    f"Recipe {settings.recipe.name!r} looks at layer {number} of the vision tower, and vLLM builds it only up "
                    f"to layer {self.family.feature_layer}, which the language model reads; give a layer up to that one."
                )

    @property
    def reduces(self) -> bool:
        """Whether the plan drops any token."""
        return self.plan.patches is not None or self.renumbered

    @property
    def renumbered(self) -> bool:
        """Whether ``positions="paper"`` makes a difference; programs that leave patches out keep positions."""
        return self.plan.encoder is not None or bool(self.plan.projector)

    @property
    def renumbers(self) -> bool:
        """Whether what is left of a prompt is numbered anew."""
        return self.renumbered and self.settings.recipe.positions == "paper"

    @property
    def inside(self) -> bool:
        """Whether a method works between the layers of the vision tower."""
        return any(stage is not None for stage in (self.plan.patches, self.plan.encoder, self.plan.rebuilding))

    @property
    def placeholders(self) -> set[int]:
        """Ids of the placeholders of visual tokens."""
        return {self.placeholder(modality) for modality in self.architecture.pixels}

    def visual(self, ids: Tensor) -> Tensor:
        """``[n]`` bool: the placeholders in ``ids [n]``."""
        return torch.isin(ids, torch.tensor(sorted(self.placeholders), device=ids.device))

    @property
    def turns(self) -> bool:
        """Whether the family has M-RoPE, with positions on three axes."""
        return isinstance(self.family, ThreeAxes)

    @property
    def keeps_positions(self) -> bool:
        """Whether the language model needs the positions of kept tokens."""
        return self.reduces and not self.renumbers

    @property
    def remedy(self) -> str:
        """Advice where it does not take them, without a full stop."""
        if self.renumbered:
            return 'give "positions": "paper" beside the recipe'
        return 'use a recipe whose tokens can be numbered anew, such as \'divprune\' with "positions": "paper"'

    def of(self, budget: Budget, modality: Modality) -> ModelPlan:
        """The plan of a picture or clip in a request with its own budget."""
        if budget is None:
            budget = self.settings.retain.get(modality)
        return plan_for_call(self.plan, budget if budget is None or budget is False else {"retain": budget})

    def pictures(self, modality: Modality, arguments: Mapping[str, Any], before: int) -> list[Picture]:
        """Pictures or clips of an encoder call with ``before`` tokens."""
        pictures = self.architecture.pictures(self.family, modality, arguments)
        if pictures is not None:
            return pictures
        ids = torch.empty(0, 0, dtype=torch.long)
        return self.family.pictures(modality, VisionOutput(dict(arguments), before), ids)

    def placeholder(self, modality: Modality) -> int:
        """The placeholder of a picture or clip; families that show clips as pictures have one for both."""
        return int(self.family.token_id(modality) or self.family.token_id("image") or 0)

    def predicted(self, encoded: VisionOutput, pixels: Tensor) -> Tensor:
        """``[patches]`` long: the patch of a picture that each one is predicted from.

        pixels : normalised, ``[..., C, H, W]``, or of a packed sequence ``[..., patches, d]``.
        """
        assert self.plan.patches is not None
        tiles = pixels.flatten(0, -4) if pixels.dim() > 4 else pixels
        return predicted(self.family, self.plan.patches.method, encoded, tiles)

    def leave_out(self, encoded: VisionOutput, sources: Sequence[Tensor]) -> None:
        """Let an encoder call leave out patches, by what :meth:`predicted` says of each of its pictures."""
        starts = accumulate((len(one) for one in sources), initial=0)
        target = torch.cat([start + one for start, one in zip(starts, sources, strict=False)])
        tiles = 1 if self.family.frames(encoded) is not None else len(target) // self.family.side**2
        encoded.merged = pruned(self.family, encoded, target, tiles)

    def count(self, modality: Modality, picture: Picture, budget: Budget, encoded: VisionOutput | None = None) -> Kept:
        """Number of kept tokens of a picture; ``encoded`` says which of its patches are left out."""
        prompt = _prompt(self.of(budget, modality), modality, [picture])
        sizes = [len(tile) for tile in picture]
        total = sum(sizes)
        each: list[int] | None = sizes
        if prompt.plan.patches is not None and encoded is not None:
            leave_out(prompt, prompt.plan.patches, {modality: encoded})
            each = [int(part.sum()) for part in prompt.total.kept[0].split(sizes)]
            total = sum(each)
        if prompt.plan.encoder is not None:
            total = int(merged_count(prompt.plan.encoder, prompt.layout.units("picture"), prompt.stats))
            each = [total] if len(sizes) == 1 else sizes if total == sum(sizes) else None
        for stage in prompt.plan.projector:
            if stage.method.foreseen == "grid":
                total, each = self._tried(prompt, sizes)
                continue
            whole, apart = prompt.layout.units(stage.method.unit), stage.method.unit == "segment"
            # how a method before this one divided its budget changes the shares of units, but not their sum
            rest = [total] if len(whole.picture) == 1 else _shrunk(whole.valid.sum(1).tolist(), total)
            count = token_budget(prompt, stage, whole, torch.tensor(each if apart and each else rest))
            known = len(sizes) == 1 or (apart and each and stage.method.foreseen == "budget")
            total = int(count.sum())
            each = count.tolist() if known else sizes if total == sum(sizes) else None
        return Kept(sum(sizes), total, each, tuple(prompt.stats.notes))

    def _tried(self, prompt: Prompt, sizes: list[int]) -> tuple[int, list[int]]:
        """Run the first methods of a plan without data: the number of kept tokens follows from the grid."""
        nothing = torch.zeros(1, sum(sizes), 1)
        reducer = TokenReducer(prompt, VisionState(Taps(self.family, ())))
        made = reducer.reduce(prompt.plan.projector[0], nothing, None)
        each = [int(part.sum()) for part in made.kept[0].split(sizes)]
        return sum(each), each

    def reduce(
        self,
        modality: Modality,
        pictures: Sequence[Picture],
        rows: Sequence[Tensor],
        kept: Sequence[int],
        budget: Budget,
        encoded: VisionOutput,
        taps: Taps,
    ) -> list[tuple[Tensor, Tensor]]:
        """Reduce pictures that have one budget, in one ragged batch; returns the rows of each picture that stay, and their mask
        ``[n]`` bool.

        rows : of each picture ``[n, D]``, or with features for layers of the language model beside the embedding,
            ``[n, levels D]``; methods look at the embedding.
        kept : number of rows that stay of each.
        encoded, taps : the call of the encoder that they come from, and its taps.
        """
        prompt = _prompt(self.of(budget, modality), modality, pictures)
        reducer = TokenReducer(prompt, VisionState(taps, {modality: encoded}))
        hidden = pad_sequence(list(rows), batch_first=True)
        levels, first = self.architecture.levels(self.family)
        width = hidden.shape[-1] // levels
        embedding = slice(first * width, (first + 1) * width)
        if self.inside:
            planes = list(hidden.split(width, dim=-1))
            embeds, planes = take_from_towers(prompt, {modality: encoded}, planes.pop(first), planes)
            hidden = torch.cat([*planes[:first], embeds, *planes[first:]], dim=-1)
        for stage in prompt.plan.projector:
            made = reducer.reduce(stage, hidden[..., embedding], None)
            hidden = made.substitute(hidden)
        for residual in reducer.residuals:
            # it is no part of what later layers add
            added = residual.add(hidden[..., embedding])
            hidden = torch.cat([hidden[..., : embedding.start], added, hidden[..., embedding.stop :]], dim=-1)
        stays = _brought_to(prompt.total.kept, prompt.layout.valid, torch.tensor(list(kept)))
        # what stays is known on the host: the device is not asked how much, picture by picture
        (at,) = to_device_packed(hidden.device, stays.flatten().nonzero()[:, 0])
        left = hidden.flatten(0, 1)[at].split(stays.sum(1).tolist())
        return [(row, mask[: len(whole)]) for row, mask, whole in zip(left, stays, rows, strict=True)]


def _check(method: Any, recipe: str, architecture: Architecture) -> None:
    """Refuse a method that cannot work here, in one sentence."""
    early = "and vLLM encodes a picture before the prompt is read; use 'divprune', or serve it with transformers"
    inside = isinstance(method, (PatchMethod, EncoderMethod, RebuildingMethod))
    if inside and method.site not in architecture.sites:
        why = (
            "works inside the vision tower, which is not tested with this one in vLLM; use 'divprune', or transformers"
        )
    elif isinstance(method, RebuildingMethod) and method.official:
        why = (
            "with variant='official' compares the patches of all pictures of a call, which in vLLM are those of several "
            "requests; leave it out"
        )
    elif inside:
        return
    elif not isinstance(method, ProjectorMethod):
        why = (
            f"{_ELSEWHERE[method.site]}. Use a recipe of methods between the vision tower and the language model, such as "
            "'divprune', or serve it with transformers"
        )
    elif isinstance(method, PreviewMethod):
        why = f"has a pass of its own through the language model, {early}"
    elif isinstance(method, DraftMethod):
        why = f"has a smaller model read the prompt first, {early}"
    elif method.needs_question:
        remedy = (
            "train a selector by mmaccel distil --blind, and name its folder or put it beside the weights as selector-blind"
            if method.name == "learned"
            else "use 'divprune'"
        )
        why = f"reads the question, and vLLM encodes a picture once for all questions; {remedy}"
    elif method.foreseen == "nothing":
        why = (
            "lets the content decide how many tokens stay, and vLLM must know that before a picture is encoded; use a method "
            "that meets its budget, such as 'divprune' or 'visionzip'"
        )
    else:
        return
    raise UnsupportedError(f"Recipe {recipe!r} cannot be served by vLLM: {method.name} {why}.")


def _prompt(plan: ModelPlan, modality: Modality, pictures: Sequence[Picture]) -> Prompt:
    """Pictures as a prompt of one row each that holds only their tokens."""
    lengths = [sum(map(len, picture)) for picture in pictures]
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    segments = []
    for row, picture in enumerate(pictures):
        start = 0
        for tile in picture:
            segments.append(Segment(row, modality, row, tile, torch.arange(start, start + len(tile))))
            start += len(tile)
    return Prompt(
        plan=plan,
        stats=Stats(plan.recipe.name),
        state=None,
        incoming=ForwardInfo(0, valid.shape[1], False),
        device=torch.device("cpu"),
        result=PromptResult(Layout(valid, segments), Reduction.identity(valid)),
        ids=torch.zeros_like(valid, dtype=torch.long),
    )


def _shrunk(sizes: list[int], total: int) -> list[int]:
    """Any sizes that sum to ``total``, none larger than its own."""
    shrunk = []
    for size in sizes:
        shrunk.append(min(size, total))
        total -= shrunk[-1]
    return shrunk


def _brought_to(kept: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``kept [N, n]`` bool with ``count [N]`` tokens a row: where a method kept fewer, evenly spaced dropped tokens stay
    too."""
    missing = count - kept.sum(1)
    if not bool(missing.any()):
        return kept
    if bool((missing < 0).any()):
        raise RuntimeError("a method kept more tokens than its budget")
    group = torch.where(valid & ~kept, 0, -1)
    return kept | (even_in_groups(group, missing[:, None]) & (missing > 0)[:, None])
