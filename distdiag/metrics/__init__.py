"""Curves of a run, read from whatever it left, and what they tell."""
