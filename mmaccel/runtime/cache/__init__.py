"""The KV cache: evicting, packing, and reading chosen keys."""
