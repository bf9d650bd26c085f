"""Reuse between the frames of a clip inside the vision tower.

Reference frames run through a layer's own forward; their keys, values, and the outputs of attention and MLP are kept while the
layer runs. Of the other frames all keys are computed, and a method chooses the tokens of which the rest is computed: these
attend to all tokens of their frame (in windows, where the layer has them); the values of the others are the reference's. The
layer's own norms, projections and MLP compute the chosen tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.precision import without_autocast
from ...errors import MmaccelError, UnsupportedError
from ...families.base import clip_frames
from ...families.tower import Towers
from ...method import ReuseMethod
from ...method.refused import described, refuse
from ...method.results import check_slots, check_tensor
from ..call.call import encoding
from ..call.compact_tokens import Subsequence
from ..call.plan import ModelPlan, record
from ..call.vision_output import VisionOutput


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames of a run, whose tokens are counted in one flat sequence.

    count : of frames. whole : the tokens of those that are computed whole.
    groups : of each size of other frames their tokens ``[N, T]`` long, and the slots of their references' in ``whole``.
    """

    count: int
    whole: Subsequence
    groups: Sequence[tuple[Tensor, Tensor]]

    @staticmethod
    def of(method: ReuseMethod, clips: Sequence[Sequence[int]], device: torch.device) -> Frames | None:
        """The frames of ``clips``, given the tokens of every frame of each; None if all frames are computed whole."""
        whole: list[Tensor] = []
        others: dict[int, list[tuple[Tensor, Tensor]]] = {}
        start = kept = 0
        for sizes in clips:
            references, places = method.references(len(sizes)), dict[int, Tensor]()
            numbers = isinstance(references, Sequence) and all(type(at) is int for at in references)
            if not numbers or len(references) != len(sizes):
                refuse(method, "references()", described(references), f"a list of {len(sizes)} frames, by number")
            if any(not 0 <= at <= frame or references[at] != at for frame, at in enumerate(references)):
                raise MmaccelError(
                    f"Method {method.name!r} must refer every frame to itself or to an earlier one that refers to itself."
                )
            for frame, (size, at) in enumerate(zip(sizes, references, strict=True)):
                tokens = torch.arange(start, start + size)
                start += size
                if at == frame:
                    places[frame] = torch.arange(kept, kept + size)
                    whole.append(tokens)
                    kept += size
                else:
                    others.setdefault(size, []).append((tokens, places[at]))
        if not others:
            return None
        groups = [
            (torch.stack([tokens for tokens, _ in pairs]).to(device), torch.stack([at for _, at in pairs]).to(device))
            for pairs in others.values()
        ]
        return Frames(sum(map(len, clips)), Subsequence(torch.cat(whole).to(device)), groups)


