"""ZipVL: as many tokens stay as hold most of the attention, so that every prompt and layer has a number of its own."""

import torch
from torch import Tensor

from ..core.reduction import Reduction, top_mask
from ..method import LayerAttention, LayerMethod, TokenBatch, register
from ..method.blocks import row_blocks
from ..method.probes import probing


@register
class ZipVL(LayerMethod):
    """Important tokens by the attention of a few probes, normalised by how many of these can see them.

    *ZipVL: Efficient Large Vision-Language Models with Dynamic Token Sparsification and KV Cache Compression*,
    arXiv 2410.08584.

    Probes are the last ``probes`` tokens of the prompt and as many that are spread evenly over it. In layer ``layer - 1``,
    ``a_j = sum over probes of mean_h A[h, probe, j]``, and ``s_j = a_j / c_j``, where ``c_j`` probes can see token ``j``. The
    ``count`` tokens of highest ``s`` stay, and all text.

    With ``adaptive=True`` the attention decides how many: of every picture the least number ``p`` such that its ``p`` largest
    ``a_j`` hold ``tau`` of all that it receives; of highest ``s`` that many stay. The budget is an upper limit then
    (``retain=1.0``: none). The recipe ``zipvl`` does that before four layers.

    Parameters
    ----------
    layer : the input of this layer.
    probes : 64 and 64, as the paper.
    adaptive, tau : off, and 0.975 of the attention; the authors' values are not known to us.

    Paper and program: made from the paper alone. There each layer chooses anew among all tokens, and those that are not
    important skip its attention only; here what a layer drops is gone from there on, in its cache too, as in the paper's second
    version. Half of the probes are drawn at random there, and the mass is that of text and pictures together. The mixed
    precision of the cache in the first version is not part of this.
    """

    name = "zipvl-tokens"
    summary = "tokens that some probes attend to, as many as hold most of the attention if adaptive"
    paper = "arXiv 2410.08584"
    budget = "at_most"
    default_retain = 0.25
    limits = {"probes": "[1, inf)", "tau": "(0, 1]"}

    layer: float = 2
    probes: int = 64
    adaptive: bool = False
    tau: float = 0.975

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``probe_attention`` and ``probe_mean [B, K]``: what the probes pay to each key, in sum and of those that see it."""
        asking = self.asked(attention)
        total = torch.zeros(len(asking.text), asking.key.shape[2], device=asking.key.device)
        seeing = torch.zeros_like(total)
        for start, stop in row_blocks(asking):
            assert asking.visible is not None
            total += asking.attention(start, stop).nan_to_num(0.0).mean(1).sum(1)
            seeing += asking.visible[:, :, start:stop].any(1).sum(1)
        return {"probe_attention": total, "probe_mean": total / seeing.clamp(min=1)}

    def asked(self, attention: LayerAttention) -> LayerAttention:
        """The attention of the probes alone."""
        return probing(attention, self.probes, lambda length: torch.full_like(length, self.probes))

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``probe_attention``, ``probe_mean [N, n]``, ``count [N]`` -> the highest."""
        valid, count = tokens.valid, count.to(tokens.valid.device)
        if self.adaptive and valid.numel():
            paid = tokens.signals["probe_attention"].float().masked_fill(~valid, 0.0).double()
            held = paid.sort(dim=1, descending=True).values.cumsum(1)
            enough = (held < self.tau * held[:, -1:]).sum(1) + 1
            count = torch.minimum(count, enough)
        return Reduction(top_mask(tokens.signals["probe_mean"], valid, count), valid)
