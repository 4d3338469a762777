"""Puts the routing of tokens to experts side by side."""
