"""Synthetic inputs for any method, without a model: what a method is shown follows from what its class declares.

Tokens come from a layout as prompts have it: pictures of one grid, with newlines, of stitched tiles, clips in one piece and
clips whose frames the prompt spreads out, cut into the units that the method asks for and padded to the longest. A method
gets the signals of its taps, a question, queries, or attention only if it says that it looks at them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import numpy as np
import random_selectors
import torch
from torch import Tensor

from mmaccel.core.layout import Layout, Segment, Sound, Tile, Units
from mmaccel.kv.codecs.base import Codec
from mmaccel.method import (
    ChunkMethod,
    DraftMethod,
    EncoderMethod,
    EncoderTokens,
    FramesMethod,
    KeyBatch,
    LayerAttention,
    LayerMethod,
    Method,
    Policy,
    PreviewMethod,
    TokenBatch,
    TokenMethod,
)
from mmaccel.method.calibration import HeadPolicy
from mmaccel.method.registry import methods
from mmaccel.method.reread import RereadPolicy

M = TypeVar("M", bound=Method)
#: what tokens hold: noise, noise with many exact copies, or all the same
Content = Literal["noise", "copies", "flat"]

TESTS = Path(__file__).parent
WIDTH = 16


# --------------------------------------------------------------------------------------------------------- which methods


def offered(kind: type[M] = Method) -> dict[str, type[M]]:  # type: ignore[assignment]
    """The registered methods of a kind by name: all but those that tests have registered."""
    return {
        name: one
        for name, one in methods().items()
        if issubclass(one, kind) and not Path(inspect.getfile(one)).is_relative_to(TESTS)
    }


def model_with(cls: bool) -> Any:
    """What methods ask about a model, whose vision tower has a CLS token or none."""
    blocks = [SimpleNamespace(self_attn=SimpleNamespace(q_proj=None, o_proj=None)) for _ in range(8)]
    words = SimpleNamespace(layers=blocks)
    return SimpleNamespace(
        name="synthetic",
        has_cls=cls,
        hears=True,
        deepstack=0,
        depth=len(blocks),
        attending=range(len(blocks)),
        text=words,
    )


def built(kind: type[M]) -> Iterator[M]:
    """A method with its default options as a model with a CLS token and, if that is another one, one without would have it."""
    made: list[Any] = []
    for cls in (True, False):
        one = kind(**given(kind)).fit(model_with(cls))
        if one not in made:
            made.append(one)
    yield from made


def given(kind: type[Method], width: int = WIDTH) -> dict[str, Any]:
    """Options that have to be given: a method that reads a CLIP model needs one, and something to look for; a learned one what
    it has learned."""
    needed = {"selector": random_selectors.alone(width)}
    needed |= {"clip_model": "stand-in", "query": "a dog"} if issubclass(kind, FramesMethod) else {}
    needed |= {"calibration": random_selectors.calibrated()} if issubclass(kind, HeadPolicy) else {}
    names = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return {name: value for name, value in needed.items() if name in names}


# --------------------------------------------------------------------------------------------------------------- content


def copied(x: Tensor, random: torch.Generator) -> Tensor:
    """``x [n, ...]`` with two of three rows replaced by copies of a few, so that most cuts fall between copies."""
    n = len(x)
    source = torch.randint(max(2, n // 6), (n,), generator=random)
    return torch.where(torch.rand(n, *[1] * (x.dim() - 1), generator=random) < 2 / 3, x[source], x)


def _stitched(side: int, across: int) -> Tile:
    """``across * across`` tiles of ``side * side`` tokens as one picture, with a newline behind every row."""
    rows = torch.arange(side * across)
    cells = torch.tensor([(0, r, c) if c < len(rows) else (-1, -1, -1) for r in rows for c in range(len(rows) + 1)])
    row = torch.arange(len(cells)) // (len(rows) + 1)
    part = row // side * across + (torch.arange(len(cells)) % (len(rows) + 1)).clamp(max=len(rows) - 1) // side
    seen = (cells >= 0).all(-1)
    source = torch.where(seen, seen.cumsum(0) - 1, -1)
    return Tile((1, len(rows), len(rows)), cells, source, part, across**2)


#: pictures as the tiles they are encoded in
PICTURES: tuple[tuple[Tile, ...], ...] = (
    (Tile.raster(1, 6, 6, 0),),
    (Tile.raster(5, 3, 4, 0),),
    (Tile.raster(1, 6, 5, 0, newline=True),),
    (Tile.raster(4, 4, 4, 0),),
    (Tile.raster(1, 4, 4, 0), _stitched(3, 2)),
    tuple(Tile.raster(1, 3, 3, 0, frame=f) for f in range(3)),
)


@functools.cache
def layout(grids: bool = False) -> Layout:
    """A row for each of :data:`PICTURES` with some text around it; with ``grids`` only those without newlines."""
    segments, ends = [], []
    for picture in PICTURES:
        if grids and any((tile.cells < 0).any() for tile in picture):
            continue
        end = 3
        for tile in picture:
            places = torch.arange(end, end + len(tile))
            segments.append(Segment(len(ends), "image", len(ends), tile, places))
            end += len(tile)
        ends.append(end + 4)
    valid = torch.arange(max(ends)) < torch.tensor(ends)[:, None]
    return Layout(valid, segments)


@functools.cache
def layout_heard() -> Layout:
    """The same without newlines, and behind every picture but the first a word and a sound of seven tokens."""
    shown, sounds, source = layout(grids=True), [], 0
    for row, end in enumerate((shown.valid.sum(1) - 4).tolist()):
        if row:
            places = torch.arange(end + 1, end + 8)
            sounds.append(Sound(row, places, torch.arange(source, source + 7)))
            source += 7
    valid = torch.nn.functional.pad(shown.valid, (8, 0), value=True)
    return Layout(valid, shown.segments, sounds)


def thinned(units: Units, seed: int) -> Units:
    """What an earlier stage might have left: holes everywhere, and of the last unit nothing."""
    random = torch.Generator().manual_seed(seed)
    shape = (layout_heard() if units.heard.any() else layout()).valid.shape
    kept = torch.rand(*shape, generator=random) < 0.6
    gone = units.places[-1][units.valid[-1]]
    kept[units.row[-1], gone] = False
    return units.only(kept)


# ---------------------------------------------------------------------------------------------------------------- tokens

_PER_LAYER = ("cls_attention", "received_attention", "patch_attention", "cls_attention_unsplit")


def tokens_of(
    method: TokenMethod,
    content: Content = "noise",
    seed: int = 0,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
    thin: bool = False,
    grids: bool = False,
) -> TokenBatch:
    """What a method sees of :data:`PICTURES`, in units as it wants them; ``thin`` after an earlier stage.

    What a token is and every figure about it are the same for copies, and newlines are copies anyway.
    """
    random = torch.Generator().manual_seed(seed)
    shown = layout_heard() if method.needs_sounds else layout(grids)
    values = torch.zeros(*shown.valid.shape, width + 8)
    for segment in shown.segments:
        values[segment.row, segment.places] = _content(segment.tile, content, random, width + 8)
    for sound in shown.sounds:
        values[sound.row, sound.places] = _content(Tile.raster(1, 1, len(sound.places), 0), content, random, width + 8)
    units = shown.units(method.unit)
    units = thinned(units, seed) if thin else units
    valid = units.valid
    x = values[units.row[:, None], units.places.clamp(min=0)].masked_fill(~valid[..., None], 0.0)
    features, figures, blank = x[..., :width].to(dtype), x[..., width:].sigmoid(), units.source < 0
    signals: dict[str, Tensor] = {}
    for tap in method.taps():
        if tap.kind in _PER_LAYER:
            signal = figures[..., : len(tap.layers)].transpose(1, 2)
        else:
            signal = features.float()[:, None].expand(-1, len(tap.layers), -1, -1)
        hidden = blank[:, None].view(len(valid), 1, -1, *[1] * (signal.dim() - 3))
        signals[tap.kind] = signal.masked_fill(hidden, torch.nan)
    if isinstance(method, (LayerMethod, PreviewMethod)):
        names = method.observe(attention_of(1, 9)).keys()
        names = [*names, *(("rotary_cos", "rotary_sin") if getattr(method, "needs_rotary", False) else ())]
        signals |= {name: figures[..., i].masked_fill(~valid, torch.nan) for i, name in enumerate(names)}
    if getattr(method, "compares_with", None) is not None:
        signals["before"] = features.float()[:, None] / 2
    if isinstance(method, ChunkMethod):
        names = method.observe(attention_of(1, 9), torch.arange(9)[None], 0).keys()
        signals |= {name: figures[..., i].masked_fill(~valid, torch.nan) for i, name in enumerate(names)}
    if method.needs_sounds:
        signals["sound_attention"] = figures[..., 0].masked_fill(~units.heard, torch.nan)
    if isinstance(method, DraftMethod):
        signals["draft_match"] = figures[..., 0].masked_fill(~valid, torch.nan)
    if method.text_tower is not None:
        signals["patches"] = features.float().masked_fill(blank[..., None], torch.nan)
    question = torch.randn(len(valid), 5, width, generator=random).to(dtype) if method.needs_question else None
    asked = torch.arange(5) < torch.randint(1, 6, (len(valid), 1), generator=random)
    said = {}
    if isinstance(method, LayerMethod) and question is not None:
        said = {name: torch.rand(len(valid), 5, generator=random) for name in names}
    return TokenBatch(
        features=features.contiguous(),
        valid=valid,
        cells=units.cells,
        grid=units.grid,
        segment=units.segment,
        tile=units.tile,
        tiles=units.tiles,
        question=question,
        question_valid=asked if method.needs_question else None,
        question_signals=said,
        signals=signals,
    )


def _content(tile: Tile, content: Content, random: torch.Generator, width: int) -> Tensor:
    """``[n, width]``: frames of a clip resemble each other, and without noise are the same at a third of the places."""
    x, (t, h, w) = torch.randn(len(tile), width, generator=random), tile.grid
    line = torch.randn(width, generator=random)
    if content == "flat":
        return torch.ones_like(x)
    if t > 1:
        still = x[: h * w].repeat(t, 1)
        moves = (torch.rand(h * w, generator=random) > 1 / 3).repeat(t)[:, None]
        x = still + 0.4 * x * (moves if content == "copies" else 1)
    elif content == "copies":
        x = copied(x, random)
    return torch.where((tile.cells < 0).any(-1)[:, None], line, x)


def alone(tokens: TokenBatch, row: int) -> TokenBatch:
    """A unit by itself, without padding."""
    one, real = slice(row, row + 1), tokens.valid[row]
    figures = {"features", "valid", "cells", "segment", "tile", "until"}
    taken = {name: getattr(tokens, name)[one][:, real] for name in figures}
    asked = None if tokens.question_valid is None else tokens.question_valid[row]
    return replace(
        tokens,
        **taken,
        **{name: getattr(tokens, name)[one] for name in ("grid", "tiles", "entered", "left", "clips")},
        question=None if tokens.question is None else tokens.question[one, asked],
        question_valid=None if asked is None else asked[None, asked],
        question_signals={name: x[one][:, asked] for name, x in tokens.question_signals.items()},
        signals={
            name: x[one][:, :, real] if x.dim() > 2 and name != "patches" else x[one][:, real]
            for name, x in tokens.signals.items()
        },
    )


def attention_of(rows: int, length: int, seed: int = 0) -> LayerAttention:
    """What a layer may look at; the last third of the prompt is text."""
    random = torch.Generator().manual_seed(seed)
    text = torch.arange(length).expand(rows, -1) >= length - length // 3
    query, key, value = (torch.randn(rows, heads, length, WIDTH, generator=random) for heads in (4, 2, 2))
    return LayerAttention(query, key, None, 0.25, text, value=value)


# --------------------------------------------------------------------------------------------------------- inside a tower


def tower_of(
    method: EncoderMethod,
    content: Content = "noise",
    seed: int = 0,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> EncoderTokens:
    """Three tiles of 41 tokens, the first of them CLS, some of which stand for several patches."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 41, width + 1, generator=random)
    size = torch.randint(1, 4, (3, 41), generator=random).float()
    if content == "copies":
        x[:, 1:] = torch.stack([copied(row, random) for row in x[:, 1:]])
    if content != "noise":
        size = torch.ones_like(size)
    if content == "flat":
        x = torch.ones_like(x)
    keys, paid = x[..., :-1].to(dtype).float().contiguous(), x[..., -1].sigmoid()
    return EncoderTokens(keys, size, 1, 0.5, paid if method.needs_cls else None)