class LayerParts:
    """A pre-norm layer, part by part; its attention has one projection for queries, keys and values, or one for each. Layers
    that are built in another way are refused."""

    def __init__(self, towers: Towers, layer: nn.Module) -> None:
        self.attention: Any = towers.attention_of(layer)
        self.first_norm, (self.second_norm, self.mlp) = towers.first_norm(layer), towers.second_half(layer)
        self.fused: Any = getattr(self.attention, "qkv", None)
        named = (("q_proj", "k_proj", "v_proj", "out_proj"), ("q", "k", "v", "proj"))
        split = next((names for names in named if all(hasattr(self.attention, name) for name in names)), None)
        norms = [getattr(self.attention, name, None) for name in ("q_norm", "k_norm")]
        self.norms: list[Any] = [] if norms[0] is None else norms
        by_head = all(len(norm.weight) == getattr(self.attention, "head_dim", 0) for norm in self.norms)
        if (self.fused is None and split is None) or not by_head:
            raise UnsupportedError(
                f"The layers of the vision tower of {towers.name} cannot be taken apart, so nothing is reused between frames; "
                "use 'stc-pruner' or another method behind the tower."
            )
        self.split: list[Any] = [] if split is None else [getattr(self.attention, name) for name in split[:3]]
        self.out: Any = self.attention.proj if split is None else getattr(self.attention, split[3])

    @contextmanager
    def watched(self) -> Iterator[dict[nn.Module, Tensor]]:
        """The outputs ``[tokens, C]`` of its attention, its MLP and the projections of keys and values, by module."""
        projections = [self.fused] if self.fused is not None else self.split[1:]
        seen: dict[nn.Module, Tensor] = {}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen[module] = hidden.reshape(-1, hidden.shape[-1])

        with ExitStack() as held:
            for module in (*projections, self.attention, self.mlp):
                held.callback(module.register_forward_hook(note).remove)
            yield seen

    def stored(self, seen: dict[nn.Module, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values among the outputs that :meth:`watched` has ``seen``."""
        if self.fused is None:
            return seen[self.split[1]], seen[self.split[2]]
        _, keys, values = seen[self.fused].split(self.widths(seen[self.fused].shape[-1]), dim=-1)
        return keys, values

    def widths(self, whole: int) -> list[int]:
        """Channels of queries, keys and values of a fused projection to ``whole``; queries may share keys."""
        heads = self.attention.num_heads
        shared = getattr(self.attention, "num_key_value_heads", heads)
        each = whole // (heads + 2 * shared)
        return [heads * each, shared * each, shared * each]

    def project(self, hidden: Tensor, part: int) -> Tensor:
        """Queries (0), keys (1) or values (2) of ``hidden [N, T, C]``."""
        if self.fused is None:
            projected: Tensor = self.split[part](hidden)
        elif type(self.fused) is nn.Linear and "forward" not in vars(self.fused):
            widths, bias = self.widths(len(self.fused.weight)), self.fused.bias
            weight = self.fused.weight.split(widths)[part]
            projected = functional.linear(hidden, weight, None if bias is None else bias.split(widths)[part])
        else:
            # packed, adapted, or loaded when it is called: nothing is known of its weight
            whole = self.fused(hidden)
            projected = whole.split(self.widths(whole.shape[-1]), dim=-1)[part]
        return projected

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        rotary: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        """``query [N, u, C]``, ``key`` and ``value [N, T, C]`` -> ``[N, u, C]``; ``mask [N, 1, u, T]`` bool. ``rotary``:
        cosines and sines of the positions of queries and keys."""
        head = query.shape[-1] // self.attention.num_heads
        query, key, value = (x.unflatten(-1, (-1, head)) for x in (query, key, value))
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        if rotary is not None:
            query, key = _rotated(query, *rotary[0]), _rotated(key, *rotary[1])
        groups = query.shape[2] // key.shape[2]
        key, value = (x if groups == 1 else x.repeat_interleave(groups, 2) for x in (key, value))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected


class _Reused:
    """The frames of the running tower, if some take parts of others; None where all are computed whole."""

    frames: Frames | None = None


class FrameReuse:
    """Reuse in the towers of one model: ``wrap`` replaces the forward of every layer such that it can be undone."""

    def __init__(self, plan: ModelPlan, wrap: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
        self.plan, self.family = plan, plan.family
        for tower in self.family.towers():
            for number, layer in enumerate(self.family.tower_layers(tower)):
                wrap(layer, "forward", functools.partial(self._forward, number, LayerParts(self.family, layer)))

    def _forward(self, number: int, layer: LayerParts, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if (running := encoding(self.plan)) is None or (stage := running[0].plan.reuse) is None:
                return original(*args, **kwargs)
            call, encoded = running
            reuse = call.state(_Reused)
            hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
            if number == 0:
                reuse.frames = Frames.of(stage.method, self._clips(encoded, hidden), hidden.device)
            if reuse.frames is None:
                fresh, output = hidden[..., 0].numel(), original(hidden, *rest, **kwargs)
            else:
                whole = lambda first, **given: original(first, *rest, **given)  # noqa: E731
                fresh, output = reuse_layer(stage.method, layer, whole, reuse.frames, hidden, kwargs)
            if number == 0:
                record(call.stats, stage, hidden[..., 0].numel(), None, fresh)
            return output

        return forward

    def _clips(self, encoded: VisionOutput, hidden: Tensor) -> list[list[int]]:
        """Tokens of every frame of every clip in the input of the first layer; none where pictures are encoded."""
        if encoded.modality != "video":
            return []
        packed = self.family.frames(encoded)
        if packed is not None:
            return [[h * w for h, w in frames] for frames in packed]
        clips, frames = clip_frames(encoded)
        return [[hidden.shape[1]] * frames] * clips if clips * frames == len(hidden) else []


def reuse_layer(
    method: ReuseMethod,
    layer: LayerParts,
    whole: Callable[..., Any],
    frames: Frames,
    hidden: Tensor,
    kwargs: dict[str, Any],
) -> tuple[int, Any]:
    """Number of tokens that a layer computes of ``hidden [tiles, T, C]`` or ``[S, C]``, and its output for all of them."""
    flat = hidden.flatten(0, -2)
    first, given = flat[frames.whole.place], dict(kwargs)
    rotary: Any = kwargs.get("position_embeddings")
    if hidden.dim() == 3:
        first = first.view(-1, *hidden.shape[1:])
    else:
        given |= frames.whole.arguments(kwargs)
    with layer.watched() as seen:
        output = whole(first, **given)
    computed = output[0] if isinstance(output, tuple) else output
    keys, values = layer.stored(seen)
    result, fresh = torch.empty_like(flat), len(frames.whole.place)
    result[frames.whole.place] = computed.reshape(-1, computed.shape[-1])
    window = _windows(frames, kwargs.get("cu_seqlens"), flat)
    for places, at in frames.groups:
        x = flat[places]
        normed = layer.first_norm(x)
        key = layer.project(normed, 1)
        with without_autocast(key.device):
            chosen = method.recompute(key.float(), keys[at].float())
        chosen = check_tensor(method, "recompute()", chosen, "integer", (len(key), None), key)
        check_slots(method, "recompute()", chosen, key.shape[1], rising=True)
        fresh += chosen.numel()
        take, put = functools.partial(_take, chosen), functools.partial(_put, chosen)
        mine, value = take(normed), values[at]
        turned = None if rotary is None else [(take(r[places]), r[places]) for r in rotary]
        own = None if window is None else window[places]
        added = layer.attend(
            layer.project(mine, 0),
            key,
            put(value, layer.project(mine, 2)),
            None if own is None else (own.gather(1, chosen)[:, :, None] == own[:, None])[:, None],
            None if turned is None else ((turned[0][0], turned[1][0]), (turned[0][1], turned[1][1])),
        )
        x = x + put(seen[layer.attention][at], added)
        result[places] = x + put(seen[layer.mlp][at], layer.mlp(layer.second_norm(take(x))))
    shaped = result.view(hidden.shape)
    return fresh, (shaped, *output[1:]) if isinstance(output, tuple) else shaped


def _windows(frames: Frames, bounds: Tensor | None, flat: Tensor) -> Tensor | None:
    """``[S]``: the window of each token; None where tokens attend to their whole frame."""
    if bounds is None or len(bounds) == frames.count + 1:
        return None
    return torch.searchsorted(bounds, torch.arange(len(flat), device=flat.device, dtype=bounds.dtype), right=True)


def _take(chosen: Tensor, x: Tensor) -> Tensor:
    """``x [N, T, ...]`` at ``chosen [N, u]``."""
    return x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))


def _put(chosen: Tensor, x: Tensor, values: Tensor) -> Tensor:
    """``x [N, T, C]`` with ``values [N, u, C]`` at ``chosen [N, u]``."""
    return x.scatter(1, chosen[..., None].expand_as(values), values.to(x.dtype))


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``x [N, T, H, d]`` turned by its position, ``cosine`` and ``sine [N, T, d]``."""
    turned = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)
    return (x.float() * cosine[:, :, None].float() + turned.float() * sine[:, :, None].float()).to(x.dtype)
