"""One call of one accelerated model."""
