"""ZipCache's codec: keys per channel, values per token after every channel was divided by a scale of its own."""

from __future__ import annotations

from typing import Literal, cast

import torch
from mmaccel_kernels.pack import Shared, kept, meta_type, quantise
from mmaccel_kernels.pages import Code, Format, Pages, Plane
from torch import Tensor

from ...errors import MmaccelError
from ...method import register
from .base import Codec, Cut, channel_ranges, factors_of, largest, scaled_plane


@register
class ZipCacheCodec(Codec):
    """Visual keys per channel over all tokens that are packed together, values per token after each channel was divided by the
    root of its largest number.

    *ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification*, NeurIPS 2024, arXiv 2405.14256.

    Keys: ``s = (max_t - min_t) / (2^bits - 1)`` of every channel, ``c = round((k - min_t) / s)``. Values: ``a_d = sqrt(max_t
    |v_td|)``, and ``v_t / a`` in equal steps from its smallest to its largest channel. With the policy ``zipcache-tokens`` the
    tokens that are not salient are packed by the same codec in fewer bits, and ``a`` is that of all tokens; alone it packs all
    tokens alike. The recipe ``zipcache`` has both. Text stays in full precision.

    ``variant="official"``: the first tokens of all heads share the steps of their values, and so do the second ones, and so on,
    although heads may have packed different tokens.

    Parameters
    ----------
    bits : 2, 4 or 8. 4 for salient tokens, and 2 for others, as in the paper.
    page : tokens of a page. All pages of a prompt share the scales of their keys, so the size does not affect the error.

    Paper and program: in the program all is decoded and encoded again every 100 steps; here nothing is quantised twice, and
    text behind the prompt is not quantised.
    """

    name = "zipcache-codec"
    summary = "visual keys per channel, values per token with a scale for each channel"
    paper = "arXiv 2405.14256"
    #: in the authors' variant heads share the steps of values
    mixes_heads = True
    sees_all_values = True

    page: int = 128
    visual_only: bool = True
    bits: Literal[2, 4, 8] = 4

    def __post_init__(self) -> None:
        if not self.visual_only or self.text_only or self.residual:
            raise MmaccelError(
                "zipcache-codec packs all visual tokens of a prompt and no text; leave out visual_only, text_only and residual."
            )
        super().__post_init__()

    def formats(self, channels: int) -> tuple[Format, ...]:
        code = cast(Code, f"int{self.bits}")
        return Format(code, "channel", self.page), Format(code, "token", channels)

    def packable(self, lengths: Tensor) -> Tensor:
        return lengths

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        format = self.formats(keys.shape[1])[0]
        low, high = channel_ranges(keys, cut.lengths.flatten())
        scale = (high - low) / (format.levels - 1)
        # one row a page, since those of values differ
        own = torch.arange(len(cut.count), dtype=torch.int32, device=keys.device)
        each = [kept(x[cut.head][:, None], meta_type(keys.dtype)) for x in (scale, low)]
        shared = Shared(each[0], each[1], own)
        return (quantise(keys, cut.start, cut.count, format, page=self.page, tile=cut.tile, shared=shared),)

    def value_planes(self, values: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        format = self.formats(values.shape[1])[-1]
        size = largest(values, cut.lengths.flatten()) if cut.peak is None else cut.peak.flatten(0, 1)
        factor = factors_of(size.sqrt(), cut, None if before is None else before.values[0].factor)
        shared = self._of_rows if self.official else None
        return (scaled_plane(self, values, cut, format, factor, shared),)

    def _of_rows(self, values: Tensor, cut: Cut, format: Format, dtype: torch.dtype) -> Shared:
        """Steps that all heads share: of their first tokens, of their second ones, and so on."""
        heads, lengths = cut.lengths.shape[1], cut.lengths.flatten()
        head = torch.repeat_interleave(lengths, output_size=len(values))
        rank = torch.arange(len(values), device=values.device) - (lengths.cumsum(0) - lengths)[head]
        longest = int(lengths.max()) if len(lengths) else 0
        row = head // heads * longest + rank
        none = values.new_zeros(len(cut.lengths) * longest, dtype=torch.float32)
        low, high = (
            none.scatter_reduce(0, row, getattr(values.float(), end)(1), end, include_self=False)[row]
            for end in ("amin", "amax")
        )
        token = torch.arange(self.page, device=values.device)
        at = torch.where(token < cut.count[:, None], cut.start[:, None] + token, 0)
        each = [kept(x[at][..., None], dtype) for x in ((high - low) / (format.levels - 1), low)]
        own = torch.arange(len(cut.count), dtype=torch.int32, device=values.device)
        return Shared(each[0], each[1], own)
