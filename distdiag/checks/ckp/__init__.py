"""Checks of checkpoints."""
