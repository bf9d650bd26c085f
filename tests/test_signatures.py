"""What mmaccel takes for granted of transformers: read here, so that a new release fails loudly and not in the answers.

When one of these fails, look at what changed before changing the expectation: `mmaccel/runtime/call/hooks.py`, `attention.py`,
`kv/cache.py` and `families/` build on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import zoo
from laws.helpers import FAMILIES, THREE_AXES, generate, inputs, model, text_model
from torch import Tensor
from transformers import GenerationMixin, cache_utils, masking_utils, modeling_utils

from mmaccel.core.transformers_api import cache_in, cache_names, cache_of, too_old, untested
from mmaccel.families import families as families_of_mmaccel
from mmaccel.families import family_of
from mmaccel.kv.recurrent import states_of

families = pytest.mark.parametrize("family", FAMILIES)
#: the name by which models take their cache
CACHE = cache_names()[0]
OLD = int(transformers.__version__.split(".")[1]) < 23
#: whether generate leaves encoding to the first forward
LATE = int(transformers.__version__.split(".")[1]) < 20


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_version_is_one_that_was_tried() -> None:
    assert (too_old(), untested()) == (None, None), "a release that mmaccel was not tried on"


# -------------------------------------------------------------------------------------------------------------- cache

LAYER = {
    "update": ["key_states", "value_states", "args", "kwargs"],
    "lazy_initialization": ["key_states", "value_states"],
    "get_seq_length": [],
    "get_mask_sizes": ["query_length"],
    "crop": ["tokens_to_remove"],
    "reorder_cache": ["beam_idx"],
    "batch_repeat_interleave": ["repeats"],
    "batch_select_indices": ["indices"],
    "reset": [],
}
#: all that transformers may ask of a layer; a new name here is one that a compressed layer does not know
KNOWN = {
    *LAYER,
    "is_compileable",
    "is_croppable",
    "is_sliding",
    "supports_early_init",
    "get_max_length",
    "get_max_cache_shape",
    "offload",
    "prefetch",
}


@pytest.mark.parametrize("name", LAYER)
def test_methods_of_a_cache_layer(name: str) -> None:
    assert parameters(getattr(cache_utils.DynamicLayer, name)) == LAYER[name]


def test_a_cache_layer_has_no_unknown_methods() -> None:
    for cls in (cache_utils.CacheLayerMixin, cache_utils.DynamicLayer):
        public = {name for name in vars(cls) if not name.startswith("_")}
        assert public <= KNOWN, f"{cls.__name__} has {public - KNOWN}"
    assert issubclass(cache_utils.DynamicSlidingWindowLayer, cache_utils.DynamicLayer)
    assert not issubclass(cache_utils.StaticLayer, cache_utils.DynamicLayer)


def test_attributes_of_a_cache_layer() -> None:
    """``adopt`` takes these over; ``CompressedLayer`` sets them."""
    layer = cache_utils.DynamicLayer()
    assert layer.keys is None and layer.values is None and not layer.is_initialized
    key = torch.zeros(2, 3, 4, 5)
    stored = layer.update(key, key)
    assert stored[0] is layer.keys and stored[1] is layer.values and layer.keys.shape == key.shape
    assert layer.is_initialized and layer.device == key.device
    assert layer.get_seq_length() == 4 and layer.get_mask_sizes(3) == (7, 0)
    layer.crop(-1)
    assert layer.get_seq_length() == 3
    # a window keeps one key less than it is wide, and says how many it has seen
    windowed = cache_utils.DynamicSlidingWindowLayer(sliding_window=3)
    windowed.update(key, key)
    assert windowed.get_seq_length() == 4 and windowed.keys.shape[2] == 2


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("update", ["key_states", "value_states", "layer_idx", "args", "kwargs"]),
        ("get_seq_length", ["layer_idx"]),
        ("get_mask_sizes", ["query_length", "layer_idx"]),
        ("crop", ["tokens_to_remove"]),
        ("reorder_cache", ["beam_idx"]),
        ("batch_repeat_interleave", ["repeats"]),
        ("batch_select_indices", ["indices"]),
        ("reset", []),
    ],
)
def test_methods_of_a_cache(name: str, wanted: list[str]) -> None:
    assert parameters(getattr(cache_utils.Cache, name)) == wanted


def test_attributes_of_a_cache() -> None:
    kept = cache_utils.DynamicCache()
    assert set(vars(kept)) == {"layers", "layer_class_to_replicate", "offloading"}
    assert isinstance(kept.layers, list) and kept.offloading is False
    assert {"config", "offloading"} <= set(parameters(cache_utils.DynamicCache.__init__))


# ----------------------------------------------------------------------------------------------- attention and masks


def test_attention_interfaces() -> None:
    """Functions are registered for the process and found by name, through these two."""
    assert parameters(modeling_utils.AttentionInterface.register) in (["key", "value"], ["cls", "key", "value"])
    assert parameters(masking_utils.AttentionMaskInterface.register) in (["key", "value"], ["cls", "key", "value"])
    assert {"sdpa", "flash_attention_2", "flash_attention_3"} <= set(
        modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()
    )
    masks = set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())
    assert {"sdpa", "eager", "flash_attention_2", "flash_attention_3"} <= masks
    assert "attn_implementation" in parameters(modeling_utils.PreTrainedModel.set_attn_implementation)


def test_attention_functions() -> None:
    from transformers.integrations import flash_attention, sdpa_attention

    first = ["module", "query", "key", "value", "attention_mask"]
    for function in (sdpa_attention.sdpa_attention_forward, flash_attention.flash_attention_forward):
        assert parameters(function)[:5] == first and "scaling" in parameters(function)
    names = set(parameters(flash_attention.flash_attention_forward))
    assert {"sliding_window", "is_causal", "dropout"} <= names
    # it looks its kernels up by the name in the module's config, which the proxy in attention.py stands in for
    assert "module.config._attn_implementation" in inspect.getsource(flash_attention.flash_attention_forward)
    assert "attention_mask" in parameters(flash_attention._flash_attention_forward)
    kept = inspect.getsource(sdpa_attention.sdpa_attention_forward)
    assert "is_causal" in kept, "with no mask and q > 1 sdpa is causal by itself"


@families
def test_attention_is_called_as_expected(family: str) -> None:
    """Text attention: post-RoPE queries and keys, after the cache's update, with ``layer_idx`` on the module."""
    tiny, calls = zoo.model(family), []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        calls.append((module.layer_idx, query.shape, key.shape, set(kwargs)))
        return modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    modeling_utils.AttentionInterface.register("test_spy", spy)
    masking_utils.AttentionMaskInterface.register("test_spy", masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    tiny.set_attn_implementation({"text_config": "test_spy"})
    assert tiny.config.text_config._attn_implementation == "test_spy"
    # by choice: towers that attend by code of their own
    own = family in ("got_ocr2", "apertus1p5")
    assert tiny.config.vision_config._attn_implementation == ("eager" if own else "sdpa")
    feed = inputs(family)
    length = feed["input_ids"].shape[1]
    generate(tiny, feed, new=2)
    adapter = family_of(tiny)
    layers = list(adapter.attending)
    assert [call[0] for call in calls] == layers * 2
    for place, (number, query, key, _) in enumerate(calls):
        heads, size = adapter.heads_in(number)
        asking = 4 if adapter.query_heads else query[1]
        if adapter.latent:  # one head is stored, of which keys of all heads are made
            heads, size = asking, query[-1]
        step = place >= len(layers)
        assert query == (1, asking, 1 if step else length, size) and key == (1, heads, length + step, size)
        assert asking % heads == 0
    assert all({"scaling", "dropout"} <= names for *_, names in calls)
    module = family_of(tiny).attention_in(layers[0])
    assert callable(getattr(inspect.getmodule(type(module)), "eager_attention_forward", None))


@pytest.mark.parametrize("family", [name for name in FAMILIES if families_of_mmaccel()[name].closed is None])
def test_tower_attention_is_called_as_expected(family: str) -> None:
    """Tower attention comes through the interface, ``[N, heads, tokens, d]``, from the modules the adapter names."""
    tiny, calls = zoo.model(family), []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        calls.append((id(module), query.shape[1]))
        return modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    modeling_utils.AttentionInterface.register("test_spy", spy)
    masking_utils.AttentionMaskInterface.register("test_spy", masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    tiny.set_attn_implementation({"vision_config": "test_spy"})
    generate(tiny, inputs(family), new=1)
    adapter = family_of(tiny)
    known = {id(adapter.attention_of(x)) for tower in adapter.towers() for x in adapter.tower_layers(tower)}
    assert {name for name, _ in calls} <= known and len({name for name, _ in calls}) == 4
    assert {heads for _, heads in calls} == {2}


# --------------------------------------------------------------------------------------------------------- generation


def test_generate() -> None:
    names = parameters(GenerationMixin.generate)
    assert names[:2] == ["inputs", "generation_config"] and names[-1] == "kwargs"
    assert parameters(GenerationMixin._prepare_position_ids_for_generation) == ["inputs_tensor", "model_kwargs"]
    config = transformers.GenerationConfig()
    assert config.cache_implementation is None
    assert getattr(config, "prefill_chunk_size", None) is None
    with pytest.raises(ValueError, match="nonsense"):
        transformers.GenerationConfig(cache_implementation="nonsense")


@families
def test_generate_encodes_first(family: str) -> None:
    """5.23 encodes pictures before the first forward, 5.17 inside of it: the adapter's wrapper sees both."""
    tiny, order = zoo.model(family), []
    original = tiny.model.get_image_features

    def features(*args: Any, **kwargs: Any) -> Any:
        order.append("encode")
        out = original(*args, **kwargs)
        assert all(isinstance(part, Tensor) for part in family_of(tiny).features(out))
        return out

    features.__wrapped__ = original  # type: ignore[attr-defined]
    tiny.model.get_image_features = features
    tiny.model.register_forward_pre_hook(lambda *_: order.append("inner"))
    text_model(tiny).register_forward_pre_hook(lambda *_: order.append("text"))
    generate(tiny, inputs(family), new=2)
    assert order == ["inner", "encode", "text", "inner", "text"] if LATE else ["encode", *["inner", "text"] * 2]


FEATURES = {
    "llava": ["pixel_values"],
    "vipllava": ["pixel_values"],
    "aya_vision": ["pixel_values"],
    "cohere2_vision": ["pixel_values"],
    "gemma3": ["pixel_values"],
    "paligemma": ["pixel_values"],
    "gemma4": ["pixel_values", "image_position_ids"],
    "gemma4_unified": ["pixel_values", "image_position_ids"],
    "got_ocr2": ["pixel_values"],
    "perception_lm": ["pixel_values"],
    "granite_docling": ["pixel_values", "pixel_attention_mask", "tile_fine_mask"],
    "granite4_vision": ["pixel_values", "image_sizes"],
    "ovis2": ["pixel_values"],
    "mistral3": ["pixel_values", "image_sizes"],
    "pixtral": ["pixel_values", "image_sizes"],
    "lighton_ocr": ["pixel_values", "image_sizes"],
    "deepseek_ocr2": ["pixel_values", "pixel_values_local", "num_local_patches"],
    "paddleocr_vl": ["pixel_values", "image_grid_thw"],
    "hunyuan_vl": ["pixel_values", "image_grid_thw"],
    "video_llama_3": ["pixel_values", "image_grid_thw", "image_merge_sizes"],
    "fast_vlm": ["pixel_values"],
    "deepseek_vl": ["pixel_values"],
    "qianfan_ocr": ["pixel_values"],
    "exaone4_5": ["pixel_values", "image_grid_thw"],
    "hyperclovax_vision_v2": ["pixel_values", "image_grid_thw"],
    "apertus1p5": ["pixel_values", "image_sizes"],
    "cohere_compass": ["pixel_values", "image_grid_thw"],
    "kimi_k25": ["pixel_values", "image_grid_thw"],
    "dots3_note": ["pixel_values", "image_grid_thw"],
    "mistral_large4": ["pixel_values", "image_sizes"],
    "step3p7": ["pixel_values", "pixel_values_local", "num_local_patches"],
    "llava_next": ["pixel_values", "image_sizes"],
    "llava_onevision": ["pixel_values", "image_sizes", "batch_num_images", "vision_aspect_ratio"],
    "llava_next_video": ["pixel_values", "image_sizes"],
    "video_llava": ["pixel_values_images"],
    "qwen2_vl": ["pixel_values", "image_grid_thw"],
    "qwen2_5_vl": ["pixel_values", "image_grid_thw"],
    "qwen3_5": ["pixel_values", "image_grid_thw"],
    "glm4v": ["pixel_values", "image_grid_thw"],
    "glm46v": ["pixel_values", "image_grid_thw"],
    "glm4v_moe": ["pixel_values", "image_grid_thw"],
    "qwen2_5_omni": ["pixel_values", "image_grid_thw"],
    "qwen3_omni_moe": ["pixel_values", "image_grid_thw"],
    "glm_ocr": ["pixel_values", "image_grid_thw"],
    "qwen3_5_moe": ["pixel_values", "image_grid_thw"],
    "qwen3_vl": ["pixel_values", "image_grid_thw"],
    "ernie4_5_vl_moe": ["pixel_values", "image_grid_thw"],
    "cosmos3_edge": ["pixel_values", "image_grid_thw"],
    "cosmos3_omni": ["pixel_values", "image_grid_thw"],
    "qwen3_vl_moe": ["pixel_values", "image_grid_thw"],
    "internvl": ["pixel_values"],
    "smolvlm": ["pixel_values", "pixel_attention_mask"],
    "idefics3": ["pixel_values", "pixel_attention_mask"],
    "molmo2": ["pixel_values", "image_token_pooling", "image_grids"],
    "lfm3_vl": ["pixel_values", "image_grid_thw"],
    "lfm2_vl": ["pixel_values", "spatial_shapes", "pixel_attention_mask"],
    "minicpmv4_6": ["pixel_values", "target_sizes", "downsample_mode"],
    "minicpmv4_7": ["pixel_values", "target_sizes", "downsample_mode"],
    "minicpm_ocr": ["pixel_values", "target_sizes", "downsample_mode"],
}


@families
def test_get_features(family: str) -> None:
    """The arguments from which layouts are read."""
    inner = model(family).model
    taken = set(parameters(inner.get_image_features))
    assert set(FEATURES[family]) <= taken | ({"image_sizes"} if OLD and "kwargs" in taken else set())
    if "video" in family_of(model(family)).modalities:
        if family == "perception_lm":
            # clips go through the function for pictures
            assert not hasattr(inner, "get_video_features")
            return
        names = set(parameters(inner.get_video_features))
        assert {"pixel_values_videos"} <= names or (OLD and "pixel_values" in names)
        known = families_of_mmaccel()[family]
        assert family not in THREE_AXES or set(known.sized_by) & names


# ------------------------------------------------------------------------------------------------------- the text model


@families
def test_the_door(family: str) -> None:
    """Every family ends in one call of its text model by keyword, and every layer in one by position."""
    tiny, door, layers, inner = zoo.model(family), [], [], []
    above = families_of_mmaccel()[family].masks_above
    tiny.model.register_forward_pre_hook(lambda _, args, kwargs: inner.append((args, kwargs)), with_kwargs=True)
    text = text_model(tiny)
    text.register_forward_pre_hook(lambda _, args, kwargs: door.append((args, kwargs)), with_kwargs=True)
    text.layers[1].register_forward_pre_hook(lambda _, args, kwargs: layers.append((args, kwargs)), with_kwargs=True)
    feed = inputs(family, "uneven")
    length = feed["input_ids"].shape[1]
    generate(tiny, feed, new=2)
    assert len(door) == len(layers) == len(inner) == 2
    for (args, kwargs), width in zip(door, (length, 1), strict=True):
        assert args == () and kwargs["inputs_embeds"].shape[:2] == (2, width)
        assert {"inputs_embeds", "position_ids", "attention_mask", CACHE} <= set(kwargs)
        masks = kwargs["attention_mask"]
        assert kwargs.get("input_ids") is None
        if isinstance(masks, dict):
            assert above and set(masks) == {"full_attention", "sliding_attention"}
        else:
            assert masks.dim() == (4 if above else 2)
        if family != "hyperclovax_vision_v2":  # whose text model counts by itself
            assert kwargs["position_ids"].shape[-1] == width
        assert isinstance(kwargs[CACHE], cache_utils.DynamicCache)
    for args, kwargs in layers:
        assert isinstance(args[0] if args else kwargs["hidden_states"], Tensor)
        assert {"attention_mask", "position_embeddings", CACHE} <= set(kwargs)
        assert all(isinstance(part, Tensor) for part in kwargs["position_embeddings"])
    for args, kwargs in inner:
        ids = args[0] if args else kwargs["input_ids"]
        assert isinstance(ids, Tensor) and CACHE in kwargs
    if family.startswith(("qwen3_vl", "qwen3_omni", "cosmos3_omni", "cohere_compass", "granite_docling")):
        first, second = (kwargs for _, kwargs in door)
        assert first["visual_pos_masks"].shape == (2, length) and len(first["deepstack_visual_embeds"]) == 3
        assert second.get("visual_pos_masks") is None and second.get("deepstack_visual_embeds") is None
    if family == "granite4_vision":
        first, second = (kwargs for _, kwargs in door)
        assert first["vision_mask"].shape == (2, length, 1) and list(first["deepstack_features"]) == [0, 1, 2]
        assert second.get("vision_mask") is None and second.get("deepstack_features") is None
    assert text.config is tiny.config.text_config and len(text.layers) == text.config.num_hidden_layers
    assert "labels" in parameters(tiny.forward)
    # these make all logits
    assert ("logits_to_keep" in parameters(tiny.forward)) == (
        family not in ("video_llama_3", "qwen2_5_omni", "qwen3_omni_moe", "minicpmv4_6", "minicpm_ocr")
    )
    output = text(inputs_embeds=door[0][1]["inputs_embeds"])
    # that of Granite leaves it to its caller to make a cache
    assert output.last_hidden_state is not None and (CACHE in output or family == "granite4_vision")


@families
def test_logits_are_made_of_the_last_states(family: str) -> None:
    tiny, feed = zoo.model(family), inputs(family)
    states = tiny.model(**feed).last_hidden_state
    assert torch.equal(family_of(tiny).logits(states), tiny(**feed).logits)


@families
def test_layers_with_a_state(family: str) -> None:
    """They are called by keyword, the net alone changes with padding, and states lie where the cache says."""
    tiny, called = zoo.model(family), []
    known = family_of(tiny)
    arguments = {"hidden_states", "attention_mask"} if known.stateful else set()
    for number in known.recurrent:
        net = known.net_in(number)
        assert arguments <= set(parameters(net.forward))
        net.register_forward_pre_hook(lambda _, args, kwargs: called.append((args, kwargs)), with_kwargs=True)
    cache = cache_of(generate(tiny, inputs(family, "uneven"), new=2))
    assert len(called) == 2 * len(known.recurrent) and known.stateful == bool(called)
    assert all(args == () and arguments <= set(kwargs) and cache_in(kwargs) is cache for args, kwargs in called)
    for number in known.recurrent:
        layer = cache.layers[number]
        assert isinstance(layer, cache_utils.LinearAttentionLayer) and layer.has_previous_state == {0: True}
        assert [len(x) for x in states_of(layer)] == [2] * (1 if known.net_name == "conv" else 2)


@families
def test_the_door_of_a_forward_without_a_cache(family: str) -> None:
    tiny, door = zoo.model(family), []
    text = text_model(tiny)
    text.register_forward_pre_hook(lambda _, args, kwargs: door.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        tiny(**inputs(family), use_cache=False)
    ((args, kwargs),) = door
    assert args == () and cache_in(kwargs) is None and kwargs["use_cache"] is False


# ---------------------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize("family", THREE_AXES)
def test_positions_in_three_axes(family: str) -> None:
    """The three functions that are wrapped, called as the wrappers expect it."""
    tiny, types = zoo.model(family), {"mm_token_type_ids"}
    omni = family.startswith("qwen") and "_omni" in family
    if omni:  # what it tells apart by ids alone
        types = set()
    inner, calls = tiny.model, {}
    for target, name in (
        (inner, "compute_3d_position_ids"),
        (inner, "get_rope_index"),
        (tiny, "_prepare_position_ids_for_generation"),
    ):
        original = getattr(target, name)

        def spy(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            # generate takes the grids out of this dict later
            seen = tuple(dict(arg) if isinstance(arg, dict) else arg for arg in args)
            calls.setdefault(name, []).append((seen, kwargs))
            return original(*args, **kwargs)

        setattr(target, name, spy)
    with torch.no_grad():
        tiny(**inputs(family))
    ((args, kwargs),) = calls.pop("compute_3d_position_ids")
    assert args == ()
    assert {"input_ids", "attention_mask", CACHE} | types <= set(kwargs)
    # HunyuanVL asks ids alone how long a call is
    assert "inputs_embeds" in kwargs or family == "hunyuan_vl"
    ((args, kwargs),) = calls.pop("get_rope_index")
    sizes, _ = families_of_mmaccel()[family].sized_by
    given = {sizes, "attention_mask"} | types
    assert (len(args) == 7 and not kwargs) if omni else len(args) == 1 and given <= set(kwargs)
    generate(tiny, inputs(family), new=2)
    (((tensor, model_kwargs), kwargs),) = calls.pop("_prepare_position_ids_for_generation")
    assert isinstance(tensor, Tensor) and kwargs == {}
    assert given <= set(model_kwargs)
    if not omni:  # whose outer model has a function of its own
        ((args, kwargs),) = calls.pop("get_rope_index")
        assert len(args) == 1 and given <= set(kwargs)
    assert not calls, "positions are given in generate, so the forward computes none"
    assert inner.rope_deltas is not None
    positions, deltas = inner.get_rope_index(
        inputs(family)["input_ids"],
        **{
            key: value for key, value in inputs(family).items() if key in ("mm_token_type_ids", sizes, "attention_mask")
        },
    )
    axes = family_of(tiny).axes
    assert positions.shape == (axes, 1, inputs(family)["input_ids"].shape[1]) and deltas.shape == (1, 1)


def test_best_resolution_comes_from_transformers() -> None:
    from transformers.image_processing_utils import select_best_resolution

    assert tuple(select_best_resolution((48, 60), [[28, 56], [56, 28], [56, 56]])) == (56, 56)
