"""Selectors: small networks that score visual tokens as they enter the language model, their files and fingerprints.

``mmaccel distil`` trains them. A selector is a few pre-norm transformer blocks over the visual tokens of a picture or clip. Its
inputs are features (normalised, projected to a small width), the grid cell as sines of (t, row, column), and the score of a
rule; a question-aware one also attends to the words of the question as the language model embeds them, each together with the
word before it. Besides a score it may return a residual for every token, added when others are dropped.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from ..core.files import write_whole
from ..core.shipped_models import beside
from ..errors import MmaccelError, UnsupportedError
from .base import ModelFacts
from .selector_schema import Stamp, read_config, read_weights, refusal, stamp
from .tokens import TokenBatch

CONFIG, WEIGHTS = "selector.json", "selector.safetensors"
#: where a model's folder has its own, and one that does not read the question
FOLDER, BLIND_FOLDER = "selector", "selector-blind"
#: frequencies of the sines of a coordinate between 0 and 1
_FREQUENCIES = 4
#: the most that a shape may have: more than a selector for any language model needs, and built in a moment
_MOST = {"features": 65_536, "width": 8_192, "blocks": 64, "heads": 256}
_PARAMETERS = 1 << 26
#: tensors that identify a model, and how many values of each
_TENSORS, _VALUES = 32, 8
#: relative and absolute difference that the rounding of a dtype may make
_RELATIVE, _ABSOLUTE = 2**-7, 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of a selector.

    features : width of what it reads, that of the language model.
    width : its own, a multiple of ``heads``. blocks : how many. heads : of attention.
    question : whether it reads the question. residual : whether it says what is added to tokens that stay.

    Raises :class:`MmaccelError` if a number is no integer from 1 to the most that is allowed, or there are too many
    parameters.
    """

    features: int
    width: int = 32
    blocks: int = 2
    heads: int = 4
    question: bool = True
    residual: bool = False

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise MmaccelError(f"`{name}` of a selector must be an integer from 1 to {most}, got {value!r:.40}.")
        for name in ("question", "residual"):
            if type(getattr(self, name)) is not bool:
                raise MmaccelError(f"`{name}` of a selector must be true or false, got {getattr(self, name)!r:.40}.")
        if self.width % self.heads:
            raise MmaccelError(
                f"`width` of a selector must be a multiple of `heads`, got {self.width} and {self.heads}."
            )
        if (count := self._weights()) > _PARAMETERS:
            raise MmaccelError(f"A selector may have {_PARAMETERS:,} parameters, and this shape has {count:,}.")

    def _weights(self) -> int:
        """Parameters, biases left out."""
        w, each = self.width, 8 + 4 * self.question
        return w * (self.features * (1 + self.question + self.residual) + w * (self.blocks * each + 2 * self.question))

    def operations(self, tokens: int, words: int = 32) -> float:
        """Multiplications and additions of scoring ``tokens`` of one picture or clip with a question of ``words``."""
        w, d = self.width, self.features
        asked = words * (d * w + 2 * w * w + self.blocks * 2 * w * w) if self.question else 0
        each = d * w + (6 * _FREQUENCIES + 1) * w + self.blocks * 8 * w * w + w
        pairs = self.blocks * 2 * tokens * w
        if self.residual:
            each += w * d
        if self.question:
            each += self.blocks * (2 * w * w + 2 * words * w)
        return 2.0 * (tokens * (each + pairs) + asked)


