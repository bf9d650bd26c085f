"""Methods in front of a vision tower or inside it, one a file."""
