"""A look ahead: queries and keys of a layer of the language model before it runs, of a first pass to it, or of a text that a
draft has written behind the prompt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...core.masks import true_last
from ...core.precision import without_autocast
from ...core.transformers_api import Cache, DynamicLayer, cache_argument
from ...kv.index import KeyIndex
from ...method import DraftPolicy, LayerAttention, PreviewMethod
from ...method.results import figures_of
from ..call.call import Call
from ..call.forward import Prompt, rows_at, to_device_packed
from ..call.plan import ModelPlan, PlannedStage
from ..call.runs import TextInputs
from . import draft
from .preview import LayerReached, Preview, TextBehind, Visible


def _attention(
    call: Call[ModelPlan],
    prompt: Prompt,
    layer: int,
    run: Callable[[], Any],
    chosen: Tensor,
    visible: Visible | None = None,
    below: Sequence[int] | None = None,
) -> LayerAttention:
    """The attention of the ``layer`` that ``run`` comes to, over the places ``chosen [B, q]`` of a prompt (-1 padding), on the
    CPU. Keys of earlier turns take no part. For ``visible`` and ``below`` see :class:`.preview.Preview`."""
    preview = _reached(call, layer, run, visible, below)
    assert preview.found is not None
    query, key, scaling = preview.found
    # layers may have heads of different widths
    values = [x.to(key.device).transpose(1, 2).flatten(2) for x in preview.values]
    value = torch.cat(values, dim=-1)[:, None] if values else None
    real, (_, text) = chosen >= 0, prompt.kinds(chosen)
    valid, spoken = (x.bool() for x in to_device_packed(query.device, real, text))
    sees = None
    together = prompt.bidirectional if call.plan.family.is_bidirectional(layer) else None
    if together is not None or not bool(real.all()):
        causal = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool, device=query.device).tril()
        if together is not None:
            (numbers,) = to_device_packed(query.device, together.gather(1, chosen.clamp(min=0)))
            causal = causal | ((numbers[:, None] == numbers[..., None]) & (numbers[..., None] >= 0))
        sees = (causal & valid[:, None] & valid[..., None])[:, None]
    return LayerAttention(query, key, sees, scaling, spoken, value=value)


def _reached(
    call: Call[ModelPlan],
    layer: int,
    run: Callable[[], Any],
    visible: Visible | None = None,
    below: Sequence[int] | None = None,
) -> Preview:
    """The ``layer`` that ``run`` comes to."""
    call.observer = preview = Preview(layer, visible, below)
    try:
        with suppress(LayerReached), torch.no_grad():
            run()
    finally:
        call.observer = None
    if preview.found is None:
        raise RuntimeError(f"layer {layer} was not reached")
    return preview


def own_attention(
    call: Call[ModelPlan], prompt: Prompt, number: int, layer: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
) -> LayerAttention:
    """The attention that a layer is about to pay, ``hidden [B, q, D]`` being its input."""
    return _attention(call, prompt, number, _to_attention(call, layer, hidden, kwargs), prompt.chosen)


def own_query(call: Call[ModelPlan], number: int, layer: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The queries ``[B, Hq, q, D]`` behind RoPE that a layer would have if ``hidden [B, q, D]`` were its input."""
    found = _reached(call, number, _to_attention(call, layer, hidden, kwargs)).found
    assert found is not None
    return found[0]


def _to_attention(
    call: Call[ModelPlan], layer: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
) -> Callable[[], None]:
    """A function that runs the attention of a layer on ``hidden [B, q, D]`` with the arguments ``kwargs``."""
    # layers may be spread over devices, and the input of one is moved to it later
    device = next(layer.parameters()).device
    # some scale queries by their positions
    takes = _arguments_of(type(layer.self_attn))  # type: ignore[arg-type]
    given = kwargs.get("position_ids")
    places = {"position_ids": given.to(device)} if "position_ids" in takes and given is not None else {}
    # others pass their keys on to layers above
    shared: dict[str, Any] = {"shared_kv_states": {}} if "shared_kv_states" in takes else {}
    # and others have no RoPE
    turns = kwargs["position_embeddings"]

    def run() -> None:
        layer.self_attn(  # type: ignore[operator]
            **places,
            **shared,
            hidden_states=call.plan.family.norm_in(layer)(hidden.to(device)),
            position_embeddings=None if turns is None else tuple(x.to(device) for x in turns),
            attention_mask=call.plan.family.mask_argument(None),
        )

    return run


