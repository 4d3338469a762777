"""Checks of hangs and of ranks that end."""
