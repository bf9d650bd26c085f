"""Methods inside a vision tower, one a file."""
