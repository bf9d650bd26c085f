"""The vLLM architectures that are served with a recipe, described in a few lines each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import Modality, Picture, Tile
from ...errors import MmaccelError, UnsupportedError
from ...families.base import consecutive
from ...families.pixtral import Mistral3
from ...method.registry import loaded, refused_offer

#: the entry point group through which another package offers architectures
ENTRY_POINTS = "mmaccel.vllm_architectures"

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One model class of vLLM. Raises :class:`MmaccelError` if ``pixels`` names no modality, or an unknown one.

    pixels : the argument of ``embed_multimodal`` that holds the pixels of a modality.
    layers : the path of the tower's layers, for methods that look into the tower.
    sizes : arguments in which items are joined along the first axis, with the argument (one row an item) whose product is
        each item's share of it. All others have one entry an item, or are one number for all; so have these where a version of
        vLLM does not join them.
    tapped : whether methods that look into the tower are tested.
    rename : makes a name of a checkpoint one that vLLM's ``load_weights`` knows.
    config : the configuration of transformers that describes a model of vLLM's ``ModelConfig``.
    levels : of a family, how many features a row of ``embed_multimodal`` holds, and which of them its first layer reads.
    pictures : of a call of ``embed_multimodal``, where the family cannot tell them from vLLM's arguments.
    sites : ``"patches"`` and ``"encoder"``, the sites in the tower whose methods are tested.
    """

    pixels: Mapping[Modality, str]
    layers: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    tapped: bool = True
    rename: Callable[[str], str] | None = None
    config: Callable[[Any], Any] = attrgetter("hf_config")
    levels: Callable[[Any], tuple[int, int]] = lambda family: (1 + family.deepstack, 0)
    pictures: Callable[[Any, Modality, Arguments], list[Picture] | None] = lambda family, modality, arguments: None
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.pixels or not set(self.pixels) <= {"image", "video"}:
            raise MmaccelError(
                "pixels of an Architecture names an argument of embed_multimodal for 'image', 'video' or both, got "
                f"{dict(self.pixels)}."
            )

    def modality(self, arguments: Arguments) -> Modality | None:
        """The modality of the arguments of ``embed_multimodal``; vLLM encodes one at a time."""
        return next((m for m, name in self.pixels.items() if arguments.get(name) is not None), None)

    def items(self, arguments: Arguments) -> list[dict[str, Any]]:
        """The arguments item by item; each keeps its item axis."""
        shares = {name: _shares(arguments[by]) for name, by in self.sizes.items() if name in arguments}
        shares = {name: mine for name, mine in shares.items() if len(arguments[name]) == sum(mine)}
        count = len(next(iter(shares.values()))) if shares else max(len(value) for value in arguments.values())
        apart = {
            name: list(value.split(shares[name])) if name in shares else [_part(value, i) for i in range(count)]
            for name, value in arguments.items()
        }
        return [{name: values[i] for name, values in apart.items()} for i in range(count)]

    def tower(self, model: nn.Module) -> nn.Module:
        """The module that holds the tower's layers."""
        return model.get_submodule(self.layers.rpartition(".")[0])

    def tower_layers(self, model: nn.Module) -> list[nn.Module]:
        """The tower layers that vLLM has built."""
        found = dict(model.named_modules()).get(self.layers)
        if not isinstance(found, nn.ModuleList):
            raise UnsupportedError(
                f"The layers of the vision tower of {type(model).__name__} are not at {self.layers!r}; correct layers of its "
                "Architecture, or use a recipe that reads the tokens alone, such as 'divprune'."
            )
        return list(found)


def _part(value: Any, item: int) -> Any:
    return value if isinstance(value, Tensor) and not value.ndim else value[item : item + 1]


def alone(value: Any) -> Any:
    """An argument of one item without its item axis."""
    return value if isinstance(value, Tensor) and not value.ndim else value[0]


def _shares(rows: Tensor) -> list[int]:
    return [int(row.prod()) for row in rows]


