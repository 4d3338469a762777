"""Checks of sharded models."""
