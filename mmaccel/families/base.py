"""Base class of family adapters: all that the library knows of one model family."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..core.layout import Layout, Modality, Picture, Tile
from ..errors import UnsupportedError
from .language import INDEXED, LanguageModel, has_latents
from .tower import EncoderCall, ModelTowers

#: why tokens cannot merge in towers of which several layers are read
JOINED = "is read behind several layers, whose tokens must be the same"
#: why layers cannot read parts of a prompt apart where some have windows
WINDOWS = "has sliding windows, which count places of the whole prompt"
#: the same where an indexer chooses what a token reads, which also keeps dropped ones from coming back
CHOOSES = "has an indexer, which chooses among all keys up to a token"
#: the same for prompts whose tokens look ahead, which also keeps dropped ones from coming back
BOTH_WAYS = "lets tokens of a prompt attend to each other both ways"
#: text models whose RoPE turns neighbours instead of halves, leaves layers or channels out, differs between layers, comes
#: before norms, or turns a part that heads share
_OTHER_ROPE = (
    "cohere",
    "cohere2",
    "cohere_compass_text",
    "deepseek_v3",
    "dots3_note_text",
    "ernie4_5_vl_moe_text",
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "hunyuan_vl_text",
    "lfm3",
    "mistral4",
    "mistral_large4_text",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "smollm3",
    "step3p5",
)
_TURN = re.compile(r"\bassistant\s*:\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Continued:
    """Positions of a kept cache that a call continues.

    seen : tokens seen. offset, ahead : ``[B]`` long, see :class:`mmaccel.kv.cache.CacheState`.
    """

    seen: int
    offset: Tensor
    ahead: Tensor | None


class Call(Protocol):
    """Protocol of the model call that is running."""

    def continued(self, cache: Any = None) -> Continued | None:
        """The kept cache that the call continues (``cache`` if the caller knows it), or None."""


#: a function that makes the replacement of an instance's method: (original, getter of the call) -> replacement
Wrapper = Callable[[Callable[..., Any], Callable[[], Call | None]], Callable[..., Any]]


@dataclass(frozen=True)
class Facts:
    """Entry of a family in the table of families.

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
    """A configuration without a model: its adapter knows prompts, pictures and numbers of layers, but no modules."""

    config: Any
    model: None = None


