"""Captured decode steps: recorded and replayed, or compiled."""
