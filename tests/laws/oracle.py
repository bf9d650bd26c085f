"""What the laws compare with: a bare model in which chosen keys are hidden, per layer, per key head, per query.

The replay runs prompt and continuation in one forward, without a cache, through an attention function of its own: a
float32 softmax under an explicit mask `[B, Hq, q, K]` that is built here from places, windows and the recorded
selection. None of mmaccel's masks, caches or positions takes part.

A layer with a recurrent state cannot be shown a token and have it hidden: there the law is that a token that was dropped has
never been there. The replay runs such a layer row by row over the tokens that it is to see, closed up, and over nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import synthetic
import torch
import zoo
from laws.nets import chosen_of, run_over, show, stub
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LogitsProcessor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import mmaccel
from mmaccel import Recipe, Stage, UnsupportedError, accelerated, get_method, recipes
from mmaccel.core.reduction import Reduction
from mmaccel.families import family_of
from mmaccel.method import FramesMethod, LayerMethod, Method, Policy, ReactivatingMethod, TokenMethod
from mmaccel.method.base import Variant

STEPS = 6
#: logits of the zoo have a standard deviation of about one; float32 kernels differ by up to 1.1e-5 on them
TOLERANCE, POWER = 2e-5, 1e-2

#: LLaMA, Qwen2 and Cohere2 text models that can have sliding windows
WINDOWED = (
    ("llava_next", {"sliding_window": 24}),
    ("internvl", {"sliding_window": 24, "max_window_layers": 2}),
    ("aya_vision", {"sliding_window": 24}),
)
#: tokens of a picture look ahead there; those of Gemma 4 no further than the window. PaliGemma 2, with a Gemma 2, lets a whole
#: prompt do so, in eager attention whose scores are capped
AHEAD = (
    ("gemma3", {"sliding_window": 24}),
    ("gemma4", {"sliding_window": 24}),
    ("gemma4_unified", {"sliding_window": 70}),
    ("paligemma", {"model_type": "gemma2", "sliding_window": 70}),
)
#: every kind of windows; those of LFM3 lie between layers with a state
WINDOWS = (*WINDOWED, *AHEAD, *((name, {"sliding_window": 24}) for name in zoo.FAMILIES if name == "lfm3_vl"))
#: Ministral 3 is a Mistral 3 whose queries grow with their positions, here early, in published models behind 16,384 of them
GROWING = tuple(
    {
        "rope_type": "default",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 24,
        "llama_4_scaling_beta": 0.3,
    }.items()
)
#: InternVL 3.5 has language models of Qwen3, which normalise queries and keys, and with experts
RENEWED = (
    ("internvl", {"model_type": "qwen3", "head_dim": 16}),
    (
        "internvl",
        {
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
)


# ------------------------------------------------------------------------------------------------------------- models


@functools.cache
def bare(family: str, **overrides: Any) -> Any:
    """A model that nothing is ever put on."""
    return zoo.model(family, **overrides)


@functools.cache
def subject(family: str, **overrides: Any) -> Any:
    """The same model, to be accelerated inside `with` blocks."""
    return zoo.model(family, **overrides)


@functools.cache
def adapter(family: str) -> Any:
    """What mmaccel knows of a family, with its processor."""
    return family_of(bare(family), zoo.processor(family))


#: families whose vision tower has a CLS token
CLS = tuple(family for family in zoo.FAMILIES if adapter(family).has_cls)
#: families whose vision tower packs pictures into one call of its attention
ONE_CALL = tuple(family for family in zoo.FAMILIES if adapter(family).one_call)
#: families whose language model has experts
EXPERTS = tuple(
    family
    for family in zoo.FAMILIES
    if any(adapter(family).experts_in(layer) is not None for layer in range(adapter(family).depth))
)
#: families in whose vision tower tokens can merge
MERGING = tuple(family for family in zoo.FAMILIES if adapter(family).closed is adapter(family).whole is None)


@functools.cache
def replayer(family: str, **overrides: Any) -> Any:
    """The same model with the replay's attention in its text model."""
    model = zoo.model(family, **overrides)
    known = family_of(model)
    model.set_attn_implementation({"text_config": "laws_replay"})
    for number in known.recurrent:
        net = known.net_in(number)
        net.forward = functools.partial(run_over, net, net.forward)
    for layer in known.indexed:
        attention = known.attention_in(layer)
        if attention.indexer is None:
            continue
        before = functools.partial(show, functools.partial(getattr, attention, "visible"))
        attention.indexer.register_forward_pre_hook(before, with_kwargs=True)
    return model


