"""Run every model family, full and accelerated, on tiny models with random weights. Nothing is downloaded.

The models are built from the families' real configurations. For each one: recipe "none" must answer as the bare model does,
to the token; every stage of the recipe must keep what its budget came to, and the cache must become smaller if tokens were
dropped; and remove() must give the bare model back, to the bit. This shows that acceleration works with the installed versions
and on this device. It says nothing about how good answers are: random weights have none to give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import MmaccelError
from .shared.needs import missing
from .shared.options import Json, RecipeOptions
from .shared.text import nbytes, table, tell, working

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..recipe import Recipe

PLACE = 10
HELP = "run all model families on tiny random models, full and accelerated"
RENAMED = {"--families": "--family"}
EXAMPLES = """\
examples:
  mmaccel selfcheck
  mmaccel selfcheck --recipe pool --retain 0.1
  mmaccel selfcheck --device cuda --dtype bfloat16 --family llava qwen2_5_vl
"""

IMAGE, VIDEO, START, END = 3, 4, 5, 6
NEW_TOKENS = 8


def run(
    how: RecipeOptions,
    family: Annotated[
        list[str] | None, typer.Option(metavar="FAMILY...", help="Only these families.  [default: all]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")] = "float32",
    output: Json = None,
) -> int:
    """Check and print."""
    for name in family or ():
        if name not in TINY:
            raise MmaccelError(f"There is no family {name!r}; known are {', '.join(TINY)}.")
        if needed := missing(name):
            raise MmaccelError(f"{name} is built with {needed}, which is not installed; pip install '{needed}'.")
    left_out = [] if family else [name for name in TINY if missing(name)]
    names = family or [name for name in TINY if name not in left_out]
    with working("checking families", len(names)) as bar:
        import torch
        from transformers.utils import logging

        from ..families.load import place

        logging.set_verbosity_error()
        chosen, where, results = how.chosen(), str(place(device)), []
        for name in names:
            with torch.no_grad():
                results.append(check(name, chosen, where, getattr(torch, dtype)))
            bar.advance()
    how_run = {"recipe": chosen.name, "retain": chosen.retain, "device": where, "dtype": dtype}
    report: dict[str, Any] = {**how_run, "families": results, "left_out": left_out}
    tell(report, output, lambda: render(report))
    return 1 if any(one["problem"] for one in results) else 0


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    head = ["family", "visual tokens", "kept", "KV full", "KV kept", "none = bare", "remove() restores", "time"]
    rows = [
        [
            r["family"],
            str(r["visual_tokens"]),
            str(r["visual_tokens_kept"]),
            nbytes(r["kv_bytes_full"]),
            nbytes(r["kv_bytes"]),
            "yes" if r["none_equals_bare"] else "NO",
            "yes" if r["restored"] else "NO",
            f"{r['seconds']:.1f} s",
        ]
        for r in report["families"]
    ]
    budget = "" if report["retain"] is None else f", retain {report['retain']:g}"
    failed = [f"FAILED {r['family']}: {r['problem']}" for r in report["families"] if r["problem"]]
    return "\n".join(
        [
            f"recipe {report['recipe']}{budget}, {report['device']}, {report['dtype']}; random weights",
            "",
            table([head, *rows], numbers=(1, 2, 3, 4, 7)),
            "",
            *failed,
            *(f"{name} was left out: {missing(name)} is not installed." for name in report["left_out"]),
            f"{len(rows) - len(failed)} of {len(rows)} families pass.",
        ]
    )


def check(name: str, chosen: Recipe, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One family; ``problem`` is None if all is well."""
    import torch

    from ..accelerate import accelerate_vlm
    from ..kv.cache import cache_bytes
    from ..transformers_api import cache_of

    begin = time.perf_counter()
    torch.manual_seed(0)
    model, inputs = build(name, device, dtype)
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    bare, full = model(**inputs).logits, model.generate(**inputs, **greedy)
    # transformers leaves hooks of its own at the first call
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    accelerate_vlm(model, "none")
    none = model.generate(**inputs, **greedy)
    accelerate_vlm(model, chosen)
    out = model.generate(**inputs, **greedy)
    stats = model.mmaccel.stats()
    model.mmaccel.remove()

    restored = (
        bool(torch.equal(model(**inputs).logits, bare))
        and not hasattr(model, "mmaccel")
        and hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    )
    kv_full = cache_bytes(cache_of(full))
    same = bool(torch.equal(none.sequences, full.sequences))
    back = out.sequences[:, : inputs["input_ids"].shape[1]]
    wrong = {
        "recipe 'none' answers otherwise than the bare model": not same,
        "remove() left something behind": not restored,
        "the prompt did not come back": not torch.equal(back, inputs["input_ids"]),
        **_wrong(stats, kv_full),
    }
    return {
        "family": name,
        "visual_tokens": stats["visual_tokens"],
        "visual_tokens_kept": stats["visual_tokens_kept"],
        "kv_bytes_full": kv_full,
        "kv_bytes": stats["kv_bytes"],
        "none_equals_bare": same,
        "restored": restored,
        "seconds": time.perf_counter() - begin,
        "problem": next((problem for problem, is_so in wrong.items() if is_so), None),
    }


