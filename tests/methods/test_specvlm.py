"""SpecVLM: scores choose the first tokens, even distances the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel import SpecVLM
from mmaccel.method import TokenBatch


def batch(score: Tensor, valid: Tensor) -> TokenBatch:
    rows, n = score.shape
    return TokenBatch(
        features=score[..., None],
        valid=valid,
        cells=torch.full((rows, n, 3), -1),
        grid=torch.tensor([[1, 1, n]]).expand(rows, -1),
        segment=torch.zeros(rows, n, dtype=torch.long),
        signals={"draft_match": score},
    )


def kept(method: SpecVLM, score: list[float], count: int) -> list[int]:
    values = torch.tensor([score])
    made = method.reduce(batch(values, torch.ones(1, len(score), dtype=torch.bool)), torch.tensor([count]))
    return made.kept[0].nonzero()[:, 0].tolist()


def test_scores_choose_until_they_hold_a_share_and_the_rest_is_even() -> None:
    score = [0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 3.0, 0.0, 1.0, 1.0]
    # 5 of 10 is half, 8 of 10 more than 0.6; of those left the first, the middle one and the last
    assert kept(SpecVLM(part=0.5), score, 4) == [0, 2, 5, 9]
    assert kept(SpecVLM(part=0.6), score, 5) == [0, 2, 4, 6, 9]
    assert kept(SpecVLM(part=0.2, of="tokens"), score, 5) == [0, 2, 4, 6, 9]
    # no more than the budget, and one that is left comes from the front
    assert kept(SpecVLM(part=1.0), score, 2) == [2, 6]
    assert kept(SpecVLM(part=0.0, of="tokens"), score, 1) == [0]


@pytest.mark.parametrize("variant", ["exact", "official"])
@pytest.mark.parametrize("of", ["attention", "tokens"])
def test_budgets_are_met_in_batches_with_padding(variant: str, of: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([97, 1, 40, 64])
    valid = torch.arange(97) < sizes[:, None]
    score = torch.rand(4, 97, generator=generator) ** 4
    method = SpecVLM(part=0.3, of=of).by(variant)  # type: ignore[arg-type]
    for share in (0.0, 0.05, 0.3, 0.77, 1.0):
        count = (sizes * share).long().clamp(min=1)
        made = method.reduce(batch(score.masked_fill(~valid, 1e9), valid), count).kept
        assert torch.equal(made.sum(1), count) and not (made & ~valid).any()
        for row, size in enumerate(sizes.tolist()):
            alone = kept(method, score[row, :size].tolist(), int(count[row]))
            assert made[row].nonzero()[:, 0].tolist() == alone
