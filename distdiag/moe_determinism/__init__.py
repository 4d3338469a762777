"""Runs a script twice and compares how it routes tokens to experts."""
