"""What the library must know of one model family; everything else is shared."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.budget import layer_at
from ..core.layout import Layout, Modality, Picture
from ..errors import UnsupportedError
from .tower import EncoderCall, Towers

#: why tokens cannot merge in towers of which several layers are read
JOINED = "is read behind several layers, whose tokens must be the same"
#: why layers cannot read parts of a prompt apart where some have windows
WINDOWS = "has sliding windows, which count places of the whole prompt"
#: the same where tokens look ahead, and why none can come back then
BOTH_WAYS = "lets tokens of a prompt attend to each other both ways"
#: text models whose RoPE turns neighbours instead of halves, leaves layers or channels out, or differs between layers
_OTHER_ROPE = (
    "cohere",
    "cohere2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "lfm3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "smollm3",
)
#: deviations of the colours of large sets of pictures, by which towers are trained
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_STD = (0.229, 0.224, 0.225)
_TURN = re.compile(r"\bassistant\s*:\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Continued:
    """A cache that a prompt was reduced into, as far as positions go on from it.

    seen : tokens seen. offset, ahead : ``[B]`` long, see :class:`mmaccel.kv.cache.CacheState`.
    """

    seen: int
    offset: Tensor
    ahead: Tensor | None


class Call(Protocol):
    """The call of the model that is being run."""

    def continued(self, cache: Any = None) -> Continued | None:
        """The kept cache that the call goes on with (``cache``, where the caller knows it), or None."""


#: a function that makes the replacement of an instance's method: (original, getter of the call) -> replacement
Wrapper = Callable[[Callable[..., Any], Callable[[], Call | None]], Callable[..., Any]]


@dataclass(frozen=True)
class Facts:
    """What the table of families says of one and its adapter need not know.

    pictures : how they come, in words.
    clips : whether it is shown clips, as such or as pictures of their frames.
    cls : whether the vision towers usual for it have a CLS token.
    merging : which patches merge inside the tower, in words.
    """

    pictures: str = "yes"
    clips: bool = True
    cls: bool = True
    merging: str = "single"


@dataclass(frozen=True)
class Description:
    """Stands for a model of which only the configuration is at hand: an adapter made of it answers for prompts, pictures and
    numbers of layers, but has no modules."""

    config: Any
    model: None = None


class Family(Towers):
    """Base adapter, right for LLaVA-like models: one tower of equal square tiles, one text model behind it.

    Parameters
    ----------
    model : the ``...ForConditionalGeneration`` model, or a :class:`Description` of one.
    processor : its processor, for families whose prompt cannot be understood without the tokenizer.
    """

    #: ``config.model_type`` of the models it serves
    model_types: ClassVar[tuple[str, ...]]
    #: where lists show it, among those of the same place by name
    place: ClassVar[int] = 1000
    facts: ClassVar[Facts] = Facts()
    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    #: attribute names of the text model and of the tower of each modality on the inner model
    text_name: ClassVar[str] = "language_model"
    tower_names: ClassVar[dict[Modality, str]] = {"image": "vision_tower", "video": "vision_tower"}
    #: text layers that add visual features (DeepStack), after which tokens may be dropped inside the language model
    deepstack: int = 0
    #: a package beside transformers that its models are built with
    package: ClassVar[str | None] = None
    #: the oldest transformers that lays its models out as they are known here
    since: ClassVar[str] = "5.17"
    #: whether RoPE turns queries and keys as two halves, in every layer of the language models usual for it
    halves: bool = True
    ranks: int = 1
    #: whether some layers of its language models carry a state where others have attention, and what configurations call such
    stateful: bool = False
    #: why a token cannot run through its language model later than it stands, as the end of "the language model of ..."
    no_return: str | None = None
    carrying: ClassVar[tuple[str, ...]] = ()
    #: why layers of the language model cannot read parts of a prompt apart, as the end of "the language model of ... "; None
    #: where they can
    undivided: str | None = None
    #: whether it is made for reading pages, every letter of which stands in few tokens
    reads_pages: ClassVar[bool] = False
    #: arguments of the inner model, beside those of the towers, without which the layout is not known
    extra_inputs: ClassVar[tuple[str, ...]] = ()
    #: whether masks are made in front of its text model, which is called with them
    masks_above: ClassVar[bool] = False
    #: the position of the first token
    first_position: ClassVar[int] = 0
    #: the prompt does not say which tiles or frames belong together; a processor is needed to tell
    needs_processor: ClassVar[bool] = False

    def __init__(self, model: nn.Module | Description, processor: Any = None) -> None:
        self.model: Any = model
        self.processor = processor
        self.config: Any = model.config
        self.inner: Any = model.model
        self.text: Any = None if self.inner is None else getattr(self.inner, self.text_name)
        self.halves = _turns_halves(model.config)
        self.ranks = int(getattr(model, "_tp_size", None) or 1)
        if len(self.read_layers) > 1:
            self.whole = JOINED
        if self.undivided is None and slides(model.config):
            self.undivided = WINDOWS

    @classmethod
    def of(cls, config: Any) -> type[Family]:
        """The adapter of a model of one of its types, where others serve some of them."""
        return cls

    @property
    def depth(self) -> int:
        """Layers of the language model."""
        return len(self.text.layers)

    @property
    def recurrent(self) -> Sequence[int]:
        """Layers of the language model that keep a recurrent state, and neither keys nor values."""
        return ()

    @property
    def attending(self) -> Sequence[int]:
        """Layers of the language model with attention, rising; the layers of a kept cache are these, counted from 0."""
        return range(self.depth)

    def stored_from(self, layer: int) -> int:
        """The first layer of a kept cache that belongs to ``layer`` of the language model, or to one above it."""
        return layer

    def mask_argument(self, real: Tensor | None) -> Any:
        """The attention mask that the text model is called with where mmaccel's attention function makes the masks; ``real
        [B, q]`` bool says which tokens are no padding, None where none is."""
        return None

    def rope_kind(self, layer: int) -> str | None:
        """Which of several RoPEs a layer of the language model is given; None where all share one."""
        return None

    def bidirectional_groups(
        self, ids: Tensor, valid: Tensor, extra_inputs: Mapping[str, Any], seen: int
    ) -> Tensor | None:
        """Groups of prompt tokens that attend to each other in both directions, ``[B, S]`` long on the CPU.

        Tokens of one group have one number; -1 marks causal tokens. None if the whole prompt is causal. ``ids``, ``valid``
        ``[B, S]`` are on the CPU, ``extra_inputs`` are arguments of the call, and ``seen`` tokens are in the cache."""
        return None

    def is_bidirectional(self, layer: int) -> bool:
        """Whether a layer of the language model applies :meth:`bidirectional_groups`."""
        return True

    def heads_in(self, layer: int) -> tuple[int, int]:
        """KV heads of a layer of the language model, and the width of one."""
        attention = self.attention_in(layer)
        return self.text.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim

    def attention_in(self, layer: int) -> Any:
        """The self-attention of a layer of the language model."""
        return self.text.layers[layer].self_attn

    def logits(self, states: Tensor) -> Tensor:
        """``[..., V]``: what the model makes of the last hidden states ``[..., D]`` of its language model."""
        found: Tensor = self.model.lm_head(states)
        cap = getattr(self.text.config, "final_logit_softcapping", None)
        return found if cap is None else torch.tanh(found / cap) * cap

    def queries_in(self, attention: Any) -> nn.Module:
        """The last module of an attention that queries pass before RoPE."""
        found: nn.Module = getattr(attention, "q_norm", None) or attention.q_proj
        return found

    def outgoing_in(self, layer: int) -> Any:
        """The output projection of the attention of a layer of the language model; None where it has none of that name."""
        return getattr(self.attention_in(layer), "o_proj", None)

    def norm_in(self, layer: Any) -> nn.Module:
        """The norm before the attention of a layer of the language model."""
        found: nn.Module = layer.input_layernorm
        return found

    @property
    def last_norm(self) -> nn.Module:
        """The norm behind the last layer of the language model."""
        found: nn.Module = self.text.norm
        return found

    # --- towers -----------------------------------------------------------------------------------------------
    @property
    def vision(self) -> Any:
        """The vision tower's config."""
        return self.config.vision_config

    @property
    def side(self) -> int:
        """Patches along one side of a tile."""
        size, patch = self.vision.image_size, self.vision.patch_size
        return int(size[0] if isinstance(size, (list, tuple)) else size) // int(
            patch[0] if isinstance(patch, (list, tuple)) else patch
        )

    @property
    def has_cls(self) -> bool:
        """Whether the tower puts a CLS token in front of the patches."""
        return "clip_vision" in str(self.vision.model_type) or "internvl_vision" in str(self.vision.model_type)

    def towers(self) -> list[Any]:
        """The distinct vision towers; none of a description."""
        if self.inner is None:
            return []
        return list({id(t): t for t in (getattr(self.inner, self.tower_names[m]) for m in self.modalities)}.values())

    def tower_layers(self, tower: Any) -> list[nn.Module]:
        """The tower's transformer layers, in order."""
        return list(tower.encoder.layers)

    def attention_of(self, layer: Any) -> nn.Module:
        """The self-attention of a tower layer."""
        return layer.self_attn

    @property
    def tower_depth(self) -> int:
        """Layers of the vision tower that can be looked into."""
        if self.closed is not None:
            return 0
        if self.inner is not None:
            return len(self.tower_layers(self.towers()[0]))
        # the name in Qwen's configurations
        return int(self.vision.depth if hasattr(self.vision, "depth") else self.vision.num_hidden_layers)

    @property
    def read_layers(self) -> list[int]:
        """The layers of the tower whose outputs are read, as the configuration counts hidden states."""
        layer = getattr(self.config, "vision_feature_layer", -1)
        return list(layer) if isinstance(layer, (list, tuple)) else [layer]

    @property
    def read_at(self) -> list[int]:
        """The same, as tower layers are counted from 0."""
        depth = self.tower_depth
        # hidden_states[i] is the output of layer i - 1
        return [layer - 1 if layer >= 0 else depth + layer for layer in self.read_layers]

    @property
    def feature_layer(self) -> int:
        """The tower layer (counted from 0) whose output the language model reads; where it reads several, the last of them."""
        return max(self.read_at)

    def tap_layer(self, layer: float | None) -> int:
        """The tower layer a tap means; None is the layer whose attention shaped the features."""
        depth = self.tower_depth
        if isinstance(layer, float):
            # of blocks with windows between them only those that attend to everything
            wished = layer_at(layer, depth)
            return min(self.merging_layers(), key=lambda number: (abs(number - wished), -number))
        number = self.feature_layer if layer is None else int(layer) + depth if layer < 0 else int(layer)
        if not 0 <= number < depth:
            raise UnsupportedError(f"{self.name}: the vision tower has {depth} layers, there is no layer {layer}.")
        return number

    # --- what goes into the towers ------------------------------------------------------------------------------
    @property
    def image_std(self) -> tuple[float, ...]:
        """By what the processor divided the colours; without a processor, as usual for the tower."""
        given = getattr(getattr(self.processor, "image_processor", None), "image_std", None)
        return tuple(given) if given else self.usual_std

    @property
    def usual_std(self) -> tuple[float, ...]:
        """What models with such a tower divide by."""
        kind = str(self.vision.model_type)
        return CLIP_STD if "clip" in kind else IMAGENET_STD if "internvl" in kind else (0.5, 0.5, 0.5)

    def unit_pixels(self, encoded: EncoderCall, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The pixels of the patches that the projector joins (see :meth:`units`) in what a tower is given: per size of tiles or
        frames ``[N, h, w, d]`` float32, and ``[N, h * w, u]`` long, which patches these are, counted tile by tile."""
        n, colours, height, width = pixels.shape
        size = self.vision.patch_size
        down, across = (size, size) if isinstance(size, int) else size
        rows, columns = height // down, width // across
        scaled = pixels.float() * pixels.new_tensor(self.image_std, dtype=torch.float32).view(-1, 1, 1)
        cut = scaled.view(n, colours, rows, down, columns, across).permute(0, 2, 4, 1, 3, 5)
        units = self.units(encoded, rows * columns).to(pixels.device)
        factor = math.isqrt(units.shape[1])
        values = cut.reshape(n, rows * columns, -1)[:, units].flatten(2)
        first = torch.arange(n, device=pixels.device)[:, None, None] * (rows * columns)
        return [(values.view(n, rows // factor, columns // factor, -1), first + units)]

    def tower_order(self, encoded: EncoderCall) -> Tensor | None:
        """``[patches]`` long: which of the patches that it is given stands at each place of a tower's sequence; None where they
        stand as they are given."""
        return None

    # --- what comes out of the towers -------------------------------------------------------------------------
    def features(self, output: Any) -> list[Tensor]:
        """The features ``[..., D]`` in what ``get_image_features`` or ``get_video_features`` returned."""
        made = output.pooler_output
        return [made] if isinstance(made, Tensor) else list(made)

    def deep_features(self, kwargs: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]] | None:
        """What layers of the language model add to visual tokens (DeepStack), read off the arguments of its call: their places
        ``[B, S]`` bool, and the features ``[visual tokens, D]`` of every such layer; None where there are none."""
        features = kwargs.get("deepstack_visual_embeds")
        return None if features is None else (kwargs["visual_pos_masks"], features)

    def deep_arguments(self, visual: Tensor, features: list[Tensor]) -> dict[str, Any]:
        """The same, written as arguments."""
        return {"visual_pos_masks": visual, "deepstack_visual_embeds": features}

    def entering(self, embeds: Tensor, deep: list[Tensor]) -> Tensor:
        """``[B, S, D]``: what enters the first layer, of ``embeds [B, S, D]`` and DeepStack features laid out like them."""
        return embeds

    # --- layout -----------------------------------------------------------------------------------------------
    def token_id(self, modality: Modality) -> int | None:
        """The placeholder id of a modality."""
        found = getattr(self.config, f"{modality}_token_id", None)
        return found if found is not None else getattr(self.config, f"{modality}_token_index", None)

    def visual(self, ids: Tensor) -> Tensor:
        """``[B, S]`` bool: the placeholders in ``ids``."""
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for modality in self.modalities:
            mask |= ids == self.token_id(modality)
        return mask

    def layout(self, ids: Tensor, valid: Tensor, encoded: Mapping[Modality, EncoderCall]) -> Layout:
        """The layout of a prompt (or of the new part of one). ``ids``, ``valid`` ``[B, S]`` on the CPU.

        Raises
        ------
        UnsupportedError
            If placeholders have no encoded picture in this call, or counts do not match.
        """
        found = []
        for modality in self.modalities:
            token = self.token_id(modality)
            if not bool(((ids == token) & valid).any()):
                continue
            seen = encoded.get(modality)
            if seen is None and any(self.token_id(other) == token for other in encoded):
                continue
            if seen is None:
                raise UnsupportedError(
                    f"The prompt has {modality} placeholders, but no {modality} was encoded in this call; pass the pixels "
                    "to the model instead of encoder outputs, and on a second turn only the new tokens and pixels."
                )
            pictures = self.pictures(modality, seen, ids)
            if (made := sum(len(tile) for picture in pictures for tile in picture)) < seen.tokens:
                raise UnsupportedError(
                    f"{self.name}: the prompt has room for {made} {modality} tokens but the encoded {modality}s make "
                    f"{seen.tokens}; pass the pixels that belong to exactly the new tokens of this call."
                )
            found.append((modality, int(token or 0), pictures))
        return Layout.walk(ids, valid, found, self.name)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        """The pictures or clips of this call in feature order, each a list of tiles with its tokens' cells and sources."""
        raise NotImplementedError

    def words(self, ids: Tensor) -> str:
        """The first stretch of text between special tokens in ``ids [n]``, which is what was asked, without the "ASSISTANT:"
        of prompt templates at its end; it may be empty."""
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        special, stretch = set(tokenizer.all_special_ids), []
        for token in [*ids.tolist(), None]:
            if token is not None and token not in special:
                stretch.append(token)
            elif stretch and (text := _TURN.sub("", str(tokenizer.decode(stretch))).strip()):
                return text
            else:
                stretch = []
        return ""

    # --- what the family's own code gets wrong under a kept cache ---------------------------------------------
    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """Instance methods to wrap while a model is accelerated: (object, method name, wrapper)."""
        return []


def _turns_halves(config: Any) -> bool:
    """See :attr:`Family.halves`."""
    return config.text_config.model_type not in _OTHER_ROPE


def slides(config: Any) -> bool:
    """Whether any layer of the language model has a sliding window."""
    text = config.text_config
    kinds = getattr(text, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None) is not None


def passed_on() -> Tensor:
    """A mask of four axes, which models that are called with such take as it is."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def types_of_new(types: Tensor, ids: Tensor, seen: int) -> Tensor:
    """``[B, S]`` on the CPU: of the ``types`` of all tokens, or of the new ones alone, those of the new ones ``ids [B, S]``.
    Behind them may stand candidates, of which nothing is said."""
    new = types.cpu()[:, seen if types.shape[1] > ids.shape[1] else 0 :]
    return functional.pad(new, (0, ids.shape[1] - new.shape[1]))


def clip_frames(encoded: EncoderCall) -> tuple[int, int]:
    """Clips, and frames of each, of ``pixel_values_videos [clips, frames, ...]``; in transformers 5.17 some families name
    the argument ``pixel_values``."""
    given = encoded.arguments
    clips, frames = given["pixel_values_videos" if "pixel_values_videos" in given else "pixel_values"].shape[:2]
    return int(clips), int(frames)


def block_mean(values: Tensor, side: int, factor: int) -> Tensor:
    """Mean over ``factor`` x ``factor`` blocks of a square raster: ``[N, side * side, ...] -> [N, (side // factor)**2, ...]``.

    An odd last row and column are left out, as average pooling does.
    """
    n, rest, m = len(values), values.shape[2:], side // factor
    grid = values.reshape(n, side, side, *rest)[:, : m * factor, : m * factor]
    return grid.reshape(n, m, factor, m, factor, *rest).mean((2, 4)).reshape(n, m * m, *rest)


def resampled(values: Tensor, side: int, cells: int, mode: str) -> Tensor:
    """Square rasters interpolated as models do it: ``[N, side * side, ...] -> [N * cells * cells, ...]`` float32."""
    grid = values.reshape(len(values), side, side, -1).permute(0, 3, 1, 2).float()
    grid = functional.interpolate(grid, size=(cells, cells), mode=mode)
    return grid.permute(0, 2, 3, 1).reshape(-1, *values.shape[2:])


def raster_blocks(rows: int, factor: int, columns: int | None = None) -> Tensor:
    """``[blocks, factor * factor]`` long: the places in a raster, by default a square one, of every ``factor`` x ``factor``
    block."""
    columns = rows if columns is None else columns
    places = torch.arange(rows * columns).view(rows // factor, factor, columns // factor, factor)
    return places.transpose(1, 2).reshape(-1, factor * factor)
