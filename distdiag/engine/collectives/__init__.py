"""Aligns collectives, messages and the creation of process groups."""
