"""Checks of replicated state."""
