"""Observe models: their parameters, wrappers and sharding."""
