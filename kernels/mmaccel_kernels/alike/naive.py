"""Whether an earlier choice stands, in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_alike_definition(
    query: Tensor, units: Tensor, before: Tensor, before_units: Tensor, alike: float
) -> tuple[Tensor, Tensor]:
    """:func:`.keep_alike` as a cosine and two choices."""
    unit = torch.nn.functional.normalize(query.flatten(1).float())
    same = (unit * before).sum(1, keepdim=True) >= alike
    return torch.where(same, before, unit), torch.where(same[..., None], before_units, units)
