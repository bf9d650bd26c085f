"""Base of methods between layers of the language model, and their view of a layer's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from mmaccel_kernels.importance import Importance
from torch import Tensor

from ..core.budget import layer_at
from ..core.layout import Unit
from ..errors import MmaccelError, UnsupportedError
from .base import Method, ModelFacts, check_layers_alone
from .tokens import TokenMethod

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """Base of per-layer inputs; results that depend on tokens only are computed once for several layers.

    memo : the results of :meth:`once`, shared by all layers with the same tokens.
    """

    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def _tokens(self) -> Hashable:
        """A key that differs where the tokens differ."""
        raise NotImplementedError

    def once(self, make: Callable[..., T], *args: Any) -> T:
        """``make(self, *args)``, computed once for all layers with the same tokens.

        It may depend on where tokens are and whether they are text, visual or padding, but not on queries, keys and values;
        and it may wait for the device.
        """
        # a copy with other tokens (dataclasses.replace) shares the memo
        key = make, args, self._tokens
        if key not in self.memo:
            self.memo[key] = make(self, *args)
        result: T = self.memo[key]
        return result


@dataclass
class SharedPass:
    """Results of the same pass over a layer's logits as the column sums.

    query : of the attention that it belongs to. value : ``[B, Hkv, K, Dv]``, for the output of the attention.
    entropy : whether the entropy of the attention is wanted too.
    found : what the pass found; None where nobody asked for sums over all queries.
    """

    query: Tensor
    value: Tensor
    entropy: bool
    found: Importance | None = None


@dataclass(frozen=True)
class LayerAttention(Layerwise):
    """The attention of one language model layer over a prompt, computed in slices of query rows, never as a whole map.

    query : ``[B, Hq, q, D]``, key : ``[B, Hkv, K, D]``, post-RoPE. The prompt's own keys are the last ``q`` of the ``K``.
    visible : ``[B, 1 or Hkv, q, K]`` bool, which keys each query may attend to, or None for plain causal attention.
    scaling : the factor of ``q . k``.
    text : ``[B, q]`` bool, the prompt tokens that are neither visual nor padding.
    said : the same on the CPU; None where the host would wait for it.
    prepared : what :meth:`LayerMethod.prepare` made of what entered the language model, ``[B, q]``.
    shared_pass : what is computed together with sums over queries; None where nothing is.
    places : ``[B, q]`` long, the places of the queries, -1 for padding; None where no policy of a cache observes.
    age : ``[B, q]`` long, how many tokens of the answer came before each query; None for a prompt, and unless the policy
        ``needs_age``.
    value : ``[B, Hkv, K, Dv]``, the values of the keys, only between layers of the language model; in a first pass with
        :attr:`PreviewMethod.below`, those of all heads of several layers side by side, ``[B, 1, K, D]``.
    """

    query: Tensor
    key: Tensor
    visible: Tensor | None
    scaling: float
    text: Tensor
    said: Tensor | None = None
    prepared: Mapping[str, Tensor] = field(default_factory=dict)
    shared_pass: SharedPass | None = None
    places: Tensor | None = None
    age: Tensor | None = None
    value: Tensor | None = None

    @property
    def _tokens(self) -> Hashable:
        return self.query.shape[2], self.key.shape[2]

    @cached_property
    def host_text(self) -> Tensor:
        """``text`` on the CPU; waits for the device if the host does not have it."""
        return self.text.cpu() if self.said is None else self.said

    @cached_property
    def full_key(self) -> Tensor:
        """``key`` in float32, converted once for all slices, when the first one is computed."""
        return self.key.float()

    def logits(self, start: int, stop: int) -> Tensor:
        """``[B, Hq, stop - start, K]`` float32 of query rows ``start`` to ``stop``; ``-inf`` where they may not attend."""
        rows, keys, heads = self.query[:, :, start:stop], self.key.shape[2], self.query.shape[1]
        grouped = rows.unflatten(1, (self.key.shape[1], -1)).float()
        logits = torch.einsum("bkgqd,bkld->bkgql", grouped, self.full_key) * self.scaling
        if self.visible is not None:
            seen = self.visible[:, :, None, start:stop]
        else:
            at = torch.arange(start, stop, device=rows.device) + keys - self.query.shape[2]
            seen = torch.arange(keys, device=rows.device) <= at[:, None]
        return logits.masked_fill(~seen, -torch.inf).reshape(len(rows), heads, -1, keys)

    def attention(self, start: int, stop: int) -> Tensor:
        """``[B, Hq, stop - start, K]``: the softmax of :meth:`logits`; NaN in rows of padding."""
        return self.logits(start, stop).softmax(-1)


class LayerMethod(TokenMethod):
    """A method between two layers of the language model: it reduces the input of layer ``layer``.

    ``layer`` is counted from 0 and at least :attr:`lowest`; a float is a share of the model's depth, rounded half up and moved
    to the nearest layer at which tokens can be dropped, so that a recipe fits any model. A method's default layer is moved
    likewise; a number given in a recipe is taken as it is, or refused.

    What :meth:`observe` returns for the attention of layer ``layer - 1`` (with :attr:`looks_ahead` of ``layer`` itself) reaches
    :meth:`reduce` as ``tokens.signals``, gathered at the tokens of each unit.
    """

    site = "layers"
    unit: ClassVar[Unit] = "picture"
    #: every token leaves for all heads at once
    mixes_heads = True
    #: the first layer at whose input it can work: 1, or 0 if it can do without the attention of a layer before
    lowest: ClassVar[int] = 1
    #: whether :meth:`observe` is shown the attention that layer ``layer`` is about to pay, not that of the layer before
    looks_ahead: ClassVar[bool] = False
    #: whether queries and keys that it looks ahead at are shown with RoPE
    rotated: ClassVar[bool] = True
    #: whether :attr:`TokenBatch.signals` hold ``rotary_cos`` and ``rotary_sin [N, n]``, the cosines and sines by which RoPE
    #: turns each token against the first of the prompt, mean over dimensions and axes
    needs_rotary: ClassVar[bool] = False
    layer: float

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: it chooses among all tokens of a prompt."""
        return "chooses among all tokens of the prompt between two layers"

    def __post_init__(self) -> None:
        super().__post_init__()
        first = self.lowest
        if self.layer < first if isinstance(self.layer, int) else not (0 < self.layer < 1 or self.layer == first == 0):
            raise MmaccelError(
                f"{self.name} cannot work at layer={self.layer}; give a layer of {first} or more, or a share of the depth "
                "between 0 and 1."
            )

    @property
    def compares_with(self) -> int | None:
        """The earlier layer whose input reaches :meth:`reduce` as signal ``before [N, 1, n, D]``, float32; None if it is not
        wanted."""
        return None

    def layers(self) -> range:
        """The layers at whose input a fitted method works."""
        return range(int(self.layer), int(self.layer) + 1)

    def is_done(self, left: Tensor, count: Tensor) -> bool:
        """Whether nothing is left to do at later layers. ``left [N, c]`` are the tokens of every unit before and behind
        each layer so far, ``count [N]`` its budget, both long on the CPU."""
        return False

    def fit(self, family: ModelFacts) -> Method:
        """Replace a share of the depth by a layer."""
        if isinstance(self.layer, int):
            return self
        return self._at(layer_at(self.layer, family.depth), family)

    def within(self, family: ModelFacts) -> LayerMethod:
        """This method at the nearest layer at which tokens can be dropped."""
        return self._at(int(self.layer), family)

    def _at(self, layer: int, family: ModelFacts) -> LayerMethod:
        # of two the lower one
        layer = min(self.reach(family), key=lambda one: abs(one - layer), default=layer)
        # methods are frozen dataclasses with a field `layer`
        return self if layer == self.layer else dataclasses.replace(self, layer=layer)  # type: ignore[type-var]

    def reach(self, family: ModelFacts) -> list[int]:
        """The layers at whose input it can work, ascending: none below DeepStack layers, and only where the observed
        layer has attention, and its own has RoPE if that is read and differs."""
        first = max(self.lowest, family.deepstack)
        layers = [layer + (not self.looks_ahead) for layer in family.attending]
        if self.spreads and not self.lowest:
            # before the first layer nothing is known, and nothing asked
            layers = [0, *layers]
        apart = self.needs_rotary and any(family.rope_kind(layer) is not None for layer in family.attending)
        turning = family.attending if apart else layers
        return [layer for layer in layers if first <= layer < family.depth and layer in turning]

    def suits(self, family: ModelFacts) -> None:
        """Refuse models whose layers need the same tokens, or with layers without attention if it observes all of them."""
        super().suits(family)
        check_layers_alone(self.name, family)
        if self.spreads and family.stateful:
            raise UnsupportedError(
                f"{self.name} with these options looks at the attention of every layer, and most layers of {family.name} have "
                "none; let it work at one layer, or use 'fastv'."
            )

    @classmethod
    def prepare(cls, hidden: Tensor, text: Tensor, visual: Tensor) -> dict[str, Tensor]:
        """Named figures ``[B, q]`` of the language model's input ``hidden [B, q, D]``; :meth:`observe` gets those of the tokens
        that are left. ``text``, ``visual [B, q]`` bool; the rest is padding. By default none."""
        return {}

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """Named statistics per key, ``[B, K]`` float32 each. By default ``prompt_attention``: the attention paid by the last
        prompt token, mean over heads."""
        last = attention.query.shape[2]
        return {"prompt_attention": attention.attention(last - 1, last).mean((1, 2))}
