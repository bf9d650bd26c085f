"""Drafts for ``generate`` of an accelerated model: which sources a call has, and which calls can have none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from os import PathLike
from types import NoneType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..core.transformers_api import cache_in, cache_names
from ..decoding.automaton import Store
from ..decoding.drafters import DEFAULT, get_drafter
from ..errors import MmaccelError, UnsupportedError
from ..families import Family
from ..families.draft import load_draft, load_head
from ..kv.cache import cache_bytes
from ..method.model_options import Loaded, keep
from ..recipe import Recipe, RecipeLike, TunedRecipe, get_recipe
from ..recipe.recipe import overrides
from ..runtime.build import plan_for_call
from ..runtime.call.call import Call, current
from ..runtime.call.plan import ModelPlan, first_set
from ..runtime.decoding.drafting import Copying, CopyingTrees, Drafting, Source
from ..runtime.decoding.head_draft import HeadDraft
from ..runtime.decoding.layer_skip import LayerSkip
from ..runtime.decoding.length import MEMORY, Costs, Price, best_length
from ..runtime.decoding.loop import Decoder
from ..runtime.decoding.model_draft import ModelDraft
from ..runtime.decoding.reader import Reader, obstacle_to_trees
from ..runtime.decoding.shared_draft import SharedDraft
from ..runtime.graphs import captured

#: the value of ``draft`` that makes the model draft for itself, whatever it costs; also the name of these drafts in figures
SELF = "self"
#: the names of the drafts of a smaller model, of a head, and of the model without some layers, in figures
MODEL, HEAD, LAYERS = "model", "head", "layers"
#: answers of at most so many tokens end before a model that drafts has paid for its prompt
SHORT = 16
#: the model drafts for itself if this pays at an acceptance that is as good as is known, with a cache of no size
HOPE = 0.9


@dataclass(eq=False)
class Learned:
    """Memory of earlier calls of a model: their answers, None where no drafter copies from them, the acceptance of sources,
    tokens of an answer, and by the rows of a call seconds of forwards and of sources."""

    answers: Store | None
    acceptance: dict[str, float] = field(default_factory=dict)
    usual: float | None = None
    costs: dict[int, Costs] = field(default_factory=dict)
    prices: dict[int, dict[str, Price]] = field(default_factory=dict)


class Drafts:
    """Drafts for an accelerated model, from the arguments of :func:`mmaccel.accelerate_vlm`.

    Parameters
    ----------
    lossless : whether the model verifies for the bare model's answer; else for that of the model with its recipe.
    draft : None, ``"self"``, a smaller model of the same family or a head, or its folder or hub id, or numbers of layers that
        the model skips while it drafts for itself.
    lookup : whether tokens are copied from prompt and earlier answers, or the name of the drafter that does it.
    """

    def __init__(self, lossless: bool, draft: Any, lookup: bool | str) -> None:
        if not isinstance(lossless, bool):
            raise MmaccelError(f"`lossless` must be True or False, got {lossless!r}; give one of them.")
        if not isinstance(draft, (str, PathLike, list, tuple, Module, Loaded, NoneType)):
            raise MmaccelError(
                f"`draft` must be 'self', a model, its folder or hub id, or layers to skip, got {draft!r}; give one of them, "
                "or leave it out."
            )
        self.lossless, self.draft = lossless, Loaded.of(draft)
        if draft == SELF and not lossless:
            raise MmaccelError(
                "draft='self' needs lossless=True: without it the model that drafts and the one that verifies are the same; "
                "give lossless=True, or draft= a smaller model."
            )
        #: the layers that the model skips while it drafts for itself
        self.skipped = tuple(dict.fromkeys(draft)) if isinstance(draft, (list, tuple)) else ()
        if isinstance(draft, (list, tuple)) and not draft:
            raise MmaccelError(
                f"`draft` must name at least one layer to skip, got {draft!r}; name some, or leave it out."
            )
        if self.skipped and not lossless:
            raise MmaccelError(
                f"draft={draft!r} skips layers of the model that verifies, which needs lossless=True; give it, or draft= a "
                "smaller model."
            )
        #: the model that drafts, with the handle that reduces its prompts; None before :meth:`load`
        self.family: Family | None = None
        #: the head that drafts; None before :meth:`load`
        self.head: Any = None
        #: the drafter that copies; None without one
        self.copying = get_drafter(DEFAULT if lookup is True else lookup) if lookup else None
        self.learned, self._began = Learned(None), False

    def __bool__(self) -> bool:
        return self.lossless or self.draft is not None or self.copying is not None

    def check(self, recipe: Recipe, processor: Any, falls_back: bool) -> None:
        """Raise UnsupportedError for drafts with a fallback, and for a lossless recipe that works on pixels, unless the caller
        has prepared the processor with it."""
        if falls_back and self:
            why = "with lossless=True every answer is the full model's; leave out fallback=."
            raise UnsupportedError(
                "fallback= and drafts cannot be combined: "
                f"{why if self.lossless else 'give fallback=, or draft= and lookup=.'}"
            )
        before = any(method.site == "frames" for _, method in recipe.build())
        if self.lossless and before and getattr(processor, "mmaccel_recipe", None) is None:
            raise UnsupportedError(
                f"Recipe {recipe.name!r} works on pixels, which a lossless answer needs whole; take another recipe, or leave "
                "out lossless."
            )

    def load(self, family: Family, recipe: Recipe, processor: Any) -> Any:
        """Load the smaller model that drafts for one of ``family`` and ``processor``: the model, or None where none is wanted.

        What calls have learned goes on where a program accelerates a model anew with the same ``recipe`` for every batch, and
        holds a :class:`mmaccel.method.model_options.KeepLoaded`.
        """
        if self and not self._began:
            copying, self._began = self.copying, True
            key = "drafts", id(family.model), repr(recipe), copying, self.skipped or self.draft, self.lossless
            self.learned = keep(key, lambda: Learned(None if copying is None else copying.store()))
        if self.skipped:
            _check_skipped(self.skipped, family)
            return None
        if self.draft is None or self.draft == SELF:
            return None
        self.head = load_head(self.draft, family)
        if self.head is not None:
            if not self.lossless:
                raise MmaccelError(
                    f"draft={self.draft!r} is a head, which reads the keys of the whole prompt; give lossless=True, too."
                )
            return None
        self.family = load_draft("draft=", self.draft, family, processor)
        return self.family.model

    def attach(self, plan: ModelPlan, hook: Callable[[Any], None]) -> None:
        """Note the hidden states that a head drafts from; ``hook`` remembers what to remove with the handle."""
        hook(self)
        if self.head is not None:
            hook(plan.family.text.register_forward_hook(partial(_note_states, plan), with_kwargs=True))

    def remove(self) -> None:
        """Let go of a model or head that was loaded; :meth:`load` loads it again."""
        self.family = self.head = None

    def forget(self) -> None:
        """Forget earlier answers, so that the same question again is no easier to draft for, and how often drafts were
        accepted."""
        self.learned.acceptance, self.learned.prices, self.learned.usual = {}, {}, None
        if self.copying is not None:
            self.learned.answers = self.copying.store()

    def shares_cache(self, plan: ModelPlan) -> bool:
        """Whether the model drafts for itself over the cache that it verifies with: the recipe is a policy that reads a part of
        the keys, and drops none."""
        alone = plan.reading is not None and len(plan.stages) == 1
        return alone and self.lossless and self._model_drafts and self.draft in (None, SELF)

    def runs_bare(self, plan: ModelPlan) -> bool:
        """Whether the model that verifies runs without the recipe."""
        return self.lossless and not self.shares_cache(plan)

    def obstacle_to_capture(self, plan: ModelPlan, given: Mapping[str, Any], configs: Sequence[Any]) -> str:
        """The reason why steps that verify for the bare model's answer cannot be captured, in a call of ``generate`` with the
        arguments ``given``; empty if they can. There rows keep as many tokens as each other, and no draft is a tree."""
        names = "compile_config", "disable_compile", "output_attentions", "output_hidden_states"
        config = SimpleNamespace(**{name: first_set(name, *configs) for name in names})
        bare = plan_for_call(plan, None, lossless=True)
        if why := captured.obstacle(bare, config, first_set("max_new_tokens", *configs)):
            return why
        if self.skipped or self.head is not None:
            return "drafts are made over the cache that the model verifies with"
        ids = given["input_ids"]
        if not isinstance(ids, Tensor) or len(ids) * (first_set("num_return_sequences", *configs) or 1) > 1:
            return "rows of the bare model keep different numbers of drafted tokens"
        if cache_in(given) is not None or first_set("return_dict_in_generate", *configs):
            return "the caller keeps the cache of the bare model"
        return ""

    def prepare(self, given: Mapping[str, Any], call: Call[ModelPlan]) -> None:
        """Prepare a call of ``generate`` with the arguments ``given``. Raises UnsupportedError if it has drafts of its own."""
        if given.get("assistant_model") is not None:
            raise UnsupportedError(
                "This model has drafts of mmaccel's, and assistant_model= is another; leave it out, or call "
                "model.mmaccel.remove() first."
            )
        call.inputs.tokenizer, call.inputs.reads_all = given.get("tokenizer"), self.lossless
        shaping = call.plan if self.shares_cache(call.plan) else call.plan.origin
        if self.lossless and shaping is not None:
            call.stats.notes = [f"lossless: recipe {shaping.recipe.name!r} shapes drafts only"]

    def decoder(
        self, model: Any, family: Family, given: Mapping[str, Any], asked: Any, call: Call[ModelPlan]
    ) -> Decoder:
        """The loop of one ``call`` of ``generate`` with the arguments ``given`` and ``mmaccel=asked``."""
        most = call.expected.new
        prompt = {name: value for name, value in given.items() if name not in _of_generate()}
        words = family.text.config.vocab_size
        forbidden = frozenset(token for one in family.modalities if (token := family.token_id(one)) is not None)

        def make(reader: Reader) -> Sequence[Source]:
            sources: list[Source] = []
            if not self.lossless and (at_work := _deciding(call.plan)):
                decoder.drafting.notes.append(
                    f"drafts are off: {at_work} works while the model decodes, and a block of tokens would read something else "
                    "than one token at a time"
                )
                return sources
            if self.copying is not None:
                earlier = {} if self.learned.answers is None else {"earlier": self.learned.answers}
                make_drafter, successors = partial(self.copying, **earlier), self.copying.successors
                chains = Copying(self.copying.name, make_drafter, forbidden, successors)
                sources.append(chains)
                if self.copying.nodes and (no_trees := obstacle_to_trees(reader)):
                    decoder.drafting.notes.append(f"drafts are chains: {no_trees}")
                elif self.copying.nodes:
                    sources.append(CopyingTrees(chains, self.copying))
            if self.skipped:
                skipped = [family.text.layers[layer] for layer in self.skipped]
                sources.append(LayerSkip(LAYERS, reader, skipped))
            elif self.head is not None:
                sources.append(HeadDraft(HEAD, self.head, reader, call.inputs, _newest_layers(family)))
            elif most is not None and most <= SHORT:
                if self._model_drafts:
                    decoder.drafting.notes.append(f"no model drafts: the answer has at most {most} tokens")
            elif self.family is not None:
                sources.append(ModelDraft(MODEL, self.family.model, prompt, {"mmaccel": asked}, most, words))
            elif self.draft == SELF or (self._model_drafts and self._pays(family, reader, decoder.drafting, call)):
                if self.shares_cache(call.plan):
                    sources.append(SharedDraft(SELF, reader, call.inputs))
                else:
                    sources.append(ModelDraft(SELF, model, prompt, {"mmaccel": asked}, most))
            return sources

        # the first call finds out what forwards of a batch of this size cost
        rows = len(ids) if isinstance(ids := given.get("input_ids"), Tensor) else 1
        learned = self.learned
        costs, prices = learned.costs.setdefault(rows, Costs()), learned.prices.setdefault(rows, {})
        decoder = Decoder(
            call,
            Drafting(make, forbidden, costs=costs, prices=prices, known=learned.acceptance, usual=learned.usual),
            streamer=given.get("streamer"),
            remember=self._remember,
            kept=cache_in(given) is not None,
        )
        return decoder

    @property
    def _model_drafts(self) -> bool:
        """Whether a model is wanted to draft."""
        return self.draft is not None or (self.lossless and self.copying is None)

    def _pays(self, family: Family, reader: Reader, drafting: Drafting, call: Call[ModelPlan]) -> bool:
        """Whether the model may draft for itself and gain: every draft step reads all weights, and saves keys alone; all of
        them, as far as is known, or those that the recipe leaves unread."""
        weights = sum(weight.numel() * weight.element_size() for weight in family.text.parameters())
        cache, unread = cache_bytes(reader.cache), 1.0
        if self.shares_cache(call.plan) and (stage := next(iter(call.stats.stages.values()), None)) is not None:
            unread = max(0, stage.tokens_in - (stage.resolved or 0)) / max(1, reader.ids.numel())
        price = (weights + cache * (1 - unread)) / (weights + cache)
        if best_length(HOPE, price, Costs(), 8)[0]:
            return True
        drafting.notes.append(
            f"the model does not draft for itself: it would read its weights at every draft step, {price:.0%} of what a step "
            "reads; give draft= a smaller model, or lookup=True"
        )
        return False

    def _remember(self, answers: Sequence[Sequence[int]]) -> None:
        usual, longest = self.learned.usual, max(map(len, answers))
        self.learned.usual = longest if usual is None else MEMORY * usual + (1 - MEMORY) * longest
        if self.learned.answers is not None:
            for answer in answers:
                self.learned.answers.remember(answer)


def skippable(family: Family) -> dict[int, str]:
    """The layers that may be skipped, with the kind (``layer_types``) of each: the first one of a kind tells how many tokens
    the others hold."""
    kinds = list(getattr(family.text.config, "layer_types", None) or ["full_attention"] * family.depth)
    return {layer: kinds[layer] for layer in range(family.depth) if kinds.index(kinds[layer]) != layer}


def _check_skipped(layers: Sequence[Any], family: Family) -> None:
    """Raise MmaccelError for layers that cannot be skipped."""
    allowed = list(skippable(family))
    if wrong := [layer for layer in layers if type(layer) is not int or layer not in allowed]:
        raise MmaccelError(
            f"`draft` names layers to skip: this {family.name} model can skip {allowed}, got {wrong}; name some of these."
        )


def _newest_layers(family: Family) -> dict[str, int]:
    """Of every kind of layer the last one that stores keys."""
    config = family.text.config
    stored = family.depth - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: number for number, kind in enumerate(config.layer_types[:stored])}


#: tokens whose hidden states are kept for a head: as many as a block may have
_STATES = 64


def _note_states(plan: ModelPlan, module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    """Forward hook of the text model: keep its newest hidden states for a head that drafts."""
    if (call := current(plan)) is not None and (cache := cache_in(kwargs)) is not None:
        call.inputs.states = output.last_hidden_state[:, -_STATES:].clone(), cache.get_seq_length()


def draft_of_call(
    recipe: RecipeLike, lossless: bool, draft: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """``draft`` and ``options`` of :func:`mmaccel.accelerate_vlm`: a draft that a method of the recipe looks at is its
    option."""
    if draft is not None and not lossless and "draft" in overrides(get_recipe(recipe)):
        return None, {**options, "draft": draft}
    return draft, options


def with_tuned_layers(draft: Any, lossless: bool, recipe: Recipe) -> Any:
    """``draft`` of :func:`mmaccel.accelerate_vlm`; where a lossless answer has none, the layers that ``mmaccel tune
    --draft-layers`` has written into the recipe. Raises MmaccelError if what is written there names no layers."""
    if draft is not None or not lossless or not isinstance(recipe, TunedRecipe) or "draft" not in recipe.tuned:
        return draft
    written = recipe.tuned["draft"]
    layers = written.get("layers") if isinstance(written, Mapping) else None
    if not isinstance(layers, list) or not layers:
        raise MmaccelError(
            f"Recipe {recipe.name!r} has a `draft` under `tuned` that names no layers, got {written!r:.60}; run mmaccel tune "
            "--draft-layers again, or give draft=."
        )
    return layers


def _deciding(plan: ModelPlan) -> str:
    """The method of a recipe that evicts, chooses, packs or brings back keys while the model decodes, or changes layers by what
    the newest token tells; empty without one."""
    if plan.retracing is not None:
        return plan.retracing.method.name
    if plan.policy is not None and plan.policy.method.decodes:
        return plan.policy.method.name
    codecs = [stage.method.name for stage in plan.stages if stage.method.site == "codec"]
    return codecs[0] if codecs else plan.recipe.name if plan.reactivates else ""


@cache
def _of_generate() -> frozenset[str]:
    """Names of arguments of ``generate`` that do not describe a prompt."""
    from transformers import GenerationConfig

    from ..core.transformers_api import GenerationMixin

    own = inspect.signature(GenerationMixin.generate).parameters
    return frozenset({*own, *GenerationConfig().to_dict(), *cache_names(), "tokenizer", "mmaccel"})
