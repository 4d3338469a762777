"""Observe the routing of tokens to experts."""
