"""Between layers of the language model: chunked prefill, tokens that come back."""
