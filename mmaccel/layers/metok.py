"""METok inside the language model: events that the question does not ask for lose their tokens first."""

import torch
from torch import Tensor

from ..core.budget import apportion
from ..core.masks import group_sizes, top_in_groups
from ..core.reduction import Reduction
from ..method import LayerAttention, LayerMethod, TokenBatch, register
from ..method.blocks import question_mean


@register
class METokPrune(LayerMethod):
    """One stage of METok's pruning: by the attention of the text, event by event.

    *METok: Multi-Stage Event-based Token Compression for Efficient Long Video Understanding*, EMNLP 2025,
    arXiv 2506.02850; its second stage. (The recipe ``metok`` merges before it and has three of it; from the first of them on
    caches hold only what the last one leaves.)

    ``a_j`` is the attention that the text behind the pictures pays to token ``j`` in layer ``layer - 1``, mean over heads and
    text. In each event that ``metok-merge`` found the tokens of largest ``a`` stay: of the budget a token of a key event has a
    share of one, and one of another event a share of ``others``. With 0 the other events lose theirs before a key event loses
    any. Where no events were found, all of a picture is one. Tokens without an event go first.

    Parameters
    ----------
    layer : the input of this layer. The program prunes before its layers 3, 10 and 19 of 28; see the recipe.
    others : 0.5 as at the first of these layers; at the later ones 0.

    Paper and program: the program rounds up in every event, keeps one token of it at least, and nothing of the clip behind the
    last of its layers; here the budget is met, and one token of a clip stays. With several pictures it divides the text's
    attention to each by itself, which ranks alike.
    """

    name = "metok-prune"
    summary = "tokens the question attends to, of every event by itself, those of other events first to go"
    paper = "arXiv 2506.02850"
    unit = "picture"
    default_retain = 0.5
    reads = ("event", "key_event")
    limits = {"others": "[0, 1]"}

    layer: float = 3
    others: float = 0.5

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``text_mean [B, K]``: mean over heads and the text behind the pictures."""
        return {"text_mean": question_mean(attention)}

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``text_mean``, ``event``, ``key_event [N, n]``, ``count [N]`` -> the highest of every event."""
        valid = tokens.valid
        # all one key event
        given = torch.zeros_like(valid, dtype=torch.float32).masked_fill(~valid, torch.nan)
        event, key = tokens.signals.get("event", given), tokens.signals.get("key_event", given + 1)
        number = event.nan_to_num(-1.0).long()
        # what is of no event is one more group, behind all others
        groups = int(number.max()) + 2 if number.numel() else 1
        number = torch.where(number < 0, groups - 1, number).masked_fill(~valid, -1)
        sizes = group_sizes(number, groups)
        main = group_sizes(number.masked_fill(~(key > 0), -1), groups)
        rest = group_sizes(number.masked_fill(event.isnan(), -1), groups) - main
        # asked of the device at once
        rows = torch.cat([count[:, None].to(sizes.device), sizes, main, rest], 1).tolist()
        wanted = torch.tensor([self.shared(*row) for row in rows]).view(len(valid), groups)
        wanted = wanted.to(valid.device, non_blocking=True)
        return Reduction(top_in_groups(tokens.signals["text_mean"], number, wanted), valid)

    def shared(self, count: int, *each: int) -> list[int]:
        """Number of ``count`` tokens that each event keeps; ``each`` are the sizes of all events, how many of these tokens are
        of key events, and how many of others."""
        n = len(each) // 3
        main, rest = each[n : 2 * n], each[2 * n :]
        return apportion(count, list(each[:n]), [a + self.others * b for a, b in zip(main, rest, strict=True)])
