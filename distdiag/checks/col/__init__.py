"""Checks of collectives."""
