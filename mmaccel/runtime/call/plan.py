"""What mmaccel does with one model in every call: made once, when the model is accelerated, and never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from ...core.budget import Retain
from ...core.stats import Stage as StageStats
from ...core.stats import Stats
from ...errors import MmaccelError, UnsupportedError
from ...families import Family
from ...families.draft import load_draft
from ...families.text import TextTower
from ...families.tower import Towers
from ...kv.codecs import Codec, TokenGroup, token_groups
from ...method import (
    ChunkMethod,
    DraftMethod,
    DraftPolicy,
    EncoderMethod,
    FramesMethod,
    LayerMethod,
    Method,
    PatchMethod,
    Policy,
    ProjectorMethod,
    ReuseMethod,
    TokenMethod,
)
from ...recipe import Recipe, Stage
from ...recipe.recipe import renamed

M = TypeVar("M", bound=Method, covariant=True)

#: whether Triton kernels run where they build, or their plain definitions everywhere
Kernels = Literal["auto", "off"]
#: what one call may have otherwise: everything else decides which modules are hooked and what is asked of the tower
PER_CALL = ("retain", "positions", "variant", "text_retain", "proportional")


@dataclass(frozen=True)
class PlannedStage(Generic[M]):
    """One stage of a recipe: its ``number`` there, its ``method`` as fitted to the model, and its budget."""

    number: int
    method: M
    retain: Retain | None

    @property
    def budget(self) -> Retain:
        """``retain``; everything, for a method without a budget."""
        return 1.0 if self.retain is None else self.retain


@dataclass(frozen=True, eq=False)
class Plan:
    """A recipe on the vision towers of one model. Two plans are never equal: a call belongs to one of them, or to one that was
    made of it for this call alone.

    towers : the model's family, or the adapter of an encoder that stands alone.
    stages : those of the recipe, in its order.
    encoder : the one inside the towers, if there is one.
    notes : what is said in the statistics of every call.
    kernels : ``"auto"`` or ``"off"``.
    origin : of a plan for one call, the plan that it was made of.
    """

    recipe: Recipe
    towers: Towers
    stages: tuple[PlannedStage[Method], ...]
    encoder: PlannedStage[EncoderMethod] | None
    notes: tuple[str, ...] = ()
    kernels: Kernels = "auto"
    origin: Plan | None = None

    @property
    def active(self) -> bool:
        """Whether anything happens between pixels and the cache."""
        return any(stage.method.site != "frames" for stage in self.stages)

    @property
    def in_towers(self) -> bool:
        """Whether the towers make something else of the same pixels."""
        return any(stage.method.site in ("patches", "encoder") for stage in self.stages)


@dataclass(frozen=True, eq=False)
class EncoderPlan(Plan):
    """A recipe of one method inside an encoder that stands alone."""

    encoder: PlannedStage[EncoderMethod]


@dataclass(frozen=True, eq=False)
class ModelPlan(Plan):
    """A recipe on a model with a language model.

    towers : the model's family.
    patches : the stage in front of the towers, if there is one. reuse : that between frames inside them.
    projector : the stages between the towers and the language model.
    stage_at_layer : the stage that works at the input of a decoder layer.
    chunks : the stage that has lower layers read a prompt in chunks.
    policy : the stage that evicts keys. token_groups : the groups of tokens that codecs pack alike.
    text_towers : by name, for methods that read the question with CLIP.
    drafts : by the number of the stage, the smaller models that read the prompt first.
    """

    towers: Family
    patches: PlannedStage[PatchMethod] | None = None
    reuse: PlannedStage[ReuseMethod] | None = None
    projector: tuple[PlannedStage[ProjectorMethod], ...] = ()
    stage_at_layer: Mapping[int, PlannedStage[LayerMethod]] = field(default_factory=dict)
    chunks: PlannedStage[ChunkMethod] | None = None
    policy: PlannedStage[Policy] | None = None
    token_groups: tuple[TokenGroup, ...] = ()
    text_towers: Mapping[str, TextTower] = field(default_factory=dict)
    drafts: Mapping[int, Family] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        """The adapter of the model's family."""
        return self.towers

    @property
    def first_inside(self) -> int:
        """The first layer of the language model at whose input something may happen; its depth, if at none."""
        above = () if self.chunks is None else (int(self.chunks.method.layer) + 1,)
        return min([*self.stage_at_layer, *above], default=self.family.depth)

    @property
    def caution(self) -> str | None:
        """What to fear of the recipe's budgets on this model, in a sentence."""
        return next(iter(cautions(self.family, self.stages)), None)

    @property
    def choosers(self) -> list[str]:
        """Names of methods that do nothing but choose frames."""
        methods = (stage.method for stage in self.stages)
        return [method.name for method in methods if isinstance(method, FramesMethod) and method.only_chooses]

    def for_call(self, asked: bool | Mapping[str, Any] | None) -> ModelPlan:
        """The plan of one call: this one (None, True), one in which nothing happens (False), or one with other values of
        :data:`PER_CALL`.

        Raises
        ------
        MmaccelError
            If a value cannot change for one call, or is of no use.
        """
        if asked is None or asked is True:
            return self
        if asked is False:
            notes = ("mmaccel=False: the bare model ran",)
            return ModelPlan(Recipe("none"), self.towers, (), None, notes, self.kernels, origin=self)
        if not isinstance(asked, Mapping):
            raise MmaccelError(
                f"mmaccel={asked!r} says nothing about a call; give {{'retain': 0.1}} or the like, or False for the bare model."
            )
        asked = renamed(asked)
        for name in asked:
            if name not in PER_CALL:
                raise MmaccelError(
                    f"{name!r} cannot change for one call, which takes {', '.join(PER_CALL)}; call accelerate_vlm(model, ...) "
                    "again with what you want."
                )
        recipe = self.recipe.override(**{name: value for name, value in asked.items() if value is not None})
        stages = self._in_variant(recipe)
        primary = None if recipe.primary is None else self.stages[recipe.primary].method
        if isinstance(primary, FramesMethod) and recipe.retain != self.recipe.retain:
            raise UnsupportedError(
                f"retain of recipe {recipe.name!r} is what {primary.name} keeps of the pixels, which the processor has reduced "
                f"before this call; prepare(processor, {recipe.name!r}, retain=...) makes one that keeps something else."
            )
        return replace(
            self,
            recipe=recipe,
            stages=stages,
            notes=tuple(note for note in self.notes if note != self.caution) + cautions(self.family, stages),
            encoder=next(iter(_of(EncoderMethod, stages)), None),
            origin=self,
            patches=next(iter(_of(PatchMethod, stages)), None),
            reuse=next(iter(_of(ReuseMethod, stages)), None),
            projector=_of(ProjectorMethod, stages),
            stage_at_layer={at: stages[stage.number] for at, stage in self.stage_at_layer.items()},
            chunks=next(iter(_of(ChunkMethod, stages)), None),
            policy=next(iter(_of(Policy, stages)), None),
        )

    def _in_variant(self, recipe: Recipe) -> tuple[PlannedStage[Any], ...]:
        """The same stages with the budgets and in the variant of ``recipe``."""
        stages = []
        for stage, (asked, method) in zip(self.stages, recipe.build(), strict=True):
            if recipe.variant != self.recipe.variant:
                method = _fit(asked, method, self.family, [])
                method.suits(self.family)
                if method.taps() != stage.method.taps() or (isinstance(method, Codec) and method != stage.method):
                    raise UnsupportedError(
                        f"variant={recipe.variant!r} cannot be had for one call: {method.name!r} then asks something else of "
                        f"the model; call accelerate_vlm(model, ..., variant={recipe.variant!r})."
                    )
            else:
                method = stage.method
            stages.append(PlannedStage(stage.number, method, asked.retain))
        return tuple(stages)

    def check_cache(self, use_cache: bool | None) -> None:
        """Raise when the recipe compresses a KV cache and there is to be none."""
        at_work = [stage.method.name for stage in self.stages if isinstance(stage.method, (Policy, Codec))]
        if use_cache is False and at_work:
            raise UnsupportedError(
                f"Recipe {self.recipe.name!r} compresses the KV cache ({', '.join(at_work)}), and use_cache=False makes none; "
                "leave out use_cache=False, or use a recipe that works before or inside the language model."
            )

    def check_generation(self, *configs: Any) -> None:
        """Caches and prefill modes that cannot be honoured are refused, not quietly run in full; the first config that
        says something counts."""
        if not self.active:
            return

        if (cache := said("cache_implementation", *configs)) not in (None, "dynamic"):
            raise UnsupportedError(
                f"cache_implementation={cache!r} cannot hold a reduced prompt; leave it out (a dynamic cache is used)."
            )
        if said("prefill_chunk_size", *configs):
            raise UnsupportedError("prefill_chunk_size would reduce only the first chunk; leave it out.")
        if said("is_assistant", *configs):
            raise UnsupportedError(
                "An accelerated model cannot draft for another one, which shows it no pictures; call "
                "assistant.mmaccel.remove() first."
            )
        if named := [name for name in _SELF_DRAFTS if said(name, *configs)]:
            raise UnsupportedError(
                f"{named[0]}= drafts from hidden states of the whole prompt, and an accelerated model has those of the tokens "
                f"that are left; leave out {named[0]}."
            )
        self.check_cache(said("use_cache", *configs))
        reads_ends = bool(self.stage_at_layer) or self.chunks is not None or self.policy is not None
        if reads_ends and (said("prompt_lookup_num_tokens", *configs) or said("assistant_model", *configs)):
            raise UnsupportedError(
                f"Assisted decoding puts candidates behind the prompt, and recipe {self.recipe.name!r} would take them for "
                "its end; leave out the assistant, or use a recipe that works before the language model."
            )