def joined(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments of several items, joined for one call."""
    out: dict[str, Any] = {}
    for name in items[0]:
        parts = [item[name] for item in items]
        if isinstance(parts[0], Tensor) and not parts[0].ndim:
            out[name] = parts[0]
            continue
        same = all(isinstance(part, Tensor) and part.shape[1:] == parts[0].shape[1:] for part in parts)
        out[name] = torch.cat(parts) if same else [one for part in parts for one in part]
    return out


def _clip_tower(name: str) -> str:
    """Names of CLIP's tower: transformers 5 saves it without the name of the model inside it."""
    parts = name.removeprefix("model.").split(".", 2)
    if parts[0] == "vision_tower" and parts[1] in ("embeddings", "encoder", "pre_layrnorm", "post_layernorm"):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return name


def _counted(family: Any, modality: Modality, arguments: Arguments) -> list[Picture]:
    """Split pictures of InternVL by their numbers of tiles, clips by their numbers of frames."""
    counts = arguments[f"{modality}_num_patches"].tolist()
    return consecutive([[(1, family.cells, family.cells)] * count for count in counts], clips=modality == "video")


def _internvl(model_config: Any) -> Any:
    """The configuration in transformers of an InternVL whose checkpoint comes with code of its own; that one does not name the
    placeholders."""
    from transformers import InternVLConfig
    from vllm.tokenizers import cached_tokenizer_from_config

    words, given = cached_tokenizer_from_config(model_config).get_vocab(), model_config.hf_config
    side, patch = given.force_image_size or given.vision_config.image_size, given.vision_config.patch_size
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = InternVLConfig(
        vision_config={
            **{name: getattr(given.vision_config, name) for name in names},
            "image_size": [side, side],
            "patch_size": [patch, patch],
        },
        text_config=given.get_text_config(),
        downsample_ratio=given.downsample_ratio,
        vision_feature_layer=given.select_layer,
        image_token_id=words["<IMG_CONTEXT>"],
    )
    config.video_token_id = words.get("<|video_pad|>")
    return config


def _pooled(family: Any, modality: Modality, arguments: Arguments) -> list[Picture] | None:
    """Split clips of LLaVA-OneVision, which may differ in length."""
    if modality == "image":
        return None
    side, offset, pictures = family.pooled, 0, []
    for clip in arguments["pixel_values_videos"]:
        pictures.append([Tile.raster(len(clip), side, side, offset, newline=True)])
        offset += len(clip) * side**2
    return pictures


def _sized(family: Any, modality: Modality, arguments: Arguments) -> list[Picture] | None:
    """Split pictures of Pixtral's tower by their pixels; they may have any size."""
    if not isinstance(family, Mistral3):
        return None
    block, pixels = family.vision.patch_size * family.merge, arguments["pixel_values"]
    return consecutive([[(1, x.shape[-2] // block, x.shape[-1] // block)] for x in pixels])


def _tiled(family: Any, modality: Modality, arguments: Arguments) -> list[Picture]:
    """Split pictures by their numbers of tiles: those of Idefics3 and SmolVLM, the whole picture last, and of Gemma 3, where it
    comes first."""
    return consecutive([[(1, family.cells, family.cells)] * count for count in arguments["num_patches"].tolist()])


def _positioned(family: Any, modality: Modality, arguments: Arguments) -> list[Picture]:
    """Split pictures of Gemma 4, and its clips by their numbers of frames, by the positions of their patches, -1 where there is
    none."""
    given = arguments["pixel_position_ids" if modality == "image" else "pixel_position_ids_videos"]
    frames = [at for item in given for at in item.reshape(-1, *item.shape[-2:])]
    sizes = iter([((at.amax(0) + 1) // family.pooled).tolist() for at in frames])
    counts = [1] * len(frames) if modality == "image" else arguments["video_frame_counts"].tolist()
    return consecutive([[(1, rows, columns) for columns, rows in islice(sizes, n)] for n in counts], clips=True)


def _shaped(family: Any, modality: Modality, arguments: Arguments) -> list[Picture]:
    """Split pictures of LFM2-VL by the sizes of their tiles, in patches."""
    sizes = iter((arguments["spatial_shapes"].reshape(-1, 2) // family.shuffle).tolist())
    counts = arguments["num_patches"].tolist()
    return consecutive([[(1, height, width) for height, width in islice(sizes, count)] for count in counts])


def _halved(family: Any, modality: Modality, arguments: Arguments) -> list[Picture]:
    """Split clips of LLaVA-NeXT-Video, which may differ in length; four tokens of a frame become one."""
    side = family.side // 2
    return consecutive([[(len(clip), side, side)] for clip in arguments["pixel_values_videos"]])


def _sliced(family: Any, modality: Modality, arguments: Arguments) -> list[Picture]:
    """Split pictures of MiniCPM-V, of a thumbnail and slices, and its clips, whose frames all have as many."""
    clips = modality == "video"
    sizes, joins = (arguments[f"{'video_' if clips else ''}{name}"] for name in ("tgt_sizes", "use_vit_merger"))
    offset, pictures = 0, list[Picture]()
    # one wait for the device, whatever the number of items
    shapes = iter(torch.cat([*sizes]).tolist())
    for item, (slices, whole) in enumerate(zip(sizes, joins, strict=True)):
        side = family.side_in("16x" if bool(whole) else "4x")
        a_frame = len(slices) // len(arguments["video_image_sizes"][item]) if clips else len(slices)
        pictures.append([])
        for number, (height, width) in enumerate(islice(shapes, len(slices))):
            pictures[-1].append(Tile.raster(1, height // side, width // side, offset, frame=number // a_frame))
            offset += len(pictures[-1][-1])
    return pictures


def _added(family: Any) -> tuple[int, int]:
    """Granite 4 Vision has no embedding beside the features that its layers add."""
    layers = family.layers_added
    return len(layers), layers.index(min(layers))


_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
_BOTH: dict[Modality, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
_TILES = {"pixel_values": "image_num_patches", "pixel_values_videos": "video_num_patches"}
_FLAT = {"pixel_values_flat": "image_num_patches", "pixel_values_flat_video": "video_num_patches"}
_PARTS = {"pixel_values": "num_patches", "pixel_attention_mask": "num_patches"}
_INSIDE = ("patches", "encoder")
_NESTED = "vision_tower.vision_model.encoder.layers"

#: those of mmaccel, by the name in vLLM's registry
ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(
        (
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        Architecture(_BOTH, "visual.blocks", _GRIDS, sites=_INSIDE),
    ),
    **dict.fromkeys(
        ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
        Architecture(_BOTH, "visual.blocks", _GRIDS, tapped=False),
    ),
    "LlavaForConditionalGeneration": Architecture(
        {"image": "pixel_values"}, _NESTED, rename=_clip_tower, pictures=_sized, sites=_INSIDE
    ),
    "LlavaNextForConditionalGeneration": Architecture(
        {"image": "pixel_values"}, _NESTED, rename=_clip_tower, sites=_INSIDE
    ),
    "LlavaOnevisionForConditionalGeneration": Architecture(
        _BOTH, _NESTED, rename=_clip_tower, pictures=_pooled, sites=_INSIDE
    ),
    "LlavaNextVideoForConditionalGeneration": Architecture(
        {"video": "pixel_values_videos"}, _NESTED, rename=_clip_tower, pictures=_halved, sites=_INSIDE
    ),
    "InternVLForConditionalGeneration": Architecture(
        _BOTH, "vision_tower.encoder.layer", _TILES, pictures=_counted, sites=_INSIDE
    ),
    "InternVLChatModel": Architecture(
        {"image": "pixel_values_flat", "video": "pixel_values_flat_video"},
        "vision_model.encoder.layers",
        _FLAT,
        config=_internvl,
        pictures=_counted,
        sites=_INSIDE,
    ),
    "Mistral3ForConditionalGeneration": Architecture(
        {"image": "pixel_values"}, "vision_tower.transformer.layers", tapped=False, pictures=_sized
    ),
    **dict.fromkeys(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        Architecture(
            {"image": "pixel_values"}, "model.vision_model.encoder.layers", _PARTS, pictures=_tiled, sites=_INSIDE
        ),
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        {"image": "pixel_values"},
        _NESTED,
        {"pixel_values": "num_patches"},
        rename=_clip_tower,
        pictures=_tiled,
        # pixelprune keeps positions, which do not reach this language model
        sites=("encoder",),
    ),
    **dict.fromkeys(
        ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        Architecture(
            _BOTH,
            "vision_tower.encoder.layers",
            dict.fromkeys(("pixel_values_videos", "pixel_position_ids_videos"), "video_frame_counts"),
            tapped=False,
            pictures=_positioned,
        ),
    ),
    "PaddleOCRVLForConditionalGeneration": Architecture(
        {"image": "pixel_values"},
        "visual.vision_model.encoder.layers",
        # vLLM 0.33 joins them, 0.32 does not
        {"pixel_values": "image_grid_thw"},
        tapped=False,
    ),
    "Lfm2VlForConditionalGeneration": Architecture(
        {"image": "pixel_values"},
        "vision_tower.vision_model.encoder.layers",
        dict.fromkeys(("pixel_values", "spatial_shapes"), "num_patches"),
        tapped=False,
        pictures=_shaped,
    ),
    "MiniCPMV4_6ForConditionalGeneration": Architecture(
        {"image": "pixel_values", "video": "video_pixel_values"}, "vpm.encoder.layers", tapped=False, pictures=_sliced
    ),
    "Granite4VisionForConditionalGeneration": Architecture(
        {"image": "pixel_values"}, _NESTED, tapped=False, rename=_clip_tower, levels=_added
    ),
}

#: names in vLLM's registry that would be served wrongly -> why, as the end of a sentence
REFUSED: dict[str, str] = {
    "MiniCPMV4_7ForConditionalGeneration": (
        "its configuration came with transformers 5.23, which no vLLM that is tested takes; use transformers"
    ),
    "Molmo2ForConditionalGeneration": (
        "vLLM counts the marks around pictures and rows among their tokens, where a budget would drop them, and lets each "
        "picture of a prompt attend to itself alone, where transformers lets all of them attend to each other; use transformers"
    ),
    "PixtralForConditionalGeneration": (
        "its tokenizer has written the placeholders of a picture before a plug-in sees the prompt; convert the checkpoint to "
        "the format of transformers, which vLLM loads as LlavaForConditionalGeneration or Mistral3ForConditionalGeneration"
    ),
}


@functools.cache
def known_architectures() -> dict[str, Architecture]:
    """All architectures by the name in vLLM's registry: :data:`ARCHITECTURES`, then those of other packages.

    A package offers an :class:`Architecture` by an entry point ``mmaccel.vllm_architectures`` with that name.

    Raises
    ------
    MmaccelError
        If an entry point cannot be imported or names something else, or its name is taken.
    """
    found = dict(ARCHITECTURES)
    for point, offer in loaded(ENTRY_POINTS):
        if not isinstance(offer, Architecture):
            raise refused_offer(point, "is no Architecture of mmaccel.integrations.vllm")
        if point.name in found:
            whose = "mmaccel" if point.name in ARCHITECTURES else "another package"
            raise refused_offer(point, f"describes {point.name}, as {whose} does")
        found[point.name] = offer
    return found