class Selector(nn.Module):
    """Network that scores visual tokens; :class:`Shape` has its sizes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.enter = nn.Linear(shape.features, shape.width)
        self.place = nn.Linear(6 * _FREQUENCIES, shape.width, bias=False)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.blocks))
        self.score = nn.Linear(shape.width, 1, bias=False)
        self.worth = nn.Linear(1, shape.width, bias=False)
        # all scores are equal before anything is learned
        nn.init.zeros_(self.score.weight)
        self.residual = nn.Linear(shape.width, shape.features) if shape.residual else None
        if self.residual is not None:
            nn.init.zeros_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)
        self.ask = nn.Linear(shape.features, shape.width) if shape.question else None
        self.pair = nn.Linear(2 * shape.width, shape.width) if shape.question else None

    def forward(self, tokens: TokenBatch, worth: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores ``[N, n]`` float32, higher for tokens that should stay, and residuals ``[N, n, D]`` float32, added to
        kept tokens when others are dropped, in the scale of their features, or None; values of padding are meaningless.

        ``features [N, n, D]``, ``cells [N, n, 3]``, ``grid [N, 3]``, ``valid [N, n]``, and of one that reads the question
        ``question [N, q, D]`` and ``question_valid [N, q]``; ``worth [N, n]`` float32, what a rule thinks of the tokens.
        """
        count = tokens.valid.sum(1, keepdim=True).clamp(min=1)
        away = worth - (worth * tokens.valid).sum(1, keepdim=True) / count
        features = tokens.features.masked_fill(~tokens.valid[..., None], 0.0).float()
        x = self.enter(_normed(features)) + self.place(_sines(tokens.cells, tokens.grid)) + self.worth(away[..., None])
        words, there = self._words(tokens)
        for block in self.blocks:
            x = block(x, tokens.valid, words, there)
        x = _normed(x)
        more = None if self.residual is None else self.residual(x) * features.std(-1, keepdim=True)
        return self.score(x)[..., 0], more

    def _words(self, tokens: TokenBatch) -> tuple[Tensor | None, Tensor | None]:
        """Question words for attention, ``[N, 1 + q, w]``: an empty one, then every word joined with the one before it."""
        if self.ask is None or self.pair is None:
            return None, None
        count = len(tokens.features)
        if tokens.question is None or tokens.question_valid is None:
            words, there = tokens.features.new_zeros(count, 0, self.shape.features), tokens.valid[:, :0]
        else:
            words, there = tokens.question, tokens.question_valid
        # before the first word there is nothing, whatever the padding
        words = self.ask(_normed(words.masked_fill(~there[..., None], 0.0))) * there[..., None]
        before = nn.functional.pad(words, (0, 0, 1, 0))[:, : words.shape[1]]
        words = words + self.pair(torch.cat([words, before], dim=-1))
        return nn.functional.pad(words, (0, 0, 1, 0)), nn.functional.pad(there, (1, 0), value=True)

    # --- files ------------------------------------------------------------------------------------------------
    def save(self, folder: str | Path, fingerprint: ModelFingerprint, record: Mapping[str, Any]) -> None:
        """Write weights (float32) and configuration into ``folder``, which is made where it is missing.

        fingerprint : the model that it was trained for.
        record : how it was made and what was measured, for readers.
        """
        from safetensors.torch import save

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: x.detach().float().cpu().contiguous() for name, x in self.state_dict().items()}
        write_whole(folder / WEIGHTS, save(weights))
        config = {"shape": asdict(self.shape), "model": asdict(fingerprint), "record": dict(record)}
        write_whole(folder / CONFIG, json.dumps(config, indent=1).encode() + b"\n")

    @staticmethod
    def load(folder: str | Path, device: torch.device | str = "cpu") -> Selector:
        """The selector of a folder, cached by device and version of its files; do not change it.

        Raises :class:`MmaccelError` if there is none, or a file of it cannot be used: both are checked before anything is
        built.
        """
        path = Path(folder) / WEIGHTS
        shape, _ = described(folder)
        return _loaded(path, stamp(path), shape, torch.device(device))


@functools.lru_cache(maxsize=16)
def _loaded(path: Path, changed: Stamp, shape: Shape, device: torch.device) -> Selector:
    # weights that are not drawn leave the random numbers of the process alone
    with torch.device("meta"):
        selector = Selector(shape)
    weights = read_weights(path, {name: tuple(x.shape) for name, x in selector.state_dict().items()})
    selector.load_state_dict({name: weight.to(device) for name, weight in weights.items()}, assign=True)
    return selector.eval().requires_grad_(False)


def described(folder: str | Path) -> tuple[Shape, ModelFingerprint]:
    """The shape of a selector's folder, and the fingerprint of its model.

    Raises :class:`MmaccelError` if there is no selector, or its ``selector.json`` does not say both.
    """
    path = Path(folder) / CONFIG
    return _described(path, stamp(path))


@functools.lru_cache(maxsize=16)
def _described(path: Path, changed: Stamp) -> tuple[Shape, ModelFingerprint]:
    shape, model = read_config(path, [field.name for field in fields(Shape)], _VALUES)
    try:
        sizes = Shape(**shape)
    except MmaccelError as error:
        raise refusal(path, str(error).rstrip(".")) from error
    if sizes.features != model["width"]:
        raise refusal(
            path, f"it reads features of width {sizes.features} and belongs to a model of width {model['width']}"
        )
    return sizes, ModelFingerprint(**model)


def selector_folder(family: ModelFacts) -> str:
    """The folder ``selector`` beside a model's weights; empty if there is none."""
    name = getattr(getattr(getattr(family, "model", None), "config", None), "_name_or_path", "")
    return _beside(str(name), FOLDER)


def blind_selector_folder(model: str) -> str:
    """The folder ``selector-blind`` beside the weights of a model in the folder ``model``; empty if there is none."""
    return _beside(model, BLIND_FOLDER)


