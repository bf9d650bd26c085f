"""The KV cache: logical and physical lengths; policies that score, budgets that are split, keys evicted or merged."""
