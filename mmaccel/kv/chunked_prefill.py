"""The rows of a cache while the layers of the language model read a prompt in chunks, see :mod:`mmaccel.core.chunks`."""

import torch
from torch import Tensor

from ..core.chunks import Join
from .cache import CacheState
from .forward_info import Phase
from .index import KeyIndex


def spread(state: CacheState, rows: Tensor) -> None:
    """Give every chunk a row: what was stored of the row ``rows [R]`` says, and is known of it."""
    for layer in state.layers:
        layer.batch_select_indices(rows)


def join(state: CacheState, below: int, how: Join, phase: Phase) -> None:
    """Let chunks join whose tokens of this forward the first ``below`` layers have stored; what was stored before is the same
    in all chunks of a prompt.

    phase : the tokens of this forward that are left.
    """
    (_, width), stored, new = how.shape, state.layers[:below], []
    for layer in stored:
        new.append((layer.keys[:, :, -width:], layer.values[:, :, -width:]))
        layer.keys, layer.values = layer.keys[:, :, :-width], layer.values[:, :, :-width]
    spread(state, how.left)
    renewed: dict[KeyIndex, KeyIndex] = {}
    on = {device: how.to(device) for device in {keys.device for keys, _ in new}}
    for layer in stored:
        # those of one layer are let go of before the next one's are made
        keys, values = (on[x.device].apply(x.transpose(1, 2)).transpose(1, 2) for x in new.pop(0))
        layer.keys, layer.values = torch.cat([layer.keys, keys], dim=2), torch.cat([layer.values, values], dim=2)
        old = layer.index
        layer.index = renewed[old] = renewed[old] if old in renewed else _renewed(old, width, phase)


def _renewed(old: KeyIndex, width: int, phase: Phase) -> KeyIndex:
    """An index whose newest ``width`` slots are those of a phase."""
    before, places = old.index[..., :-width], phase.places.to(old.index)
    if old.of_heads:
        places = places[:, None].expand(-1, before.shape[1], -1)
    lengths = None if before.shape[-1] else phase.lengths[:, None]
    padded = phase.padded or (old.padded and lengths is None)
    return KeyIndex(torch.cat([before, places], dim=-1), padded, old.upto, lengths)