#: arguments of ``generate`` by which a model drafts for itself
_SELF_DRAFTS = ("use_mtp", "assistant_early_exit", "speculation_type")


def said(name: str, *configs: Any) -> Any:
    """What the first of some generation configs says that says something."""
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def record(stats: Stats, stage: PlannedStage[Method], there: int, resolved: int | None, kept: int) -> None:
    """Add to the figures of a stage: how many tokens or keys reached it, its budget for them (None if the content decides), and
    how many are left."""
    figures = stats.stages.setdefault(stage.number, StageStats(stage.method.site, stage.method.name))
    figures.tokens_in += there
    figures.resolved = None if resolved is None else (figures.resolved or 0) + resolved
    figures.tokens_kept += kept


def checked_kernels(kernels: Kernels) -> Kernels:
    """``kernels`` if it is ``"auto"`` or ``"off"``, else refused by name."""
    if kernels not in ("auto", "off"):
        raise MmaccelError(f"kernels={kernels!r} is unknown; give 'auto', or 'off' for plain torch on every device.")
    return kernels


def plan_encoder(recipe: Recipe, towers: Towers, kernels: Kernels) -> EncoderPlan:
    """The plan of an image encoder that stands alone.

    Raises
    ------
    MmaccelError
        If the recipe is anything but one method inside the encoder.
    UnsupportedError
        If the tower lacks what the method needs.
    """
    built = recipe.build()
    method = built[0][1] if len(built) == 1 else None
    if not isinstance(method, EncoderMethod):
        raise MmaccelError(
            f"Recipe {recipe.name!r} is more than one method inside the encoder; use 'tome', 'pitome' or 'evit'."
        )
    method.suits(towers)
    stage = PlannedStage(0, method, built[0][0].retain)
    return EncoderPlan(recipe, towers, (stage,), stage, kernels=checked_kernels(kernels))


