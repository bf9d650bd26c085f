"""The stages of a recipe in one forward of the text model: each runs itself by five optional moments.

A *run* is the work of one mechanism in one forward. The hooks on the text model and the attention function call the moments of
all runs in order and know no kind of method:

    before_text        the text model is about to run: reduce its prompt, note facts about it
    before_layer       a layer is about to run: drop or bring back tokens
    keys_to_read       a layer is about to attend: choose the keys that it reads
    after_attention    a layer has attended: observe, evict, pack
    finish             the last layer has run

A new kind of method is a new run in a file of its own, and one line in :mod:`mmaccel.runtime.build`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from mmaccel_kernels.chosen import ChosenKeys
from mmaccel_kernels.pages import Pages
from torch import Tensor

from ...core.precision import without_autocast
from ...core.reduction import Reduction
from ...kv.key_bias import Earlier
from .forward import Forward, Piece

R = TypeVar("R", bound="Run")


@dataclass
class TextInputs:
    """The inputs of the text model before it runs.

    arguments : those of the call, which runs change. valid : ``[B, q]`` bool on the CPU, which new tokens are no padding; None
        if all are tokens.
    new_turn : whether this is the first forward of a call of ``generate``.
    embeds, planes : of a prompt, the embeddings ``[B, S, D]`` and DeepStack features ``[B, S, D]`` of all places, reduced in
        full length; empty before it is reduced.
    """

    arguments: dict[str, Any]
    valid: Tensor | None = None
    new_turn: bool = False
    planes: list[Tensor] = field(default_factory=list)

    @property
    def embeds(self) -> Tensor:
        """``[B, S, D]``; ``[B, q, D]`` once the reduced prompt was written."""
        embeds: Tensor = self.arguments["inputs_embeds"]
        return embeds

    @embeds.setter
    def embeds(self, embeds: Tensor) -> None:
        self.arguments["inputs_embeds"] = embeds

    def substitute(self, reduction: Reduction) -> None:
        """Put the values of a reduction into embeddings and DeepStack features, in full length."""
        self.embeds = reduction.substitute(self.embeds)
        self.planes = [reduction.substitute(plane) for plane in self.planes]


@dataclass
class LayerAttended:
    """The attention of one layer in one forward.

    number : of the layer, as the cache counts. query : ``[B, Hq, q, D]``. key, value : ``[B, Hkv, K, D]``.
    visible : ``[B, 1 or Hkv, q, K]`` bool; None where each query sees all keys up to its own.
    window : how far back the layer's sliding window reaches, in places; None without one.
    as_stored : whether the layer is read as it is stored, so that ``key`` has the new keys only.
    plain : whether the output is that of plain sdpa attention over ``key`` and ``value``.
    """

    number: int
    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor | None
    scaling: float
    window: int | None
    as_stored: bool = False
    plain: bool = False


@dataclass
class KeysToRead:
    """The keys that a layer reads in this forward.

    chosen : those of every head. pages : the same as packed pages, where the layer is read as it is stored.
    output : ``[B, q, Hq, D]``, the output of the attention, where the run had to compute it.
    grown : whether the run has put more keys into the layer, all of which are read.
    """

    chosen: ChosenKeys | None = None
    pages: Pages | None = None
    output: Tensor | None = None
    grown: bool = False


class Run:
    """The work of one mechanism in one forward of the text model; every moment is optional.

    reads_keys : whether it looks at stored keys in this forward, so that layers are unpacked before they are read.
    changes_cache : whether ``before_text`` may change the cache.
    runs_model : whether ``before_text`` or ``finish`` runs a model, which keeps the caller's autocast.
    by_piece : whether ``keys_to_read`` and ``after_attention`` are called for each piece of a forward; else the latter for the
        last, with the queries of all.
    last_queries : how many of these queries it looks at; None for all.
    hidden : ``[B, q, D]``, the output of the text model in ``finish``, for runs that run a model.
    """

    hidden: Tensor | None = None

    reads_keys: bool = False
    last_queries: int | None = 0
    by_piece: ClassVar[bool] = False
    changes_cache: ClassVar[bool] = True
    runs_model: ClassVar[bool] = False

    @property
    def sees_attention(self) -> bool:
        """Whether it looks at the queries or keys of layers, or changes what they store."""
        mine = type(self)
        moments = mine.keys_to_read is not Run.keys_to_read or mine.after_attention is not Run.after_attention
        return moments or self.reads_keys

    def before_text(self, text: TextInputs) -> None:
        """Called before the text model runs."""

    def before_layer(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Called before layer ``number`` of the language model, with its input ``hidden [B, q, D]`` and the caller's
        ``arguments`` (see :meth:`Forward.layer_arguments`); returns the input that the layer is given."""
        return hidden

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """Called before a layer attends; returns the keys that it reads, None for everything."""
        return None

    def after_attention(self, layer: LayerAttended) -> None:
        """Called when the attention of a layer has run."""

    def finish(self) -> None:
        """Called when the last layer has run."""


