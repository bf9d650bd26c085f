"""Merging between the encoder and the language model, in space or over time, one method a file."""
