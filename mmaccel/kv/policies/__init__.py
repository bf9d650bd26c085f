"""Cache policies: which keys stay at the end of prefill, one method a file."""

from . import snapkv, streaming_llm

__all__ = ["snapkv", "streaming_llm"]
