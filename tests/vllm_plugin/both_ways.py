"""Attention of pictures in both directions on a CPU, where vLLM's own has none: what its attention on GPUs computes for prompts
that are read whole, with the ranges that its model runner gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

#: options of an engine whose prompts are read whole
WHOLE = {"enable_prefix_caching": False, "max_num_batched_tokens": 4096}


def patch(monkeypatch: pytest.MonkeyPatch, clamped: bool = False, everywhere: bool = True) -> list[tuple[int, int]]:
    """Patch vLLM's attention, and return the list to which the ranges of prompts are added.

    clamped : whether layers with a window do not see earlier tokens beyond it.
    everywhere : whether layers without one see later tokens.
    """
    build, attend = CPUAttentionMetadataBuilder.build, CPUAttentionBackendImpl.forward
    seen: list[tuple[int, int]] = []

    @functools.wraps(build)
    def build_with_ranges(self: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        made = build(self, prefix, common, *args, **kwargs)
        made.ranges = common.mm_req_doc_ranges or {}
        return made

    @functools.wraps(attend)
    def attend_both_ways(
        self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, **others: Any
    ) -> Any:
        out = attend(self, layer, query, key, value, cache, metadata, output, **others)
        starts = [] if metadata is None else metadata.query_start_loc.tolist()
        for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
            ranges = metadata.ranges.get(row, [])
            length = int(metadata.seq_lens[row])
            if stop - start == 1 or not ranges or (self.sliding_window < 0 and not everywhere):
                continue
            assert stop - start == length, "the prompt is read in parts"
            seen.extend(one for one in ranges if one not in seen)
            place = torch.arange(length)
            behind = place[:, None] - place
            window = length if self.sliding_window < 0 else self.sliding_window
            mask = (behind >= 0) & (behind < window)
            for first, last in ranges:
                inside = (place >= first) & (place <= last)
                mask |= inside[:, None] & inside & ((behind < window) if clamped else True)
            q, k, v = (x[start:stop].reshape(length, -1, self.head_size).transpose(0, 1) for x in (query, key, value))
            made = scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=self.scale, enable_gqa=True)
            output[start:stop] = made[0].transpose(0, 1).reshape(output[start:stop].shape)
        return out

    # by which Gemma 4 divides what it encodes, and of which a CPU knows nothing
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (2**33, 2**33))
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", build_with_ranges)
    monkeypatch.setattr(CPUAttentionBackendImpl, "forward", attend_both_ways)
    return seen
