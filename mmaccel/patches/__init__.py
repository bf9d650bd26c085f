"""Methods that leave patches out of a vision tower, one a file."""
