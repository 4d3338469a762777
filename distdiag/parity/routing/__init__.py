"""Compares how two runs of one script route tokens to experts."""