def plan_model(recipe: Recipe, family: Family, processor: Any, kernels: Kernels) -> ModelPlan:
    """The plan of a model.

    Raises
    ------
    UnsupportedError
        If the family lacks what a method needs, layers are out of reach, or pixels are to be reduced that no prepared
        ``processor`` reduces.
    MmaccelError
        If a value is of no use.
    """
    notes: list[str] = []
    stages = tuple(
        PlannedStage(number, _fit(stage, method, family, notes), stage.retain)
        for number, (stage, method) in enumerate(recipe.build())
    )
    for stage in stages:
        stage.method.suits(family)
    if any(stage.method.site == "frames" for stage in stages) and getattr(processor, "mmaccel_recipe", None) is None:
        raise UnsupportedError(
            f"Recipe {recipe.name!r} works on pixels, which the model never sees; call "
            f"processor = prepare(processor, {recipe.name!r}), use that processor, and give it as processor=."
        )
    _check_reuse(stages)
    _check_chunks(recipe, stages)
    policies = _of(Policy, stages)
    at_work = [stage.method.name for stage in _of((Policy, Codec), stages)]
    if family.recurrent and at_work:
        notes.append(
            f"{', '.join(at_work)}: at work in the {len(family.attending)} of {family.depth} layers that have attention; the "
            "others keep no keys, and what was evicted stays in their states"
        )
    at_layer = _stage_at_layer(recipe, _of(LayerMethod, stages), family, notes)
    notes += cautions(family, stages)
    return ModelPlan(
        recipe,
        family,
        stages,
        next(iter(_of(EncoderMethod, stages)), None),
        tuple(notes),
        checked_kernels(kernels),
        patches=next(iter(_of(PatchMethod, stages)), None),
        reuse=next(iter(_of(ReuseMethod, stages)), None),
        projector=_of(ProjectorMethod, stages),
        stage_at_layer=at_layer,
        chunks=next(iter(_of(ChunkMethod, stages)), None),
        policy=policies[0] if policies else None,
        token_groups=token_groups({stage.number: stage.method for stage in _of(Codec, stages)}),
        text_towers={
            name: _text_tower(stage.method, name, family, processor)
            for stage in _of(TokenMethod, stages)
            if (name := stage.method.text_tower)
        },
        drafts={
            stage.number: load_draft(stage.method.name, stage.method.draft, family)
            for stage in _of((DraftMethod, DraftPolicy), stages)
        },
    )


