"""Methods on pixels, before the processor, one a file."""
