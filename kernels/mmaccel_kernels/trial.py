"""Every operation once, on a few numbers, to see which path it takes on a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .alike import keep_alike
from .append import append
from .best import best_units
from .chosen import ChosenKeys, chosen_attention
from .compact import compact
from .decode import decode_attention
from .dpp import greedy_dpp
from .importance import importance
from .launch import Obstacle, failure, obstacle
from .loki import low_rank_logits
from .matching import best_match
from .maxmin import max_min
from .pack import quantise
from .pages import Format
from .quest import page_bounds
from .votes import votes


def trials(device: torch.device) -> dict[str, Obstacle | None]:
    """Operation -> what keeps its kernel from running on ``device``; None where it has been built and has run.

    The first time this takes as long as the compiler does, some seconds.
    """
    found = {}
    for operation, use in _USES.items():
        if (keeps := obstacle(device)) is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use(device)
            keeps = failure(operation, device)
        found[operation.__name__] = keeps
    return found


def _vectors(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.eye(16, device=device)[None]
    return x, torch.ones(1, 16, dtype=torch.bool, device=device), torch.ones(1, dtype=torch.long, device=device)


def _heads(device: torch.device) -> Tensor:
    return torch.ones(1, 2, 16, 64, dtype=torch.float16, device=device)


def _best_match(device: torch.device) -> None:
    best_match(*[_vectors(device)[0]] * 2)


def _max_min(device: torch.device) -> None:
    max_min(*_vectors(device), most=1)


def _greedy_dpp(device: torch.device) -> None:
    x, valid, count = _vectors(device)
    greedy_dpp(x, torch.ones(1, 16, device=device), valid, count, most=1)


def _importance(device: torch.device) -> None:
    importance(_heads(device), _heads(device))


def _compact(device: torch.device) -> None:
    compact(_heads(device), _heads(device), torch.ones(1, 2, 16, dtype=torch.bool, device=device))


def _quantise(device: torch.device) -> None:
    start, count = (
        torch.zeros(1, dtype=torch.long, device=device),
        torch.full((1,), 16, dtype=torch.int32, device=device),
    )
    quantise(_heads(device)[0, 0], start, count, Format("int4", "channel", 16), page=16, tile=16)


def _decode_attention(device: torch.device) -> None:
    decode_attention(_heads(device)[:, :, :1], _heads(device), _heads(device))


def _append(device: torch.device) -> None:
    new = _heads(device)[:, :, :1]
    append(_heads(device), _heads(device), new, new, _vectors(device)[2])


def _page_bounds(device: torch.device) -> None:
    page_bounds(_heads(device)[:, :, 0], _heads(device).repeat(1, 1, 1, 2))


def _low_rank_logits(device: torch.device) -> None:
    low_rank_logits(_heads(device)[:, :, 0], _heads(device)[..., :16, :].mT, _heads(device)[..., :16])


def _votes(device: torch.device) -> None:
    votes(_heads(device)[:, :, 0], _heads(device), torch.zeros(1, 1, 4, dtype=torch.int32, device=device))


def _keep_alike(device: torch.device) -> None:
    units = torch.zeros(1, 1, 4, dtype=torch.int32, device=device)
    keep_alike(_heads(device)[:, :, 0], units, _heads(device)[:, :, 0].flatten(1).float(), units, 0.9)


def _best_units(device: torch.device) -> None:
    best_units(_heads(device)[..., 0], torch.ones(1, 1, dtype=torch.int32, device=device), 1)


def _chosen_attention(device: torch.device) -> None:
    always, units, picked, counts = (
        torch.zeros(1, 1, *shape, dtype=torch.int32, device=device) for shape in ((1,), (1, 4), (1,), ())
    )
    chosen = ChosenKeys(always, units, picked, counts, 16)
    chosen_attention(_heads(device)[:, :, :1], _heads(device), _heads(device), chosen)


_USES: dict[Callable[..., object], Callable[[torch.device], None]] = {
    best_match: _best_match,
    max_min: _max_min,
    greedy_dpp: _greedy_dpp,
    importance: _importance,
    compact: _compact,
    quantise: _quantise,
    decode_attention: _decode_attention,
    append: _append,
    page_bounds: _page_bounds,
    low_rank_logits: _low_rank_logits,
    votes: _votes,
    keep_alike: _keep_alike,
    best_units: _best_units,
    chosen_attention: _chosen_attention,
}

__all__ = ["trials"]