def tile_of(tokens: EncoderTokens, row: int) -> EncoderTokens:
    """One tile by itself."""
    one = slice(row, row + 1)
    seen = None if tokens.cls_attention is None else tokens.cls_attention[one]
    return replace(tokens, keys=tokens.keys[one], size=tokens.size[one], cls_attention=seen)


def patches_of(content: Content = "noise", seed: int = 0) -> Tensor:
    """Three tiles of 6 x 9 patches, ``[3, 6, 9, 12]``: colours from 0 to 1, or few that stand in areas, or one."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 6, 9, 12, generator=random)
    if content == "copies":
        coarse = torch.rand(3, 2, 3, 12, generator=random).repeat_interleave(3, 1).repeat_interleave(3, 2)
        # of eight colours, so that near ones are there too
        shade = torch.randint(8, (3, 6, 9, 1), generator=random) < 1
        return torch.where(shade, x, (coarse * 7).round() / 7)
    return torch.full_like(x, 0.5) if content == "flat" else x


def frames_of(content: Content = "noise", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys of three frames of 30 tokens and of their references, ``[3, 30, 12]`` each: most of them hardly changed, half
    of them copies of the reference's, or all equal."""
    random = torch.Generator().manual_seed(seed)
    stored = torch.randn(3, 30, 12, generator=random)
    change = torch.randn(3, 30, 12, generator=random) * torch.rand(3, 30, 1, generator=random) ** 2
    if content == "copies":
        change = change * torch.randint(2, (3, 30, 1), generator=random)
    return (stored, stored.clone()) if content == "flat" else (stored + change, stored)


