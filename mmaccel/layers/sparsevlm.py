"""SparseVLM: words that are about the picture rate its tokens; the best of what is dropped is recycled as means of clusters."""

import torch
from torch import Tensor

from ..core.masks import question, ranks, resorted
from ..core.reduction import Links, Reduction
from ..method import LayerAttention, LayerMethod, TokenBatch, register
from ..method.blocks import BLOCK, row_blocks, upto
from ..method.density_peaks import centres, density_peaks, nearest_centre


@register
class SparseVLM(LayerMethod):
    """One stage of SparseVLM: visual tokens by the attention that raters pay to them in the layer below.

    *SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference*, ICML 2025, arXiv 2410.04417.

    Raters are words of the question that what enters the language model says to be about the pictures: with the visual tokens
    ``v`` and the words ``t``, ``m_t = mean_v softmax_t(v . t)``, and those with ``m_t`` above the mean rate. Token ``j`` has
    the score ``s_j = mean over heads and raters of A[h, rater, j]`` in layer ``layer - 1``. The ``k`` tokens of highest score
    stay; of the others the ``int(recycle (n - k)) + 1`` best form clusters by density peaks (DPC-KNN), a tenth as many and
    one, and every cluster stays as its mean in the place of its centre. ``k`` is as large as the budget, which counts both,
    allows.

    With ``heads`` below 1.0 only those heads rate whose raters look at visual tokens most, that share of all or that number:
    SparseVLM+, which recycles nothing (the recipe ``sparsevlm-plus``).

    With ``adaptive=True`` the redundancy of the map decides: ``k = int(scale rank(P))``, where ``P`` is the attention of the
    raters to all visual tokens, mean over heads, and the budget is an upper limit.

    Parameters
    ----------
    layer : the input of this layer. The authors drop behind layers 2, 6 and 15 of 32, so 3, 7 and 16: see the recipe.
    recycle : share of the dropped tokens that are recycled, 0.3 as in the program; 0 recycles nothing.
    heads : the heads that rate, a share of all or a number.
    adaptive, scale : off, and 13.5 tokens for each rank as in the first program.

    Paper and program: the program takes one picture and the text behind it, here the question behind the last picture is rated
    by the tokens of all pictures. Its counts are tables for 576 tokens; the recipe has those for 192 on average as shares. It
    puts cluster means behind the visual tokens and renumbers positions; here a mean has the position of its centre. Its
    second version divides attention by products of position codes alone, which turn negative at some distances: not offered.
    """

    name = "sparsevlm-step"
    summary = "tokens that the question's words about the picture attend to, and means of what is dropped"
    paper = "arXiv 2410.04417"
    budget = "at_most"
    renumbers_inside = True
    default_retain = 1 / 3
    limits = {"recycle": "[0, 1]", "heads": "[1, inf) or (0.0, 1.0]", "scale": "(0, inf)"}

    layer: float = 3
    recycle: float = 0.3
    heads: float = 1.0
    adaptive: bool = False
    scale: float = 13.5

    @classmethod
    def prepare(cls, hidden: Tensor, text: Tensor, visual: Tensor) -> dict[str, Tensor]:
        """``rater [B, q]``: 1 for words of the question that visual tokens point at, else 0."""
        asked = question(text, visual)
        shares = torch.zeros_like(asked, dtype=torch.float32)
        words = asked.nonzero(as_tuple=True)[1]
        if len(words):
            first, last = int(words.min()), int(words.max()) + 1
            spoken, height = hidden[:, first:last].float(), max(1, BLOCK // max(1, len(hidden) * (last - first)))
            silent = ~asked[:, None, first:last]
            for top in range(0, hidden.shape[1], height):
                some = slice(top, top + height)
                pull = (hidden[:, some].float() @ spoken.mT).masked_fill(silent, -torch.inf).softmax(-1)
                shares[:, first:last] += pull.nan_to_num(0.0).mul_(visual[:, some, None]).sum(1)
        mean = shares.sum(1, keepdim=True) / asked.sum(1, keepdim=True).clamp(min=1)
        # words that are all alike rate all
        return {"rater": (asked & ((shares > mean) | (shares.amax(1, keepdim=True) <= mean))).float()}

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``rater_attention [B, K]``, mean over the heads that rate and raters; if adaptive ``rater_rank``, the same for all
        keys."""
        # where nothing was prepared all text rates
        rater = attention.prepared.get("rater", attention.text) > 0
        rows, keys = rater.any(0).cpu().nonzero()[:, 0].tolist(), attention.key.shape[2]
        total = torch.zeros(*attention.query.shape[:2], keys, device=rater.device)
        maps = []
        for start, stop in row_blocks(attention) if rows else []:
            start, stop = max(start, rows[0]), min(stop, rows[-1] + 1)
            if start >= stop:
                continue
            paid = upto(attention, stop).attention(start, stop).nan_to_num(0.0)
            paid = paid * rater[:, None, start:stop, None]
            total[..., : paid.shape[3]] += paid.sum(2)
            if self.adaptive:
                maps.append(torch.nn.functional.pad(paid.mean(1), (0, keys - paid.shape[3])))
        mean = self.candidates(total, attention).mean(1) / rater.sum(1, keepdim=True).clamp(min=1)
        figures = {"rater_attention": mean}
        if self.adaptive:
            rank = total.new_ones(len(total))
            if maps:
                rank = torch.linalg.matrix_rank(torch.cat(maps, 1) * seen(attention))
            figures["rater_rank"] = rank.float()[:, None].expand(-1, keys)
        return figures

    def candidates(self, total: Tensor, attention: LayerAttention) -> Tensor:
        """``total [B, H, K]`` of those heads that pay most of it to visual keys."""
        heads = total.shape[1]
        number = min(heads, self.heads) if isinstance(self.heads, int) else max(1, round(self.heads * heads))
        if number == heads:
            return total
        best = (total * seen(attention)).sum(2).argsort(dim=1, descending=True, stable=True)[:, : int(number), None]
        return total.gather(1, best.expand(-1, -1, total.shape[2]))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``rater_attention [N, n]``, ``features [N, n, D]``, ``count [N]`` -> the best, and clusters of the next best."""
        valid, score = tokens.valid, tokens.signals["rater_attention"]
        most, sizes = count.tolist(), tokens.left[:, -1].tolist()
        if self.adaptive and score.numel():
            rank = tokens.signals["rater_rank"].nan_to_num(0.0).amax(1).tolist()
            most = [min(k, max(1, min(int(self.scale * r), n - 1))) for k, r, n in zip(most, rank, sizes, strict=True)]
        shares = [self.shared(k, n) for k, n in zip(most, sizes, strict=True)]
        order = resorted(score.nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True), (~valid).long())
        kept = torch.tensor([k for k, _, _ in shares]).to(valid.device, non_blocking=True)
        stays = (ranks(order) < kept[:, None]) & valid
        links = []
        for unit, (first, pool, clusters) in enumerate(shares):
            if clusters:
                mine = order[unit, first : first + pool].sort().values
                x = tokens.features[unit, mine][None]
                chosen = centres(density_peaks(x, torch.ones_like(mine, dtype=torch.bool)[None], clusters), clusters)
                own, middle = nearest_centre(x, chosen)[0], mine[chosen[0]]
                members = torch.zeros(clusters, device=x.device).index_add(0, own, torch.ones(pool, device=x.device))
                stays[unit, middle] = True
                links.append((torch.full_like(mine, unit), middle[own], mine, 1 / members[own]))
        merged = Links(*(torch.cat(parts) for parts in zip(*links, strict=True))) if links else None
        return Reduction(stays, valid, merged)

    def shared(self, count: int, size: int) -> tuple[int, int, int]:
        """Numbers of ``size`` tokens that stay, that are recycled, and of their clusters, for a ``count`` of both."""
        if self.recycle == 0 or count >= size:
            return count, 0, 0
        for kept in range(count, 0, -1):
            pool = min(int(self.recycle * (size - kept)) + 1, size - kept)
            clusters = int(pool / 10) + 1
            if kept + clusters <= count:
                return kept, pool, clusters
        return count, 0, 0


def seen(attention: LayerAttention) -> Tensor:
    """``[B, 1, K]`` bool: the visual keys of the prompt; padding, which receives nothing, may be among them."""
    before = attention.key.shape[2] - attention.query.shape[2]
    return torch.nn.functional.pad(~attention.text, (before, 0))[:, None]
