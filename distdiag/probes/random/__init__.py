"""Observe the generators of random numbers."""
