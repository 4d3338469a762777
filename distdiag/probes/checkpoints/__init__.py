"""Observe what is loaded and saved."""
