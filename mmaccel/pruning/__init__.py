"""Pruning between the encoder and the language model, one method a file."""
