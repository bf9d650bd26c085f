"""CalibQuant: visual keys and values in one bit."""

from typing import Literal, cast

from mmaccel_kernels.pack import Shared, kept, meta_type, quantise
from mmaccel_kernels.pages import Code, Format, Pages, Plane
from torch import Tensor

from ...errors import MmaccelError
from ...method import register
from .base import Codec, Cut, channel_ranges


@register
class CalibQuant(Codec):
    """Visual keys and values quantised per channel over all visual tokens of the prompt, in a range narrower than theirs.

    *CalibQuant: 1-Bit KV Cache Quantization for Multimodal LLMs*, arXiv 2502.14882.

    For every head and channel ``lo = k min``, ``hi = k max``, ``s = (hi - lo) / (2^bits - 1)``, ``c = round((x - lo) / s)``
    clamped to the range of codes, ``x ~ c s + lo``. At one bit the two levels are within the bulk of the distribution, not at
    its ends. Text stays in full precision.

    Parameters
    ----------
    bits : 1, 2, 4 or 8. 1 as in the paper's title.
    shrink_keys, shrink_values : ``k``. None is what the program uses: 0.5 and 0.3 at one bit, 1.0 for more bits.
    page : tokens per page. All pages of a prompt share the scales of their head, so the size does not affect the error; at one
        bit the fast kernel reads pages of 256.

    Paper and program: both also map the visual logits of each query linearly so that their maximum is 3 lower; that is part
    of attention and not done here. The zero point is stored as ``lo``, not as ``-lo / s``.
    """

    name = "calibquant"
    summary = "visual keys and values in 1 bit per channel, text untouched"
    paper = "arXiv 2502.14882"
    limits = {"shrink_keys": "(0, 1]", "shrink_values": "(0, 1]"}

    page: int = 256
    visual_only: bool = True
    bits: Literal[1, 2, 4, 8] = 1
    shrink_keys: float | None = None
    shrink_values: float | None = None

    def __post_init__(self) -> None:
        if not self.visual_only or self.text_only:
            raise MmaccelError(
                "calibquant has one range for all visual tokens of a prompt and none for text; leave out visual_only and "
                "text_only."
            )
        if self.residual:
            raise MmaccelError("calibquant packs visual tokens only and all of them; leave out residual.")
        super().__post_init__()

    def formats(self, channels: int) -> tuple[Format, ...]:
        return (Format(cast(Code, f"int{self.bits}"), "channel", self.page),)

    def packable(self, lengths: Tensor) -> Tensor:
        return lengths

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        return (self._plane(keys, cut, self._shrink(self.shrink_keys, 0.5)),)

    def value_planes(self, values: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        return (self._plane(values, cut, self._shrink(self.shrink_values, 0.3)),)

    def meta(self, cut: Cut) -> Tensor:
        return cut.head

    def _shrink(self, given: float | None, at_one_bit: float) -> float:
        return given if given is not None else at_one_bit if self.bits == 1 else 1.0

    def _plane(self, x: Tensor, cut: Cut, shrink: float) -> Plane:
        format, lengths = self.formats(x.shape[1])[0], cut.lengths.flatten()
        low, high = (end * shrink for end in channel_ranges(x, lengths))
        scale = (high - low) / (format.levels - 1)
        scale, low = (kept(of[:, None], meta_type(x.dtype)) for of in (scale, low))
        shared = Shared(scale, low, cut.head.int())
        return quantise(x, cut.start, cut.count, format, page=self.page, tile=cut.tile, shared=shared)
