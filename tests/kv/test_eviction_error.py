"""CAOTE: the score of a key is the error of the attention's output without it."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel import get_method
from mmaccel.kv.scoring.error import eviction_error
from mmaccel.kv.select import scored
from mmaccel.method import KeyBatch


def batch(keys: Tensor, values: Tensor) -> KeyBatch:
    rows, _, size, _ = keys.shape
    valid = torch.ones(rows, size, dtype=torch.bool)
    return KeyBatch(
        keys=keys,
        values=values,
        queries=keys[:, :, -1:],
        valid=valid,
        visual=valid,
        index=torch.arange(size).expand(rows, -1),
        scaling=1.0,
    )


def test_the_score_is_what_one_query_loses_without_a_key() -> None:
    torch.manual_seed(0)
    logits, values = torch.randn(2, 3, 9), torch.randn(2, 3, 9, 4)
    weight = logits.softmax(-1)
    found = eviction_error(weight, batch(values, values))
    whole = weight[:, :, None] @ values
    for key in range(9):
        without = logits.index_fill(2, torch.tensor([key]), -torch.inf).softmax(-1)[:, :, None] @ values
        torch.testing.assert_close(found[..., key], (whole - without).norm(dim=-1)[..., 0])


def test_an_option_of_every_policy_ranks_by_it() -> None:
    torch.manual_seed(1)
    keys = batch(torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4))
    # negative scores are shifted, and what must stay stays
    for policy in (get_method("knorm")(eviction_error="exact"), get_method("tova")(eviction_error="fast")):
        plain = policy.score(keys)
        wanted = eviction_error(plain, keys, exact=policy.eviction_error == "exact")
        assert torch.equal(scored(policy, keys), wanted) and not torch.equal(wanted, plain)
        assert torch.equal(wanted == torch.inf, plain == torch.inf)
