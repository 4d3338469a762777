"""Stands in for VeOmni where it is not installed: only what plans need."""
