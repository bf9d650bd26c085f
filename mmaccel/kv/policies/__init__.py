"""Cache policies: which keys stay at the end of prefill and while decoding, one method a file."""

from . import (
    a2sf,
    dycoke_cache,
    elastic_cache,
    h2o,
    infinipot_v,
    keydiff,
    knorm,
    lagkv,
    mustdrop_cache,
    observed_attention,
    snapkv,
    streaming_llm,
    tova,
    vatp,
    vl_cache,
)

__all__ = [
    "a2sf",
    "dycoke_cache",
    "elastic_cache",
    "h2o",
    "infinipot_v",
    "keydiff",
    "knorm",
    "lagkv",
    "mustdrop_cache",
    "observed_attention",
    "snapkv",
    "streaming_llm",
    "tova",
    "vatp",
    "vl_cache",
]
