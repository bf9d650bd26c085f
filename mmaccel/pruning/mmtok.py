"""MMTok: the kept tokens cover the words of the question, and the other tokens."""

import torch
from mmaccel_kernels.copies import first_copies, pairs_of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..method import ProjectorMethod, Tap, TokenBatch, register
from ..method.tokens import by_row
from ._coverage import by_windows, covering
from ._shared import filled, on_grid

#: the shortest length that vectors are divided by
_LEAST = 1e-8


@register
class MMTok(ProjectorMethod):
    """Greedy coverage of two kinds of rows, words and tokens.

    *MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs*, ICLR 2026.

    ``P`` is the softmax, over tokens, of the cosines between the ``m`` words and what the language model would read,
    divided by ``tv_temperature``; ``Q`` that of the cosines between the ``n`` tokens in the features of the tower, by
    ``vv_temperature``. With ``M = [P / m; alpha Q / n]`` and ``b_r`` the largest entry of row ``r`` in a picked column, the
    next pick is ``argmax_j sum_r max(0, M_rj - b_r)``; the lower slot on a tie. Without a question ``Q`` decides alone.

    ``variant="official"``: a ratio is rounded down.

    Parameters
    ----------
    alpha : the weight of ``Q``, 0.5.
    tv_temperature : 0.01, as for Qwen; 0.02 for LLaVA.
    vv_temperature : of the softmax between visual tokens, 0.2.
    original : width and height of pictures before they were padded to a square; tokens that show nothing but padding are
        then dropped first. None if they were not.
    patch : pixels along a side of a token's patch, to round that padding.

    Paper and program: the program drops words such as "the" and "what" from LLaVA's questions; here all words count, as it
    does for Qwen. Stitched tiles are pruned one by one, and newlines are dropped first, as in the program. Clips of more than
    4,096 tokens are picked from in runs of as many.
    """

    name = "mmtok"
    summary = "tokens that cover the words of the question and all other tokens"
    paper = "ICLR 2026"
    unit = "tile"
    needs_question = True
    official_rounding = "down"
    limits = {"alpha": "[0, inf)", "tv_temperature": "(0, inf)", "vv_temperature": "(0, inf)", "patch": "[1, inf)"}

    alpha: float = 0.5
    tv_temperature: float = 0.01
    vv_temperature: float = 0.2
    original: tuple[int, int] | None = None
    patch: int = 14

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("features"),)

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, tower features ``[N, n, d]``, ``question [N, q, D]``, ``count [N]`` -> the picked slots."""
        encoded, count = tokens.signals["features"][:, 0], count.to(tokens.valid.device)
        here = on_grid(tokens) & ~encoded.isnan().any(-1)
        shows = here & ~self.padding(tokens)

        def pick(part: slice, wanted: Tensor) -> Tensor:
            seen, x, c = here[:, part], _unit(tokens.features[:, part]), _unit(encoded[:, part])
            x, c = (one.masked_fill(~seen[..., None], 0.0) for one in (x, c))
            first = first_copies(torch.cat([x, c], 2), seen)
            like = pairs_of_first(torch.bmm(c, c.mT), first)
            size = seen.sum(1).clamp(min=1)[:, None, None]
            rows = [self.alpha * _shares(like / self.vv_temperature, seen) / size * seen[..., None]]
            if tokens.question is not None and tokens.question_valid is not None:
                asked = tokens.question_valid[..., None]
                words = _unit(tokens.question).masked_fill(~asked, 0.0)
                said = torch.bmm(words, x.mT)
                if first is not None:
                    said = said.gather(2, first[:, None].expand_as(said))
                rows.append(_shares(said / self.tv_temperature, seen) / asked.sum(1, keepdim=True).clamp(min=1) * asked)
            return covering(torch.cat(rows, 1), shows[:, part], wanted, first)

        picked = by_windows(shows, torch.minimum(count, shows.sum(1)), pick)
        return Reduction(filled(picked, tokens.valid, count), tokens.valid)

    def padding(self, tokens: TokenBatch) -> Tensor:
        """``[N, n]`` bool: tokens on rows, or columns, that show nothing but padding."""
        if self.original is None:
            return torch.zeros_like(tokens.valid)
        side = tokens.grid[:, 1:].amax(1, keepdim=True).to(tokens.valid.device)
        width, height = self.original
        scaled = (side * self.patch * min(self.original) / max(self.original)).double().round().long()
        before = (side * self.patch - scaled) // 2
        after = side * self.patch - scaled - before
        place = tokens.cells[..., 1 if width >= height else 2]
        return tokens.celled & ((place < before // self.patch) | (place >= side - after // self.patch))


def _unit(x: Tensor) -> Tensor:
    return normalize(x.float(), dim=-1, eps=_LEAST)


def _shares(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax of ``logits [N, r, n]`` over the tokens that are ``seen [N, n]``; zero for the others."""
    return logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
