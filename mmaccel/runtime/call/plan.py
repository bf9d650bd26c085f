"""The plan of a recipe on one model: made once, when the model is accelerated, and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from ...core.budget import Retain
from ...core.stats import Stage as StageStats
from ...core.stats import Stats
from ...errors import MmaccelError, UnsupportedError
from ...families import Family
from ...families.text import TextTower
from ...families.tower import Towers
from ...kv.codecs import TokenGroup
from ...method import (
    ChunkMethod,
    DraftPolicy,
    EncoderMethod,
    ExpertMethod,
    FrameMergingMethod,
    LayerMethod,
    Method,
    PatchMethod,
    Policy,
    ProjectorMethod,
    ReadingPolicy,
    RebuildingMethod,
    RetracingMethod,
    ReuseMethod,
)
from ...recipe import Recipe, losses

#: where keys and values are kept that no layer reads
Offload = Literal["host"]

M = TypeVar("M", bound=Method, covariant=True)

#: whether Triton kernels run where they build, or their plain definitions everywhere
Kernels = Literal["auto", "off"]


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

    towers : the model's family, or the adapter of an image encoder.
    stages : those of the recipe, in its order.
    encoder : the stage inside the towers, or None.
    notes : notes for the statistics of every call.
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
        return self.recipe.chunk is not None or any(stage.method.site != "frames" for stage in self.stages)

    @property
    def in_towers(self) -> bool:
        """Whether the towers make something else of the same pixels."""
        return any(stage.method.site in ("patches", "encoder") for stage in self.stages)


@dataclass(frozen=True, eq=False)
class EncoderPlan(Plan):
    """A recipe of one method inside an image encoder."""

    encoder: PlannedStage[EncoderMethod]


@dataclass(frozen=True, eq=False)
class ModelPlan(Plan):
    """A recipe on a model with a language model.

    towers : the model's family.
    patches : the stage in front of the towers, or None. reuse : that between frames inside them.
    frame_merging, rebuilding : the stage that merges frames in the towers, or has later layers compute a part of the patches.
    projector : the stages between the towers and the language model.
    stage_at_layer : the stage that works at the input of a decoder layer.
    chunks : the stage that has lower layers read a prompt in chunks.
    policy : the stage that works on stored keys. token_groups : the groups of tokens that codecs pack alike.
    key_biases : by attention layer, counted among those, the bias of its keys before RoPE, ``[Hkv, D]`` float32, which is taken
        out of keys before they are packed; none where a recipe packs nothing.
    reading, draft_policy : the same stage as ``policy``, if it chooses the keys that layers read, or scores by a draft's text.
    reactivates : whether tokens that layers drop may come back.
    retracing : the stage that shows visual tokens again between layers, or None. skipping : that by which tokens skip experts.
    choosers : names of methods that do nothing but choose frames.
    text_towers : by name, for methods that read the question with CLIP.
    offload : ``"host"`` where keys and values are kept in host memory; None for the device.
    pins : whether the cache is mmaccel's though nothing shapes it, so that steps can be captured.
    drafts : by the number of the stage, the smaller models that read the prompt first.
    """

    towers: Family
    patches: PlannedStage[PatchMethod] | None = None
    reuse: PlannedStage[ReuseMethod] | None = None
    frame_merging: PlannedStage[FrameMergingMethod] | None = None
    rebuilding: PlannedStage[RebuildingMethod] | None = None
    projector: tuple[PlannedStage[ProjectorMethod], ...] = ()
    stage_at_layer: Mapping[int, PlannedStage[LayerMethod]] = field(default_factory=dict)
    chunks: PlannedStage[ChunkMethod] | None = None
    policy: PlannedStage[Policy] | None = None
    token_groups: tuple[TokenGroup, ...] = ()
    key_biases: Mapping[int, Tensor] = field(default_factory=dict)
    text_towers: Mapping[str, TextTower] = field(default_factory=dict)
    drafts: Mapping[int, Family] = field(default_factory=dict)
    reading: PlannedStage[ReadingPolicy] | None = None
    draft_policy: PlannedStage[DraftPolicy] | None = None
    reactivates: bool = False
    retracing: PlannedStage[RetracingMethod] | None = None
    skipping: PlannedStage[ExpertMethod] | None = None
    choosers: tuple[str, ...] = ()
    offload: Offload | None = None
    pins: bool = False

    @property
    def active(self) -> bool:
        """Whether anything happens between pixels and the cache, or to what the cache holds."""
        return self.pins or self.offload is not None or super().active

    @property
    def family(self) -> Family:
        """The adapter of the model's family."""
        return self.towers

    @property
    def first_inside(self) -> int:
        """The first layer of the language model at whose input something may happen; its depth, if at none."""
        if self.reading is not None and self.reading.method.ahead:
            return 0
        above = () if self.chunks is None else (int(self.chunks.method.layer) + 1,)
        looked_at = [stage.method.compares_with for stage in self.stage_at_layer.values()]
        inputs = [layer for layer in looked_at if layer is not None]
        if self.retracing is not None:
            inputs += [number + 1 for number in self.retracing.method.readouts(self.family.depth)]
        return min([*self.stage_at_layer, *inputs, *above], default=self.family.depth)

    @property
    def hears(self) -> bool:
        """Whether a method works on sounds, too."""
        return any(stage.method.needs_sounds for stage in self.projector)

    @property
    def caution(self) -> str | None:
        """Warning about the recipe's budgets on a model that reads pages, in a sentence; None without one."""
        return reading_caution(self.family, self.recipe)

    @property
    def stores_anew(self) -> bool:
        """Whether keys of a prompt are stored again behind it, so that no room for further tokens is made at first."""
        return self.policy is not None or bool(self.token_groups) or self.chunks is not None

    def splits(self, length: int) -> bool:
        """Whether the text model reads so many tokens in chunks."""
        return self.recipe.chunk is not None and length > self.recipe.chunk

    def check_cache(self, use_cache: bool | None) -> None:
        """Raise when the recipe compresses a KV cache and the call has none."""
        at_work = [stage.method.name for stage in self.stages if stage.method.site in ("cache", "codec")]
        if use_cache is False and at_work:
            raise UnsupportedError(
                f"Recipe {self.recipe.name!r} compresses the KV cache ({', '.join(at_work)}), and use_cache=False makes none; "
                "leave out use_cache=False, or use a recipe that works before or inside the language model."
            )
        if use_cache is False and self.offload is not None:
            raise UnsupportedError(
                "offload='host' keeps the KV cache in host memory, and use_cache=False makes none; leave out one of them."
            )

    def check_generation(self, *configs: Any) -> None:
        """Caches and prefill modes that cannot be honoured are refused, not quietly run in full; the first config that
        says something counts."""
        if not self.active:
            return
        cache = first_set("cache_implementation", *configs)
        if cache == "offloaded":
            raise UnsupportedError(
                "cache_implementation='offloaded' moves a layer before its attention has run; leave it out, and give "
                "offload='host' to accelerate_vlm, which keeps keys and values in host memory."
            )
        if cache not in (None, "dynamic"):
            raise UnsupportedError(
                f"cache_implementation={cache!r} cannot hold a reduced prompt; leave it out (a dynamic cache is used)."
            )
        if (size := first_set("prefill_chunk_size", *configs)) is not None:
            try:
                self.recipe.override(chunk=size).build()
            except MmaccelError as error:
                raise UnsupportedError(f"prefill_chunk_size={size!r:.40} is taken as chunk: {error}") from error
        if first_set("is_assistant", *configs):
            raise UnsupportedError(
                "An accelerated model cannot draft for another one, which shows it no pictures; call "
                "assistant.mmaccel.remove() first."
            )
        if named := [name for name in _SELF_DRAFTS if first_set(name, *configs)]:
            raise UnsupportedError(
                f"{named[0]}= drafts from hidden states of the whole prompt, and an accelerated model has those of the tokens "
                f"that are left; leave out {named[0]}."
            )
        self.check_cache(first_set("use_cache", *configs))
        stages = self.chunks, self.policy, self.retracing
        reads_ends = bool(self.stage_at_layer) or any(stage is not None for stage in stages)
        if reads_ends and (first_set("prompt_lookup_num_tokens", *configs) or first_set("assistant_model", *configs)):
            raise UnsupportedError(
                f"Assisted decoding puts candidates behind the prompt, and recipe {self.recipe.name!r} would take them for "
                "its end; leave out the assistant, or use a recipe that works before the language model."
            )


