"""The attention function of language models: it reads the cache with the reader that the forward has.

Readers are in :mod:`.readers`. While mmaccel shapes a forward, the one for stored keys builds the mask from where every stored
key came from, lets runs choose keys, and lets them see queries and keys when the layer has attended.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...core.precision import in_attention_dtype
from .attention_patch import AttentionKind, base_function
from .call import current
from .readers import Attention, read_given, reader_of


def text_attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of one layer, as transformers calls it; on top of implementation ``base``."""
    call, number = current(), getattr(module, "layer_idx", None)
    if (call is None or number is None) and indices is None:
        return base_function(base, module)(module, query, key, value, attention_mask, scaling=scaling, **options)
    query, key, value = in_attention_dtype(query, key, value)
    window = options["sliding_window"] if "sliding_window" in options else None
    given = Attention(base, module, query, key, value, attention_mask, scaling, options, window, indices)
    return read_given(call, number, given) if call is None or number is None else reader_of(call)(call, number, given)


TEXT = AttentionKind("text", text_attention)
