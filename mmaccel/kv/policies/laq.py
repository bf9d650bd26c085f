"""LAQ: keep the keys that a first draft of the answer, by the model itself, attends to."""

from dataclasses import replace
from typing import Literal

from torch import Tensor
from torch.nn.functional import pad

from ...method import KeyBatch, Policy, register
from ..scoring.importance import by_group
from .snapkv import smoothed, window_attention, window_sight


@register
class LAQ(Policy):
    """Score keys by the attention that the prompt's last queries, and those of pseudo answer tokens, pay to the prompt.

    *Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query*, arXiv 2505.20334.

    The model writes ``lookahead`` tokens greedily behind the prompt, which are not stored and no part of the answer. With ``A``
    the softmax over the keys of the prompt that a query may attend to, in float32, ``s_k = pool( reduce_{h in group} mean_q
    A[h, q, k] )`` over the queries ``q`` of the last ``window`` prompt tokens and of these tokens, for the keys before the
    window; the window's own keys always stay.

    ``variant="official"``: the queries see as much as if they were those of the last keys of the prompt, as in the authors'
    program, in which pseudo queries miss the newest keys.

    Parameters
    ----------
    lookahead : int, tokens that the model writes, 8 as in the paper; each costs a step.
    window : int, last queries of the prompt that score too, 8 as in the authors' runs; 0 for none, and no key stays for sure.
    kernel : int, odd width of the pooling. 7 as in the authors' runs.
    pooling : ``max`` as in these, or ``avg``.
    gqa : how the query heads of one key head are reduced, ``mean`` by default.

    Paper and program: both write the tokens over a copy of the cache that SnapKV has compressed, which costs less a step; here
    over the whole cache, which is held anyway, so that they are the first tokens of the model's own answer. They keep one
    choice per query head, and keys in the order of their scores; here one per key head, in their order in the prompt.
    """

    name = "laq"
    summary = "keys that the first tokens of the model's own answer attend to"
    paper = "arXiv 2505.20334"
    default_retain = 0.25
    prompt_only = True
    limits = {"lookahead": "[1, inf)", "window": "[0, inf)", "kernel": "odd"}

    lookahead: int = 8
    window: int = 8
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    gqa: Literal["mean", "max", "sum"] = "mean"

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: tokens are written behind the whole prompt."""
        return "scores keys by a text that is written behind the whole prompt"

    def score(self, keys: KeyBatch) -> Tensor:
        held = keys.keys.shape[2] - keys.written
        prompt = replace(
            keys,
            keys=keys.keys[:, :, :held],
            values=keys.values[:, :, :held],
            valid=keys.valid[:, :held],
            visual=keys.visual[:, :held],
            index=keys.index[:, :held],
            memo={},
        )
        sight = None
        if self.official:
            last = pad(prompt.index, (keys.places.shape[1], 0), value=-1)[:, -keys.places.shape[1] :]
            sight = window_sight(replace(prompt, places=last, memo={}))
        paid, own = window_attention(prompt, sight)
        score = smoothed(by_group(paid, keys.keys.shape[1], self.gqa), own, prompt, self.pooling, self.kernel)
        return pad(score, (0, keys.written))
