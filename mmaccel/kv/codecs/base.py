"""Codecs: keys and values stored in few bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, ClassVar, Literal

import torch
from mmaccel_kernels.pack import Shared, meta_type, quantise
from mmaccel_kernels.pages import Format, Pages, Plane, split, tile_for
from torch import Tensor

from ...errors import MmaccelError
from ...method import Method
from ...method.refused import described, refuse
from ...method.results import check_slots, check_tensor, check_type, check_within
from ..scoring.importance import energy


@dataclass(frozen=True)
class Cut:
    """Flat ragged heads cut into pages.

    start, count : ``[N]`` long and int32, first row and tokens of every page, head after head.
    number : ``[N]`` int32, 0 to N - 1.
    head : ``[N]`` long, the head of every page, of ``B Hkv``; ``cu_pages [B Hkv + 1]`` int32, the first page of every head.
    lengths : ``[B, Hkv]`` long.
    tile : tokens of a tile of the pages.
    query_energy : ``[B, Hkv, D]`` float32, what :meth:`Codec.energy` makes of the last queries, for codecs with a ``window``.
    new : ``[B, Hkv]`` bool, heads that have packed nothing yet; None where all or no heads have, as ``before`` says.
    peak : ``[B, Hkv, Dv]`` float32, the largest size of every channel of the values of all tokens in full precision, packed now
        or not, for codecs that see ``sees_all_values``; None where all are packed.
    """

    start: Tensor
    count: Tensor
    number: Tensor
    head: Tensor
    cu_pages: Tensor
    lengths: Tensor
    tile: int
    query_energy: Tensor | None = None
    new: Tensor | None = None
    peak: Tensor | None = None


class Cuts:
    """Cuts of heads into pages, which layers share that pack as many tokens of every head."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Cut] = {}

    def of(self, lengths: Tensor, page: int, tile: int, device: torch.device) -> Cut:
        """Cut flat heads of ``lengths [B, Hkv]`` long into pages on ``device``. If they are on the CPU nothing waits for the
        device; else the host waits for the number of pages."""
        if lengths.device.type != "cpu":
            return self._cut(lengths, page, tile, None)
        key = device, page, tile, lengths.shape, *lengths.flatten().tolist()
        if key not in self._made:
            total = int((-(-lengths // page)).sum())
            self._made[key] = self._cut(_to_device(lengths, device), page, tile, total)
        return self._made[key]

    @staticmethod
    def _cut(lengths: Tensor, page: int, tile: int, total: int | None) -> Cut:
        start, count, cu_pages = split(lengths.flatten(), page, total)
        head = torch.repeat_interleave(cu_pages.diff().long(), output_size=len(count))
        number = torch.arange(len(count), dtype=torch.int32, device=count.device)
        return Cut(start, count, number, head, cu_pages, lengths, tile)


@dataclass(frozen=True)
class Codec(Method):
    """A method at site ``codec``: stores keys and values in pages of few bits, each page quantised once.

    Parameters
    ----------
    page : tokens of a page, a multiple of 16.
    residual : how many of the newest tokens always stay in full precision; with them stays what does not fill a page, and for
        a while another page where heads store different counts, since all are packed at once.
    visual_only : text is not packed. Visual tokens are packed at the end of the prompt they came with; ``residual`` counts
        those of that prompt.
    text_only : visual tokens are not packed. A recipe may have one codec for visual tokens and one for text.
    """

    site = "codec"
    budget = "none"
    default_retain = None
    weighable = False
    #: whether :attr:`Cut.peak` is to be filled where some tokens are packed and others stay
    sees_all_values: ClassVar[bool] = False
    limits = {"residual": "[0, inf)"}

    page: int = 128
    residual: int = 0
    visual_only: bool = False
    text_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.visual_only and self.text_only:
            raise MmaccelError(f"{self.name} packs nothing if it is visual_only and text_only; leave out one of them.")
        if self.page < 16 or self.page % 16:
            raise MmaccelError(f"{self.name} needs pages of a multiple of 16 tokens, not {self.page}.")
        formats: Any = self.formats(16)
        if not isinstance(formats, tuple) or not formats or not all(isinstance(one, Format) for one in formats):
            refuse(self, "formats()", described(formats), "a tuple of one Format or more")
        for format in formats:
            if format.axis == "channel" and (format.group % self.tile or self.page % format.group):
                raise MmaccelError(
                    f"{self.name}: groups of {format.group} tokens do not fit pages of {self.page}; a group must be a "
                    "multiple of 16 tokens and a page a whole number of groups."
                )

    def conflict(self, other: Method) -> str | None:
        """Refuse a second codec, unless one packs visual tokens and the other text."""
        if isinstance(other, Codec) and not (
            (self.visual_only and other.text_only) or (self.text_only and other.visual_only)
        ):
            return "of two codecs one must pack visual tokens (visual_only=True) and the other text (text_only=True)"
        return super().conflict(other)

    @property
    def window(self) -> int | None:
        """The number of last queries of a forward that the codec looks at; None for all."""
        return 0

    def energy(self, queries: Tensor, valid: Tensor, heads: int) -> Tensor:
        """The weight of every channel by these queries, of each of ``heads`` key heads, ``[B, Hkv, D]`` float32; by default the
        mean square.

        Parameters
        ----------
        queries : ``[B, Hq, W, D]``. valid : ``[B, W]`` bool.
        """
        return energy(queries, valid, heads)

    def query_energy(self, query: Tensor, places: Tensor, heads: int) -> Tensor | None:
        """:meth:`energy` of the last queries of ``query [B, Hq, q, D]``, at ``places [B, q]``, -1 for padding; None where the
        codec looks at none."""
        if self.window == 0:
            return None
        last = slice(None) if self.window is None else slice(-self.window, None)
        return self.energy(query[:, :, last], places[:, last] >= 0, heads)

    @abstractmethod
    def formats(self, channels: int) -> tuple[Format, ...]:
        """Every format used for heads of this size: that of the keys first, that of the values last."""

    def packed_bits(self, channels: int) -> float:
        """Bits of a number in a whole page, with scales and zero points, for heads of this size; mean of keys and values."""
        formats = self.formats(channels)
        return (_bits(formats[0]) + _bits(formats[-1])) / 2

    def salient(self, embeds: Tensor, visual: Tensor, text: Tensor) -> Tensor:
        """Mask of the visual tokens that :meth:`for_salient` packs, ``[B, S]`` bool, from what enters the language model.

        Parameters
        ----------
        embeds : ``[B, S, D]``. visual, text : ``[B, S]`` bool.
        """
        raise NotImplementedError

    def for_salient(self) -> Codec | None:
        """The codec of the visual tokens of a prompt that are to be stored better than the others; by default there is none."""
        return None

    @property
    def tile(self) -> int:
        """Tokens of a tile, where the fast kernel does not ask for another: 32 where that wastes no byte and crosses no group,
        else 16."""
        formats = self.formats(16)
        groups = [format.group for format in formats if format.axis == "channel"]
        fits = all(self.page % (32 * format.digits) == 0 for format in formats)
        return 32 if fits and all(group % 32 == 0 for group in groups) else 16

    def tile_of(self, width: int) -> int:
        """Tokens of a tile for heads of ``width`` channels: as the fast kernel needs it, where that can read these pages."""
        return tile_for(self.formats(width), self.page, width, self.tile)

    def packable(self, lengths: Tensor) -> Tensor:
        """Number of the oldest of ``lengths`` tokens that can be packed now: whole pages, beyond the residual."""
        return (lengths - self.residual).clamp(min=0) // self.page * self.page

    def due(self, lengths: Tensor) -> Tensor:
        """Result of :meth:`packable`, validated: at most the ``lengths``."""
        due = check_tensor(self, "packable()", self.packable(lengths), "integer", lengths.shape, lengths)
        check_within(self, "packable()", due, 0, lengths)
        return due

    def pack(
        self,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        before: Pages | None = None,
        query_energy: Tensor | None = None,
        new: Tensor | None = None,
        peak: Tensor | None = None,
        cuts: Cuts | None = None,
    ) -> Pages:
        """Quantise tokens and pack them.

        Parameters
        ----------
        keys, values : ``[total, D]`` and ``[total, Dv]`` float16, bfloat16 or float32, flat: head after head.
        lengths : ``[B, Hkv]`` long, tokens of each head, on the CPU or the device; there the host waits for the number of
            pages.
        before : what these heads have packed already.
        query_energy : see :class:`Cut`.
        new : ``[B, Hkv]`` bool on the CPU, the heads of ``before`` in which nothing is packed; None if there is none.
        peak : see :class:`Cut`.
        cuts : of other layers; None where they share none with this one.
        """
        shared = (cuts or Cuts()).of(lengths, self.page, self.tile_of(values.shape[1]), keys.device)
        new = None if new is None else _to_device(new, keys.device)
        cut = replace(shared, query_energy=query_energy, new=new, peak=peak)
        planes = self._checked("key_planes()", self.key_planes(keys.contiguous(), cut, before), keys, cut)
        of_values = self._checked("value_planes()", self.value_planes(values.contiguous(), cut, before), values, cut)
        meta = check_tensor(self, "meta()", self.meta(cut), "integer", (len(cut.count),), cut.count)
        check_slots(self, "meta()", meta, min(len(plane.scale) for plane in (*planes, *of_values)))
        narrow = planes[0].channels is not None and sum(plane.codes.shape[2] for plane in planes) < keys.shape[1]
        return Pages(
            keys=planes,
            values=of_values,
            page=self.page,
            tile=cut.tile,
            count=cut.count,
            meta=meta.int(),
            table=cut.number,
            cu_pages=cut.cu_pages,
            heads=lengths.shape[1],
            key_width=keys.shape[1] if narrow else 0,
            tokens=len(keys),
        )

    def _checked(self, call: str, planes: Any, x: Tensor, cut: Cut) -> tuple[Plane, ...]:
        """The planes of ``x``, validated."""
        if not isinstance(planes, tuple) or not planes or not all(isinstance(plane, Plane) for plane in planes):
            refuse(self, call, described(planes), "a tuple of one Plane or more")
        for plane in planes:
            check_tensor(self, f"{call} (`codes`)", plane.codes, "integer", (len(cut.count), None, None), x)
            check_type(self, f"{call} (`scale`)", plane.scale, Tensor)
        return planes

    def key_planes(self, keys: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        """The keys of every page, ``keys [total, D]``."""
        return (self.plane(keys, cut, self.formats(keys.shape[1])[0]),)

    def value_planes(self, values: Tensor, cut: Cut, before: Pages | None) -> tuple[Plane, ...]:
        """The values of every page, ``values [total, Dv]``."""
        return (self.plane(values, cut, self.formats(values.shape[1])[-1]),)

    def meta(self, cut: Cut) -> Tensor:
        """Row of scales of each page; by default each has its own."""
        return cut.number

    def plane(self, x: Tensor, cut: Cut, format: Format) -> Plane:
        """``x [total, D]`` in one format, scales per page."""
        return quantise(x, cut.start, cut.count, format, page=self.page, tile=cut.tile)


@dataclass(frozen=True)
class TokenGroup:
    """Tokens that are packed alike, in pages of their own.

    codec : how. of : which they are; ``salient`` ones are some of the visual ones of a prompt, the ``rest`` is what a policy
        does not keep.
    source : the codec of the recipe that this is of, and its stage.
    number : counted from 0. like : the group whose choices for a prompt, such as that of channels, are made for this one too.
    """

    codec: Codec
    of: Literal["all", "visual", "text", "salient", "rest"]
    source: Codec
    stage: int
    number: int
    like: int


def _bits(format: Format) -> float:
    """Bits of a number, with its part of the scale and the zero point of its group, of 16 bits each."""
    return (format.levels - 1).bit_length() + (32 if format.affine else 16) / format.group


def token_groups(codecs: Mapping[int, Codec], rest: tuple[int, Codec] | None = None) -> tuple[TokenGroup, ...]:
    """Every token group that the codecs of a recipe, by stage, tell apart; and that of the ``rest``, what a policy does not
    keep, by its stage and with its codec."""
    out: list[TokenGroup] = []
    last = sum(1 if codec.for_salient() is None else 2 for codec in codecs.values())
    for stage, codec in codecs.items():
        of: Literal["all", "visual", "text"] = "visual" if codec.visual_only else "text" if codec.text_only else "all"
        number, better = len(out), codec.for_salient()
        if better is not None:
            check_type(codec, "for_salient()", better, Codec)  # type: ignore[type-abstract]
        # what is packed first is the rest, and has seen all values
        seen = rest is not None and codec.sees_all_values and rest[1].sees_all_values
        out.append(TokenGroup(codec, of, codec, stage, number, last if seen else number))
        if better is not None:
            out.append(TokenGroup(better, "salient", codec, stage, number + 1, number))
    if rest is not None:
        out.append(TokenGroup(rest[1], "rest", rest[1], rest[0], len(out), len(out)))
    return tuple(out)


@dataclass(frozen=True)
class Eligible:
    """Places a codec may pack: of those from ``since`` on what ``mask [B, n]`` bool says, of all others ``others``; and none of
    the rows that are not among ``rows [B]`` bool on the CPU, where that is given."""

    mask: Tensor | None
    since: int
    others: bool
    rows: Tensor | None = None
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def among(self, places: Tensor, there: Tensor) -> Tensor:
        """Slots of ``there [B, heads, K]`` bool whose ``places``, of the same shape, may be packed."""
        if self.mask is not None:
            there = there & self._in_mask(places, self.mask)
        elif not self.others:
            there = torch.zeros_like(there)
        return there if self.rows is None else there & _to_device(self.rows, there.device)[:, None, None]

    def _in_mask(self, places: Tensor, mask: Tensor) -> Tensor:
        at = places.long() - self.since
        inside = (at >= 0) & (at < mask.shape[1])
        if places.device not in self._moved:
            self._moved[places.device] = _to_device(mask, places.device)
        of_heads = self._moved[places.device][:, None].expand(-1, places.shape[1], -1)
        return torch.where(inside, of_heads.gather(2, at.clamp(0, mask.shape[1] - 1)), self.others)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor from the host without waiting for the work of ``device``."""
    return x.to(device, non_blocking=device.type != "cpu")


def channel_group(group: int, channels: int) -> int:
    """The group of channels that is used for heads of this size: the largest that divides both."""
    return gcd(group, channels)


def largest(x: Tensor, lengths: Tensor) -> Tensor:
    """Largest size of every channel in runs of ``x [total, D]`` of ``lengths [N]`` rows: ``[N, D]`` float32."""
    low, high = channel_ranges(x, lengths)
    return torch.maximum(high, -low)


def factors_of(own: Tensor, cut: Cut, before: Tensor | None) -> Tensor:
    """The factors of every head, ``[B Hkv, D]``: those of what is packed ``before``, and of heads that have packed nothing
    their ``own``, 1 in place of 0."""
    own = torch.where(own > 0, own, 1.0)
    if before is None:
        return own
    return before if cut.new is None else torch.where(cut.new.flatten()[:, None], own, before.float())


def scaled_plane(
    codec: Codec,
    x: Tensor,
    cut: Cut,
    format: Format,
    factor: Tensor,
    shared: Callable[[Tensor, Cut, Format, torch.dtype], Shared] | None = None,
) -> Plane:
    """``x [total, D]``, divided by the ``factor [B Hkv, D]`` of its head, in one format; ``shared`` returns steps that are used
    in place of those of every group, from the numbers that are coded and the dtype of steps."""
    dtype = meta_type(x.dtype)
    factor = factor.to(dtype)
    head = torch.repeat_interleave(cut.lengths.flatten(), output_size=len(x))
    coded = x.float() / factor.float()[head]
    steps = None if shared is None else shared(coded, cut, format, dtype)
    page, tile = codec.page, cut.tile
    plane = quantise(coded, cut.start, cut.count, format, page=page, tile=tile, meta_dtype=dtype, shared=steps)
    return replace(plane, factor=factor)


def channel_ranges(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of every channel in runs of ``x [total, D]`` of ``lengths [N]`` rows: ``[N, D]`` float32 each,
    zero for an empty run."""
    run = torch.repeat_interleave(lengths, output_size=len(x))[:, None].expand(-1, x.shape[1])
    zeros, x = x.new_zeros(len(lengths), x.shape[1], dtype=torch.float32), x.float()
    low, high = (zeros.scatter_reduce(0, run, x, end, include_self=False) for end in ("amin", "amax"))
    return low, high