def _wrong(stats: Any, kv_full: int) -> dict[str, bool]:
    """What can be wrong with the figures of a call, and whether it is; ``kv_full`` are the bytes of the bare model's cache."""
    from ..method import Policy, ReadingPolicy
    from ..method.registry import get_method

    found, fewer = {}, stats["visual_tokens_kept"] < stats["visual_tokens"]
    for stage in stats["stages"]:
        cls = get_method(stage["method"])
        kept, wanted, budget = stage["tokens_kept"], stage["resolved"], cls.budget
        if issubclass(cls, ReadingPolicy) or (issubclass(cls, Policy) and cls.recall is not Policy.recall):
            wanted, budget = stage["tokens_in"], "exact"  # all keys are stored, and a part of them is read
        off = wanted is not None and (kept != wanted if budget == "exact" else kept > wanted)
        if budget in ("exact", "at_most"):
            found[f"{stage['method']} kept {kept} tokens for a budget of {wanted}"] = off
        found[f"{stage['method']} kept {kept} of {stage['tokens_in']} tokens"] = not 0 < kept <= stage["tokens_in"]
    found["tokens were dropped, and the cache did not become smaller"] = fewer and stats["kv_bytes"] >= kv_full
    return found


# ----------------------------------------------------------------------------------------------------- the tiny models


