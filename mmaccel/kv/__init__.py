"""The KV cache: logical and physical lengths, eviction per layer and per head, policies."""
