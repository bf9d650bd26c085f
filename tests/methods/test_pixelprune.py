"""PixelPrune against the same written out token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel import MmaccelError
from mmaccel.encoders.pixelprune import PixelPrune


def picture(seed: int, h: int, w: int) -> Tensor:
    """``[h, w, 12]``: few colours in areas, with a little noise."""
    random = torch.Generator().manual_seed(seed)
    coarse = (
        torch.randint(3, (h // 2 + 1, w // 3 + 1, 1), generator=random).repeat_interleave(2, 0).repeat_interleave(3, 1)
    )
    noise = torch.randint(4, (h, w, 12), generator=random) * 0.02
    return coarse[:h, :w] / 3 + noise * torch.randint(2, (h, w, 1), generator=random)


def like(method: PixelPrune, a: Tensor, b: Tensor) -> bool:
    gap = (a - b).abs()
    found = {"max": gap.max(), "mae": gap.mean(), "rmse": gap.square().mean().sqrt()}[method.metric]
    return float(found) <= method.threshold


def by_hand(method: PixelPrune, pixels: Tensor) -> list[int]:
    h, w, _ = pixels.shape
    source = list(range(h * w))
    if method.scan != "pred_2d":
        order = [
            r * w + (w - 1 - c if r % 2 and method.scan == "serpentine" else c) for r in range(h) for c in range(w)
        ]
        last = order[0]
        for at in order:
            if like(method, pixels[at // w, at % w], pixels[last // w, last % w]):
                source[at] = last
            else:
                last = at
        return source
    seen = pixels.clone()
    for r in range(h):
        for c in range(w):
            if r == c == 0:
                continue
            left, above, corner = (r, c - 1), (r - 1, c), (r - 1, c - 1)
            if r and c:
                edge = like(method, seen[corner], seen[left]) and not like(method, seen[corner], seen[above])
                guess = above if edge else left
            else:
                guess = left if c else above
            if like(method, pixels[r, c], seen[guess]):
                source[r * w + c] = source[guess[0] * w + guess[1]]
                if method.threshold and method.anchored:
                    seen[r, c] = seen[guess]
    return source


@pytest.mark.parametrize("scan", ("pred_2d", "raster", "serpentine"))
@pytest.mark.parametrize("metric", ("max", "mae", "rmse"))
@pytest.mark.parametrize("threshold", (0.0, 0.021, 0.05))
@pytest.mark.parametrize("anchored", (True, False))
def test_as_written_out(scan: str, metric: str, threshold: float, anchored: bool) -> None:
    method = PixelPrune(scan=scan, metric=metric, threshold=threshold, anchored=anchored)  # type: ignore[arg-type]
    for h, w in ((1, 1), (1, 9), (9, 1), (7, 11), (16, 5)):
        pixels = torch.stack([picture(seed, h, w) for seed in range(3)])
        made = method.predict(pixels)
        assert made.tolist() == [by_hand(method, one) for one in pixels]


def test_long_runs_and_thresholds_save() -> None:
    flat = torch.full((2, 40, 40, 3), 0.5)
    for scan in ("pred_2d", "raster", "serpentine"):
        assert not PixelPrune(scan=scan).predict(flat).any()  # type: ignore[arg-type]
    pixels = picture(0, 30, 30)[None]
    kept = [len(PixelPrune(threshold=threshold).predict(pixels).unique()) for threshold in (0.0, 0.02, 0.1, 1.0)]
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[1] > kept[-1] == 1


@pytest.mark.parametrize(
    "given", ({"scan": "hilbert"}, {"metric": "psnr"}, {"threshold": -0.1}, {"threshold": float("nan")})
)
def test_what_is_of_no_use_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(MmaccelError, match="pixelprune"):
        PixelPrune(**given)  # type: ignore[arg-type]