def build(name: str, device: str = "cpu", dtype: Any = None) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model of a family with random weights, and inputs for it: some text, a picture or clip, some text."""
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    from ..families import families
    from ..families.mrope import ThreeAxes

    config, token, count, pixels = TINY[name]()
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=0)
    visual = [token] * count
    # thinkers tell words from pictures by ids alone
    typed = issubclass(families()[name], ThreeAxes) and "omni" not in name
    if typed or "image_grid_thw" in pixels:
        visual = [START, *visual, END]
    ids = torch.tensor([[1, *range(10, 20), *visual, *range(20, 30)]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    if typed:
        inputs["mm_token_type_ids"] = (ids == token).long()
    dtype = dtype or torch.float32
    return model.eval().to(device, dtype), {
        key: value.to(device, dtype) if value.is_floating_point() else value.to(device) for key, value in inputs.items()
    }


def _config(kind: str, **values: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **values)


def _text(kind: str = "llama", **values: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _config(kind, **sizes, **heads, **values)


def _tower(kind: str, image: Any, patch: Any, **values: Any) -> Any:
    return _config(kind, **_TOWER, image_size=image, patch_size=patch, **values)


def _noise(*shape: int) -> Tensor:
    import torch

    return torch.rand(shape)


def _long(*values: Any) -> Tensor:
    import torch

    return torch.tensor(values)


Tiny = tuple[Any, int, int, dict[str, Any]]


def _llava(kind: str = "llava", **values: Any) -> Tiny:
    tower = _tower("clip_vision_model", 42, 7)
    config = _config(kind, vision_config=tower, text_config=_text(), image_token_index=IMAGE, **values)
    return config, IMAGE, 36, {"pixel_values": _noise(1, 3, 42, 42)}


def _fast_vlm() -> Tiny:
    stages = {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 32), "inference_mode": True}
    tower = _config("timm_wrapper", architecture="fastvit_mci0", hidden_size=64, model_args=stages)
    config = _config(
        "fast_vlm", vision_config=tower, text_config=_text("qwen2"), image_token_index=IMAGE, image_seq_length=25
    )
    return config, IMAGE, 25, {"pixel_values": _noise(1, 3, 160, 160)}


def _llava_next(kind: str = "llava_next", **values: Any) -> Tiny:
    config = _config(
        kind,
        vision_config=_tower("clip_vision_model", 28, 7),
        text_config=_text(),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[28, 56]],
        **values,
    )
    # the base image, then two tiles side by side with a newline behind every row
    return config, IMAGE, 16 + 4 * 9, {"pixel_values": _noise(1, 3, 3, 28, 28), "image_sizes": _long([28, 56])}


def _granite4_vision() -> Tiny:
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = _config(
        "granite4_vision",
        vision_config=_config("siglip_vision_model", image_size=32, patch_size=4, vision_use_head=False, **tower),
        text_config=_text("granite4_vision_text", rope_parameters=rope),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[32, 64]],
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        deepstack_layer_map=[[-2, 0], [2, 1]],
        spatial_target_layers=[2],
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 32,
            "hidden_size": 64,
            "encoder_hidden_size": 64,
            "num_attention_heads": 1,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
    )
    return config, IMAGE, 16 + 4 * 9, {"pixel_values": _noise(1, 3, 3, 32, 32), "image_sizes": _long([32, 64])}


def _llava_next_video() -> Tiny:
    config = _llava_next("llava_next_video", video_token_index=VIDEO)[0]
    return config, VIDEO, 4 * 4, {"pixel_values_videos": _noise(1, 4, 3, 28, 28)}


def _llava_onevision() -> Tiny:
    config = _config(
        "llava_onevision",
        vision_config=_tower("siglip_vision_model", 35, 7, vision_use_head=False),
        text_config=_text("qwen2"),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[35, 70]],
    )
    pixels = {"pixel_values": _noise(1, 3, 3, 35, 35), "image_sizes": _long([35, 70]), "batch_num_images": _long(1)}
    return config, IMAGE, 25 + 5 * 11, pixels


def _video_llava() -> Tiny:
    config = _config(
        "video_llava",
        vision_config=_tower("clip_vision_model", 28, 7),
        text_config=_text(),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
    )
    return config, VIDEO, 4 * 17, {"pixel_values_videos": _noise(1, 4, 3, 28, 28)}


def _qwen(
    kind: str, words: Mapping[str, Any] | None = None, quarter: bool = False, **vision: Any
) -> Callable[[], Tiny]:
    """``words``: fields of the text model, of whose heads RoPE turns a ``quarter``, or all."""

    def build() -> Tiny:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        if quarter:
            rope["partial_rotary_factor"] = 0.25
        if kind.startswith("qwen3"):
            rope["mrope_interleaved"] = True
        text = _text(f"{kind}_text", rope_parameters=rope, **(words or {}))
        sizes = {"depth": 4, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
        config = _config(
            kind,
            vision_config={**sizes, **vision},
            text_config=text.to_dict(),
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
        )
        return config, IMAGE, 4 * 6, {"pixel_values": _noise(8 * 12, 384), "image_grid_thw": _long([1, 8, 12])}

    return build


def _glm(kind: str, part: str = "glm4v", **words: Any) -> Callable[[], Tiny]:
    """``part`` begins the names of tower and text model, ``words`` are fields of the latter."""

    def build() -> Tiny:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        sizes = {"depth": 4, "num_heads": 2, "patch_size": 8, "hidden_size": 32, "out_hidden_size": 64}
        config = _config(
            kind,
            vision_config={"model_type": f"{part}_vision", "intermediate_size": 64, "image_size": 64, **sizes},
            text_config=_text(f"{part}_text", rope_parameters=rope, **words).to_dict(),
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            image_start_token_id=START,
            image_end_token_id=END,
        )
        return config, IMAGE, 4 * 6, {"pixel_values": _noise(8 * 12, 384), "image_grid_thw": _long([1, 8, 12])}

    return build


def _paddleocr_vl() -> Tiny:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = _config(
        "paddleocr_vl",
        vision_config=_tower("paddleocr_vl_vision", 64, 8).to_dict(),
        text_config=_text("paddleocr_vl_text", head_dim=16, rope_parameters=rope).to_dict(),
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return config, IMAGE, 4 * 6, {"pixel_values": _noise(8 * 12, 3, 8, 8), "image_grid_thw": _long([1, 8, 12])}


def _video_llama_3() -> Tiny:
    config = _config(
        "video_llama_3",
        vision_config=_tower("video_llama_3_vision", 48, 8).to_dict(),
        text_config=_text("qwen2").to_dict(),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    grid = {"image_grid_thw": _long([1, 6, 8]), "image_merge_sizes": _long(1)}
    return config, IMAGE, 6 * 8, {"pixel_values": _noise(6 * 8, 192), **grid}


def _thinker(name: str, words: dict[str, Any] | None = None, **vision: Any) -> Callable[[], Tiny]:
    """The thinker of Qwen-Omni, whose ears are as small."""

    def build() -> Tiny:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        sizes = {"depth": 4, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
        ears = {"num_mel_bins": 16, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2}
        config = _config(
            f"{name}_thinker",
            vision_config={**sizes, **vision},
            audio_config={**ears, "encoder_ffn_dim": 64, "output_dim": 64},
            text_config=_text(f"{name}_text", rope_parameters=rope, **(words or {})).to_dict(),
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
        )
        return config, IMAGE, 4 * 6, {"pixel_values": _noise(8 * 12, 384), "image_grid_thw": _long([1, 8, 12])}

    return build


def _aya_vision(kind: str) -> Callable[[], Tiny]:
    def build() -> Tiny:
        config = _config(
            kind,
            vision_config=_tower("siglip_vision_model", 64, 8, vision_use_head=False),
            text_config=_text("cohere2"),
            image_token_id=IMAGE,
            downsample_factor=2,
            alignment_intermediate_size=64,
        )
        return config, IMAGE, 2 * 16, {"pixel_values": _noise(2, 3, 64, 64)}

    return build


def _gemma3() -> Tiny:
    config = _config(
        "gemma3",
        vision_config=_tower("siglip_vision_model", 32, 4, vision_use_head=False),
        text_config=_text("gemma3_text", sliding_window_pattern=3),
        mm_tokens_per_image=16,
        image_token_id=IMAGE,
    )
    return config, IMAGE, 16, {"pixel_values": _noise(1, 3, 32, 32)}


def _paligemma() -> Tiny:
    config = _config(
        "paligemma",
        vision_config=_tower("siglip_vision_model", 28, 7, vision_use_head=False),
        text_config=_text("gemma", head_dim=16),
        image_token_id=IMAGE,
        projection_dim=64,
    )
    return config, IMAGE, 16, {"pixel_values": _noise(1, 3, 28, 28)}


def _gemma4_config(kind: str, vision: dict[str, Any], **words: Any) -> Any:
    text = _text(
        f"{kind}_text",
        head_dim=16,
        global_head_dim=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_bidirectional_attention="vision",
        **words,
    )
    grid = {"patch_size": 4, "pooling_kernel_size": 2}
    return _config(kind, vision_config=grid | vision, text_config=text, image_token_id=IMAGE, video_token_id=VIDEO)


def _gemma4_unified() -> Tiny:
    config = _gemma4_config("gemma4_unified", {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32})
    at = _long(*([x, y] for y in range(4) for x in range(6)))[None]
    return config, IMAGE, 4 * 6, {"pixel_values": _noise(1, 24, 192), "image_position_ids": at}


def _gemma4() -> Tiny:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = _gemma4_config(
        "gemma4", {**sizes, "num_key_value_heads": 2, "head_dim": 16}, hidden_size_per_layer_input=0
    )
    at = _long(*([x, y] for y in range(8) for x in range(12)))[None]
    return config, IMAGE, 4 * 6, {"pixel_values": _noise(1, 96, 48), "image_position_ids": at}


def _got_ocr2() -> Tiny:
    tower = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64}
    places = {"image_size": 64, "patch_size": 4, "window_size": 6, "global_attn_indexes": [1]}
    text = _text("qwen2").to_dict()
    config = _config("got_ocr2", vision_config={**tower, **places}, text_config=text, image_token_index=IMAGE)
    return config, IMAGE, 2 * 16, {"pixel_values": _noise(2, 3, 64, 64)}


def _molmo2() -> Tiny:
    tower = {**_TOWER, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = _config(
        "molmo2",
        vision_config={**tower, "image_size": [42, 42], "patch_size": 7},
        adapter_config={**tower, "vision_feature_layer": [2, 1], "text_hidden_size": 64},
        text_config=_text("molmo2_text", head_dim=16, additional_vocab_size=0, rope_parameters=rope).to_dict(),
        image_patch_id=IMAGE,
    )
    # a picture as a whole and as one crop, 2 x 2 of whose patches make a token
    blocks = _long(*range(2 * 36)).view(2, 3, 2, 3, 2).transpose(2, 3).reshape(-1, 4)
    pixels = {"pixel_values": _noise(2, 36, 147), "image_token_pooling": blocks, "image_grids": _long([3, 3, 3, 3])}
    return config, IMAGE, 2 * 9, pixels


def _perception_lm() -> Tiny:
    sizes = {
        "img_size": (32, 32),
        "patch_size": 4,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 2,
        "ref_feat_shape": (8, 8),
    }
    tower = _config("timm_wrapper", architecture="vit_pe_core_tiny_patch16_384", do_pooling=False, model_args=sizes)
    config = _config(
        "perception_lm",
        vision_config=tower,
        text_config=_text(),
        projector_pooling_ratio=2,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return config, VIDEO, 4 * 16, {"pixel_values_videos": _noise(1, 4, 3, 32, 32)}


def _internvl() -> Tiny:
    config = _config(
        "internvl",
        vision_config=_tower("internvl_vision", [64, 64], [8, 8]),
        text_config=_text("qwen2"),
        image_token_id=IMAGE,
        image_seq_length=16,
        downsample_ratio=0.5,
    )
    return config, IMAGE, 2 * 16, {"pixel_values": _noise(2, 3, 64, 64)}


def _deepseek_ocr2() -> Tiny:
    pixels: dict[str, Any] = {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "mlp_dim": 64,
    }
    pixels |= {"image_size": 192, "patch_size": 4, "window_size": 12, "global_attn_indexes": []}
    queries = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    kinds: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_group": 1, "topk_group": 1}
    config = _config(
        "deepseek_ocr2",
        vision_config={
            "sam_config": {**pixels, "downsample_channels": [24, 32]},
            "encoder_config": {**queries, "num_key_value_heads": 1},
        },
        text_config=_text("deepseek_ocr2_text", **experts, **kinds).to_dict(),
        image_token_id=IMAGE,
    )
    # 12 x 12 patches are left, and the class has as many queries; the last token separates
    return config, IMAGE, 145, {"pixel_values": _noise(1, 3, 192, 192), "num_local_patches": _long(0)}


def _ovis2() -> Tiny:
    config = _config(
        "ovis2",
        vision_config={**_TOWER, "image_size": 32, "patch_size": 4, "vocab_size": 29, "hidden_stride": 2},
        text_config=_text("qwen2"),
        image_token_id=IMAGE,
        visual_indicator_token_ids=[START, END, 7, 8, 9],
        vocab_size=64,
        hidden_size=64,
        tie_word_embeddings=False,
    )
    return config, IMAGE, 16, {"pixel_values": _noise(1, 3, 32, 32)}


def _pixtral(kind: str, text: str, **values: Any) -> Callable[[], Tiny]:
    def build() -> Tiny:
        patch = 8 // values.get("spatial_merge_size", 1)
        config = _config(
            kind,
            vision_config=_tower("pixtral", 64, patch),
            text_config=_text(text, head_dim=16, sliding_window=None),
            image_token_id=IMAGE,
            **values,
        )
        return config, IMAGE, 6 * 8, {"pixel_values": _noise(1, 3, 64, 64), "image_sizes": _long([48, 64])}

    return build


def _idefics3(kind: str) -> Callable[[], Tiny]:
    def build() -> Tiny:
        config = _config(
            kind,
            vision_config=_tower(f"{kind}_vision", 64, 8),
            text_config=_text(),
            image_token_id=IMAGE,
            scale_factor=2,
            pad_token_id=0,
        )
        return config, IMAGE, 2 * 16, {"pixel_values": _noise(1, 2, 3, 64, 64)}

    return build


def _lfm2_vl() -> Tiny:
    config = _config(
        "lfm2_vl",
        vision_config=_tower("siglip2_vision_model", 64, 8, num_patches=64, vision_use_head=False),
        text_config=_text("lfm2", layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
        image_token_id=IMAGE,
        projector_hidden_size=64,
    )
    # two tiles, the second filled up with padding
    pixels = {
        "pixel_values": _noise(2, 64, 192),
        "spatial_shapes": _long([8, 8], [4, 8]),
        "pixel_attention_mask": (_long(*range(64)) < _long([64], [32])).int(),
    }
    return config, IMAGE, 16 + 8, pixels


def _lfm3_vl() -> Tiny:
    kinds = {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "head_dim": 16}
    config = _config(
        "lfm3_vl",
        vision_config={**_TOWER, "num_key_value_heads": 1, "patch_size": 8},
        text_config=_text("lfm3", sliding_window=24, **kinds).to_dict(),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        projector_hidden_size=64,
    )
    return config, IMAGE, 24, {"pixel_values": _noise(96, 384), "image_grid_thw": _long([1, 8, 12])}


def _minicpmv(kind: str, side: int = 4, **marks: int) -> Callable[[], Tiny]:
    def build() -> Tiny:
        rope = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
            "partial_rotary_factor": 0.25,
        }
        config = _config(
            kind,
            vision_config={**_TOWER, "image_size": 64, "patch_size": 4},
            text_config=_text("qwen3_5_text", rope_parameters=rope, **_NETS).to_dict(),
            insert_layer_id=1,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            **marks,
        )
        # a thumbnail and, where no marks are between them, a slice, their patches side by side; ``side`` patches square are a
        # token
        cells = [[4, 4]] if marks else [[4, 4], [2, 4]]
        tokens = sum(rows * columns for rows, columns in cells)
        pixels = {"pixel_values": _noise(1, 3, 4, 4 * tokens * side**2), "target_sizes": side * _long(*cells).int()}
        return config, IMAGE, tokens, pixels

    return build


_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
_QWEN_25: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
_QWEN_3 = {**_QWEN_25, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]}
_EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN_35 = {name: value for name, value in _QWEN_3.items() if name != "deepstack_visual_indexes"}
_NETS: dict[str, Any] = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
TINY: dict[str, Callable[[], Tiny]] = {
    "llava": _llava,
    "vipllava": lambda: _llava("vipllava", vision_feature_layers=[-2, 1]),
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "llava_next_video": _llava_next_video,
    "video_llava": _video_llava,
    "qwen2_vl": _qwen("qwen2_vl", embed_dim=32, hidden_size=64, mlp_ratio=2),
    "qwen2_5_vl": _qwen("qwen2_5_vl", window_size=32, fullatt_block_indexes=[1, 3], **_QWEN_25),
    "qwen2_5_omni": _thinker("qwen2_5_omni", window_size=32, fullatt_block_indexes=[1, 3], **_QWEN_25),
    "qwen3_5": _qwen("qwen3_5", _NETS, quarter=True, **_QWEN_35),
    "qwen3_5_moe": _qwen(
        "qwen3_5_moe", {**_EXPERTS, "shared_expert_intermediate_size": 32, **_NETS}, quarter=True, **_QWEN_35
    ),
    "qwen3_omni_moe": _thinker("qwen3_omni_moe", _EXPERTS, **_QWEN_3),
    "qwen3_vl": _qwen("qwen3_vl", {"head_dim": 16}, **_QWEN_3),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", _EXPERTS, **_QWEN_3),
    "glm46v": _glm("glm46v"),
    "glm4v": _glm("glm4v"),
    "glm4v_moe": _glm(
        "glm4v_moe",
        "glm4v_moe",
        head_dim=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "glm_ocr": _glm("glm_ocr", "glm_ocr", head_dim=16),
    "internvl": _internvl,
    "smolvlm": _idefics3("smolvlm"),
    "idefics3": _idefics3("idefics3"),
    "fast_vlm": _fast_vlm,
    "lfm2_vl": _lfm2_vl,
    "lfm3_vl": _lfm3_vl,
    "minicpm_ocr": _minicpmv("minicpm_ocr", side=2),
    "minicpmv4_6": _minicpmv("minicpmv4_6"),
    # 7 is a token of no prompt
    "minicpmv4_7": _minicpmv(
        "minicpmv4_7", image_start_id=START, image_end_id=END, slice_start_id=7, slice_end_id=7, newline_id=7
    ),
    "aya_vision": _aya_vision("aya_vision"),
    "cohere2_vision": _aya_vision("cohere2_vision"),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "got_ocr2": _got_ocr2,
    "molmo2": _molmo2,
    "paligemma": _paligemma,
    "perception_lm": _perception_lm,
    "granite4_vision": _granite4_vision,
    "ovis2": _ovis2,
    "deepseek_ocr2": _deepseek_ocr2,
    "lighton_ocr": _pixtral("lighton_ocr", "qwen3", spatial_merge_size=2),
    "mistral3": _pixtral("mistral3", "mistral", spatial_merge_size=2),
    "paddleocr_vl": _paddleocr_vl,
    "pixtral": _pixtral("llava", "mistral", vision_feature_layer=-1, vision_feature_select_strategy="full"),
    "video_llama_3": _video_llama_3,
}
