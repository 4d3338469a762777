"""Observe accesses to files."""
