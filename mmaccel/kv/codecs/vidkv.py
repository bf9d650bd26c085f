"""VidKV: keys in 1.5 bits, values in three levels."""

from dataclasses import asdict, dataclass, replace
from typing import Self

import torch
from mmaccel_kernels.pages import Format, Pages, Plane
from torch import Tensor

from ...core.masks import true_first
from ...core.reduction import top_mask
from ...errors import MmaccelError
from ...method import register
from ...method.base import Variant
from .base import Codec, Cut, channel_ranges

_TWO_BITS, _SIGN, _WAVES, _THREE, _TERNARY = (
    Format("int2", "channel", 32),
    Format("sign", "channel", 32),
    Format("sign", "channel", 32, fourier=True),
    Format("three", "channel", 32),
    Format("ternary", "channel", 32),
)


@register
class VidKV(Codec):
    """Keys per channel, in 2 bits for channels of wide range and in 1 bit for the others; values in three levels.

    *Plug-and-Play 1.x-Bit KV Cache Quantization for Video Large Language Models*, arXiv 2503.16257.

    The ``D (key_bits - 1)`` channels of keys with the widest range ``max - min`` over all heads and tokens of a prompt (hard
    channels) get 2 bits, ``x ~ c s + min``; the others (easy) 1 bit, ``x ~ (2c - 1) mean |x|``. Values: ``c = sign(x)`` where
    ``|x| > mean |x| / 2``, else 0, and ``x ~ c mean |x|``. All per channel, in groups of 32 tokens.

    ``protect``: the visual tokens of a prompt that are most similar to its text, by the mean inner product of the inputs of the
    language model, have values of 2 bits, quantised as hard channels are (the paper's semantic token protection, STP).

    ``variant="official"``: ``fourier=True`` and, unless another is given, ``page=64``, two groups of the program's.

    Parameters
    ----------
    key_bits : 1.5 as in the paper; more than 1, at most 2.
    value_bits : 1.58, the three levels, or 2: values quantised as hard channels are.
    fourier : take the 1-bit codes of the Fourier transform across the easy channels, as the paper does. Off by default, as it
        costs one more transform per step.
    protect : the share of visual tokens that is protected, in whole groups, at least one. 0 is none; with 0.2 values have 1.66
        bits on average, if three levels count as 1.58.
    page : tokens per page. In pages of 128 tokens keys take 1.5 bits and the three levels of a value 2, which a GPU takes apart
        in one instruction for two. In pages of a multiple of 80 tokens values take 1.6 bits, five of them a byte, and the
        kernel needs more than ten times the instructions a byte; in pages of 640 every byte is full, in pages of 320 the 1-bit
        channels take 1.2 bits.
    residual : newest tokens in full precision, in addition to those that do not fill a page.

    Paper and program: the program's decoder returns 0 and ``s`` for the 1-bit codes, and the bare signs for the values;
    here it is the inverse of the encoder. The program stores the real and the imaginary part at every frequency, which is 2
    bits per channel; half of them are redundant (:func:`mmaccel_kernels.pages.waves`), so here it is 1. It decodes and
    encodes all tokens again every 128 steps; here nothing is quantised twice, and the channels chosen for a prompt are used
    for later tokens too. It does not protect the last 32 of the tokens chosen; here they are protected.
    """

    name = "vidkv"
    summary = "keys in 1.5 bits and values in three levels, per channel"
    paper = "arXiv 2503.16257"
    #: all heads have the same hard channels
    mixes_heads = True
    limits = {"key_bits": "(1, 2]", "value_bits": (1.58, 2), "protect": "[0, 1)"}

    page: int = 128
    key_bits: float = 1.5
    value_bits: float = 1.58
    fourier: bool = False
    protect: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protect and (self.text_only or self.value_bits == 2):
            raise MmaccelError("vidkv protects visual tokens whose values have less than 2 bits; leave out protect.")

    def by(self, variant: Variant) -> Self:
        """With the authors' transform and groups."""
        if variant != "official" or self.official:
            return super().by(variant)
        page = 64 if self.page == type(self).page else self.page
        return replace(self, fourier=True, page=page)._authors()

    def _authors(self) -> Self:
        return super().by("official")

    def formats(self, channels: int) -> tuple[Format, ...]:
        # five digits a byte, where that leaves none of it empty; else two bits, which are read faster
        three = _THREE if self.page % 80 else _TERNARY
        return _TWO_BITS, _WAVES if self.fourier else _SIGN, three if self.value_bits == 1.58 else _TWO_BITS

    def for_salient(self) -> Codec | None:
        """The same codec with 2 bits for values, in pages of 128 tokens."""
        return _Protected(**{**asdict(self), "value_bits": 2, "protect": 0.0, "page": 128}) if self.protect else None

    def salient(self, embeds: Tensor, visual: Tensor, text: Tensor) -> Tensor:
        """``[B, S]`` bool: the share ``protect`` of the visual tokens of each row, in whole groups of 32, at least 32."""
        # the mean of products is the product with the mean
        mean = (embeds * text[..., None]).float().sum(1) / text.sum(1, keepdim=True).clamp(min=1)
        score = torch.einsum("bsd,bd->bs", embeds.float(), mean)
        count = (visual.sum(1).double() * self.protect).long() // 32 * 32
        return top_mask(score, visual, count.clamp(min=32))

    def hard_channels(self, keys: Tensor, lengths: Tensor) -> Tensor:
        """The channels of keys with the widest range over all heads and tokens of each row.

        keys : ``[total, D]``, flat. lengths : ``[B, Hkv]``.

        Returns ``[B, k]`` long, ascending; ``k = int(D (key_bits - 1))``, as in the program, and at least 1.
        """
        low, high = channel_ranges(keys, lengths.sum(1))
        count = max(1, int(keys.shape[1] * (self.key_bits - 1)))
        # stable: of equal ranges the lower channel comes first
        order = (high - low).argsort(dim=1, descending=True, stable=True)
        return order[:, :count].sort(1).values

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        """Two planes of channels (one, if every channel has 2 bits), the same for all heads of a row."""
        width, heads = keys.shape[1], cut.lengths.shape[1]
        channels = [] if before is None else [plane.channels for plane in before.keys]
        if before is None or cut.new is not None:
            hard = self.hard_channels(keys, cut.lengths)
            easy = torch.ones(len(hard), width, dtype=torch.bool, device=keys.device).scatter_(1, hard, False)
            easy = true_first(easy)[:, : width - hard.shape[1]]
            chosen = (hard, easy) if easy.shape[1] else (None,)
            own = [None if c is None else c.repeat_interleave(heads, dim=0).int() for c in chosen]
            if cut.new is None:
                channels = own
            else:
                # all heads of a row have the same
                rows = cut.new.all(1).repeat_interleave(heads)[:, None]
                pairs = zip(own, channels, strict=True)
                channels = [old if mine is None or old is None else torch.where(rows, mine, old) for mine, old in pairs]
        head = torch.repeat_interleave(cut.lengths.flatten(), output_size=len(keys))
        planes = []
        for which, format in zip(channels, self.formats(width), strict=False):
            picked = keys if which is None else keys.gather(1, which.long()[head])
            planes.append(replace(self.plane(picked, cut, format), channels=which))
        return tuple(planes)


@dataclass(frozen=True)
class _Protected(VidKV):
    """The codec of the tokens that :class:`VidKV` protects: all of them are packed at the end of their prompt."""

    def packable(self, lengths: Tensor) -> Tensor:
        return lengths
