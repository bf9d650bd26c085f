"""SepLLM: keep the first keys, the separators and the newest keys."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.masks import suffix_sums
from ...method import KeyBatch, register
from .streaming_llm import StreamingLLM


@register
class SepLLM(StreamingLLM):
    """Attention sinks, the newest separators and the newest keys stay; a separator sums up what stands before it.

    *SepLLM: Accelerate Large Language Models by Compressing One Segment into One Separator*, ICML 2025,
    arXiv 2412.12094.

    Separators are the tokens of text that consist of ``marks`` alone, and of pictures those without a cell: the ends of rows
    and frames, where the prompt of a model has such tokens. Of the budget ``sinks`` keys are the first ones, up to
    ``separators`` the newest separators, half of the budget at most, and the newest of the others fill what is left. The same
    keys stay in all heads; queries are not needed.

    Parameters
    ----------
    separators : the most that stay, at least 0. 64 as in the paper's smaller setting.
    marks : the characters of separators.
    sinks : keys at the start of the prompt that stay. 4 as in the program.
    joint : text and pictures share a budget, as separators are mostly text.

    Which token is which character says the tokenizer of the ``processor`` that is given to ``accelerate_vlm``; without one, or
    where a call gives no token ids, only the ends of rows and frames are separators. With ``every`` and ``cap`` separators of
    the answer stay, too. Paper and program: in the program positions are those in the cache; here keys keep their positions.
    """

    name = "sepllm"
    summary = "the first keys, the newest separators (full stops, line ends, ends of rows) and the newest keys"
    paper = "arXiv 2412.12094"
    needs_separators = True
    limits = {"separators": "[0, inf)"}

    joint: bool = True
    separators: int = 64
    marks: str = ".,?!;: \t\n"

    def separator_ids(self, tokenizer: Any) -> Tensor:
        return ids_of(tokenizer, self.marks)

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.count is not None
        parts = keys.valid if self.joint else keys.valid & keys.visual
        if keys.cells is not None:
            ends = keys.visual & (keys.cells[..., 0] < 0)
            parts = parts & (ends if keys.separator is None else ends | keys.separator)
        most = (keys.count // 2).clamp(max=self.separators)[:, None]
        newest = parts & (suffix_sums(parts) <= most)
        score = super().score(keys)
        # separators in their order before all other keys
        return torch.where(newest[:, None], score + keys.index.amax(1)[:, None, None] + 1, score)


@lru_cache(maxsize=4)
def ids_of(tokenizer: Any, marks: str) -> Tensor:
    """The ids of the tokens of a tokenizer that consist of ``marks`` alone, ``[n]`` long."""
    special, texts = set(tokenizer.all_special_ids), tokenizer.batch_decode([[n] for n in range(len(tokenizer))])
    return torch.tensor([n for n, text in enumerate(texts) if text and n not in special and set(text) <= set(marks)])
