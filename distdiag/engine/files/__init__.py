"""Finds accesses to files that nothing orders."""
