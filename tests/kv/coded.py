"""Codecs small enough for short prompts, keys as models make them, and a layer that stores them packed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mmaccel.kv.cache import CacheState
from mmaccel.kv.codecs import Codec, token_groups
from mmaccel.kv.codecs.calibquant import CalibQuant
from mmaccel.kv.codecs.fp8 import FP8
from mmaccel.kv.codecs.gear import GEAR
from mmaccel.kv.codecs.kivi import KIVI
from mmaccel.kv.codecs.nsnquant import NSNQuant
from mmaccel.kv.codecs.qserve import QServe
from mmaccel.kv.codecs.think import ThinK
from mmaccel.kv.codecs.turboquant import TurboQuant
from mmaccel.kv.codecs.vidkv import VidKV
from mmaccel.kv.codecs.zipcache_codec import ZipCacheCodec
from mmaccel.kv.index import KeyIndex
from mmaccel.kv.packed import QuantisedLayer, SharedPacking
from mmaccel.runtime.cache.packing import eligible_of

HEADS, WIDTH = 2, 32
#: small enough for short prompts
SMALL = (
    FP8(page=16),
    KIVI(page=32, residual=8, bits=2),
    KIVI(page=32, residual=0, bits=4, group=16),
    KIVI(page=16, residual=0, bits=8, group=16),
    VidKV(page=32),
    VidKV(page=32, value_bits=2, fourier=True),
    CalibQuant(page=16),
    CalibQuant(page=32, bits=4),
    ThinK(page=32, residual=8, prune=0.2, align=1),
    TurboQuant(page=32),
    TurboQuant(page=32, bits=3, residual=8, seed=3, codebook="sphere"),
    TurboQuant(page=16, bits=2.5, value_bits=2),
    TurboQuant(page=32, bits=2, value_bits=3.5, correct=False),
    TurboQuant(page=16, bits=4, value_bits=3, values="uniform"),
    TurboQuant(page=16, bits=4, sketch=True),
    QServe(page=16),
    QServe(page=32, bits=8, residual=8, smooth=0.0),
    QServe(page=16, balance="queries"),
    ZipCacheCodec(page=16),
    ZipCacheCodec(page=16, bits=8),
    GEAR(page=32),
    GEAR(page=32, bits=2, rank=2, sparsity=0.2, group=16, residual=8),
    GEAR(page=32, bits=8, rank=0),
    GEAR(page=48, sparsity=0),
    NSNQuant(page=32),
    NSNQuant(page=16, bits=1, residual=8),
    NSNQuant(page=48, bits=4, seed=3),
)
#: codecs that tell kinds of tokens apart
SEVERAL = (
    (VidKV(page=32, protect=0.3),),
    (CalibQuant(page=16, bits=4), KIVI(page=16, group=16, residual=4, bits=4, text_only=True)),
    (VidKV(page=32, protect=0.3, visual_only=True), FP8(page=16, text_only=True)),
)


def name_of(*codecs: Codec) -> str:
    return " ".join(
        f"{codec.name}-{getattr(codec, 'bits', '')}-{codec.page}{'-sketch' * getattr(codec, 'sketch', False)}"
        for codec in codecs
    )


def names_of(codecs: tuple[Codec, ...]) -> str:
    return name_of(*codecs)


def keys_like(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Channels differ in offset and spread, and a few of them are large everywhere, as those of keys are."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=rng) * (torch.rand(shape[-1], generator=rng) + 0.2)
    offset = torch.randn(shape[-1], generator=rng)
    offset[:3] *= 8
    return (x + offset).to(dtype)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 2)


def error(ours: torch.Tensor, x: torch.Tensor) -> float:
    """Relative to how far the numbers of a channel are spread."""
    spread = x.float() - x.float().mean(0)
    return float((ours.float() - x.float()).norm() / spread.norm())


def centred(keys: torch.Tensor) -> torch.Tensor:
    """Values made of keys: without channels that are far from nought."""
    return (keys * 7).sin()


class Stored:
    """A state of quantised layers beside plain lists of all keys and values ever fed, by place."""

    def __init__(self, *codecs: Codec, batch: int, layers: int = 1) -> None:
        self.groups, self.batch = token_groups(dict(enumerate(codecs))), batch
        self.state = CacheState(layers)
        self.keys = [torch.zeros(batch, HEADS, 0, WIDTH) for _ in range(layers)]
        index = KeyIndex(torch.zeros(batch, 0, dtype=torch.int32), False, 0)
        for layer in self.state.layers:
            layer.index = index

    def feed(
        self,
        tokens: int,
        visual: torch.Tensor | None = None,
        seed: int = 0,
        salient: torch.Tensor | None = None,
    ) -> None:
        since = self.state.seen
        for number, layer in enumerate(self.state.layers):
            new = keys_like(self.batch, HEADS, tokens, WIDTH, seed=seed + number + 100 * since)
            # values are spread alike in all channels
            layer.update(new, centred(new))
            self.keys[number] = torch.cat([self.keys[number], new], dim=2)
        layout: Any = None if visual is None else SimpleNamespace(visual=visual)
        if visual is not None and any(group.of == "text" for group in self.groups):
            self.state.shared.places.note_visual(visual, since)
        self.pack(layout, since, salient)

    def pack(self, layout: Any = None, since: int = 0, salient: torch.Tensor | None = None) -> None:
        """As the codec stage does behind a forward, where the host knows no counts."""
        made = SharedPacking()
        for layer in self.state.layers:
            for group in self.groups:
                eligible = eligible_of(group, self.state.shared, layout, since, salient)
                if eligible is not None:
                    layer.pack(group, eligible, made)

    def check(self, most: float = 0.7) -> None:
        """Every stored slot holds the key of its place, and the value of the same."""
        for layer, fed in zip(self.state.layers, self.keys, strict=True):
            keys, values = layer.stored()
            index = layer.index.index if layer.index.index.dim() == 3 else layer.index.index[:, None]
            index = index.expand(-1, HEADS, -1)
            assert keys.shape[2] == values.shape[2] == len(layer.index)
            there = index >= 0
            want = fed.gather(2, index.clamp(min=0).long()[..., None].expand(-1, -1, -1, WIDTH))
            assert error(keys[there], want[there]) < most
            assert error(values[there], centred(want)[there]) < most
            rest = torch.arange(len(layer.index)) >= layer.width
            if layer.packed.dequantised is not None:
                rest = rest & ((there & rest).cumsum(-1) > layer.packed.dequantised[..., None])
            exact = there & rest
            assert torch.equal(keys[exact], want[exact])
            assert torch.equal(values[exact], centred(want)[exact])


def prompt(length: int, *spans: tuple[int, int]) -> torch.Tensor:
    """``[B, length]`` bool, a span of visual tokens in every row."""
    places = torch.arange(length)
    return torch.stack([(places >= first) & (places < end) for first, end in spans])


def places_of(layer: QuantisedLayer, row: int) -> list[list[int]]:
    """The places of what a row has packed, kind by kind, and of the rest; of heads that are alike."""
    parts = layer.index.by_head.split((*layer.packed.widths, len(layer.index) - layer.width), dim=-1)
    return [[place for place in part[row, 0].tolist() if place >= 0] for part in parts]
