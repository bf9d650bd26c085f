"""REFORM: a first pass gathers the tokens whose values resemble those of the question, and the model reads these again."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from ..core.masks import question
from ..errors import MmaccelError
from ..method import LayerAttention, PreviewMethod, Ranking, register

#: entries of the similarities held at once
_ENTRIES = 1 << 22


@register
class REFORM(Ranking, PreviewMethod):
    """Compress, gather, recompute: what resembles the question in a first pass through lower layers is read from the start.

    *Compress, Gather, and Recompute: REFORMing Long-Context Processing in Transformers*, NeurIPS 2025, arXiv 2506.01215.

    The first pass ends at ``layer``. Every token is embedded by its values of all heads there and in the layers ``below``,
    side by side. Its score is the largest cosine with any token of the question, the text behind the last picture, and then
    the largest among ``kernel`` neighbours in the prompt. The ``count`` visual tokens of each picture with the highest score
    stay, and all text, so that the beginning and the end of the prompt do. Then the model reads what is left from its first
    layer on.

    Parameters
    ----------
    layer : the highest layer that is compared, where the first pass ends. Half of the depth is our choice.
    below : lower layers that are compared as well; shares of the depth or numbers. A quarter is our choice; ``()`` for none.
    kernel : odd width of the maximum; 5 is our choice, and 1 takes none.

    Paper and here: the paper chooses layers, heads and whether queries, keys or values are compared by a probe on the model;
    here they are values of all heads, which have no positions. The paper evicts keys during the first pass; here the pass
    stores none, and runs in one piece. Its new positions are ``positions="paper"``.
    """

    name = "reform"
    summary = "tokens whose values in lower layers resemble those of the question, in a first pass through them"
    paper = "arXiv 2506.01215"
    ranks_by = "question_match"
    limits = {"kernel": "odd"}

    layer: float = 0.5
    below: tuple[float, ...] = (0.25,)
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.below if isinstance(self.below, Sequence) and not isinstance(self.below, str) else (None,)
        fits = [
            (isinstance(one, int) and not isinstance(one, bool) and one >= 0)
            or (isinstance(one, float) and 0 <= one < 1)
            for one in given
        ]
        if not all(fits):
            raise MmaccelError(
                f"`below` of {self.name} must be a tuple of layers, whole numbers from 0 or shares of the depth below 1.0, got "
                f"{self.below!r}."
            )

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``question_match [B, K]`` float32; ``-inf`` in rows without a question."""
        assert attention.value is not None
        embedded = normalize(attention.value.float().transpose(1, 2).flatten(2), dim=-1)
        asked = question(attention.text, ~attention.text)
        rows = max(1, _ENTRIES // max(1, embedded.shape[0] * embedded.shape[1]))
        best = embedded.new_full(embedded.shape[:2], -torch.inf)
        for start in range(0, embedded.shape[1], rows):
            part = slice(start, start + rows)
            match = (embedded @ embedded[:, part].mT).masked_fill(~asked[:, None, part], -torch.inf)
            best = torch.maximum(best, match.amax(-1))
        if attention.visible is not None:
            # padding does not see itself
            best = best.masked_fill(~attention.visible[:, 0].diagonal(dim1=1, dim2=2), -torch.inf)
        return {"question_match": max_pool1d(best[:, None], self.kernel, 1, self.kernel // 2)[:, 0]}
