"""Larger models for mmaccel: ``mmaccel.load("mini-llava-deep")`` finds them in this package by their folder's name."""
