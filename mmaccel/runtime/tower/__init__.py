"""The vision tower: taps on it, merging, pruning and reuse inside it."""