#: arguments of ``generate`` by which a model drafts for itself
_SELF_DRAFTS = ("use_mtp", "assistant_early_exit", "speculation_type")


def first_set(name: str, *configs: Any) -> Any:
    """The value of the first generation config that sets ``name``; None if none does."""
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


def checked_offload(offload: Any) -> Offload | None:
    """``offload`` if it is ``"host"`` or None, else refused by name."""
    if offload not in (None, "host"):
        raise MmaccelError(
            f"offload={offload!r} is unknown; give 'host' for keys and values in host memory, or None for the device."
        )
    return "host" if offload == "host" else None


def cautions(family: Family, recipe: Recipe) -> tuple[str, ...]:
    """Warnings about a recipe at its budgets: on models for reading, and by what a real language model answered."""
    return tuple(found for found in (reading_caution(family, recipe), losses.caution(recipe)) if found is not None)


def reading_caution(family: Family, recipe: Recipe) -> str | None:
    """The sentence that models for reading get beside budgets that keep less than half; None for others.

    The figures are those of tasks ``reading`` and ``colour`` in ``benchmarks/results/mini-llava-curves.json``.
    """
    least = min((stage.retain for stage in recipe.stages if isinstance(stage.retain, float)), default=1.0)
    if not family.reads_pages or least >= 0.5:
        return None
    return (
        f"{family.name} reads pages, and a budget of {least:.0%} costs reading first, since a letter stands in few tokens, "
        "each unlike its neighbours: with every second, fourth and tenth token of a picture (uniform), mini-llava read 80, 72 "
        "and 27 % of words instead of 97 %, and named 100, 100 and 92 % of colours; keep half or more, or measure with "
        "mmaccel eval"
    )
