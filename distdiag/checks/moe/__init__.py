"""Checks of experts and their routing."""
