"""Draft models that read a prompt: their attention chooses the visual tokens of the large model, their text the keys that
stay."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.masks import true_last
from ...core.precision import without_autocast
from ...errors import MmaccelError, UnsupportedError, first_line
from ...families import Family
from ...families.draft import check_free
from ...method import Drafted, DraftMethod, LayerAttention
from ...method.results import check_count, check_numbers, check_tensor
from ..call.attention import TEXT
from ..call.attention_patch import AttentionPatch
from ..call.call import Call

#: tensors that a call may be given which are not those of the prompt
_OWN = ("position_ids", "cache_position", "labels", "logits_to_keep", "inputs_embeds", "attention_mask")
#: a draft reads one prompt at a time: its attention is patched, and it keeps the positions of the prompt that it read last
_one = threading.Lock()


class Watched:
    """Observes the attention of every layer of a draft, step by step, with a method.

    valid : ``[B, S]`` bool, the prompt tokens that are no padding.
    """

    def __init__(self, method: DraftMethod, valid: Tensor, first: int) -> None:
        self.method, self.valid, self.first = method, valid, first
        self.steps: list[Tensor] = []
        last = true_last(valid)[:, -method.rows :]
        # left to right, also where padding is between them
        self._rows, self._real = last, valid.gather(1, last)

    def begin(self) -> None:
        """A step begins."""
        self.steps.append(torch.zeros(self.valid.shape, device=self.valid.device))

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> None:
        """Called by the attention function of every layer; a draft makes its own masks."""
        if number < self.first:
            return
        prompt, behind = self.valid.shape[1], len(self.steps) - 1
        valid = self.valid.to(query.device)
        known = pad(valid, (0, behind), value=True)
        # windows of a draft store the newest keys only
        key = pad(key, (0, 0, known.shape[1] - key.shape[2], 0))
        if behind:
            visible = known[:, None, None]
        else:
            rows, real = self._rows.to(query.device), self._real.to(query.device)
            query = query.gather(2, rows[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
            causal = torch.arange(prompt, device=query.device) <= rows[..., None]
            visible = (causal & valid[:, None] & real[..., None])[:, None]
        attention = LayerAttention(query, key, visible, scaling, torch.zeros_like(valid))
        with without_autocast(query.device):
            seen = self.method.see(attention, prompt)
        check_numbers(
            self.method, "see()", check_tensor(self.method, "see()", seen, "float", valid.shape, query), valid
        )
        seen = seen.to(self.steps[-1].device)
        join = torch.maximum if self.method.joined == "max" else torch.add
        self.steps[-1] = join(self.steps[-1], seen)


def read(call: Call[Any], method: DraftMethod, draft: Family, batch: int, length: int) -> Tensor:
    """``[B, S]`` float32: attention of the draft to the last ``S = length`` tokens of the prompt that the call was given;
    ``B = batch`` may be a multiple of the prompts, of which each is then followed several times. Refuses a draft that makes
    another number of tokens of the pictures, or is accelerated or trained by now."""
    inputs, order = _inputs(call, draft, length)
    first = check_count(method, "begin()", method.begin(draft.depth), 0, draft.depth - 1)
    watched = Watched(method, inputs["attention_mask"].bool(), first)
    with _one:
        patch = AttentionPatch(draft.text, TEXT)
        hook = draft.model.register_forward_pre_hook(lambda *_: watched.begin())
        call.observer = watched
        try:
            written = _written(method, draft, inputs)
        finally:
            call.observer = None
            hook.remove()
            patch.off()
    # of the text before each step: the last token is seen by none
    before_end = unended(draft, written[:, : len(watched.steps) - 1])
    with without_autocast(before_end.device):
        steps = torch.stack(watched.steps, 1)
        seen = method.finalize(steps, pad(before_end, (1, 0), value=True))
    check_tensor(method, "finalize()", seen, "float", (len(steps), steps.shape[2]), steps)
    check_numbers(method, "finalize()", seen, watched.valid.to(seen.device))
    seen = torch.zeros_like(seen).scatter(1, order, seen)
    return seen.repeat_interleave(batch // len(seen), 0)


def write(
    call: Call[Any], method: Drafted, draft: Family, batch: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Text that the draft writes behind the last ``length`` tokens of the call's prompt, ``[B, n]`` long with ``n``
    at most the method's ``lookahead``, and which of it comes before the end of the answer, ``[B, n]`` bool; both on ``device``.
    For ``batch`` see :func:`read`."""
    inputs, _ = _inputs(call, draft, length)
    with _one:
        written = _written(method, draft, inputs)
    before_end = unended(draft, written)
    return tuple(x.to(device).repeat_interleave(batch // len(x), 0) for x in (written, before_end))  # type: ignore[return-value]


def _inputs(call: Call[Any], draft: Family, length: int) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of the draft from those of the call, on its device, padding in front; and the place of each of its tokens among
    those of the call, ``[b, S]`` long."""
    check_free(draft)
    given, device = call.inputs.given, next(draft.inner.parameters()).device
    ids, mask = given["input_ids"][:, -length:], given.get("attention_mask")
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -length:].bool()
    inputs = {name: x for name, x in given.items() if isinstance(x, Tensor) and name not in _OWN}
    # who writes behind a prompt needs its padding in front
    order = true_last(valid)
    inputs |= {"input_ids": ids, "attention_mask": valid.long()}
    by_token = given["input_ids"].shape, ids.shape
    inputs = {name: x[:, -length:].gather(1, order) if x.shape in by_token else x for name, x in inputs.items()}
    return {name: x.to(device) for name, x in inputs.items()}, order.to(device)


def _written(method: Drafted, draft: Family, inputs: dict[str, Tensor]) -> Tensor:
    """The tokens that the draft writes, ``[b, n]`` long."""
    try:
        written: Tensor = draft.model.generate(**inputs, max_new_tokens=method.lookahead, do_sample=False, num_beams=1)
    except MmaccelError:
        raise
    except ValueError as error:
        raise UnsupportedError(
            f"{method.name}: the draft cannot read this prompt ({first_line(error)}); name one of the same series."
        ) from error
    return written[:, inputs["input_ids"].shape[1] :]


def unended(draft: Family, written: Tensor) -> Tensor:
    """``[b, n]`` bool: the tokens of ``written [b, n]`` that come before the end of the answer."""
    ends = draft.model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [-1 if ends is None else ends], device=written.device)
    return (~torch.isin(written, ends)).cumprod(1).bool()
