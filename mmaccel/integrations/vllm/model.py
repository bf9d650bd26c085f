"""Mix-in for vLLM's models: reduces the output of the encoder, and tells the language model the positions.

Under tensor parallelism every rank reduces by itself. The projector's sum over ranks, or the exchange of whole pictures where
ranks encode different ones, leaves the same bits on all of them; methods are functions of those alone, with ties to the lower
slot and seeds in their options; so all ranks keep the same tokens. Attention inside the tower is spread over ranks, and methods
that look at it are refused there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...core.layout import Modality, Picture
from ...core.stats import Stats
from ...runtime.call.call import Call, VisionState, pop, push
from ...runtime.call.forward import to_device_packed
from ...runtime.call.vision_output import VisionOutput
from ...runtime.tower.taps import Taps
from . import digits, runner, tower
from .architectures import alone, joined
from .counters import FOLDER, Counters, counters_of
from .plan import ServingPlan
from .positions import Place, expanded, filled_in, provisional
from .processor import APART, FIELD, OURS, SOURCES
from .settings import Budget, as_integers, from_integers


@dataclass(frozen=True)
class Item:
    """A picture or clip that is being encoded.

    arguments : of ``embed_multimodal``, for it alone.
    budget : of its request; None is that of the server.
    before, kept : its tokens, and how many are to stay.
    tokens, visual : of an item with text between its placeholders, ``[n]`` long and bool, the tokens of the unreduced prompt in
        their place, and which are visual.
    sources : where patches are left out, ``[patches]`` long, the one that each is predicted from.
    """

    arguments: dict[str, Any]
    budget: Budget
    before: int
    kept: int
    tokens: Tensor | None = None
    visual: Tensor | None = None
    sources: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of placeholders it fills."""
        return self.kept if self.visual is None else self.kept + int((~self.visual).sum())

    @staticmethod
    def of(arguments: dict[str, Any]) -> Item:
        """From arguments with the field that the processor wrote."""
        rest = {name: value for name, value in arguments.items() if name not in OURS}
        numerator, denominator, before, kept = (int(n) for n in arguments[FIELD][0])
        budget, tokens, visual, sources = from_integers(numerator, denominator), None, None, None
        if APART in arguments:
            tokens, visual = arguments[APART][0][0], arguments[APART][0][1].bool()
        if SOURCES in arguments:
            sources = arguments[SOURCES][0]
        return Item(rest, budget, before, kept, tokens, visual, sources)