def cautions(family: Family, stages: Sequence[PlannedStage[Any]]) -> tuple[str, ...]:
    """The sentence that models for reading get beside budgets that keep less than half; nothing for others.

    The figures are those of tasks ``reading`` and ``colour`` in ``benchmarks/results/mini-llava-curves.json``.
    """
    least = min((stage.retain for stage in stages if isinstance(stage.retain, float)), default=1.0)
    if not family.reads_pages or least >= 0.5:
        return ()
    return (
        f"{family.name} reads pages, and a budget of {least:.0%} costs reading first, since a letter stands in few tokens, "
        "each unlike its neighbours: with every second, fourth and tenth token of a picture (uniform), mini-llava read 80, 72 "
        "and 27 % of words instead of 97 %, and named 100, 100 and 92 % of colours; keep half or more, or measure with "
        "mmaccel eval",
    )


def _check_reuse(stages: tuple[PlannedStage[Method], ...]) -> None:
    """Refuse methods that look at what a tower does not compute of every frame."""
    for reuse in _of(ReuseMethod, stages):
        for method in (stage.method for stage in stages):
            if any(tap.kind != "features" for tap in method.taps()):
                raise UnsupportedError(
                    f"{method.name} looks at the attention inside the vision tower, of which {reuse.method.name} computes a "
                    "part only; use 'divprune' or another method that reads the visual tokens alone, or leave out one of them."
                )


