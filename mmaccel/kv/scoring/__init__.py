"""What cache policies share: the attention received by keys, chunks of neighbouring keys, copies of keys."""
