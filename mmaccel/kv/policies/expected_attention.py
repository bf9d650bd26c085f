"""Expected attention: keep the keys that future queries will attend to, if they are distributed like the prompt's."""

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...method import KeyBatch, ModelFacts, Policy, register
from ..scoring.copies import of_first_keys


@register
class ExpectedAttention(Policy):
    """Score keys by the attention expected of future queries.

    *Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution*, arXiv 2510.00636.

    The queries of a prompt are, before RoPE, nearly normal: ``q ~ N(m, S)`` in each head. With ``m`` and ``S`` rotated by the
    mean rotation of the next ``future`` positions, the expected weight of a key is ``z_k = exp(m . k / sqrt(D) + k S k / 2D)``,
    and ``s_k = mean_{h in group} z_k / sum_j z_j``, times ``||v_k||_2``.

    Parameters
    ----------
    future : positions over which the rotation is averaged. 512 as in kvpress, the authors' program.
    covariance : whether ``S`` is used, or ``m`` alone.
    weigh_values : whether scores are multiplied by the norm of the value.
    sinks : the first tokens of a prompt stay, and are left out of ``m``, ``S`` and the sum. 4 as in the program.

    Decoded tokens do not change the scores: keys are evicted only at the end of a prompt.
    """

    name = "expected-attention"
    summary = "keys that queries like those of the prompt will attend to, times the norm of their values"
    paper = "arXiv 2510.00636"
    default_retain = 0.25
    prompt_only = True
    limits = {"future": "[1, inf)"}

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    weigh_values: bool = True

    def check(self, family: ModelFacts) -> None:
        """Refuse models without a separate query projection, whose outputs are the queries before RoPE, and another RoPE than
        the one the rotation above is of."""
        super().check(family)
        if not family.halves:
            raise UnsupportedError(
                f"{self.name} turns queries as two halves in every layer, and RoPE of {family.name} turns pairs, "
                "leaves layers or channels out, or is not the same in all layers; use snapkv."
            )
        if any(not hasattr(family.attention_in(layer), "q_proj") for layer in family.attending):
            raise UnsupportedError(
                f"{self.name} looks at queries before RoPE, and this model has no q_proj where they come from; use snapkv."
            )

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.expected is not None
        heads, key = keys.keys.shape[1], keys.keys.float()
        first = keys.valid.cumsum(1) <= self.sinks
        score = torch.zeros_like(key[..., 0])
        mean, covariance = (x.unflatten(1, (heads, -1)) for x in keys.expected)
        for m, c in zip(mean.unbind(2), covariance.unbind(2), strict=True):
            logits = (key @ m[..., None])[..., 0] * keys.scaling
            if self.covariance:
                logits = logits + ((key @ c) * key).sum(-1) * keys.scaling**2 / 2
            score += logits.masked_fill((first | ~keys.valid)[:, None], -torch.inf).softmax(-1)
        score = of_first_keys(score / mean.shape[2], keys.keys, keys.valid & ~first)
        if self.weigh_values:
            score = score * torch.linalg.vector_norm(keys.values, dim=-1, dtype=torch.float32)
        return score.masked_fill((first & keys.valid)[:, None], torch.inf)