def _check_chunks(recipe: Recipe, stages: tuple[PlannedStage[Method], ...]) -> None:
    """Refuse beside chunks what works on a prompt in one piece, in the same layers."""
    for chunks in _of(ChunkMethod, stages):
        others = [
            stage.method.name for stage in _of((LayerMethod, ChunkMethod, Policy, Codec), stages) if stage is not chunks
        ]
        if others:
            raise UnsupportedError(
                f"Recipe {recipe.name!r}: {chunks.method.name} joins what layers have stored of chunks, and {others[0]} needs "
                "a prompt in one piece there; leave out one of them, or use a method before the language model."
            )


def _of(kind: type | tuple[type, ...], stages: tuple[PlannedStage[Any], ...]) -> tuple[PlannedStage[Any], ...]:
    """The stages whose method is of a kind."""
    return tuple(stage for stage in stages if isinstance(stage.method, kind))


def _fit(stage: Stage, method: Method, family: Family, notes: list[str]) -> Method:
    """The method with what depends on the model filled in; a default layer that is out of reach is moved."""
    fitted = method.fit(family).by("official" if method.official else "exact")
    if not isinstance(fitted, LayerMethod) or "layer" in stage.options:
        return fitted
    near = fitted.within(family).by("official" if method.official else "exact")
    if near is not fitted:
        notes.append(
            f"{method.name} works at layer {near.layer}: layer {fitted.layer}, its default, is out of reach in this model"
        )
    return near


def _stage_at_layer(
    recipe: Recipe, stages: tuple[PlannedStage[LayerMethod], ...], family: Family, notes: list[str]
) -> dict[int, PlannedStage[LayerMethod]]:
    """Which stage works at which layer. Shares of the depth may fall together in a shallow model: of stages of one method the
    last counts, which keeps least."""
    found: dict[int, PlannedStage[LayerMethod]] = {}
    for stage, layer in ((one, layer) for one in stages for layer in one.method.layers()):
        if found and layer < max(found):
            raise MmaccelError(
                f"Recipe {recipe.name!r}: in this model of {family.depth} layers {stage.method.name!r} comes to work at layer "
                f"{layer}, below the stage before it at layer {max(found)}; give rising layers."
            )
        if before := found.get(layer):
            if before.method.name != stage.method.name:
                raise MmaccelError(
                    f"Recipe {recipe.name!r}: in this model of {family.depth} layers {before.method.name!r} and "
                    f"{stage.method.name!r} both fall on layer {layer}; give them layers that differ."
                )
            notes.append(
                f"stages {before.number} and {stage.number} ({stage.method.name}) both fall on layer {layer} of "
                f"{family.depth}: only stage {stage.number} works"
            )
        found[layer] = stage
    for layer, stage in found.items():
        reach = stage.method.reach(family)
        if layer not in reach:
            if not reach:
                raise UnsupportedError(
                    f"{stage.method.name} looks at the attention of a layer, and no layer that it could look at in this "
                    f"{family.name} model has one; use a recipe that works before the language model."
                )
            why = ", since its first layers add DeepStack features" if family.deepstack else ""
            why = f", next to those with attention, which {stage.method.name} looks at" if family.stateful else why
            where = ", ".join(map(str, reach)) if family.stateful else f"{reach[0]} to {reach[-1]}"
            raise UnsupportedError(
                f"layer={layer} is out of reach: in this {family.name} model tokens can be dropped before layers "
                f"{where}{why}; give layer={min(reach, key=lambda one: abs(one - layer))}."
            )
    return found


def _text_tower(method: TokenMethod, name: str, family: Family, processor: Any) -> TextTower:
    """The text tower that a method names."""
    if processor is None:
        raise UnsupportedError(f"{method.name} with a text tower reads the question as text; give processor=.")
    tower = TextTower.load(name, next(family.inner.parameters()).device)
    if tower.width != (width := family.vision.hidden_size):
        raise UnsupportedError(
            f"{name!r} was trained with a vision tower of width {tower.width}, but that of this "
            f"{family.name} model is {width} wide; name the CLIP model that it comes from."
        )
    return tower
