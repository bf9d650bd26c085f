"""Encoders by themselves under autocast: what they keep is what they keep in float32, as far as half precision tells it."""

from __future__ import annotations

import pytest
import torch
from encoders.small import MAKE, encoder, features, methods, pixels

from mmaccel import accelerated_encoder


@torch.no_grad()
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(("name", "method"), [(name, method) for name in MAKE for method in methods(name)])
def test_every_encoder_merges_under_autocast(name: str, method: str, dtype: torch.dtype) -> None:
    tower, given = encoder(name), pixels()
    with torch.autocast("cpu", dtype=dtype):
        bare = features(tower, given)
        with accelerated_encoder(tower, method, retain=0.5) as made:
            found, left = features(made, given), made.mmaccel.reduction
        with accelerated_encoder(tower, method, retain=1.0) as made:
            whole = features(made, given)
    noise = (bare.float() - features(tower, given)).abs().max()
    assert found.dtype == bare.dtype and torch.isfinite(found).all() and int(left.kept.sum()) == 3 * 18
    assert (whole.float() - bare.float()).abs().max() <= 2 * noise
