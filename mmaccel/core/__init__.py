"""What visual tokens are, where they stand, and what becomes of them."""