def text_model(model: Any) -> Any:
    """The text model of a family's model."""
    return model.model.text_model if hasattr(model.model, "text_model") else model.model.language_model


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = (query.float() @ key.float().transpose(-1, -2)) * scaling
    if (cap := kwargs.get("softcap")) is not None:
        logits = torch.tanh(logits / cap) * cap
    if getattr(module, "weights", None) is not None:
        logits = logits + module.weights
    weight = logits.masked_fill(~chosen_of(module.visible, kwargs.get("indices")), -1e30).softmax(-1)
    return (weight @ value.float()).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("laws_replay", _attend)
AttentionMaskInterface.register("laws_replay", lambda *args, **kwargs: stub(kwargs["config"]))


# ---------------------------------------------------------------------------------------------------------- selection


@dataclass
class Seen:
    """Which keys of the prompt are to be seen, per layer with attention.

    prompt : by the queries of the prompt, `[B, S]` bool each, or `[B, S, S]` query by query, or `[B, Hkv, S, S]` by heads too.
    later : by the queries behind it, `[B, Hkv, S]` bool each, or `[B, Hkv, T, S]` query by query.
    states : per layer with a recurrent state, which tokens of the prompt it runs over; by default those that the next layer
        with attention sees, or behind the last of these the same as that.
    held : what is stored at the end of the prompt, `[B, S]` bool each; by default what is seen later.
    """

    prompt: list[Tensor]
    later: list[Tensor]
    states: dict[int, Tensor] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = self.held or [heads.any(1) for heads in self.later]

    def reaching(self, family: str, number: int) -> Tensor:
        """`[B, S]` bool, the tokens of the prompt that a layer with a recurrent state runs over."""
        above = adapter(family).stored_from(number)
        return self.states[number] if number in self.states else self.prompt[min(above, len(self.prompt) - 1)]


def below(family: str, name: str, feed: Any) -> dict[int, Tensor]:
    """What layers with a recurrent state run over below the one at which a method inside the language model drops tokens."""
    at = first_layer(family, name) if issubclass(get_method(name), LayerMethod) else 0
    return {number: feed["attention_mask"].bool() for number in adapter(family).recurrent if number < at}


def everything(model: Any, feed: Any) -> Seen:
    """All keys but padding."""
    known, valid = family_of(model), feed["attention_mask"].bool()
    heads = [known.heads_in(number)[0] for number in known.attending]
    return Seen([valid] * len(heads), [valid[:, None].expand(-1, one, -1) for one in heads])


def stored(model: Any, feed: Any, cache: Any) -> list[Tensor]:
    """`[B, Hkv, S]` bool per layer: which keys of the prompt a cache still holds."""
    state = getattr(cache, "mmaccel", None)
    if state is None:
        return everything(model, feed).later
    batch, length = feed["input_ids"].shape
    out = []
    for layer in state.layers:
        index = layer.index.index.long()
        index = index if index.dim() == 3 else index[:, None].expand(-1, layer.keys.shape[1], -1)
        held = torch.zeros(batch, index.shape[1], length + 1, dtype=torch.bool)
        held.scatter_(2, torch.where((index < 0) | (index >= length), length, index), True)
        out.append(held[..., :length])
        # what the layer says it holds it holds: one key for every place, none twice
        there = int((index >= 0).sum())
        assert there == sum(len(set(head[head >= 0].tolist())) for row in index for head in row)
        held_keys = layer.keys.shape[2] * index.shape[0] * index.shape[1]
        packed = sum(int(pages.lengths().sum()) for pages in layer.packed.pages if pages is not None)
        if layer.ragged is not None:
            assert int(layer.ragged.lengths.sum()) == len(layer.ragged.keys)
            assert packed + len(layer.ragged.keys) + held_keys == there
        elif packed:
            assert packed + held_keys == there
        else:
            assert held_keys == index.numel()
    return out