# ------------------------------------------------------------------------------------------------------------- the cache

#: keys of a row, padding in front of each row, and where visual keys end
KEYS, PADS, SEEN = 60, (0, 7), 40


def keys_of(
    policy: Policy, content: Content = "noise", seed: int = 0, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> KeyBatch:
    """Two rows of one layer at the end of a prompt, the second with padding in front."""
    random = torch.Generator().manual_seed(seed)
    heads, rows = 2, len(PADS)
    pads = torch.tensor(PADS)[:, None]
    valid = torch.arange(KEYS) >= pads
    visual = valid & (torch.arange(KEYS) >= max(PADS)) & (torch.arange(KEYS) < SEEN)
    x = torch.randn(rows, KEYS, heads, 2 * width + 2, generator=random)
    if content == "copies":
        x[:, max(PADS) : SEEN] = torch.stack([copied(row, random) for row in x[:, max(PADS) : SEEN]])
    if content == "flat":
        x = torch.ones_like(x)
    keys, values, paid, weight = x.transpose(1, 2).contiguous().split((width, width, 1, 1), -1)
    paid = paid.sigmoid()[..., 0]
    if policy.shared:
        paid = paid.mean(1, keepdim=True).expand_as(paid)
    at = torch.arange(KEYS) - max(PADS)
    cells = torch.stack([at // 11, at % 11 // 4, at % 4], -1).expand(rows, -1, -1)
    window = min(policy.window or getattr(policy, "noted", 0), 12)
    queries = torch.randn(rows, 2 * heads, max(window, 1), width, generator=random)
    mean = torch.randn(rows, 2 * heads, width, generator=random)
    spread = torch.randn(rows, 2 * heads, width, width, generator=random) / width
    reach = torch.rand(rows, KEYS, generator=random) > 0.4
    return KeyBatch(
        keys=keys.to(dtype),
        values=values.to(dtype),
        queries=queries[:, :, :window].to(dtype),
        valid=valid,
        visual=visual,
        index=torch.where(valid, torch.arange(KEYS), -1),
        scaling=width**-0.5,
        received=paid if policy.observes or policy.needs_surprise or isinstance(policy, RereadPolicy) else None,
        count=torch.full((rows,), 10),
        picture=torch.where(visual, 0, -1),
        cells=torch.where(visual[..., None], cells, -1),
        survivors=reach & valid if policy.deferred else None,
        expected=(mean, spread @ spread.mT) if policy.future else None,
        outgoing=weight[..., 0].sigmoid() if policy.needs_outgoing else None,
        unrotated=keys.to(dtype) if policy.needs_unrotated else None,
    )


def row_of(keys: KeyBatch, row: int) -> KeyBatch:
    """A row by itself, without padding."""
    one, real = slice(row, row + 1), keys.valid[row]

    def cut(x: Tensor | None, dim: int = 1) -> Any:
        return None if x is None else x[one].index_select(dim, real.nonzero()[:, 0])

    return replace(
        keys,
        **{name: cut(getattr(keys, name)) for name in ("valid", "visual", "index", "picture", "cells", "survivors")},
        **{name: cut(getattr(keys, name), 2) for name in ("keys", "values", "received", "outgoing", "unrotated")},
        **{name: getattr(keys, name)[one] for name in ("queries", "places")},
        count=None if keys.count is None else keys.count[one],
        expected=None if keys.expected is None else (keys.expected[0][one], keys.expected[1][one]),
        memo={},
    )


def prompt_attention(policy: Policy, dtype: torch.dtype = torch.float32, seed: int = 0) -> LayerAttention:
    """The attention of a layer over the rows of :func:`keys_of`."""
    random, keys = torch.Generator().manual_seed(seed), keys_of(policy, dtype=dtype)
    query = torch.randn(len(PADS), 4, KEYS, WIDTH, generator=random).to(dtype)
    causal = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    visible = (causal & keys.valid[:, None] & keys.valid[:, :, None])[:, None]
    return LayerAttention(query, keys.keys, visible, 0.25, keys.valid & ~keys.visual, places=keys.index)


# ---------------------------------------------------------------------------------------------------------------- codecs


@dataclass(frozen=True)
class Heads:
    """Keys and values of all heads, flat and ragged, as a codec packs them.

    keys, values : ``[total, D]``, head after head. lengths : ``[B, Hkv]`` long. query_energy : ``[B, Hkv, D]`` float32, the
    mean square of the last queries, for codecs with a ``window``.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    query_energy: Tensor | None

    def row(self, row: int) -> Heads:
        """The heads of one row by themselves."""
        before, mine = int(self.lengths[:row].sum()), int(self.lengths[row].sum())
        own = slice(before, before + mine)
        energy = None if self.query_energy is None else self.query_energy[row : row + 1]
        return Heads(self.keys[own], self.values[own], self.lengths[row : row + 1], energy)


def heads_of(codec: Codec, content: Content = "noise", seed: int = 0, dtype: torch.dtype = torch.float32) -> Heads:
    """Two rows of heads of several lengths, as many tokens of each as can be packed, one of them empty."""
    random, page = torch.Generator().manual_seed(seed), codec.page
    lengths = codec.packable(torch.tensor([[2 * page + 40, page + 32], [0, page + 50]]))
    x = torch.randn(int(lengths.sum()), 2 * 64, generator=random)
    x = copied(x, random) if content == "copies" else torch.ones_like(x) if content == "flat" else x
    keys, values = x.to(dtype).contiguous().chunk(2, -1)
    energy = torch.rand(2, 2, 64, generator=random) if codec.window else None
    return Heads(keys.contiguous(), values.contiguous(), lengths, energy)


# ---------------------------------------------------------------------------------------------------------------- frames


def clip_of(total: int, content: Content = "noise", seed: int = 0) -> np.ndarray:
    """``[total, 40, 48, 3]`` uint8: scenes of a few frames each, with the noise of a camera."""
    random = np.random.default_rng(seed)
    if content == "flat":
        return np.full((total, 40, 48, 3), 128, np.uint8)
    scenes = random.integers(0, 256, (total // 3 + 1, 1, 1, 3)).repeat(3, 0)[:total]
    noise = 0 if content == "copies" else random.normal(0, 6, (total, 40, 48, 3))
    return (scenes + noise + np.zeros((total, 40, 48, 3))).clip(0, 255).astype(np.uint8)


class StandIn:
    """In place of a CLIP model: a few pixels are the embedding."""

    def frames(self, frames: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """Pictures ``[H, W, 3]`` uint8 -> ``[T, 3]`` float32 of length one."""
        found = np.stack([frame.reshape(-1, 3).mean(0) for frame in frames]) + 1.0
        made: np.ndarray = (found / np.linalg.norm(found, axis=-1, keepdims=True)).astype(np.float32)
        return made

    def text(self, text: str) -> np.ndarray:
        """``[3]`` float32."""
        return np.asarray([1.0, 0.0, 0.0], np.float32)
