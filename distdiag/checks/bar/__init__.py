"""Checks of missing barriers."""
