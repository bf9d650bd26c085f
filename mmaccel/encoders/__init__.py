"""What happens in the vision tower: taps for methods that ask, merging inside its layers, encoders that stand alone."""
