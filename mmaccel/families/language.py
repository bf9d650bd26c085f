"""Adapter of the language model behind the towers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def first_of(module: Any, *names: str) -> nn.Module:
    """The submodule of the first of ``names`` that ``module`` has."""
    first: nn.Module = next(part for name in names if (part := getattr(module, name, None)) is not None)
    return first


def mlp_of(layer: Any) -> nn.Module | None:
    """The MLP of a layer, of a language model or a tower; None if it has none of a known name."""
    parts = (getattr(layer, name, None) for name in ("mlp", "feed_forward", "ffn"))
    return next((part for part in parts if isinstance(part, nn.Module)), None)


#: the kind of layers, as a configuration names them, whose attention reads what an indexer chooses
INDEXED = "indexed_attention"


def has_latents(text: Any) -> bool:
    """Whether the layers of a language model with the configuration ``text`` store latents."""
    # where layers have ranks of their own the configuration refuses to name one
    return bool(vars(text).get("kv_lora_rank"))


class LanguageModel:
    """The language model of a family; by default a stack of layers that all have attention."""

    #: the whole model, and its text model
    model: Any
    text: Any
    #: text layers that add visual features (DeepStack), after which tokens may be dropped inside the language model
    deepstack: int = 0
    #: whether RoPE turns queries and keys as two halves, in every layer of the language models usual for it
    halves: bool = True
    #: whether layers store a latent and a part with RoPE of every token, of which they make keys and values (MLA)
    latent: bool = False
    #: layers whose attention reads the keys that an indexer chooses, by a key of its own for every token
    indexed: Sequence[int] = ()
    #: why all layers must store the same tokens, as the end of "the language model of ..."; None where they need not
    chosen_above: str | None = None
    #: whether norms of queries and keys take and give ``[B, H, q, D]`` in place of ``[B, q, H, D]`` or ``[B, q, H D]``
    heads_first: ClassVar[bool] = False
    #: whether some layers of its language models carry a state instead of attention (``carrying``: their kinds)
    stateful: bool = False
    #: why a dropped token cannot run through its language model later, as the end of "the language model of ..."
    no_return: str | None = None
    carrying: ClassVar[tuple[str, ...]] = ()
    #: why layers of the language model cannot read parts of a prompt apart, as the end of "the language model of ... "; None
    #: where they can
    undivided: str | None = None
    #: whether masks are made in front of its text model, which is called with them
    masks_above: ClassVar[bool] = False
    #: the position of the first token
    first_position: ClassVar[int] = 0
    #: arguments of the text model and its layers with a number for every token, ``[B, q]``, such as its type
    by_token: ClassVar[tuple[str, ...]] = ()
    #: whether positions number the pictures of a conversation, which a kept cache does not know
    numbers_pictures: ClassVar[bool] = False
    #: whether marks around pictures have other embeddings in a call without pixels
    marks_need_pixels: ClassVar[bool] = False

    @property
    def axes(self) -> int:
        """Axes of positions, beside one that only counts tokens."""
        return 1

    @property
    def depth(self) -> int:
        """Layers of the language model."""
        return len(self.text.layers)

    @property
    def recurrent(self) -> Sequence[int]:
        """Layers of the language model with a recurrent state instead of keys and values."""
        return ()

    @property
    def attending(self) -> Sequence[int]:
        """Layers of the language model with attention, ascending; the layers of a kept cache are these, counted from 0."""
        return range(self.depth)

    def stored_from(self, layer: int) -> int:
        """The first layer of a kept cache that belongs to layer ``layer`` of the language model or to a later one."""
        return layer

    def mask_argument(self, real: Tensor | None) -> Any:
        """The attention mask to pass to the text model where mmaccel's attention makes the masks; ``real [B, q]`` bool
        is False for padding, None without padding. Layers with an indexer want one of four axes, which it is then given."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool) if self.indexed else None

    def rope_kind(self, layer: int) -> str | None:
        """The name of the RoPE of a layer, if the model has several; else None."""
        return None

    def bidirectional_groups(
        self, ids: Tensor, valid: Tensor, extra_inputs: Mapping[str, Any], seen: int
    ) -> Tensor | None:
        """Groups of prompt tokens that attend to each other in both directions, ``[B, S]`` long on the CPU.

        Tokens of one group have one number; -1 marks causal tokens. None if the whole prompt is causal. ``ids``, ``valid``
        ``[B, S]`` are on the CPU, ``extra_inputs`` are arguments of the call, and ``seen`` tokens are in the cache."""
        return None

    def is_bidirectional(self, layer: int) -> bool:
        """Whether a layer of the language model applies :meth:`bidirectional_groups`."""
        return True

    def attention_width(self, layer: int) -> float:
        """Numbers of all heads of a layer that a query is multiplied by: the mean of those of a key and of a value."""
        attention = self.attention_in(layer)
        if self.latent:
            return float(attention.num_heads * (attention.qk_head_dim + attention.v_head_dim)) / 2
        return float(self.heads_in(layer)[0] * attention.num_key_value_groups * self.heads_in(layer)[1])

    @property
    def query_heads(self) -> int | None:
        """Number of query heads of every layer; None where layers differ."""
        return int(self.text.config.num_attention_heads)

    def heads_in(self, layer: int) -> tuple[int, int]:
        """Number of KV heads of a layer, and their width; of latents one, as wide as both parts."""
        attention = self.attention_in(layer)
        if self.latent:
            return 1, attention.kv_lora_rank + attention.qk_rope_head_dim
        return self.text.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim

    def attention_in(self, layer: int) -> Any:
        """The self-attention of a layer of the language model."""
        return self.text.layers[layer].self_attn

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[..., V]`` of the last hidden states ``[..., D]``."""
        logits: Tensor = self.model.lm_head(states)
        cap = getattr(self.text.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def queries_in(self, attention: Any) -> nn.Module:
        """The last module that queries pass before RoPE."""
        return first_of(attention, "q_norm", "q_layernorm", "q_proj")

    def keys_in(self, attention: Any) -> nn.Module:
        """The last module that keys pass before RoPE."""
        return first_of(attention, "k_norm", "k_layernorm", "k_proj")

    def outgoing_in(self, layer: int) -> Any:
        """The output projection of the attention of a layer, or None."""
        return getattr(self.attention_in(layer), "o_proj", None)

    def experts_in(self, layer: int) -> Any:
        """The experts of a layer, which take the numbers and weights of those that a router chose; None without any."""
        experts = getattr(mlp_of(self.text.layers[layer]), "experts", None)
        return experts if hasattr(experts, "num_experts") else None

    def norm_in(self, layer: Any) -> nn.Module:
        """The norm before the attention of a layer of the language model."""
        return first_of(layer, "input_layernorm", "operator_norm", "attention_layernorm")

    def attended_in(self, layer: Any) -> nn.Module:
        """The module whose output a layer of the language model adds to its input as what attention returns: a norm behind the
        attention, or the attention."""
        if hasattr(layer, "post_self_attn_layernorm"):
            norm: nn.Module = layer.post_self_attn_layernorm
            return norm
        if hasattr(layer, "pre_feedforward_layernorm") or isinstance(self.norm_in(layer), nn.Identity):
            return first_of(layer, "post_attention_layernorm")
        return first_of(layer, "self_attn")

    @property
    def last_norm(self) -> nn.Module:
        """The norm behind the last layer of the language model."""
        return first_of(self.text, "norm", "embedding_norm")

    def of_tokens(self, given: Mapping[str, Any], pick: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The arguments :attr:`by_token` among those ``given``, of the tokens that ``pick`` takes of ``[B, q]``."""
        return {name: pick(x) for name in self.by_token if isinstance(x := given.get(name), Tensor)}

    def deep_features(self, kwargs: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]] | None:
        """DeepStack features in the arguments of the language model's call: their places ``[B, S]`` bool, and the
        features ``[visual tokens, D]`` of every layer that adds some; None without DeepStack."""
        features = kwargs.get("deepstack_visual_embeds")
        return None if features is None else (kwargs["visual_pos_masks"], features)

    def deep_arguments(self, visual: Tensor, features: list[Tensor]) -> dict[str, Any]:
        """DeepStack features as arguments of the language model's call."""
        return {"visual_pos_masks": visual, "deepstack_visual_embeds": features}

    def entering(self, embeds: Tensor, deep: list[Tensor]) -> Tensor:
        """Input ``[B, S, D]`` of the first layer, from ``embeds [B, S, D]`` and DeepStack features of the same layout."""
        return embeds