class ReducedModel:
    """Mix-in in front of a model class of vLLM."""

    supports_multimodal_pruning: ClassVar[Literal[True]] = True
    supports_mrope: ClassVar[Literal[True]] = True
    #: set by the class that is made of both
    plan_of: ClassVar[Any]
    counters = Counters(None)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        plan: ServingPlan = self.plan_of(vllm_config)
        config = vllm_config.model_config
        if plan.keeps_positions:
            # RoPE tables of some models are sized by it
            runner.carry_positions(config.multimodal_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        # vLLM's own pruning is never on beside a recipe
        self.is_multimodal_pruning_enabled = False
        self.plan = plan
        self.one_call = int(vllm_config.scheduler_config.max_num_encoder_input_tokens)
        self.taps = Taps(plan.family, plan.wanted)
        self.encoding: VisionOutput | None = None
        if vllm_config.parallel_config.rank == 0:
            # ranks choose the same at the same time
            self.counters = counters_of(getattr(config, FOLDER, None), os.getpid())
        if plan.wanted or plan.inside:
            layers = plan.architecture.tower_layers(self)  # type: ignore[arg-type]
            tower.hook(self.taps, layers, lambda: self.encoding, every=plan.inside)
        if plan.inside:
            plan.plan = replace(plan.plan, towers=tower.built(plan.family, plan.architecture, self))  # type: ignore[arg-type]
            tower.work_inside(plan.plan)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Load weights; accepts parameter names of newer checkpoints."""
        rename = self.plan.architecture.rename
        if rename is not None:
            weights = ((rename(name), weight) for name, weight in weights)
        return super().load_weights(weights)  # type: ignore[misc]

    def get_encoder_cudagraph_config(self) -> Any:
        """None: captured encoders would bypass :meth:`embed_multimodal`."""
        return replace(super().get_encoder_cudagraph_config(), modalities=[])  # type: ignore[misc]

    # --- encoding ---------------------------------------------------------------------------------------------
    def embed_multimodal(self, **kwargs: Any) -> tuple[Tensor, ...]:
        """Tokens that stay of every picture or clip, ``[kept, D]``; where they keep their positions, with those of their
        picture, and of what is behind it, as channels behind the embedding, ``[kept, D + CHANNELS]``."""
        architecture = self.plan.architecture
        modality = architecture.modality(kwargs)
        if modality is None:
            return tuple(super().embed_multimodal(**kwargs))  # type: ignore[misc]
        items = [Item.of(arguments) for arguments in architecture.items(kwargs)]
        # between its layers a tower treats all that it is given alike
        plan = self.plan.plan
        parts = in_parts(items, self.one_call, by_budget=plan.encoder is not None or plan.rebuilding is not None)
        return tuple(row for part in parts for row in self._embed(modality, part))

    def _embed(self, modality: Modality, items: list[Item]) -> list[Tensor]:
        """One call of the encoder, reduced."""
        arguments = joined([item.arguments for item in items])
        self.encoding = encoded = VisionOutput(arguments, sum(item.before for item in items))
        if self.plan.plan.patches is not None:
            self._leave_out(encoded, items)
        plan = self.plan.of(items[0].budget, modality)
        call = Call(plan, Stats(plan.recipe.name), VisionState(self.taps, running=encoded))
        push(call)
        try:
            rows = list(super().embed_multimodal(**arguments))  # type: ignore[misc]
        finally:
            self.encoding = None
            pop(call)
        _check([len(row) for row in rows], [item.before for item in items])
        if self.plan.reduces:
            began = time.perf_counter()
            pictures = self.plan.pictures(modality, arguments, encoded.tokens)
            # 1 and 1.0 are equal, and two budgets
            for asked in dict.fromkeys(as_integers(item.budget) for item in items):
                self._reduce(modality, asked, items, pictures, rows, encoded)
            self.counters.add("selection_seconds", modality, time.perf_counter() - began)
        _check([len(row) for row in rows], [item.rows for item in items])
        return rows

    def _leave_out(self, encoded: VisionOutput, items: list[Item]) -> None:
        """Let the tower leave out the patches that the processor has said."""
        device = next(self.parameters()).device  # type: ignore[attr-defined]
        self.plan.leave_out(encoded, [item.sources.to(device) for item in items if item.sources is not None])

    def _reduce(
        self,
        modality: Modality,
        asked: tuple[int, int],
        items: list[Item],
        pictures: list[Picture],
        rows: list[Tensor],
        encoded: VisionOutput,
    ) -> None:
        """Write the kept tokens of the items with one budget into ``rows``."""
        mine = [i for i, item in enumerate(items) if as_integers(item.budget) == asked]
        made = self.plan.reduce(
            modality,
            [pictures[i] for i in mine],
            [rows[i] for i in mine],
            [items[i].kept for i in mine],
            items[mine[0]].budget,
            encoded,
            self.taps,
        )
        offsets = []
        for i, (row, stays) in zip(mine, made, strict=True):
            rows[i], stays = (row, stays) if items[i].visual is None else self._with_text(items[i], row, stays)
            if self.plan.keeps_positions:
                offsets.append(self._offsets(modality, items[i])[:, stays])
        if offsets:
            # one copy for all, which the host does not wait for
            channels = digits.written(torch.cat(offsets, 1), rows[mine[0]].dtype)
            parts = channels.to(rows[mine[0]].device, non_blocking=True).split([x.shape[1] for x in offsets])
            for i, part in zip(mine, parts, strict=True):
                rows[i] = torch.cat([rows[i], part], dim=1)

    def _with_text(self, item: Item, rows: Tensor, stays: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of an item and of the text between them, and a mask of its tokens in its range."""
        assert item.tokens is not None and item.visual is not None
        text: Tensor = ~item.visual
        left = text.clone()
        left[item.visual] = stays.to(left.device)
        # rows first, then words: where in both together each of what is left stands
        is_text = text[left]
        place = torch.where(is_text, len(rows) + is_text.cumsum(0) - 1, (~is_text).cumsum(0) - 1)
        ids, place = to_device_packed(rows.device, item.tokens[text], place)
        words = self.get_language_model().embed_input_ids(ids).to(rows.dtype)  # type: ignore[attr-defined]
        # layers of the language model add nothing to text
        words = nn.functional.pad(words, (0, rows.shape[1] - words.shape[1]))
        return torch.cat([rows, words])[place], left

    # --- positions --------------------------------------------------------------------------------------------
    def _positions(self, tokens: list[int], features: list[Any]) -> Tensor:
        """Positions ``[3, n]`` of an unreduced prompt, as vLLM counts."""
        if not self.plan.turns:
            return torch.arange(len(tokens)).expand(3, -1)
        return super().get_mrope_input_positions(tokens, features)[0]  # type: ignore[misc]

    def _offsets(self, modality: Modality, item: Item) -> Tensor:
        """``[4, n]`` long: how far each token of a picture, or of a clip's range, stands behind its beginning, and how far
        what is behind all of it."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        token = self.plan.placeholder(modality)
        tokens = [token] * item.before if item.tokens is None else item.tokens.tolist()
        data: Any = {name: SimpleNamespace(data=alone(value)) for name, value in item.arguments.items()}
        feature = MultiModalFeatureSpec(data, modality, "", PlaceholderRange(0, len(tokens), item.visual))
        positions = self._positions(tokens, [feature])
        behind = int(positions.max()) + 1 - self._ahead(positions)
        return torch.cat([positions, positions.new_full((1, len(tokens)), behind)])

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Positions ``[3, n]`` of a prompt, or ``[3, n + 1]`` where :mod:`.positions` says so, and that of the next token
        less n."""
        features = sorted(mm_features, key=lambda feature: feature.mm_position.offset)
        # of a request that keeps all tokens positions are the bare model's, whatever the recipe says
        whole_pictures = bool(features) and all(_budget(feature) is False for feature in features)
        if self.plan.renumbers and not whole_pictures:
            return torch.arange(len(input_tokens)).repeat(3, 1), 0
        places = [_place(input_tokens, feature) for feature in features]
        tokens, starts = expanded(input_tokens, places)
        found = [_moved(feature, place, start) for feature, place, start in zip(features, places, starts, strict=True)]
        whole = self._positions(tokens, found)
        earlier = [self._ahead(whole[:, start : start + len(p.whole)]) for p, start in zip(places, starts, strict=True)]
        if not self.plan.keeps_positions:
            ahead = torch.zeros(len(tokens), dtype=torch.long)
            for place, start, less in zip(places, starts, earlier, strict=True):
                ahead[start + len(place.whole) :] += less
            return whole - ahead, int(whole.max()) + 1 - sum(earlier) - len(tokens)
        positions = provisional(whole, places, starts, earlier)
        return positions, int(positions[0, -1]) - len(input_tokens)

    def _ahead(self, positions: Tensor) -> int:
        """By how much earlier than vLLM transformers puts what is behind a picture with these ``positions [3, n]``."""
        if self.plan.settings.numbering == "vllm":
            return 0
        return max(0, int(positions[0].max()) - int(positions[1:].max()))

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        """The embeddings of one step of a request without the positions they carry, the positions ``[3, N]`` of its prompt with
        those filled in, and the position of the token behind its ``input_ids [n]`` less n.

        One of vLLM's two runners gives the positions as :meth:`get_mrope_input_positions` made them, at every step; the other
        gives ``[3, n]`` of them, at steps with embeddings.
        """
        rows: list[Tensor] = []
        filled, behind, length = mrope_positions, 0, len(input_ids)
        if len(multimodal_embeddings):
            rows = [row[:, : -digits.CHANNELS] for row in multimodal_embeddings]
            offsets = digits.read(torch.cat([row[:, -digits.CHANNELS :] for row in multimodal_embeddings]))
            ids = torch.as_tensor(input_ids).to(mrope_positions.device)
            visual = self.plan.visual(ids)
            filled, behind = filled_in(mrope_positions, visual, num_computed_tokens, offsets.to(mrope_positions.device))
        if filled.shape[1] > length:
            behind = int(filled[0, length])
        elif int(input_ids[-1]) not in self.plan.placeholders:
            # frames of a slow clip may stand later than the text behind them
            behind = int(filled[0, -1]) + 1
        return rows, filled, behind - length


def in_parts(items: list[Item], most: int, by_budget: bool) -> Iterable[list[Item]]:
    """The items in runs of at most ``most`` unreduced tokens, or of one item: vLLM's budget counts the kept tokens.

    by_budget : whether the items of a run have one budget.
    """
    part: list[Item] = []
    for item in items:
        other = by_budget and bool(part) and as_integers(item.budget) != as_integers(part[0].budget)
        if part and (other or sum(one.before for one in part) + item.before > most):
            yield part
            part = []
        part.append(item)
    yield part


def _check(made: list[int], wanted: list[int]) -> None:
    """Check the number of rows; vLLM would assign a wrong number to wrong placeholders silently."""
    if made != wanted:
        raise RuntimeError(f"the encoder made {made} tokens where the prompt was prepared for {wanted}")


def _budget(feature: Any) -> Budget:
    """The budget of the request that a picture belongs to."""
    numerator, denominator = (int(n) for n in feature.data[FIELD].data[:2])
    return from_integers(numerator, denominator)


def _place(tokens: list[int], feature: Any) -> Place:
    """Place of a picture in a reduced prompt."""
    at = feature.mm_position
    visual = torch.ones(at.length, dtype=torch.bool) if at.is_embed is None else at.is_embed.bool()
    mine = tokens[at.offset : at.offset + at.length]
    if APART in feature.data:
        return Place.of_text_between(at.offset, mine, visual, feature.data[APART].data[0].tolist())
    return Place.of_one_run(at.offset, mine, visual, int(feature.data[FIELD].data[2]))


def _moved(feature: Any, place: Place, start: int) -> Any:
    """Place of the picture in the unreduced prompt; families find the frames of a clip by its mask."""
    is_embed: Tensor | None = None
    if APART in feature.data:
        is_embed = place.whole.clone()
        is_embed[place.whole] = feature.data[APART].data[1].bool()
    elif feature.mm_position.is_embed is not None:
        is_embed = place.whole
    where = type(feature.mm_position)(start, len(place.whole), is_embed)
    return replace(feature, mm_position=where)
