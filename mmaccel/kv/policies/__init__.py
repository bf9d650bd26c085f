"""Cache policies: which keys stay at the end of prefill and while decoding, one method a file."""
