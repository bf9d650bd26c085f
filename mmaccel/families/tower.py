"""Adapters of vision towers, for taps and merging."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.budget import layer_at
from ..core.layout import Modality
from ..errors import UnsupportedError
from .language import first_of

#: deviations of the colours of large sets of pictures, by which towers are trained
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass
class EncoderCall:
    """One call of ``get_image_features`` or ``get_video_features``.

    arguments : the call's bound arguments.
    tokens : language model tokens that came out; 0 as long as it runs.
    """

    arguments: dict[str, Any]
    tokens: int = 0


class Towers(ABC):
    """The vision towers of one model; by default they run over ``[tiles, tokens, width]``."""

    name: str
    #: why methods cannot look into its layers, as the end of "the vision tower of ... "; None where they can
    closed: str | None = None
    #: why tokens cannot merge between its layers; None where they can
    whole: str | None = None
    #: where a tower has its transformer layers; empty if none of them runs over patches alone
    layers_path: ClassVar[str] = "encoder.layers"
    #: the attribute of a layer that is its self-attention
    attention_name: ClassVar[str] = "self_attn"
    #: whether frames that are packed attend in one call, which a mask keeps apart, instead of a call each
    one_call: bool = False

    @property
    @abstractmethod
    def has_cls(self) -> bool:
        """Whether the tower puts a CLS token in front of the patches."""

    @abstractmethod
    def towers(self) -> list[Any]:
        """The distinct vision towers."""

    def tower_layers(self, tower: Any) -> list[nn.Module]:
        """The tower's transformer layers, in order."""
        return list(attrgetter(self.layers_path)(tower)) if self.layers_path else []

    def attention_of(self, layer: Any) -> nn.Module:
        """The self-attention of a tower layer."""
        attention: nn.Module = getattr(layer, self.attention_name)
        return attention

    @property
    @abstractmethod
    def feature_layer(self) -> int:
        """The tower layer (counted from 0) whose output is read."""

    @abstractmethod
    def tap_layer(self, layer: float | None) -> int:
        """The tower layer a tap means, see :class:`mmaccel.method.Tap`."""

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """Tapped values per language model token, ``[tokens, ...]`` in source order.

        ``values`` are the tapped tensors ``[tiles, patches, ...]`` of the tower's attention calls, CLS removed.
        """
        return torch.cat(values).flatten(0, 1)

    # --- merging ----------------------------------------------------------------------------------------------
    def merging_layers(self) -> list[int]:
        """The layers in which tokens are merged."""
        return list(range(self.feature_layer + 1))

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        """Patches of a tile that the projector joins into one token, ``[units, u]`` long; they merge as one. ``width``
        is that of a frame in a packed sequence."""
        return torch.arange(patches)[:, None]

    def frames(self, encoded: EncoderCall) -> list[list[tuple[int, int]]] | None:
        """Rows and columns of patches of every frame of every picture, for towers that pack them into one sequence; else
        None."""
        return None

    def blocks(self, encoded: EncoderCall, patches: int) -> Tensor:
        """``[units, u]`` long: the units of all ``patches`` of a tile, or of a packed sequence."""
        packed = self.frames(encoded)
        if packed is None:
            return self.units(encoded, patches)
        units, first = [], 0
        for height, width in (frame for picture in packed for frame in picture):
            units.append(first + self.units(encoded, height * width, width))
            first += height * width
        return torch.cat(units)

    def blocks_mean(self, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """Mean over each of the :meth:`blocks` of a packed sequence, from ``values`` of its parts ``[1, patches, ...]``."""
        flat = torch.cat([v[0] for v in values])
        return flat[self.blocks(encoded, len(flat)).to(flat.device)].mean(1)

    def readers(self, tower: Any) -> list[nn.Module]:
        """Modules that read the tokens between layers, and need the full grid."""
        return []

    def first_norm(self, layer: nn.Module) -> nn.Module:
        """The norm before the attention of a pre-norm layer."""
        return first_of(layer, "layer_norm1", "layernorm_before", "norm1", "ln_1", "attention_norm", "rms_norm1")

    def second_half(self, layer: nn.Module) -> tuple[nn.Module, nn.Module]:
        """The norm before the MLP of a pre-norm layer, whose input is the sum behind the attention, and the MLP."""
        norm = first_of(layer, "layer_norm2", "layernorm_after", "norm2", "ln_2", "ffn_norm", "rms_norm2")
        return norm, first_of(layer, "mlp", "feed_forward", "ffn")


class ModelTowers(Towers):
    """The towers of a vision-language model; by default one, of equal square tiles."""

    #: the whole model and the one inside its head, None for a description; the processor, or None
    config: Any
    inner: Any
    processor: Any
    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    #: the attribute of the inner model that is the tower of each modality
    tower_names: ClassVar[dict[Modality, str]] = {"image": "vision_tower", "video": "vision_tower"}

    @property
    def vision(self) -> Any:
        """The vision tower's config."""
        return self.config.vision_config

    @property
    def side(self) -> int:
        """Patches along one side of a tile."""
        sizes = self.vision.image_size, self.vision.patch_size
        side, patch = (int(size[0] if isinstance(size, (list, tuple)) else size) for size in sizes)
        return side // patch

    @property
    def has_cls(self) -> bool:
        """Whether the tower puts a CLS token in front of the patches."""
        return "clip_vision" in str(self.vision.model_type) or "internvl_vision" in str(self.vision.model_type)

    def towers(self) -> list[Any]:
        """The distinct vision towers; none of a description."""
        if self.inner is None:
            return []
        return list({id(t): t for t in (getattr(self.inner, self.tower_names[m]) for m in self.modalities)}.values())

    @property
    def tower_depth(self) -> int:
        """Number of tower layers that methods can look into."""
        if self.closed is not None:
            return 0
        if self.inner is not None:
            return len(self.tower_layers(self.towers()[0]))
        # the name in Qwen's configurations
        return int(self.vision.depth if hasattr(self.vision, "depth") else self.vision.num_hidden_layers)

    @property
    def read_layers(self) -> list[int]:
        """Tower layers whose outputs are read, counted as hidden states as in the configuration."""
        layer = getattr(self.config, "vision_feature_layer", -1)
        return list(layer) if isinstance(layer, (list, tuple)) else [layer]

    @property
    def read_at(self) -> list[int]:
        """Tower layers whose outputs are read, counted from 0."""
        depth = self.tower_depth
        # hidden_states[i] is the output of layer i - 1
        return [layer - 1 if layer >= 0 else depth + layer for layer in self.read_layers]

    @property
    def feature_layer(self) -> int:
        """The last tower layer (counted from 0) whose output the language model reads."""
        return max(self.read_at)

    def tap_layer(self, layer: float | None) -> int:
        """The tower layer of a tap; None is the layer whose attention shaped the features."""
        depth = self.tower_depth
        if isinstance(layer, float):
            # of blocks with windows between them only those that attend to everything
            wished = layer_at(layer, depth)
            return min(self.merging_layers(), key=lambda number: (abs(number - wished), -number))
        number = self.feature_layer if layer is None else int(layer) + depth if layer < 0 else int(layer)
        if not 0 <= number < depth:
            raise UnsupportedError(f"{self.name}: the vision tower has {depth} layers, there is no layer {layer}.")
        return number

    @property
    def image_std(self) -> tuple[float, ...]:
        """Standard deviations by which the processor divides colours; without a processor the usual ones."""
        given = getattr(getattr(self.processor, "image_processor", None), "image_std", None)
        return tuple(given) if given else self.usual_std

    @property
    def usual_std(self) -> tuple[float, ...]:
        """Standard deviations that models with such a tower use."""
        kind = str(self.vision.model_type)
        return CLIP_STD if "clip" in kind else IMAGENET_STD if "internvl" in kind else (0.5, 0.5, 0.5)

    def unit_pixels(self, encoded: EncoderCall, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pixels of the units (see :meth:`units`) of a tower's input: per size of tiles or frames ``[N, h, w, d]``
        float32, and ``[N, h * w, u]`` long, their patches, counted tile by tile."""
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
        """The input patch at each place of a tower's sequence, ``[patches]`` long; None if the order is that of the
        input."""
        return None

    # --- groups of pictures -----------------------------------------------------------------------------------
    #: dimension of the tower's outputs along which groups of pictures follow each other
    joins_along: ClassVar[int] = 0

    @property
    def frames_a_size(self) -> int:
        """Frames of a clip in each of :meth:`tower_sizes`."""
        return 1

    def tower_sizes(self, given: Mapping[str, Any]) -> list[int]:
        """Sizes of all pictures, tiles or frames, relative to each other, in the arguments of a tower's forward; by default
        tiles of one size along the first dimension of tensors."""
        return [1] * max(len(x) for x in given.values() if isinstance(x, Tensor) and x.dim() > 2)

    def tower_part(self, given: Mapping[str, Any], sizes: Sequence[int], begin: int, end: int) -> dict[str, Any]:
        """The arguments for the pictures, tiles or frames from number ``begin`` to before ``end``."""
        return {
            name: x[begin:end] if isinstance(x, Tensor) and x.dim() and len(x) == len(sizes) else x
            for name, x in given.items()
        }

    def features(self, output: Any) -> list[Tensor]:
        """The features ``[..., D]`` in the ``output`` of ``get_image_features`` or ``get_video_features``."""
        features = output.pooler_output
        return [features] if isinstance(features, Tensor) else list(features)
