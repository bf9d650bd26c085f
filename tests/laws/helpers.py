"""What the laws share: tiny models that are built once, inputs, methods with a fixed choice, and the hiding oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import zoo
from laws.nets import chosen_of, run_over, show, stub
from laws.oracle import blocks, both_ways
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import mmaccel
from mmaccel.core.reduction import Reduction
from mmaccel.families import families, family_of
from mmaccel.families.grids import PackedGrids
from mmaccel.families.mrope import ThreeAxes
from mmaccel.method import KeyBatch, LayerMethod, Policy, ProjectorMethod, TokenBatch
from mmaccel.runtime.build import plan_model

torch.set_num_threads(1)

FAMILIES = zoo.FAMILIES
#: those whose towers pack pictures of any size, and can be looked into
PACKED = tuple(
    name for name in FAMILIES if issubclass(families()[name], PackedGrids) and families()[name].closed is None
)
#: those with positions in three axes
THREE_AXES = tuple(name for name in FAMILIES if issubclass(families()[name], ThreeAxes))
#: packed towers that are given patches row by row
RASTER = ("paddleocr_vl", "hunyuan_vl")  # by choice: said anew, beside the adapters
#: one representative of each mechanism, where all of them would be a slow test
SHORT = ("llava", "llava_next", "qwen2_5_vl", "qwen3_vl")
TOLERANCE = 2e-5

Inputs = dict[str, Any]


# ------------------------------------------------------------------------------------------------ models and inputs


def joined(family: str, grids: Tensor, modality: str = "image") -> Tensor:
    """``[blocks, u]``: the patches of every token, mostly blocks of 2x2, in the order in which a packed tower of pictures of
    these sizes is given them; in most such families they stand one behind the other."""
    if family == "video_llama_3" and modality == "image":
        return torch.arange(int(grids.prod(1).sum()))[:, None]
    if family not in RASTER:
        return torch.arange(int(grids.prod(1).sum())).view(-1, 4)
    found, first = [], 0
    for t, h, w in grids.tolist():
        cells = torch.cartesian_prod(*(torch.arange(n) for n in (t, h // 2, w // 2)))
        corner = first + cells[:, 0] * h * w + 2 * cells[:, 1] * w + 2 * cells[:, 2]
        found.append(corner[:, None] + torch.tensor([0, 1, w, w + 1]))
        first += t * h * w
    return torch.cat(found)


@functools.cache
def model(family: str, seed: int = 0, **text: Any) -> Any:
    """A shared tiny model; whoever accelerates it gives it back bare (use ``accelerated``)."""
    return zoo.model(family, seed=seed, **text)


@functools.cache
def _inputs(family: str, kind: str, batch: int, seed: int) -> Inputs:
    return dict(zoo.inputs(family, kind, batch=batch, seed=seed))


def inputs(family: str, kind: str = "image", batch: int = 1, seed: int = 0) -> Inputs:
    """Inputs of ``generate``; clones, so that no test can hand a changed tensor to the next."""
    return {key: value.clone() for key, value in _inputs(family, kind, batch, seed).items()}


def ending_in_a_picture(family: str, kind: str = "image") -> Inputs:
    """A prompt whose last token is one of its picture or clip."""
    feed = inputs(family, kind)
    end = int(zoo.visual_mask(family, model(family), feed["input_ids"])[0].nonzero()[-1]) + 1
    ids = feed["input_ids"]
    return {name: x[:, :end] if x.shape[:2] == ids.shape else x for name, x in feed.items()}


def has_block(family: str, feed: Inputs) -> Tensor:
    """Which visual tokens of a prompt of pictures stand for patches, ``[n]`` bool; the others are marks."""
    visual = zoo.visual_mask(family, model(family), feed["input_ids"])
    if family != "hunyuan_vl":
        return torch.ones(int(visual.sum()), dtype=torch.bool)
    stands = []
    for _, h, w in feed["image_grid_thw"].tolist():
        rows = functional.pad(torch.ones(h // 2, w // 2), (0, 1)).flatten()
        stands.append(functional.pad(rows, (1, 1)).bool())
    return torch.cat(stands)


def on_axes(family: str, positions: Tensor) -> Tensor:
    """Positions ``[B, q]`` of text as the language model takes them: on all axes, where it has some."""
    return positions.expand(family_of(model(family)).axes, -1, -1) if family in THREE_AXES else positions


def recipe_of(name: str, family: str = "", retain: float | None = 0.3, **options: Any) -> mmaccel.Recipe:
    """The recipe of that name with a budget; a method at site ``layers`` acts where DeepStack allows it."""
    made = mmaccel.get_recipe(name)
    if retain is not None and made.primary is not None:
        made = made.override(retain=retain)
    deepstack = family_of(model(family)).deepstack if family else 0
    lone = mmaccel.get_method(made.stages[0].method) if len(made.stages) == 1 else None
    if deepstack and lone is not None and issubclass(lone, LayerMethod):
        options = {"layer": deepstack, **options}
    return made.override(**options)


def drops_at(name: str, family: str) -> int:
    """The layer at whose input :func:`recipe_of` drops its first tokens; 0 for what does not work inside the language model."""
    reader = zoo.processor(family)
    plan = plan_model(recipe_of(name, family), family_of(model(family), reader), reader, "auto")
    return min(plan.stage_at_layer, default=0)


def generate(tiny: Any, feed: Inputs, new: int = 4, **options: Any) -> Any:
    """Greedy, with the logits of every step and the cache."""
    options = {"do_sample": False, "max_new_tokens": new, **options}
    return tiny.generate(**feed, return_dict_in_generate=True, output_logits=True, **options)


def logits(out: Any) -> Tensor:
    """``[B, steps, V]``."""
    return torch.stack(out.logits, dim=1)


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; NaN and a difference of shape count as infinite."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max().nan_to_num(float("inf")))


def close(a: Tensor, b: Tensor, tolerance: float = TOLERANCE) -> None:
    """Assert that logits agree."""
    assert gap(a, b) < tolerance, f"differs by {gap(a, b):.2e} (shapes {tuple(a.shape)} and {tuple(b.shape)})"


def follow(first: Inputs, out: Any, second: Inputs) -> tuple[Inputs, Inputs]:
    """A second turn behind a first: (what to pass with the kept cache, what a single call on all of it takes).

    The former holds the whole ids and mask but only the second turn's pixels, the latter all pixels.
    """
    answer = out.sequences[:, first["input_ids"].shape[1] :]
    kept: Inputs = {
        "input_ids": torch.cat([first["input_ids"], answer, second["input_ids"]], dim=1),
        "attention_mask": torch.cat(
            [first["attention_mask"], torch.ones_like(answer), second["attention_mask"]], dim=1
        ),
    }
    for name in {"mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"} & (set(first) | set(second)):
        parts = [feed.get(name, torch.zeros_like(feed["input_ids"])) for feed in (first, second)]
        behind = int(name == "token_type_ids" and any(map(_attends_both_ways, (first, second))))
        # two prompts that attend both ways would see each other in one call
        parts[1] = torch.ones_like(parts[1]) if behind else parts[1] * int(not _sees_all_pictures(first, second))
        kept[name] = torch.cat([parts[0], torch.full_like(answer, behind), parts[1]], dim=1)
    whole = dict(kept)
    for key in {**first, **second}:
        if key in kept:
            continue
        if key in second:
            kept[key] = second[key]
        if key == "batch_num_images":
            whole[key] = sum(feed.get(key, 0) for feed in (first, second))
        elif key.endswith("_token_pooling") and key in first and key in second:
            # these are places among the patches of a call
            more, patches = second[key], first[f"pixel_values{'_videos' * key.startswith('video')}"].shape[:2].numel()
            whole[key] = torch.cat([first[key], torch.where(more < 0, more, more + patches)])
        elif key in first and key in second:
            whole[key] = _join(first[key], second[key])
        else:
            whole[key] = first[key] if key in first else second[key]
    return kept, whole


def _attends_both_ways(feed: Inputs) -> bool:
    """Whether all of a prompt with pictures attends both ways: there its type is 0, and that of what follows 1, while elsewhere
    only pictures are of type 1."""
    types = feed.get("token_type_ids")
    return "pixel_values" in feed and types is not None and (not bool(types.any()) or bool(types[0, -1]))


def _sees_all_pictures(first: Inputs, second: Inputs) -> bool:
    """Whether pictures of both prompts would see each other in one call."""
    return all(any(name.endswith("_token_pooling") for name in feed) for feed in (first, second))


def _join(a: Tensor, b: Tensor) -> Tensor:
    """Pictures of one turn behind those of another; tiles and sides are filled up with zeros, as processors do, and patches
    that lie side by side, of which MiniCPM-V makes one row, are joined there."""
    if a.ndim == 4 and a.shape[:3] == b.shape[:3] == (1, 3, 4):
        return torch.cat([a, b], dim=-1)
    # tiles of a row, or which of them are filled up
    if (a.ndim >= 4 or a.dtype == torch.bool) and a.shape[1:] != b.shape[1:]:
        most = [max(sides) for sides in zip(a.shape[1:], b.shape[1:], strict=True)]
        a, b = (
            functional.pad(
                x, [n for side, had in zip(most[::-1], x.shape[:0:-1], strict=True) for n in (0, side - had)]
            )
            for x in (a, b)
        )
    return torch.cat([a, b])


def cache(tiny: Any = None) -> DynamicCache:
    """An empty cache of the caller's own; without a model its layers are those of nobody yet, as mmaccel takes them."""
    return DynamicCache(config=None if tiny is None else tiny.config.get_text_config())


