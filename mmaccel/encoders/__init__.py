"""What happens in the vision tower: taps for methods that ask, and merging between its layers."""