@functools.cache
def _arguments_of(kind: Any) -> frozenset[str]:
    """Names of the arguments of a kind of module."""
    return frozenset(inspect.signature(kind.forward).parameters)


def first_pass(
    call: Call[ModelPlan],
    prompt: Prompt,
    method: PreviewMethod,
    text: TextInputs,
    positions: Tensor,
) -> dict[str, Tensor]:
    """Figures that ``method`` computes from the attention of its layer in a separate pass, by place ``[B, S]``.

    text : embeddings and DeepStack's planes, at all places. positions : ``[..., B, S]``.
    """
    embeds, planes = text.embeds, text.planes
    chosen, padded = prompt.compacted(prompt.total.kept)
    device, (visual, _) = embeds.device, prompt.kinds(chosen)
    at, real, seen, slots = to_device_packed(device, chosen.clamp(min=0), chosen >= 0, visual, prompt.slots(chosen))
    rows = torch.arange(len(at), device=device)[:, None]
    given: dict[str, Any] = {
        "inputs_embeds": rows_at(embeds, at),
        "position_ids": positions[..., rows, at],
        "attention_mask": real if padded else None,
        "use_cache": False,
        **prompt.plan.family.of_tokens(text.arguments, lambda x: x.gather(1, at.to(x.device))),
    }
    if planes:
        spots = true_last(visual.flatten()[None])[0, -int(visual.sum()) :].to(device)
        features = [rows_at(plane, at).flatten(0, 1)[spots] for plane in planes]
        given |= prompt.plan.family.deep_arguments(seen.bool(), features)
    family, visible = prompt.plan.family, None
    if family.masks_above:
        places = chosen.to(device, torch.int32)
        index = KeyIndex(places, padded, prompt.length)

        def visible(number: int, window: int | None) -> Tensor | None:
            return index.mask(places, window, prompt.bidirectional if family.is_bidirectional(number) else None)

    below = None if method.below is None else [int(layer) for layer in method.below]
    attention = _attention(call, prompt, int(method.layer), lambda: family.text(**given), chosen, visible, below)
    with without_autocast(device):
        looked = figures_of(method, attention)
    return {name: figures.to(device).gather(1, slots) for name, figures in looked.items()}


class _Passing(DynamicLayer):
    """Read-only stub of a layer: it has ``seen`` a number of tokens, and stores no new ones."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values alone."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are made by who attends."""
        return query_length, self.seen


def text_behind(
    call: Call[ModelPlan], prompt: Prompt, stage: PlannedStage[DraftPolicy], positions: Tensor | None
) -> TextBehind:
    """Queries, keys and values of the text that the draft of ``stage`` writes behind a prompt, whose keys the
    cache holds; nothing of it is stored. ``positions`` are those that the text model was given."""
    state, family, device = prompt.state, prompt.plan.family, prompt.device
    assert state is not None
    model, batch = prompt.plan.drafts[stage.number], len(prompt.layout.valid)
    written, valid = draft.write(call, stage.method, model, batch, prompt.length, device)
    end = prompt.seen + prompt.length
    at = torch.arange(end, end + written.shape[1], device=device).expand_as(written)
    behind = TextBehind(state.layers, family.stored_from, at.masked_fill(~valid, -1))
    run_behind(call, prompt, behind, at, positions, {"input_ids": written})
    return behind