@contextmanager
def widths(module: nn.Module) -> Iterator[list[int]]:
    """The lengths of what is fed to a text model while the block runs, before any reduction."""
    seen: list[int] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True, prepend=True
    )
    try:
        yield seen
    finally:
        hook.remove()


def text_model(tiny: Any) -> Any:
    """The language model behind the door."""
    inner = tiny.model
    return inner.text_model if hasattr(inner, "text_model") else inner.language_model


# ---------------------------------------------------------------------------------------- methods with a fixed choice


def _draw(slots: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(slots, generator=generator, dtype=torch.float64).to(device)


@mmaccel.register
@dataclass(frozen=True)
class FixedProjector(ProjectorMethod):
    """Test: the same slots of every picture, whatever is in it, one set a seed."""

    name = "test-fixed"
    unit = "picture"
    seed: int = 1

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Fixed numbers by slot."""
        draw = _draw(tokens.valid.shape[1], tokens.valid.device, self.seed)
        return Reduction.top(draw.argsort().argsort().expand_as(tokens.valid), tokens.valid, count)


@mmaccel.register
@dataclass(frozen=True)
class FixedLayer(LayerMethod):
    """Test: the same at a layer, so that the choice does not depend on what stands behind the picture."""

    name = "test-fixed-layer"
    seed: int = 1
    layer: int = 2

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Fixed numbers by slot."""
        draw = _draw(tokens.valid.shape[1], tokens.valid.device, self.seed)
        return Reduction.top(draw.argsort().argsort().expand_as(tokens.valid), tokens.valid, count)


@mmaccel.register
@dataclass(frozen=True)
class FixedPolicy(Policy):
    """Test: other keys for every head."""

    name = "test-fixed-cache"
    seed: int = 1
    window: ClassVar[int] = 1

    def score(self, keys: KeyBatch) -> Tensor:
        """Fixed numbers by head and place."""
        heads, width = keys.keys.shape[1], int(keys.index.max()) + 1
        draw = _draw(heads * width, keys.keys.device, self.seed).view(heads, width)
        return draw[:, keys.index.clamp(min=0)].transpose(0, 1).float()


# ------------------------------------------------------------------------------------------------------ hiding oracle

#: per layer ``[B, 1 or Hkv, q, K]`` bool of the forward that is being replayed
_visible: Callable[[int], Tensor] | None = None


def _hiding(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    if _visible is not None and getattr(module, "layer_idx", None) is not None:
        mask = _visible(module.layer_idx)
        mask = chosen_of(mask, kwargs.get("indices"))
        attention_mask = mask if mask.shape[1] == 1 else mask.repeat_interleave(query.shape[1] // mask.shape[1], dim=1)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("test_hiding", _hiding)
AttentionMaskInterface.register("test_hiding", lambda *args, **kwargs: stub(kwargs["config"]))


@torch.no_grad()
def hide(
    tiny: Any,
    feed: Inputs,
    visible: Callable[[int], Tensor],
    kept: Tensor | None = None,
    dropped_at: int = 0,
    **options: Any,
) -> Tensor:
    """Logits of one full forward of the bare model, ``[B, S, V]``, where each layer with attention, counted from 0, sees
    ``visible(layer)`` only.

    ``visible`` gives ``[B, 1 or Hkv, S, S]`` bool, queries by keys; causality and padding are added here. From layer
    ``dropped_at`` on those with a recurrent state run over what is ``kept [B, n]`` of the first ``n`` tokens.
    """
    global _visible
    real = feed["attention_mask"].bool()
    length = real.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    known, config, itself = family_of(tiny), tiny.config.get_text_config(), torch.eye(length, dtype=torch.bool)

    def seen(layer: int) -> Tensor:
        near = causal | blocks(feed, config)[:, None] if both_ways(config, layer) else causal
        # a padded query sees itself, so that no row is empty
        return ((near & real[:, None, None]) | itself) & (visible(known.stored_from(layer)) | itself)

    _visible = seen
    tiny.set_attn_implementation({"text_config": "test_hiding"})
    nets = {number: known.net_in(number) for number in known.recurrent}
    for number, net in nets.items():
        net.there = real.clone()
        if kept is not None and number >= dropped_at:
            net.there[:, : kept.shape[1]] &= kept
        net.forward = functools.partial(run_over, net, net.forward)
    hooks = []
    for layer in known.indexed:
        before = functools.partial(show, functools.partial(seen, layer))
        hooks.append(known.attention_in(layer).indexer.register_forward_pre_hook(before, with_kwargs=True))
    try:
        return tiny(**feed, **options).logits
    finally:
        for hook in hooks:
            hook.remove()
        tiny.set_attn_implementation({"text_config": "sdpa"})
        _visible = None
        for net in nets.values():
            del net.forward, net.there


def stored(kept: Any, length: int) -> list[Tensor]:
    """Which places below ``length`` each layer of a reduced cache still holds, ``[B, 1 or Hkv, length]`` bool."""
    out = []
    for layer in kept.mmaccel.layers:
        index = layer.index.index if layer.index.index.dim() == 3 else layer.index.index[:, None]
        there = torch.zeros(*index.shape[:2], length + 1, dtype=torch.bool)
        there.scatter_(2, index.long().masked_fill((index < 0) | (index >= length), length), True)
        out.append(there[..., :length])
    return out


# -------------------------------------------------------------------------------------------------- what a model holds

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_is_full_backward_hook",
    "_non_persistent_buffers_set",
)


def snapshot(tiny: Any) -> dict[str, Any]:
    """Everything of a model that acceleration could leave something in, as plain values that can be compared."""
    return {
        "modules": {
            name: (
                type(module),
                sorted(key for key in vars(module)),
                {
                    key: len(value) if hasattr(value, "__len__") else value
                    for key in _HOOKS
                    if (value := getattr(module, key, None)) is not None
                },
                {key: id(value) for key, value in vars(module).items() if callable(value) and key != "config"},
            )
            for name, module in tiny.named_modules()
        },
        "configs": _configs(tiny.config, "config"),
        "dict": tiny.config.to_dict(),
        "json": tiny.config.to_json_string(use_diff=False),
        "generation": tiny.generation_config.to_dict(),
        "tensors": {
            name: (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor._version, tensor.requires_grad)
            for name, tensor in [*tiny.named_parameters(), *tiny.named_buffers(), *tiny.state_dict().items()]
        },
        "training": [module.training for module in tiny.modules()],
    }


def _configs(config: Any, path: str) -> dict[str, Any]:
    """The attention implementation of every configuration below one, and the names of all its attributes."""
    found = {path: (config._attn_implementation, sorted(vars(config)))}
    for key in config.sub_configs:
        if getattr(config, key, None) is not None:
            found |= _configs(getattr(config, key), f"{path}.{key}")
    return found