@dataclass
class Record:
    """One accelerated run: logits of the whole prompt `[B, S, V]` (direct forward) and of every decoded step
    `[B, T, V]`, the reduction it reports, and the keys it saw."""

    prompt: Tensor
    steps: Tensor
    reduction: Any
    seen: Seen

    @property
    def kept(self) -> Tensor:
        """`[B, S]` bool."""
        return self.reduction.kept


def recipe(name: str, family: str, retain: float | None = 0.3, **options: Any) -> Recipe:
    """A recipe of one method, at a layer that the family allows and with a window that leaves something to choose."""
    kind = get_method(name)
    known = {option.name for option in fields(kind)}
    if issubclass(kind, LayerMethod):
        options = {"layer": first_layer(family, name), **options}
    if issubclass(kind, Policy) and "window" in known:
        options = {"window": min(8, kind.window), **options}
    return Recipe(name, (Stage(name, None if kind.budget == "none" else retain, options),))


def first_layer(family: str, name: str = "fastv") -> int:
    """The layer at which the laws let a method drop tokens: the second, or the next at which it can."""
    kind: Any = get_method(name)
    return int(kind(layer=2).within(adapter(family)).layer)


# ------------------------------------------------------------------------------------------------------------ the registry


def named(*kinds: type[Method]) -> tuple[str, ...]:
    """The methods of these kinds that are offered."""
    return tuple(name for kind in kinds for name in synthetic.offered(kind))


def policies_that_drop() -> tuple[str, ...]:
    """Policies that with their default options evict the other keys, for good and as soon as the prompt has been read, and
    leave no means of them."""
    return tuple(
        name
        for name, kind in synthetic.offered(Policy).items()
        if kind.budget != "none" and kind.compact == "evict" and not kind.guided and not kind().recalls
    )