def own_text_behind(
    call: Call[ModelPlan], prompt: Prompt, count: int, hidden: Tensor, positions: Tensor | None
) -> TextBehind:
    """Queries, keys and values of the ``count`` tokens that the model itself writes behind a prompt, greedily; nothing of it is
    stored. ``hidden [B, D]`` is the last hidden state of the last token of each row; for ``positions`` see
    :func:`text_behind`."""
    state, family, device = prompt.state, prompt.plan.family, prompt.device
    assert state is not None
    end = prompt.seen + prompt.length
    written = hidden.new_empty(len(hidden), 0, dtype=torch.long)
    while True:
        with torch.no_grad():
            following = family.logits(hidden).argmax(-1).to(device)
        written = torch.cat([written.to(device), following[:, None]], dim=1)
        at = torch.arange(end, end + written.shape[1], device=device).expand_as(written)
        whole = written.shape[1] == count
        places = at.masked_fill(~draft.unended(family, written), -1) if whole else at
        behind = TextBehind(state.layers, family.stored_from, places)
        hidden = run_behind(call, prompt, behind, at, positions, {"input_ids": written})[:, -1]
        if whole:
            return behind


def surprise(prompt: Prompt, hidden: Tensor) -> Tensor:
    """``[B, S]`` float32 by place of a prompt: ``-log p`` of each text token under the model, of each visual token its mean
    over what the model expected there; the highest of the row where the token before is not there. ``hidden [B, q, D]`` are
    the last hidden states of the tokens that are left."""
    family = prompt.plan.family
    # what stands behind each token that is left
    behind = prompt.chosen + 1
    known = (prompt.chosen >= 0) & (behind < prompt.length)
    behind = behind.masked_fill(~known, 0)
    behind, words, visual, known = to_device_packed(
        hidden.device, behind, prompt.ids.gather(1, behind), prompt.layout.visual.gather(1, behind), known
    )
    found = hidden.new_full((len(hidden), prompt.length), -torch.inf, dtype=torch.float32)
    step = max(1, (1 << 24) // (len(hidden) * family.text.config.vocab_size))
    with torch.no_grad():
        for start in range(0, hidden.shape[1], step):
            part = slice(start, start + step)
            logs = family.logits(hidden[:, part]).float().log_softmax(-1)
            own = -logs.gather(2, words[:, part, None])[..., 0]
            mean = -(logs.exp() * logs).nan_to_num(0.0).sum(-1)
            value = torch.where(visual[:, part].bool(), mean, own).masked_fill(~known[:, part].bool(), -torch.inf)
            found = found.scatter_reduce(1, behind[:, part], value, "amax")
    most = found.amax(1, keepdim=True).nan_to_num(neginf=0.0)
    return torch.where(found == -torch.inf, most, found)


def run_behind(
    call: Call[ModelPlan],
    prompt: Prompt,
    behind: TextBehind,
    at: Tensor,
    positions: Tensor | None,
    given: dict[str, Tensor],
) -> Tensor:
    """Let the text model read a text at the places ``at [B, n]`` behind a prompt, without storing it; ``behind`` observes its
    attention. ``positions`` are those that the text model was given for the prompt, ``given`` the ids or embeddings. Returns
    the last hidden states ``[B, n, D]``.
    """
    state, family, device = prompt.state, prompt.plan.family, prompt.device
    assert state is not None and state.positions.offset is not None
    offset, ahead = state.positions.offset, state.positions.ahead
    undo = [layer.snapshot() for layer in state.recurrent]
    try:
        # an answer goes on behind all frames
        begins = offset.to(device) - (0 if ahead is None else ahead.to(device))
        places = at - begins[:, None]
        if positions is not None and positions.dim() == 3:
            places = places.expand(len(positions), -1, -1)
        states = iter(state.recurrent)
        end = prompt.seen + prompt.length
        cache = Cache([next(states) if n in family.recurrent else _Passing(end) for n in range(family.depth)])
        call.observer = behind
        with torch.no_grad():
            hidden: Tensor = family.text(
                **given,
                position_ids=places,
                attention_mask=family.mask_argument(None),
                use_cache=False,
                **cache_argument(cache),
            ).last_hidden_state
            return hidden
    finally:
        call.observer = None
        for restore in undo:
            restore()
