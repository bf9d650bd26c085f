"""Families by name: every adapter in this folder, and those of installed packages."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import MmaccelError, UnsupportedError
from ..method.registry import files, offered
from .base import Description, Family
from .language import INDEXED, has_latents

#: the entry point group through which another package offers families
ENTRY_POINTS = "mmaccel.families"

_STATES = "layers between those that attend carry a state from token to token, which is known of other models alone"
_NEIGHBOURS = (
    "n-grams of the prompt and convolutions over neighbouring tokens enter between its layers, some of which carry a state, "
    "and keys of its indexer are turned by the positions of all tokens, which a kept cache does not hold"
)
_EMBEDDED = "every layer of the language model has an embedding of its own for every token of the prompt"
_BLOCKS = (
    "an indexer chooses what its layers read by blocks of stored keys, which it finds by their positions, so that a prompt "
    "with gaps has no such blocks"
)
_POOLS = (
    "an indexer chooses what its layers read by pools of neighbouring keys, whose borders move when tokens are dropped, so "
    "that the answer is not that of a prompt with these tokens hidden"
)
_DISTANCES = (
    "distances between tokens are counted over stored ones, and keys and values pass convolutions over neighbours, so that "
    "what is left of a prompt moves together"
)
_ENCODED = "an encoder of its own reads pictures and prompt together, and what decodes has no visual tokens"
_LATENTS = "its cache holds latents, of a kind that is not known here"
_CROSSING = "pictures are read by layers of cross-attention, and are not tokens of the prompt"
_SPEAKS = "it holds a talker too; accelerate what sees and answers, by accelerate_vlm(model.thinker)"

#: model types that would answer wrongly or save nothing -> why, as the end of a sentence
REFUSED: dict[str, str] = {
    **dict.fromkeys(("florence2", "t5gemma2"), _ENCODED),
    "gemma3n": f"{_EMBEDDED}, and the last of them read keys of others",
    "glm5_next": _POOLS,
    **dict.fromkeys(("idefics", "mllama"), _CROSSING),
    "inkling2": _DISTANCES,
    "janus": "its generate hears no logits processors, by which answers are sampled, forced and compared",
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), _SPEAKS),
    "llama4": "three of four layers attend within chunks of the prompt, counted over stored tokens",
    "minimax_m3_vl": _BLOCKS,
    "nemotron_h_omni": _STATES,
    "phi4_multimodal": "the language model puts pictures into its own input, so no call stands between the two",
    "qwen4_exp": _NEIGHBOURS,
}

#: kinds of layers of a language model that only attend, as its configuration names them
_ATTENDING = {"full_attention", "sliding_attention"}
#: language models whose cache holds a latent and a part with RoPE of every token, one behind the other
_LATENT = {"deepseek_v3", "dots3_note_text", "mistral4", "mistral_large4_text"}
#: those of them in which an indexer chooses what layers read, by one more key of every token
_INDEXED = {"dots3_note_text", "mistral_large4_text"}
#: language models whose attention has a term that ours has not -> which
_SINKS = {"gpt_oss": "its attention has learned sinks, which belong to no key"}

_families: dict[str, type[Family]] = {}


def families() -> dict[str, type[Family]]:
    """All known families by name, in the order of their ``place``, then of their names.

    A family is a subclass of :class:`Family` that says which ``model_types`` it serves. It is found because its file lies
    in this folder, or because a package offers it, or the module that it is in, by an entry point ``mmaccel.families``.

    Raises
    ------
    MmaccelError
        If two families serve one model type or have one name, or what a package offers cannot be imported.
    """
    if not _families:
        own = [import_module(name) for name in files(import_module(__package__ or ""))]
        _families.update(_sorted([family for offer in (*own, *offered(ENTRY_POINTS, Family)) for family in _in(offer)]))
    return dict(_families)


def family_of(model: nn.Module, processor: Any = None) -> Family:
    """The adapter of a model.

    Raises
    ------
    UnsupportedError
        If the model is of no supported family; the message lists those that are, or says why one like it cannot be.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    family = _serving(kind)
    if not hasattr(model, "generate") or not hasattr(model, "model"):
        raise UnsupportedError(
            f"{type(model).__name__} cannot generate; give the ...ForConditionalGeneration model of {kind}."
        )
    _check_text(family, model.config)
    if not hasattr(model.model, family.text_name):
        raise UnsupportedError(
            f"This transformers lays {kind} models out otherwise than mmaccel knows them; "
            f"update transformers to {family.since}."
        )
    made = family.of(model.config)(model, processor)
    if made.latent and not hasattr(made.attention_in(0), "expand_kv"):
        raise UnsupportedError(
            f"This transformers lays the attention of {made.text.config.model_type} out otherwise than mmaccel knows it; "
            "update transformers to 5.24."
        )
    return made


def described(config: Any) -> Family:
    """The adapter of a configuration, without its model (see :class:`~mmaccel.families.base.Description`); raises as
    :func:`family_of` does."""
    family = _serving(config.model_type)
    _check_text(family, config)
    return family.of(config)(Description(config))


def _serving(kind: str) -> type[Family]:
    """The family that serves a model type, or a refusal that says why none does."""
    for family in families().values():
        if kind in family.model_types:
            return family
    if kind in REFUSED:
        raise UnsupportedError(f"mmaccel does not accelerate {kind} models: {REFUSED[kind]}.")
    raise UnsupportedError(f"mmaccel does not know the model type {kind!r}; it supports {', '.join(families())}.")


def _check_text(family: type[Family], config: Any) -> None:
    """Raise if the language model is not one that can be accelerated correctly."""
    text = config.get_text_config()
    indexed = {INDEXED} if text.model_type in _INDEXED else set()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENDING - indexed - set(family.carrying))
    why = f"it has layers of {' and '.join(others)}" if others else _SINKS.get(text.model_type)
    if has_latents(text) and text.model_type not in _LATENT:
        why = _LATENTS
    if any(layer != source for layer, source in enumerate(getattr(text, "kv_source_layers", None) or ())):
        why = "some layers read the latents of others"
    if getattr(text, "hidden_size_per_layer_input", None):
        why = _EMBEDDED
    if why:
        raise UnsupportedError(
            f"mmaccel does not accelerate {config.model_type} models with the language model {text.model_type}: {why}."
        )


def _in(offer: type[Any] | ModuleType) -> list[type[Family]]:
    """The families that an entry point offers: a class, or those of a module."""
    if isinstance(offer, type):
        return [offer]
    classes = [one for one in vars(offer).values() if inspect.isclass(one) and one.__module__ == offer.__name__]
    # a base that several share has no model types
    return [one for one in classes if issubclass(one, Family) and "model_types" in vars(one)]


def _sorted(offered_: list[type[Family]]) -> dict[str, type[Family]]:
    named: dict[str, type[Family]] = {}
    served: dict[str, type[Family]] = {}
    for family in dict.fromkeys(offered_):
        taken = [(f"name {family.name!r}", named.setdefault(family.name, family))]
        taken += [(f"model type {kind!r}", served.setdefault(kind, family)) for kind in family.model_types]
        for what, first in taken:
            if first is not family:
                raise MmaccelError(
                    f"The {what} is taken by {first.__module__}.{first.__qualname__} and by {family.__module__}."
                    f"{family.__qualname__}; uninstall the package of one of them, or give it another."
                )
    return dict(sorted(named.items(), key=lambda item: (item[1].place, item[0])))