def methods_that_drop(*kinds: type[TokenMethod]) -> tuple[str, ...]:
    """Methods that with their default options merge nothing."""
    made = ((name, next(synthetic.built(kind))) for one in kinds for name, kind in synthetic.offered(one).items())
    shown = ((name, one, synthetic.tokens_of(one)) for name, one in made)
    return tuple(name for name, one, seen in shown if one.reduce(seen, seen.valid.sum(1) // 3).links is None)


def named_recipes() -> tuple[str, ...]:
    """Every recipe of methods that are offered, if it does anything once a processor has done its part."""
    known, front = synthetic.offered(), set(synthetic.offered(FramesMethod))
    return tuple(
        name
        for name, made in recipes().items()
        if all(stage.method in known for stage in made.stages) and {stage.method for stage in made.stages} - front
    )


def has_site(name: str, site: str) -> bool:
    """Whether a recipe has a stage at a site."""
    return any(get_method(stage.method).site == site for stage in in_book(name).stages)


def for_good(name: str) -> bool:
    """Whether a method drops for good what it drops."""
    return not issubclass(get_method(name), ReactivatingMethod)


def in_turn(square: Sequence[tuple[str, str]], values: Callable[[str], Sequence[Any]]) -> list[tuple[str, str, Any]]:
    """Every case ``(family, name)`` of a square with one of the ``values`` that its family has for another axis.

    Values take turns over families and over names, so that every two of family, name and value come together where there are
    enough of them.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(name for _, name in square))}
    turns = ((family, name, zoo.FAMILIES.index(family) + names[name]) for family, name in square)
    return [(family, name, values(family)[turn % len(values(family))]) for family, name, turn in turns]


def square(names: Sequence[str], of: Sequence[str] = zoo.FAMILIES) -> list[tuple[str, str]]:
    """Every name with every family ``of`` these that has what it asks for, ``(family, name)``."""
    return [(family, name) for family in of for name in names if fits(name, family)]


def families_in_turn(names: Sequence[str], each: int = 1, of: Sequence[str] = zoo.FAMILIES) -> list[tuple[str, str]]:
    """Every name with ``each`` of the families ``of``, ``(family, name)``, that have what it asks for; families take turns."""
    fitting = [(name, [family for family in of if fits(name, family)]) for name in names]
    return [
        (having[(turn * each + i) % len(having)], name)
        for turn, (name, having) in enumerate(fitting)
        for i in range(min(each, len(having)))
    ]


def shortens(name: str) -> bool:
    """Whether a recipe has tokens reach fewer layers, whatever they show, and not only their keys leave the cache."""
    sites = "encoder", "projector", "layers"
    made = [get_method(stage.method) for stage in in_book(name).stages]
    return any(one.site in sites and one.budget != "none" for one in made)


@functools.cache
def in_book(name: str) -> Recipe:
    """The recipe of that name; the book is made anew whenever it is asked for."""
    return mmaccel.get_recipe(name)


@functools.cache
def built(name: str, variant: Variant) -> list[tuple[Stage, Method]]:
    """The methods of a recipe in a variant."""
    return in_book(name).override(variant=variant).build()


@functools.cache
def fits(name: str, family: str, variant: Variant = "exact", **overrides: Any) -> bool:
    """Whether a family has what the methods of a recipe ask for in that variant; nothing does where its model is refused, as a
    PaliGemma 2 is that older releases of transformers do not load with eager attention."""
    try:
        known = family_of(bare(family, **overrides), zoo.processor(family)) if overrides else adapter(family)
        for _, made in built(name, variant):
            if not isinstance(made, FramesMethod):
                made.fit(known).by(variant).suits(known)
    except UnsupportedError:
        return False
    return True


@contextmanager
def recalled() -> Any:
    """What is chosen of the prompt in every forward behind it, `[B, n]` bool, at one layer after the other; by methods whose
    tokens may come back."""
    chosen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in synthetic.offered(ReactivatingMethod).values():

            def watched(self: Any, *given: Any, recall: Any = kind.recall) -> Tensor:
                chosen.append(recall(self, *given))
                return chosen[-1]

            patch.setattr(kind, "recall", watched)
        yield chosen


def held_behind(family: str, model: Any, feed: Any) -> list[Tensor]:
    """`[B, S]` bool per layer: what the last call has stored of its prompt when that ended, and of what was there before."""
    valid = feed["attention_mask"].bool()
    found = []
    for number in adapter(family).attending:
        kept = [step.reduction.kept for step in model.mmaccel.history if step.layer <= number]
        before = (valid.shape[1] - kept[-1].shape[1], 0) if kept else None
        found.append(valid & pad(kept[-1], before, value=True) if before is not None else valid)
    return found


def coming_back(
    family: str, model: Any, feed: Any, held: list[Tensor], chosen: Sequence[Tensor], lengths: Sequence[int]
) -> Seen:
    """What is seen of a prompt of which layers had `held` something when it ended, and as was `chosen` in forwards of so many
    tokens behind it.

    A layer stores a token with the prompt, or when it is chosen for the first time, and the token sees what all tokens of that
    forward see.
    """
    known, valid = adapter(family), feed["attention_mask"].bool()
    layers = [known.stored_from(layer) for layer in sorted(model.mmaccel.plan.stage_at_layer)]
    forwards = [chosen[i : i + len(layers)] for i in range(0, len(chosen), len(layers))]
    assert len(forwards) == len(lengths)
    text, prompt, later = valid & ~visual(family, feed), [], []
    for at, number in enumerate(known.attending):
        heads, stage = known.heads_in(number)[0], sum(layer <= at for layer in layers)
        stored, rows, read = held[at], held[at][:, None].repeat(1, valid.shape[1], 1), []
        for forward, length in zip(forwards, lengths, strict=True):
            now = text | pad(forward[stage - 1], (0, valid.shape[1] - forward[0].shape[1])) if stage else stored
            rows = torch.where((now & ~stored)[..., None], now[:, None], rows)
            stored = stored | now
            read += [now] * length
        prompt.append(rows)
        later.append(torch.stack(read, 1)[:, None].expand(-1, heads, -1, -1))
    return Seen(prompt, later, held=held)


class ChoseDifferently(AssertionError):
    """A forward and ``generate`` chose other tokens of one prompt."""


def record(
    family: str, feed: Any, what: Recipe, forced: Tensor, processor: bool = True, model: Any = None, **overrides: Any
) -> Record:
    """Run a recipe and note what it chose."""
    model = subject(family, **overrides) if model is None else model
    reader = zoo.processor(family) if processor else None
    front = tuple(s for s in what.stages if get_method(s.method).site != "cache")
    before = None
    if len(front) < len(what.stages):
        # what the prompt's own queries see is decided by the stages before the cache
        with accelerated(model, Recipe("front", front, positions=what.positions), processor=reader):
            before = stored(model, feed, decode(model, feed, forced)[1])
    with accelerated(model, what, processor=reader):
        prompt = model(**feed, **counted(family, feed)).logits
        direct = model.mmaccel.reduction
        with recalled() as chosen:
            steps, cache = decode(model, feed, forced)
        reduction, states = model.mmaccel.reduction, {}
        for number in adapter(family).recurrent:
            there = [step.reduction.kept for step in model.mmaccel.history if step.layer <= number]
            states[number] = (there or [feed["attention_mask"].bool()])[-1]
        back = None
        if chosen:
            held = held_behind(family, model, feed)
            back = coming_back(family, model, feed, held, chosen, [1] * (forced.shape[1] - 1))
    later = stored(model, feed, cache)
    if direct is not None:
        if not torch.equal(direct.kept, reduction.kept):
            raise ChoseDifferently("forward and generate chose differently")
    if back is not None:
        return Record(prompt, steps, reduction, back)
    seen = Seen([heads.any(1) for heads in (before or later)], later, states)
    if before is None and reduction is not None:
        assert torch.equal(seen.prompt[-1], reduction.kept), "the last layer holds other keys than were kept"
    return Record(prompt, steps, reduction, seen)


# ------------------------------------------------------------------------------------------------------------ running


class Force(LogitsProcessor):
    """Decode given tokens, so that no comparison hangs on an argmax."""

    def __init__(self, tokens: Tensor, start: int) -> None:
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        wanted = self.tokens[:, input_ids.shape[1] - self.start]
        return torch.full_like(scores, -torch.inf).scatter(1, wanted[:, None], 0.0)


def force(family: str, rows: int, steps: int = STEPS) -> Tensor:
    """`[rows, steps]` printable tokens."""
    words = zoo.tokenizer(family)
    plain = torch.tensor([i for i in range(len(words)) if i not in words.all_special_ids])
    random = torch.Generator().manual_seed(7)
    return plain[torch.randint(len(plain), (rows, steps), generator=random)]


def decode(model: Any, feed: Any, forced: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """`generate` with given tokens: logits `[B, T, V]` of the steps, and the cache it leaves."""
    out = model.generate(
        **feed,
        max_new_tokens=forced.shape[1],
        do_sample=False,
        logits_processor=[Force(forced, feed["input_ids"].shape[1])],
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    assert torch.equal(out.sequences, torch.cat([feed["input_ids"], forced], dim=1))
    return torch.stack(out.logits, dim=1), out.past_key_values


def continued(family: str, feed: Any, forced: Tensor) -> dict[str, Any]:
    """The inputs with the forced tokens (all but the last) behind the prompt."""
    more = forced[:, :-1]
    new = dict(feed, input_ids=torch.cat([feed["input_ids"], more], dim=1))
    new["attention_mask"] = torch.cat([feed["attention_mask"], torch.ones_like(more)], dim=1)
    for name, kind in zoo.typed(family):
        if name in feed:
            new[name] = torch.cat([feed[name], torch.full_like(more, kind)], dim=1)
    return new


def blocks(feed: Any, config: Any) -> Tensor:
    """`[B, S, S]` bool: which places are of the same picture, of any picture, or of the same prompt, where tokens of one attend
    to each other both ways. `config` is that of the text model."""
    if config.model_type in ("gemma", "gemma2"):
        prompt = (
            (feed["token_type_ids"] == 0) if "token_type_ids" in feed else torch.zeros_like(feed["input_ids"]).bool()
        )
        return prompt[:, :, None] & prompt[:, None]
    picture = (feed["token_type_ids"] == 1) if "token_type_ids" in feed else feed["mm_token_type_ids"] > 0
    if config.model_type == "molmo2_text":
        return picture[:, :, None] & picture[:, None]
    begins = picture & ~torch.nn.functional.pad(picture, (1, 0))[:, :-1]
    number = begins.cumsum(1).masked_fill(~picture, -1)
    return (number[:, :, None] == number[:, None]) & picture[:, :, None]


def replay(
    family: str,
    feed: Any,
    forced: Tensor,
    seen: Seen | None = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    merged: Sequence[tuple[int, Reduction]] = (),
    weights: Tensor | None = None,
    **overrides: Any,
) -> tuple[Tensor, Tensor]:
    """Logits of the prompt `[B, S, V]` and of the steps `[B, T, V]` of the bare model that sees only what is `seen`.

    `change` may exchange what the text model is called with, and `merged` puts merged values at the kept places of what
    layers read; 0 is the embeddings, with DeepStack's features. To the logits of the keys of the prompt `weights [B, S]` are
    added.
    """
    model = replayer(family, **overrides)
    seen = everything(bare(family, **overrides), feed) if seen is None else seen
    whole, length = continued(family, feed, forced), feed["input_ids"].shape[1]
    valid = whole["attention_mask"].bool()
    place = torch.arange(valid.shape[1])
    config = model.config.get_text_config()
    for number in adapter(family).recurrent:
        family_of(model).net_in(number).there = torch.cat([seen.reaching(family, number), valid[:, length:]], dim=1)
    known = family_of(bare(family, **overrides))
    for at, number in enumerate(known.attending):
        layer = text_model(model).layers[number]
        mask = place[None, :] <= place[:, None]
        if both_ways(config, number):
            mask = mask | blocks(whole, config)
        if (window := window_of(config, number)) is not None:
            mask = mask & (place[:, None] - place[None, :] < window)
        layer.self_attn.weights = None
        if weights is not None:
            layer.self_attn.weights = torch.nn.functional.pad(weights, (0, len(place) - length))[:, None, None]
        heads = known.heads_in(number)[0]
        mask = (mask & valid[:, None])[:, None].repeat(1, heads, 1, 1)
        first, behind = seen.prompt[at], seen.later[at]
        first = first if first.dim() == 4 else first[:, None, None] if first.dim() == 2 else first[:, None]
        mask[:, :, :length, :length] &= first
        mask[:, :, length:, :length] &= behind[:, :, None] if behind.dim() == 3 else behind
        # rows that see nothing (padding, dropped tokens) must stay finite; nobody looks at them
        groups = query_heads(known, number) // heads
        layer.self_attn.visible = (mask | torch.eye(len(place), dtype=torch.bool)).repeat_interleave(groups, dim=1)
    with exchanged(model, change), merging(model, merged):
        logits = model(**whole, **counted(family, whole), use_cache=False).logits
    for layer in text_model(model).layers:
        # whoever else looks at what is seen adds nothing
        if hasattr(layer, "self_attn"):
            layer.self_attn.weights = None
    return logits[:, :length], logits[:, length - 1 :]


def query_heads(family: Any, number: int) -> int:
    """Query heads of a text layer."""
    attention = family.attention_in(number)
    # layers of Step 3.7 have their own number of them
    return attention.num_heads if family.latent or family.name == "step3p7" else family.text.config.num_attention_heads


def both_ways(config: Any, number: int) -> bool:
    """Whether the tokens of a picture attend to each other both ways in a text layer."""
    kind = config.model_type
    if kind == "gemma4_text":
        return config.layer_types[number] == "sliding_attention"
    return kind in ("gemma", "gemma2", "gemma3_text", "gemma4_unified_text", "molmo2_text")


def window_of(config: Any, number: int) -> int | None:
    """The sliding window of a text layer, or None."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[number] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


@contextmanager
def exchanged(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]] | None) -> Any:
    """Call the text model with other arguments."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args, change(dict(kwargs))) if change is not None else None

    handle = text_model(model).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def taken_up(x: Tensor, reduction: Reduction) -> Tensor:
    """`x [B, S, D]` with merged values at the kept places of the prompt."""
    length = reduction.kept.shape[1]
    return torch.cat([reduction.substitute(x[:, :length]), x[:, length:]], dim=1)


def merged_inputs(kwargs: dict[str, Any], reduction: Reduction) -> dict[str, Any]:
    """What a text model is called with when tokens are merged before it, DeepStack's features included."""
    kwargs = dict(kwargs, inputs_embeds=taken_up(kwargs["inputs_embeds"], reduction))
    return with_planes(kwargs, reduction.kept.shape[1], reduction.substitute)