def _beside(model: str, name: str) -> str:
    folder = beside(Path(model), name)
    return str(folder) if model and (folder / CONFIG).is_file() else ""


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class ModelFingerprint:
    """Fingerprint of the model that a selector was trained for.

    family : its name. width : of its language model.
    weights : the first values of some of its tensors; they tell it from others in whatever dtype it is loaded.
    """

    family: str
    width: int
    weights: Mapping[str, list[float]]

    @staticmethod
    def of(family: ModelFacts) -> ModelFingerprint:
        """Fingerprint of a model with weights."""
        known = _weights(family)
        names = sorted(known)
        step = max(1, len(names) // _TENSORS)
        taken = {name: _first(known[name]) for name in names[::step]}
        return ModelFingerprint(family.name, _width(family), taken)

    def check(self, family: ModelFacts, subject: str, remedy: str) -> None:
        """Raise :class:`UnsupportedError` for another model; ``subject`` begins the message, and ``remedy`` ends it.

        Where only the configuration is at hand, family and width are compared. Weights that are quantised, or elsewhere, are
        left out; of a model that has others, at least one must be known.
        """
        width = _width(family)
        if (family.name, width) != (self.family, self.width):
            raise UnsupportedError(
                f"{subject} a {self.family} model of width {self.width}, and this is a {family.name} of width {width}; "
                f"{remedy}."
            )
        known = _weights(family)
        shared = [name for name in self.weights if name in known]
        if known and not shared:
            raise UnsupportedError(
                f"{subject} a model that is known by weights that this one does not have, or has quantised; load the model "
                f"without quantisation, or {remedy}."
            )
        if not all(_same(self.weights[name], _first(known[name])) for name in shared):
            raise UnsupportedError(f"{subject} a model with other weights; {remedy}.")


def _weights(family: ModelFacts) -> dict[str, Tensor]:
    """The tensors of a model that can be compared, by name."""
    tensors: dict[str, Tensor] = family.model.state_dict() if isinstance(family.model, nn.Module) else {}
    return {name: x for name, x in tensors.items() if x.is_floating_point() and not x.is_meta and x.numel() >= _VALUES}


def _first(weight: Tensor) -> list[float]:
    # of a tensor that is spread over processes (tp_plan) each has a part
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    values: list[float] = whole.detach().reshape(-1)[:_VALUES].double().cpu().tolist()
    return values


def _same(values: list[float], others: list[float]) -> bool:
    return all(abs(a - b) <= _RELATIVE * max(abs(a), abs(b)) + _ABSOLUTE for a, b in zip(values, others, strict=True))


def _width(family: ModelFacts) -> int:
    """Width of the language model."""
    return int(family.model.config.get_text_config().hidden_size)


# ---------------------------------------------------------------------------------------------------------- its blocks


class _Block(nn.Module):
    """Pre-norm block: attention to the question, attention to the other tokens, MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        w = shape.width
        self.heads = shape.heads
        self.read = _Attention(w, shape.heads) if shape.question else None
        self.look = _Attention(w, shape.heads)
        self.mlp = nn.Sequential(nn.Linear(w, 2 * w), nn.GELU(), nn.Linear(2 * w, w))

    def forward(self, x: Tensor, valid: Tensor, words: Tensor | None, there: Tensor | None) -> Tensor:
        """``x [N, n, w]``, ``valid [N, n]``, ``words [N, q, w]``, ``there [N, q]``."""
        if self.read is not None and words is not None and there is not None:
            x = x + self.read(_normed(x), words, there)
        normed = _normed(x)
        x = x + self.look(normed, normed, valid)
        added: Tensor = self.mlp(_normed(x))
        return x + added


class _Attention(nn.Module):
    """Multi-head attention of ``x [N, n, w]`` to ``others [N, m, w]`` where ``there [N, m]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, others: Tensor, there: Tensor) -> Tensor:
        """``[N, n, w]``."""

        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        key, value = self.key_value(others).chunk(2, dim=-1)
        # of a unit without a token there is nothing to attend to
        mask = there | ~there.any(1, keepdim=True)
        found = scaled_dot_product_attention(split(self.query(x)), split(key), split(value), mask[:, None, None])
        made: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return made


def _normed(x: Tensor) -> Tensor:
    return layer_norm(x.float(), x.shape[-1:])


def _sines(cells: Tensor, grid: Tensor) -> Tensor:
    """``[N, n, 6 * frequencies]``: sines and cosines of where a token is in its grid; zero for tokens without a cell."""
    share = (cells + 0.5) / grid[:, None].clamp(min=1)
    angles = share[..., None] * torch.pi * 2.0 ** torch.arange(_FREQUENCIES, device=cells.device)
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(2)
    return waves * (cells >= 0).all(-1, keepdim=True)
