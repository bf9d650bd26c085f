"""Cache policies: which keys stay at the end of prefill and while decoding, one policy a file."""
