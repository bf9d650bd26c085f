"""CLSE: between layers, tokens stay whose high frequencies changed since an earlier layer, and that the prompt attends to."""

from typing import Literal

import torch
from torch import Tensor

from ..core.reduction import Reduction
from ..method import LayerAttention, LayerMethod, TokenBatch, register

_LEAST = 1e-6


@register
class CLSE(LayerMethod):
    """One stage of cross-layer spectral evolution.

    *CLSE*, ECCV 2026.

    ``s_i`` is the mean absolute value, over channels, of token ``i`` behind a high-pass filter over its frame of cells: ``1 -
    exp(-d^2 / 2r^2)``, ``d`` the distance to the constant in the shifted 2-D spectrum and ``r`` ``cutoff`` times half of the
    shorter side. With ``s`` of what entered layer ``reference`` and of the hidden states, ``e_i = min(1, |s_i - s'_i| / (mean
    s' + s'_i))`` is how far a token evolved. The ``count`` tokens of highest ``sigmoid(z_i / temperature) a_i`` stay, ``z``
    being ``e`` in standard deviations from its mean and ``a`` the attention paid by the last prompt token in layer ``layer -
    1``. The recipe ``clse`` has three stages; behind the first, whose holes leave no spectrum, attention decides alone.

    ``variant="official"``: the number kept is rounded down.

    Parameters
    ----------
    layer : works at the input of this layer, 1.
    score : ``clse_attn``, the product; ``clse`` or ``attn``, one factor.
    reference : the earlier layer whose input is compared, 0.
    cutoff : of the filter, a share of half of the shorter side, 0.1.
    temperature : of the sigmoid, 0.1.

    Paper and program: pictures and clips whose cells are not all there are ranked by attention alone, which the program does
    not meet; newlines weigh half. Keys of earlier layers stay in the cache, where LLaVA's program drops them (see
    ``mustdrop-cache``).
    """

    name = "clse-step"
    summary = "attended tokens whose high frequencies changed since the first layer"
    paper = "ECCV 2026"
    unit = "segment"
    official_rounding = "down"
    default_retain = 1 / 3
    limits = {"reference": "[0, inf)", "cutoff": "(0, inf)", "temperature": "(0, inf)"}

    layer: float = 1
    score: Literal["clse_attn", "clse", "attn"] = "clse_attn"
    reference: int = 0
    cutoff: float = 0.1
    temperature: float = 0.1

    @property
    def compares_with(self) -> int | None:
        return None if self.score == "attn" else min(self.reference, int(self.layer) - 1)

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        return {} if self.score == "clse" else super().observe(attention)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``before [N, 1, n, D]``, ``prompt_attention [N, n]``, ``count [N]`` -> the best tokens."""
        factor = torch.full_like(tokens.valid, 0.5, dtype=torch.float32)
        if self.score != "attn":
            here = tokens.celled.cpu()
            for row, grid in enumerate(tokens.grid.tolist()):
                at = here[row].nonzero()[:, 0].to(factor.device)
                if len(at) == grid[0] * grid[1] * grid[2] > 1:
                    before, now = tokens.signals["before"][row, 0, at], tokens.features[row, at]
                    factor[row, at] = self.evolution(*(self.high(x, grid) for x in (before, now)))
        attention = tokens.signals.get("prompt_attention")
        return Reduction.top(factor if attention is None else factor * attention, tokens.valid, count)

    def high(self, x: Tensor, grid: list[int]) -> Tensor:
        """``[n]``: what is left of the tokens ``x [n, D]`` of a ``grid`` behind the filter."""
        frames, height, width = grid
        rows, columns = (torch.arange(side, device=x.device) - side // 2 for side in (height, width))
        radius = self.cutoff * min(height // 2, width // 2)
        square = (rows[:, None] ** 2 + columns**2).double()
        # of a single row or column nothing but the constant is taken off
        low = (-square / (2 * radius**2)).exp() if radius else (square == 0).double()
        keep = torch.fft.ifftshift(1.0 - low).float()[..., None]
        planes = x.float().view(frames, height, width, -1)
        return torch.fft.ifft2(torch.fft.fft2(planes, dim=(1, 2)) * keep, dim=(1, 2)).abs().mean(-1).flatten()

    def evolution(self, reference: Tensor, now: Tensor) -> Tensor:
        """``[n]``: the factor of every token, from the high frequencies ``[n]`` of both layers."""
        share = ((now - reference).abs() / (reference.mean() + reference + _LEAST)).clamp(max=1.0)
        return ((share - share.mean()) / (share.std() + _LEAST) / self.temperature).sigmoid()
