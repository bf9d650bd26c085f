"""PixelPrune: what a neighbour predicts, as in lossless image formats, is not encoded."""

from typing import Literal

import torch
from torch import Tensor

from ..method import PatchMethod, register


@register
class PixelPrune(PatchMethod):
    """Predictive coding of the pixels behind every token, for documents and screens: flat areas are not encoded.

    *PixelPrune*, github.com/OPPO-Mente-Lab/PixelPrune.

    Let ``X`` be the pixels of a token, ``A``, ``B`` and ``C`` those of the tokens left of it, above it and above left, and
    ``~`` that two differ by at most ``threshold``. ``X`` is predicted by

        left in the first row, above in the first column,
        B  if ``C ~ A`` and not ``C ~ B`` (an edge between rows goes on),
        A  otherwise,

    and it is encoded unless ``X ~ prediction``. Frames of a clip are predicted each by itself.

    Parameters
    ----------
    scan : ``pred_2d``, which is described above, or run lengths: a token is compared with the last one that is encoded, row by
        row (``raster``) or with every other row backwards (``serpentine``).
    metric : the largest difference of a colour, their mean, or the root of the mean of their squares.
    threshold : in colours from 0 to 1. At 0, the default and the program's, nothing is left out that is not there to the bit.
    anchored : with a threshold, whether neighbours are seen as they are predicted, so that differences do not add up.

    Paper and program: the program is for Qwen3-VL, reads the first of the two frames that a token holds (of a picture they are
    equal), and can also drop tokens at a later layer of the tower. Here every frame counts, and nothing is dropped later.
    """

    name = "pixelprune"
    summary = "patches that a neighbour predicts, pixel by pixel, do not enter the vision tower"
    paper = "github.com/OPPO-Mente-Lab/PixelPrune"
    limits = {"threshold": "[0, inf)"}

    scan: Literal["pred_2d", "raster", "serpentine"] = "pred_2d"
    metric: Literal["max", "mae", "rmse"] = "max"
    threshold: float = 0.0
    anchored: bool = True

    def predict(self, pixels: Tensor) -> Tensor:
        """``[N, h, w, d] -> [N, h * w]``."""
        if self.scan != "pred_2d":
            return self._runs(pixels)
        if self.threshold == 0 or not self.anchored:
            return self._parallel(pixels)
        return self._anchored(pixels)

    def _like(self, a: Tensor, b: Tensor) -> Tensor:
        """``[..., d], [..., d] -> [...]`` bool."""
        gap = (a - b).abs()
        if self.metric == "max":
            return gap.amax(-1) <= self.threshold
        mean = gap.mean(-1) if self.metric == "mae" else gap.square().mean(-1).sqrt()
        return mean <= self.threshold

    def _parallel(self, pixels: Tensor) -> Tensor:
        """All tokens at once, each by its neighbours as they are."""
        n, h, w, _ = pixels.shape
        slot = torch.arange(h * w, device=pixels.device).view(h, w)
        beside, above = pixels.new_zeros(2, n, h, w, dtype=torch.bool)
        beside[:, :, 1:] = self._like(pixels[:, :, 1:], pixels[:, :, :-1])
        above[:, 1:] = self._like(pixels[:, 1:], pixels[:, :-1])
        # C ~ A and C ~ B are the comparisons of the token on the left with its upper one, and of the upper with its left one
        down = torch.zeros_like(above)
        down[:, 1:, 1:] = above[:, 1:, :-1] & ~beside[:, :-1, 1:]
        down[:, 1:, 0] = True
        source = torch.where(down & above, slot - w, torch.where(~down & beside, slot - 1, slot)).flatten(1)
        for _ in range((h + w).bit_length()):
            source = source.gather(1, source)
        return source

    def _anchored(self, pixels: Tensor) -> Tensor:
        """By neighbours as they are predicted: those on a diagonal do not know each other."""
        n, h, w, _ = pixels.shape
        seen = pixels.clone()
        source = torch.arange(h * w, device=pixels.device).view(h, w).repeat(n, 1, 1)
        for diagonal in range(1, h + w - 1):
            row = torch.arange(max(0, diagonal - w + 1), min(h, diagonal + 1), device=pixels.device)
            column = diagonal - row
            left, top = (column - 1).clamp(min=0), (row - 1).clamp(min=0)
            a, b, c = seen[:, row, left], seen[:, top, column], seen[:, top, left]
            down = (column == 0) | ((row > 0) & self._like(c, a) & ~self._like(c, b))
            guess = torch.where(down[..., None], b, a)
            like = self._like(pixels[:, row, column], guess)
            origin = torch.where(down, source[:, top, column], source[:, row, left])
            source[:, row, column] = torch.where(like, origin, source[:, row, column])
            seen[:, row, column] = torch.where(like[..., None], guess, seen[:, row, column])
        return source.flatten(1)

    def _runs(self, pixels: Tensor) -> Tensor:
        """By the last token that was encoded: the run of each ends where the first other one begins."""
        n, h, w, _ = pixels.shape
        order = torch.arange(h * w, device=pixels.device).view(h, w)
        if self.scan == "serpentine":
            order = torch.stack([row.flip(0) if number % 2 else row for number, row in enumerate(order)])
        order, flat = order.flatten(), pixels.flatten(1, 2)
        source = torch.empty(n, h * w, dtype=torch.long, device=pixels.device)
        for row, line in enumerate(flat[:, order]):
            start = 0
            while start < h * w:
                stop, step = start + 1, 64
                # looked for in stretches that grow, so that short runs do not read to the end
                while stop < h * w:
                    other = (~self._like(line[stop : stop + step], line[start])).nonzero()
                    if len(other):
                        stop += int(other[0])
                        break
                    stop, step = min(h * w, stop + step), 2 * step
                source[row, order[start:stop]] = order[start]
                start = stop
        return source