class Runs:
    """The runs of one forward, in their order.

    attended : layers whose attention has run through our function, counted in every piece. pieces : how many there are.
    piece : the one that is being run; None where the forward is not cut.
    readers, observers : those that choose keys, and those that look at the attention of layers; most decode steps have none.
    """

    def __init__(self, forward: Forward, runs: Iterable[Run]) -> None:
        self.forward = forward
        self._runs = list(runs)
        self.attended, self.pieces = 0, 1
        self.piece: Piece | None = None
        self._whole = forward
        #: by layer, the queries of earlier pieces
        self._queries: dict[int, list[Tensor]] = {}
        self._changed = False
        self._before_layer, self.readers, self.observers = (
            [run for run in self._runs if getattr(type(run), moment) is not getattr(Run, moment)]
            for moment in ("before_layer", "keys_to_read", "after_attention")
        )

    @property
    def read_keys(self) -> bool:
        """Whether any run looks at stored keys in this forward."""
        return any(run.reads_keys for run in self._runs)

    @property
    def between_layers(self) -> bool:
        """Whether layers are given other inputs or arguments than the caller's."""
        return bool(self._before_layer or self.forward.arguments)

    def of(self, kind: type[R]) -> R | None:
        """The run of this class, or None."""
        return next((run for run in self._runs if isinstance(run, kind)), None)

    def before_text(self, text: TextInputs) -> None:
        """Let all runs prepare the forward."""
        for run in self._runs:
            self._changed |= run.changes_cache
            with self._precision(run):
                run.before_text(text)

    def before_layer(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """The input of layer ``number``."""
        for run in self._before_layer:
            hidden = run.before_layer(number, hidden, arguments)
        return hidden

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """The keys that a layer reads; None for everything."""
        keys = None
        for run in self.readers:
            if self.piece is None or run.by_piece:
                with without_autocast(layer.query.device):
                    keys = keys or run.keys_to_read(layer)
        return keys

    def after_attention(self, layer: LayerAttended) -> None:
        """Let all runs see the attention of a layer."""
        with without_autocast(layer.query.device):
            whole = self._joined(layer)
            for run in self.observers:
                seen = layer if run.by_piece else whole
                if seen is not None:
                    run.after_attention(seen)

    def note_rotations(self, cos: Tensor, sin: Tensor, before: Earlier) -> None:
        """Note the rotations of the tokens that enter the layers, see :attr:`mmaccel.kv.forward_info.ForwardInfo.rotations`;
        those of all pieces of a forward are joined."""
        incoming = self._whole.incoming
        if self.piece is not None and self.piece.begin > 0 and incoming.rotations is not None:
            earlier_cos, earlier_sin, before = incoming.rotations
            cos, sin = torch.cat([earlier_cos, cos], dim=1), torch.cat([earlier_sin, sin], dim=1)
        incoming.rotations = cos, sin, before

    def begin(self, piece: Piece | None) -> None:
        """Begin the next piece of the forward, or end the last one (None)."""
        self.piece, self.forward = piece, self._whole if piece is None else piece.forward
        self.pieces += piece is not None and piece.begin > 0

    def _joined(self, layer: LayerAttended) -> LayerAttended | None:
        """The attention of the last piece with the last queries of all that runs look at; None for the pieces before."""
        piece = self.piece
        if piece is None:
            return layer
        counts = [run.last_queries for run in self.observers if not run.by_piece]
        if not any(count != 0 for count in counts):
            return layer if piece.last else None
        queries = [*self._queries.pop(layer.number, ()), layer.query]
        if None not in counts:
            most = max(count for count in counts if count is not None)
            queries = [torch.cat(queries, dim=2)[:, :, -most:].clone()]
        if piece.last:
            return replace(layer, query=torch.cat(queries, dim=2))
        self._queries[layer.number] = queries
        return None

    def finish(self, hidden: Tensor) -> None:
        """Let all runs finish: the last layer has run, and the text model returns ``hidden [B, q, D]``."""
        for run in self._runs:
            if run.runs_model:
                run.hidden = hidden
            with self._precision(run):
                run.finish()

    def _precision(self, run: Run) -> AbstractContextManager[None]:
        return nullcontext() if run.runs_model else without_autocast(self.forward.device)

    def finalize(self, whole: bool) -> None:
        """End the forward in the cache, as a ``whole`` or broken off."""
        if self._changed and self.forward.state is not None:
            self.forward.state.finalize(whole)
