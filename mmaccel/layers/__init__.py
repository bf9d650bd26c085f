"""Pruning and merging between the layers of the language model, one method a file."""
