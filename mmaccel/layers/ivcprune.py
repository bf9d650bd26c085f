"""IVC-Prune: tokens at positions that act as coordinates stay, and tokens whose values are like the question's."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.masks import after_last
from ..core.reduction import Reduction, top_mask
from ..method import LayerAttention, LayerMethod, TokenBatch, register


@register
class IVCPrune(LayerMethod):
    """Implicit visual coordinates and foreground.

    *IVC-Prune: Revealing the Implicit Visual Coordinates in LVLMs for Vision Token Pruning*, ICLR 2026.

    ``W`` is the softmax of the products of values in layer ``layer - 1``, mean over KV heads. Of the text behind the pictures,
    without its first ``skip`` tokens, the row mean of ``W`` finds the ``seeds`` share of tokens that it is most like; the mean
    over these rows and the seeds' own is the score. Tokens whose RoPE turns least (largest mean cosine), or by a quarter
    (largest mean sine), the ``coordinates`` share each, are coordinates. Seeds and coordinates stay, and the tokens of highest
    score fill the budget. All keep their positions. The recipe ``ivcprune`` drops the others from the caches of the layers
    below too.

    ``variant="official"``: shares are rounded half to even, and so is the number kept.

    Parameters
    ----------
    layer : the input of this layer, 16.
    form : ``fill``, as for Qwen; ``union``, as for LLaVA: the softmax is over the whole prompt, and the ``foreground`` share
        of highest score stays with the coordinates before others do.
    seeds, coordinates, foreground : 0.01, 0.1 (0.05 for LLaVA) and 0.2.
    skip : the first tokens of the question that do not count, 2.

    Paper and program: the program for LLaVA keeps what its shares find, whatever that is together; here the budget decides how
    many stay, and a smaller one drops coordinates last, by score. It takes the first picture alone; here all visual tokens of
    a prompt are one picture to ``W``, and each picture has its own coordinates and budget. Equal cosines, as of cells (r, c)
    and (c, r), go to the lower slot. Positions count from the first token of the prompt, whatever padding or turns are before.
    """

    name = "ivcprune-select"
    summary = "tokens at positions that act as coordinates, and those like the question in their values"
    paper = "ICLR 2026"
    official_rounding = "half even"
    needs_rotary = True
    default_retain = 0.5
    limits = {"seeds": "[0, 1]", "coordinates": "[0, 1]", "foreground": "[0, 1]", "skip": "[0, inf)"}

    layer: float = 16
    form: Literal["fill", "union"] = "fill"
    seeds: float = 0.01
    coordinates: float = 0.1
    foreground: float = 0.2
    skip: int = 2

    @classmethod
    def prepare(cls, hidden: Tensor, text: Tensor, visual: Tensor) -> dict[str, Tensor]:
        """``visual [B, q]``: 1 for visual tokens."""
        return {"visual": visual.float()}

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``value_score`` and ``seed [B, K]``: the score of every key, and 1 for seeds."""
        value = attention.key if attention.value is None else attention.value
        rows, text = attention.query.shape[2], attention.text
        value = value[:, :, -rows:].float()
        visual = attention.prepared["visual"] > 0 if attention.prepared else ~text
        asked = text & after_last(visual)
        late = asked & (asked.cumsum(1) > self.skip)
        asked = torch.where(late.any(1, keepdim=True), late, asked | (text & ~asked.any(1, keepdim=True)))
        seen = visual if self.form == "fill" else visual | text
        total, number = self._paid(value, asked, seen)
        seed = top_mask(total, visual, self._share(self.seeds, visual.sum(1), 1))
        own, more = self._paid(value, seed, seen)
        score = ((total + own) / (number + more).clamp(min=1)[:, None]).masked_fill(~visual, 0.0)
        both = {"value_score": score, "seed": seed.float()}
        return {name: pad(x, (attention.key.shape[2] - rows, 0)) for name, x in both.items()}

    def _paid(self, value: Tensor, asking: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, q]``: the sum of ``W`` over the rows ``asking [B, q]``, columns ``seen [B, q]``; and how many rows, ``[B]``."""
        total = value.new_zeros(asking.shape)
        for row, at in enumerate(asking):
            # few rows: those of the question, and seeds
            which = at.nonzero()[:, 0]
            logits = value[row][:, which] @ value[row].mT * value.shape[-1] ** -0.5
            total[row] = logits.masked_fill(~seen[row], -torch.inf).softmax(-1).nan_to_num(0.0).mean(0).sum(0)
        return total, asking.sum(1)

    def _share(self, share: float, sizes: Tensor, least: int = 0) -> Tensor:
        return (sizes.double() * share).round().long().clamp(min=least)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``value_score``, ``seed``, ``rotary_cos``, ``rotary_sin [N, n]``, ``count [N]`` -> coordinates and the best."""
        valid, sizes = tokens.valid, tokens.valid.sum(1)
        score = tokens.signals["value_score"].masked_fill(~valid, 0.0)
        room = self._share(self.coordinates, sizes)
        turns = (tokens.signals[name] for name in ("rotary_cos", "rotary_sin"))
        first = [top_mask(turn, valid, room) for turn in turns]
        first.append(
            valid & (tokens.signals["seed"] > 0)
            if self.form == "fill"
            else top_mask(score, valid, self._share(self.foreground, sizes))
        )
        # scores are shares, below one
        tier = torch.stack(first).any(0).float() * 2
        return Reduction.top(score + tier, valid, count)