def with_planes(kwargs: dict[str, Any], length: int, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The call of a text model with what DeepStack adds changed: ``change`` takes and returns it laid out over the ``length``
    places of the prompt, `[B, length, D]`."""
    for mask, name in (("visual_pos_masks", "deepstack_visual_embeds"), ("vision_mask", "deepstack_features")):
        if (found := kwargs.get(name)) is None:
            continue
        visual = kwargs[mask].view(len(kwargs[mask]), -1)[:, :length]
        layers = found if isinstance(found, dict) else dict(enumerate(found))
        made = {}
        for layer, features in layers.items():
            plane = features.new_zeros(*visual.shape, features.shape[-1])
            plane[visual] = features
            made[layer] = change(plane)[visual]
        kwargs[name] = made if isinstance(found, dict) else list(made.values())
    return kwargs


@contextmanager
def merging(model: Any, merged: Sequence[tuple[int, Reduction]]) -> Any:
    """Let layers of the text model read merged values at the kept places of the prompt."""
    with ExitStack() as held:
        for number, reduction in merged:
            if number == 0:
                held.enter_context(exchanged(model, functools.partial(merged_inputs, reduction=reduction)))
                continue
            hook = functools.partial(_taking_up, reduction)
            held.callback(text_model(model).layers[number].register_forward_pre_hook(hook).remove)
        yield


def _taking_up(reduction: Reduction, module: nn.Module, args: Any) -> Any:
    return (taken_up(args[0], reduction), *args[1:])


@functools.cache
def plain(family: str) -> bool:
    """Whether in a direct forward padding is counted too."""
    return (
        family == "paligemma" or at_the_door(zoo.model(family), zoo.inputs(family, "image")).get("position_ids") is None
    )


def counted(family: str, feed: Any) -> dict[str, Tensor]:
    """Positions of a padded batch as `generate` counts them. A text model on its own counts padding too; keys then are turned
    further, and some methods, such as dart, look at them one by one."""
    mask = feed["attention_mask"]
    padded = plain(family) and not bool(mask.all())
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0) + adapter(family).first_position} if padded else {}


def at_the_door(model: Any, feed: Any) -> dict[str, Any]:
    """What a direct forward calls the text model with; of an accelerated model too, before anything is reduced."""
    caught: list[dict[str, Any]] = []

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        caught.append(kwargs)

    handle = text_model(model).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    try:
        model(**feed)
    finally:
        handle.remove()
    return caught[0]


# ---------------------------------------------------------------------------------------------------------- comparing


def close(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE, what: str = "logits") -> None:
    """Equal within `tolerance`, and no NaN."""
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} is not {tuple(wanted.shape)}"
    gap = (got.float() - wanted.float()).abs().max().item() if got.numel() else 0.0
    assert gap <= tolerance, f"{what} differ by {gap:.3g}"


def apart(got: Tensor, other: Tensor) -> None:
    """The comparison could have failed: without hiding, the logits are others."""
    gap = (got - other).abs().amax(tuple(range(1, got.dim()))).max().item()
    assert gap > POWER, f"hiding moves logits by {gap:.3g} only: this case proves nothing"


def visual(family: str, feed: Any) -> Tensor:
    """`[B, S]` bool, from the placeholders alone."""
    return zoo.visual_mask(family, bare(family), feed["input_ids"])


def layers_of_tower(model: Any) -> tuple[list[Sequence[nn.Module]], int]:
    """The layers of every tower, and the number of the one whose output the language model reads."""
    known = family_of(model)
    return [known.tower_layers(tower) for tower in known.towers()], known.feature_layer
