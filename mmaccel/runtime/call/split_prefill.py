"""Split prefill: the text model runs over what is left of a prompt in chunks of so many tokens.

What is left is known before the text model runs, so that a chunk may end anywhere, inside a picture too: its tokens attend to
the stored keys of earlier chunks and to each other, as they do in one piece. Only tokens that attend to each other both ways
stay together. (:mod:`mmaccel.runtime.layers.chunked_prefill` is another mechanism, whose chunks are rows that do not see each
other.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...kv.forward_info import ForwardInfo, Phase
from .call import current
from .forward import Forward, Piece, Prompt
from .mlp_pieces import MlpPieces
from .plan import ModelPlan
from .runs import Run, Runs, TextInputs

#: outputs of a text model that hold the same numbers however its input is cut
_JOINED = ("last_hidden_state", "hidden_states")
#: those that do not
_CUT = ("attentions", "router_logits")


class SplitPrefill(Run):
    """Cut one forward into pieces of ``size`` tokens at most.

    pieces : in their order; empty where the forward has no more tokens than one of them. now : the one that is being run.
    evicts : whether keys are evicted between pieces, so that no layer ever holds those of all.
    """

    changes_cache = False

    def __init__(self, forward: Forward, size: int) -> None:
        self.forward, self.size = forward, size
        self.pieces: list[Piece] = []
        self.now: Piece | None = None
        self.evicts = False

    def before_text(self, text: TextInputs) -> None:
        """Cut the tokens that are left."""
        forward = self.forward
        _, phase = forward.incoming.phases[0]
        rows, width = phase.places.shape
        if width <= self.size:
            return
        if forward.state is None:
            raise no_cache(self.size)
        chosen = torch.arange(width).expand(rows, -1) if phase.chosen is None else phase.chosen
        ends = _ends(self.size, chosen, forward.bidirectional if isinstance(forward, Prompt) else None)
        widest = max(end - begin for begin, end in zip([0, *ends], ends, strict=False))
        note = f"chunk={self.size}: the text model read {width} tokens in {len(ends)} chunks"
        if widest > self.size:
            note += f" of up to {widest}, since tokens that attend to each other both ways stay together"
        forward.stats.notes.append(note)
        if len(ends) > 1:
            self.pieces = _pieces(forward, phase, chosen, ends, self.evicts)

    def run(self, runs: Runs, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output of the text model ``original`` for all tokens, which it is given piece by piece."""
        forward, outputs = self.forward, []
        assert forward.state is not None
        shared = forward.state.shared
        for piece in self.pieces:
            self.now = piece
            runs.begin(piece)
            shared.incoming = piece.forward.incoming
            outputs.append(original(**_arguments(piece, arguments)))
        runs.begin(None)
        shared.incoming = forward.incoming
        return self._join(outputs)

    def _join(self, outputs: list[Any]) -> Any:
        whole = outputs[-1]
        for name in _CUT:
            if getattr(whole, name, None):
                raise UnsupportedError(
                    f"chunk={self.size} gives {name} of each chunk with other keys, which do not join; leave out "
                    f"output_{name}, or chunk."
                )
        for name in _JOINED:
            parts: list[Any] = [getattr(output, name, None) for output in outputs]
            if isinstance(parts[0], Tensor):
                setattr(whole, name, torch.cat(parts, dim=1))
            elif parts[0] is not None:
                setattr(whole, name, tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))
        return whole


def no_cache(size: int | None) -> UnsupportedError:
    """Error of a prompt in chunks without a cache."""
    return UnsupportedError(
        f"chunk={size} reads the keys of earlier chunks from a cache, and use_cache=False makes none; leave out "
        "use_cache=False, or chunk."
    )


def split_forward(plan: ModelPlan, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of the text model: it is run piece by piece where the runs of a forward say so, and its MLPs in pieces
    where they would take too much memory."""
    text = plan.family.text
    mlps = MlpPieces(list(text.layers), getattr(text.config, "num_experts_per_tok", None) or 1)

    def bounded(*args: Any, **kwargs: Any) -> Any:
        embeds: Tensor = kwargs["inputs_embeds"]
        with mlps.over(embeds.shape[:2].numel(), embeds.dtype, embeds.device):
            return original(*args, **kwargs)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = current(plan)
        runs = None if call is None or call.observer is not None else call.text.runs
        split = None if runs is None else runs.of(SplitPrefill)
        if runs is None or split is None or not split.pieces:
            # without a call of a function, of which a step has as few as it can
            embeds = kwargs["inputs_embeds"] if "inputs_embeds" in kwargs else None
            prompt = embeds is not None and embeds.shape[1] > 1
            return bounded(*args, **kwargs) if prompt else original(*args, **kwargs)
        return split.run(runs, bounded, kwargs)

    return forward


def _ends(size: int, chosen: Tensor, groups: Tensor | None) -> list[int]:
    """The slot behind each piece of the tokens at places ``chosen [B, q]``; tokens of one of the ``groups [B, S]`` stay in one
    piece."""
    width = chosen.shape[1]
    cut = torch.ones(width + 1, dtype=torch.bool)
    if groups is not None:
        own = groups.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
        for row in own:
            for group in row[row >= 0].unique():
                slots = (row == group).nonzero()
                cut[int(slots[0]) + 1 : int(slots[-1]) + 1] = False
    ends: list[int] = []
    begin = 0
    while begin < width:
        within = cut[begin + 1 : begin + size + 1].nonzero()
        later = cut[begin + 1 :].nonzero()
        begin += 1 + int(within[-1] if len(within) else later[0])
        ends.append(begin)
    return ends


def _pieces(forward: Forward, phase: Phase, chosen: Tensor, ends: list[int], evicts: bool) -> list[Piece]:
    """The pieces that end at the slots ``ends``. A piece has seen the places up to that of its last token, and the last piece
    all of the forward."""
    pieces, seen, begin, incoming = [], forward.seen, 0, forward.incoming
    expected = incoming.expected_new_tokens
    for end in ends:
        last = end == ends[-1]
        upto = forward.seen + (forward.length if last else int(chosen[:, :end].max()) + 1)
        mine = chosen[:, begin:end]
        own = Phase(phase.places[:, begin:end], bool((mine < 0).any()), mine, phase.bidirectional_groups)
        following = ends[-1] - end
        room = expected if expected is None else expected + following
        info = ForwardInfo(seen, upto - seen, False, [(0, own)], weights=incoming.weights, expected_new_tokens=room)
        info.following = 0 if evicts else following
        info.first_weights, info.by_distance = incoming.first_weights, incoming.by_distance
        info.merged, info.by_heads = incoming.merged, incoming.by_heads
        pieces.append(Piece(replace(forward, incoming=info), mine, begin, end, last))
        seen, begin = upto, end
    return pieces


def _arguments(piece: Piece, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the text model for one piece, of those ``given`` for all tokens."""
    family, slots = piece.forward.plan.family, slice(piece.begin, piece.end)
    mine = {
        **given,
        "inputs_embeds": given["inputs_embeds"][:, slots],
        "attention_mask": family.mask_argument(piece.forward.real),
    }
    if isinstance(positions := given.get("position_ids"), Tensor):
        mine["position_ids"] = positions[..., slots]
    mine |= family.of_tokens(given, lambda x: x[:, slots])
    if (deep := family.deep_features(given)) is not None:
        visual, features = deep
        inside = torch.zeros_like(visual)
        inside[:, slots] = True
        rows = inside[visual]
        mine |= family.deep_arguments(visual[:, slots], [x[rows.to(x.device)] for x in features])
    return mine
