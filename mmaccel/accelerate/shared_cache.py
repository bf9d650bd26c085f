"""A cache of one row that all rows of a batch continue: many questions about one picture, whose keys are stored once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.transformers_api import Cache, cache_argument, cache_in, cache_names
from ..errors import MmaccelError
from ..kv.cache import CacheState, adopt, cache_with, check_plain, state_of
from ..runtime.call.plan import ModelPlan

GenerateArguments = tuple[tuple[Any, ...], dict[str, Any]]


def share_cache(
    plan: ModelPlan, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Any = None
) -> tuple[GenerateArguments, Callable[[Any], Any]]:
    """The arguments of ``generate`` where a cache of one row is given to a batch: every row gets it, without copies, and the
    cache itself stays as it is. Padding in front of a prompt moves behind the part that the cache has seen.

    asked : the argument ``mmaccel=``.

    Returns the arguments, and a function that puts the caller's ids in front of the output; all other calls pass unchanged.

    Raises
    ------
    MmaccelError
        If the rows do not begin with the same tokens, as many as the cache has seen.
    """
    ids, cache = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs")), cache_in(kwargs)
    if (
        asked is False
        or not plan.active
        or cache is None
        or not isinstance(ids, Tensor)
        or ids.dim() != 2
        or len(ids) < 2
    ):
        return (args, kwargs), lambda output: output
    seen = cache.get_seq_length()
    if not seen or _rows(cache) != 1:
        return (args, kwargs), lambda output: output
    mask = kwargs.get("attention_mask")
    before = torch.zeros_like(ids[:, 0]) if mask is None else (mask.cumsum(1) == 0).sum(1).to(ids.device)
    length, at = ids.shape[1], torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if int(before.max()) + seen >= length:
        raise MmaccelError(
            f"The cache has seen {seen} tokens, and every row must continue them, but `input_ids` has {length} with padding; "
            "give the whole prompts."
        )
    before = before[:, None]
    order = torch.where(at < seen, at + before, torch.where(at < seen + before, at - seen, at))
    moved = {name: _gathered(x, order) for name, x in kwargs.items() if _by_token(x, ids)}
    prompts = ids.gather(1, order)
    if not torch.equal(prompts[:, :seen], prompts[:1, :seen].expand(len(ids), -1)):
        raise MmaccelError(
            f"The cache of one row has seen {seen} tokens, and the rows of `input_ids` must all begin with them; give "
            "prompts that differ behind them alone, or no cache."
        )
    kwargs = {name: x for name, x in kwargs.items() if name not in cache_names()} | moved
    if args:
        args = prompts, *args[1:]
    rows = torch.zeros(len(ids), dtype=torch.long)
    kwargs |= cache_argument(cache_with(_state(plan, cache).selected(rows)))

    def with_ids(output: Any) -> Any:
        sequences = output if isinstance(output, Tensor) else output.sequences
        sequences[:, :length] = ids.repeat_interleave(len(sequences) // len(ids), dim=0)
        return output

    return (args, kwargs), with_ids


def _rows(cache: Cache) -> int:
    """Rows of a cache that is not empty."""
    state = state_of(cache)
    if state is not None:
        return len(state.layers[0].index.index)
    return next((len(layer.keys) for layer in cache.layers if getattr(layer, "keys", None) is not None), 0)


def _state(plan: ModelPlan, cache: Cache) -> CacheState:
    """The state of a cache; of one that was filled with text alone, that of a copy."""
    state = state_of(cache)
    if state is not None:
        state.shared.check_whole()
        return state
    check_plain(cache)
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    state, family = adopt(twin, plan.family.depth, None, plan.family.recurrent, plan.family.latent), plan.family
    if (offset := state.positions.offset) is not None:
        state.positions.offset = offset - family.first_position
    return state


def _by_token(x: Any, ids: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dim() > 1 and x.shape[-2:] == ids.shape and not x.is_floating_point()


def _gathered(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(-1, order.to(x.device).expand_as(x))
