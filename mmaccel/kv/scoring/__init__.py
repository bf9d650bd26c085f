"""Parts of cache policies: the attention received by keys, chunks of neighbouring keys, copies of keys."""