class Family(LanguageModel, ModelTowers):
    """Base adapter, made for LLaVA-like models: one tower of equal square tiles and one text model behind it.

    Parameters
    ----------
    model : the ``...ForConditionalGeneration`` model, or a :class:`Description` of one.
    processor : its processor, for families whose prompt cannot be understood without the tokenizer.
    """

    #: ``config.model_type`` of the models it serves
    model_types: ClassVar[tuple[str, ...]]
    #: ``config.model_type`` of heads that draft for these models, see :class:`mmaccel.runtime.decoding.head_draft.HeadDraft`
    heads: ClassVar[tuple[str, ...]] = ()
    #: where lists show it, among those of the same place by name
    place: ClassVar[int] = 1000
    facts: ClassVar[Facts] = Facts()
    #: the attribute of the inner model that is the text model
    text_name: ClassVar[str] = "language_model"
    #: a package beside transformers that its models are built with
    package: ClassVar[str | None] = None
    #: the oldest transformers that lays its models out as they are known here
    since: ClassVar[str] = "5.17"
    ranks: int = 1
    #: whether it is made for reading pages, whose letters take few tokens each
    reads_pages: ClassVar[bool] = False
    #: arguments of the inner model, beside those of the towers, without which the layout is not known
    extra_inputs: ClassVar[tuple[str, ...]] = ()
    #: whether its models are shown sounds
    hears: bool = False
    #: the prompt does not say which tiles or frames belong together; a processor is needed to tell
    needs_processor: ClassVar[bool] = False

    def __init__(self, model: Any, processor: Any = None) -> None:
        self.model, self.processor = model, processor
        self.config, self.inner = model.config, model.model
        self.text: Any = None if self.inner is None else getattr(self.inner, self.text_name)
        self.halves = self.config.text_config.model_type not in _OTHER_ROPE
        self.latent = has_latents(self.config.text_config)
        kinds = getattr(self.config.text_config, "layer_types", None) or ()
        self.indexed = tuple(layer for layer, kind in enumerate(kinds) if kind == INDEXED)
        if "shared" in (getattr(self.config.text_config, "indexer_types", None) or ()):
            self.chosen_above = "has layers that read what the indexer of a layer above chose, by where it is stored"
        self.ranks = int(getattr(model, "_tp_size", None) or 1)
        if len(self.read_layers) > 1:
            self.whole = JOINED
        if self.undivided is None and slides(self.config):
            self.undivided = WINDOWS

    @property
    def cells(self) -> int:
        """Tokens along one side of a square picture or tile."""
        return self.side

    @classmethod
    def of(cls, config: Any) -> type[Family]:
        """The adapter for a configuration, where several families share a model type."""
        return cls

    # --- layout -----------------------------------------------------------------------------------------------
    def token_id(self, modality: Modality) -> int | None:
        """The placeholder id of a modality."""
        given = getattr(self.config, f"{modality}_token_id", None)
        return given if given is not None else getattr(self.config, f"{modality}_token_index", None)

    def visual(self, ids: Tensor) -> Tensor:
        """``[B, S]`` bool: the placeholders in ``ids``."""
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for modality in self.modalities:
            mask |= ids == self.token_id(modality)
        return mask

    def heard(self, ids: Tensor) -> Tensor:
        """``[B, S]`` bool: the placeholders of sounds in ``ids``."""
        return torch.zeros_like(ids, dtype=torch.bool)

    @property
    def sound_tower(self) -> Any:
        """The tower of sounds; None without one."""
        return None

    def to_sounds(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Figures ``[L]`` of what the layers of the sound tower compute, by token of the language model. ``lengths [sounds]``:
        how many frames of features each sound has."""
        return values

    def layout(self, ids: Tensor, valid: Tensor, encoded: Mapping[Modality, EncoderCall]) -> Layout:
        """The layout of a prompt (or of the new part of one). ``ids``, ``valid`` ``[B, S]`` on the CPU.

        Raises
        ------
        UnsupportedError
            If placeholders have no encoded picture in this call, or counts do not match.
        """
        placed = []
        for modality in self.modalities:
            token, output = self.token_id(modality), encoded.get(modality)
            if not bool(((ids == token) & valid).any()):
                continue
            if output is None and any(self.token_id(other) == token for other in encoded):
                continue
            if output is None:
                raise UnsupportedError(
                    f"The prompt has {modality} placeholders, but no {modality} was encoded in this call; pass the pixels "
                    "to the model instead of encoder outputs, and on a second turn only the new tokens and pixels."
                )
            pictures = self.pictures(modality, output, ids)
            if (room := sum(len(tile) for picture in pictures for tile in picture)) < output.tokens:
                raise UnsupportedError(
                    f"{self.name}: the prompt has room for {room} {modality} tokens but the encoded {modality}s make "
                    f"{output.tokens}; pass the pixels that belong to exactly the new tokens of this call."
                )
            placed.append((modality, int(token or 0), pictures))
        return Layout.walk(ids, valid, placed, self.name)

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        """The pictures or clips of this call in feature order, each a list of tiles with its tokens' cells and sources; by
        default square pictures of one tile."""
        size = 1, self.cells, self.cells
        return consecutive([[size]] * (encoded.tokens // self.cells**2))

    def words(self, ids: Tensor) -> str:
        """The question in ``ids [n]``: the first text between special tokens, without "ASSISTANT:" at its end; may be
        empty."""
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

    # --- functions of the model that are wrong with a kept cache ----------------------------------------------
    def wrappers(self) -> list[tuple[Any, str, Wrapper]]:
        """Instance methods to wrap while a model is accelerated: (object, method name, wrapper)."""
        return []


class BothWays(Family):
    """Base of families in whose prompts all tokens of one type attend to each other, if the call has token types."""

    masks_above = True
    no_return = undivided = BOTH_WAYS
    #: the type of these tokens, in the first of :attr:`extra_inputs`
    mutual_type: ClassVar[int]

    def mask_argument(self, real: Tensor | None) -> Tensor:
        """A four-dimensional mask, which models pass through unchanged."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)

    def bidirectional_groups(
        self, ids: Tensor, valid: Tensor, extra_inputs: Mapping[str, Any], seen: int
    ) -> Tensor | None:
        types: Tensor | None = extra_inputs.get(self.extra_inputs[0])
        if types is None:
            return None
        # of all tokens or of the new ones; candidates behind them have type 0
        new = types.cpu()[:, seen if types.shape[1] > ids.shape[1] else 0 :]
        new = functional.pad(new, (0, ids.shape[1] - new.shape[1]))
        return torch.where((new == self.mutual_type) & valid, 0, -1)


def slides(config: Any) -> bool:
    """Whether any layer of the language model has a sliding window."""
    text = config.text_config
    kinds = getattr(text, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None) is not None


def consecutive(sizes: Iterable[Iterable[tuple[int, int, int]]], clips: bool = False) -> list[Picture]:
    """Pictures whose tiles of ``sizes`` (frames, rows, columns) have consecutive sources; of ``clips`` each tile begins the
    next frame."""
    pictures: list[Picture] = []
    offset = 0
    for tiles in sizes:
        pictures.append([])
        for frame, (t, h, w) in enumerate(tiles):
            pictures[-1].append(Tile.raster(t, h, w, offset, frame=frame if clips else 0))
            offset += t * h * w
    return pictures


def clip_frames(encoded: EncoderCall) -> tuple[int, int]:
    """Numbers of clips and of frames a clip in ``pixel_values_videos [clips, frames, ...]``; in transformers 5.17 some
    families name the argument ``pixel_values``."""
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
    """Square rasters, interpolated: ``[N, side * side, ...] -> [N * cells * cells, ...]`` float32."""
    grid = values.reshape(len(values), side, side, -1).permute(0, 3, 1, 2).float()
    grid = functional.interpolate(grid, size=(cells, cells), mode=mode)
    return grid.permute(0, 2, 3, 1).reshape(-1, *values.shape[2:])


def raster_blocks(rows: int, factor: int, columns: int | None = None) -> Tensor:
    """Indices of every ``factor`` x ``factor`` block of a raster, by default a square one: ``[blocks, factor * factor]``
    long."""
    columns = rows if columns is None else columns
    places = torch.arange(rows * columns).view(rows // factor, factor, columns // factor, factor)
    return places.transpose(1, 2).reshape(-1, factor * factor)
