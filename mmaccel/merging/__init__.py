"""Merging between the encoder and the language model: several tokens become one, in space or over time, one method a file."""
