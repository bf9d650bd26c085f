"""Decoding with drafts: a model verifies tokens that something cheaper proposes, and answers as it would without them."""
