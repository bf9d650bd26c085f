"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: dynamic resolution, 2x2 merger, M-RoPE; Qwen3-VL adds DeepStack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.layout import Modality, Picture, Tile
from ..errors import UnsupportedError
from .base import CLIP_STD, Call, Continued, Description, Facts, Family, Wrapper
from .tower import EncoderCall


class Qwen2VL(Family):
    """One token per merged 2x2 block, in raster order t, h, w; a clip is one run of placeholders."""

    name = "qwen2_vl"
    model_types = ("qwen2_vl",)
    place = 6
    facts = Facts("yes, any size", cls=False, merging="2x2 blocks")
    modalities: ClassVar[tuple[Modality, ...]] = ("image", "video")
    tower_names = {"image": "visual", "video": "visual"}

    @property
    def merge(self) -> int:
        """Patches along one side of a merged block."""
        return int(self.vision.spatial_merge_size)

    @property
    def has_cls(self) -> bool:
        """No CLS token."""
        return False

    def tower_layers(self, tower: Any) -> list[nn.Module]:
        """Qwen names them blocks."""
        return list(tower.blocks)

    def attention_of(self, layer: Any) -> nn.Module:
        """Qwen names it attn."""
        return layer.attn

    @property
    def feature_layer(self) -> int:
        """The last block."""
        return self.tower_depth - 1

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        """The blocks that the merger joins stand one behind the other."""
        return torch.arange(patches).view(-1, self.merge**2)

    def frames(self, encoded: EncoderCall) -> list[list[tuple[int, int]]]:
        """The tower packs the frames of all pictures; attention stays inside a frame."""
        return [[(h, w)] * t for t, h, w in self._given_grids(encoded)]

    def _given_grids(self, encoded: EncoderCall) -> list[tuple[int, int, int]]:
        """(t, h, w) of every picture or clip in patches, whichever the tower is given."""
        given: Any = next(value for name, value in encoded.arguments.items() if name.endswith("grid_thw"))
        return [(t, h, w) for t, h, w in given.tolist()]

    @property
    def usual_std(self) -> tuple[float, ...]:
        """That of CLIP."""
        return CLIP_STD

    def unit_pixels(self, encoded: EncoderCall, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A row of ``pixels`` is a patch; every frame by itself."""
        colours = torch.tensor(self.image_std, device=pixels.device)[:, None]
        patches = sum(t * h * w for t, h, w in self._given_grids(encoded))
        scaled = (pixels.float().reshape(patches, len(colours), -1) * colours).flatten(1)
        units, first, of_size = self.blocks(encoded, patches), 0, dict[tuple[int, int], list[Tensor]]()
        for t, h, w in self.grids("image", encoded):
            of_size.setdefault((h, w), []).append(units[first : first + t * h * w].view(t, h * w, -1))
            first += t * h * w
        found = []
        for (h, w), places in of_size.items():
            at = torch.cat(places).to(pixels.device)
            found.append((scaled[at].view(len(at), h, w, -1), at))
        return found

    def grids(self, modality: Modality, encoded: EncoderCall) -> list[tuple[int, int, int]]:
        """(t, h, w) of every picture in tokens."""
        # Qwen3-VL encodes clips with the function for images, so the argument's name says nothing
        return [(t, h // self.merge, w // self.merge) for t, h, w in self._given_grids(encoded)]

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        """From the grids the tower was given."""
        offset, pictures = 0, []
        for t, h, w in self.grids(modality, encoded):
            pictures.append(self.clip(t, h, w, offset))
            offset += t * h * w
        return pictures

    def clip(self, t: int, h: int, w: int, offset: int) -> Picture:
        """The segments of one picture or clip."""
        return [Tile.raster(t, h, w, offset)]

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """The mean of each merged block; the tower runs over ``[1, patches of a frame or window]`` at a time."""
        flat = torch.cat([v[0] for v in values])
        return flat.reshape(-1, self.merge**2, *flat.shape[1:]).mean(1)

    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """Positions under a kept cache: stock code reads ``rope_deltas`` off the module, which belongs to whoever called
        last, and cannot place new pictures behind cached ones."""
        return [
            (self.model, "_prepare_position_ids_for_generation", functools.partial(_continue_generate, self)),
            (self.inner, "compute_3d_position_ids", functools.partial(_continue_forward, self)),
            (self.inner, "get_rope_index", _place_new_pictures),
        ]


class Qwen25VL(Qwen2VL):
    """As Qwen2-VL, but the tower works in windows: every block sees window order, most attend only inside a window."""

    name = "qwen2_5_vl"
    model_types = ("qwen2_5_vl",)
    place = 7
    facts = Facts("yes, any size", cls=False, merging="2x2 blocks, in full-attention layers")

    def merging_layers(self) -> list[int]:
        """The blocks that attend to whole frames: their keys can be compared, and the windows between them just shrink."""
        return sorted(self.vision.fullatt_block_indexes)

    def tap_layer(self, layer: float | None) -> int:
        """By default the last block that attends to a whole frame."""
        if layer is not None:
            return super().tap_layer(layer)
        return max(self.vision.fullatt_block_indexes)

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """Back from window order."""
        merged = super().to_tokens(modality, encoded, values)
        order = torch.cat(self.window_order(modality, encoded)).to(merged.device)
        return torch.empty_like(merged).index_copy_(0, order, merged)

    def tower_order(self, encoded: EncoderCall) -> Tensor:
        """Windows one behind the other."""
        blocks = torch.cat(self.window_order("image", encoded))
        return (blocks[:, None] * self.merge**2 + torch.arange(self.merge**2)).flatten()

    def window_order(self, modality: Modality, encoded: EncoderCall) -> list[Tensor]:
        """Which token stands at each place of the tower's sequence: windows in raster order, cells in raster order in
        each; one tensor a picture."""
        side = self.vision.window_size // self.merge // self.vision.patch_size
        offset, out = 0, []
        for t, h, w in self.grids(modality, encoded):
            frame, row, col = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w)).view(-1, 3).T
            window = (frame * -(-h // side) + row // side) * -(-w // side) + col // side
            out.append(offset + window.argsort(stable=True))
            offset += t * h * w
        return out


class Qwen3VL(Qwen2VL):
    """A clip's frames are separate runs with time stamps between them; DeepStack adds features to the first layers."""

    name = "qwen3_vl"
    model_types = ("qwen3_vl",)
    place = 8
    facts = Facts("yes, any size", cls=False, merging="2x2 blocks")

    usual_std = (0.5, 0.5, 0.5)

    def __init__(self, model: nn.Module | Description, processor: Any = None) -> None:
        super().__init__(model, processor)
        self.deepstack = len(self.vision.deepstack_visual_indexes)

    def readers(self, tower: Any) -> list[nn.Module]:
        """The mergers of DeepStack."""
        return list(tower.deepstack_merger_list)

    def clip(self, t: int, h: int, w: int, offset: int) -> Picture:
        """One segment a frame."""
        return [Tile.raster(1, h, w, offset + f * h * w, frame=f) for f in range(t)]


class Qwen3VLMoe(Qwen3VL):
    """As Qwen3-VL, with experts in the layers of the language model: every token goes its own way through them."""

    name = "qwen3_vl_moe"
    model_types = ("qwen3_vl_moe",)
    facts = Facts("yes, any size", cls=False, merging="2x2 blocks")


def _kept(call: Call | None, cache: Any = None) -> Continued | None:
    """The kept cache this call continues, or None."""
    return call.continued(cache) if call is not None else None


def next_positions(state: Continued, length: int) -> Tensor:
    """``[1, B, length]``: positions of the tokens that follow the cache; :mod:`..runtime.continuation` has the last word."""
    at = torch.arange(state.seen, state.seen + length, device=state.offset.device)
    offset = state.offset if state.ahead is None else state.offset - state.ahead
    return (at - offset[:, None])[None]


def _grids(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call comes with pictures; placeholders without them are refused where the layout is made."""
    return any(kwargs.get(f"{modality}_grid_thw") is not None for modality in ("image", "video"))


def _continue_generate(
    family: Qwen2VL, original: Callable[..., Any], current: Callable[[], Call | None]
) -> Callable[..., Any]:
    # importing it takes seconds
    from transformers import GenerationMixin

    @functools.wraps(original)
    def positions(inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        call, cache = current(), model_kwargs.get("past_key_values")
        seen = cache.get_seq_length() if cache is not None else 0
        ids, types = model_kwargs.get("input_ids"), model_kwargs.get("mm_token_type_ids")
        if ids is None or ids.shape[1] == 0:
            ids = inputs_tensor
        if call is None or not seen:
            return original(inputs_tensor, model_kwargs)
        state = _kept(call, cache)
        if _grids(model_kwargs) and types is not None and bool(types[:, seen:].any()):
            if state is None and bool(family.visual(ids[:, :seen]).any()):
                raise UnsupportedError(
                    "This cache holds pictures that the bare model read, and transformers cannot place others behind them; "
                    "begin the conversation accelerated, or give all of it to one call."
                )
            # transformers 5.17 would go on with `rope_deltas` here
            text = GenerationMixin._prepare_position_ids_for_generation(family.model, inputs_tensor, model_kwargs)
            rest = {key: value for key, value in model_kwargs.items() if key != "input_ids"}
            vision, _ = family.inner.get_rope_index(ids, **rest)
            return torch.cat([text[None].expand(1, *vision.shape[1:]), vision])
        if state is None:
            if bool(family.visual(ids[:, :seen]).any()):
                # the cache was filled before the model was accelerated
                return original(inputs_tensor, model_kwargs)
            return GenerationMixin._prepare_position_ids_for_generation(family.model, inputs_tensor, model_kwargs)[None]
        mask = model_kwargs.get("attention_mask")
        whole = ids.shape[1] if mask is None else mask.shape[1]
        new = next_positions(state, max(whole - seen, 1))
        cached = new.new_zeros(1, new.shape[1], whole - new.shape[2])
        return torch.cat([cached, new], dim=-1).to(inputs_tensor.device)

    return positions


def _continue_forward(
    family: Qwen2VL, original: Callable[..., Any], current: Callable[[], Call | None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def positions(*args: Any, **kwargs: Any) -> Tensor | None:
        call, cache = current(), kwargs.get("past_key_values")
        ids, embeds, types = kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("mm_token_type_ids")
        if call is None or cache is None or embeds is None:
            return original(*args, **kwargs)
        length, seen, state = embeds.shape[1], cache.get_seq_length(), _kept(call, cache)
        new_types = types[:, -length:] if types is not None else None
        pictures = _grids(kwargs) and new_types is not None and bool(new_types.any())
        if not seen:
            # a conversation that begins without pictures has no use for another one's `rope_deltas`
            cache.mmaccel_text = not pictures
            return original(*args, **kwargs)
        if pictures and ids is not None and (state is not None or getattr(cache, "mmaccel_text", False)):
            mask = kwargs.pop("attention_mask", None)
            rest = {**kwargs, "mm_token_type_ids": new_types}
            del rest["input_ids"], rest["inputs_embeds"]
            rest["attention_mask"] = None if mask is None else mask[:, -length:]
            new, _ = family.inner.get_rope_index.__wrapped__(ids, **rest)
            return new + (seen - (state.offset.to(new.device)[:, None] if state is not None else 0))
        if state is not None:
            return next_positions(state, length).expand(3, -1, -1).to(embeds.device)
        return None if getattr(cache, "mmaccel_text", False) else original(*args, **kwargs)

    return positions


def _place_new_pictures(original: Callable[..., Any], current: Callable[[], Call | None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rope_index(input_ids: Tensor, mm_token_type_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        state = _kept(current(), kwargs.get("past_key_values"))
        if state is None or input_ids.shape[1] <= state.seen:
            return original(input_ids, mm_token_type_ids, *args, **kwargs)
        # only the new part: its grids are all that was given, and it starts where the cache ends
        seen, mask = state.seen, kwargs.pop("attention_mask", None)
        new, _ = original(
            input_ids[:, seen:],
            mm_token_type_ids[:, seen:],
            *args,
            attention_mask=None if mask is None else mask[:, seen:],
            **kwargs,
        )
        new = new + (seen - state.offset).to(new.device)[None, :, None]
        positions = torch.cat([new.new_zeros(3, len(input_ids), seen), new], dim=-1)
        length = torch.full((len(input_ids),), input_ids.shape[1]) if mask is None else mask.sum(-1)
        return positions, (new.amax((0, 2)) + 1 - length.to(new.device))[:, None]

    return rope_index
