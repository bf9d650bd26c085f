"""KVzip: keep the keys that the model needs to repeat the prompt."""

import torch
from torch import Tensor

from ...method import KeyBatch, register
from ...method.reread import Reread, RereadPolicy, causal, first_keys


@register
class KVzip(RereadPolicy):
    """Score keys by the largest attention that they receive while the prompt is read a second time.

    *KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction*, NeurIPS 2025, arXiv 2505.23416.

    The prompt is read again behind itself, ``stretch`` tokens at a time. ``s_k = max_{h in group, q} A[h, q, k]``, with the
    softmax over the first ``sinks`` keys, those of the same stretch, and what is read again up to the query. The choice does
    not depend on the question, so that questions of later turns find what they need. One budget is shared by all layers and
    heads. It costs about one more prefill.

    ``variant="official"``: one key less than the budget stays, as in the authors' program.

    Parameters
    ----------
    stretch : tokens that are read again at once. 2048 as in the programs.
    plus : divide each query's attention by the length of what enters the layer's attention for it, and multiply each key's by
        the length of its value behind the output projection (KVzip+ of kvpress).
    sinks : 4 as in kvpress.
    layer_budget : ``global``: the best scores of all layers and heads stay; ``uniform`` for the same number in each head.

    Paper and program: the programs write an instruction to repeat the text before each stretch, and the last tokens of the
    stretch before; here the prompt alone is read again, pictures as their tokens, with the positions that follow it. The
    programs remove keys by masks or packed heads; here memory is freed.
    """

    name = "kvzip"
    summary = "keys that the model attends to while it reads the prompt again, whatever is asked"
    paper = "arXiv 2505.23416"
    default_retain = 0.3
    mixes_heads = True

    sinks: int = 4
    layer_budget: str = "global"
    stretch: int = 2048
    plus: bool = False

    @property
    def weighs_output(self) -> bool:
        return self.plus

    def see(self, layer: Reread) -> Tensor:
        heads, length = layer.keys.shape[1], layer.query.shape[2]
        first = first_keys(layer.valid, self.sinks) & ~layer.stretch
        most = layer.keys.new_zeros(layer.keys.shape[:3], dtype=torch.float32)
        keys = torch.cat([layer.keys, layer.own], dim=2).float().mT[:, :, None]
        seen, own = (first | layer.stretch)[:, :, None, None], causal(layer.real)[:, None, None]
        rows = max(1, (1 << 24) // max(1, layer.query.shape[0] * layer.query.shape[1] * keys.shape[-1]))
        for start in range(0, length, rows):
            part = slice(start, min(start + rows, length))
            count = part.stop - start
            logits = layer.query[:, :, part].float().unflatten(1, (heads, -1)) @ keys * layer.scaling
            shape = (*logits.shape[:-1], -1)
            visible = torch.cat(
                [seen.expand(*shape[:2], 1, count, -1), own[..., part, :].expand(-1, heads, -1, -1, -1)], dim=-1
            )
            paid = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)[..., : most.shape[2]]
            paid = paid.masked_fill(~layer.real[:, None, None, part, None], 0.0)
            if layer.entering is not None and layer.outgoing is not None:
                paid = paid / layer.entering[:, None, None, part, None].clamp(min=1e-9)
                paid = paid * layer.outgoing.unflatten(1, (heads, -1))[:, :, :, None]
            most = torch.maximum(most, paid.amax((2, 3)))
        return most.masked_fill(~layer.stretch, 0.0)

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.received is not None
        return keys.received
